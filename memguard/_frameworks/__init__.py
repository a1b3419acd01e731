"""Caps on each framework's own allocator: one adapter per framework; `base.py` defines the contract."""

"""Adapters that cap each framework's own allocator, one folder per framework; `base.py` defines their base class."""

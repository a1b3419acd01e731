"""Adapters of PyTorch (own allocator, shared pool), with its array exchange, suspension gates and doctor probe."""

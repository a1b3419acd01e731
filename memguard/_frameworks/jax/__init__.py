"""Adapters of JAX (own allocator, shared pool), with its array exchange, suspension gates and doctor probe."""

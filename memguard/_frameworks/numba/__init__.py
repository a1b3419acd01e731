"""Numba: the adapter, the capped memory manager, and the pool of freed blocks."""

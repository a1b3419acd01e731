"""Numba: the adapter, the memory manager, and the pool of freed blocks."""

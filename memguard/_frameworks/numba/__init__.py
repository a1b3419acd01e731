"""Numba: the adapter, the capped memory manager, and its pool of freed blocks."""

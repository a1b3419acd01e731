"""Numba: its adapter, its memory manager, and the pool of what it has freed."""

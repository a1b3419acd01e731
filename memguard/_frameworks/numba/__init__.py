"""Numba: its adapter, its memory manager, and the pool of its freed blocks."""

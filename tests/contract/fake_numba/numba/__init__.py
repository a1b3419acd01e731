"""Numba as far as memguard sees it: `numba.cuda` with its driver, its memory managers and their pending frees."""

__version__ = "0"

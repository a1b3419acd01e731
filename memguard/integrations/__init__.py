"""Budgets for programs that others start: torchrun, Dask, Ray. Nothing here is imported by memguard itself."""

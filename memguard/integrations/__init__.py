"""Budgets for processes that a launcher starts: torchrun, MPI, Dask, Ray. memguard itself imports none of these."""

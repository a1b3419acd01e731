"""Frameworks that exist only as numbers: models of the real allocators on simulated GPUs."""

"""Simulated frameworks: models of the real allocators on simulated GPUs."""

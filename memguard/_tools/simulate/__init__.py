"""Allocation traces: recorded under a real budget, replayed on simulated GPUs."""

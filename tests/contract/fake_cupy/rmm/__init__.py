"""A small model of RMM in plain Python: resources on top of each other, one for each device."""

from rmm import mr

__all__ = ["mr"]
__version__ = "26.10.00"

"""A small model of JAX in plain Python, for tests without a GPU: options, and a CUDA backend that starts once."""

from jax import errors, numpy
from jax._src.config import config

__all__ = ["config", "errors", "numpy"]
__version__ = "0.10.2"

"""The tables of gates of every framework that has one, those included that have no budget."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from memguard._frameworks.gated import Gates

PLACES = (
    "torch.gates",
    "cupy.gates",
    "pycuda.gates",
    "numba.gates",
    "jax.gates",
    "tensorflow.gates",
    "cuda_python_gates",
)
"""Modules of `memguard._frameworks`, each with its `GATES`."""


def tables() -> Iterator[Gates]:
    """Each table. They are data: loading one imports no framework."""
    for place in PLACES:
        yield from importlib.import_module(f"memguard._frameworks.{place}").GATES

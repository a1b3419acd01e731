"""The frameworks that arrays are handed between, one line each. A class is loaded when an array of it turns up."""

from __future__ import annotations

import difflib
import functools
import importlib
import sys
from typing import Any

from memguard.errors import CannotShare
from memguard.exchange.arrays.base import Arrays

_CLASSES = {
    "torch": "memguard.exchange.arrays.torch:Torch",
    "tensorflow": "memguard.exchange.arrays.tensorflow:TensorFlow",
    "cupy": "memguard.exchange.arrays.cupy:CuPy",
    "jax": "memguard.exchange.arrays.jax:JAX",
    "pycuda": "memguard.exchange.arrays.pycuda:PyCUDA",
    "numba": "memguard.exchange.arrays.numba:Numba",
    "numpy": "memguard.exchange.arrays.numpy:NumPy",
}
_PROTOCOLS = (
    "memguard.exchange.arrays.attached:OtherProcess",
    "memguard.exchange.arrays.protocols:ArrayInterface",
    "memguard.exchange.arrays.protocols:DLPack",
)
NAMES = tuple(_CLASSES)
_ROOTS = {"jaxlib": "jax", "cupyx": "cupy", "keras": "tensorflow", "numba_cuda": "numba"}


@functools.cache
def by_name(name: str) -> Arrays:
    """The framework's arrays. ValueError for a name that is none of them."""
    if name not in _CLASSES:
        near = difflib.get_close_matches(str(name), NAMES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(NAMES)}"
        raise ValueError(f"no framework {name!r} to hand an array to\n    fix: {hint}")
    return _load(_CLASSES[name])


def of(x: Any) -> Arrays:
    """Whose array `x` is. Raises CannotShare where it is nobody's."""
    kind: Any = type(x)
    for name in _named_by(kind):
        found = by_name(name)
        if found.module in sys.modules and found.owns(x):
            return found
    for protocol in _PROTOCOLS:
        found = _load(protocol)
        if found.owns(x):
            return found
    raise CannotShare(
        type(x).__module__.partition(".")[0],
        None,
        f"{type(x).__qualname__} is no array of {', '.join(NAMES)}, and has neither __cuda_array_interface__ nor "
        "__dlpack__",
        "hand over one of its arrays",
    )


@functools.lru_cache(maxsize=1024)
def _named_by(cls: Any) -> tuple[str, ...]:
    """The frameworks that the class or one it is derived from comes from: no other one is asked, or imported."""
    roots = (base.__module__.partition(".")[0] for base in cls.__mro__)
    return tuple(name for name in dict.fromkeys(_ROOTS.get(root, root) for root in roots) if name in _CLASSES)


@functools.cache
def _load(path: str) -> Arrays:
    module, _, cls = path.partition(":")
    made: Arrays = getattr(importlib.import_module(module), cls)()
    return made

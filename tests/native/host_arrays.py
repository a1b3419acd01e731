"""Arrays of torch, TensorFlow, JAX and NumPy in host memory, for the code of the tests of the exchange."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tensorflow as tf
import torch

from memguard._frameworks.arrays import lifetimes
from memguard._frameworks.arrays.view import DTYPES
from memguard.errors import CannotShare
from memguard.exchange import last_route, to

__all__ = [
    "DTYPES",
    "NAMES",
    "PAIRS",
    "CannotShare",
    "aligned",
    "gc",
    "itertools",
    "jax",
    "jnp",
    "last_route",
    "lifetimes",
    "make",
    "ml_dtypes",
    "np",
    "outcome",
    "pointer",
    "refused",
    "tf",
    "to",
    "torch",
    "values",
]

gc.freeze()  # so that collections skip the objects of the frameworks
NAMES = ("torch", "tensorflow", "jax", "numpy")
PAIRS = list(itertools.permutations(NAMES, 2))


def aligned(values: Any, past: int = 0) -> Any:
    """The values in memory `past` bytes behind a multiple of 64."""
    values = np.asarray(values)
    room = np.empty(values.nbytes + 128 + past, np.uint8)
    start = -room.ctypes.data % 64 + past
    made = room[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    made[...] = values
    return made


def make(framework: str, values: Any) -> Any:
    """An array of the framework with these values, in memory of its own."""
    values = np.asarray(values)
    if framework == "torch":
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
        dtype = getattr(torch, str(values.dtype))
        if values.dtype.itemsize == 16:
            return torch.from_numpy(values.copy()).clone()
        plain = np.ascontiguousarray(values).view(f"i{values.dtype.itemsize}" if values.dtype.itemsize > 1 else "u1")
        return torch.from_numpy(plain.copy()).clone().to(bits[values.dtype.itemsize]).view(dtype).reshape(values.shape)
    if framework == "tensorflow":
        return tf.identity(tf.constant(values))
    if framework == "jax":
        return jnp.array(values, copy=True)
    return aligned(values)


def pointer(x: Any) -> int:
    """Its address, as its own framework says."""
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    if isinstance(x, jax.Array):
        return int(x.unsafe_buffer_pointer())
    if isinstance(x, tf.Tensor):
        if x.dtype == tf.bool or not x.shape.num_elements():
            return int(x._numpy().ctypes.data)
        return torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(x)).data_ptr()
    return int(x.ctypes.data)


def values(x: Any) -> Any:
    """Its values as a NumPy array, byte for byte."""
    if isinstance(x, torch.Tensor):
        x = x.detach()
        name = str(x.dtype).removeprefix("torch.")
        if hasattr(ml_dtypes, name) and name not in ("int4", "uint4"):
            size = x.element_size()
            return x.contiguous().view(torch.uint8 if size == 1 else torch.int16).numpy().view(getattr(ml_dtypes, name))
        return x.numpy()
    return x.numpy() if isinstance(x, tf.Tensor) else np.asarray(x)


def refused(call: Callable[[], object]) -> list[Any]:
    """Producer, consumer, reason, remedy of the CannotShare that a call raises, and how many arrays it left shared."""
    before = set(lifetimes._open)
    try:
        call()
    except CannotShare as error:
        return [error.producer, error.consumer, error.reason, error.remedy, len(set(lifetimes._open) - before)]
    raise AssertionError("it was not refused")


def outcome(x: Any, framework: str, expected: Any, **how: Any) -> str:
    """`shared` or `copied`, with the values checked; the reason where it is refused."""
    try:
        y = to(x, framework, **how)
    except CannotShare as error:
        return error.reason
    assert tuple(y.shape) == tuple(expected.shape), (y.shape, expected.shape)
    assert str(y.dtype).removeprefix("torch.").removeprefix("<dtype: '").removesuffix("'>") == str(expected.dtype)
    assert np.array(values(y)).tobytes() == np.array(expected).tobytes(), (values(y), expected)
    route = last_route()
    assert route is not None
    if expected.size:
        assert (pointer(y) == pointer(x)) == (route.way == "shared"), route
    return route.way

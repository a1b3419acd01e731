"""Checks the arguments of `to` other than the array, before it reads or creates an array."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from typing import Any

from memguard._devices import streams
from memguard._frameworks.arrays.base import Arrays
from memguard._frameworks.specs import SPECS

_MOST = 1 << 16
"""Exclusive upper limit of CUDA ordinals."""


def is_ordinal(device: Any) -> bool:
    """Whether `device` is a valid CUDA ordinal."""
    return isinstance(device, int) and not isinstance(device, bool) and 0 <= device < _MOST


def check(copy: Any, device: Any, consumer: Arrays) -> None:
    """Raises ValueError for an invalid `copy` or `device`, ImportError if the framework is not installed."""
    if copy is not None and copy is not True and copy is not False:
        raise ValueError(f"copy must be None, True or False, found {copy!r}\n    fix: copy=True, or leave it out")
    if device is not None and not is_ordinal(device):
        raise ValueError(
            f"device={device!r} is not the number of a GPU\n"
            "    fix: CUDA's ordinal, as device=0; without it the array stays on its GPU"
        )
    if device is not None and not consumer.traits.on_gpu:
        raise ValueError(f"{consumer.traits.title} never holds GPU memory\n    fix: leave device out")
    if consumer.module not in sys.modules and importlib.util.find_spec(consumer.module) is None:
        spec = SPECS.get(consumer.name)
        package = spec.install if spec is not None else consumer.module
        raise ImportError(f"{consumer.traits.title} is not installed\n    fix: pip install {shlex.quote(package)}")


def stream_handle(stream: Any, consumer: Arrays) -> int | None:
    """The CUDA handle of a stream object of any library. Raises ValueError if `stream` is not a stream."""
    if stream is None:
        return None
    if not consumer.takes_stream:
        raise ValueError(f"{consumer.name} chooses its streams itself: stream= is not possible\n    fix: leave it out")
    found = _handle(stream)
    if found is None or isinstance(stream, bool) or found < 0:
        raise ValueError(
            f"{stream!r} is not a stream\n    fix: a stream object of the framework, or its handle as an int"
        )
    return streams.StreamHandle(found, stream)


def _handle(stream: Any) -> int | None:
    if hasattr(stream, "__index__"):
        return int(stream)
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    if any(word in type(stream).__name__.lower() for word in ("event", "memory", "pointer", "array")):
        return None  # objects of these classes may have the attributes below
    for name in ("cuda_stream", "ptr", "handle"):  # the names in PyTorch, in CuPy, and in PyCUDA and Numba
        value = getattr(stream, name, None)
        if value is not None:
            return int(getattr(value, "value", value) or 0)
    return None

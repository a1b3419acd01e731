"""What `to` may be given beside the array: checked before anything is read or made."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from memguard._devices import streams
from memguard.exchange.adapters.base import Arrays

_MOST = 1 << 16
"""More GPUs than any process sees."""


def check(copy: Any, device: Any, taker: Arrays) -> None:
    """Raises ValueError for what `copy` and `device` cannot be, ImportError where the framework is not installed."""
    if copy is not None and copy is not True and copy is not False:
        raise ValueError(f"copy={copy!r} is none of None, True and False\n    fix: copy=True, or leave it out")
    if device is not None and (isinstance(device, bool) or not isinstance(device, int) or not 0 <= device < _MOST):
        raise ValueError(
            f"device={device!r} is no number of a GPU\n"
            "    fix: CUDA's ordinal, as device=0; without it the array stays on its GPU"
        )
    if device is not None and not taker.taker.on_gpu:
        raise ValueError(f"{taker.taker.title} never holds GPU memory\n    fix: leave device out")
    if taker.module not in sys.modules and importlib.util.find_spec(taker.module) is None:
        raise ImportError(f"{taker.taker.title} is not installed\n    fix: pip install {taker.module}")


def handle(stream: Any, taker: Arrays) -> int | None:
    """The handle of a stream, whoever made it. Raises ValueError for what is none."""
    if stream is None:
        return None
    if not taker.told:
        raise ValueError(f"{taker.name} chooses its streams itself: stream= cannot be given\n    fix: leave it out")
    found = _found(stream)
    if found is None or isinstance(stream, bool) or found < 0:
        raise ValueError(f"{stream!r} is no stream\n    fix: a stream of the framework's, or its handle as an int")
    return streams.Handle(found, stream)


def _found(stream: Any) -> int | None:
    if hasattr(stream, "__index__"):
        return int(stream)
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    if any(word in type(stream).__name__.lower() for word in ("event", "memory", "pointer", "array")):
        return None  # they have such attributes too
    for name in ("cuda_stream", "ptr", "handle"):  # PyTorch's, CuPy's, PyCUDA's and Numba's
        value = getattr(stream, name, None)
        if value is not None:
            return int(getattr(value, "value", value) or 0)
    return None

"""Reads PyCUDA's contexts, makes `make_context` return the primary context, and watches PyCUDA's streams.

PyCUDA keeps a stack of contexts for each thread. PyCUDA aborts the process if a context is still on the stack at the
thread's end or at exit: code that pushes a context must pop it.

PyCUDA creates streams with `Stream(flags)`, but its pools ignore streams: they reuse a block while a kernel still uses
it. So a consumer on another framework's stream must know which earlier work may still run, also on non-blocking
streams, for which the legacy default stream does not wait.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from memguard._base.logs import log as _log
from memguard._frameworks.replacements import Replacements

_AUTOINIT = ("pycuda.autoinit", "pycuda.gl.autoinit")


def current_context(drv: Any) -> Any:
    """The thread's current context; None if there is none, or before `cuInit`."""
    try:
        return drv.Context.get_current()
    except drv.Error:
        return None


def serve_by_primary(drv: Any, replaced: Replacements) -> None:
    """Make `Device.make_context`, and with it `pycuda.autoinit`, return the primary context."""

    def make_context(device: Any, flags: int = 0) -> Any:
        # PyCUDA then shares this context with the other frameworks.
        if flags:
            _log.info("pycuda: the flags %s of make_context are ignored: the primary context is shared", flags)
        context = device.retain_primary_context()
        context.push()
        return context

    replaced.put(drv.Device, "make_context", lambda _: make_context)


def automatic_made() -> bool:
    """Whether the program has imported a PyCUDA module that creates a context."""
    first, second = _AUTOINIT
    return first in sys.modules or second in sys.modules


def automatic(ordinal: int) -> dict[int, str]:
    """The contexts that PyCUDA's modules created on the GPU at their import: the module's name by handle."""
    drv: Any = sys.modules.get("pycuda.driver")
    found = {}
    for name in _AUTOINIT if drv is not None else ():
        module = sys.modules.get(name)
        context, device = getattr(module, "context", None), getattr(module, "device", None)
        if context is not None and device == drv.Device(ordinal):
            found[int(context.handle)] = name
    return found


def pushed() -> int | None:
    """The handle of PyCUDA's current context on this thread, which may differ from the driver's current one; None if
    there is none."""
    drv: Any = sys.modules.get("pycuda.driver")
    kind = getattr(drv, "Context", None)
    if kind is None:
        return None
    try:
        context = kind.get_current()
    except drv.Error:  # before `cuInit`
        return None
    return None if context is None else int(context.handle)


_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_watched: Replacements | None = None
_non_blocking = True


def watch_streams(drv: Any, replaced: Replacements, *, used: bool) -> None:
    """Detect the creation of non-blocking streams until `replaced` is undone. `used`: a non-blocking stream may exist
    already."""
    global _watched, _non_blocking

    def init(original: Callable[..., None]) -> Callable[..., None]:
        def call(stream: Any, flags: int = 0) -> None:
            global _non_blocking
            original(stream, flags)
            if flags & _NON_BLOCKING:
                _non_blocking = True

        return call

    _watched, _non_blocking = None, used
    if hasattr(drv, "Stream") and replaced.put(drv.Stream, "__init__", init):
        _watched = replaced


def may_use_non_blocking_streams() -> bool:
    """Whether PyCUDA may have work on a non-blocking stream. True if unknown."""
    return _non_blocking or _watched is None or not _watched.active

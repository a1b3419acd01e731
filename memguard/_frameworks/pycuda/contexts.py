"""Reads PyCUDA's contexts, makes `make_context` return the primary context, and detects non-blocking streams.

PyCUDA keeps a stack of contexts for each thread, and aborts the process if a context is still on the stack when the
thread or the process ends: code that pushes a context must pop it.

PyCUDA's pools ignore streams: they reuse a freed block while a kernel on some stream may still use it. A framework that
uses such a block on its own stream must first wait for that earlier work. The legacy default stream waits for all
streams except those created with `Stream(CU_STREAM_NON_BLOCKING)`, so this module detects whether such streams exist.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from memguard._base.logs import log as _log
from memguard._frameworks.replacements import Replacements

_AUTOINIT = ("pycuda.autoinit", "pycuda.gl.autoinit")


def current_context(drv: Any) -> Any:
    """PyCUDA's current context object on this thread; None without a context, or before `cuInit`."""
    try:
        return drv.Context.get_current()
    except drv.Error:
        return None


def serve_by_primary(drv: Any, replaced: Replacements) -> None:
    """Make `Device.make_context`, which `pycuda.autoinit` calls, return the primary context."""

    def make_context(device: Any, flags: int = 0) -> Any:
        # The other frameworks also use the primary context.
        if flags:
            _log.info("pycuda: the flags %s of make_context are ignored: the primary context is shared", flags)
        context = device.retain_primary_context()
        context.push()
        return context

    replaced.put(drv.Device, "make_context", lambda _: make_context)


def automatic_made() -> bool:
    """True if the program has imported a PyCUDA module that creates a context."""
    first, second = _AUTOINIT
    return first in sys.modules or second in sys.modules


def automatic(ordinal: int) -> dict[int, str]:
    """The contexts that the imports of PyCUDA's modules created on the GPU. Maps each context's handle to the name of
    the module."""
    drv: Any = sys.modules.get("pycuda.driver")
    found = {}
    for name in _AUTOINIT if drv is not None else ():
        module = sys.modules.get(name)
        context, device = getattr(module, "context", None), getattr(module, "device", None)
        if context is not None and device == drv.Device(ordinal):
            found[int(context.handle)] = name
    return found


def pushed() -> int | None:
    """The handle of PyCUDA's current context on this thread, which may differ from the driver's current context;
    None without a context."""
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
    """Detect the creation of non-blocking streams until `replaced` is undone. `used`: True if such a stream may exist
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
    """True if PyCUDA may have work on a non-blocking stream, or if that is unknown."""
    return _non_blocking or _watched is None or not _watched.active

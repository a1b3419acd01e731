"""PyCUDA's contexts: which one is current, who made them, and a `make_context` that gives the primary one.

PyCUDA keeps a stack of contexts for each thread. A context that is left on it when its thread ends, or at exit, aborts
the process: whoever pushes a context must pop it.
"""

from __future__ import annotations

import sys
from typing import Any

from memguard._base.logs import log as _log
from memguard._frameworks.replacements import Replacements

_AUTOINIT = ("pycuda.autoinit", "pycuda.gl.autoinit")


def current_context(drv: Any) -> Any:
    """The thread's current context, or None. Before `cuInit` PyCUDA raises, which means None too."""
    try:
        return drv.Context.get_current()
    except drv.Error:
        return None


def serve_by_primary(drv: Any, replaced: Replacements) -> None:
    """From now on `Device.make_context`, and with it `pycuda.autoinit`, gives the primary context."""

    def make_context(device: Any, flags: int = 0) -> Any:
        # Retained and pushed, so that PyCUDA shares it with the other frameworks.
        if flags:
            _log.info("pycuda: the flags %s of make_context are ignored: the primary context is shared", flags)
        context = device.retain_primary_context()
        context.push()
        return context

    replaced.put(drv.Device, "make_context", lambda _: make_context)


def automatic_made() -> bool:
    """Whether one of PyCUDA's modules that make a context was imported."""
    first, second = _AUTOINIT
    return first in sys.modules or second in sys.modules


def automatic(ordinal: int) -> dict[int, str]:
    """The contexts that PyCUDA's modules made on the GPU when they were imported: handle to module."""
    drv: Any = sys.modules.get("pycuda.driver")
    found = {}
    for name in _AUTOINIT if drv is not None else ():
        module = sys.modules.get(name)
        context, device = getattr(module, "context", None), getattr(module, "device", None)
        if context is not None and device == drv.Device(ordinal):
            found[int(context.handle)] = name
    return found


def pushed() -> int | None:
    """The handle of the context that PyCUDA has current on this thread, which may not be the driver's; None if none."""
    drv: Any = sys.modules.get("pycuda.driver")
    kind = getattr(drv, "Context", None)
    if kind is None:
        return None
    try:
        context = kind.get_current()
    except drv.Error:  # before `cuInit`
        return None
    return None if context is None else int(context.handle)

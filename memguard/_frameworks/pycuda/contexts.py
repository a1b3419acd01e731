"""PyCUDA's contexts: the current one, their creators, and a `make_context` that returns the primary one.

PyCUDA keeps a stack of contexts for each thread. A context left on the stack at the thread's end, or at exit, aborts
the process: the code that pushes a context must pop it.
"""

from __future__ import annotations

import sys
from typing import Any

from memguard._base.logs import log as _log
from memguard._frameworks.replacements import Replacements

_AUTOINIT = ("pycuda.autoinit", "pycuda.gl.autoinit")


def current_context(drv: Any) -> Any:
    """The thread's current context, or None. Before `cuInit` PyCUDA raises, which also results in None."""
    try:
        return drv.Context.get_current()
    except drv.Error:
        return None


def serve_by_primary(drv: Any, replaced: Replacements) -> None:
    """Make `Device.make_context`, and with it `pycuda.autoinit`, return the primary context."""

    def make_context(device: Any, flags: int = 0) -> Any:
        # Retained and pushed, so that PyCUDA shares it with the other frameworks.
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
    """The contexts that PyCUDA's modules created on the GPU at their import: module by handle."""
    drv: Any = sys.modules.get("pycuda.driver")
    found = {}
    for name in _AUTOINIT if drv is not None else ():
        module = sys.modules.get(name)
        context, device = getattr(module, "context", None), getattr(module, "device", None)
        if context is not None and device == drv.Device(ordinal):
            found[int(context.handle)] = name
    return found


def pushed() -> int | None:
    """The handle of PyCUDA's current context on this thread, which may differ from the driver's; None if none."""
    drv: Any = sys.modules.get("pycuda.driver")
    kind = getattr(drv, "Context", None)
    if kind is None:
        return None
    try:
        context = kind.get_current()
    except drv.Error:  # before `cuInit`
        return None
    return None if context is None else int(context.handle)

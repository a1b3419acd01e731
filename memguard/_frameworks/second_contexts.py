"""Finds a GPU's CUDA contexts other than its primary context, without creating or changing a context.

The driver does not list contexts. This module finds the contexts that PyCUDA's modules created at their import, the
contexts of PyCUDA's pools, and the calling thread's current context. Another thread's context may stay unknown until
that thread reads memory usage.
"""

from __future__ import annotations

from collections.abc import Iterable

from memguard._base.logs import log as _log
from memguard._devices import contexts
from memguard._frameworks.pycuda import contexts as pycuda_contexts
from memguard.errors import DeviceError


def find(ordinal: int, pools: Iterable[int] = ()) -> dict[int, str]:
    """Map the handle of each non-primary context of the GPU to the context's creator. `pools`: contexts of PyCUDA's
    pools.

    Never raises. Empty if the GPU has no primary context, because memguard then counts the GPU's first context as the
    primary one.
    """
    try:
        return _find(ordinal, pools)
    except Exception as error:  # as during driver shutdown or PyCUDA's import; the memory reading must not fail
        _log.debug("second contexts: %s: %s", type(error).__name__, error)
        return {}


def _find(ordinal: int, pools: Iterable[int]) -> dict[int, str]:
    known, here, ours = contexts.primary_known(ordinal), contexts.current_handle(), pycuda_contexts.pushed()
    alone = known is not None and {here, ours, *pools} <= {known, None}
    if alone and not pycuda_contexts.automatic_made():
        return {}  # usually the GPU has only its primary context
    primary = contexts.primary_now(ordinal)
    if primary is None:
        return {}
    found = {}
    if here is not None and here != primary and contexts.current() == ordinal:
        found[here] = "unknown"
    if ours is not None and ours != primary and (ours in found or _on(ordinal, ours)):
        found[ours] = "PyCUDA"
    found.update(dict.fromkeys(pools, "PyCUDA"))
    found.update(pycuda_contexts.automatic(ordinal))
    found.pop(primary, None)
    return found


def _on(ordinal: int, context: int) -> bool:
    """True if the context exists and belongs to the GPU."""
    try:
        with contexts.entered(context):
            return contexts.current() == ordinal
    except DeviceError:
        return False

"""CUDA contexts beside a GPU's primary one, found by looking: nothing is made, and nobody's context is changed.

The driver lists no contexts. Those that PyCUDA's modules made at their import, those in which PyCUDA has a pool, and
the ones current on the calling thread are what can be seen; another thread's may stay unseen until it looks itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from memguard._devices import contexts
from memguard._frameworks.pycuda import contexts as pycuda_contexts
from memguard.errors import DeviceError

_log = logging.getLogger("memguard")


def beside(ordinal: int, pools: Iterable[int] = ()) -> dict[int, str]:
    """Who made each context of the GPU that is not the primary one, by handle. `pools` are those PyCUDA allocates in.

    Never raises. Without a primary context there is no second one: the first of any kind is the process's own.
    """
    try:
        return _beside(ordinal, pools)
    except Exception as error:  # a driver that ends, a module of PyCUDA's half imported: a reading goes on
        _log.debug("second contexts: %s: %s", type(error).__name__, error)
        return {}


def _beside(ordinal: int, pools: Iterable[int]) -> dict[int, str]:
    primary = contexts.primary_now(ordinal)
    if primary is None:
        return {}
    found = {}
    here = contexts.current_handle()
    if here is not None and here != primary and contexts.current() == ordinal:
        found[here] = "unknown"
    ours = pycuda_contexts.pushed()
    if ours is not None and ours != primary and (ours in found or _on(ordinal, ours)):
        found[ours] = "PyCUDA"
    found.update(dict.fromkeys(pools, "PyCUDA"))
    found.update(pycuda_contexts.automatic(ordinal))
    found.pop(primary, None)
    return found


def _on(ordinal: int, context: int) -> bool:
    """Whether a living context belongs to the GPU."""
    try:
        with contexts.entered(context):
            return contexts.current() == ordinal
    except DeviceError:
        return False

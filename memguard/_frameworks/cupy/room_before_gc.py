"""Replaces the name `gc` in CuPy's pool module, so that other frameworks release memory before a garbage collection.

Before refusing a request, CuPy runs Python's garbage collector, once if the request exceeds the pool's limit, twice if
the driver refused the request. With several frameworks loaded, each collection takes tenths of a second. So memguard
first makes the other frameworks release memory, and skips the collection if they released enough. The replacement
affects CuPy's pool module only, and only requests of the capped allocator. CuPy (since 14.1) holds no lock when it
calls `gc`.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any

_REFUSED = 2  # cudaErrorMemoryAllocation


class GcReplacement:
    """Replaces the module `gc`. `collect` first calls `make_room(size, rounded, full)`, which returns True if enough
    memory was released. `full` is True if the driver refused the request. `code` is the code object of the capped
    allocator; for calls from any other code, `collect` is `gc.collect`."""

    def __init__(self, make_room: Callable[[int, int, bool], bool], code: CodeType) -> None:
        self._make_room_first, self._code = make_room, code
        self._thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(gc, name)

    def collect(self, *generation: int) -> int:
        frame = sys._getframe(1)  # the allocator's frame, because CuPy's compiled functions have no frames
        if frame.f_code is not self._code:
            return gc.collect(*generation)
        mine = self._thread.__dict__
        if "served" in mine:  # the second of the two `gc.collect` calls after a driver refusal
            return 0 if mine.pop("served") else gc.collect(*generation)
        size, rounded = frame.f_locals.get("size"), frame.f_locals.get("rounded")
        del frame
        if not isinstance(size, int) or not isinstance(rounded, int):
            return gc.collect(*generation)
        full = getattr(sys.exc_info()[1], "status", None) == _REFUSED
        served = self._make_room_first(size, rounded, full)
        if full:
            mine["served"] = served
        return 0 if served else gc.collect(*generation)

"""Replaces the garbage collector in CuPy's pool module, so that siblings make room before a collection.

Before it refuses a request, CuPy runs Python's garbage collector, once above its limit and twice after the driver
refused: tenths of a second each with several frameworks loaded. So memguard requests room first, and skips the
collection if it got room. The replacement applies to CuPy's pool module only, and only to requests of the capped
allocator; CuPy holds no lock then (14.1 on).
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any

_REFUSED = 2  # cudaErrorMemoryAllocation


class Collector:
    """Replaces the module `gc`. `make_room(size, rounded, full)` returns whether siblings made room."""

    def __init__(self, make_room: Callable[[int, int, bool], bool], code: CodeType) -> None:
        self._make_room_first, self._code = make_room, code
        self._thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(gc, name)

    def collect(self, *generation: int) -> int:
        frame = sys._getframe(1)  # the allocator's frame: CuPy's compiled functions have none
        if frame.f_code is not self._code:
            return gc.collect(*generation)
        mine = self._thread.__dict__
        if "served" in mine:  # the second of two calls in a row
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

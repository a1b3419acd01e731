"""Room before garbage: what CuPy's pool calls when it is short, put in the place of Python's collector.

Before it refuses a request, CuPy collects Python's garbage, once above its limit and twice where the driver refused:
tenths of a second each with several frameworks loaded. So room is asked for first, and with it nothing is collected.
Only CuPy's module of pools gets this, and only for requests of the capped allocator; CuPy holds no lock then (14.1 on).
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
    """Stands for the module `gc`. `ask(size, rounded, full)` says whether room was made."""

    def __init__(self, ask: Callable[[int, int, bool], bool], code: CodeType) -> None:
        self._ask, self._code = ask, code
        self._thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(gc, name)

    def collect(self, *generation: int) -> int:
        frame = sys._getframe(1)  # of the allocator: CuPy's own functions are compiled, and have none
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
        served = self._ask(size, rounded, full)
        if full:
            mine["served"] = served
        return 0 if served else gc.collect(*generation)

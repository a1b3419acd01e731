"""A framework whose arrays lie in the CPU's memory. Its pool keeps what is freed until `free_cache`."""

from __future__ import annotations

from typing import Any

__version__ = "7.0"


class Exhausted(Exception):
    """The toy's out-of-memory error."""


limit: int | None = None
tidy = False
used = cached = peak = 0
capturing = 0


def driver_take(size: int) -> None:
    """Replaced by the test."""


def driver_give(size: int) -> None:
    """Replaced by the test."""


def empty(size: int) -> Array:
    global used, cached, peak
    grow = max(size - cached, 0)
    if limit is not None and used + cached + grow > limit:
        raise Exhausted(f"toy memory is exhausted: failed to allocate {size} bytes")
    driver_take(grow)
    used, cached = used + size, cached + grow - size
    peak = max(peak, used)
    return Array(size)


def free_cache() -> None:
    global cached
    driver_give(cached)
    cached = 0


class Array:
    def __init__(self, size: int) -> None:
        self.size = size

    def __del__(self) -> None:
        global used, cached
        used, cached = used - self.size, cached + self.size


class Tensor:
    """Values in the host's memory, for the exchange."""

    def __init__(self, values: Any) -> None:
        self.values = values

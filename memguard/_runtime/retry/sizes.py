"""Smaller and smaller: what size the next run gets. Pure, but for what a function remembers."""

from __future__ import annotations


def lowest(floor: int, multiple: int) -> int:
    """The smallest size that is handed out: the floor, rounded up to the multiple."""
    return -(-floor // multiple) * multiple


def smaller(size: int, floor: int = 1, multiple: int = 1) -> int | None:
    """Half the size, rounded down to the multiple, and not below the floor; None if that is no smaller."""
    half = max(size // 2 // multiple * multiple, lowest(floor, multiple))
    return half if half < size else None


def steps(size: int, floor: int = 1, multiple: int = 1) -> int:
    """How often the size can become smaller."""
    count, now = 0, smaller(size, floor, multiple)
    while now is not None:
        count, now = count + 1, smaller(now, floor, multiple)
    return count


class Fitted:
    """The size that fitted last, if a smaller one than asked for had to be found. For every call of one function."""

    def __init__(self) -> None:
        self.size: int | None = None

    def first(self, given: int) -> int:
        """What to begin with: never above what the caller passes now."""
        size = self.size
        return given if size is None else min(given, size)

    def learn(self, given: int, size: int) -> None:
        if size < given:
            self.size = size

    def forget(self) -> None:
        self.size = None

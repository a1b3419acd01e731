"""Computes the smaller size for a retry. Pure, except for `Fitted`, which remembers the size that succeeded."""

from __future__ import annotations


def lowest(floor: int, multiple: int) -> int:
    """The smallest possible size: the floor, rounded up to the multiple."""
    return -(-floor // multiple) * multiple


def smaller(size: int, floor: int = 1, multiple: int = 1) -> int | None:
    """Half the size, rounded down to the multiple, but not below the floor. None if that is not smaller."""
    half = max(size // 2 // multiple * multiple, lowest(floor, multiple))
    return half if half < size else None


def steps(size: int, floor: int = 1, multiple: int = 1) -> int:
    """The number of times that the size can shrink."""
    count, now = 0, smaller(size, floor, multiple)
    while now is not None:
        count, now = count + 1, smaller(now, floor, multiple)
    return count


class Fitted:
    """The last size that succeeded after shrinking, shared by all calls of one function."""

    def __init__(self) -> None:
        self.size: int | None = None

    def first(self, given: int) -> int:
        """The size of the first run: the remembered size, but at most the caller's argument."""
        size = self.size
        return given if size is None else min(given, size)

    def learn(self, given: int, size: int) -> None:
        if size < given:
            self.size = size

    def forget(self) -> None:
        self.size = None

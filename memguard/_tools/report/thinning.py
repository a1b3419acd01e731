"""Makes few points of many, so that no extreme and no gap is lost. Pure, in memory that does not depend on the length.

The items come one by one. Neighbours share a bucket, and of each bucket the item with the lowest rank, the one with the
highest and the one with the most gaps stay, in their order. When there are too many buckets, each takes in the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
KEPT = 3
"""Items that one bucket keeps at most."""


class _Bucket(Generic[T]):
    __slots__ = ("count", "emptiest", "gaps", "high", "highest", "low", "lowest")

    def __init__(self) -> None:
        self.count = self.gaps = 0
        self.low = self.high = 0.0
        self.lowest: tuple[int, T] | None = None
        self.highest: tuple[int, T] | None = None
        self.emptiest: tuple[int, T] | None = None

    def take(self, other: _Bucket[T]) -> None:
        """Take in the bucket that follows. Of equals the first stays."""
        self.count += other.count
        if other.lowest is not None and (self.lowest is None or other.low < self.low):
            self.low, self.lowest = other.low, other.lowest
        if other.highest is not None and (self.highest is None or other.high > self.high):
            self.high, self.highest = other.high, other.highest
        if other.gaps > self.gaps:
            self.gaps, self.emptiest = other.gaps, other.emptiest

    def kept(self) -> list[tuple[int, T]]:
        found = {entry[0]: entry for entry in (self.lowest, self.highest, self.emptiest) if entry is not None}
        return [found[number] for number in sorted(found)]


class Thinner(Generic[T]):
    """Keeps at most `most` items: all of them, as long as they are few."""

    def __init__(self, most: int) -> None:
        if most < 2 * KEPT:
            raise ValueError(f"most must be at least {2 * KEPT}, found {most}")
        self._most = most // KEPT
        self._size, self._seen = 1, 0
        self._buckets: list[_Bucket[T]] = []

    def add(self, item: T, rank: float | None, gaps: int = 0) -> None:
        """`rank` is what the item is low or high by, None if unknown; `gaps` how many of its figures are unknown."""
        number = self._seen
        self._seen = number + 1
        bucket = self._buckets[-1] if self._buckets else None
        if bucket is None or bucket.count == self._size:
            if len(self._buckets) == self._most:
                self._halve()
            bucket = self._buckets[-1] if self._buckets else None
            if bucket is None or bucket.count == self._size:
                bucket = _Bucket()
                self._buckets.append(bucket)
        bucket.count += 1
        if rank is not None:
            if bucket.lowest is None or rank < bucket.low:
                bucket.low, bucket.lowest = rank, (number, item)
            if bucket.highest is None or rank > bucket.high:
                bucket.high, bucket.highest = rank, (number, item)
        if gaps > bucket.gaps:
            bucket.gaps, bucket.emptiest = gaps, (number, item)

    def _halve(self) -> None:
        pairs = []
        for at in range(0, len(self._buckets), 2):
            first = self._buckets[at]
            if at + 1 < len(self._buckets):
                first.take(self._buckets[at + 1])
            pairs.append(first)
        self._buckets[:] = pairs
        self._size *= 2

    def __iter__(self) -> Iterator[T]:
        """What is left, in the order in which it came."""
        for bucket in self._buckets:
            for _, item in bucket.kept():
                yield item

"""Detects leaks over the repetitions of a workload, from the bytes in use after each repetition; no I/O.

A workload is a named block of the program; `memguard.workload` measures it each time it runs (a repetition).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import combinations, pairwise

from memguard._base.types import WorkloadReport

_REPETITIONS = 100
"""The most repetitions of one workload that are stored and compared."""
_NAMES = 256
"""The most workloads that are stored. A workload is identified by its name and its framework."""


class Workloads:
    """The stored repetitions of every workload of a budget. A leak is reported once for each workload."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, str], _Ends] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def leaked(self, report: WorkloadReport) -> int | None:
        """Add a repetition. Returns the bytes that each repetition leaks if a leak has become likely, else None."""
        if report.delta is None or report.after is None:
            return None
        key = report.name, report.framework
        ends = self._ends.pop(key, None) or _Ends()
        self._ends[key] = ends  # re-inserted at the end, because the least recently used workload is dropped first
        while len(self._ends) > _NAMES:
            self._ends.pop(next(iter(self._ends)))
        return ends.another(report.after, report.delta)


class _Ends:
    """The stored repetitions of one workload: the bytes in use after each, and the running sum of added bytes."""

    def __init__(self) -> None:
        self._after: deque[int] = deque(maxlen=_REPETITIONS)
        self._left: deque[int] = deque(maxlen=_REPETITIONS)
        self._count = 0
        self._suspected = False

    def another(self, after: int, delta: int) -> int | None:
        """Add a repetition that adds `delta` bytes and ends with `after` bytes in use.

        Returns the leaked bytes per repetition if both series show a leak, else None.
        """
        self._count += 1
        self._after.append(after)
        self._left.append((self._left[-1] if self._left else 0) + delta)
        if self._suspected or (self._count > 20 and self._count % 10):  # after 20 test every tenth: a test takes 0.5 ms
            return None
        both = [list(self._after), list(self._left)]
        if not all(_rises(_kept(series)) for series in both):
            return None
        found = [size for series in both if (size := leak(series)) is not None]
        self._suspected = len(found) == 2
        return min(found) if self._suspected else None


def leak(afters: Sequence[int]) -> int | None:
    """The bytes that each repetition of a workload leaks, from the bytes in use after each; None for no leak.

    The first repetition is warm-up and is ignored, as are all but the last hundred. With 4 to 11 values, each value
    must exceed the previous value, and the values must be near a straight line; the fewer the values, the smaller the
    tolerance. With 12 or more values, a Mann-Kendall test must show a trend. The slope of the second half must be at
    least half of the slope of all values: the growth of a cache that fills up slows down.
    """
    kept = _kept(afters)
    count = len(kept)
    if not _rises(kept):
        return None
    slope = _theil_sen(kept)
    if slope <= 0 or _theil_sen(kept[count // 2 - (count < 6) :]) < slope / 2:
        return None
    if count < 12:
        off = [after - slope * number for number, after in enumerate(kept)]
        if max(off) - min(off) > slope * (count - 1) * min((count - 3) / 20, 1 / 4):
            return None
    return round(slope) or None


def _kept(afters: Sequence[int]) -> Sequence[int]:
    return afters[1:][-_REPETITIONS:]


def _rises(kept: Sequence[int]) -> bool:
    """True if enough pairs of values rise. Called before `_theil_sen`, which takes a millisecond."""
    count = len(kept)
    if count < 12:
        return count >= 4 and all(a < b for a, b in pairwise(kept))
    # The Mann-Kendall test: the square root is the score's standard deviation if the order is random.
    pairs = count * (count - 1) // 2
    return _score(kept) >= 4.5 * math.sqrt(pairs * (2 * count + 5) / 9)


def _score(values: Sequence[int]) -> int:
    """The number of rising pairs of values less the number of falling pairs."""
    score = 0
    before: list[int] = []
    for value in values:
        lower = bisect_left(before, value)
        score += lower - (len(before) - bisect_right(before, value, lower))
        before.insert(lower, value)
    return score


def _theil_sen(values: Sequence[int]) -> float:
    from statistics import median  # imports a dozen modules, which a budget without workloads does not need

    return median((b - a) / (m - n) for (n, a), (m, b) in combinations(enumerate(values), 2))

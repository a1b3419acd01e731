"""Leak detection between repetitions of a workload, from the bytes in use after each and the bytes that each adds.
Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import combinations, pairwise

from memguard._base.types import WorkloadReport

_REPETITIONS = 100
"""Repetitions of one workload that are kept and compared."""
_NAMES = 256
"""Workloads that are kept, by name and framework."""


class Workloads:
    """The repetitions of every workload of a budget. A leak is reported once for each workload."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, str], _Ends] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def leaked(self, report: WorkloadReport) -> int | None:
        """The bytes that each repetition leaks, if this repetition makes a leak likely; None otherwise."""
        if report.delta is None or report.after is None:
            return None
        key = report.name, report.framework
        ends = self._ends.pop(key, None) or _Ends()
        self._ends[key] = ends  # move to the end: the least recently used is dropped first
        while len(self._ends) > _NAMES:
            self._ends.pop(next(iter(self._ends)))
        return ends.another(report.after, report.delta)


class _Ends:
    """The repetitions of one workload."""

    def __init__(self) -> None:
        self._after: deque[int] = deque(maxlen=_REPETITIONS)
        self._left: deque[int] = deque(maxlen=_REPETITIONS)
        self._count = 0
        self._suspected = False

    def another(self, after: int, delta: int) -> int | None:
        """Add a repetition. A leak must show in the bytes in use after it and in the sum of the bytes it adds."""
        self._count += 1
        self._after.append(after)
        self._left.append((self._left[-1] if self._left else 0) + delta)
        if self._suspected or (self._count > 20 and self._count % 10):  # 100 repetitions take 0.5 ms
            return None
        both = [list(self._after), list(self._left)]
        if not all(_rises(_kept(series)) for series in both):
            return None
        found = [size for series in both if (size := leak(series)) is not None]
        self._suspected = len(found) == 2
        return min(found) if self._suspected else None


def leak(afters: Sequence[int]) -> int | None:
    """The bytes that each repetition of a workload leaks, from the bytes in use after each; None for no leak.

    The first repetition is warm-up and does not count. The last hundred of the others count. With 4 to 11 of them, each
    value must exceed the previous value and lie near a straight line; the fewer the values, the nearer. With 12 or
    more, a Mann-Kendall test must show a trend. The slope of the second half must be at least half of the whole slope,
    because a cache that fills is no leak.
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
    """True if enough pairs rise. This cheap test comes before the slopes of all pairs, which take a millisecond."""
    count = len(kept)
    if count < 12:
        return count >= 4 and all(a < b for a, b in pairwise(kept))
    pairs = count * (count - 1) // 2  # Mann-Kendall: the score's variance for a random order
    return _score(kept) >= 4.5 * math.sqrt(pairs * (2 * count + 5) / 9)


def _score(values: Sequence[int]) -> int:
    """The number of rising pairs less the number of falling pairs."""
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

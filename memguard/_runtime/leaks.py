"""Whether a workload leaks: what is in use after each repetition of it, and what each one adds. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import combinations, pairwise

from memguard._base.types import WorkloadReport

_REPETITIONS = 100
"""Ends of one workload that are remembered and compared."""
_NAMES = 256
"""Workloads that are remembered, by name and framework."""


class Workloads:
    """The ends of every workload of a budget. Each is suspected once."""

    def __init__(self) -> None:
        self._ends: dict[tuple[str, str], _Ends] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def leaked(self, report: WorkloadReport) -> int | None:
        """The bytes that each repetition leaves behind, when this one makes a leak likely; None otherwise."""
        if report.delta is None or report.after is None:
            return None
        key = report.name, report.framework
        ends = self._ends.pop(key, None) or _Ends()
        self._ends[key] = ends  # the latest is last, and the oldest goes first
        while len(self._ends) > _NAMES:
            self._ends.pop(next(iter(self._ends)))
        return ends.another(report.after, report.delta)


class _Ends:
    """The ends of one workload."""

    def __init__(self) -> None:
        self._after: deque[int] = deque(maxlen=_REPETITIONS)
        self._left: deque[int] = deque(maxlen=_REPETITIONS)
        self._count = 0
        self._suspected = False

    def another(self, after: int, delta: int) -> int | None:
        """A leak shows in what is in use after the workload, and it is the workload that leaves it behind."""
        self._count += 1
        self._after.append(after)
        self._left.append((self._left[-1] if self._left else 0) + delta)
        if self._suspected or (self._count > 20 and self._count % 10):  # a hundred take half a millisecond
            return None
        both = [list(self._after), list(self._left)]
        if not all(_rises(_kept(series)) for series in both):
            return None
        found = [size for series in both if (size := leak(series)) is not None]
        self._suspected = len(found) == 2
        return min(found) if self._suspected else None


def leak(afters: Sequence[int]) -> int | None:
    """The bytes that each repetition of a workload leaves behind, from what was in use after each; None for no leak.

    The first is warm-up and does not count; of the others the last hundred do. With four to eleven of them, each must
    exceed the one before and lie near one line, the nearer the fewer there are. With more, so many pairs must rise
    that chance hardly explains it. The second half must rise by at least half of what the whole does: a cache that
    fills is no leak.
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
    """Whether enough pairs rise. Mostly they do not, and the slopes of all pairs take a millisecond."""
    count = len(kept)
    if count < 12:
        return count >= 4 and all(a < b for a, b in pairwise(kept))
    pairs = count * (count - 1) // 2  # Mann-Kendall: the score has this variance if the order is chance
    return _score(kept) >= 4.5 * math.sqrt(pairs * (2 * count + 5) / 9)


def _score(values: Sequence[int]) -> int:
    """How many pairs rise less how many fall."""
    score = 0
    before: list[int] = []
    for value in values:
        lower = bisect_left(before, value)
        score += lower - (len(before) - bisect_right(before, value, lower))
        before.insert(lower, value)
    return score


def _theil_sen(values: Sequence[int]) -> float:
    from statistics import median  # loads a dozen modules, which a budget without workloads does not need

    return median((b - a) / (m - n) for (n, a), (m, b) in combinations(enumerate(values), 2))

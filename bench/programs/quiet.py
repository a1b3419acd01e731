"""A core that is not slowed by others, and a yardstick that tells when it is.

A core is slow when it has just woken up, and while a neighbour uses the other half of it (2.3 or 4.2 µs for the same
loop, measured). So time is taken only where the yardstick, before and after, is near the shortest ever seen."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Collection
from pathlib import Path

STEPS = 1500  # Of the yardstick: some 50 µs.
NEAR = 1.08  # A yardstick of up to so many times the shortest is that of a quiet core.
APART = 1.2  # The shortest yardsticks of two processes may differ so far, by where their memory lies.
TIMES = 4  # A part that was disturbed is done again, until there were so many times as many as are needed.


def yardstick() -> float:
    """Seconds for the same work each time: calls, objects that come and go, numbers."""
    kept, begun = 0, time.perf_counter()
    for number in range(STEPS):
        kept += len([number])
    return time.perf_counter() - begun


class Quiet:
    """Takes times while the core is quiet. `best`: the shortest yardstick that any process has seen, in seconds."""

    def __init__(self) -> None:
        self.best = min(yardstick() for _ in range(20))

    def limit(self, best: float) -> float:
        return NEAR * min(self.best, APART * min(best, self.best))

    def _yard(self) -> float:
        found = yardstick()
        self.best = min(self.best, found)
        return found

    def warm(self, work: Callable[[], float], best: float, most: int = 15) -> None:
        """Untimed, until the core is quiet and two in succession are alike. At most so many times."""
        last = work()
        for _ in range(most):
            now, yard = work(), self._yard()
            if abs(now / last - 1) < 0.03 and yard <= self.limit(best):
                return
            last = now

    def median(self, work: Callable[[], float], best: float, parts: int) -> float:
        """Of so many quiet parts. If there are too few in the time, of those with the shortest yardsticks."""
        found: list[tuple[float, float]] = []
        before = self._yard()
        for _ in range(parts * TIMES):
            took = work()
            after = self._yard()
            found.append((max(before, after), took))
            before = after
            if sum(yard <= self.limit(best) for yard, _ in found) >= parts:
                break
        return statistics.median(took for _, took in sorted(found)[:parts])


def siblings(core: int) -> set[int]:
    """The core, and those that share its hardware."""
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text()
    except OSError:
        return {core}
    found = {core}
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def quietest(cores: Collection[int], looks: int = 8) -> int:
    """The core with the shortest yardstick, by the median of several looks. This thread has its cores afterwards."""
    found = {}
    try:
        for core in cores:
            os.sched_setaffinity(0, {core})
            for _ in range(3):
                yardstick()  # it wakes up
            found[core] = statistics.median(yardstick() for _ in range(looks))
    finally:
        os.sched_setaffinity(0, set(cores))
    return min(found, key=lambda core: found[core])

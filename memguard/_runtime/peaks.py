"""The allocators' own peaks as events of the timeline: a sample misses what came and went since the last one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from memguard._base.types import Event
from memguard._base.units import format_size
from memguard._timeline.format import PEAK

EVERY = 10.0
"""Seconds between two looks: each asks every framework once more. Peaks do not go away, and the end has a look too."""
GROWN = 0.01
"""The part by which a peak must have grown to be written again, so that there are few such lines."""


class Peaks:
    """What was written last. For one thread at a time: two at once would at worst write a line twice."""

    def __init__(self, every: float = EVERY, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock = every, clock
        self._known: dict[tuple[str, str], int] = {}
        self._looked: float | None = None

    def due(self) -> bool:
        """Whether it is time for a look. It counts as done."""
        now = self._clock()
        if self._looked is not None and 0 <= now - self._looked < self._every:
            return False
        self._looked = now
        return True

    def events(self, when: float, found: Mapping[str, Mapping[str, int]], *, last: bool = False) -> list[Event]:
        """The peaks by UUID and framework that have grown enough; all that have grown if this is the `last` look."""
        events = []
        for uuid, peaks in found.items():
            for name, peak in peaks.items():
                if peak <= self._known.get((uuid, name), 0) * (1 if last else 1 + GROWN):
                    continue
                self._known[uuid, name] = peak
                text = f"{name}: at most {format_size(peak)} in use so far"
                events.append(Event(when, PEAK, text, uuid=uuid, framework=name, bytes=peak))
        return events

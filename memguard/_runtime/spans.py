"""Workloads as events of the timeline, which reports draw as spans: long ones each, short ones in a row together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from memguard._base.types import Event, WorkloadReport

WORKLOAD = "workload"
EVERY = 1.0
"""Seconds of short workloads of one name that are one event: a training step may be one, many times a second."""
MOST = 20
"""Names of such workloads within that time. Those of more names are together: a program may number its steps."""
OTHERS = "other workloads"


class _Row:
    """Workloads of one name and framework, one after the other."""

    __slots__ = ("began", "count", "ended", "peak")

    def __init__(self, began: float) -> None:
        self.began = self.ended = began
        self.count, self.peak = 0, 0


class Spans:
    """Thread-safe. Its lock is reentrant, for a signal handler, and held for no more than a few lines."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._lock = clock, threading.RLock()
        self._rows: dict[tuple[str, str], _Row] = {}

    def ended(self, report: WorkloadReport, seconds: float, failed: str | None) -> list[Event]:
        """The events to write now. `failed`: the class of the error that it ended with."""
        now, key = self._clock(), (report.name, report.framework)
        with self._lock:
            if failed is not None:
                name = f"{report.name}: ended with {failed}"
                alone = Event(now, WORKLOAD, name, framework=report.framework, seconds=seconds, bytes=report.peak)
                return [*self._taken(key), alone]
            row = self._rows.get(key)
            if row is None:
                if len(self._rows) >= MOST:
                    key = OTHERS, report.framework
                row = self._rows.setdefault(key, _Row(now - seconds))
            # No more calls than that: of short workloads there may be many.
            row.ended, row.count = now, row.count + 1
            if now - seconds < row.began:
                row.began = now - seconds
            if report.peak is not None and report.peak > row.peak:
                row.peak = report.peak
            if 0 <= now - row.began < EVERY:
                return []
            return [*self._taken(key), *self._due(now)]

    def due(self, everything: bool = False) -> list[Event]:
        """The events of rows that are long enough, or all."""
        if not self._rows:  # mostly
            return []
        with self._lock:
            return self._due(float("inf") if everything else self._clock())

    def _due(self, now: float) -> list[Event]:
        """Oldest first, up to one that has time: there may be many."""
        events: list[Event] = []
        while self._rows:
            key, row = next(iter(self._rows.items()))
            if 0 <= now - row.began < EVERY:
                break
            events += self._taken(key)
        return events

    def _taken(self, key: tuple[str, str]) -> list[Event]:
        row, (name, framework) = self._rows.pop(key, None), key
        if row is None:
            return []
        found = Event(row.ended, WORKLOAD, name, framework=framework, seconds=row.ended - row.began)
        return [found._replace(bytes=row.peak or None, times=row.count if row.count > 1 else None)]

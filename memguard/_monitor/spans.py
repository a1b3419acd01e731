"""Workloads as events of the timeline, which reports draw as spans: long ones each, short ones in a row together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from memguard._types import Event, WorkloadReport

WORKLOAD = "workload"
EVERY = 1.0
"""Seconds of short workloads of one name that are one event: a training step may be one, many times a second."""


class _Row:
    """Workloads of one name and framework, one after the other."""

    def __init__(self, began: float) -> None:
        self.began = self.ended = began
        self.count, self.peak = 0, 0

    def add(self, began: float, ended: float, peak: int | None) -> None:
        self.began, self.ended = min(self.began, began), max(self.ended, ended)
        self.count, self.peak = self.count + 1, max(self.peak, peak or 0)


class Spans:
    """Thread-safe. Its lock is reentrant, for a signal handler, and held for no more than a few lines."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._lock = clock, threading.RLock()
        self._rows: dict[tuple[str, str], _Row] = {}

    def ended(self, report: WorkloadReport, seconds: float, failed: str | None) -> list[Event]:
        """The events to write now. `failed`: the class of the error that it ended with."""
        now, key = self._clock(), (report.name, report.framework)
        with self._lock:
            row = self._rows.get(key)
            if failed is not None:
                name = f"{report.name}: ended with {failed}"
                alone = Event(now, WORKLOAD, name, framework=report.framework, seconds=seconds, bytes=report.peak)
                return [*self._due(now, key), alone]
            if row is None:
                row = self._rows[key] = _Row(now - seconds)
            row.add(now - seconds, now, report.peak)
            return self._due(now)

    def due(self, everything: bool = False) -> list[Event]:
        """The events of rows that are long enough, or all."""
        if not self._rows:  # mostly
            return []
        with self._lock:
            return self._due(float("inf") if everything else self._clock())

    def _due(self, now: float, at_once: tuple[str, str] | None = None) -> list[Event]:
        events = []
        for key, row in list(self._rows.items()):
            if 0 <= now - row.began < EVERY and key != at_once:
                continue
            del self._rows[key]
            name, framework = key
            found = Event(row.ended, WORKLOAD, name, framework=framework, seconds=row.ended - row.began)
            events.append(found._replace(bytes=row.peak or None, times=row.count if row.count > 1 else None))
        return events

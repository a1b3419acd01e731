"""What a timeline has beside samples and the monitor's events: workloads, allocators' peaks, a sample at the end.

Reports draw workloads as spans: long ones each, short ones in a row together. Peaks are the allocators' own: a sample
misses what came and went since the last one.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.types import Event, WorkloadReport
from memguard._base.units import format_size
from memguard._runtime import ending
from memguard._timeline.format import PEAK

if TYPE_CHECKING:
    from memguard._base.undo import Undo
    from memguard._guard.guard import Guard
    from memguard._runtime.sampler import Monitor
    from memguard._timeline import Writer

PEAKS_EVERY = 10.0
"""Seconds between two looks: each asks every framework once more. Peaks do not go away, and the end has a look too."""
GROWN = 0.01
"""The part by which a peak must have grown to be written again, so that there are few such lines."""
WORKLOAD = "workload"
SPANS_EVERY = 1.0
"""Seconds of short workloads of one name that are one event: a training step may be one, many times a second."""
MOST = 20
"""Names of such workloads within that time. Those of more names are together: a program may number its steps."""
OTHERS = "other workloads"
_HANGS = 0.5
"""Seconds after which the monitor's sample is taken to hang, at the end of the program or of the budget."""


class Peaks:
    """What was written last. For one thread at a time: two at once would at worst write a line twice."""

    def __init__(self, every: float = PEAKS_EVERY, clock: Callable[[], float] = time.monotonic) -> None:
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
            if 0 <= now - row.began < SPANS_EVERY:
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
            if 0 <= now - row.began < SPANS_EVERY:
                break
            events += self._taken(key)
        return events

    def _taken(self, key: tuple[str, str]) -> list[Event]:
        row, (name, framework) = self._rows.pop(key, None), key
        if row is None:
            return []
        found = Event(row.ended, WORKLOAD, name, framework=framework, seconds=row.ended - row.began)
        return [found._replace(bytes=row.peak or None, times=row.count if row.count > 1 else None)]


class Beside:
    """Of one budget with a timeline. Nothing here raises in the program: what cannot be read is left out."""

    def __init__(self, guard: Guard, monitor: Monitor, writer: Writer, undo: Undo) -> None:
        """`undo` has the closing of the writer already, and will have the end of the monitor."""
        self._guard, self._monitor, self._writer = guard, monitor, writer
        self._peaks, self._spans = Peaks(), Spans()
        self._pid, self._taken = os.getpid(), False  # the last sample, at the end of the main thread
        undo.add("last sample", self.last)
        undo.add("last sample", lambda: ending.forget(self._before_exit))
        ending.call_before(self._before_exit)

    def sampled(self) -> None:
        """After each sample, on the monitor's thread."""
        self._write_spans()
        if not self._peaks.due():
            return
        try:
            found = self._guard.peaks()
        except Exception as error:  # samples and events are written all the same
            _log.debug("peaks were not read: %s", text_of(error))
            return
        for event in self._peaks.events(time.time(), found):
            self._writer.event(event)

    def finished(self, report: WorkloadReport, seconds: float, failed: str | None) -> None:
        """A workload has ended, within `seconds`; with an error of the class `failed`."""
        for event in self._spans.ended(report, seconds, failed):
            self._writer.event(event)

    def at_exit(self) -> None:
        """An exit function: frameworks may have run theirs. Nothing is asked of them if that was done before."""
        if self._taken and self._pid == os.getpid():
            self._write_spans(everything=True)
        else:
            self.last()

    def _before_exit(self) -> None:
        self._taken = self.last()

    def last(self) -> bool:
        """What came since the monitor's last sample would be in none: one more, and the allocators' peaks.

        Not if the monitor's own hangs in the driver, as this one would, and not once Python takes modules apart.
        Returns whether it was taken.
        """
        if sys.is_finalizing() or self._pid != os.getpid():  # forked: its locks may be held for ever
            return False
        self._write_spans(everything=True)
        if not self._monitor.quiet(_HANGS):
            return False
        guard, writer = self._guard, self._writer
        try:
            sample = guard.last_sample()
            if sample is None:
                return False
            writer.sample(sample)
            for event in [*guard.moved(), *self._peaks.events(sample.time, guard.peaks(), last=True)]:
                writer.event(event)
        except Exception as error:
            _log.debug("the last sample was not taken: %s", text_of(error))
            return False
        return True

    def _write_spans(self, everything: bool = False) -> None:
        for event in self._spans.due(everything):
            self._writer.event(event)

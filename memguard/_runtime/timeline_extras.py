"""Timeline extras besides samples and monitor events: workload spans, allocators' peaks, and a final sample.

Reports draw workloads as spans. Each long workload is one span; consecutive short ones of one name are merged. Peaks
come from the allocators, because samples miss allocations that are freed before the next sample.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from memguard._base import life
from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.types import Event, Sample, WorkloadReport
from memguard._base.units import format_size
from memguard._budget.ranks import rank_of
from memguard._runtime.extensions import Extension
from memguard._timeline import Writer
from memguard._timeline.format import PEAK

if TYPE_CHECKING:
    from memguard._base.undo import Undo
    from memguard._guard.guard import Guard
    from memguard._runtime.extensions import SessionContext
    from memguard._runtime.sampler import Monitor

PEAKS_EVERY = 10.0
"""Seconds between two lines with allocators' peaks. Peaks never fall, so few lines suffice."""
GROWN = 0.01
"""A peak is written again once it has grown by this fraction, which bounds the number of lines."""
WORKLOAD = "workload"
SPANS_EVERY = 1.0
"""Seconds within which short workloads of one name are merged into one event: each training step may be a workload."""
MOST = 20
"""The most workload names with an event of their own within that time. Further names share one event: a program may
number its steps."""
OTHERS = "other workloads"
_HANGS = 0.5
"""At the end of the program or budget, a sample of the monitor that takes longer than this many seconds counts as
hanging."""


class Timeline(Extension):
    """The timeline file of `monitor: {timeline: ...}`. The session writes samples, events and refusals into it."""

    before_monitor = True
    extras: TimelineExtras | None = None

    def prepare(self, session: SessionContext, before: SessionContext | None) -> None:
        """Raise TimelineError if the file cannot be begun after the end of `before`, which may use the same file."""
        writer = _writer(session)
        writer.check(before.writer if before is not None else None)
        session.write_to(writer)

    def start(self, session: SessionContext) -> None:
        writer, monitor = session.writer or _writer(session), session.monitor
        assert monitor is not None
        session.begin_timeline(writer)
        self.extras = TimelineExtras(session.guard, monitor, writer, session.undo)

    def tick(self, reading: Sample) -> None:
        if reading.devices and self.extras is not None:
            self.extras.sampled()

    def finished(self, report: WorkloadReport, seconds: float, failed: str | None) -> None:
        if self.extras is not None:
            self.extras.finished(report, seconds, failed)

    def forked(self) -> None:
        self.extras = None

    def at_exit(self) -> None:
        if self.extras is not None:
            self.extras.at_exit()


def _writer(session: SessionContext) -> Writer:
    wanted = session.guard.budget.monitor
    assert wanted is not None and wanted.timeline is not None
    return Writer(
        wanted.timeline,
        session.guard.plan,
        limit_bytes=wanted.timeline_size,
        rank=rank_of(os.environ),
        simulated=session.guard.host.simulated,
        say=_log.warning,
        begin=False,
    )


class Peaks:
    """The last written peaks. Used by one thread at a time; a second thread could at worst write a line twice."""

    def __init__(self, every: float = PEAKS_EVERY, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock = every, clock
        self._known: dict[tuple[str, str], int] = {}
        self._looked: float | None = None

    def due(self) -> bool:
        """Whether it is time to write peaks. True starts the next interval."""
        now = self._clock()
        if self._looked is not None and 0 <= now - self._looked < self._every:
            return False
        self._looked = now
        return True

    def events(self, when: float, found: Mapping[str, Mapping[str, int]], *, last: bool = False) -> list[Event]:
        """Events for peaks that grew by `GROWN`, or at all in the `last` reading. `found`: by UUID and framework."""
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
    """Consecutive workloads of one name and framework, merged into one span."""

    __slots__ = ("began", "count", "ended", "peak")

    def __init__(self, began: float) -> None:
        self.began = self.ended = began
        self.count, self.peak = 0, 0


class Spans:
    """Merges workloads into spans. Thread-safe; the lock is reentrant, because a signal handler may end a workload."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._lock = clock, threading.RLock()
        self._rows: dict[tuple[str, str], _Row] = {}

    def ended(self, report: WorkloadReport, seconds: float, failed: str | None) -> list[Event]:
        """Add an ended workload. Returns the events to write now. `failed`: the class name of its error."""
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
            # No further calls here: short workloads may end many times a second.
            row.ended, row.count = now, row.count + 1
            if now - seconds < row.began:
                row.began = now - seconds
            if report.peak is not None and report.peak > row.peak:
                row.peak = report.peak
            if 0 <= now - row.began < SPANS_EVERY:
                return []
            return [*self._taken(key), *self._due(now)]

    def due(self, everything: bool = False) -> list[Event]:
        """The events of spans that have reached `SPANS_EVERY`, or of all spans."""
        if not self._rows:
            return []
        with self._lock:
            return self._due(float("inf") if everything else self._clock())

    def _due(self, now: float) -> list[Event]:
        """The events of due spans, oldest first. Stops at the first span that is not due, because there may be many
        spans."""
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


class TimelineExtras:
    """Writes the timeline extras of one budget. Never raises in the program: it omits figures that it cannot read."""

    def __init__(self, guard: Guard, monitor: Monitor, writer: Writer, undo: Undo) -> None:
        """`undo` already has the step that closes the writer; the step that stops the monitor is added later."""
        self._guard, self._monitor, self._writer = guard, monitor, writer
        self._peaks, self._spans = Peaks(), Spans()
        self._pid, self._taken = os.getpid(), False  # `_taken`: `_before_exit` wrote the final sample
        undo.add("last sample", self.last)
        undo.add("last sample", lambda: life.not_at_main_thread_end(self._before_exit))
        life.at_main_thread_end(self._before_exit)

    def sampled(self) -> None:
        """Called after each sample, on the monitor's thread."""
        self._write_spans()
        if not self._peaks.due():
            return
        for event in self._peaks.events(time.time(), self._guard.peaks()):
            self._writer.event(event)

    def finished(self, report: WorkloadReport, seconds: float, failed: str | None) -> None:
        """Called when a workload has ended after `seconds`. `failed`: the class name of its error."""
        for event in self._spans.ended(report, seconds, failed):
            self._writer.event(event)

    def at_exit(self) -> None:
        """The `atexit` function. Frameworks may be shut down by now, so it reads none if `_before_exit` has done so."""
        if self._taken and self._pid == os.getpid():
            self._write_spans(everything=True)
        else:
            self.last()

    def _before_exit(self) -> None:
        self._taken = self.last()

    def last(self) -> bool:
        """Write a final sample and the peaks, to cover the time since the monitor's last sample.

        Skipped during interpreter finalization, and if the monitor's sample hangs in the driver, because this sample
        would hang too. Returns whether the sample was written.
        """
        if sys.is_finalizing() or self._pid != os.getpid():  # a forked child: nobody releases inherited locks
            return False
        self._write_spans(everything=True)
        if not self._monitor.wait_for_sample(_HANGS):
            return False
        guard, writer = self._guard, self._writer
        try:
            sample = guard.last_sample()
            if sample is None:
                return False
            writer.sample(sample)
            for event in [*guard.take_events(), *self._peaks.events(sample.time, guard.peaks(), last=True)]:
                writer.event(event)
        except Exception as error:
            _log.debug("the last sample was not taken: %s", text_of(error))
            return False
        return True

    def _write_spans(self, everything: bool = False) -> None:
        for event in self._spans.due(everything):
            self._writer.event(event)

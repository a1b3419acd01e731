"""Writes further records to the timeline: spans of workloads, peaks that allocators report, and a final sample.

A workload is a named block that `memguard.workload` measures. A span is the time of one long workload, or of several
consecutive short workloads of one name. Samples miss memory that is freed before the next sample, so the peaks are read
from the allocators.
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
"""Least seconds between two readings of the peaks. Peaks never decrease, so few readings suffice."""
GROWN = 0.01
"""A peak is written again after it has grown by this fraction, which bounds the number of lines."""
WORKLOAD = "workload"
SPANS_EVERY = 1.0
"""Seconds within which workloads of one name are merged into one event, as each training step may be a workload."""
MOST = 20
"""The most names with an event of their own within `SPANS_EVERY`. Workloads of other names share one event, because a
program may number the names of its steps."""
OTHERS = "other workloads"
_HANGS = 0.5
"""The most seconds that the final sample waits for a running sample of the monitor, which may hang in the driver."""


class Timeline(Extension):
    """The extension for `monitor: {timeline: ...}` in a budget: creates the timeline and the `TimelineExtras`.

    The session writes samples, events and refused requests.
    """

    before_monitor = True
    extras: TimelineExtras | None = None

    def prepare(self, session: SessionContext, before: SessionContext | None) -> None:
        """Raise TimelineError if the file cannot be created. `before` is the session that will end first; its
        timeline may be the same file."""
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
    """Decides which peaks to write, from the last written peaks. Has no lock, so two threads may both write a peak."""

    def __init__(self, every: float = PEAKS_EVERY, clock: Callable[[], float] = time.monotonic) -> None:
        self._every, self._clock = every, clock
        self._known: dict[tuple[str, str], int] = {}
        self._looked: float | None = None

    def due(self) -> bool:
        """True if `every` seconds have passed since the last True: the caller should read and write the peaks."""
        now = self._clock()
        if self._looked is not None and 0 <= now - self._looked < self._every:
            return False
        self._looked = now
        return True

    def events(self, when: float, found: Mapping[str, Mapping[str, int]], *, last: bool = False) -> list[Event]:
        """Events for the peaks in `found` (by UUID and framework) that grew by `GROWN`, or if `last`, grew at all."""
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
    """Merges workloads into spans. Thread-safe. The lock is reentrant because a signal handler may end a workload."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._lock = clock, threading.RLock()
        self._rows: dict[tuple[str, str], _Row] = {}

    def ended(self, report: WorkloadReport, seconds: float, failed: str | None) -> list[Event]:
        """Add an ended workload. Returns the events to write now. `failed`: class name of the workload's exception."""
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
            # Compare inline instead of calling `min` and `max`: short workloads may end many times a second.
            row.ended, row.count = now, row.count + 1
            if now - seconds < row.began:
                row.began = now - seconds
            if report.peak is not None and report.peak > row.peak:
                row.peak = report.peak
            if 0 <= now - row.began < SPANS_EVERY:
                return []
            return [*self._taken(key), *self._due(now)]

    def due(self, everything: bool = False) -> list[Event]:
        """The events of spans that began `SPANS_EVERY` seconds ago or earlier; of all spans if `everything`."""
        if not self._rows:
            return []
        with self._lock:
            return self._due(float("inf") if everything else self._clock())

    def _due(self, now: float) -> list[Event]:
        """The events of the first spans in `_rows`, up to the first span that began less than `SPANS_EVERY` ago."""
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
    """Writes the spans, peaks and final sample of one budget. Never raises; omits figures that cannot be read."""

    def __init__(self, guard: Guard, monitor: Monitor, writer: Writer, undo: Undo) -> None:
        """`undo` must already have the step that closes the writer, and not yet the step that stops the monitor,
        because the steps run in reverse order."""
        self._guard, self._monitor, self._writer = guard, monitor, writer
        self._peaks, self._spans = Peaks(), Spans()
        self._pid, self._taken = os.getpid(), False  # `_taken`: `_before_exit` has written the final sample
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
        """Called after a workload that took `seconds`. `failed`: the class name of its exception, or None."""
        for event in self._spans.ended(report, seconds, failed):
            self._writer.event(event)

    def at_exit(self) -> None:
        """Called by `atexit`. After `_before_exit`, reads no framework, because frameworks may be shut down by now."""
        if self._taken and self._pid == os.getpid():
            self._write_spans(everything=True)
        else:
            self.last()

    def _before_exit(self) -> None:
        self._taken = self.last()

    def last(self) -> bool:
        """Write a final sample and the peaks, to cover the time since the monitor's last sample.

        Writes neither during interpreter finalization, nor if a sample of the monitor hangs in the driver, where the
        final sample would hang too. Returns True if the sample was written.
        """
        if sys.is_finalizing() or self._pid != os.getpid():  # in a forked child no thread releases inherited locks
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

"""What a timeline has beside samples and the monitor's events: workloads, allocators' peaks, a sample at the end."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.types import Sample, WorkloadReport
from memguard._budget.ranks import rank_of
from memguard._runtime import ending
from memguard._runtime.extensions import Extension
from memguard._runtime.peaks import Peaks
from memguard._runtime.spans import Spans
from memguard._timeline import Writer

if TYPE_CHECKING:
    from memguard._base.undo import Undo
    from memguard._guard.guard import Guard
    from memguard._runtime.extensions import Context
    from memguard._runtime.sampler import Monitor

_HANGS = 0.5
"""Seconds after which the monitor's sample is taken to hang, at the end of the program or of the budget."""


class Timeline(Extension):
    """The file of a budget with `monitor: {timeline: ...}`. The session writes its samples, events and refusals."""

    before_monitor = True
    beside: Beside | None = None

    def prepare(self, session: Context, before: Context | None) -> None:
        """Raise TimelineError if it cannot be begun once `before` is over, which may write the same file."""
        writer = _writer(session)
        writer.check(before.writer if before is not None else None)
        session.write_to(writer)

    def start(self, session: Context) -> None:
        writer, monitor = session.writer or _writer(session), session.monitor
        assert monitor is not None
        session.begin_timeline(writer)
        self.beside = Beside(session.guard, monitor, writer, session.undo)

    def tick(self, reading: Sample) -> None:
        if reading.devices and self.beside is not None:
            self.beside.sampled()

    def finished(self, report: WorkloadReport, seconds: float, failed: str | None) -> None:
        if self.beside is not None:
            self.beside.finished(report, seconds, failed)

    def forked(self) -> None:
        self.beside = None

    def at_exit(self) -> None:
        if self.beside is not None:
            self.beside.at_exit()


def _writer(session: Context) -> Writer:
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

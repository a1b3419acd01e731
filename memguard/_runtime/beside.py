"""What a timeline has beside samples and the monitor's events: workloads, allocators' peaks, a sample at the end."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.types import WorkloadReport
from memguard._runtime import ending
from memguard._runtime.peaks import Peaks
from memguard._runtime.spans import Spans

if TYPE_CHECKING:
    from memguard._base.undo import Undo
    from memguard._guard.guard import Guard
    from memguard._runtime.sampler import Monitor
    from memguard._timeline import Writer

_HANGS = 0.5
"""Seconds after which the monitor's sample is taken to hang, at the end of the program or of the budget."""


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

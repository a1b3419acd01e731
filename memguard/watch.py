"""What looks on while a budget is active: the monitor and its timeline, and the diagnosis of an out-of-memory.

The monitor's thread notices and says; what frees memory or raises waits for a checkpoint on the user's thread.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from memguard import incidents
from memguard.devices import contexts
from memguard.errors import MemguardError, UnderPressure
from memguard.model import Event, Pressure, Sample, WorkloadReport
from memguard.observer import Observer
from memguard.units import format_size

if TYPE_CHECKING:
    from memguard import pressure
    from memguard.conductor import Guard
    from memguard.monitor import Monitor
    from memguard.timeline import Writer

_log = logging.getLogger("memguard")
_REPETITIONS = 100
"""Ends of one workload that are remembered for the question whether it leaks."""

callbacks: list[Callable[[Event], None]] = []
"""Registered with `memguard.on_pressure`: of the process, as they outlive a budget."""


class Watch(Observer):
    """Of one guard, from `start` to `stop`."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._writer: Writer | None = None
        self._undo: Callable[[], None] | None = None
        self._due: deque[Event] = deque(maxlen=64)  # trims that wait for a checkpoint
        self._raise: Event | None = None
        self._levels: dict[tuple[str | None, str | None], Pressure | None] = {}
        self._left: defaultdict[tuple[str, str], deque[int]] = defaultdict(lambda: deque(maxlen=_REPETITIONS))
        self._leaks: set[tuple[str, str]] = set()
        self._failed: list[Callable[[Event], None]] = []
        self._busy = threading.local()
        self.monitor: Monitor | None = None

    def start(self) -> None:
        """Hooks for errors always; a thread and a file only where the budget has `monitor`."""
        self._undo = incidents.install(self)
        wanted = self._guard.budget.monitor
        if wanted is None:
            return
        from memguard.monitor import Monitor
        from memguard.pressure import Settings

        if wanted.timeline is not None:
            from memguard.timeline import Writer, rank_of

            self._writer = Writer(
                wanted.timeline,
                self._guard.plan,
                limit_bytes=wanted.timeline_size,
                rank=rank_of(os.environ),
                simulated=self._guard.host.simulated,
                say=self._say,
            )
        settings = Settings.of(wanted, self._guard.budget.on_pressure)
        self.monitor = Monitor(self._take, self._act, settings, record=self._record)
        self.monitor.start()

    def stop(self) -> None:
        monitor, self.monitor = self.monitor, None
        if monitor is not None:
            monitor.stop()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def forked(self) -> None:
        if self.monitor is not None:
            self.monitor.forked()
        if self._writer is not None:
            self._writer.forked()

    def checkpoint(self) -> None:
        """Trim what the budget says to trim under pressure; raise UnderPressure where it says `raise`."""
        if getattr(self._busy, "now", False):
            return
        if self._due:
            self._busy.now = True
            try:
                while self._due:
                    self._trim(self._due.popleft())
            finally:
                self._busy.now = False
            return  # whether that was enough the monitor sees next
        event, self._raise = self._raise, None
        if event is not None and self._levels.get((event.uuid, event.framework)) is event.level:
            raise UnderPressure(event.framework, event.uuid, event.text)

    def failed(self, error: BaseException) -> None:
        incidents.seen(error)

    def finished(self, report: WorkloadReport) -> None:
        if report.delta is None:
            return
        key = report.name, report.framework
        left = self._left[key]
        left.append((left[-1] if left else 0) + report.delta)
        from memguard.pressure import leak

        each = leak(list(left))
        if each is None or key in self._leaks:
            return
        self._leaks.add(key)
        text = f"workload {report.name!r} of {report.framework} leaves {format_size(each)} more behind each time"
        self._event(Event(time.time(), "leak", text, framework=report.framework, bytes=each), logging.WARNING)

    # what a diagnosis is made of

    def scene(self) -> incidents.Scene:
        """Ledger, plan, other processes and the last samples, read now."""
        guard = self._guard
        ledger = guard.ledger()
        processes = {
            part.device.uuid: {p: n for p, n in guard.host.processes(part.device).items() if p != guard.host.pid}
            for part in guard.plan.devices
        }
        samples = self.monitor.last(10.0) if self.monitor is not None else []
        return incidents.Scene(ledger, guard.plan, processes, tuple(samples))

    def diagnosed(self, report: Mapping[str, Any]) -> None:
        """An out-of-memory was explained: into the timeline with it, and to the callbacks on this thread."""
        if self._writer is not None:
            self._writer.oom(report)
        who, size = report["requester"], report["requested"]
        text = f"out of memory: {who or 'unknown'}: {report['why'] or report['error']}"
        self._call(Event(time.time(), "oom", text, uuid=report["uuid"], framework=who, bytes=size))

    # the monitor's thread

    def _take(self) -> Sample:
        if not getattr(self._busy, "relaxed", False):
            self._busy.relaxed = contexts.relax()
        return self._guard.sample()

    def _act(self, action: pressure.Action) -> None:
        event = action.event
        if event.kind == "pressure":
            self._levels[event.uuid, event.framework] = event.level
        if action.kind == "log":
            _log.info("%s", event.text)
        elif action.kind == "warn":
            _log.warning("%s", event.text)
        elif action.kind == "trim":
            self._due.append(event)
        elif action.kind == "raise":
            self._raise = event
        elif action.kind == "callback":
            self._call(event)

    def _record(self, sample: Sample, events: list[Event]) -> None:
        writer = self._writer
        if writer is not None:
            writer.sample(sample)
            for event in events:
                writer.event(event)

    def _say(self, text: str) -> None:
        _log.warning("%s", text)

    def _event(self, event: Event, level: int) -> None:
        _log.log(level, "%s", event.text)
        if self._writer is not None:
            self._writer.event(event)
        self._call(event)

    def _call(self, event: Event) -> None:
        for callback in list(callbacks):
            try:
                callback(event)
            except Exception as error:
                if callback not in self._failed:  # once for each: it is called again at the next event
                    self._failed.append(callback)
                    code = getattr(callback, "__code__", None)
                    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
                    name = getattr(callback, "__qualname__", repr(callback))
                    _log.warning(
                        "memguard.on_pressure: %s%s failed: %s: %s", name, where, type(error).__name__, str(error)
                    )

    # the user's thread

    def _trim(self, event: Event) -> None:
        try:
            returned = self._guard.trim(event.framework)
        except MemguardError as error:
            _log.debug("nothing was trimmed under pressure: %s", str(error))
            return
        who = event.framework or "all frameworks"
        text = f"trimmed {who} under pressure: {format_size(returned)} went back to the driver"
        done = Event(time.time(), "trim", text, uuid=event.uuid, framework=event.framework, bytes=returned)
        self._event(done, logging.INFO)

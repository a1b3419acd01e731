"""What looks on while a budget is active: the monitor and its timeline, and the diagnosis of an out-of-memory.

The monitor's thread notices and says; what frees memory or raises waits for a checkpoint on the user's thread.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from memguard._devices import contexts
from memguard._observer import Observer
from memguard._oom import hooks
from memguard._types import Event, Pressure, Sample, WorkloadReport
from memguard._units import format_size
from memguard.errors import MemguardError, UnderPressure

if TYPE_CHECKING:
    from memguard._guard import Guard
    from memguard._monitor import pressure
    from memguard._monitor.sampler import Monitor
    from memguard._timeline import Writer

_log = logging.getLogger("memguard")
_REPETITIONS = 100
"""Ends of one workload that are remembered for the question whether it leaks."""

_NAMES = 256
"""Workloads that are remembered, by name."""

callbacks: list[Callable[[Event], None]] = []
"""Registered with `memguard.on_pressure`: of the process, as they outlive a budget."""

_monitors = threading.local()
"""On a monitor's thread: `guard`, whose budget a callback there may end."""


def belated(active: Guard | None) -> bool:
    """Whether this is the thread of a monitor whose own budget is over, while another one is active."""
    own = getattr(_monitors, "guard", None)
    return own is not None and active is not None and active is not own


def began(guard: Guard) -> None:
    """The budget was begun on this thread: where that is a monitor's, it may end this one from now on."""
    if getattr(_monitors, "guard", None) is not None:
        _monitors.guard = guard


class _Repeated:
    """The ends of one workload."""

    def __init__(self) -> None:
        self._after: deque[int] = deque(maxlen=_REPETITIONS)
        self._left: deque[int] = deque(maxlen=_REPETITIONS)
        self._count = 0
        self._said = False

    def again(self, after: int, delta: int) -> int | None:
        """The bytes that each repetition leaves behind, where they are suspected to leak for the first time."""
        self._count += 1
        self._after.append(after)
        self._left.append((self._left[-1] if self._left else 0) + delta)
        if self._said or (self._count > 20 and self._count % 10):  # half a millisecond for a hundred of them
            return None
        from memguard._monitor.pressure import leak

        each = [leak(list(series)) for series in (self._after, self._left)]
        found = [size for size in each if size is not None]
        self._said = len(found) == 2
        return min(found) if self._said else None


class Watch(Observer):
    """Of one guard, from `start` to `stop`."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._writer: Writer | None = None
        self._undo: Callable[[], None] | None = None
        self._due: deque[Event] = deque(maxlen=64)  # trims that wait for a checkpoint
        self._raises: dict[tuple[str | None, str | None], Event] = {}  # so do these
        self._settings: pressure.Settings | None = None
        self._repeated: dict[tuple[str, str], _Repeated] = {}
        self._failed: list[Callable[[Event], None]] = []
        self._here = threading.local()  # of each thread: whether it is the monitor's, or in a checkpoint already
        self.monitor: Monitor | None = None

    def prepare(self, before: Guard | None) -> None:
        """Raise TimelineError where the timeline could not be begun when `before` is over, which may write the same."""
        self._writer = self._made_writer()
        if self._writer is not None:
            other = before.observer._writer if before is not None and isinstance(before.observer, Watch) else None
            self._writer.check(other.path if other is not None else None)

    def start(self) -> None:
        """Hooks for errors always; a thread and a file only where the budget has `monitor`."""
        self._undo = hooks.install(self)
        wanted = self._guard.budget.monitor
        if wanted is None:
            return
        from memguard._monitor.pressure import Settings
        from memguard._monitor.sampler import Monitor

        self._writer = self._writer or self._made_writer()
        if self._writer is not None:
            self._writer.begin()
        devices = [part.device for part in self._guard.plan.devices]
        self._settings = Settings.of(wanted, self._guard.budget.on_pressure, devices)
        self.monitor = Monitor(self._take, self._act, self._settings, record=self._record)
        atexit.register(self._ended)
        self.monitor.start()

    def _made_writer(self) -> Writer | None:
        wanted = self._guard.budget.monitor
        if wanted is None or wanted.timeline is None:
            return None
        from memguard._timeline import Writer, rank_of

        return Writer(
            wanted.timeline,
            self._guard.plan,
            limit_bytes=wanted.timeline_size,
            rank=rank_of(os.environ),
            simulated=self._guard.host.simulated,
            say=_log.warning,
            begin=False,
        )

    def stop(self) -> None:
        atexit.unregister(self._ended)
        monitor, self.monitor = self.monitor, None
        writer, self._writer = self._writer, None
        undo, self._undo = self._undo, None
        try:  # a Ctrl-C in the first wait must not leave the rest as it is
            if monitor is not None:
                monitor.stop()
        finally:
            try:
                if writer is not None:
                    writer.close()
            finally:
                if undo is not None:
                    undo()

    def _ended(self) -> None:
        """The interpreter ends: before the frameworks go, nobody looks at them any more."""
        if self.monitor is not None:
            self.monitor.stop()

    def forked(self) -> None:
        _monitors.guard = None  # a callback forked: the child's thread is no monitor's
        if self.monitor is not None:
            self.monitor.forked()
        if self._writer is not None:
            self._writer.forked()

    def checkpoint(self) -> None:
        """Trim what the budget says to trim under pressure; raise UnderPressure where it says `raise`, and it lasts."""
        here = self._here
        if getattr(here, "busy", False) or getattr(here, "monitor", False):
            return
        here.busy = True
        try:
            while self._due:
                self._trim(self._due.popleft())
            lasting = [event for event in self._taken_raises() if self._critical(event)]
        finally:
            here.busy = False
        for event in lasting:
            raise UnderPressure(event.framework, event.uuid, event.text)

    def _taken_raises(self) -> list[Event]:
        taken = [self._raises.pop(key, None) for key in list(self._raises)]
        return [event for event in taken if event is not None]

    def _critical(self, event: Event) -> bool:
        """Whether it is, now: after what was trimmed, and whatever the last sample saw."""
        from memguard._monitor import pressure

        assert self._settings is not None
        try:
            state, _ = pressure.decide(self._settings, self._guard.sample(), pressure.START)
        except MemguardError:
            return False
        return state.level(event.uuid, event.framework) is Pressure.CRITICAL

    def failed(self, error: BaseException) -> None:
        hooks.seen(error)

    def finished(self, report: WorkloadReport) -> None:
        """Whether a workload leaks: what is in use after it grows, and it is the workload that leaves it behind."""
        if report.delta is None or report.after is None:
            return
        key = report.name, report.framework
        repeated = self._repeated.pop(key, None) or _Repeated()
        self._repeated[key] = repeated  # the latest last
        while len(self._repeated) > _NAMES:
            self._repeated.pop(next(iter(self._repeated)))
        each = repeated.again(report.after, report.delta)
        if each is None:
            return
        text = f"workload {report.name!r} of {report.framework} leaves {format_size(each)} more behind each time"
        self._event(Event(time.time(), "leak", text, framework=report.framework, bytes=each), logging.WARNING)

    # what a diagnosis is made of

    def scene(self) -> hooks.Scene:
        """Ledger, plan, other processes and the last samples, read now."""
        guard = self._guard
        ledger = guard.ledger()
        processes = {
            part.device.uuid: {p: n for p, n in guard.host.processes(part.device).items() if p != guard.host.pid}
            for part in guard.plan.devices
        }
        samples = self.monitor.last(10.0) if self.monitor is not None else []
        return hooks.Scene(ledger, guard.plan, processes, tuple(samples))

    def diagnosed(self, report: Mapping[str, Any]) -> None:
        """An out-of-memory was explained: into the timeline with it, and to the callbacks on this thread."""
        if self._writer is not None:
            self._writer.oom(report)
        who, size = report["requester"], report["requested"]
        text = f"out of memory: {who or 'unknown'}: {report['why'] or report['error']}"
        self._call(Event(time.time(), "oom", text, uuid=report["uuid"], framework=who, bytes=size))

    # the monitor's thread

    def _take(self) -> Sample:
        self._here.monitor, _monitors.guard = True, self._guard
        if not getattr(self._here, "relaxed", False):
            self._here.relaxed = contexts.relax()
        return self._guard.sample()

    def _act(self, action: pressure.Action) -> None:
        event = action.event
        if action.kind == "log":
            _log.info("%s", event.text)
        elif action.kind == "warn":
            _log.warning("%s", event.text)
        elif action.kind == "trim":
            self._due.append(event)
        elif action.kind == "raise":
            self._raises[event.uuid, event.framework] = event
        elif action.kind == "callback":
            self._call(event)

    def _record(self, sample: Sample, events: list[Event]) -> None:
        writer = self._writer
        if writer is not None:
            writer.sample(sample)
            for event in events:
                writer.event(event)

    def _event(self, event: Event, level: int) -> None:
        _log.log(level, "%s", event.text)
        if self._writer is not None:
            self._writer.event(event)
        self._call(event)

    def _call(self, event: Event) -> None:
        for callback in list(callbacks):
            try:
                callback(event)
            except (Exception, SystemExit) as error:
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

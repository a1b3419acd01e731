"""The session of a budget: its guard (which applies the caps), out-of-memory hooks, monitor, timeline and extensions.

The monitor's thread detects and reports memory pressure. The next `memguard.checkpoint`, on a thread of the program,
trims caches or raises UnderPressure.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from memguard._base import life
from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.types import Event, Pressure, RefusedRequest, Sample, WorkloadReport
from memguard._base.undo import Undo
from memguard._base.units import format_size
from memguard._devices import contexts, suspension
from memguard._guard.elastic import thread_flags
from memguard._oom import hooks
from memguard._oom.refusal import RefusalEvents
from memguard._runtime.leaks import Workloads
from memguard.errors import MemguardError, UnderPressure

if TYPE_CHECKING:
    from memguard._base.framework_spec import CacheName
    from memguard._guard.guard import Guard
    from memguard._oom.report import Report
    from memguard._runtime import pressure
    from memguard._runtime.callbacks import Watch
    from memguard._runtime.extensions import BudgetLease, Extension, OnPoll, Say
    from memguard._runtime.sampler import Monitor
    from memguard._timeline import Writer


event_callbacks: list[Watch] = []
"""Callbacks of `memguard.on_event`. They stay registered when a budget ends."""
sample_callbacks: list[Watch] = []
"""Callbacks of `memguard.on_sample`. They stay registered when a budget ends; a fork clears them in the child."""
WITHOUT_MONITOR = (
    "memguard.on_sample: the active budget takes no samples, so nothing is called\n"
    "    fix: write 'monitor: {interval: 500ms}' in the budget"
)

_thread = threading.local()
"""On a monitor thread, `_thread.session` is the session that the thread monitors; on other threads it is not set."""


def outlived(active: Session | None) -> bool:
    """True if this thread is the monitor thread of an ended budget while `active` is the session of another budget."""
    own = getattr(_thread, "session", None)
    return own is not None and active is not None and active is not own


def on_monitor() -> bool:
    """True on a monitor thread, which also runs `on_event` callbacks."""
    return getattr(_thread, "session", None) is not None


class Session:
    """Runs one budget with its extensions, from `start` until its guard stops."""

    def __init__(self, guard: Guard, extensions: Sequence[Extension] = ()) -> None:
        self.guard = guard
        self.monitor: Monitor | None = None
        self.extensions = tuple(extensions)
        self._writer: Writer | None = None
        self.undo = Undo()
        """Undo steps that run at the end of the budget, before its allocator caps are removed."""
        self._pending_trims: deque[Event | None] = deque(maxlen=64)
        """The pressure events for which the next checkpoint trims caches. `wake` adds None, so that the
        checkpoint calls the extensions."""
        self._pending_errors: dict[tuple[str | None, str | None], Event] = {}
        """The pressure events for which the next checkpoint raises UnderPressure, by UUID and framework."""
        self._settings: pressure.Settings | None = None
        self.lease: BudgetLease | None = None
        """The budget's claim of GPU memory among the processes of this machine, or None. The guard releases the lease
        last."""
        self.simulated_stand_in = False
        """True if a simulated GPU replaces a missing one. `init` with the same budget then returns this session."""
        self._workloads = Workloads()
        self._refusals = RefusalEvents()
        self._pid = os.getpid()
        self._here = threading.local()  # per thread: `monitor` is True on the monitor's, `busy` in a checkpoint

    @property
    def active(self) -> bool:
        """True if the budget is in effect in this process."""
        return self.guard.active

    def prepare(self, before: Session | None) -> None:
        """Let each extension reject the budget by raising an error, while the session `before` is still in effect."""
        for extension in self.extensions:
            extension.prepare(self, before)

    def while_waiting(self, say: Say) -> OnPoll | None:
        """The first function that an extension's `while_waiting` returns; None if all return None."""
        looks = (extension.while_waiting(self, say) for extension in self.extensions)
        return next((look for look in looks if look is not None), None)

    def set_lease(self, lease: BudgetLease) -> None:
        """Set the budget's lease, which may be new or taken over from the previous budget. The guard releases it after
        all caps are removed."""
        self.lease = lease
        self.guard.undo.add("the lease", lease.close)

    @property
    def writer(self) -> Writer | None:
        """The timeline's writer, if the budget has a timeline."""
        return self._writer

    def write_to(self, writer: Writer) -> None:
        """Set the writer of samples, events and refused requests. `begin_timeline` later creates the file."""
        self._writer = writer

    def begin_timeline(self, writer: Writer) -> None:
        self._writer = writer
        self.undo.add("timeline", writer.close)
        self.undo.add("refused requests", lambda: self._write_refusals(everything=True))
        writer.begin()

    def start(self) -> None:
        """Apply the budget, install the out-of-memory hooks, and start the monitor and the extensions."""
        self.guard.callbacks.stop = self.undo
        self.undo.add("monitor", self._forget)
        self.guard.start()
        try:
            of_guard = self.guard.callbacks
            of_guard.event, of_guard.checkpoint, of_guard.workload = self._announce, self.checkpoint, self._finished
            of_guard.refusal = self._refused
            self.undo.add("hooks for uncaught errors", lambda: hooks.uninstall(self._oom_context))
            hooks.install(self._oom_context, self._write_oom, self._announce_oom)
            monitor = self._make_monitor()
            for extension in self.extensions:
                if extension.before_monitor:
                    extension.start(self)
            if monitor is not None:
                self.undo.add("monitor", monitor.stop)
            if monitor is not None or self.extensions:
                # At interpreter exit stop the monitor thread too: no thread may read frameworks that are shutting down.
                self.undo.add("monitor", lambda: life.not_at_exit(self._at_exit))
                life.at_exit(life.HookOrder.BUDGET, self._at_exit)
            if monitor is not None:
                monitor.start()
            elif sample_callbacks:
                _log.warning("%s", WITHOUT_MONITOR)
            for extension in self.extensions:
                if not extension.before_monitor:
                    extension.start(self)
        except BaseException:
            self.guard.stop()
            raise
        if getattr(_thread, "session", None) is not None:
            _thread.session = self  # a callback on a monitor thread began this budget, so it may also end the budget

    def _make_monitor(self) -> Monitor | None:
        """Create the monitor without starting it; None if the budget has none."""
        budget = self.guard.budget
        if budget.monitor is None:
            return None
        from memguard._runtime.pressure import Settings
        from memguard._runtime.sampler import Monitor

        parts = self.guard.plan.devices
        self._settings = Settings.of(budget.monitor, budget.on_pressure, [part.device for part in parts], parts)
        self.monitor = Monitor(self._take, self._act, self._settings, record=self._record)
        return self.monitor

    def _at_exit(self) -> None:
        """Called if the program ends without `memguard.shutdown`. Does nothing in a forked child, which inherits
        the registration."""
        if self._pid != os.getpid():
            return
        if self.monitor is not None:
            self.monitor.stop()
        for extension in self.extensions:
            extension.at_exit()
        self._write_refusals(everything=True)

    def _forget(self) -> None:
        """The last undo step of `undo`: clears the monitor, the writer and the extensions after all have ended."""
        self.monitor = self._writer = None
        self.extensions = ()

    def forked(self) -> None:
        """Reset in a forked child: threads of the parent do not exist there, and inherited locks may be held."""
        self.guard.forked()
        _thread.session = None  # if a callback forked, the child's only thread is no monitor thread
        self._refusals.forked()
        if self.monitor is not None:
            self.monitor.forked()
        if self._writer is not None:
            self._writer.forked()
        for extension in self.extensions:
            extension.forked()

    # the user's threads

    def checkpoint(self) -> None:
        """Trim the caches for which the monitor found critical pressure, and call the extensions.

        Raises UnderPressure if the budget's `on_pressure` has `raise` and the pressure is still critical.
        """
        if not self._pending_trims and not self._pending_errors:
            return
        if suspension.now is not None:  # trims and errors wait until `resume`
            return
        here = self._here
        if getattr(here, "busy", False) or getattr(here, "monitor", False):
            return
        here.busy = True
        try:
            while self._pending_trims:
                if (event := self._pending_trims.popleft()) is not None:
                    self._trim(event)
            for extension in self.extensions:
                extension.checkpoint()
            lasting = [event for event in self._take_errors() if self._critical(event)]
        finally:
            here.busy = False
            if any(extension.waiting for extension in self.extensions):  # interrupted: the next checkpoint continues
                self.wake()
        for event in lasting:
            raise UnderPressure(event.framework, event.uuid, event.text)

    def _trim(self, event: Event) -> None:
        try:
            returned = self.guard.trim(cast("CacheName | None", event.framework))
        except MemguardError as error:
            _log.debug("nothing was trimmed under pressure: %s", str(error))
            return
        who = event.framework or "all frameworks"
        text = f"trimmed {who} under pressure: {format_size(returned)} went back to the driver"
        _log.info("%s", text)
        self._announce(Event(time.time(), "trim", text, uuid=event.uuid, framework=event.framework, bytes=returned))

    def _take_errors(self) -> list[Event]:
        taken = [self._pending_errors.pop(key, None) for key in list(self._pending_errors)]
        return [event for event in taken if event is not None]

    def _critical(self, event: Event) -> bool:
        """Take a new sample. True if the pressure of the event's framework and GPU is still critical."""
        from memguard._runtime import pressure

        assert self._settings is not None
        try:
            state, _ = pressure.decide(self._settings, self.guard.sample(), pressure.START)
        except MemguardError:
            return False
        return state.level(event.uuid, event.framework) is Pressure.CRITICAL

    def _finished(self, report: WorkloadReport, seconds: float, failed: str | None) -> None:
        """Called after a workload. `failed`: the class name of its exception, or None. Warns if the workload leaks."""
        for extension in self.extensions:
            extension.finished(report, seconds, failed)
        each = None if failed is not None else self._workloads.leaked(report)
        if each is not None:
            text = f"workload {report.name!r} of {report.framework} leaves {format_size(each)} more behind each time"
            _log.warning("%s", text)
            self._announce(Event(time.time(), "leak", text, framework=report.framework, bytes=each))

    # out-of-memory errors

    def _oom_context(self) -> hooks.OomContext:
        """Collect the data of an out-of-memory report: ledger, plan, other processes, last samples, budget, peaks."""
        guard = self.guard
        ledger = guard.ledger()
        processes = {
            part.device.uuid: {p: n for p, n in guard.host.processes(part.device).items() if p != guard.host.pid}
            for part in (guard.plan.devices if suspension.now is None else ())
        }
        samples = self.monitor.last(10.0) if self.monitor is not None else []
        return hooks.OomContext(ledger, guard.plan, processes, tuple(samples), guard.budget, guard.peaks())

    def _refused(self, request: RefusedRequest) -> None:
        """Write a refused request to the timeline. Called within the allocation, so it calls no `on_event` callback,
        which could run any code."""
        if (writer := self._writer) is not None:
            for event in self._refusals.refused(request):
                writer.event(event)

    def _write_refusals(self, everything: bool = False) -> None:
        if (writer := self._writer) is not None:
            for event in self._refusals.due(everything):
                writer.event(event)

    def _write_oom(self, report: Report) -> None:
        """Write the report to the timeline. Counts the request unless the allocator reported it to memguard."""
        who, request = report.verdict.requester, None if report.moment is None else report.moment.id
        if request is None and who is not None and who in self.guard.frameworks:
            self.guard.refusals.add(RefusedRequest(who, "text", report.time, report.uuid, report.verdict.requested))
        self._write_refusals(everything=True)
        if self._writer is not None:
            record = report.as_dict()
            if (event := self._refusals.event_of(request)) is not None:
                record["moment"]["event"] = event
            self._writer.oom(record)

    def _announce_oom(self, report: Report) -> None:
        who, size = report.verdict.requester, report.verdict.requested
        text = f"out of memory: {who or 'unknown'}: {report.why or report.error}"
        self._call(Event(time.time(), "oom", text, uuid=report.uuid, framework=who, bytes=size))

    # the monitor's thread

    def _take(self) -> Sample:
        self._here.monitor, _thread.session, thread_flags.started_by_memguard = True, self, True
        if not getattr(self._here, "relaxed", False):
            self._here.relaxed = self.guard.host.simulated or contexts.relax()
        sample = self.guard.sample()
        try:
            return self.guard.rebalance(sample)
        except Exception as error:  # the sample is valid even if the caps could not be moved
            _log.debug("no headroom was given: %s", text_of(error))
        return sample

    def _act(self, action: pressure.Action) -> None:
        event = action.event
        if action.kind == "log":
            _log.info("%s", event.text)
        elif action.kind == "warn":
            _log.warning("%s", event.text)
        elif action.kind == "trim":
            self._pending_trims.append(event)
        elif action.kind == "raise":
            self._pending_errors[event.uuid, event.framework] = event
        elif action.kind == "callback":
            self._call(event)

    def _record(self, sample: Sample, events: list[Event]) -> None:
        writer, moved = self._writer, self.guard.take_events()
        if writer is not None:
            writer.sample(sample)
            self._write_refusals()
            for event in [*events, *moved]:
                writer.event(event)
        for event in moved:
            self._call(event)
        for extension in self.extensions:
            extension.tick(sample)
        if sample_callbacks and sample.devices:  # a sample without devices comes from a failed NVML reading
            from memguard._runtime.callbacks import give

            give(sample_callbacks, sample, lambda: self.active)

    # any thread

    def wake(self) -> None:
        """Make the next `checkpoint` call `Extension.checkpoint`."""
        self._pending_trims.append(None)

    def announce(self, event: Event) -> None:
        """Write an event of an extension or of `retry` to the timeline and pass it to the `on_event` callbacks."""
        self._announce(event)

    def _announce(self, event: Event) -> None:
        """Write the event to the timeline and pass it to the `on_event` callbacks."""
        if (writer := self._writer) is not None:
            writer.event(event)
        self._call(event)

    def _call(self, event: Event) -> None:
        for watch in list(event_callbacks):
            try:
                watch.callback(event)
            except (Exception, SystemExit) as error:  # `failed` logs the error once; the callback stays registered
                watch.failed("memguard.on_event", error)

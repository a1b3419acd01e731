"""A budget in effect: its guard, the hooks for out-of-memory errors, the monitor and the timeline.

The monitor's thread notices and reports. What frees memory or raises waits for a checkpoint on the user's thread.
"""

from __future__ import annotations

import atexit
import importlib
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol, cast

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.types import Event, Moment, Pressure, Sample, WorkloadReport
from memguard._base.undo import Undo
from memguard._base.units import format_size
from memguard._devices import contexts, suspension
from memguard._guard.shares import own_thread
from memguard._oom import hooks
from memguard._runtime.leaks import Workloads
from memguard._runtime.refusals import Refusals
from memguard.errors import MemguardError, UnderPressure

if TYPE_CHECKING:
    from memguard._base.framework_spec import CacheName
    from memguard._guard.guard import Guard
    from memguard._node.leases.lease import Lease
    from memguard._node.leases.neighbours import Watch as LeaseWatch
    from memguard._oom.report import Report
    from memguard._runtime import pressure
    from memguard._runtime.beside import Beside
    from memguard._runtime.sampler import Monitor
    from memguard._runtime.watches import Watch
    from memguard._timeline import Writer


callbacks: list[Watch] = []
"""Registered with `memguard.on_event`. They belong to the process, and outlive a budget."""
watches: list[Watch] = []
"""Registered with `memguard.on_sample`. They too; a forked child has none."""
WITHOUT_MONITOR = (
    "memguard.on_sample: the active budget takes no samples, so nothing is called\n"
    "    fix: write 'monitor: {interval: 500ms}' in the budget"
)

_thread = threading.local()
"""`session`, on a monitor's thread: the one whose budget a callback there may end."""


def outlived(active: Session | None) -> bool:
    """Whether this thread is the monitor of a budget that is over, while another budget is active."""
    own = getattr(_thread, "session", None)
    return own is not None and active is not None and active is not own


def on_monitor() -> bool:
    """Whether this thread is a monitor's, which also runs functions of `on_event`."""
    return getattr(_thread, "session", None) is not None


class Watched(Protocol):
    """A budget that `memguard top` of other processes may watch: `memguard._node.top.server` makes it."""

    def checkpoint(self) -> None:
        """Do what others have asked for."""

    @property
    def waiting(self) -> bool:
        """Whether they have asked for something that is not done."""

    def end(self) -> None: ...


class Session:
    """One budget from `start` until its guard stops."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.monitor: Monitor | None = None
        self._writer: Writer | None = None
        self._undo = Undo()
        self._due: deque[Event | None] = deque(maxlen=64)  # trims that wait for a checkpoint; None: others ask
        self._raises: dict[tuple[str | None, str | None], Event] = {}  # errors that do
        self._settings: pressure.Settings | None = None
        self._watched: Watched | None = None
        self.lease: Lease | None = None
        """What the budget claims of the GPUs, if it does: the guard gives it back last."""
        self._neighbours: LeaseWatch | None = None
        self._workloads = Workloads()
        self._refusals = Refusals()
        self._pid = os.getpid()
        self._beside: Beside | None = None  # with a timeline
        self._here = threading.local()  # per thread: whether it is the monitor's, or in a checkpoint already

    @property
    def active(self) -> bool:
        """Whether the budget is in effect in this process."""
        return self.guard.active

    def prepare(self, before: Session | None) -> None:
        """Raise TimelineError if the timeline cannot be begun once `before` is over, which may write the same file."""
        self._writer = self._new_writer()
        if self._writer is not None:
            self._writer.check(before._writer if before is not None else None)
        if self.guard.budget.device.lease:  # else `init` loads nothing of it
            leases = importlib.import_module("memguard._node.leases.lease")
            old = before.lease if before is not None else None
            suspend = self.guard.budget.suspend
            leaves = suspend.on_demand if suspend is not None else None
            self.have(leases.of_plan(self.guard.own_plan, self.guard.budget.source, old, leaves))

    def have(self, lease: Lease) -> None:
        """The budget's lease: not claimed yet, or that of the same budget before. It outlives every cap."""
        self.lease = lease
        self.guard._undo.add("the lease", lease.close)

    def start(self) -> None:
        """Apply the budget, then hook errors. A thread and a file only if the budget has `monitor`."""
        self.guard._on_stop = self._undo
        self._undo.add("monitor", self._forget)
        self.guard.start()
        try:
            self.guard._on_event = self._announce
            self.guard._on_checkpoint, self.guard._on_workload = self.checkpoint, self._finished
            self.guard._on_refusal = self._refused
            self._undo.add("hooks for uncaught errors", lambda: hooks.uninstall(self._scene))
            hooks.install(self._scene, self._write_oom, self._announce_oom)
            if self.guard.budget.metrics is not None:  # before the first event; else `init` loads nothing of it
                importlib.import_module("memguard._node.metrics").of_budget(self, self._undo)
            if self.guard.budget.monitor is not None:
                self._let_watch(self.guard.budget.monitor.top)  # before the first event
                self._start_monitor()
            elif watches:
                _log.warning("%s", WITHOUT_MONITOR)
            if self.lease is not None:
                self._watch_neighbours(self.lease)
            self._watch_idleness()
            self._tell_others()
        except BaseException:
            self.guard.stop()
            raise
        if getattr(_thread, "session", None) is not None:
            _thread.session = self  # a monitor's callback began this budget, and may end it

    def _watch_neighbours(self, lease: Lease) -> None:
        """Those who use more of its GPUs than they have claimed: named now, and later by the monitor."""
        leases = importlib.import_module("memguard._node.leases.neighbours")
        host, parts = self.guard.host, self.guard.own_plan.devices
        devices = {gpu: part.device for gpu, part in zip(lease.parts, parts, strict=True)}
        watch = leases.Watch(lease, lambda: {gpu: host.processes(one) for gpu, one in devices.items()})
        self._name_neighbours(watch)
        self._neighbours = watch  # from now on the monitor looks, and nobody else

    def _name_neighbours(self, watch: LeaseWatch | None) -> None:
        if watch is not None and suspension.now is None:
            for event in watch.due():
                _log.warning("%s", event.text)
                self._announce(event)

    def _watch_idleness(self) -> None:
        suspend = self.guard.budget.suspend
        if suspend is None or suspend.when_idle is None:
            return
        # By its name: a process that leaves its GPUs is a matter of a layer above, which uses this one.
        when_idle = importlib.import_module("memguard._node.suspend.when_idle")
        self._undo.add("the watch for idleness", when_idle.end_of_budget)
        when_idle.of_budget(suspend.when_idle)

    def _tell_others(self) -> None:
        """`memguard ps` shows the budget, and `memguard suspend PID` asks this process, if the budget allows it."""
        suspend = self.guard.budget.suspend
        if suspend is None:  # without the section `init` loads nothing of it
            return
        listener = importlib.import_module("memguard._node.suspend.listener")
        source, leased = self.guard.budget.source, self.lease is not None and suspend.on_demand is not None
        if self.guard.host.simulated:
            listener.of_simulated(source, self._undo, leased)
        else:
            listener.of_budget(source, suspend.by_others, suspend.host_memory, self._undo, leased)

    def _let_watch(self, wanted: bool) -> None:
        """`memguard top` shows the budget, and asks this process, if the budget allows it."""
        if wanted:  # else `init` loads nothing of it
            server = importlib.import_module("memguard._node.top.server")
            self._watched = server.of_budget(self.guard, self._undo, lambda: self._due.append(None))

    def _start_monitor(self) -> None:
        from memguard._runtime.pressure import Settings
        from memguard._runtime.sampler import Monitor

        budget = self.guard.budget
        assert budget.monitor is not None
        self._writer = self._writer or self._new_writer()
        if self._writer is not None:
            self._undo.add("timeline", self._writer.close)
            self._undo.add("refused requests", lambda: self._write_refusals(everything=True))
            self._writer.begin()
        parts = self.guard.plan.devices
        self._settings = Settings.of(budget.monitor, budget.on_pressure, [part.device for part in parts], parts)
        monitor = self.monitor = Monitor(self._take, self._act, self._settings, record=self._record)
        if self._writer is not None:
            from memguard._runtime.beside import Beside

            self._beside = Beside(self.guard, monitor, self._writer, self._undo)
        self._undo.add("monitor", monitor.stop)
        # At the interpreter's end too: the monitor must not look at frameworks that are being torn down.
        self._undo.add("monitor", lambda: atexit.unregister(self._at_exit))
        atexit.register(self._at_exit)
        monitor.start()

    def _new_writer(self) -> Writer | None:
        wanted = self.guard.budget.monitor
        if wanted is None or wanted.timeline is None:
            return None
        from memguard._budget.ranks import rank_of
        from memguard._timeline import Writer

        return Writer(
            wanted.timeline,
            self.guard.plan,
            limit_bytes=wanted.timeline_size,
            rank=rank_of(os.environ),
            simulated=self.guard.host.simulated,
            say=_log.warning,
            begin=False,
        )

    def _at_exit(self) -> None:
        """The program ends without `shutdown`. Nothing in a forked child, which inherits this exit function."""
        if self._pid != os.getpid():
            return
        if self._watched is not None:
            self._watched.end()
        if self.monitor is not None:
            self.monitor.stop()
        if self._beside is not None:
            self._beside.at_exit()
        self._write_refusals(everything=True)

    def _forget(self) -> None:
        """The last step, once monitor, timeline and hooks have ended."""
        self.monitor = self._writer = self._beside = self._watched = self._neighbours = None

    def forked(self) -> None:
        """In a forked child: no thread of the parent's is there, and its locks may be held."""
        self.guard.forked()
        _thread.session = None  # if a callback forked: the child's thread is no monitor's
        self._refusals.forked()
        self._beside = self._neighbours = None
        if self.monitor is not None:
            self.monitor.forked()
        if self._writer is not None:
            self._writer.forked()
        if self._watched is not None:
            self._watched.end()

    # the user's threads

    def checkpoint(self) -> None:
        """Trim what the budget says to trim under pressure, and do what others ask through `memguard top`.

        Raise UnderPressure if the budget says so and the pressure lasts.
        """
        if not self._due and not self._raises:  # mostly
            return
        if suspension.now is not None:  # both wait until the process is back
            return
        here = self._here
        if getattr(here, "busy", False) or getattr(here, "monitor", False):
            return
        here.busy = True
        try:
            while self._due:
                if (event := self._due.popleft()) is not None:
                    self._trim(event)
            if self._watched is not None:
                self._watched.checkpoint()
            lasting = [event for event in self._taken_raises() if self._critical(event)]
        finally:
            here.busy = False
            if self._watched is not None and self._watched.waiting:  # it was interrupted: at the next one
                self._due.append(None)
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

    def _taken_raises(self) -> list[Event]:
        taken = [self._raises.pop(key, None) for key in list(self._raises)]
        return [event for event in taken if event is not None]

    def _critical(self, event: Event) -> bool:
        """Whether it is critical now: after the trims, and whatever the last sample saw."""
        from memguard._runtime import pressure

        assert self._settings is not None
        try:
            state, _ = pressure.decide(self._settings, self.guard.sample(), pressure.START)
        except MemguardError:
            return False
        return state.level(event.uuid, event.framework) is Pressure.CRITICAL

    def _finished(self, report: WorkloadReport, seconds: float, failed: str | None) -> None:
        """A workload has ended, with an error of the class `failed`. Warn if it leaks."""
        if self._beside is not None:
            self._beside.finished(report, seconds, failed)
        each = None if failed is not None else self._workloads.leaked(report)
        if each is not None:
            text = f"workload {report.name!r} of {report.framework} leaves {format_size(each)} more behind each time"
            _log.warning("%s", text)
            self._announce(Event(time.time(), "leak", text, framework=report.framework, bytes=each))

    # out-of-memory errors

    def _scene(self) -> hooks.Scene:
        """Ledger, plan, other processes and the last samples, read now."""
        guard = self.guard
        ledger = guard.ledger()
        processes = {
            part.device.uuid: {p: n for p, n in guard.host.processes(part.device).items() if p != guard.host.pid}
            for part in (guard.plan.devices if suspension.now is None else ())
        }
        samples = self.monitor.last(10.0) if self.monitor is not None else []
        return hooks.Scene(ledger, guard.plan, processes, tuple(samples), guard.budget, guard.peaks())

    def _refused(self, moment: Moment) -> None:
        """A request was refused, within the allocation: into the timeline. Callbacks run no user code in there."""
        if (writer := self._writer) is not None:
            for event in self._refusals.refused(moment):
                writer.event(event)

    def _write_refusals(self, everything: bool = False) -> None:
        if (writer := self._writer) is not None:
            for event in self._refusals.due(everything):
                writer.event(event)

    def _write_oom(self, report: Report) -> None:
        who, moment = report.verdict.requester, report.moment
        counted = moment is not None and moment.source in ("refusal", "observer")
        if not counted and report.uuid is not None and who is not None and who in self.guard.frameworks:
            self.guard.refused(who, report.uuid, report.time, report.verdict.requested)
        self._write_refusals(everything=True)
        if self._writer is not None:
            record = report.as_dict()
            if moment is not None and (event := self._refusals.event_of(moment.id)) is not None:
                record["moment"]["event"] = event
            self._writer.oom(record)

    def _announce_oom(self, report: Report) -> None:
        who, size = report.verdict.requester, report.verdict.requested
        text = f"out of memory: {who or 'unknown'}: {report.why or report.error}"
        self._call(Event(time.time(), "oom", text, uuid=report.uuid, framework=who, bytes=size))

    # the monitor's thread

    def _take(self) -> Sample:
        self._here.monitor, _thread.session, own_thread.mine = True, self, True
        if not getattr(self._here, "relaxed", False):
            self._here.relaxed = contexts.relax()
        sample = self.guard.sample()
        try:
            return self.guard.settle(sample)
        except Exception as error:  # a sample is taken all the same
            _log.debug("no headroom was given: %s", text_of(error))
        return sample

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
        writer, moved = self._writer, self.guard.moved()
        if writer is not None:
            writer.sample(sample)
            self._write_refusals()
            for event in [*events, *moved]:
                writer.event(event)
            if sample.devices and self._beside is not None:
                self._beside.sampled()
        for event in moved:
            self._call(event)
        self._name_neighbours(self._neighbours)
        if watches and sample.devices:  # without devices: a reading that failed
            from memguard._runtime import samples

            samples.give(sample, lambda: self.active)

    # any thread

    def announce(self, event: Event) -> None:
        """Something that was done from outside the budget: into the timeline, and to the callbacks."""
        self._announce(event)

    def _announce(self, event: Event) -> None:
        """Into the timeline, and to the callbacks."""
        if (writer := self._writer) is not None:
            writer.event(event)
        self._call(event)

    def _call(self, event: Event) -> None:
        for watch in list(callbacks):
            try:
                watch.callback(event)
            except (Exception, SystemExit) as error:  # logged once: it is called again at the next event
                watch.failed("memguard.on_event", error)


def name_of(callback: object) -> str:
    """The callback's name and place, which it may not tell."""
    try:
        code = getattr(callback, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        return f"{getattr(callback, '__qualname__', None) or repr(callback)}{where}"
    except Exception:
        return "a function"

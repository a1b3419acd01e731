"""The guard: applies a budget, reads memory usage, admits requests, and undoes the budget.

The guard delegates to `caps` (the plan and the enforcement of each cap), `elastic` (changing caps, trimming caches),
`admission` (reservations) and `reader` (the ledger). `_budget.policy` computes the plan (each framework's cap on each
GPU).
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from memguard._base.blocks import Block, End
from memguard._base.interrupts import deferred_signals
from memguard._base.logs import log as _log
from memguard._base.logs import words_of
from memguard._base.text import shown
from memguard._base.types import (
    Device,
    DevicePlan,
    Enforcement,
    Event,
    Plan,
    RefusedRequest,
    Room,
    Sample,
    State,
    Usage,
    WorkloadReport,
    sample_of,
)
from memguard._base.undo import Undo
from memguard._budget import policy
from memguard._budget.shared_pool import allocator_of
from memguard._devices import suspension
from memguard._frameworks import registry
from memguard._frameworks.base import Framework
from memguard._frameworks.import_hook import ImportHook, RealImports
from memguard._frameworks.specs import SPECS
from memguard._guard.caps import Callbacks, CappedFramework, CapTable, size_of
from memguard._guard.elastic import ElasticCaps, above_cap
from memguard._ledger.overhead import own_bytes
from memguard._ledger.reader import LedgerReader
from memguard._ledger.rows import Reading, device_ledger
from memguard._ledger.types import Ledger
from memguard._oom import hooks
from memguard._oom.refusal import RefusalCounts
from memguard.errors import CapNotApplied, MemguardError, NotActive, PlanError, Suspended

if TYPE_CHECKING:
    from memguard._base.framework_spec import CacheName, FrameworkName
    from memguard._budget import Budget
    from memguard._devices.host import Host
    from memguard._devices.suspension import Off
    from memguard._guard.admission import Admission
    from memguard._guard.figures import Reclaimable
    from memguard._guard.suspended import Figures


_WSL_WARNING = (
    "this is WSL: an allocation for which the GPU has no room may be served from the machine's memory, slowly and "
    "without an out-of-memory error. The caps of frameworks hold; what lies outside them may spill. "
    "fix: keep device.limit below what Windows leaves free on the GPU; `memguard doctor --explain sysmem-fallback`"
)
_IMPORT_LOCK_TIMEOUT = 5.0
"""Seconds that a framework's import waits for the guard's lock. After that, the cap is set later."""
_SAMPLES_PER_CHECK = 10
"""Number of samples between two checks whether other code changed a cap. Each check calls every framework's adapter
once."""


class AdmissionOnDemand:
    """Creates the admission control of one budget at the first request, so that `init` need not import
    `_guard.admission`."""

    def __init__(self, make: Callable[[], Admission]) -> None:
        self._make = make
        self._made: Admission | None = None

    def get(self) -> Admission:
        """Return the admission control. The first call creates it."""
        if (made := self._made) is None:
            made = vars(self).setdefault("_first", self._make())  # atomic, so that all threads get the same object
            self._made = made
        return made

    @property
    def idle(self) -> bool:
        """True if no workload holds or awaits a reservation."""
        return self._made is None or self._made.queue.idle

    @property
    def working(self) -> bool:
        """True while a workload that holds a reservation is running."""
        return self._made is not None and self._made.working

    def reserved_not_taken(self, framework: str, uuid: str, in_use: int | None) -> int:
        """Bytes that the framework's workloads have reserved on a GPU and not yet allocated, computed from `in_use`."""
        return 0 if self._made is None else self._made.reserved_not_taken(framework, uuid, in_use)

    def read_reserved_not_taken(self, framework: str, uuid: str) -> int:
        """Like `reserved_not_taken`, but reads `in_use` from the framework. Takes no lock."""
        return 0 if self._made is None else self._made.read_reserved_not_taken(framework, uuid)

    def wake(self) -> None:
        """Make all waiting workloads retry their reservations."""
        if self._made is not None:
            self._made.queue.wake()

    def forked(self) -> None:
        """Drop all reservations in a forked child."""
        if self._made is not None:
            self._made.queue.forked()


class Guard:
    """An applied budget, as `memguard.init` returns it. `print(guard)` shows the plan and the enforcement of each
    cap."""

    def __init__(self, budget: Budget, host: Host) -> None:
        self.budget = budget
        self.callbacks = Callbacks()
        self.caps = caps = CapTable(budget, host, self.callbacks)
        self.notes, self.sharing = caps.notes, caps.sharing
        # The ledger also shows frameworks in use that the budget does not name, except on simulated GPUs.
        unnamed = () if host.simulated else tuple(name for name in SPECS if name not in budget.frameworks)
        self.reader = LedgerReader(host, unnamed, caps.warn)
        self.admission = AdmissionOnDemand(self._make_admission)
        self.elastic = ElasticCaps(caps, self.reader, self.admission)
        self.trims = self.elastic.trims
        self.permanent: list[str] = []
        self.undo = Undo()
        """The undo steps of all changes that `start` made."""
        self.refusals = RefusalCounts()
        self._hook = ImportHook()
        self._not_undone: list[str] = []
        self._uncapped: set[str] = set()
        """Frameworks whose cap is not set yet, because another thread held the guard's lock during their import."""
        self._samples = 0
        self._started = self._logged = False
        self._real_imports = (
            RealImports([device_plan.device.name for device_plan in self.plan.devices]) if host.simulated else None
        )

    @property
    def host(self) -> Host:
        """Access to NVML and the driver, or to simulated GPUs. While the process is suspended, its methods raise
        Suspended."""
        return self.caps.host

    @property
    def plan(self) -> Plan:
        """The current plan. `resize` and elastic caps replace it."""
        return self.caps.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self.caps.plan = plan

    @property
    def active(self) -> bool:
        """False after `shutdown`, and in a forked child, where the parent's budget does not apply."""
        return self.caps.active

    @property
    def frameworks(self) -> Mapping[str, Framework]:
        """The adapters of the budget's frameworks by name; with simulated GPUs, simulated frameworks."""
        return dict(self.caps.frameworks)

    @property
    def own_plan(self) -> Plan:
        """The plan reduced to one GPU if the rank of this process is known to use only that GPU; otherwise the whole
        plan."""
        return self.caps.own_plan

    def device_plan(self, uuid: str) -> DevicePlan:
        """The plan of one GPU of the budget."""
        return self.caps.device_plan(uuid)

    @property
    def undone(self) -> bool:
        """True if every change is undone. False after an interrupted `start` or `stop`, until another `stop` undoes the
        rest."""
        before = self.callbacks.stop
        return self.caps.stopped and self.undo.done and (before is None or before.done)

    def start(self) -> None:
        """Apply the whole budget, or undo every change and raise. A stopped guard cannot start again."""
        if self._started:
            raise MemguardError("this guard was started before", fix="call memguard.init again")
        self._started = True
        caps = self.caps
        try:
            if self._real_imports is not None:
                self.undo.add("the notice about real frameworks", self._real_imports.stop)
                self._real_imports.start()
            # `state` waits for a running import in another thread, whose import hook may wait for the guard's lock. So
            # read the state before the hooks are installed, and again later without the lock.
            entries = {name: CappedFramework(caps.create(name)) for name in self.budget.frameworks}
            for name, entry in entries.items():
                entry.framework.on_warning = functools.partial(caps.note_conflicting_setting, name)
                entry.framework.on_change = self._find_drift
            states = {name: entry.framework.state() for name, entry in entries.items()}
            for entry in entries.values():
                entry.framework.on_refusal, entry.framework.on_shortage = self._record_refusal, self.elastic.shortage
            with caps.lock:
                for note in caps.plan.notes:
                    caps.warn(note)
                if self.sharing is not None:
                    caps.note(self.sharing.note)
                self._warn_where_busy()
                self._warn_of_mps()
                if caps.host.spills:
                    caps.warn(_WSL_WARNING)
                if caps.stopped:
                    raise NotActive("this budget was shut down while it was being applied")
                self.undo.add("import hooks", self._hook.clear)
                caps.install(entries)
                self._prevent_conflicts(states)
                if (pool := caps.shared_pool) is not None:
                    self.undo.add(pool.name, pool.restore)
                    self.reader.shared_pool = pool
                for name, entry in entries.items():
                    self._start_framework(name, entry, states[name])
            for name, entry in entries.items():
                if entry.enforcement is Enforcement.PENDING and entry.framework.state() is not State.IMPORTABLE:
                    self._imported(name)  # the framework's import began before the import hook was installed
        except BaseException:
            self.stop()
            raise

    def stop(self) -> list[str]:
        """Undo all changes in reverse order. Returns a sentence for each change that could not be undone.

        If `stop` is interrupted, the next call of `stop` continues.
        """
        self._refuse_while_suspended("the end of the budget")
        caps = self.caps
        caps.stopped = True  # from here on no report may state that a cap is enforced
        try:
            if self.callbacks.stop is not None:
                self.callbacks.stop.run()  # without the lock, for which the monitor thread may be waiting
        finally:
            with caps.lock, deferred_signals():  # delay KeyboardInterrupt until every cap is undone
                try:
                    self.undo.run()
                finally:
                    for entry in caps.entries.values():
                        entry.framework.on_refusal = entry.framework.on_shortage = None
                    caps.install({})
                    self.reader.clear()
                    caps.host.close()
                    self.admission.wake()
        stays = [*self._not_undone, *self.permanent]
        if not self._logged:
            self._logged = True
            for sentence in stays:
                _log.info("%s", sentence)
        return stays

    def forked(self) -> None:
        """In a forked child, where the parent's budget does not apply, replace the locks and drop hooks and
        reservations, without calling CUDA."""
        self.caps.forked()
        self.reader.forked()
        self.admission.forked()
        self._hook.clear()
        if self._real_imports is not None:
            self._real_imports.stop()

    def suspend(self, reading: Ledger, figures: Figures, off: Off) -> None:
        """Switch to the suspended state. Until `resumed` is called, the guard's calls return `reading` or raise
        Suspended.

        Callers hold `caps.lock`. For the parameters see `SuspendedGpus`.
        """
        from memguard._guard.suspended import SuspendedGpus, refusing

        # Set `suspended` before the host, because a caller that gets Suspended from the new host reads `suspended`.
        self.caps.suspended = SuspendedGpus(reading, figures, off, self.caps.host)
        self.caps.host = self.reader.host = refusing(self.caps.host)

    def resumed(self) -> None:
        """Restore the host from before the suspension. Does nothing if the guard was not suspended."""
        if (suspended := self.caps.suspended) is not None:
            self.caps.host = self.reader.host = suspended.host
            self.caps.suspended = None

    def ledger(self) -> Ledger:
        """Read every GPU. NVML is read before and after the frameworks. If NVML's figures changed in between, NVML and
        the frameworks are read again.

        While the process is suspended, returns the last reading with one more row, which subtracts this process's
        bytes because they are in host memory.
        """
        if (suspended := self.caps.suspended) is not None:
            return suspended.ledger()
        try:
            return self._read_ledger()
        except Suspended:  # the process was suspended during the reading
            suspended = self.caps.suspended
        return suspended.ledger() if suspended is not None else self._read_ledger()  # if resumed meanwhile, read again

    def _read_ledger(self) -> Ledger:
        self._find_drift()
        # Do not take the guard's lock, because the thread that holds it may be waiting for a lock that this thread
        # holds.
        caps, reader = self.caps, self.reader
        if caps.stopped or caps.pid != os.getpid() or not caps.entries:
            caps.check_active()
        frameworks, plan, entries = caps.frameworks, caps.plan, caps.entries
        readings = [reader.reading(device_plan, frameworks) for device_plan in plan.devices]
        if caps.stopped:  # if another thread shut down, the reading is incomplete
            caps.check_active()
        notes, enforcements, reporting = [*caps.notes], {}, []
        for name, entry in entries.items():
            framework = entry.framework
            enforcements[name] = entry.enforcement._value_
            if framework.unseen() is None:
                reporting.append(name)
            if framework.notes or entry.drift:
                notes += [*framework.notes, *entry.drift_notes]
        ledgers = []
        for device_plan, reading in zip(plan.devices, readings, strict=True):
            usages = reading.usages
            ledgers.append(
                reader.ledger_of(
                    reading, device_plan, enforcements, self.refusals.on(device_plan.device.uuid, reporting)
                )
            )
            for name, cap in device_plan.caps.items():
                if (usage := usages.get(name)) is not None and (held := usage[0]) is not None and held > cap:
                    notes += [above_cap(name, held, cap, enforcements.get(name, ""), device_plan.device) or ""]
        return Ledger(time.time(), tuple(ledgers), caps.host.simulated, tuple(notes))

    def sample(self) -> Sample:
        """Read the ledger's figures without building ledger rows. Fast enough for several calls per second on any
        thread.

        Does not take the guard's lock, so that a driver call that hangs here blocks no other thread.
        """
        caps = self.caps
        if caps.suspended is not None:
            caps.suspended.refuse("a sample of the GPUs")
        if not caps.entries or caps.stopped or caps.pid != os.getpid():
            caps.check_active()
        self._samples += 1
        if self._samples % _SAMPLES_PER_CHECK == 1 or self._uncapped:
            self._find_drift()
        frameworks, read, device_plans = caps.frameworks, self.reader.sample, caps.plan.devices
        if len(device_plans) == 1:
            return sample_of((time.time(), (read(device_plans[0], frameworks),)))
        devices = tuple([read(device_plan, frameworks) for device_plan in device_plans])
        return sample_of((time.time(), devices))

    def last_sample(self) -> Sample | None:
        """Like `sample`, but called at the end of a budget, before the caps are undone. None in a forked or suspended
        process, where frameworks and GPUs must not be read."""
        caps = self.caps
        if caps.pid != os.getpid() or suspension.now is not None or caps.suspended is not None or not caps.entries:
            return None
        frameworks, read = caps.frameworks, self.reader.sample
        return sample_of((time.time(), tuple([read(device_plan, frameworks) for device_plan in caps.plan.devices])))

    def peaks(self) -> dict[str, dict[str, int]]:
        """The peak of bytes in use by GPU UUID and framework, as of the last ledger or sample. Omits frameworks that
        report no peak."""
        caps, found = self.caps, self.reader.peaks() if self.caps.suspended is None else {}
        return {uuid: {n: peak for n, peak in peaks.items() if n in caps.frameworks} for uuid, peaks in found.items()}

    def _record_refusal(self, request: RefusedRequest) -> str | None:
        """Record a request that an allocator has refused. Adapters call this. Returns the id of the record.

        Runs within the failing allocation, on the allocating thread. Takes no lock of the guard or the reader, because
        a thread that holds such a lock may be waiting for the allocator.
        """
        caps = self.caps
        device_plan = next((one for one in caps.plan.devices if one.device.uuid == request.uuid), None)
        if device_plan is None or caps.suspended is not None or not caps.active:
            return None
        cap = device_plan.caps.get(request.framework) if request.cap is None else request.cap
        context: Callable[[], hooks.OomContext] = hooks.OomContext
        usages: Mapping[str, Usage | None] = {}
        try:
            reading, processes = self.reader.read_unlocked(device_plan, caps.frameworks)
        except MemguardError as error:  # for example, a GPU is lost
            _log.debug("no reading at a refused request: %s", str(error))
            request = request._replace(cap=cap)
        else:
            usages = reading.usages
            usage = usages.get(request.framework) or Usage(None, None)
            request = request._replace(
                cap=cap, held=usage.held,
                in_use=usage.in_use if request.in_use is None else request.in_use,
                reclaimable=usage.reclaimable if request.reclaimable is None else request.reclaimable,
                free=reading.memory.free if request.free is None else request.free,
            )  # fmt: skip
            entries = caps.entries
            enforcements = {name: entry.enforcement.value for name, entry in entries.items()}
            if (entry := entries.get(request.framework)) is not None and caps.drift_of(request.framework, entry):
                enforcements[request.framework] = Enforcement.WATCHED.value  # other code changed the cap
            others = {pid: size for pid, size in processes.items() if pid != caps.host.pid}
            now = request.time, caps.host.simulated
            context = functools.partial(
                _context_of, reading, device_plan, enforcements, others, caps.plan, self.budget, *now
            )
        request = hooks.record_refusal(
            request._replace(why_no_help=self.elastic.why_no_help(request, device_plan, usages)), context
        )
        self.refusals.add(request)
        if self.callbacks.refusal is not None:
            self.callbacks.refusal(request)
        return request.id

    def require(self, framework: FrameworkName, size: int | str, device: Device | None = None) -> None:
        """Raise BudgetExceeded if `framework` cannot allocate another `size`. May trim other frameworks' caches on the
        calling thread."""
        caps = self.caps
        if caps.suspended is not None:
            caps.suspended.refuse("memguard.require")
        needed = size_of(size)
        if self.callbacks.checkpoint is not None:
            self.callbacks.checkpoint()
        self._find_drift(framework)
        device_plans, checked = caps.plan.devices, False
        if device is None and len(device_plans) == 1 and not caps.stopped and caps.pid == os.getpid():
            if self._fits(framework, needed, device_plans[0]):  # the common case takes no lock
                return
            checked = True
        with caps.lock:
            caps.check_active()
            caps.entry(framework)
            for device_plan in caps.used_by(framework) if device is None else [caps.planned(device)]:
                if checked or not self._fits(framework, needed, device_plan):
                    self.admission.get().require(framework, needed, device_plan.device)

    def _make_admission(self) -> Admission:
        from memguard._guard.admission import Admission

        return Admission(self.caps, self.elastic, self.callbacks, self._find_drift)

    def _fits(self, framework: str, needed: int, device_plan: DevicePlan) -> bool:
        """True if `needed` more bytes fit on the GPU of `device_plan`. Reads other frameworks only if workloads hold
        reservations."""
        if not self.admission.idle:
            return self.admission.get().fits(framework, needed, device_plan.device)
        caps = self.caps
        footprint, name = caps.entry(framework).framework.footprint(needed), allocator_of(device_plan, framework)
        usages, memory = (
            {name: caps.serving(framework, device_plan).usage(device_plan.device)},
            caps.host.memory(device_plan.device),
        )
        return (
            policy.admit(framework, needed, footprint, device_plan.caps[framework], usages, memory, name).refusal
            is None
        )

    def make_room(self, framework: FrameworkName, needed: int, device: Device | None = None) -> Room:
        """Trim other frameworks and raise the cap, so that `framework` can take `needed` bytes from the driver.

        Runs on the calling thread. Trims no more than needed, the largest reclaimable cache first, and nothing if
        `ElasticCaps.why_trim_forbidden` gives a reason. If memory is missing, raises nothing and returns the missing
        bytes in `Room.missing`.
        """
        self._refuse_while_suspended("making room")
        return self.elastic.make_room(framework, needed, device)

    def resize(self, framework: FrameworkName, size: int | str) -> None:
        """Change a cap on every GPU. Trims the framework if it holds more than a lowered cap, and logs the bytes that
        it still holds above the cap."""
        self._refuse_while_suspended("memguard.resize")
        self._find_drift()
        self.elastic.resize(framework, size)

    def trim(self, framework: CacheName | None = None) -> int:
        """Trim the idle caches of one framework, or of all, on this thread. Returns the bytes freed."""
        self._refuse_while_suspended("memguard.trim")
        return self.elastic.trim(framework)

    def rebalance(self, sample: Sample) -> Sample:
        """At a monitor tick, raise elastic caps that have too little headroom above the held bytes in `sample`. Returns
        the sample with the new caps. Changes no cap while another thread holds the guard's lock."""
        return self.elastic.rebalance(sample)

    def take_events(self) -> list[Event]:
        """The events since the last call that report returned memory or changed elastic caps."""
        return self.elastic.take_events()

    def reserved_not_taken(self, framework: FrameworkName, uuid: str) -> int:
        """Bytes that the framework's workloads have reserved on the GPU `uuid` and not yet allocated. Takes no lock."""
        return self.admission.read_reserved_not_taken(framework, uuid)

    def workload(
        self, name: str, *, framework: FrameworkName, needs: int | str | None = None, wait: float | str | None = None
    ) -> Block[WorkloadReport]:
        """Context manager for a named workload of one framework, which reserves `needs` until the block ends. See
        `memguard.workload`."""
        return Block(
            lambda: self.begin_workload(name, framework, needs, wait),
            lambda: self.begin_workload_in_loop(name, framework, needs, wait),
        )

    def begin_workload(
        self, name: str, framework: FrameworkName, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        """Begin a workload. Blocks while it waits for a reservation."""
        if self.caps.suspended is not None:
            self.caps.suspended.refuse(f"workload {name!r}")
        return self.admission.get().begin(name, framework, needs, wait)

    async def begin_workload_in_loop(
        self, name: str, framework: FrameworkName, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        """Like `begin_workload`, without blocking the event loop."""
        if self.caps.suspended is not None:
            self.caps.suspended.refuse(f"workload {name!r}")
        return await self.admission.get().begin_in_loop(name, framework, needs, wait)

    def reclaimable(self) -> Reclaimable:
        """The bytes that each framework could return to the driver. Trims nothing."""
        self._refuse_while_suspended("memguard.reclaimable")
        from memguard._guard.figures import of_sample

        return of_sample(self.sample(), self.caps.plan, self.caps.host.simulated)

    def __repr__(self) -> str:
        """One line for an interactive prompt. `print` shows the plan."""
        gpus = ", ".join(device_plan.device.name for device_plan in self.plan.devices)
        mark = " (simulated)" if self.host.simulated else ""
        state = "active" if self.active else "not active"
        return shown(
            f"<Guard {self.budget.source or 'of a mapping'}: {', '.join(self.caps.entries)} on {gpus}{mark}, {state}>"
        )

    def __str__(self) -> str:
        from memguard._base.displays import plan_text

        return shown(plan_text(*self._plan_and_caps()))

    def _repr_html_(self) -> str:
        from memguard._base.displays import plan_html

        return plan_html(*self._plan_and_caps())

    def _plan_and_caps(self) -> tuple[Plan, dict[str, str], list[str]]:
        """The plan, the enforcement of each cap, and the notes."""
        self._find_drift()
        caps = self.caps
        return caps.plan, {name: entry.enforcement.value for name, entry in caps.entries.items()}, caps.all_notes()

    def _start_framework(self, name: str, entry: CappedFramework, state: State) -> None:
        if state is State.ABSENT:
            self._mark_absent(name, entry)
        elif state is State.IMPORTABLE:
            entry.framework.prepare(self.undo)
            self._hook.watch(entry.framework.hook, lambda: self._imported(name))
        else:
            self._apply(name, entry)

    def _imported(self, name: str) -> None:
        """Set the cap of a framework that is being imported. Runs on the importing thread; an error raised here fails
        the import.

        Waits `_IMPORT_LOCK_TIMEOUT` seconds for the guard's lock. After a timeout, `_cap_uncapped` sets the cap later.
        """
        if self.caps.suspended is not None:  # set the cap when the process resumes
            suspension.defer(lambda: self._imported(name))
        elif self.caps.locked.run(self._apply_imported, _IMPORT_LOCK_TIMEOUT, name) is None:
            self._uncapped.add(name)
            _log.warning(
                "%s: its cap is not set yet: another thread held memguard's lock for %g s while it was imported; the "
                "next ledger, request for room or sample of the monitor sets it",
                name,
                _IMPORT_LOCK_TIMEOUT,
            )

    def _apply_imported(self, name: str) -> None:
        if not self.caps.active:
            return
        entry = self.caps.entries[name]
        if entry.enforcement is not Enforcement.PENDING:
            return
        if entry.framework.state() is State.ABSENT:
            self._mark_absent(name, entry)
        else:
            self._apply(name, entry)

    def _cap_uncapped(self) -> None:
        """Set the caps of the frameworks in `_uncapped`, unless a thread holds the lock."""
        for name in [*self._uncapped]:
            if self.caps.locked.held_here or self.caps.locked.run(self._cap_after_import, 0, name) is None:
                return
            self._uncapped.discard(name)

    def _cap_after_import(self, name: str) -> None:
        try:
            self._apply_imported(name)
        except Exception as error:  # log the error, because the import has already ended
            self.caps.entries[name].enforcement = Enforcement.WATCHED
            self.caps.lower_to_min(name)
            self.caps.warn(f"{name}: its cap could not be set after its import: {words_of(error)}")

    def _find_drift(self, only: str | None = None) -> None:
        if self._uncapped and self.caps.suspended is None:
            self._cap_uncapped()
        self.caps.find_drift(only)

    def _refuse_while_suspended(self, what: str) -> None:
        """Raise Suspended if the process is suspended. `what` names the call."""
        if (suspended := self.caps.suspended) is not None:
            suspended.refuse(what)

    def _mark_absent(self, name: str, entry: CappedFramework) -> None:
        entry.enforcement = Enforcement.ABSENT
        self.caps.lower_to_min(name)
        self.caps.warn(f"{name}: {entry.framework.why_absent()}; its share stays free")

    def _apply(self, name: str, entry: CappedFramework) -> None:
        framework = entry.framework
        if framework.fixed():
            self.caps.lower_to_min(name)
        undo = Undo(self._undo_failed)
        applying = True

        def undo_apply() -> None:
            if applying:  # a signal handler called `stop` during `apply`, which may still add steps to `undo`
                self.undo.add(name, undo_apply)
            else:
                undo.run()

        self.undo.add(name, undo_apply)
        try:
            try:
                applied = framework.apply(self.caps.plan.caps(name), self.caps.plan.options.get(name, {}), undo)
            finally:
                applying = False
        except BaseException:
            undo.run()
            raise
        if self.caps.stopped:
            self.undo.run()
            return
        entry.enforcement = applied.enforcement
        if applied.enforcement is not Enforcement.ENFORCED:
            self.caps.lower_to_min(name)
        if applied.permanent is not None:
            self.permanent.append(f"{name}: {applied.permanent}")
        for note in applied.notes:
            self.caps.note(note)
        self.elastic.trim_above_cap(name)

    def _undo_failed(self, name: str, error: BaseException) -> None:
        """Record the reason why a framework's undo step failed, which `stop` returns. An interrupted step is run
        again."""
        if isinstance(error, CapNotApplied):
            stays = f"{name}: stays: {error.reason}"
        elif isinstance(error, Exception):
            stays = f"{name}: could not be undone: {words_of(error)}"
        else:
            _log.warning("%s: the undoing was interrupted; memguard.shutdown() or the next init finishes it", name)
            return
        if stays not in self._not_undone:
            self._not_undone.append(stays)

    def _prevent_conflicts(self, states: Mapping[str, State]) -> None:
        """Prevent conflicts between the CUDA runtimes of the budget's installed frameworks."""
        if self.caps.host.simulated:
            return
        for name, other, done in registry.cures([name for name in states if states[name] is not State.ABSENT]):
            self.caps.note(f"{name} and {other} in one process: {done}")
            self.permanent.append(f"{name}: the CUDA runtime loaded first stays loaded")

    def busy(self) -> Iterator[tuple[str, int | None]]:
        """Yield, for each GPU where other processes hold memory that the budget's limit needs, a warning and the bytes
        that this process holds there (None if unknown)."""
        self._refuse_while_suspended("a look at the GPUs' other processes")
        for device_plan in self.caps.plan.devices:
            active = self.caps.host.context_active(device_plan.device)
            own = own_bytes(self.caps.host.processes(device_plan.device), self.caps.host.pid, bool(active))
            if (warning := policy.busy(device_plan, self.caps.host.memory(device_plan.device), own)) is not None:
                yield warning, own

    def _warn_where_busy(self) -> None:
        for warning, own in self.busy():
            if self.budget.on_busy == "raise" and own is not None:  # if `own` is None, this process may be the holder
                fix = "use another GPU, lower device.limit, or write 'on_busy: warn'"
                problem = self.budget.problem(("on_busy",), warning, fix)
                raise PlanError([problem], self.budget.source or "init")
            self.caps.warn(warning)

    def _warn_of_mps(self) -> None:
        """Warn for each GPU where CUDA's Multi-Process Service limits this process to less than the budget's limit."""
        given = os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
        if given and not self.caps.host.simulated:
            from memguard._budget import mps

            for warning in mps.shortfalls(self.caps.plan, given):
                self.caps.warn(str(warning))


def _context_of(
    reading: Reading,
    device_plan: DevicePlan,
    enforcements: Mapping[str, str],
    others: Mapping[int, int | None],
    plan: Plan,
    budget: Budget,
    when: float,
    simulated: bool,
) -> hooks.OomContext:
    """The `OomContext` of an out-of-memory report, from a reading at the refusal."""
    ledger = Ledger(when, (device_ledger(reading, device_plan, enforcements),), simulated)
    return hooks.OomContext(ledger, plan, {device_plan.device.uuid: others}, budget=budget)

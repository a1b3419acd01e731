"""The guard: it applies a budget, reads what is held under it, admits requests, and undoes it.

It owns the parts that do the work: `caps` (the plan, and how each cap holds), `elastic` (caps that move, caches that
are trimmed), `admission` (reservations) and `reader` (the ledger). `_budget.policy` plans.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from memguard._base.blocks import Block, End
from memguard._base.logs import log as _log
from memguard._base.logs import words_of
from memguard._base.specs import SPECS
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
from memguard._devices import suspension
from memguard._frameworks import registry
from memguard._frameworks.base import Framework
from memguard._frameworks.import_hook import ImportHook
from memguard._frameworks.real_imports import RealImports
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


_SPILLS = (
    "this is WSL: an allocation for which the GPU has no room may be served from the machine's memory, slowly and "
    "without an out-of-memory error. The caps of frameworks hold; what lies outside them may spill. "
    "fix: keep device.limit below what Windows leaves free on the GPU; `memguard doctor --explain sysmem-fallback`"
)
_IMPORT = 5.0
"""Seconds that the import of a framework waits for another thread's call of memguard, to have its cap set."""
_SAMPLES_PER_CHECK = 10
"""Samples from one check for drift to the next: a check calls into every framework once more."""


class AdmissionOnDemand:
    """The admission of one budget. Its modules are loaded when somebody first asks for room: `init` needs none."""

    def __init__(self, make: Callable[[], Admission]) -> None:
        self._make = make
        self._made: Admission | None = None

    def get(self) -> Admission:
        """It, made if it was not."""
        if (made := self._made) is None:
            made = vars(self).setdefault("_first", self._make())  # another thread's, if that was faster
            self._made = made
        return made

    @property
    def idle(self) -> bool:
        """Whether nothing is reserved, and nobody waits."""
        return self._made is None or self._made.queue.idle

    @property
    def working(self) -> bool:
        """Whether a workload that has reserved memory is under way."""
        return self._made is not None and self._made.working

    def not_taken(self, framework: str, uuid: str, in_use: int | None) -> int:
        """Bytes that workloads of the framework have reserved there and not taken yet, by what it has in use."""
        return 0 if self._made is None else self._made.not_taken(framework, uuid, in_use)

    def not_taken_now(self, framework: str, uuid: str) -> int:
        """The same; the framework is asked what it has in use. Takes no lock."""
        return 0 if self._made is None else self._made.not_taken_now(framework, uuid)

    def wake(self) -> None:
        """Have all that wait for room look again."""
        if self._made is not None:
            self._made.queue.wake()

    def forked(self) -> None:
        """In a forked child: nothing is reserved."""
        if self._made is not None:
            self._made.queue.forked()


class Guard:
    """An applied budget, as `memguard.init` returns it. `print(guard)` shows the plan and how each cap holds."""

    def __init__(self, budget: Budget, host: Host) -> None:
        self.budget = budget
        self.callbacks = Callbacks()
        self.caps = caps = CapTable(budget, host, self.callbacks)
        self.notes, self.sharing = caps.notes, caps.sharing
        # Frameworks that the budget does not name have no cap, but a row once they are live. Real ones only.
        unnamed = () if host.simulated else tuple(name for name in SPECS if name not in budget.frameworks)
        self.reader = LedgerReader(host, unnamed, caps.warn)
        self.admission = AdmissionOnDemand(self._make_admission)
        self.elastic = ElasticCaps(caps, self.reader, self.admission)
        self.trims = self.elastic.trims
        self.permanent: list[str] = []
        self.undo = Undo()
        """What takes back all that `start` did."""
        self.refusals = RefusalCounts()
        self._hook = ImportHook()
        self._not_undone: list[str] = []
        self._late: set[str] = set()
        """Frameworks that were imported while another thread had the lock: their caps are to be set."""
        self._samples = 0
        self._started = self._told = False
        self._real = RealImports([part.device.name for part in self.plan.devices]) if host.simulated else None

    @property
    def host(self) -> Host:
        """The GPUs, real or simulated. While the process is suspended, its calls raise Suspended."""
        return self.caps.host

    @property
    def plan(self) -> Plan:
        """The plan in force: it changes with `resize` and as elastic caps move."""
        return self.caps.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self.caps.plan = plan

    @property
    def active(self) -> bool:
        """False after `shutdown`, and in a forked child, where the parent's budget means nothing."""
        return self.caps.active

    @property
    def frameworks(self) -> Mapping[str, Framework]:
        """The frameworks of the budget by name; with simulated GPUs, their simulated stand-ins."""
        return dict(self.caps.frameworks)

    @property
    def own_plan(self) -> Plan:
        """The plan of the GPUs that this process uses: of a rank that is known to use one of several, of that one."""
        return self.caps.own_plan

    def part(self, uuid: str) -> DevicePlan:
        """The plan of one GPU of the budget."""
        return self.caps.part(uuid)

    @property
    def undone(self) -> bool:
        """Whether nothing of it is left. An interrupted `start` or `stop` leaves something, which `stop` takes back."""
        before = self.callbacks.stop
        return self.caps.over and self.undo.done and (before is None or before.done)

    def start(self) -> None:
        """Apply everything, or undo everything and raise. A guard starts once: a stopped one stays stopped."""
        if self._started:
            raise MemguardError("this guard was started before", fix="call memguard.init again")
        self._started = True
        caps = self.caps
        try:
            if self._real is not None:
                self.undo.add("the notice about real frameworks", self._real.stop)
                self._real.start()
            # `state` waits for an import that runs in another thread, and that import may wait for the guard in its
            # hook. So ask before there is a hook, and later again without the lock.
            entries = {name: CappedFramework(caps.create(name)) for name in self.budget.frameworks}
            for name, entry in entries.items():
                entry.framework.on_warning = functools.partial(caps.met_the_cap, name)
                entry.framework.on_change = self._find_drift
            states = {name: entry.framework.state() for name, entry in entries.items()}
            for entry in entries.values():
                entry.framework.on_refusal, entry.framework.on_shortage = self._refused, self.elastic.shortage
            with caps.lock:
                for note in caps.plan.notes:
                    caps.warn(note)
                if self.sharing is not None:
                    caps.note(self.sharing.note)
                self._warn_where_busy()
                self._warn_of_mps()
                if caps.host.spills:
                    caps.warn(_SPILLS)
                if caps.over:
                    raise NotActive("this budget was shut down while it was being applied")
                self.undo.add("import hooks", self._hook.clear)
                caps.entries, caps.frameworks = entries, {name: one.framework for name, one in entries.items()}
                self._cure(states)
                if caps.joint is not None:
                    self.undo.add("the shared pool", caps.joint.restore)
                    self.reader.joint = caps.joint
                for name, entry in entries.items():
                    self._start_framework(name, entry, states[name])
            for name, entry in entries.items():
                if entry.enforcement is Enforcement.PENDING and entry.framework.state() is not State.IMPORTABLE:
                    self._imported(name)  # its import began before the hook was there
        except BaseException:
            self.stop()
            raise

    def stop(self) -> list[str]:
        """Undo everything, last first. Returns what stays, as sentences.

        If it is interrupted, call it again: it does the rest.
        """
        self._on_the_gpus("the end of the budget")
        caps = self.caps
        caps.over = True  # from now on nothing may say that a cap holds
        try:
            if self.callbacks.stop is not None:
                self.callbacks.stop.run()  # without the lock, for which the monitor's thread may be waiting
        finally:
            with caps.lock:
                try:
                    self.undo.run()
                finally:
                    for entry in caps.entries.values():
                        entry.framework.on_refusal = entry.framework.on_shortage = None
                    caps.entries, caps.frameworks = {}, {}  # new: other threads may be iterating over the old ones
                    self.reader.clear()
                    caps.host.close()
                    self.admission.wake()
        stays = [*self._not_undone, *self.permanent]
        if not self._told:
            self._told = True
            for sentence in stays:
                _log.info("%s", sentence)
        return stays

    def forked(self) -> None:
        """In a forked child: let go of everything without touching CUDA. The parent's budget means nothing here."""
        self.caps.forked()
        self.reader.forked()
        self.admission.forked()
        self._hook.clear()
        if self._real is not None:
            self._real.stop()

    def suspend(self, reading: Ledger, figures: Figures, off: Off) -> None:
        """The process leaves its GPUs. From now on the guard answers from `reading`, or raises Suspended.

        With the lock of `caps` held. `figures` as for `OffGpu`.
        """
        from memguard._guard.suspended import OffGpu, refusing

        self.caps.off = OffGpu(reading, figures, off, self.caps.host)  # first: who is refused finds it
        self.caps.host = self.reader.host = refusing(self.caps.host)

    def resumed(self) -> None:
        """The process is on its GPUs. Nothing happens if the guard was not suspended."""
        if (off := self.caps.off) is not None:
            self.caps.host = self.reader.host = off.host
            self.caps.off = None

    def ledger(self) -> Ledger:
        """A reading of every GPU. NVML is read before and after, and again if its figures moved meanwhile.

        While the process is off its GPUs: the last reading, with every framework's row as it was, and none of it there.
        """
        if (off := self.caps.off) is not None:
            return off.ledger()
        try:
            return self._read_ledger()
        except Suspended:  # the process left its GPUs while this thread read
            off = self.caps.off
        return off.ledger() if off is not None else self._read_ledger()  # it is back already

    def _read_ledger(self) -> Ledger:
        self._find_drift()
        # Without the guard's lock, which another thread may have while it waits for one that this thread has.
        caps, reader = self.caps, self.reader
        if caps.over or caps.pid != os.getpid() or not caps.entries:
            caps.check_active()
        frameworks, plan, entries = caps.frameworks, caps.plan, caps.entries
        readings = [reader.reading(part, frameworks) for part in plan.devices]
        if caps.over:  # another thread's shutdown would leave half a reading
            caps.check_active()
        notes, enforcements, told = [*caps.notes], {}, []
        for name, entry in entries.items():
            framework = entry.framework
            enforcements[name] = entry.enforcement._value_
            if framework.unseen() is None:
                told.append(name)
            if framework.notes or entry.drift:
                notes += [*framework.notes, *entry.drift]
        ledgers = []
        for part, reading in zip(plan.devices, readings, strict=True):
            usages = reading.usages
            ledgers.append(reader.ledger_of(reading, part, enforcements, self.refusals.on(part.device.uuid, told)))
            for name, cap in part.caps.items():
                if (usage := usages.get(name)) is not None and (held := usage[0]) is not None and held > cap:
                    notes += [above_cap(name, held, cap, enforcements.get(name, ""), part.device) or ""]
        return Ledger(time.time(), tuple(ledgers), caps.host.simulated, tuple(notes))

    def sample(self) -> Sample:
        """The ledger's figures without its rows, for several readings a second on any thread.

        Without the guard's lock: nobody has to wait for this thread if a driver hangs.
        """
        caps = self.caps
        if caps.off is not None:
            caps.off.refuse("a sample of the GPUs")
        if not caps.entries or caps.over or caps.pid != os.getpid():
            caps.check_active()
        self._samples += 1
        if self._samples % _SAMPLES_PER_CHECK == 1 or self._late:
            self._find_drift()
        frameworks, read, parts = caps.frameworks, self.reader.sample, caps.plan.devices
        if len(parts) == 1:
            return sample_of((time.time(), (read(parts[0], frameworks),)))
        devices = tuple([read(part, frameworks) for part in parts])
        return sample_of((time.time(), devices))

    def last_sample(self) -> Sample | None:
        """The same while the budget ends: its caps are still set. None where nobody may ask: in a forked child, or
        while the process is off its GPUs."""
        caps = self.caps
        if caps.pid != os.getpid() or suspension.now is not None or caps.off is not None or not caps.entries:
            return None
        frameworks, read = caps.frameworks, self.reader.sample
        return sample_of((time.time(), tuple([read(part, frameworks) for part in caps.plan.devices])))

    def peaks(self) -> dict[str, dict[str, int]]:
        """The most that each framework of the budget ever had in use, by UUID and name, if it says that."""
        caps = self.caps
        found: dict[str, dict[str, int]] = {}
        for part in caps.plan.devices if caps.off is None else ():
            usages = {name: one.usage(part.device) for name, one in caps.frameworks.items()}
            found[part.device.uuid] = {n: u.peak for n, u in usages.items() if u is not None and u.peak is not None}
        return found

    def _refused(self, request: RefusedRequest) -> str | None:
        """What adapters call when a request was refused for good. Returns the id of its record.

        It runs within the allocation, on the thread that made it. So it waits for no lock of the guard or the reader:
        whoever holds that may be waiting for the allocator.
        """
        caps = self.caps
        part = next((one for one in caps.plan.devices if one.device.uuid == request.uuid), None)
        if part is None or caps.off is not None or not caps.active:
            return None
        cap = part.caps.get(request.framework) if request.cap is None else request.cap
        context: Callable[[], hooks.OomContext] = hooks.OomContext
        usages: Mapping[str, Usage | None] = {}
        try:
            reading, processes = self.reader.read_unlocked(part, caps.frameworks)
        except MemguardError as error:  # a GPU is lost
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
                enforcements[request.framework] = Enforcement.WATCHED.value  # what refused was not this cap
            others = {pid: size for pid, size in processes.items() if pid != caps.host.pid}
            now = request.time, caps.host.simulated
            context = functools.partial(_context_of, reading, part, enforcements, others, caps.plan, self.budget, *now)
        request = hooks.refused(request._replace(why_no_help=self.elastic.why_no_help(request, part, usages)), context)
        self.refusals.add(request)
        if self.callbacks.refusal is not None:
            self.callbacks.refusal(request)
        return request.id

    def require(self, framework: FrameworkName, size: int | str, device: Device | None = None) -> None:
        """Raise BudgetExceeded if `framework` cannot get `size` more. May trim siblings' caches, on this thread."""
        caps = self.caps
        if caps.off is not None:
            caps.off.refuse("memguard.require")
        needed = size_of(size)
        if self.callbacks.checkpoint is not None:
            self.callbacks.checkpoint()
        self._find_drift(framework)
        parts, looked = caps.plan.devices, False
        if device is None and len(parts) == 1 and not caps.over and caps.pid == os.getpid():
            if self._fits(framework, needed, parts[0]):  # mostly: it takes no lock
                return
            looked = True
        with caps.lock:
            caps.check_active()
            caps.entry(framework)
            for part in caps.used_by(framework) if device is None else [caps.planned(device)]:
                if looked or not self._fits(framework, needed, part):
                    self.admission.get().require(framework, needed, part.device)

    def _make_admission(self) -> Admission:
        from memguard._guard.admission import Admission

        return Admission(self.caps, self.elastic, self.callbacks, self._find_drift)

    def _fits(self, framework: str, needed: int, part: DevicePlan) -> bool:
        """Whether there is room on that GPU. Its siblings are asked only if something has to be trimmed."""
        if not self.admission.idle:
            return self.admission.get().fits(framework, needed, part.device)
        caps = self.caps
        requester = caps.entry(framework).framework
        footprint, usages = requester.footprint(needed), {framework: requester.usage(part.device)}
        memory = caps.host.memory(part.device)
        cap = part.caps[framework] if caps.joint is None else caps.alone(framework, part, usages)
        return policy.admit(framework, needed, footprint, cap, usages, memory).refusal is None

    def make_room(self, framework: FrameworkName, needed: int, device: Device | None = None) -> Room:
        """Have siblings give back what `framework` needs to take `needed` bytes from the driver, and raise its cap.

        On this thread: the least that serves, most reclaimable first. Where nothing may be freed, nothing is. Never
        raises for a lack of memory: `missing` in what it returns says what is still not there.
        """
        self._on_the_gpus("making room")
        return self.elastic.make_room(framework, needed, device)

    def resize(self, framework: FrameworkName, size: int | str) -> None:
        """Change a cap on every GPU. Lowering it trims, and warns about what is still held above it."""
        self._on_the_gpus("memguard.resize")
        self._find_drift()
        self.elastic.resize(framework, size)

    def trim(self, framework: CacheName | None = None) -> int:
        """Give idle caches back to the driver, of one framework or all, on this thread. Returns the bytes freed."""
        self._on_the_gpus("memguard.trim")
        return self.elastic.trim(framework)

    def rebalance(self, sample: Sample) -> Sample:
        """At a tick of the monitor: elastic caps get headroom, by what `sample` has read. Returns it, with the caps as
        they are then. Moves nothing while another thread is within a call."""
        return self.elastic.rebalance(sample)

    def moved(self) -> list[Event]:
        """What was given back and lent since the last call."""
        return self.elastic.moved()

    def reserved_not_taken(self, framework: FrameworkName, uuid: str) -> int:
        """Bytes that running workloads of the framework have reserved on that GPU and not taken yet. Takes no lock."""
        return self.admission.not_taken_now(framework, uuid)

    def workload(
        self, name: str, *, framework: FrameworkName, needs: int | str | None = None, wait: float | str | None = None
    ) -> Block[WorkloadReport]:
        """A named block of work of one framework: `needs` is reserved until it ends. As `memguard.workload`."""
        return Block(
            lambda: self.begin_workload(name, framework, needs, wait),
            lambda: self.begin_workload_in_loop(name, framework, needs, wait),
        )

    def begin_workload(
        self, name: str, framework: FrameworkName, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        """What the block of `workload` begins with."""
        if self.caps.off is not None:
            self.caps.off.refuse(f"workload {name!r}")
        return self.admission.get().begin(name, framework, needs, wait)

    async def begin_workload_in_loop(
        self, name: str, framework: FrameworkName, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        """The same, without blocking the event loop."""
        if self.caps.off is not None:
            self.caps.off.refuse(f"workload {name!r}")
        return await self.admission.get().begin_in_loop(name, framework, needs, wait)

    def reclaimable(self) -> Reclaimable:
        """What each framework could give back, as figures. Trims nothing."""
        self._on_the_gpus("memguard.reclaimable")
        from memguard._guard.figures import of_sample

        return of_sample(self.sample(), self.caps.plan, self.caps.host.simulated)

    def __repr__(self) -> str:
        """One line, for a prompt; `print` shows the plan."""
        gpus = ", ".join(part.device.name for part in self.plan.devices)
        mark = " (simulated)" if self.host.simulated else ""
        state = "active" if self.active else "not active"
        return shown(
            f"<Guard {self.budget.source or 'of a mapping'}: {', '.join(self.caps.entries)} on {gpus}{mark}, {state}>"
        )

    def __str__(self) -> str:
        from memguard._base.displays import plan_text

        return shown(plan_text(*self._said()))

    def _repr_html_(self) -> str:
        from memguard._base.displays import plan_html

        return plan_html(*self._said())

    def _said(self) -> tuple[Plan, dict[str, str], list[str]]:
        """The plan, how each cap holds, and the notes."""
        self._find_drift()
        caps = self.caps
        return caps.plan, {name: entry.enforcement.value for name, entry in caps.entries.items()}, caps.all_notes()

    def _start_framework(self, name: str, entry: CappedFramework, state: State) -> None:
        if state is State.ABSENT:
            self._absent(name, entry)
        elif state is State.IMPORTABLE:
            entry.framework.prepare(self.undo)
            self._hook.watch(entry.framework.hook, lambda: self._imported(name))
        else:
            self._apply(name, entry)

    def _imported(self, name: str) -> None:
        """Runs inside the user's import, on the user's thread. What it raises comes out of that import.

        The import does not wait for ever for another thread's call: then its cap is set by a later call (`_set_late`).
        """
        if self.caps.off is not None:  # its cap is set when the process is back
            suspension.put_off(lambda: self._imported(name))
        elif self.caps.turn.take(self._apply_imported, _IMPORT, name) is None:
            self._late.add(name)
            _log.warning(
                "%s: its cap is not set yet: another thread held memguard's lock for %g s while it was imported; the "
                "next ledger, request for room or sample of the monitor sets it",
                name,
                _IMPORT,
            )

    def _apply_imported(self, name: str) -> None:
        if not self.caps.active:
            return
        entry = self.caps.entries[name]
        if entry.enforcement is not Enforcement.PENDING:
            return
        if entry.framework.state() is State.ABSENT:
            self._absent(name, entry)
        else:
            self._apply(name, entry)

    def _set_late(self) -> None:
        """Set the caps that an import could not wait for, unless a call has the lock now."""
        for name in [*self._late]:
            if self.caps.turn.mine or self.caps.turn.take(self._apply_late, 0, name) is None:
                return
            self._late.discard(name)

    def _apply_late(self, name: str) -> None:
        try:
            self._apply_imported(name)
        except Exception as error:  # there is no import any more that it could fail
            self.caps.entries[name].enforcement = Enforcement.WATCHED
            self.caps.lend_nothing_to(name)
            self.caps.warn(f"{name}: its cap could not be set after its import: {words_of(error)}")

    def _find_drift(self, only: str | None = None) -> None:
        if self._late and self.caps.off is None:
            self._set_late()
        self.caps.find_drift(only)

    def _on_the_gpus(self, what: str) -> None:
        """Raise Suspended while the process is off its GPUs. `what` names the call."""
        if (off := self.caps.off) is not None:
            off.refuse(what)

    def _absent(self, name: str, entry: CappedFramework) -> None:
        entry.enforcement = Enforcement.ABSENT
        self.caps.lend_nothing_to(name)
        self.caps.warn(f"{name}: {entry.framework.why_absent()}; its share stays free")

    def _apply(self, name: str, entry: CappedFramework) -> None:
        framework = entry.framework
        if framework.fixed():
            self.caps.lend_nothing_to(name)
        self.undo.add(name, lambda: self._take_back(name, framework.changes.run))  # if it is interrupted in the middle
        applied = framework.apply(self.caps.plan.caps(name), self.caps.plan.options.get(name, {}))
        if applied.undo is not None:
            undo = applied.undo
            self.undo.add(name, lambda: self._take_back(name, undo))
        framework.changes.clear()
        if self.caps.over:  # by a signal handler, within `apply`
            self.undo.run()
            return
        entry.enforcement = applied.enforcement
        if applied.enforcement is not Enforcement.ENFORCED:
            self.caps.lend_nothing_to(name)
        if applied.permanent is not None:
            self.permanent.append(f"{name}: {applied.permanent}")
        for note in applied.notes:
            self.caps.note(note)
        self.elastic.trim_above_cap(name)

    def _take_back(self, what: str, undo: Callable[[], None]) -> None:
        """One step of the undoing. What fails is listed, and does not stop the other steps."""
        try:
            undo()
            return
        except CapNotApplied as error:
            stays = f"{what}: stays: {error.reason}"
        except Exception as error:
            stays = f"{what}: could not be undone: {words_of(error)}"
        except BaseException:  # Ctrl-C: the other steps run, and it goes on afterwards
            _log.warning("%s: the undoing was interrupted; memguard.shutdown() or the next init finishes it", what)
            raise
        if stays not in self._not_undone:
            self._not_undone.append(stays)

    def _cure(self, states: Mapping[str, State]) -> None:
        """Keep the CUDA runtimes of frameworks that are in the budget and installed out of each other's way."""
        if self.caps.host.simulated:
            return
        for name, other, done in registry.cures([name for name in states if states[name] is not State.ABSENT]):
            self.caps.note(f"{name} and {other} in one process: {done}")
            self.permanent.append(f"{name}: the CUDA runtime loaded first stays loaded")

    def busy(self) -> Iterator[tuple[str, int | None]]:
        """Of each GPU of which others hold so much that the limit cannot be had: that, and what this process has."""
        self._on_the_gpus("a look at the GPUs' other processes")
        for part in self.caps.plan.devices:
            active = self.caps.host.context_active(part.device)
            own = own_bytes(self.caps.host.processes(part.device), self.caps.host.pid, bool(active))
            if (warning := policy.busy(part, self.caps.host.memory(part.device), own)) is not None:
                yield warning, own

    def _warn_where_busy(self) -> None:
        for warning, own in self.busy():
            if self.budget.on_busy == "raise" and own is not None:  # if unknown, this process itself may hold it
                fix = "use another GPU, lower device.limit, or write 'on_busy: warn'"
                problem = self.budget.problem(("on_busy",), warning, fix)
                raise PlanError([problem], self.budget.source or "init")
            self.caps.warn(warning)

    def _warn_of_mps(self) -> None:
        """What CUDA's Multi-Process Service lets this process have, where that is less than the budget says."""
        given = os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
        if given and not self.caps.host.simulated:
            from memguard._budget import mps

            for warning in mps.shortfalls(self.caps.plan, given):
                self.caps.warn(str(warning))


def _context_of(
    reading: Reading,
    part: DevicePlan,
    enforcements: Mapping[str, str],
    others: Mapping[int, int | None],
    plan: Plan,
    budget: Budget,
    when: float,
    simulated: bool,
) -> hooks.OomContext:
    """What an out-of-memory report is made from, out of a reading of the moment."""
    ledger = Ledger(when, (device_ledger(reading, part, enforcements),), simulated)
    return hooks.OomContext(ledger, plan, {part.device.uuid: others}, budget=budget)

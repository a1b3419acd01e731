"""The guard: it applies a budget, reads what is held under it, admits requests, and undoes it.

What is capped and whether it holds is in `caps`, how caps move and caches go in `shares`. `_budget.policy` plans.
"""

from __future__ import annotations

import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from memguard._base.blocks import Block, End
from memguard._base.locks import InterruptSafeLock, Turn
from memguard._base.logs import log as _log
from memguard._base.logs import words_of
from memguard._base.text import shown
from memguard._base.types import (
    Device,
    DevicePlan,
    Enforcement,
    Moment,
    Plan,
    Sample,
    State,
    Usage,
    WorkloadReport,
    sample_of,
)
from memguard._base.undo import Undo
from memguard._budget import joint, policy
from memguard._devices import suspension
from memguard._frameworks import registry
from memguard._frameworks.base import Framework
from memguard._frameworks.import_hook import ImportHook
from memguard._frameworks.real_imports import RealImports
from memguard._guard.caps import Entry
from memguard._guard.shares import Shares, above_cap
from memguard._ledger.overhead import own_bytes
from memguard._ledger.rows import Reading, device_ledger
from memguard._ledger.types import Ledger
from memguard._oom import hooks
from memguard.errors import CapNotApplied, MemguardError, NotActive, PlanError, Suspended

if TYPE_CHECKING:
    from memguard._base.framework_spec import FrameworkName
    from memguard._budget import Budget
    from memguard._devices.host import Host
    from memguard._frameworks.joint_pool import JointPool
    from memguard._guard.admission import Admission
    from memguard._guard.figures import Reclaimable


_SPILLS = (
    "this is WSL: an allocation for which the GPU has no room may be served from the machine's memory, slowly and "
    "without an out-of-memory error. The caps of frameworks hold; what lies outside them may spill. "
    "fix: keep device.limit below what Windows leaves free on the GPU; `memguard doctor --explain sysmem-fallback`"
)
_IMPORT = 5.0
"""Seconds that the import of a framework waits for another thread's call of memguard, to have its cap set."""
_SAMPLES_PER_CHECK = 10
"""Samples from one check for drift to the next: a check calls into every framework once more."""


class _Refused:
    """How often a framework was refused memory on one GPU, and the last time. Counted without a lock."""

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.count, self.last = 0, 0.0
        self.size: int | None = None


class Guard(Shares):
    """An applied budget, as `memguard.init` returns it. `print(guard)` shows the plan and how each cap holds."""

    def __init__(self, budget: Budget, host: Host) -> None:
        super().__init__(budget, host)
        self.permanent: list[str] = []
        self._on_checkpoint: Callable[[], None] | None = None
        """Called first by `require` and `workload`, on the user's thread. May raise UnderPressure."""
        self._on_workload: Callable[[WorkloadReport, float, str | None], None] | None = None
        """Called when a workload has ended, with its seconds and the name of the class of the error that ended it."""
        self._on_stop: Undo | None = None
        """Done before everything is undone, without the guard's lock."""
        self._on_refusal: Callable[[Moment], None] | None = None
        """Called when a framework was refused memory, within the allocation that fails."""
        self._refusals: dict[tuple[str, str], _Refused] = {}
        self._hook = ImportHook()
        self._undo = Undo()
        self._not_undone: list[str] = []
        self._late: set[str] = set()
        """Frameworks that were imported while another thread had the lock: their caps are to be set."""
        self._samples = 0
        self._started = self._told = False
        self._joint = self._joint_pool()
        if self._joint is not None:
            from memguard._frameworks.joint_cache import SharedCache

            self._reclaimer.shared = SharedCache(self._joint, lambda: self._frameworks)
        self._real = RealImports([part.device.name for part in self.plan.devices]) if host.simulated else None

    @property
    def undone(self) -> bool:
        """Whether nothing of it is left. An interrupted `start` or `stop` leaves something, which `stop` takes back."""
        return self._over and self._undo.done and (self._on_stop is None or self._on_stop.done)

    def start(self) -> None:
        """Apply everything, or undo everything and raise. A guard starts once: a stopped one stays stopped."""
        if self._started:
            raise MemguardError("this guard was started before", fix="call memguard.init again")
        self._started = True
        try:
            if self._real is not None:
                self._undo.add("the notice about real frameworks", self._real.stop)
                self._real.start()
            # `state` waits for an import that runs in another thread, and that import may wait for the guard in its
            # hook. So ask before there is a hook, and later again without the lock.
            entries = {name: Entry(self._create(name)) for name in self.budget.frameworks}
            for name, entry in entries.items():
                entry.framework.on_warning = functools.partial(self._met_the_cap, name)
                entry.framework.on_change = self._changed
            states = {name: entry.framework.state() for name, entry in entries.items()}
            for entry in entries.values():
                entry.framework.on_refusal, entry.framework.on_shortage = self._refused, self._shortage
            with self._lock:
                for note in self.plan.notes:
                    self._warn(note)
                if self.sharing is not None:
                    self._note(self.sharing.note)
                self._warn_where_busy()
                self._warn_of_mps()
                if self.host.spills:
                    self._warn(_SPILLS)
                if self._over:
                    raise NotActive("this budget was shut down while it was being applied")
                self._undo.add("import hooks", self._hook.clear)
                self._entries, self._frameworks = entries, {name: one.framework for name, one in entries.items()}
                self._cure(states)
                if self._joint is not None:
                    self._undo.add("the shared pool", self._joint.restore)
                    self._reader.joint = self._joint
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
        self._over = True  # from now on nothing may say that a cap holds
        try:
            if self._on_stop is not None:
                self._on_stop.run()  # without the lock, for which the monitor's thread may be waiting
        finally:
            with self._lock:
                try:
                    self._undo.run()
                finally:
                    for entry in self._entries.values():
                        entry.framework.on_refusal = entry.framework.on_shortage = None
                    self._entries, self._frameworks = {}, {}  # new: other threads may be iterating over the old ones
                    self._reader.clear()
                    self.host.close()
                    self._wake()
        stays = [*self._not_undone, *self.permanent]
        if not self._told:
            self._told = True
            for sentence in stays:
                _log.info("%s", sentence)
        return stays

    def forked(self) -> None:
        """In a forked child: let go of everything without touching CUDA. The parent's budget means nothing here."""
        # Another thread of the parent may have held the old ones.
        self._lock, self._noting = InterruptSafeLock(), Turn()
        self._turn = Turn(self._lock)
        self._reader.forked()
        if self._admitting is not None:
            self._admitting.turns.forked()
        self._hook.clear()
        if self._real is not None:
            self._real.stop()
        for entry in self._entries.values():
            entry.framework.forked()
        if self._joint is not None:
            self._joint.forked()

    def ledger(self) -> Ledger:
        """A reading of every GPU. NVML is read before and after, and again if its figures moved meanwhile."""
        self._find_drift()
        # Without the guard's lock, which another thread may have while it waits for one that this thread has.
        if self._over or self._pid != os.getpid() or not self._entries:
            self._check_active()
        frameworks, plan, reader, entries = self._frameworks, self.plan, self._reader, self._entries
        try:
            readings = [reader.reading(part, frameworks) for part in plan.devices]
        except Suspended:
            # The process left its GPUs while this thread read. In a moment the guard answers from the last reading.
            for _ in range(200):
                if type(self).ledger is not Guard.ledger:
                    return self.ledger()
                time.sleep(0.01)
            raise
        if self._over:  # another thread's shutdown would leave half a reading
            self._check_active()
        notes, enforcements, told = [*self.notes], {}, []
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
            ledgers.append(reader.ledger_of(reading, part, enforcements, self._refusals_on(part.device.uuid, told)))
            for name, cap in part.caps.items():
                if (usage := usages.get(name)) is not None and (held := usage[0]) is not None and held > cap:
                    notes += [above_cap(name, held, cap, enforcements.get(name, ""), part.device) or ""]
        return Ledger(time.time(), tuple(ledgers), self.host.simulated, tuple(notes))

    def sample(self) -> Sample:
        """The ledger's figures without its rows, for several readings a second on any thread.

        Without the guard's lock: nobody has to wait for this thread if a driver hangs.
        """
        if not self._entries or self._over or self._pid != os.getpid():
            self._check_active()
        self._samples += 1
        if self._samples % _SAMPLES_PER_CHECK == 1 or self._late:
            self._find_drift()
        frameworks, read, parts = self._frameworks, self._reader.sample, self.plan.devices
        if len(parts) == 1:
            return sample_of((time.time(), (read(parts[0], frameworks),)))
        devices = tuple([read(part, frameworks) for part in parts])
        return sample_of((time.time(), devices))

    def last_sample(self) -> Sample | None:
        """The same while the budget ends: its caps are still set. None where nobody may ask: in a forked child, or
        while the process is off its GPUs."""
        if self._pid != os.getpid() or suspension.now is not None or not self._entries:
            return None
        frameworks, read = self._frameworks, self._reader.sample
        return sample_of((time.time(), tuple([read(part, frameworks) for part in self.plan.devices])))

    def peaks(self) -> dict[str, dict[str, int]]:
        """The most that each framework of the budget ever had in use, by UUID and name, if it says that."""
        found: dict[str, dict[str, int]] = {}
        for part in self.plan.devices:
            usages = {name: one.usage(part.device) for name, one in self.frameworks.items()}
            found[part.device.uuid] = {n: u.peak for n, u in usages.items() if u is not None and u.peak is not None}
        return found

    def refused(self, framework: str, uuid: str, when: float, size: int | None) -> None:
        """Count a refused request. Any thread, also within an allocation: it takes no lock."""
        known = self._refusals.setdefault((framework, uuid), _Refused())
        known.count, known.last, known.size = next(known.numbers), when, size

    def _refused(self, moment: Moment) -> str | None:
        """What adapters call when a request was refused for good. Returns the name of the record.

        It runs within the allocation, on the thread that made it. So it waits for no lock of the guard or the reader:
        whoever holds that may be waiting for the allocator.
        """
        part = next((one for one in self.plan.devices if one.device.uuid == moment.uuid), None)
        if part is None or not self.active:
            return None
        moment = moment._replace(no_room=self._why_no_room(moment))
        cap = part.caps.get(moment.framework) if moment.cap is None else moment.cap
        scene: Callable[[], hooks.Scene] = hooks.Scene
        try:
            reading, processes = self._reader.glance(part, self.frameworks)
        except MemguardError as error:  # a GPU is lost
            _log.debug("no reading at a refused request: %s", str(error))
            moment = moment._replace(cap=cap)
        else:
            usage = reading.usages.get(moment.framework) or Usage(None, None)
            moment = moment._replace(
                cap=cap, held=usage.held,
                in_use=usage.in_use if moment.in_use is None else moment.in_use,
                reclaimable=usage.reclaimable if moment.reclaimable is None else moment.reclaimable,
                free=reading.memory.free if moment.free is None else moment.free,
            )  # fmt: skip
            entries = self._entries
            enforcements = {name: entry.enforcement.value for name, entry in entries.items()}
            if (entry := entries.get(moment.framework)) is not None and self._drift_of(moment.framework, entry):
                enforcements[moment.framework] = Enforcement.WATCHED.value  # what refused was not this cap
            others = {pid: size for pid, size in processes.items() if pid != self.host.pid}
            scene = functools.partial(
                _scene_of, reading, part, enforcements, others, self.plan, self.budget, moment.time, self.host.simulated
            )
        self.refused(moment.framework, part.device.uuid, moment.time, moment.requested)
        record = hooks.refused(moment, scene)
        if self._on_refusal is not None:
            self._on_refusal(moment._replace(id=record))
        return record

    def _refusals_on(self, uuid: str, told: Sequence[str]) -> dict[str, tuple[int, float | None]]:
        """How often each framework was refused, and when last; of those not `told` only if they had an error."""
        found: dict[str, tuple[int, float | None]] = dict.fromkeys(told, (0, None))
        for (name, where), known in [*self._refusals.items()] if self._refusals else ():
            if where == uuid:
                found[name] = known.count, known.last
        return found

    def require(self, framework: FrameworkName, size: int | str, device: Device | None = None) -> None:
        """Raise BudgetExceeded if `framework` cannot get `size` more. May trim siblings' caches, on this thread."""
        needed = self._size(size)
        if self._on_checkpoint is not None:
            self._on_checkpoint()
        self._find_drift(framework)
        parts, looked = self.plan.devices, False
        if device is None and len(parts) == 1 and not self._over and self._pid == os.getpid():
            if self._fits(framework, needed, parts[0]):  # mostly: it takes no lock
                return
            looked = True
        with self._lock:
            self._check_active()
            self._entry(framework)
            for part in self._used_by(framework) if device is None else [self._planned(device)]:
                if looked or not self._fits(framework, needed, part):
                    self._admission.require(framework, needed, part.device)

    @property
    def _admission(self) -> Admission:
        """Made, and its modules loaded, when somebody first asks for room: `init` needs none of it."""
        if (made := self._admitting) is None:
            from memguard._guard.admission import Admission

            made = vars(self).setdefault("_admitted", Admission(self))  # that of another thread, if it was faster
            self._admitting = made
        return made

    def _fits(self, framework: str, needed: int, part: DevicePlan) -> bool:
        """Whether there is room on that GPU. Its siblings are asked only if something has to be trimmed."""
        admission = self._admitting
        if admission is not None and not admission.turns.idle:
            return admission.fits(framework, needed, part.device)
        requester = self._entry(framework).framework
        footprint, usages = requester.footprint(needed), {framework: requester.usage(part.device)}
        memory = self.host.memory(part.device)
        cap = part.caps[framework] if self._joint is None else self._alone(framework, part, usages)
        return policy.admit(framework, needed, footprint, cap, usages, memory).refusal is None

    def _alone(self, framework: str, part: DevicePlan, usages: dict[str, Usage | None]) -> int:
        """The cap to admit it under. One that draws from the shared pool is looked at as if it were alone there."""
        cap = part.caps[framework]
        if self._joint is None or framework not in part.joined:
            return cap
        reserved, used = self._joint.figures(part.device.uuid) or (0, 0)
        cap, usages[framework] = joint.as_if_alone(usages[framework], cap, reserved, used)
        return cap

    def workload(
        self, name: str, *, framework: FrameworkName, needs: int | str | None = None, wait: float | str | None = None
    ) -> Block[WorkloadReport]:
        """A named block of work of one framework: `needs` is reserved until it ends. As `memguard.workload`."""
        return Block(
            lambda: self._begin_workload(name, framework, needs, wait),
            lambda: self._begin_workload_in_loop(name, framework, needs, wait),
        )

    def _begin_workload(
        self, name: str, framework: str, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        return self._admission.begin(name, framework, needs, wait)

    async def _begin_workload_in_loop(
        self, name: str, framework: str, needs: int | str | None, wait: float | str | None
    ) -> tuple[WorkloadReport, End]:
        return await self._admission.begin_in_loop(name, framework, needs, wait)

    def reclaimable(self) -> Reclaimable:
        """What each framework could give back, as figures. Trims nothing."""
        from memguard._guard.figures import of_sample

        return of_sample(self.sample(), self.plan, self.host.simulated)

    def __repr__(self) -> str:
        """One line, for a prompt; `print` shows the plan."""
        gpus = ", ".join(part.device.name for part in self.plan.devices)
        mark = " (simulated)" if self.host.simulated else ""
        state = "active" if self.active else "not active"
        return shown(
            f"<Guard {self.budget.source or 'of a mapping'}: {', '.join(self._entries)} on {gpus}{mark}, {state}>"
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
        return self.plan, {name: entry.enforcement.value for name, entry in self._entries.items()}, self._all_notes()

    def _joint_pool(self) -> JointPool | None:
        """The pool that frameworks share, not made yet. Raises PlanError where there can be none."""
        joined = {part.device.uuid: part.caps[part.joined[0]] for part in self.plan.devices if part.joined}
        if joined and self.host.simulated:
            fix = "write 'strategy: caps' for the simulation, or leave out simulate="
            problem = self.budget.problem(("strategy",), "simulated GPUs have no driver pool to share", fix)
            raise PlanError([problem], self.budget.source or "init")
        if not joined:
            return None
        from memguard._frameworks.joint_pool import JointPool

        return JointPool(joined, self._warn, joint.capped(self.plan.devices[0].joined))

    def _create(self, name: str) -> Framework:
        if self._joint is not None and name in self.plan.devices[0].joined:
            return registry.joined(name, self.host, self._joint)
        return registry.create(name, self.host)

    def _start_framework(self, name: str, entry: Entry, state: State) -> None:
        if state is State.ABSENT:
            self._absent(name, entry)
        elif state is State.IMPORTABLE:
            entry.framework.prepare(self._undo)
            self._hook.watch(entry.framework.hook, lambda: self._imported(name))
        else:
            self._apply(name, entry)

    def _imported(self, name: str) -> None:
        """Runs inside the user's import, on the user's thread. What it raises comes out of that import.

        The import does not wait for ever for another thread's call: then its cap is set by a later call (`_set_late`).
        """
        if self._turn.take(self._apply_imported, _IMPORT, name) is None:
            self._late.add(name)
            _log.warning(
                "%s: its cap is not set yet: another thread held memguard's lock for %g s while it was imported; the "
                "next ledger, request for room or sample of the monitor sets it",
                name,
                _IMPORT,
            )

    def _apply_imported(self, name: str) -> None:
        if not self.active:
            return
        entry = self._entries[name]
        if entry.enforcement is not Enforcement.PENDING:
            return
        if entry.framework.state() is State.ABSENT:
            self._absent(name, entry)
        else:
            self._apply(name, entry)

    def _set_late(self) -> None:
        """Set the caps that an import could not wait for, unless a call has the lock now."""
        for name in [*self._late]:
            if self._turn.mine or self._turn.take(self._apply_late, 0, name) is None:
                return
            self._late.discard(name)

    def _apply_late(self, name: str) -> None:
        try:
            self._apply_imported(name)
        except Exception as error:  # there is no import any more that it could fail
            self._entries[name].enforcement = Enforcement.WATCHED
            self._lend_nothing_to(name)
            self._warn(f"{name}: its cap could not be set after its import: {words_of(error)}")

    def _find_drift(self, only: str | None = None) -> None:
        if self._late:
            self._set_late()
        super()._find_drift(only)

    def _absent(self, name: str, entry: Entry) -> None:
        entry.enforcement = Enforcement.ABSENT
        self._lend_nothing_to(name)
        self._warn(f"{name}: {entry.framework.why_absent()}; its share stays free")

    def _apply(self, name: str, entry: Entry) -> None:
        framework = entry.framework
        if framework.fixed():
            self._lend_nothing_to(name)
        self._undo.add(name, lambda: self._take_back(name, framework.changes.run))  # if it is interrupted in the middle
        applied = framework.apply(self.plan.caps(name), self.plan.options.get(name, {}))
        if applied.undo is not None:
            undo = applied.undo
            self._undo.add(name, lambda: self._take_back(name, undo))
        framework.changes.clear()
        if self._over:  # by a signal handler, within `apply`
            self._undo.run()
            return
        entry.enforcement = applied.enforcement
        if applied.enforcement is not Enforcement.ENFORCED:
            self._lend_nothing_to(name)
        if applied.permanent is not None:
            self.permanent.append(f"{name}: {applied.permanent}")
        for note in applied.notes:
            self._note(note)
        self._trim_above_cap(name)

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
        if self.host.simulated:
            return
        for name, other, done in registry.cures([name for name in states if states[name] is not State.ABSENT]):
            self._note(f"{name} and {other} in one process: {done}")
            self.permanent.append(f"{name}: the CUDA runtime loaded first stays loaded")

    def busy(self) -> Iterator[tuple[str, int | None]]:
        """Of each GPU of which others hold so much that the limit cannot be had: that, and what this process has."""
        for part in self.plan.devices:
            active = self.host.context_active(part.device)
            own = own_bytes(self.host.processes(part.device), self.host.pid, bool(active))
            if (warning := policy.busy(part, self.host.memory(part.device), own)) is not None:
                yield warning, own

    def _warn_where_busy(self) -> None:
        for warning, own in self.busy():
            if self.budget.on_busy == "raise" and own is not None:  # if unknown, this process itself may hold it
                fix = "use another GPU, lower device.limit, or write 'on_busy: warn'"
                problem = self.budget.problem(("on_busy",), warning, fix)
                raise PlanError([problem], self.budget.source or "init")
            self._warn(warning)

    def _warn_of_mps(self) -> None:
        """What CUDA's Multi-Process Service lets this process have, where that is less than the budget says."""
        given = os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
        if given and not self.host.simulated:
            from memguard._budget import mps

            for warning in mps.shortfalls(self.plan, given):
                self._warn(str(warning))


def _scene_of(
    reading: Reading,
    part: DevicePlan,
    enforcements: Mapping[str, str],
    others: Mapping[int, int | None],
    plan: Plan,
    budget: Budget,
    when: float,
    simulated: bool,
) -> hooks.Scene:
    """What an out-of-memory report is made from, out of a reading of the moment."""
    ledger = Ledger(when, (device_ledger(reading, part, enforcements),), simulated)
    return hooks.Scene(ledger, plan, {part.device.uuid: others}, budget=budget)

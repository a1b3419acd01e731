"""The cap table of one budget: the plan in force, the enforcement and drift of each cap, and the notes.

It also owns what the parts of a guard share: the lock, and the host, which raises Suspended in a suspended process.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memguard._base.locks import InterruptSafeLock, LockOrder, Turn, ordered
from memguard._base.logs import log as _log
from memguard._base.types import (
    Device,
    DevicePlan,
    Drift,
    Enforcement,
    Event,
    Plan,
    RefusedRequest,
    Usage,
    WorkloadReport,
)
from memguard._base.undo import Undo
from memguard._base.units import parse_size
from memguard._budget import policy, shared_pool
from memguard._frameworks import registry
from memguard._frameworks.base import Framework
from memguard.errors import MemguardError, NotActive, PlanError

if TYPE_CHECKING:
    from memguard._budget import Budget
    from memguard._budget.ranks import Sharing
    from memguard._devices.host import Host
    from memguard._frameworks.base import Allocator
    from memguard._frameworks.shared_pool import SharedPool
    from memguard._guard.suspended import OffGpu

_ENFORCED = Enforcement.ENFORCED
_NOTING = 1.0
"""Seconds to wait for another thread that is recording drift."""


class Callbacks:
    """The session's callbacks that a guard calls. Each is None until the session sets it."""

    def __init__(self) -> None:
        self.event: Callable[[Event], None] | None = None
        """Called when a cap no longer holds, or holds again: on the detecting thread, without the guard's lock."""
        self.checkpoint: Callable[[], None] | None = None
        """Called at the start of `require` and `workload`, on the user's thread. May raise UnderPressure."""
        self.workload: Callable[[WorkloadReport, float, str | None], None] | None = None
        """Called at a workload's end, with its report, its seconds and the class name of its error (None: no error)."""
        self.refusal: Callable[[RefusedRequest], None] | None = None
        """Called when an allocator refused a request, within the failing allocation."""
        self.stop: Undo | None = None
        """The session's undo steps. The guard runs them before its own, without its lock."""


class CappedFramework:
    """A framework of the budget, and the enforcement of its cap.

    `drift`: changes by other code after the cap was set, which break the cap. `enforcement` is `watched` meanwhile.
    """

    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        self.enforcement = Enforcement.PENDING
        self.drift: tuple[Drift, ...] = ()

    @property
    def drift_reason(self) -> str:
        """The drift in one sentence, without the framework's name."""
        return "; ".join(map(str, self.drift))

    @property
    def drift_notes(self) -> list[str]:
        """The drift as sentences that begin with the framework's name."""
        return [f"{self.framework.name}: {one}" for one in self.drift]


class CapTable:
    """The plan in force, the frameworks that it caps, and the enforcement of each cap."""

    def __init__(self, budget: Budget, host: Host, callbacks: Callbacks) -> None:
        self.budget, self.host, self.callbacks = budget, host, callbacks
        self.notes: list[str] = []
        devices = host.devices(ordinals=policy.needs_ordinals(budget))
        self.sharing: Sharing | None = None
        """How the ranks of this node share the GPUs; None for a budget of one process."""
        if budget.ranks is not None:  # else `init` does not import the module
            from memguard._budget import ranks

            self.sharing = ranks.of_budget(budget, len(devices), os.environ, host.simulated)
        needed = self.sharing is not None and (not self.sharing.even or (budget.device.lease and len(devices) > 1))
        if needed and any(one.ordinal is None for one in devices):
            devices = host.devices(ordinals=True)
        self.plan = policy.plan(budget, devices, self.sharing)
        self.off: OffGpu | None = None
        """Set while the process is suspended. Replaced in one assignment, so that readers need no lock."""
        self._make_locks()
        self.entries: dict[str, CappedFramework] = {}
        self.frameworks: Mapping[str, Framework] = {}
        """The adapters of `entries`. The mapping is replaced, never changed: the reader compares its identity."""
        self.allocators: Mapping[str, Allocator] = {}
        """What the caps of the plan limit, by name: each framework's own allocator, or the pool that several share."""
        self.over = False
        """Set when the guard stops. From then on nothing may report that a cap holds."""
        self.pid = os.getpid()
        self._warned: set[str] = set()
        self._resized = 0
        self.shared_pool = self._shared_pool()

    @property
    def active(self) -> bool:
        """False after `shutdown`, and in a forked child, where the parent's budget does not apply."""
        return bool(self.entries) and not self.over and self.pid == os.getpid()

    @property
    def own_plan(self) -> Plan:
        """The plan of the GPUs that this process uses: of one GPU only, if its rank is known to use one."""
        own = None if self.sharing is None else self.sharing.own
        found = tuple(part for part in self.plan.devices if own is not None and part.device.ordinal == own)
        return replace(self.plan, devices=found) if found else self.plan

    def _make_locks(self) -> None:
        self.lock: InterruptSafeLock = ordered(InterruptSafeLock(), LockOrder.GUARD)
        self.turn = Turn(self.lock)
        self.noting = Turn(order=LockOrder.DRIFT)
        """The lock for recording drift. Its owner never waits for anything."""

    def forked(self) -> None:
        """Create new locks in a forked child: a thread of the parent may have held the inherited ones."""
        self._make_locks()
        for entry in self.entries.values():
            entry.framework.forked()
        if self.shared_pool is not None:
            self.shared_pool.forked()

    # the plan

    def part(self, uuid: str) -> DevicePlan:
        """The plan of one GPU of the budget."""
        for part in self.plan.devices:
            if part.device.uuid == uuid:
                return part
        raise KeyError(uuid)

    def planned(self, device: Device) -> DevicePlan:
        """The plan of that GPU. Raises MemguardError if the budget does not include the GPU."""
        for part in self.plan.devices:
            if part.device.uuid == device.uuid:
                return part
        known = ", ".join(f"{part.device.name} ({part.device.uuid})" for part in self.plan.devices)
        raise MemguardError(
            f"{device.name} ({device.uuid}) is not a GPU of the budget, which has: {known}",
            fix="give the device of one of guard.plan.devices, or leave out device=",
        )

    def used_by(self, framework: str) -> Sequence[DevicePlan]:
        """The GPUs that a call without `device=` means: those that the framework uses, or the first."""
        parts = self.plan.devices
        if len(parts) == 1:
            return parts
        asked = self.entry(framework).framework
        return [part for part in parts if asked.usage(part.device)] or parts[:1]

    def movable(self, name: str) -> bool:
        """Whether the framework's cap can be changed now."""
        return self.entry(name).enforcement in (Enforcement.ENFORCED, Enforcement.PENDING)

    def set_cap(self, name: str, uuid: str, cap: int) -> None:
        """Set a framework's cap on one GPU, in bytes. Callers hold the lock. Users call `Guard.resize`."""
        if self.off is not None:
            self.off.refuse("a change of a cap")
        before = self.plan
        plan = policy.with_cap(before, uuid, name, cap)
        if cap > self.part(uuid).caps[name]:  # first: after an interruption the cap may be below the plan, never above
            self.plan = plan
        if self.entry(name).enforcement is not Enforcement.PENDING:  # else the framework's import applies this cap
            try:
                self.resize(name, plan)
            except Exception:
                self.plan = before
                raise
        self.plan = plan

    def resize(self, name: str, plan: Plan) -> None:
        """Make the allocator enforce the caps of the plan. Drift readings taken meanwhile are invalid (`_resized`)."""
        try:
            self._resized += 1
            self.entry(name).framework.resize(plan.caps(name))
        finally:
            self._resized += self._resized % 2  # even and larger than before: odd means in progress

    def lend_nothing_to(self, name: str) -> None:
        """Lower an elastic framework whose cap cannot move to its min, so that the rest can be lent to others."""
        for part in self.plan.devices:
            if name in part.elastic:
                self.plan = policy.with_cap(self.plan, part.device.uuid, name, part.elastic[name][0])

    # the frameworks

    def install(self, entries: dict[str, CappedFramework]) -> None:
        """Replace the frameworks and their allocators. Other threads may iterate over the old ones."""
        self.frameworks = {name: entry.framework for name, entry in entries.items()}
        pool = () if self.shared_pool is None or not entries else (self.shared_pool,)
        alone = [one for one in self.frameworks.values() if not one.pooled]
        self.allocators = {one.name: one for one in (*alone, *pool)}
        self.entries = entries

    def serving(self, framework: str, part: DevicePlan) -> Allocator:
        """The allocator that serves the framework. Raises MemguardError if the budget does not name it."""
        return self.allocators.get(shared_pool.allocator_of(part, framework)) or self.framework(framework)

    def allocator(self, name: str) -> Allocator:
        """The allocator or framework of that name, for a trim."""
        return self.allocators.get(name) or self.frameworks[name]

    def usages(self, device: Device) -> dict[str, Usage | None]:
        """The usage of each allocator on one GPU."""
        return {name: one.usage(device) for name, one in self.allocators.items()}

    def create(self, name: str) -> Framework:
        """The framework's adapter. The caller applies the cap."""
        if self.shared_pool is not None and name in self.shared_pool.clients:
            return registry.client(name, self.host, self.shared_pool)
        return registry.create(name, self.host)

    def entry(self, framework: str) -> CappedFramework:
        """The entry of a framework. Raises MemguardError if the budget does not name it."""
        try:
            return self.entries[framework]
        except KeyError:
            if self.over:  # another thread or a signal handler ended the budget during the call
                self.check_active()
            import difflib

            known = ", ".join(self.entries) or "none: it is not active"
            near = difflib.get_close_matches(str(framework), self.entries, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise MemguardError(f"{framework!r} is not in the budget, which has: {known}{hint}") from None

    def framework(self, name: str) -> Framework:
        """The adapter of a framework. Raises MemguardError if the budget does not name it."""
        return self.entry(name).framework

    def check_active(self) -> None:
        """Raise NotActive if the budget is not in effect in this process, Suspended while the process is suspended."""
        if self.off is not None:
            self.off.refuse("the budget")
        if not self.active:
            applied = "it was shut down" if self.over else "it is just being applied"
            why = "this is a forked child" if self.pid != os.getpid() else applied
            raise NotActive(f"no budget is active here: {why}", fix="call memguard.init('budget.yaml')")

    # drift

    def find_drift(self, only: str | None = None) -> None:
        """Check each framework, or `only` one, for drift of its cap, and record what changed.

        The check takes no lock, because a driver may hang. A result obtained during a `resize` is dropped, because
        `resize` changes the settings that the adapter compares with.
        """
        entries, resized = self.entries, self._resized
        if self.over or self.pid != os.getpid() or self.off is not None:
            return
        answers: dict[str, tuple[Drift, ...]] = {}
        chosen = None if only is None else entries.get(only)
        for name, entry in entries.items() if only is None else () if chosen is None else ((only, chosen),):
            if entry.enforcement is not _ENFORCED and not entry.drift:
                continue  # no cap was set
            try:
                found = entry.framework.drift()
            except Exception as error:
                self._unchecked(name, error)
                continue
            if (found or entry.drift) and (now := tuple(found)) != entry.drift:
                answers[name] = now
        if not answers:
            return
        events: list[Event] = []

        def note() -> None:
            if self.entries is entries and self._resized == resized and not resized % 2:
                events.extend(e for name, found in answers.items() if (e := self._drifted(name, entries[name], found)))

        if not self.noting.take(note, _NOTING):
            return
        for event in events:
            self.announce(event)

    def drift_of(self, name: str, entry: CappedFramework) -> tuple[Drift, ...]:
        """The changes since the cap was set. If the check fails, the drift recorded before."""
        if entry.enforcement is not Enforcement.ENFORCED and not entry.drift:
            return ()  # no cap was set
        try:
            return tuple(entry.framework.drift())
        except Exception as error:
            self._unchecked(name, error)
            return entry.drift

    def met_the_cap(self, name: str, sentence: str) -> None:
        """Announce that a later setting of the user collided with a framework's cap. The framework has logged it."""
        self.announce(Event(time.time(), "note", sentence, framework=name))

    def announce(self, event: Event) -> None:
        """Write the event to the timeline and pass it to the `on_event` callbacks."""
        if self.callbacks.event is not None:
            self.callbacks.event(event)

    def _unchecked(self, name: str, error: Exception) -> None:
        self._warn_once(f"{name}: whether its cap still holds cannot be checked: {type(error).__name__}: {error}")

    def _drifted(self, name: str, entry: CappedFramework, found: tuple[Drift, ...]) -> Event | None:
        """Record the drift of one framework. Returns an event if the drift has changed."""
        if found == entry.drift:
            return None
        entry.drift = found
        entry.enforcement = Enforcement.WATCHED if found else Enforcement.ENFORCED
        for sentence in entry.drift_notes:
            self._warn_once(sentence)
        changes = "; ".join(one.change for one in found)
        text = f"its cap no longer holds: {changes}" if found else "its cap holds again"
        return Event(time.time(), "note", f"{name}: {text}", framework=name)

    # notes

    def note(self, note: str, level: int = logging.INFO) -> None:
        """Log a note and add it to `notes`, once for each text."""
        if note not in self.notes:
            self.notes.append(note)
            _log.log(level, "%s", note)

    def warn(self, note: str) -> None:
        """As `note`, logged as a warning."""
        self.note(note, logging.WARNING)

    def all_notes(self) -> list[str]:
        """The notes of the budget, each framework and each drift, and of the suspension."""
        notes = [*self.notes]
        for entry in self.entries.values():
            notes += entry.framework.notes
            notes += entry.drift_notes
        return notes if self.off is None else [*notes, *self.off.notes()]

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            _log.warning("%s", sentence)

    def _shared_pool(self) -> SharedPool | None:
        """The shared pool, not yet created on the GPU; None without one. Raises PlanError on simulated GPUs."""
        found = {part.device.uuid: shared_pool.caps_of(part).get(shared_pool.POOL) for part in self.plan.devices}
        caps = {uuid: cap for uuid, cap in found.items() if cap is not None}
        if caps and self.host.simulated:
            fix = "write 'strategy: caps' for the simulation, or leave out simulate="
            problem = self.budget.problem(("strategy",), "simulated GPUs have no driver pool to share", fix)
            raise PlanError([problem], self.budget.source or "init")
        if not caps:
            return None
        from memguard._frameworks.shared_pool import SharedPool

        return SharedPool(caps, self.warn, clients=shared_pool.clients(self.plan.devices[0], shared_pool.POOL))


def size_of(size: int | str) -> int:
    """The size in bytes. Raises MemguardError if it is not a size."""
    try:
        return parse_size(size)
    except ValueError as error:
        raise MemguardError(str(error)) from None

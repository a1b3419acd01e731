"""The cap table of one budget: the current plan, the enforcement and drift of each cap, and the notes.

Drift means that other code changed a cap after memguard set it. The table also owns the lock and the `Host` (NVML and
driver access) that all modules of `_guard` use. While the process is suspended, every method of the host raises
Suspended.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memguard._base.locks import InterruptSafeLock, LockedRunner, LockOrder, ordered
from memguard._base.logs import log as _log
from memguard._base.types import (
    POOL,
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
    from memguard._guard.suspended import SuspendedGpus

_ENFORCED = Enforcement.ENFORCED
_DRIFT_LOCK_TIMEOUT = 1.0
"""Seconds to wait for another thread that is recording drift."""


class Callbacks:
    """The session's callbacks that a guard calls. Each callback is None until the session sets the callback."""

    def __init__(self) -> None:
        self.event: Callable[[Event], None] | None = None
        """Called when a cap is no longer enforced, or is enforced again. Runs on the thread that detected the change,
        without the guard's lock."""
        self.checkpoint: Callable[[], None] | None = None
        """Called at the start of `require` and `workload`, on the user's thread. May raise UnderPressure."""
        self.workload: Callable[[WorkloadReport, float, str | None], None] | None = None
        """Called at a workload's end, with the report, the duration in seconds and the class name of the error (None
        without one)."""
        self.refusal: Callable[[RefusedRequest], None] | None = None
        """Called within the failing allocation when an allocator has refused a request."""
        self.stop: Undo | None = None
        """The session's undo steps. `Guard.stop` runs them before the guard's own undo steps, without the guard's
        lock."""


class CappedFramework:
    """A framework's adapter, and whether the framework's cap is enforced.

    `drift`: the changes with which other code ended the enforcement of a cap that memguard had set. While `drift` is
    not empty, `enforcement` is `watched`.
    """

    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        self.enforcement = Enforcement.PENDING
        self.drift: tuple[Drift, ...] = ()

    @property
    def movable(self) -> bool:
        """True if the cap is enforced or not set yet, and the framework can change its cap."""
        return self.enforcement in (Enforcement.ENFORCED, Enforcement.PENDING) and not self.framework.fixed()

    @property
    def drift_reason(self) -> str:
        """The texts of all changes in `drift`, joined to one sentence without the framework's name."""
        return "; ".join(map(str, self.drift))

    @property
    def drift_notes(self) -> list[str]:
        """One sentence for each change in `drift`. Each sentence begins with the framework's name."""
        return [f"{self.framework.name}: {one}" for one in self.drift]


class CapTable:
    """The current plan, the frameworks that the plan caps, and the enforcement of each cap."""

    def __init__(self, budget: Budget, host: Host, callbacks: Callbacks) -> None:
        self.budget, self.host, self.callbacks = budget, host, callbacks
        self.notes: list[str] = []
        devices = host.devices(ordinals=policy.needs_ordinals(budget))
        self.sharing: Sharing | None = None
        """How the ranks of this node share the GPUs; None for a budget of one process."""
        if budget.ranks is not None:  # import the module only for a budget with ranks
            from memguard._budget import ranks

            self.sharing = ranks.of_budget(budget, len(devices), os.environ, host.simulated)
        needed = self.sharing is not None and (not self.sharing.even or (budget.device.lease and len(devices) > 1))
        if needed and any(one.ordinal is None for one in devices):
            devices = host.devices(ordinals=True)
        self.plan = policy.plan(budget, devices, self.sharing)
        self.suspended: SuspendedGpus | None = None
        """None unless the process is suspended. Set in one assignment, so that readers need no lock."""
        self._make_locks()
        self.entries: dict[str, CappedFramework] = {}
        self.frameworks: Mapping[str, Framework] = {}
        """The adapters of `entries` by framework. Each change creates a new mapping, because `LedgerReader` compares
        the mapping's identity."""
        self.allocators: Mapping[str, Allocator] = {}
        """The allocators that the plan's caps limit, by name: each framework's own allocator, and the pool that several
        frameworks share."""
        self.stopped = False
        """True once the guard stops. Afterwards no report may state that a cap is enforced."""
        self.pid = os.getpid()
        self._warned: set[str] = set()
        self._resize_version = 0
        self.shared_pool = self._shared_pool()

    @property
    def active(self) -> bool:
        """False after `shutdown`, and in a forked child, where the parent's budget does not apply."""
        return bool(self.entries) and not self.stopped and self.pid == os.getpid()

    @property
    def own_plan(self) -> Plan:
        """The plan reduced to one GPU if the rank of this process is known to use only that GPU; otherwise the whole
        plan."""
        own = None if self.sharing is None else self.sharing.own
        found = tuple(
            device_plan for device_plan in self.plan.devices if own is not None and device_plan.device.ordinal == own
        )
        return replace(self.plan, devices=found) if found else self.plan

    def _make_locks(self) -> None:
        self.lock: InterruptSafeLock = ordered(InterruptSafeLock(), LockOrder.GUARD)
        self.locked = LockedRunner(self.lock)
        self.drift_locked = LockedRunner(order=LockOrder.DRIFT)
        """The lock for recording drift. A thread that holds it never waits for another lock or for a driver."""

    def forked(self) -> None:
        """Create new locks in a forked child, because a thread of the parent may have held the inherited locks."""
        self._make_locks()
        for entry in self.entries.values():
            entry.framework.forked()
        if self.shared_pool is not None:
            self.shared_pool.forked()

    # the plan

    def device_plan(self, uuid: str) -> DevicePlan:
        """The plan of one GPU of the budget."""
        for device_plan in self.plan.devices:
            if device_plan.device.uuid == uuid:
                return device_plan
        raise KeyError(uuid)

    def planned(self, device: Device) -> DevicePlan:
        """The plan of the GPU `device`. Raises MemguardError if the budget does not include the GPU."""
        for device_plan in self.plan.devices:
            if device_plan.device.uuid == device.uuid:
                return device_plan
        known = ", ".join(f"{device_plan.device.name} ({device_plan.device.uuid})" for device_plan in self.plan.devices)
        raise MemguardError(
            f"{device.name} ({device.uuid}) is not a GPU of the budget, which has: {known}",
            fix="give the device of one of guard.plan.devices, or leave out device=",
        )

    def used_by(self, framework: str) -> Sequence[DevicePlan]:
        """The plans of the GPUs to which a call without `device=` applies. These are all GPUs that the framework uses,
        or the budget's first GPU if the framework uses none."""
        device_plans = self.plan.devices
        if len(device_plans) == 1:
            return device_plans
        adapter = self.entry(framework).framework
        return [device_plan for device_plan in device_plans if adapter.usage(device_plan.device)] or device_plans[:1]

    def set_cap(self, name: str, uuid: str, cap: int) -> None:
        """Set a framework's cap on one GPU, in bytes. Callers hold the lock. Users call `Guard.resize`."""
        if self.suspended is not None:
            self.suspended.refuse("a change of a cap")
        before = self.plan
        plan = policy.with_cap(before, uuid, name, cap)
        if cap > self.device_plan(uuid).caps[name]:  # so that an interrupted `resize` leaves no cap above the plan's
            self.plan = plan
        entry = self.entry(name)
        if entry.enforcement is not Enforcement.PENDING:  # a pending cap is set at the framework's import
            try:
                self.resize(name, entry.framework, plan)
            except Exception:
                self.plan = before
                raise
        self.plan = plan

    def resize(self, name: str, framework: Framework, plan: Plan) -> None:
        """Make the allocator enforce the caps of `plan`. Invalidates drift checks that run during this call."""
        try:
            self._resize_version += 1
            framework.resize(plan.caps(name))
        finally:
            self._resize_version += self._resize_version % 2  # odd only while a resize runs

    def lower_to_min(self, name: str) -> None:
        """Set the planned cap of an elastic framework to its min, because its cap cannot change. Other frameworks can
        then borrow the difference."""
        for device_plan in self.plan.devices:
            if name in device_plan.elastic:
                self.plan = policy.with_cap(self.plan, device_plan.device.uuid, name, device_plan.elastic[name][0])

    # the frameworks

    def install(self, entries: dict[str, CappedFramework]) -> None:
        """Replace the mappings of frameworks and allocators. The old mappings are not modified, because other threads
        may be iterating over them."""
        self.frameworks = {name: entry.framework for name, entry in entries.items()}
        allocators: dict[str, Allocator] = {name: one for name, one in self.frameworks.items() if not one.pooled}
        if self.shared_pool is not None and entries:
            allocators[self.shared_pool.name] = self.shared_pool
        self.allocators = allocators
        self.entries = entries

    def serving(self, framework: str, device_plan: DevicePlan) -> Allocator:
        """The allocator from which the framework allocates on this GPU. Raises MemguardError if the budget does not
        name the framework."""
        return self.allocators.get(shared_pool.allocator_of(device_plan, framework)) or self.framework(framework)

    def allocator(self, name: str) -> Allocator:
        """The allocator or framework called `name`, for a trim."""
        return self.allocators.get(name) or self.frameworks[name]

    def usages(self, device: Device) -> dict[str, Usage | None]:
        """The usage of each allocator on one GPU."""
        return {name: one.usage(device) for name, one in self.allocators.items()}

    def create(self, name: str) -> Framework:
        """Create the framework's adapter, without applying the cap."""
        if self.shared_pool is not None and name in self.shared_pool.clients:
            return registry.client(name, self.host, self.shared_pool)
        return registry.create(name, self.host)

    def entry(self, framework: str) -> CappedFramework:
        """The `CappedFramework` of a framework. Raises MemguardError if the budget does not name the framework."""
        try:
            return self.entries[framework]
        except KeyError:
            if self.stopped:  # another thread or a signal handler ended the budget during the call
                self.check_active()
            import difflib

            known = ", ".join(self.entries) or "none: it is not active"
            near = difflib.get_close_matches(str(framework), self.entries, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise MemguardError(f"{framework!r} is not in the budget, which has: {known}{hint}") from None

    def framework(self, name: str) -> Framework:
        """The adapter of a framework. Raises MemguardError if the budget does not name the framework."""
        return self.entry(name).framework

    def check_active(self) -> None:
        """Raise NotActive if the budget is not in effect in this process, Suspended while the process is suspended."""
        if self.suspended is not None:
            self.suspended.refuse("the budget")
        if not self.active:
            applied = "it was shut down" if self.stopped else "it is just being applied"
            why = "this is a forked child" if self.pid != os.getpid() else applied
            raise NotActive(f"no budget is active here: {why}", fix="call memguard.init('budget.yaml')")

    # drift

    def find_drift(self, only: str | None = None) -> None:
        """Check whether other code has changed the cap of any framework (or of the framework `only`), and record new
        drift.

        The check takes no lock, because a driver call may hang. A result obtained during a `resize` is discarded,
        because `resize` changes the settings with which the adapter compares.
        """
        entries, resized = self.entries, self._resize_version
        if self.stopped or self.pid != os.getpid() or self.suspended is not None:
            return
        answers: dict[str, tuple[Drift, ...]] = {}
        chosen = None if only is None else entries.get(only)
        for name, entry in entries.items() if only is None else () if chosen is None else ((only, chosen),):
            if entry.enforcement is not _ENFORCED and not entry.drift:
                continue  # memguard has set no cap yet
            try:
                found = entry.framework.drift()
            except Exception as error:
                self._note_unchecked(name, error)
                continue
            if (found or entry.drift) and (now := tuple(found)) != entry.drift:
                answers[name] = now
        if not answers:
            return
        events: list[Event] = []

        def note() -> None:
            if self.entries is entries and self._resize_version == resized and not resized % 2:
                events.extend(
                    e for name, found in answers.items() if (e := self._record_drift(name, entries[name], found))
                )

        if not self.drift_locked.run(note, _DRIFT_LOCK_TIMEOUT):
            return
        for event in events:
            self.announce(event)

    def drift_of(self, name: str, entry: CappedFramework) -> tuple[Drift, ...]:
        """The changes that other code has made to one framework's cap since memguard set the cap. If the check fails,
        returns the recorded drift."""
        if entry.enforcement is not Enforcement.ENFORCED and not entry.drift:
            return ()  # memguard has set no cap yet
        try:
            return tuple(entry.framework.drift())
        except Exception as error:
            self._note_unchecked(name, error)
            return entry.drift

    def note_conflicting_setting(self, name: str, sentence: str) -> None:
        """Announce that a setting which the user changed later conflicts with a cap. The adapter has already logged the
        conflict."""
        self.announce(Event(time.time(), "note", sentence, framework=name))

    def announce(self, event: Event) -> None:
        """Write the event to the timeline and pass it to the `on_event` callbacks."""
        if self.callbacks.event is not None:
            self.callbacks.event(event)

    def _note_unchecked(self, name: str, error: Exception) -> None:
        self._warn_once(f"{name}: whether its cap still holds cannot be checked: {type(error).__name__}: {error}")

    def _record_drift(self, name: str, entry: CappedFramework, found: tuple[Drift, ...]) -> Event | None:
        """Record the drift of one framework. Returns an event to announce if the drift has changed."""
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
        """Like `note`, but logged as a warning."""
        self.note(note, logging.WARNING)

    def all_notes(self) -> list[str]:
        """The notes on the budget, on each framework and its drift, and on the suspension."""
        notes = [*self.notes]
        for entry in self.entries.values():
            notes += entry.framework.notes
            notes += entry.drift_notes
        return notes if self.suspended is None else [*notes, *self.suspended.notes()]

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            _log.warning("%s", sentence)

    def _shared_pool(self) -> SharedPool | None:
        """Create the adapter of the pool that several frameworks share, but not yet the pool on the GPU. None if the
        budget has no shared pool. Raises PlanError if the GPUs are simulated."""
        found = {
            device_plan.device.uuid: shared_pool.caps_of(device_plan).get(POOL) for device_plan in self.plan.devices
        }
        caps = {uuid: cap for uuid, cap in found.items() if cap is not None}
        if caps and self.host.simulated:
            fix = "write 'strategy: caps' for the simulation, or leave out simulate="
            problem = self.budget.problem(("strategy",), "simulated GPUs have no driver pool to share", fix)
            raise PlanError([problem], self.budget.source or "init")
        if not caps:
            return None
        from memguard._frameworks.shared_pool import SharedPool

        return SharedPool(caps, self.warn, clients=shared_pool.clients(self.plan.devices[0], POOL))


def size_of(size: int | str) -> int:
    """Parse a size into bytes. Raises MemguardError if `size` cannot be parsed."""
    try:
        return parse_size(size)
    except ValueError as error:
        raise MemguardError(str(error)) from None

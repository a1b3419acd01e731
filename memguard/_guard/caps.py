"""The cap table of one budget: the plan in force, how each cap is enforced, whether it still holds, and the notes.

It also has what all parts of a guard share: the lock, and the host, which refuses while the process is suspended.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from memguard._base.locks import InterruptSafeLock, Rank, Turn, ranked
from memguard._base.logs import log as _log
from memguard._base.types import Device, DevicePlan, Enforcement, Event, Plan, RefusedRequest, Usage, WorkloadReport
from memguard._base.undo import Undo
from memguard._base.units import parse_size
from memguard._budget import joint, policy
from memguard._frameworks import registry
from memguard._frameworks.base import Framework
from memguard.errors import MemguardError, NotActive, PlanError

if TYPE_CHECKING:
    from memguard._budget import Budget
    from memguard._budget.ranks import Sharing
    from memguard._devices.host import Host
    from memguard._frameworks.joint_pool import JointPool
    from memguard._guard.suspended import OffGpu

_ENFORCED = Enforcement.ENFORCED
_NOTING = 1.0
"""Seconds to wait for another thread that notes the drift of a cap."""


class Callbacks:
    """What a guard calls in the session of its budget. Each is None until the session sets it."""

    def __init__(self) -> None:
        self.event: Callable[[Event], None] | None = None
        """A cap no longer holds, or holds again: on the thread that found it, without the guard's lock."""
        self.checkpoint: Callable[[], None] | None = None
        """First in `require` and `workload`, on the user's thread. May raise UnderPressure."""
        self.workload: Callable[[WorkloadReport, float, str | None], None] | None = None
        """A workload has ended, after so many seconds, with an error of a class of that name."""
        self.refusal: Callable[[RefusedRequest], None] | None = None
        """A framework was refused memory, within the allocation that fails."""
        self.stop: Undo | None = None
        """Run before the guard undoes everything, without its lock."""


class CappedFramework:
    """A framework of the budget, and how its cap holds.

    `drift`: what was changed after the cap was set, so that it no longer holds. `enforcement` is `watched` meanwhile.
    """

    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        self.enforcement = Enforcement.PENDING
        self.drift: tuple[str, ...] = ()

    @property
    def drift_reason(self) -> str:
        """The drift in one sentence, without the framework's name in front."""
        return "; ".join(sentence.removeprefix(f"{self.framework.name}: ") for sentence in self.drift)


class CapTable:
    """The plan in force, the frameworks that it caps, and how each cap holds."""

    def __init__(self, budget: Budget, host: Host, callbacks: Callbacks) -> None:
        self.budget, self.host, self.callbacks = budget, host, callbacks
        self.notes: list[str] = []
        devices = host.devices(ordinals=policy.needs_ordinals(budget))
        self.sharing: Sharing | None = None
        """How the ranks of this node share the GPUs; None for a budget that is for one process."""
        if budget.ranks is not None:  # else `init` loads nothing of it
            from memguard._budget import ranks

            self.sharing = ranks.of_budget(budget, len(devices), os.environ, host.simulated)
        needed = self.sharing is not None and (not self.sharing.even or (budget.device.lease and len(devices) > 1))
        if needed and any(one.ordinal is None for one in devices):
            devices = host.devices(ordinals=True)
        self.plan = policy.plan(budget, devices, self.sharing)
        self.off: OffGpu | None = None
        """Set while the process is off its GPUs. Swapped in one assignment: readers take no lock."""
        self._make_locks()
        self.entries: dict[str, CappedFramework] = {}
        self.frameworks: Mapping[str, Framework] = {}
        """Those of `entries`. Always the same one, which the reader knows again."""
        self.over = False
        """Set when the guard stops. From then on nothing may say that a cap holds."""
        self.pid = os.getpid()
        self._warned: set[str] = set()
        self._resized = 0
        self.joint = self._joint_pool()

    @property
    def active(self) -> bool:
        """False after `shutdown`, and in a forked child, where the parent's budget means nothing."""
        return bool(self.entries) and not self.over and self.pid == os.getpid()

    @property
    def own_plan(self) -> Plan:
        """The plan of the GPUs that this process uses: of a rank that is known to use one of several, of that one."""
        own = None if self.sharing is None else self.sharing.own
        found = tuple(part for part in self.plan.devices if own is not None and part.device.ordinal == own)
        return replace(self.plan, devices=found) if found else self.plan

    def _make_locks(self) -> None:
        self.lock: InterruptSafeLock = ranked(InterruptSafeLock(), Rank.GUARD)
        self.turn = Turn(self.lock)
        self.noting = Turn(rank=Rank.DRIFT)
        """For the drift of the caps. Nobody waits for anything while having it."""

    def forked(self) -> None:
        """In a forked child: locks of its own, as another thread of the parent may have held these."""
        self._make_locks()
        for entry in self.entries.values():
            entry.framework.forked()
        if self.joint is not None:
            self.joint.forked()

    # the plan

    def part(self, uuid: str) -> DevicePlan:
        """The plan of one GPU of the budget."""
        return next(part for part in self.plan.devices if part.device.uuid == uuid)

    def planned(self, device: Device) -> DevicePlan:
        """The plan of that GPU. Raises MemguardError if the budget has none for it."""
        for part in self.plan.devices:
            if part.device.uuid == device.uuid:
                return part
        known = ", ".join(f"{part.device.name} ({part.device.uuid})" for part in self.plan.devices)
        raise MemguardError(
            f"{device.name} ({device.uuid}) is not a GPU of the budget, which has: {known}",
            fix="give the device of one of guard.plan.devices, or leave out device=",
        )

    def used_by(self, framework: str) -> Sequence[DevicePlan]:
        """With several GPUs, `require` without a device asks about the ones the framework uses, or the first."""
        parts = self.plan.devices
        if len(parts) == 1:
            return parts
        asked = self.entry(framework).framework
        return [part for part in parts if asked.usage(part.device)] or parts[:1]

    def movable(self, name: str) -> bool:
        """Whether its cap can be changed now."""
        return self.entry(name).enforcement in (Enforcement.ENFORCED, Enforcement.PENDING)

    def set_cap(self, name: str, uuid: str, cap: int) -> None:
        """Its cap on one GPU from now on, in bytes. With the lock held; `Guard.resize` is the call for users."""
        if self.off is not None:
            self.off.refuse("a change of a cap")
        before = self.plan
        plan = policy.with_cap(before, uuid, name, cap)
        if cap > self.part(uuid).caps[name]:  # first: an interruption may leave the cap lower than planned, never above
            self.plan = plan
        if self.entry(name).enforcement is not Enforcement.PENDING:  # else it is applied with this cap when imported
            try:
                self.resize(name, plan)
            except Exception:
                self.plan = before
                raise
        self.plan = plan

    def resize(self, name: str, plan: Plan) -> None:
        """Have its allocator enforce the caps of that plan. Answers about drift from meanwhile do not count."""
        try:
            self._resized += 1
            self.entry(name).framework.resize(plan.caps(name))
        finally:
            self._resized += self._resized % 2  # even again, and another one than before

    def lend_nothing_to(self, name: str) -> None:
        """An elastic framework whose cap will not move has its min only: what it began with can be lent to others."""
        for part in self.plan.devices:
            if name in part.elastic:
                self.plan = policy.with_cap(self.plan, part.device.uuid, name, part.elastic[name][0])

    def alone(self, framework: str, part: DevicePlan, usages: dict[str, Usage | None]) -> int:
        """The cap to admit it under. One that draws from the shared pool is looked at as if it were alone there."""
        cap = part.caps[framework]
        if self.joint is None or framework not in part.joined:
            return cap
        reserved, used = self.joint.figures(part.device.uuid) or (0, 0)
        cap, usages[framework] = joint.as_if_alone(usages[framework], cap, reserved, used)
        return cap

    # the frameworks

    def create(self, name: str) -> Framework:
        """The framework's adapter. The caller applies the cap."""
        if self.joint is not None and name in self.plan.devices[0].joined:
            return registry.joined(name, self.host, self.joint)
        return registry.create(name, self.host)

    def entry(self, framework: str) -> CappedFramework:
        """Raises MemguardError if the budget does not name it."""
        try:
            return self.entries[framework]
        except KeyError:
            if self.over:  # since the call began: by another thread, or by a signal handler
                self.check_active()
            import difflib

            known = ", ".join(self.entries) or "none: it is not active"
            near = difflib.get_close_matches(str(framework), self.entries, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise MemguardError(f"{framework!r} is not in the budget, which has: {known}{hint}") from None

    def framework(self, name: str) -> Framework:
        """Raises MemguardError if the budget does not name it."""
        return self.entry(name).framework

    def check_active(self) -> None:
        """Raise NotActive if the budget is not in effect here, Suspended while the process is off its GPUs."""
        if self.off is not None:
            self.off.refuse("the budget")
        if not self.active:
            applied = "it was shut down" if self.over else "it is just being applied"
            why = "this is a forked child" if self.pid != os.getpid() else applied
            raise NotActive(f"no budget is active here: {why}", fix="call memguard.init('budget.yaml')")

    # drift

    def find_drift(self, only: str | None = None) -> None:
        """Ask each framework, or `only` this one, whether the cap that was set still holds, and note what changed.

        Frameworks are asked without the lock, as a driver may hang. What they answer during a `resize` is dropped: it
        changes what they compare with.
        """
        entries, resized = self.entries, self._resized
        if self.over or self.pid != os.getpid() or self.off is not None:
            return
        answers: dict[str, tuple[str, ...]] = {}
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
        if not answers:  # nothing is to be noted
            return
        events: list[Event] = []

        def note() -> None:
            if self.entries is entries and self._resized == resized and not resized % 2:
                events.extend(e for name, found in answers.items() if (e := self._drifted(name, entries[name], found)))

        if not self.noting.take(note, _NOTING):
            return
        for event in events:
            self.announce(event)

    def drift_of(self, name: str, entry: CappedFramework) -> tuple[str, ...]:
        """What was changed since the cap was set; what is known already if that cannot be checked."""
        if entry.enforcement is not Enforcement.ENFORCED and not entry.drift:
            return ()  # no cap was set
        try:
            return tuple(entry.framework.drift())
        except Exception as error:
            self._unchecked(name, error)
            return entry.drift

    def met_the_cap(self, name: str, sentence: str) -> None:
        """A setting that the user made later met the cap of a framework, which has logged it."""
        self.announce(Event(time.time(), "note", sentence, framework=name))

    def announce(self, event: Event) -> None:
        """Into the timeline, and to the functions of `on_event`."""
        if self.callbacks.event is not None:
            self.callbacks.event(event)

    def _unchecked(self, name: str, error: Exception) -> None:
        self._warn_once(f"{name}: whether its cap still holds cannot be checked: {type(error).__name__}: {error}")

    def _drifted(self, name: str, entry: CappedFramework, found: tuple[str, ...]) -> Event | None:
        """Note the drift of one framework. The event, if it is another than before."""
        if found == entry.drift:
            return None
        entry.drift = found
        entry.enforcement = Enforcement.WATCHED if found else Enforcement.ENFORCED
        for sentence in found:
            self._warn_once(sentence)
        text = f"its cap no longer holds: {_cause(entry.drift_reason)}" if found else "its cap holds again"
        return Event(time.time(), "note", f"{name}: {text}", framework=name)

    # notes

    def note(self, note: str, level: int = logging.INFO) -> None:
        """Log it, and list it among the notes; each once."""
        if note not in self.notes:
            self.notes.append(note)
            _log.log(level, "%s", note)

    def warn(self, note: str) -> None:
        """A note that is logged as a warning."""
        self.note(note, logging.WARNING)

    def all_notes(self) -> list[str]:
        """The notes of the budget, of each framework, and of drift."""
        notes = [*self.notes]
        for entry in self.entries.values():
            notes += entry.framework.notes
            notes += entry.drift
        return notes if self.off is None else [*notes, *self.off.notes()]

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._warned:
            self._warned.add(sentence)
            _log.warning("%s", sentence)

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

        return JointPool(joined, self.warn, joint.capped(self.plan.devices[0].joined))


def size_of(size: int | str) -> int:
    """In bytes. Raises MemguardError if it is none."""
    try:
        return parse_size(size)
    except ValueError as error:
        raise MemguardError(str(error)) from None


def _cause(reason: str) -> str:
    """A drift without its own words that the cap does not hold."""
    return re.sub(r": (?:the|its) cap (?:no longer holds|does not hold(?: there)?|will not hold)(?=;|$)", "", reason)

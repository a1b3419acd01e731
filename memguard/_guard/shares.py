"""How caps move, and what idles is given back: for one request, at a tick, and when the user asks."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memguard._base.logs import log as _log
from memguard._base.types import Device, DevicePlan, Enforcement, Event, Moment, Plan, Room, Sample, Shortage
from memguard._base.units import format_size, round_down
from memguard._budget import joint, policy
from memguard._devices import contexts
from memguard._guard.caps import Caps, Entry
from memguard._guard.reclaimer import Reclaimer, Sibling
from memguard.errors import CapNotApplied

if TYPE_CHECKING:
    from memguard._base.framework_spec import CacheName, FrameworkName
    from memguard._budget import Budget
    from memguard._devices.host import Host
    from memguard._frameworks.base import Framework
    from memguard._guard.admission import Admission

own_thread = threading.local()
"""`mine`, on a thread that memguard has started: what runs there is the background, also a function of the program."""
_PATIENCE = 2.0
"""Seconds that a request which cannot be served waits for another thread's call of memguard, to have room made."""


class Shares(Caps):
    """The caps of a budget, and the memory that moves between them. The reclaimer decides and does it."""

    def __init__(self, budget: Budget, host: Host) -> None:
        super().__init__(budget, host)
        self._reclaimer = Reclaimer(self)
        self._elastic = any(part.elastic for part in self.plan.devices)
        self._admitting: Admission | None = None
        self.trims: Counter[tuple[str, str]] = Counter()
        """How often each framework was trimmed on each GPU (UUID). Counted with the guard's lock."""
        self._unserved = threading.local()
        """`last`, of each thread: its last shortage for which nobody could look for room, and why."""

    def make_room(self, framework: str, needed: int, device: Device | None = None) -> Room:
        """Have siblings give back what `framework` needs to take `needed` bytes from the driver, and raise its cap.

        On this thread: the least that serves, most reclaimable first. Where nothing may be freed, nothing is. Never
        raises for a lack of memory: `missing` in what it returns says what is still not there.
        """
        with self._lock:
            self._check_active()
            self._entry(framework)
            where = (self._used_by(framework)[0] if device is None else self._planned(device)).device
            if self._frozen():
                return Room({}, None, needed, {})
            return self._reclaimer.make_room(where, framework, needed)

    def open_bytes(self, framework: str, uuid: str) -> int:
        """Bytes that running workloads of the framework have reserved on that GPU and not taken yet. Takes no lock."""
        return 0 if self._admitting is None else self._admitting.open_bytes(framework, uuid)

    def _wake(self) -> None:
        """Whoever waits for room looks again."""
        if self._admitting is not None:
            self._admitting.turns.wake()

    def _shortage(self, shortage: Shortage) -> bool:
        """What adapters call when they cannot serve a request. True if it is worth another try.

        It runs within the allocation, on the thread that made it, which has no lock of an adapter. If that thread is
        within a call of the guard already, or others are for long, the request is refused as it would be.
        """
        self._unserved.last = None
        if self._over or self._pid != os.getpid():
            return False
        part = next((one for one in self.plan.devices if one.device.uuid == shortage.uuid), None)
        if part is None or shortage.framework not in part.caps:
            return False
        why = "the request was made within another memguard call on this thread"
        if not self._turn.mine:
            if (done := self._turn.take(self._serve, _PATIENCE, shortage, part.device)) is not None:
                return done[0]
            why = f"another thread held memguard's lock for {_PATIENCE:g} s"
        self._unserved.last = shortage, why
        _log.warning("%s: no room was made for %s: %s", shortage.framework, format_size(shortage.asked), why)
        return False

    def _why_no_room(self, moment: Moment) -> str | None:
        """Why nobody could look for room for this thread's request, which was refused just now; None if one did."""
        shortage, why = getattr(self._unserved, "last", None) or (None, None)
        self._unserved.last = None
        mine = shortage is not None and shortage[:3] == (moment.framework, moment.uuid, moment.requested)
        return why if mine else None

    def _serve(self, shortage: Shortage, device: Device) -> bool:
        if not self.active or self._frozen():
            return False
        who, full = shortage.framework, shortage.full
        room = self._reclaimer.make_room(device, who, shortage.needed, full=full, asked=True)
        return not room.missing

    def settle(self, sample: Sample) -> Sample:
        """At a tick of the monitor: elastic caps get headroom, by what `sample` has read. Returns it, with the caps as
        they are then. Moves nothing while another thread is within a call."""
        if not self._elastic or not self.active:
            return sample
        plan = self.plan
        for one in sample.devices:
            before, caps = self._reclaimer.headroom(one)
            if caps:
                self._turn.take(self._settle, 0, before, caps)
        return sample if self.plan is plan else _with_caps(sample, self.plan)

    def _settle(self, before: DevicePlan, caps: Mapping[str, int]) -> None:
        if self.active:
            self._reclaimer.settle(before, caps)

    def moved(self) -> list[Event]:
        """What was given back and lent since the last call."""
        events, found = self._reclaimer.events, []
        while events:
            found.append(events.popleft())
        return found

    def resize(self, framework: FrameworkName, size: int | str) -> None:
        """Change a cap on every GPU. Lowering it trims, and warns about what is still held above it."""
        self._find_drift()
        with self._lock:
            self._check_active()
            entry = self._entry(framework)
            if any(framework in part.elastic for part in self.plan.devices):
                reason = "its share is elastic: its cap moves between min and max by itself"
                raise CapNotApplied(framework, reason, f"change frameworks.{framework}.min or .max in the budget")
            plan = self._resized_plan(framework, entry, self._size(size))
            if entry.enforcement is Enforcement.PENDING:
                self.plan = plan  # applied with the new cap when it is imported
                return
            if entry.drift:
                remedy = "undo that change, and call memguard.resize again; or restart the process without it"
                raise CapNotApplied(framework, entry.drift_reason, remedy)
            if entry.enforcement is not Enforcement.ENFORCED:
                raise CapNotApplied(framework, f"it is {entry.enforcement.value}", "there is no cap to change")
            try:
                self._resized += 1
                entry.framework.resize(plan.caps(framework))
            finally:
                self._resized += self._resized % 2  # even again, and another one than before
            self.plan = plan
            self._trim_above_cap(framework)
        self._wake()

    def _resized_plan(self, framework: str, entry: Entry, size: int) -> Plan:
        """With another cap on every GPU, for which what was lent comes back. PlanError if that is not enough."""
        pending = entry.enforcement is Enforcement.PENDING
        sets = pending or (self.movable(framework) and not entry.framework.fixed())
        short: dict[str, Room] = {}
        wants = [
            part
            for part in self.plan.devices
            if framework not in part.joined and sets and not entry.drift
            if round_down(size) > max(part.caps[framework], policy.left_beside(part, framework, self._held(part)))
        ]
        for last in (False, True):  # nothing goes on one GPU if it does not fit another
            act = last and not self._frozen()
            rooms = [(part, self._reclaimer.call_back(part.device, framework, round_down(size), act)) for part in wants]
            short = {part.device.uuid: room for part, room in rooms if room.missing}
            if short:
                break
        held = {part.device.uuid: self._held(part) for part in self.plan.devices}
        return policy.resized(self.plan, framework, size, held, short)

    def _held(self, part: DevicePlan) -> dict[str, int]:
        """What each framework of the budget holds on one GPU, in bytes."""
        return {name: policy.known_held(one.usage(part.device)) for name, one in self._frameworks.items()}

    def trim(self, framework: CacheName | None = None) -> int:
        """Give idle caches back to the driver, of one framework or all, on this thread. Returns the bytes freed."""
        with self._lock:
            self._check_active()
            shared = [] if self._reclaimer.shared is None else [joint.POOL]
            if framework is not None and framework not in shared:
                self._entry(framework)
            alone = [name for name, entry in self._entries.items() if not (shared and entry.framework.pooled)]
            chosen = [*alone, *shared] if framework is None else [framework]
            before = [self._reclaimer.available(part.device) for part in self.plan.devices]
            for part in self.plan.devices:  # PyTorch trims every device at once: read around all of them
                # `usage` and not `state`, which would wait for a running import.
                self._trim([n for n in chosen if self._sibling(n).usage(part.device)], part.device)
            after = [self._reclaimer.available(part.device) for part in self.plan.devices]
            self._wake()
            return sum(max(b - a, 0) for a, b in zip(before, after, strict=True))

    # what the reclaimer asks of it, beside `part`

    def movable(self, name: str) -> bool:
        """Whether its cap can be changed now."""
        return self._entry(name).enforcement in (Enforcement.ENFORCED, Enforcement.PENDING)

    def set_cap(self, name: str, uuid: str, cap: int) -> None:
        """Its cap on one GPU from now on, in bytes. With the lock held; `resize` is the call for users."""
        entry, before = self._entry(name), self.plan
        rises = cap > self.part(uuid).caps[name]
        plan = policy.with_cap(before, uuid, name, cap)
        if rises:  # first: an interruption may leave the cap lower than the plan says, but never above it
            self.plan = plan
        if entry.enforcement is not Enforcement.PENDING:  # else it is applied with this cap when it is imported
            try:
                self._resized += 1
                entry.framework.resize(plan.caps(name))
            except Exception:
                self.plan = before
                raise
            finally:
                self._resized += self._resized % 2
        self.plan = plan

    def promised(self, name: str, uuid: str, in_use: int | None) -> int:
        """As `open_bytes`, by what the framework has in use."""
        return 0 if self._admitting is None else self._admitting.promised(name, uuid, in_use)

    def _trim_above_cap(self, name: str) -> None:
        """A cap below what is held frees nothing by itself: trim, and warn about what stays above it, which elastic
        frameworks are lent no more."""
        entry = self._entry(name)

        def above() -> str | None:
            usage = entry.framework.usage(part.device)
            held = None if usage is None else usage.held
            return above_cap(name, held, part.caps[name], entry.enforcement.value, part.device)

        for part in self.plan.devices:
            if above() is not None:
                self._trim([name], part.device)
                if (note := above()) is not None:
                    _log.warning("%s", note)
                    self._reclaimer.call_back_unused(part.device)

    def _trim(self, names: Sequence[str], device: Device) -> None:
        """On this thread, unless nothing may be freed on it; and nothing that spoils another thread's capture."""
        if names and (why := self._frozen()):
            _log.info("%s: nothing is trimmed", why)
            return
        with contexts.beside_captures():
            for name in names:
                self._sibling(name).trim(device)
                self.trims[name, device.uuid] += 1

    def _sibling(self, name: str) -> Sibling:
        """Raises NotActive if a finalizer or a signal handler within this call has ended the budget."""
        self._check_active()
        try:
            return self._reclaimer.sibling(name)
        except KeyError:  # ended right after that
            self._check_active()
            raise

    def _frozen(self) -> str:
        """Why nothing may be freed on this thread now, as a sentence; "" if it may.

        In the background (a function of `on_event` or `on_sample` that trims) nothing is freed while communicators
        live. Giving memory back waits for all work on the GPU, among it collectives that wait for other ranks, and
        holds the allocator for which the thread that launches the next collective may be waiting. On a thread of the
        program it is the program that asks, or a request of its own that would fail: there PyTorch frees its cache in
        the same way, with the same call. Moving a cap frees nothing, and goes on.
        """
        if self._capturing():
            return "a CUDA graph is being captured on this thread"
        if getattr(own_thread, "mine", False):
            who = next((framework.name for framework in self._known() if framework.communicating()), "")
            return f"{who} has communicators, for which other processes wait" if who else ""
        return ""

    def _capturing(self) -> bool:
        """Whether this thread captures a CUDA graph."""
        return any(framework.capturing() for framework in self._known())

    def _known(self) -> list[Framework]:
        """Those of the budget, and others that are live."""
        return [*(entry.framework for entry in self._entries.values()), *self._reader.unnamed().values()]

    def _lend_nothing_to(self, name: str) -> None:
        """An elastic framework whose cap will not move has its min only: what it began with can be lent to others."""
        for part in self.plan.devices:
            if name in part.elastic:
                self.plan = policy.with_cap(self.plan, part.device.uuid, name, part.elastic[name][0])


def _with_caps(sample: Sample, plan: Plan) -> Sample:
    """The sample with the caps of this plan."""
    devices, caps = [], {part.device.uuid: part.caps for part in plan.devices}
    for one in sample.devices:
        now = caps.get(one.uuid, {})
        named = {name: read._replace(cap=now.get(name, read.cap)) for name, read in one.frameworks.items()}
        devices.append(one._replace(frameworks=named))
    return sample._replace(devices=tuple(devices))


def above_cap(name: str, held: int | None, cap: int | None, enforcement: str, device: Device) -> str | None:
    """The note about a framework that holds more than its cap."""
    if held is None or cap is None or held <= cap:
        return None
    above = f"{name}: holds {format_size(held - cap)} above its cap of {format_size(cap)} on {device.name}"
    if enforcement != Enforcement.ENFORCED.value:
        return f"{above}, which is {enforcement}, not enforced"
    return f"{above}: it gets no more, and shrinks as arrays are freed and memguard.trim() runs"

"""Elastic caps: raise and lower them, and trim idle caches, on a request, at a monitor tick or on demand."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memguard._base.logs import log as _log
from memguard._base.types import (
    Device,
    DevicePlan,
    Enforcement,
    Event,
    NoHelp,
    Plan,
    RefusedRequest,
    Room,
    Sample,
    Shortage,
    Usage,
    WhyNoHelp,
)
from memguard._base.units import format_size, round_down
from memguard._budget import policy
from memguard._budget.shared_pool import allocator_of
from memguard._devices import contexts
from memguard._guard import lending
from memguard._guard.caps import CappedFramework, CapTable, size_of
from memguard._guard.reclaim import Reclaimer, Reserved
from memguard._ledger.reader import LedgerReader
from memguard.errors import CapNotApplied

if TYPE_CHECKING:
    from memguard._base.framework_spec import CacheName, FrameworkName
    from memguard._frameworks.base import Allocator, Framework

own_thread = threading.local()
"""`mine` is True on threads that memguard started. Callbacks of the program on these threads are background work."""
_PATIENCE = 2.0
"""Seconds that an allocation which is short of memory waits for the guard's lock before it is refused."""
_BUSY = NoHelp.LOCK_HELD, NoHelp.WITHIN_CALL
_CAPTURING = WhyNoHelp(NoHelp.CAPTURE, "a CUDA graph is being captured on this thread")


class ElasticCaps:
    """Moves memory between the caps of a budget, through its `Reclaimer`."""

    def __init__(self, caps: CapTable, reader: LedgerReader, reserved: Reserved) -> None:
        self._caps, self._reader, self._reserved = caps, reader, reserved
        self._elastic = any(part.elastic for part in caps.plan.devices)
        self.reclaimer = Reclaimer(caps, reserved)
        self.trims: Counter[tuple[str, str]] = Counter()
        """Number of trims by framework and GPU (UUID). Guarded by the guard's lock."""
        self._unserved = threading.local()
        """`last`, per thread: its last shortage, and the reason why no room was made, None if room was made."""

    def make_room(self, framework: str, needed: int, device: Device | None = None) -> Room:
        """Implements `Guard.make_room`."""
        caps = self._caps
        with caps.lock:
            caps.check_active()
            caps.entry(framework)
            where = (caps.used_by(framework)[0] if device is None else caps.planned(device)).device
            if self.why_trim_forbidden():
                return Room({}, None, needed, {})
            return self.reclaimer.make_room(where, framework, needed)

    def shortage(self, shortage: Shortage) -> bool:
        """Make room for a request that an allocator cannot serve. Returns True if the calling adapter should try again.

        It runs within the allocation, on the allocating thread, which holds no lock of an adapter. It makes no room if
        that thread holds the guard's lock already, or if another thread holds it for `_PATIENCE` seconds.
        """
        self._unserved.last, caps = None, self._caps
        if caps.over or caps.pid != os.getpid():
            return False
        part = next((one for one in caps.plan.devices if one.device.uuid == shortage.uuid), None)
        if part is None or shortage.framework not in part.caps:
            return False
        why: WhyNoHelp | None
        if caps.turn.mine:
            why = WhyNoHelp(NoHelp.WITHIN_CALL, "the request was made within another memguard call on this thread")
        elif (done := caps.turn.take(self._serve, _PATIENCE, shortage, part.device)) is not None:
            why = done[0]
        else:
            why = WhyNoHelp(NoHelp.LOCK_HELD, f"another thread held memguard's lock for {_PATIENCE:g} s")
        self._unserved.last = shortage, why
        if why is not None and why.kind in _BUSY:
            asked = format_size(shortage.asked)
            _log.warning("%s: no room was made for %s: %s", shortage.framework, asked, why.text)
        return why is None

    def why_no_help(
        self, request: RefusedRequest, part: DevicePlan, usages: Mapping[str, Usage | None]
    ) -> WhyNoHelp | None:
        """The reason why no room was made for the request that this thread was just refused.

        None if room was made, or if room would not have helped: the request exceeds the highest possible cap, or
        neither the cap nor the GPU was short of memory.
        """
        shortage, why = getattr(self._unserved, "last", None) or (None, None)
        self._unserved.last = None
        name, asked = request.framework, request.requested
        if shortage is None or shortage[:3] != (name, request.uuid, asked):
            why = _why_not_asked(self._caps.frameworks.get(name))
        if why is None or why.kind in _BUSY or asked is None:
            return why
        needed, cap = (request.held or 0) - (request.reclaimable or 0) + asked, request.cap or 0
        # A cap other than the plan's was set by the user in the framework itself, and cannot rise.
        most = max(cap, part.elastic.get(name, (0, 0))[1]) if cap == part.caps.get(name) else cap
        full = request.free is not None and request.free < asked
        if why.kind is NoHelp.NOT_ASKED and full and usages:
            full = (request.free or 0) + sum(one.most for one in lending.reclaimable_caches(usages, name)) >= asked
        return why if needed <= most and len(part.caps) > 1 and (needed > cap or full) else None

    def _serve(self, shortage: Shortage, device: Device) -> WhyNoHelp | None:
        """Make room for a shortage. Returns None on success, else the reason why there is too little."""
        if not self._caps.active:
            return WhyNoHelp(NoHelp.NOT_ASKED, "the budget has ended")
        if self._caps.off is not None:
            return WhyNoHelp(NoHelp.NOT_ASKED, "the process is off its GPUs")
        if (why := self.why_trim_forbidden()) is not None:
            return why
        who, full = shortage.framework, shortage.full
        room = self.reclaimer.make_room(device, who, shortage.needed, full=full, asked=True)
        if not room.missing:
            return None
        text, got = "too little was idle elsewhere", sum(room.returned.values())
        if got:
            text = f"others gave back {format_size(got)}, {format_size(room.missing)} too little"
        return WhyNoHelp(NoHelp.NOTHING_IDLE, text)

    def rebalance(self, sample: Sample) -> Sample:
        """Implements `Guard.rebalance`."""
        if not self._elastic or not self._caps.active or self._caps.off is not None:
            return sample
        plan = self._caps.plan
        for one in sample.devices:
            before, caps = self.reclaimer.headroom(one)
            if caps:
                self._caps.turn.take(self._rebalance, 0, before, caps)
        return sample if self._caps.plan is plan else _with_caps(sample, self._caps.plan)

    def _rebalance(self, before: DevicePlan, caps: Mapping[str, int]) -> None:
        if self._caps.active:
            self.reclaimer.rebalance(before, caps)

    def moved(self) -> list[Event]:
        """Implements `Guard.moved`."""
        events, found = self.reclaimer.events, []
        while events:
            found.append(events.popleft())
        return found

    def resize(self, framework: FrameworkName, size: int | str) -> None:
        """Implements `Guard.resize`."""
        caps = self._caps
        with caps.lock:
            caps.check_active()
            entry = caps.entry(framework)
            if any(framework in part.elastic for part in caps.plan.devices):
                reason = "its share is elastic: its cap moves between min and max by itself"
                raise CapNotApplied(framework, reason, f"change frameworks.{framework}.min or .max in the budget")
            plan = self._resized_plan(framework, entry, size_of(size))
            if entry.enforcement is Enforcement.PENDING:
                caps.plan = plan  # the framework's import applies the new cap
                return
            if entry.drift:
                remedy = "undo that change, and call memguard.resize again; or restart the process without it"
                raise CapNotApplied(framework, entry.drift_reason, remedy)
            if entry.enforcement is not Enforcement.ENFORCED:
                raise CapNotApplied(framework, f"it is {entry.enforcement.value}", "there is no cap to change")
            caps.resize(framework, plan)
            caps.plan = plan
            self.trim_above_cap(framework)
        self._reserved.wake()

    def _resized_plan(self, framework: str, entry: CappedFramework, size: int) -> Plan:
        """The plan with this cap on every GPU, after calling back lent memory. PlanError if the cap does not fit."""
        pending = entry.enforcement is Enforcement.PENDING
        sets = pending or (self._caps.movable(framework) and not entry.framework.fixed())
        short: dict[str, Room] = {}
        wants = [
            part
            for part in self._caps.plan.devices
            if allocator_of(part, framework) == framework and sets and not entry.drift
            if round_down(size) > max(part.caps[framework], policy.highest_cap(part, framework, self._held(part)))
        ]
        for last in (False, True):  # dry run first: no GPU changes if the cap does not fit on another
            act = last and not self.why_trim_forbidden()
            rooms = [(part, self.reclaimer.call_back(part.device, framework, round_down(size), act)) for part in wants]
            short = {part.device.uuid: room for part, room in rooms if room.missing}
            if short:
                break
        held = {part.device.uuid: self._held(part) for part in self._caps.plan.devices}
        return policy.resized(self._caps.plan, framework, size, held, short)

    def _held(self, part: DevicePlan) -> dict[str, int]:
        """The bytes that each allocator of the budget holds on one GPU."""
        return {name: policy.known_held(usage) for name, usage in self._caps.usages(part.device).items()}

    def trim(self, framework: CacheName | None = None) -> int:
        """Implements `Guard.trim`."""
        caps = self._caps
        with caps.lock:
            caps.check_active()
            if framework is not None and framework not in caps.allocators:
                caps.entry(framework)
            chosen = [*caps.allocators] if framework is None else [framework]
            before = [self.reclaimer.available(part.device) for part in caps.plan.devices]
            for part in caps.plan.devices:  # PyTorch trims all devices at once: `before` and `after` enclose them all
                # `usage`, because `state` would wait for a running import.
                self.trim_idle([n for n in chosen if self._allocator(n).usage(part.device)], part.device)
            after = [self.reclaimer.available(part.device) for part in caps.plan.devices]
            self._reserved.wake()
            return sum(max(b - a, 0) for a, b in zip(before, after, strict=True))

    def trim_above_cap(self, name: str) -> None:
        """Trim a framework that holds more than its cap. If it still does, log a warning and call back unused
        memory that is lent to elastic frameworks."""
        entry = self._caps.entry(name)

        def above() -> str | None:
            usage = entry.framework.usage(part.device)
            held = None if usage is None else usage.held
            return above_cap(name, held, part.caps[name], entry.enforcement.value, part.device)

        for part in self._caps.plan.devices:
            if above() is not None:
                self.trim_idle([name], part.device)
                if (note := above()) is not None:
                    _log.warning("%s", note)
                    self.reclaimer.call_back_unused(part.device)

    def trim_idle(self, names: Sequence[str], device: Device) -> None:
        """Trim these frameworks on this thread, unless that is forbidden. Captures of other threads stay valid."""
        if names and (why := self.why_trim_forbidden()):
            _log.info("%s: nothing is trimmed", why.text)
            return
        with contexts.capture_safe():
            for name in names:
                self._allocator(name).trim(device)
                self.trims[name, device.uuid] += 1

    def _allocator(self, name: str) -> Allocator:
        """The allocator or framework of that name. NotActive if a signal handler or finalizer ended the budget."""
        self._caps.check_active()
        try:
            return self._caps.allocator(name)
        except KeyError:  # the budget ended after the check
            self._caps.check_active()
            raise

    def why_trim_forbidden(self) -> WhyNoHelp | None:
        """The reason why this thread must not free GPU memory now; None if it may.

        On a background thread (an `on_event` or `on_sample` callback that trims) nothing is freed while communicators
        live. Freeing synchronizes with all work on the GPU, including collectives that wait for other ranks. It also
        holds the allocator's lock, for which the thread that launches the next collective may be waiting. The program's
        own threads may trim outside a capture: the program requested the trim, or its allocation would fail otherwise,
        and PyTorch would free its cache there with the same call. Moving a cap frees nothing and is always allowed.
        """
        if self._caps.off is not None:  # a process with a capture or communicators cannot be suspended
            return None
        if self.capturing():
            return _CAPTURING
        if getattr(own_thread, "mine", False):
            who = next((framework.name for framework in self._known() if framework.communicating()), "")
            text = f"{who} has communicators, for which other processes wait"
            return WhyNoHelp(NoHelp.COMMUNICATORS, text) if who else None
        return None

    def capturing(self) -> bool:
        """Whether this thread is capturing a CUDA graph."""
        return self._caps.off is None and any(framework.capturing() for framework in self._known())

    def _known(self) -> list[Framework]:
        """The budget's frameworks, and live frameworks that it does not name."""
        return [*(entry.framework for entry in self._caps.entries.values()), *self._reader.unnamed().values()]


def _why_not_asked(framework: Framework | None) -> WhyNoHelp | None:
    """The reason why an allocator refused a request without requesting room first."""
    if framework is None:
        return None
    if not framework.asks:
        return WhyNoHelp(NoHelp.NOT_ASKED, f"{framework.name}'s allocator does not ask")
    if framework.capturing():
        return _CAPTURING
    return WhyNoHelp(NoHelp.NOT_ASKED, f"{framework.name}'s allocator could not ask")


def _with_caps(sample: Sample, plan: Plan) -> Sample:
    """The sample with its elastic caps replaced by those of the plan."""
    devices, caps = [], {part.device.uuid: {n: part.caps[n] for n in part.elastic} for part in plan.devices}
    for one in sample.devices:
        now = caps.get(one.uuid, {})
        named = {name: read._replace(cap=now.get(name, read.cap)) for name, read in one.frameworks.items()}
        devices.append(one._replace(frameworks=named))
    return sample._replace(devices=tuple(devices))


def above_cap(name: str, held: int | None, cap: int | None, enforcement: str, device: Device) -> str | None:
    """The note about a framework that holds more than its cap; None if it does not."""
    if held is None or cap is None or held <= cap:
        return None
    above = f"{name}: holds {format_size(held - cap)} above its cap of {format_size(cap)} on {device.name}"
    if enforcement != Enforcement.ENFORCED.value:
        return f"{above}, which is {enforcement}, not enforced"
    return f"{above}: it gets no more, and shrinks as arrays are freed and memguard.trim() runs"

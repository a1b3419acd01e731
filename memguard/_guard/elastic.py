"""Elastic caps: raise and lower caps, and trim idle caches, on a request, at a monitor tick or on demand."""

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
from memguard._guard.reclaim import Reclaimer, WorkloadReservations
from memguard._ledger.reader import LedgerReader
from memguard.errors import CapNotApplied

if TYPE_CHECKING:
    from memguard._base.framework_spec import CacheName, FrameworkName
    from memguard._frameworks.base import Allocator, Framework

thread_flags = threading.local()
"""`started_by_memguard` is True on threads that memguard started, which may call the program's callbacks."""
_LOCK_TIMEOUT = 2.0
"""Seconds that a failing allocation waits for the guard's lock. After that the request is refused."""
_LOCK_BUSY = NoHelp.LOCK_HELD, NoHelp.WITHIN_CALL
_CAPTURING = WhyNoHelp(NoHelp.CAPTURE, "a CUDA graph is being captured on this thread")


class ElasticCaps:
    """Changes elastic caps and trims caches, through the budget's `Reclaimer`."""

    def __init__(self, caps: CapTable, reader: LedgerReader, workloads: WorkloadReservations) -> None:
        self._caps, self._reader, self._workloads = caps, reader, workloads
        self._elastic = any(device_plan.elastic for device_plan in caps.plan.devices)
        self.reclaimer = Reclaimer(caps, workloads)
        self.trims: Counter[tuple[str, str]] = Counter()
        """Number of trims by framework and GPU (UUID). Protected by the guard's lock."""
        self._thread = threading.local()
        """`last_shortage`: the last `Shortage` on this thread, and the reason why memguard freed no memory for this
        shortage (None if it freed memory)."""

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
        """Free memory or raise the cap for a request that an allocator cannot serve. Returns True if the adapter should
        retry the allocation.

        Adapters call `shortage` within the failing allocation, without holding a lock of an adapter. Frees nothing and
        returns False if the calling thread already holds the guard's lock, or if another thread holds the guard's lock
        for `_LOCK_TIMEOUT` seconds.
        """
        self._thread.last_shortage, caps = None, self._caps
        if caps.stopped or caps.pid != os.getpid():
            return False
        device_plan = next((one for one in caps.plan.devices if one.device.uuid == shortage.uuid), None)
        if device_plan is None or shortage.framework not in device_plan.caps:
            return False
        why: WhyNoHelp | None
        if caps.locked.held_here:
            why = WhyNoHelp(NoHelp.WITHIN_CALL, "the request was made within another memguard call on this thread")
        elif (done := caps.locked.run(self._make_room_for, _LOCK_TIMEOUT, shortage, device_plan.device)) is not None:
            why = done[0]
        else:
            why = WhyNoHelp(NoHelp.LOCK_HELD, f"another thread held memguard's lock for {_LOCK_TIMEOUT:g} s")
        self._thread.last_shortage = shortage, why
        if why is not None and why.kind in _LOCK_BUSY:
            requested = format_size(shortage.requested)
            _log.warning("%s: no room was made for %s: %s", shortage.framework, requested, why.text)
        return why is None

    def why_no_help(
        self, request: RefusedRequest, device_plan: DevicePlan, usages: Mapping[str, Usage | None]
    ) -> WhyNoHelp | None:
        """The reason why memguard freed no memory for the request that an allocator just refused on this thread.

        None if memguard freed memory, or if freed memory would not have helped, because the request exceeds the highest
        possible cap or because neither the cap nor the GPU was short of memory.
        """
        shortage, why = getattr(self._thread, "last_shortage", None) or (None, None)
        self._thread.last_shortage = None
        name, requested = request.framework, request.requested
        if shortage is None or shortage[:3] != (name, request.uuid, requested):
            why = _why_room_not_requested(self._caps.frameworks.get(name))
        if why is None or why.kind in _LOCK_BUSY or requested is None:
            return why
        needed, cap = (request.held or 0) - (request.reclaimable or 0) + requested, request.cap or 0
        # If the cap differs from the plan's, the user set the cap in the framework, and memguard cannot raise it.
        most = max(cap, device_plan.elastic.get(name, (0, 0))[1]) if cap == device_plan.caps.get(name) else cap
        full = request.free is not None and request.free < requested
        if why.kind is NoHelp.NOT_ASKED and full and usages:
            full = (request.free or 0) + sum(one.most for one in lending.reclaimable_caches(usages, name)) >= requested
        return why if needed <= most and len(device_plan.caps) > 1 and (needed > cap or full) else None

    def _make_room_for(self, shortage: Shortage, device: Device) -> WhyNoHelp | None:
        """Raise the cap and trim caches for a shortage. Returns None on success, else the reason for the failure."""
        if not self._caps.active:
            return WhyNoHelp(NoHelp.NOT_ASKED, "the budget has ended")
        if self._caps.suspended is not None:
            return WhyNoHelp(NoHelp.NOT_ASKED, "the process is off its GPUs")
        if (why := self.why_trim_forbidden()) is not None:
            return why
        requester, full = shortage.framework, shortage.full
        room = self.reclaimer.make_room(device, requester, shortage.needed, full=full, by_allocator=True)
        if not room.missing:
            return None
        text, got = "too little was idle elsewhere", sum(room.returned.values())
        if got:
            text = f"others gave back {format_size(got)}, {format_size(room.missing)} too little"
        return WhyNoHelp(NoHelp.NOTHING_IDLE, text)

    def rebalance(self, sample: Sample) -> Sample:
        """Implements `Guard.rebalance`."""
        if not self._elastic or not self._caps.active or self._caps.suspended is not None:
            return sample
        plan = self._caps.plan
        for one in sample.devices:
            before, caps = self.reclaimer.headroom(one)
            if caps:
                self._caps.locked.run(self._rebalance, 0, before, caps)
        return sample if self._caps.plan is plan else _with_caps(sample, self._caps.plan)

    def _rebalance(self, before: DevicePlan, caps: Mapping[str, int]) -> None:
        if self._caps.active:
            self.reclaimer.rebalance(before, caps)

    def take_events(self) -> list[Event]:
        """Implements `Guard.take_events`."""
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
            if any(framework in device_plan.elastic for device_plan in caps.plan.devices):
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
            caps.resize(framework, entry.framework, plan)
            caps.plan = plan
            self.trim_above_cap(framework)
        self._workloads.wake()

    def _resized_plan(self, framework: str, entry: CappedFramework, size: int) -> Plan:
        """The plan with a cap of `size` bytes on every GPU. Lowers elastic caps toward their min if the new cap needs
        that memory. Raises PlanError if the cap does not fit."""
        pending = entry.enforcement is Enforcement.PENDING
        sets = pending or entry.movable
        short: dict[str, Room] = {}
        wants = [
            device_plan
            for device_plan in self._caps.plan.devices
            if allocator_of(device_plan, framework) == framework and sets and not entry.drift
            if round_down(size)
            > max(device_plan.caps[framework], policy.highest_cap(device_plan, framework, self._held(device_plan)))
        ]
        for last in (False, True):  # first a dry run, so that a cap that does not fit changes no GPU
            act = last and not self.why_trim_forbidden()
            rooms = [
                (device_plan, self.reclaimer.call_back(device_plan.device, framework, round_down(size), act))
                for device_plan in wants
            ]
            short = {device_plan.device.uuid: room for device_plan, room in rooms if room.missing}
            if short:
                break
        held = {device_plan.device.uuid: self._held(device_plan) for device_plan in self._caps.plan.devices}
        return policy.resized(self._caps.plan, framework, size, held, short)

    def _held(self, device_plan: DevicePlan) -> dict[str, int]:
        """The bytes that each allocator of the budget holds on one GPU."""
        return {name: policy.known_held(usage) for name, usage in self._caps.usages(device_plan.device).items()}

    def trim(self, framework: CacheName | None = None) -> int:
        """Implements `Guard.trim`."""
        caps = self._caps
        with caps.lock:
            caps.check_active()
            if framework is not None and framework not in caps.allocators:
                caps.entry(framework)
            chosen = [*caps.allocators] if framework is None else [framework]
            before = [self.reclaimer.available(device_plan.device) for device_plan in caps.plan.devices]
            for (
                device_plan
            ) in caps.plan.devices:  # PyTorch trims all GPUs at once, so `available` is read before and after all trims
                # Calls `usage`, because `state` would wait for a running import.
                self.trim_idle([n for n in chosen if self._allocator(n).usage(device_plan.device)], device_plan.device)
            after = [self.reclaimer.available(device_plan.device) for device_plan in caps.plan.devices]
            self._workloads.wake()
            return sum(max(b - a, 0) for a, b in zip(before, after, strict=True))

    def trim_above_cap(self, name: str) -> None:
        """Trim a framework that holds more than its cap. If the framework still holds more than its cap after the trim,
        log a warning and lower elastic caps by their unused headroom."""
        entry = self._caps.entry(name)

        def above() -> str | None:
            usage = entry.framework.usage(device_plan.device)
            held = None if usage is None else usage.held
            return above_cap(name, held, device_plan.caps[name], entry.enforcement.value, device_plan.device)

        for device_plan in self._caps.plan.devices:
            if above() is not None:
                self.trim_idle([name], device_plan.device)
                if (note := above()) is not None:
                    _log.warning("%s", note)
                    self.reclaimer.call_back_unused(device_plan.device)

    def trim_idle(self, names: Sequence[str], device: Device) -> None:
        """Trim the caches of `names` on this thread, unless `why_trim_forbidden` gives a reason. CUDA graph captures of
        other threads stay valid."""
        if names and (why := self.why_trim_forbidden()):
            _log.info("%s: nothing is trimmed", why.text)
            return
        with contexts.capture_safe():
            for name in names:
                self._allocator(name).trim(device)
                self.trims[name, device.uuid] += 1

    def _allocator(self, name: str) -> Allocator:
        """The allocator or framework called `name`. Raises NotActive if a signal handler or finalizer has ended the
        budget."""
        self._caps.check_active()
        try:
            return self._caps.allocator(name)
        except KeyError:  # the budget ended after the check
            self._caps.check_active()
            raise

    def why_trim_forbidden(self) -> WhyNoHelp | None:
        """The reason why the calling thread must not free GPU memory; None if it may free memory.

        On a thread that memguard started (where an `on_event` or `on_sample` callback may trim), nothing is freed while
        NCCL communicators exist. Freeing synchronizes with all work on the GPU, including collectives that wait for
        other ranks. While it waits, the freeing thread holds the allocator's lock, for which the thread that launches
        the next collective may be waiting. The program's own threads may trim outside a CUDA graph capture, because
        either the program requested the trim, or its allocation would fail without the trim (PyTorch itself frees its
        cache in that case). Changing a cap frees no memory and is always allowed.
        """
        if self._caps.suspended is not None:  # a suspended process has no capture or communicators
            return None
        if self.capturing():
            return _CAPTURING
        if getattr(thread_flags, "started_by_memguard", False):
            communicating = next(
                (framework.name for framework in self._all_frameworks() if framework.communicating()), ""
            )
            text = f"{communicating} has communicators, for which other processes wait"
            return WhyNoHelp(NoHelp.COMMUNICATORS, text) if communicating else None
        return None

    def capturing(self) -> bool:
        """True while this thread captures a CUDA graph."""
        return self._caps.suspended is None and any(framework.capturing() for framework in self._all_frameworks())

    def _all_frameworks(self) -> list[Framework]:
        """The budget's frameworks, and frameworks in use that the budget does not name."""
        return [*self._caps.frameworks.values(), *self._reader.unnamed().values()]


def _why_room_not_requested(framework: Framework | None) -> WhyNoHelp | None:
    """The reason to report for an allocator that refused a request without a call of `ElasticCaps.shortage`."""
    if framework is None:
        return None
    if not framework.requests_room:
        return WhyNoHelp(NoHelp.NOT_ASKED, f"{framework.name}'s allocator does not ask")
    if framework.capturing():
        return _CAPTURING
    return WhyNoHelp(NoHelp.NOT_ASKED, f"{framework.name}'s allocator could not ask")


def _with_caps(sample: Sample, plan: Plan) -> Sample:
    """A copy of the sample with the elastic caps of `plan`."""
    devices, caps = (
        [],
        {
            device_plan.device.uuid: {n: device_plan.caps[n] for n in device_plan.elastic}
            for device_plan in plan.devices
        },
    )
    for one in sample.devices:
        now = caps.get(one.uuid, {})
        named = {name: read._replace(cap=now.get(name, read.cap)) for name, read in one.frameworks.items()}
        devices.append(one._replace(frameworks=named))
    return sample._replace(devices=tuple(devices))


def above_cap(name: str, held: int | None, cap: int | None, enforcement: str, device: Device) -> str | None:
    """The note about a framework that holds more than its cap; None if the framework is within its cap."""
    if held is None or cap is None or held <= cap:
        return None
    above = f"{name}: holds {format_size(held - cap)} above its cap of {format_size(cap)} on {device.name}"
    if enforcement != Enforcement.ENFORCED.value:
        return f"{above}, which is {enforcement}, not enforced"
    return f"{above}: it gets no more, and shrinks as arrays are freed and memguard.trim() runs"

"""Reclaim: makes room for one request by raising an elastic cap and trimming other frameworks' idle caches.

`lending` computes the caps and the trims. The siblings of a framework are the other frameworks of the budget on the
same GPU. Reclaim may run within the failing allocation, on the user's thread, which holds no lock of the requesting
adapter. The returned bytes are measured as the decrease of this process's memory in NVML during a trim, because
`torch.cuda.empty_cache()` silently does nothing in a CUDA graph capture or while a `MemPool` is in use.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Protocol

from memguard._base.logs import log as _log
from memguard._base.logs import words_of
from memguard._base.types import Device, DevicePlan, DeviceSample, Event, Room, Usage
from memguard._base.units import GRANULE, format_size
from memguard._budget import policy, shared_pool
from memguard._devices import contexts
from memguard._frameworks.specs import NEVER_GIVE_BACK
from memguard._guard import lending
from memguard._guard.caps import CapTable
from memguard.errors import CapNotApplied

_KEPT = 64
"""Maximum number of events that are stored until the session records them."""


class WorkloadReservations(Protocol):
    """The reservations of running workloads. `AdmissionOnDemand` implements this protocol."""

    @property
    def idle(self) -> bool:
        """True if no workload holds or awaits a reservation."""

    def reserved_not_taken(self, framework: str, uuid: str, in_use: int | None) -> int:
        """Bytes that the framework's workloads have reserved and not yet allocated, computed from `in_use`."""

    def wake(self) -> None:
        """Make all waiting workloads retry their reservations."""


class Reclaimer:
    """Carries out the decisions of `lending`. Callers hold the guard's lock, except for `headroom`."""

    def __init__(self, caps: CapTable, workloads: WorkloadReservations) -> None:
        self._caps, self._workloads = caps, workloads
        self._fixed: set[str] = set()
        """Elastic frameworks for which a change of the cap has failed."""
        self.events: deque[Event] = deque(maxlen=_KEPT)
        """Events that report changed caps and returned memory. They are queued because no callback may run within an
        allocation."""
        self.returned: Counter[tuple[str, str]] = Counter()
        """Bytes that each framework returned to the driver for siblings' requests, by framework and GPU (UUID)."""
        self.lends: Counter[tuple[str, str]] = Counter()
        """Number of raises of an elastic cap, by framework and GPU (UUID)."""

    def make_room(
        self, device: Device, requester: str, needed: int, *, full: bool = False, by_allocator: bool = False
    ) -> Room:
        """Raise the cap and trim siblings so that `requester` can take `needed` more bytes from the driver.
        Returns the changes as a `Room`.

        `by_allocator`: the requester's allocator could not serve a request, and has already trimmed its own cache.
        `full`: True if the driver refused the request although it fits under the cap.
        """
        uuid = device.uuid
        returned: dict[str, int] = {}
        before = self._caps.device_plan(uuid).caps.get(requester)
        usages = self._caps.usages(device)
        missing, live = (0, {}) if full else self._raise_cap(device, requester, needed, by_allocator, returned, usages)
        device_plan = self._caps.device_plan(uuid)
        if not missing:
            missing = self._trim_siblings(device_plan, requester, needed, full, by_allocator, returned, usages)
        after = device_plan.caps.get(requester)
        moved = (before, after) if before is not None and after is not None and after != before else None
        self._add_event(requester, uuid, returned, moved)
        return Room(returned, moved, max(missing, 0), live)

    def call_back(self, device: Device, requester: str, cap: int, act: bool = True) -> Room:
        """Lower elastic caps by unused and cached memory, so that the fixed cap of `requester` can rise to `cap` bytes.

        Returns the changes as a `Room`. Does not change the cap of `requester`. If `act` is False, only computes the
        missing bytes.
        """
        exhausted: set[str] = set()
        returned: dict[str, int] = {}
        missing, live = cap, dict[str, int]()
        for _ in range(2 * len(self._caps.allocators) + 2):
            device_plan = self._caps.device_plan(device.uuid)
            states = self._cap_states(device_plan, self._caps.usages(device), exhausted)
            states[requester] = states[requester]._replace(most=max(cap, states[requester].cap))
            change = lending.plan_raise(states, device_plan.limit - device_plan.reserve, requester, cap)
            missing, live = change.missing, dict(change.live)
            if missing or not act:
                break
            if not change.trims:
                if self._set_caps(device_plan, {name: size for name, size in change.caps.items() if name != requester}):
                    break
            elif not self._trim_partly(change.trims[0][0], device, change.trims[0][1], returned):
                exhausted.add(change.trims[0][0])
        self._add_event(requester, device.uuid, returned, None)
        return Room(returned, None, missing, live)

    def headroom(self, sample: DeviceSample) -> tuple[DevicePlan, dict[str, int]]:
        """The GPU's plan, and the caps to change from this plan at a monitor tick to restore headroom. Returns no caps
        if any cap has changed since the sample. Takes no lock and reads no framework.
        """
        device_plan, rows = self._caps.device_plan(sample.uuid), dict[str, Usage]()
        for name, (held, in_use, reclaimable, cap) in sample.frameworks.items():
            if cap is not None and name not in device_plan.joined and cap != device_plan.caps[name]:
                return device_plan, {}
            rows[name] = Usage(held, in_use, reclaimable)
        usages = shared_pool.usages_by_allocator(device_plan, rows)
        return device_plan, lending.rebalance(
            self._cap_states(device_plan, usages), device_plan.limit - device_plan.reserve
        )

    def call_back_unused(self, device: Device) -> None:
        """Lower elastic caps by their unused headroom if a framework holds more than its cap and so leaves negative
        free room."""
        device_plan = self._caps.device_plan(device.uuid)
        if device_plan.elastic:
            states = self._cap_states(device_plan, self._caps.usages(device))
            self._set_caps(device_plan, lending.plan_call_back(states, device_plan.limit - device_plan.reserve))

    def rebalance(self, before: DevicePlan, caps: Mapping[str, int]) -> None:
        """Set `caps`, unless the plan has changed since `before`."""
        uuid = before.device.uuid
        if self._caps.device_plan(uuid) is before and self._set_caps(before, caps):
            for name, cap in caps.items():
                if cap > before.caps[name]:
                    self._add_event(name, uuid, {}, (before.caps[name], cap))

    def _raise_cap(
        self,
        device: Device,
        requester: str,
        needed: int,
        by_allocator: bool,
        returned: dict[str, int],
        usages: dict[str, Usage | None],
    ) -> tuple[int, Mapping[str, int]]:
        """Raise the cap for `needed` bytes. Returns the fields `missing` and `live` of `lending.CapChange`.

        `usages` has the usage of each allocator. After a trim, `usages` is updated for the requesting and for the
        trimmed allocator.
        """
        exhausted: set[str] = set()
        for _ in range(2 * len(self._caps.allocators) + 2):
            device_plan = self._caps.device_plan(device.uuid)
            allocator = shared_pool.allocator_of(device_plan, requester)
            own = usages.get(allocator) or Usage(0, 0)
            if own.held is None:  # TensorFlow with memory growth, whose cap is fixed
                return 0, {}
            states = self._cap_states(device_plan, usages, exhausted)
            wanted = own.held + needed - (0 if by_allocator else self._reusable(allocator, own))
            change = lending.plan_raise(states, device_plan.limit - device_plan.reserve, allocator, wanted)
            if change.missing:
                return change.missing, change.live
            if not change.trims:
                # Set a cap again even if it is large enough, because Ctrl-C may have interrupted its last change.
                caps = change.caps or (
                    {requester: device_plan.caps[requester]}
                    if by_allocator and requester in device_plan.elastic
                    else {}
                )
                if self._set_caps(device_plan, caps):
                    return 0, {}
                usages.update(self._caps.usages(device))  # plan again, as a framework now holds more than its new cap
                continue
            name, size = change.trims[0]
            if not self._trim_partly(name, device, size, returned):
                exhausted.add(name)
            self._read_again(usages, device, name, allocator)
        return needed, {}

    def _trim_siblings(
        self,
        device_plan: DevicePlan,
        requester: str,
        needed: int,
        full: bool,
        by_allocator: bool,
        returned: dict[str, int],
        usages: dict[str, Usage | None],
    ) -> int:
        """Trim siblings until the GPU has enough free memory. Returns the bytes still missing. Updates `usages` as
        `_raise_cap` does."""
        exhausted: set[str] = set()
        device, allocator = device_plan.device, shared_pool.allocator_of(device_plan, requester)
        while True:
            own = usages.get(allocator) or Usage(0, 0)
            free = self._caps.host.memory(device).free + (0 if by_allocator else self._reusable(allocator, own))
            short, to_free = needed - free, _bytes_to_free(requester, device_plan, own, needed) - free
            if full and not returned:
                to_free = max(to_free, GRANULE)  # trim at least once, because the driver refused
            if to_free <= 0:
                return 0
            found = [one for one in lending.reclaimable_caches(usages, allocator) if one.name not in exhausted]
            donor = lending.pick_donor(found, max(short, 1))
            if donor is None:
                return max(short, GRANULE if full and not returned else 0)
            # Free one granule more, because the driver needs memory for the page tables of the allocation.
            if not self._trim_partly(donor.name, device, to_free + GRANULE, returned):
                exhausted.add(donor.name)
            self._read_again(usages, device, donor.name, allocator)

    def _reusable(self, name: str, usage: Usage) -> int:
        allocator = self._caps.allocators.get(name)
        return 0 if allocator is None else allocator.reusable(usage)

    def _read_again(self, usages: dict[str, Usage | None], device: Device, *names: str) -> None:
        for name in names:
            if (allocator := self._caps.allocators.get(name)) is not None:
                usages[name] = allocator.usage(device)

    def _trim_partly(self, name: str, device: Device, size: int, returned: dict[str, int]) -> int:
        """Trim one sibling by `size` bytes. Returns the measured decrease of this process's memory."""
        before = self.available(device)
        try:
            with contexts.capture_safe():
                self._caps.allocators[name].trim_partly(device, size)
        except Exception as error:  # an error of this trim must not replace the requester's error
            _log.debug("%s: nothing was given back: %s", name, str(error))
        got = max(self.available(device) - before, 0)
        if got:
            returned[name] = returned.get(name, 0) + got
            self.returned[name, device.uuid] += got
        return got

    def available(self, device: Device) -> int:
        """The GPU's total memory less this process's memory, a difference that other processes' allocations do not
        change. If NVML does not list this process, the GPU's free memory."""
        host = self._caps.host
        own = host.processes(device).get(host.pid)
        return host.memory(device).free if own is None else device.total - own

    def _cap_states(
        self, plan: DevicePlan, usages: Mapping[str, Usage | None], exhausted: set[str] | frozenset[str] = frozenset()
    ) -> dict[str, lending.CapState]:
        """The `lending.CapState` of each allocator. `exhausted`: allocators whose last trim returned no memory."""
        states, nothing_reserved = dict[str, lending.CapState](), self._workloads.idle
        caches = {one.name: one for one in lending.reclaimable_caches(usages, "") if one.name not in exhausted}
        for name, cap in shared_pool.caps_of(plan).items():
            allocator, usage = self._caps.allocators[name], usages.get(name)
            least, most = plan.elastic.get(name, (cap, cap))
            if least != most and (name in self._fixed or not self._caps.entries[name].movable):
                least = most = cap
            held, reserved = policy.known_held(usage), 0
            if usage is not None and usage.held is None:
                held = max(held, cap)
            elif not nothing_reserved:
                reserved = self._workloads.reserved_not_taken(name, plan.device.uuid, policy.in_use(usage))
            cache = caches.get(name)
            idle, sure = (0, True) if cache is None else (cache.most, cache.sure)
            states[name] = lending.CapState(
                least, most, cap, held + reserved, idle, allocator.requests_room, reserved, sure
            )
        return states

    def _set_caps(self, device_plan: DevicePlan, caps: Mapping[str, int]) -> bool:
        """Set `caps` on the GPU of `device_plan`; `caps` has lowered caps first.

        Returns False if a cap could not be set, or if a framework now holds more than its new cap.
        """
        device, uuid, done = device_plan.device, device_plan.device.uuid, True
        for name, cap in caps.items():
            now = device_plan.caps[name]
            if cap > now and not done:
                return False
            try:
                self._caps.set_cap(name, uuid, cap)
            except Exception as error:  # an error here must not fail the request
                why = error.reason if isinstance(error, CapNotApplied) else words_of(error)
                _log.warning("%s: its cap stays at %s: %s", name, format_size(now), why)
                self._fixed.add(name)
                done = False
                continue
            usage = self._caps.allocators[name].usage(device) if cap < now else None
            held = (usage.held or 0) if usage is not None else 0
            if cap < now and held + self._workloads.reserved_not_taken(name, uuid, policy.in_use(usage)) > cap:
                self._caps.set_cap(name, uuid, now)  # the framework allocated more meanwhile
                done = False
        return done

    def _add_event(self, requester: str, uuid: str, returned: Mapping[str, int], moved: tuple[int, int] | None) -> None:
        if moved is not None and moved[1] > moved[0]:
            self.lends[requester, uuid] += 1
        done = []
        if returned:
            done.append(", ".join([f"{name} gave back {format_size(size)}" for name, size in returned.items()]))
        if moved is not None:
            done.append(f"its cap moved from {format_size(moved[0])} to {format_size(moved[1])}")
        if done:
            text = f"room for {requester}: {'; '.join(done)}"
            self.events.append(
                Event(
                    time.time(), "reclaim", text, uuid=uuid, framework=requester, bytes=sum(returned.values()) or None
                )
            )


def _bytes_to_free(requester: str, device_plan: DevicePlan, own: Usage, needed: int) -> int:
    """The bytes of GPU memory that must be free so that the driver refuses no allocation for the request.

    A pool that never shrinks (the BFC allocator of TensorFlow and XLA) takes regions as large as the pool itself, up to
    the rest of its cap. The pool tries smaller regions only after a first failure.
    """
    cap = device_plan.caps.get(requester)
    if requester not in NEVER_GIVE_BACK or cap is None:
        return needed
    # TensorFlow with memory growth does not report `held`. `in_use` may be below the peak, because TensorFlow returns
    # regions before it refuses a request.
    held = own.held if own.held is not None else own.in_use or 0
    return max(needed, cap - held)

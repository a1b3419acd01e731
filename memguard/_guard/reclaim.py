"""Reclaim: makes room for one request by raising an elastic cap and trimming idle caches of siblings.

`lending` decides. Reclaim may run within the failing allocation, on the user's thread, which holds no lock of the
requesting adapter. The bytes returned are measured by NVML's figure of this process before and after a trim, because
`torch.cuda.empty_cache()` silently does nothing in a capture or while a `MemPool` is in use.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping
from typing import Protocol

from memguard._base.logs import log as _log
from memguard._base.logs import words_of
from memguard._base.specs import NEVER_GIVE_BACK
from memguard._base.types import Device, DevicePlan, DeviceSample, Event, Room, Usage
from memguard._base.units import GRANULE, format_size
from memguard._budget import policy, shared_pool
from memguard._devices import contexts
from memguard._guard import lending
from memguard._guard.caps import CapTable
from memguard.errors import CapNotApplied

_KEPT = 64
"""Events kept until the session records them."""


class Reserved(Protocol):
    """The reservations of running workloads. `_guard.admission` implements it and is imported at the first request."""

    def not_taken(self, framework: str, uuid: str, in_use: int | None) -> int:
        """Bytes that the framework's workloads have reserved and not yet allocated, computed from `in_use`."""

    def wake(self) -> None:
        """Make all waiting workloads try again."""


class Reclaimer:
    """Carries out what `lending` decides. Callers hold the guard's lock, except for `headroom`."""

    def __init__(self, caps: CapTable, reserved: Reserved) -> None:
        self._caps, self._reserved = caps, reserved
        self._fixed: set[str] = set()
        """Elastic frameworks whose caps could not be changed."""
        self.events: deque[Event] = deque(maxlen=_KEPT)
        """Events of moved caps and returned memory. They are queued, because no callback may run in an allocation."""
        self.returned: Counter[tuple[str, str]] = Counter()
        """Bytes returned for siblings, by framework and GPU (UUID)."""
        self.lends: Counter[tuple[str, str]] = Counter()
        """Number of raises of an elastic cap, by framework and GPU (UUID)."""

    def make_room(self, device: Device, who: str, needed: int, *, full: bool = False, asked: bool = False) -> Room:
        """Make room for `who` to take `needed` more bytes from the driver.

        `asked`: its allocator could not serve a request, and has already returned its own cache. `full`: the driver
        refused the request, not the cap.
        """
        uuid = device.uuid
        returned: dict[str, int] = {}
        before = self._caps.part(uuid).caps.get(who)
        usages = self._caps.usages(device)
        missing, live = (0, {}) if full else self._raise_cap(device, who, needed, asked, returned, usages)
        if not missing:
            missing = self._empty(device, who, needed, full, asked, returned, usages)
        after = self._caps.part(uuid).caps.get(who)
        moved = (before, after) if before is not None and after is not None and after != before else None
        self._note(who, uuid, returned, moved)
        return Room(returned, moved, max(missing, 0), live)

    def call_back(self, device: Device, who: str, cap: int, act: bool = True) -> Room:
        """Lower lent caps by unused and cached memory, so that the fixed cap of `who` can rise to `cap` bytes.

        Does not change the cap of `who`. Not `act`: only compute the missing bytes.
        """
        spent: set[str] = set()
        returned: dict[str, int] = {}
        missing, live = cap, dict[str, int]()
        for _ in range(2 * len(self._caps.allocators) + 2):
            part = self._caps.part(device.uuid)
            parts = self._parts(part, self._caps.usages(device), spent)
            parts[who] = parts[who]._replace(most=max(cap, parts[who].cap))
            change = lending.plan_raise(parts, part.limit - part.reserve, who, cap)
            missing, live = change.missing, dict(change.live)
            if missing or not act:
                break
            if not change.calls:
                if self._set(device, {name: size for name, size in change.caps.items() if name != who}):
                    break
            elif not self._give_back(change.calls[0][0], device, change.calls[0][1], returned):
                spent.add(change.calls[0][0])
        self._note(who, device.uuid, returned, None)
        return Room(returned, None, missing, live)

    def headroom(self, sample: DeviceSample) -> tuple[DevicePlan, dict[str, int]]:
        """Compute the caps that should move at a tick to give headroom, and the plan that they are based on.

        No caps if any has moved since the sample. Takes no lock and reads no framework.
        """
        part, read = self._caps.part(sample.uuid), sample.frameworks
        caps = shared_pool.caps_of(part)
        if any(one.cap not in (None, caps[name]) for name, one in read.items() if name in caps):
            return part, {}
        rows = {name: Usage(one.held, one.in_use, one.reclaimable) for name, one in read.items()}
        usages = shared_pool.usages_by_allocator(part, rows)
        return part, lending.rebalance(self._parts(part, usages), part.limit - part.reserve)

    def call_back_unused(self, device: Device) -> None:
        """Lower lent caps by unused memory while a framework that holds more than its cap makes the total exceed the
        room."""
        part = self._caps.part(device.uuid)
        if part.elastic:
            parts = self._parts(part, self._caps.usages(device))
            self._set(device, lending.called_back(parts, part.limit - part.reserve))

    def rebalance(self, before: DevicePlan, caps: Mapping[str, int]) -> None:
        """Set these caps, unless the plan has changed since `before`."""
        device = before.device
        if self._caps.part(device.uuid) is before and self._set(device, caps):
            for name, cap in caps.items():
                if cap > before.caps[name]:
                    self._note(name, device.uuid, {}, (before.caps[name], cap))

    def _raise_cap(
        self,
        device: Device,
        who: str,
        needed: int,
        asked: bool,
        returned: dict[str, int],
        usages: dict[str, Usage | None],
    ) -> tuple[int, Mapping[str, int]]:
        """Raise the cap for `needed` bytes. Returns `missing` and `live` as in `lending.CapChange`.

        `usages` are by allocator. A trim updates the figures of the two allocators that it concerns.
        """
        spent: set[str] = set()
        for _ in range(2 * len(self._caps.allocators) + 2):
            part = self._caps.part(device.uuid)
            allocator = shared_pool.allocator_of(part, who)
            own = usages.get(allocator) or Usage(0, 0)
            if own.held is None:  # TensorFlow with growth, whose cap is fixed
                return 0, {}
            parts = self._parts(part, usages, spent)
            wanted = own.held + needed - (0 if asked else self._reusable(allocator, own))
            change = lending.plan_raise(parts, part.limit - part.reserve, allocator, wanted)
            if change.missing:
                return change.missing, change.live
            if not change.calls:
                # Set a cap that is large enough again: a Ctrl-C may have interrupted the last change.
                caps = change.caps or ({who: part.caps[who]} if asked and who in part.elastic else {})
                if self._set(device, caps):
                    return 0, {}
                usages.update(self._caps.usages(device))  # a framework has outgrown the cap that it was to have
                continue
            name, size = change.calls[0]
            if not self._give_back(name, device, size, returned):
                spent.add(name)
            self._read_again(usages, device, name, allocator)
        return needed, {}

    def _empty(
        self,
        device: Device,
        who: str,
        needed: int,
        full: bool,
        asked: bool,
        returned: dict[str, int],
        usages: dict[str, Usage | None],
    ) -> int:
        """Trim siblings until the GPU has enough free memory. Returns the bytes still missing. `usages` as above."""
        spent: set[str] = set()
        allocator = shared_pool.allocator_of(self._caps.part(device.uuid), who)
        while True:
            own = usages.get(allocator) or Usage(0, 0)
            free = self._caps.host.memory(device).free + (0 if asked else self._reusable(allocator, own))
            short, wished = needed - free, self._wish(who, device.uuid, own, needed) - free
            if full and not returned:
                wished = max(wished, GRANULE)  # the driver refused, even if enough is free by now
            if wished <= 0:
                return 0
            found = [one for one in lending.reclaimable_caches(usages, allocator) if one.name not in spent]
            donor = lending.pick_donor(found, max(short, 1))
            if donor is None:
                return max(short, GRANULE if full and not returned else 0)
            # One granule more: the driver needs memory for the page tables of the allocation.
            if not self._give_back(donor.name, device, wished + GRANULE, returned):
                spent.add(donor.name)
            self._read_again(usages, device, donor.name, allocator)

    def _reusable(self, name: str, usage: Usage) -> int:
        allocator = self._caps.allocators.get(name)
        return 0 if allocator is None else allocator.reusable(usage)

    def _read_again(self, usages: dict[str, Usage | None], device: Device, *names: str) -> None:
        for name in names:
            if (allocator := self._caps.allocators.get(name)) is not None:
                usages[name] = allocator.usage(device)

    def _wish(self, who: str, uuid: str, own: Usage, needed: int) -> int:
        """The bytes that must be free so that the driver refuses no part of the request.

        A pool that never shrinks grows in regions of its own size, up to the rest of its cap. It tries smaller regions
        only after its first failure (BFC allocator of TensorFlow and XLA).
        """
        cap = self._caps.part(uuid).caps.get(who)
        if who not in NEVER_GIVE_BACK or cap is None:
            return needed
        # `held` is unknown with growth. It may be below the peak: TensorFlow returns regions before it refuses.
        held = own.held if own.held is not None else own.in_use or 0
        return max(needed, cap - held)

    def _give_back(self, name: str, device: Device, size: int, returned: dict[str, int]) -> int:
        """Trim one sibling by `size` bytes. Returns the measured decrease of this process's memory."""
        before = self.available(device)
        try:
            with contexts.capture_safe():
                self._caps.allocators[name].give_back(device, size)
        except Exception as error:  # a sibling's error must not replace the requester's
            _log.debug("%s: nothing was given back: %s", name, str(error))
        got = max(self.available(device) - before, 0)
        if got:
            returned[name] = returned.get(name, 0) + got
            self.returned[name, device.uuid] += got
        return got

    def available(self, device: Device) -> int:
        """The GPU's total less this process's memory, a figure that other processes do not change. The GPU's
        free memory if NVML does not list this process."""
        host = self._caps.host
        own = host.processes(device).get(host.pid)
        return host.memory(device).free if own is None else device.total - own

    def _parts(
        self, plan: DevicePlan, usages: Mapping[str, Usage | None], spent: set[str] | frozenset[str] = frozenset()
    ) -> dict[str, lending.Part]:
        """The figures for `lending`, by allocator as `usages`. `spent`: allocators whose trim returned nothing."""
        parts: dict[str, lending.Part] = {}
        offers = {one.name: one.most for one in lending.reclaimable_caches(usages, "")}
        for name, cap in shared_pool.caps_of(plan).items():
            allocator, usage = self._caps.allocators[name], usages.get(name)
            least, most = plan.elastic.get(name, (cap, cap))
            if least != most and (name in self._fixed or allocator.fixed() or not self._caps.movable(name)):
                least = most = cap
            held, promised = policy.known_held(usage), 0
            if usage is not None and usage.held is None:
                held = max(held, cap)
            else:
                promised = self._reserved.not_taken(name, plan.device.uuid, policy.in_use(usage))
            idle = 0 if name in spent else offers.get(name, 0)
            parts[name] = lending.Part(least, most, cap, held + promised, idle, allocator.asks, promised)
        return parts

    def _set(self, device: Device, caps: Mapping[str, int]) -> bool:
        """Set these caps, lowered ones first. False if one could not be set, or if its framework has outgrown it."""
        uuid, done = device.uuid, True
        for name, cap in caps.items():
            now = self._caps.part(uuid).caps[name]
            if cap > now and not done:
                return False
            try:
                self._caps.set_cap(name, uuid, cap)
            except Exception as error:  # any error: a cap that cannot move must not fail the request
                why = error.reason if isinstance(error, CapNotApplied) else words_of(error)
                _log.warning("%s: its cap stays at %s: %s", name, format_size(now), why)
                self._fixed.add(name)
                done = False
                continue
            usage = self._caps.allocators[name].usage(device) if cap < now else None
            held = (usage.held or 0) if usage is not None else 0
            if cap < now and held + self._reserved.not_taken(name, uuid, policy.in_use(usage)) > cap:
                self._caps.set_cap(name, uuid, now)  # it has allocated or reserved memory meanwhile
                done = False
        return done

    def _note(self, who: str, uuid: str, returned: Mapping[str, int], moved: tuple[int, int] | None) -> None:
        if moved is not None and moved[1] > moved[0]:
            self.lends[who, uuid] += 1
        gave = ", ".join(f"{name} gave back {format_size(size)}" for name, size in returned.items())
        cap = "" if moved is None else f"its cap moved from {format_size(moved[0])} to {format_size(moved[1])}"
        if gave or cap:
            text = f"room for {who}: {'; '.join(part for part in (gave, cap) if part)}"
            self.events.append(
                Event(time.time(), "reclaim", text, uuid=uuid, framework=who, bytes=sum(returned.values()) or None)
            )

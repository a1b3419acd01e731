"""Makes room for one request: raises an elastic cap, and has siblings give back what idles.

`lending` decides. It may run within the allocation that fails, on the user's thread, with no lock of the
adapter that asks. What came back is what NVML says of this process before and after, never what was called:
`torch.cuda.empty_cache()` does nothing, silently, in a capture or while a `MemPool` is in use.
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
from memguard._budget import policy
from memguard._budget.joint import POOL
from memguard._devices import contexts
from memguard._guard import lending
from memguard._guard.caps import CapTable
from memguard.errors import CapNotApplied

_KEPT = 64
"""Events that wait for somebody who writes them down."""


class Reserved(Protocol):
    """What running workloads have reserved: `_guard.admission`, whose modules are loaded at the first request."""

    def not_taken(self, framework: str, uuid: str, in_use: int | None) -> int:
        """Bytes that they have reserved and not taken yet, by what the framework has in use there."""

    def wake(self) -> None:
        """Have all that wait for room look again."""


class Sibling(Protocol):
    """Who can be asked for idle memory: a framework, or the pool that several share."""

    def usage(self, device: Device) -> Usage | None: ...
    def give_back(self, device: Device, needed: int) -> None: ...
    def trim(self, device: Device) -> None: ...


class Reclaimer:
    """Carries out what `lending` decides. Callers hold the guard's lock, but for `headroom`.

    `shared` is the cache of the shared pool, under `strategy: pool`.
    """

    def __init__(self, caps: CapTable, reserved: Reserved, shared: Sibling | None = None) -> None:
        self._caps, self._reserved, self.shared = caps, reserved, shared
        self._fixed: set[str] = set()
        """Elastic by the budget, but their caps turned out not to change."""
        self.events: deque[Event] = deque(maxlen=_KEPT)
        """What was moved and given back. It is noted within allocations, where nobody may be called."""
        self.returned: Counter[tuple[str, str]] = Counter()
        """Bytes that each framework gave back for others on each GPU (UUID)."""
        self.lends: Counter[tuple[str, str]] = Counter()
        """How often the elastic cap of each framework was raised on each GPU (UUID)."""

    def make_room(
        self,
        device: Device,
        who: str,
        needed: int,
        *,
        full: bool = False,
        asked: bool = False,
        capped: bool = True,
    ) -> Room:
        """Room for `who` to take `needed` bytes more from the driver.

        `asked`: its allocator could not serve a request, so it has given back its own cache. `full`: because the driver
        refused, and not its cap. Not `capped`: its cap is no matter, as it shares it with others.
        """
        uuid = device.uuid
        returned: dict[str, int] = {}
        before = self._caps.part(uuid).caps.get(who)
        missing, live = (0, {}) if full or not capped else self._raise_cap(device, who, needed, asked, returned)
        if not missing:
            missing = self._empty(device, who, needed, full, asked, returned)
        after = self._caps.part(uuid).caps.get(who)
        moved = (before, after) if before is not None and after is not None and after != before else None
        self._note(who, uuid, returned, moved)
        return Room(returned, moved, max(missing, 0), live)

    def call_back(self, device: Device, who: str, cap: int, act: bool = True) -> Room:
        """Lower what was lent, so that the fixed cap of `who` may rise to `cap` bytes: what is unused, and what is only
        cached. Its own cap is left as it is. Not `act`: only say what would be missing."""
        spent: set[str] = set()
        returned: dict[str, int] = {}
        missing, live = cap, dict[str, int]()
        for _ in range(2 * len(self._caps.frameworks) + 2):
            part = self._caps.part(device.uuid)
            parts = self._parts(part, self._usages(device), spent)
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
        """At a tick: the caps that should move so that elastic frameworks which cannot ask have headroom, and the plan
        by which they should. None if caps have moved since it was read. It needs no lock, and asks no framework."""
        part, read = self._caps.part(sample.uuid), sample.frameworks
        if any(one.cap != part.caps[name] for name, one in read.items() if name in part.caps):
            return part, {}
        usages = {name: Usage(one.held, one.in_use, one.reclaimable) for name, one in read.items()}
        return part, lending.rebalance(self._parts(part, usages), part.limit - part.reserve)

    def call_back_unused(self, device: Device) -> None:
        """Lower what is lent and not used, as far as all have more than the room: one holds more than its cap."""
        part = self._caps.part(device.uuid)
        if part.elastic:
            parts = self._parts(part, self._usages(device))
            self._set(device, lending.called_back(parts, part.limit - part.reserve))

    def rebalance(self, before: DevicePlan, caps: Mapping[str, int]) -> None:
        """Move these caps, unless others have moved since."""
        device = before.device
        if self._caps.part(device.uuid) is before and self._set(device, caps):
            for name, cap in caps.items():
                if cap > before.caps[name]:
                    self._note(name, device.uuid, {}, (before.caps[name], cap))

    def _raise_cap(
        self, device: Device, who: str, needed: int, asked: bool, returned: dict[str, int]
    ) -> tuple[int, Mapping[str, int]]:
        """What is missing under its cap, and what siblings hold that it may borrow when it is free."""
        spent: set[str] = set()
        for _ in range(2 * len(self._caps.frameworks) + 2):
            usages = self._usages(device)
            own = usages.get(who) or Usage(0, 0)
            if own.held is None:  # TensorFlow with growth, whose cap is fixed
                return 0, {}
            part = self._caps.part(device.uuid)
            parts = self._parts(part, usages, spent)
            wanted = own.held + needed - (0 if asked else own.reclaimable or 0)
            capped = part.joined[0] if who in part.joined else who
            change = lending.plan_raise(parts, part.limit - part.reserve, capped, wanted)
            if change.missing:
                return change.missing, change.live
            if not change.calls:
                # A cap that is large enough is set again: a Ctrl-C may have come before it was.
                caps = change.caps or ({who: part.caps[who]} if asked and who in part.elastic else {})
                if self._set(device, caps):
                    return 0, {}
                continue
            name, size = change.calls[0]
            if not self._give_back(name, device, size, returned):
                spent.add(name)
        return needed, {}

    def _empty(self, device: Device, who: str, needed: int, full: bool, asked: bool, returned: dict[str, int]) -> int:
        """What is missing on the GPU after siblings gave back what they could, as far as it was needed."""
        spent: set[str] = set()
        while True:
            usages = {**self._usages(device), **self.beside(device, who)}
            own = usages.get(who) or Usage(0, 0)
            free = self._caps.host.memory(device).free + (0 if asked else own.reclaimable or 0)
            short, wished = needed - free, self._wish(who, device.uuid, own, needed) - free
            if full and not returned:
                wished = max(wished, GRANULE)  # it refused, whatever is free by now
            if wished <= 0:
                return 0
            found = [one for one in lending.reclaimable_caches(usages, who) if one.name not in spent]
            donor = lending.pick_donor(found, max(short, 1))
            if donor is None:
                return max(short, GRANULE if full and not returned else 0)
            # Somewhat more: the driver keeps some for itself, for the tables of what it gives.
            if not self._give_back(donor.name, device, wished + GRANULE, returned):
                spent.add(donor.name)

    def _wish(self, who: str, uuid: str, own: Usage, needed: int) -> int:
        """What has to be free so that the driver refuses nothing of the request.

        A pool that never shrinks grows by regions of its own choice, up to all that its cap leaves. Only its first
        failure ever makes it try smaller ones (TensorFlow's and XLA's BFC allocator).
        """
        cap = self._caps.part(uuid).caps.get(who)
        if who not in NEVER_GIVE_BACK or cap is None:
            return needed
        # Unknown with growth: less than its peak if it gave back regions, as TensorFlow does before it refuses.
        held = own.held if own.held is not None else own.in_use or 0
        return max(needed, cap - held)

    def _give_back(self, name: str, device: Device, size: int, returned: dict[str, int]) -> int:
        """Have one sibling give back so much, and tell what this process really holds less by it."""
        before = self.available(device)
        try:
            with contexts.beside_captures():
                self.sibling(name).give_back(device, size)
        except Exception as error:  # what others do wrong must not fail this request in another way
            _log.debug("%s: nothing was given back: %s", name, str(error))
        got = max(self.available(device) - before, 0)
        if got:
            returned[name] = returned.get(name, 0) + got
            self.returned[name, device.uuid] += got
        return got

    def available(self, device: Device) -> int:
        """What is free to this process, whatever others do meanwhile; what is free on the card if NVML omits it."""
        host = self._caps.host
        own = host.processes(device).get(host.pid)
        return host.memory(device).free if own is None else device.total - own

    def sibling(self, name: str) -> Sibling:
        """Who is called so in `_usages` and `beside`."""
        return self.shared if name == POOL and self.shared is not None else self._caps.frameworks[name]

    def beside(self, device: Device, who: str) -> dict[str, Usage | None]:
        """What the shared pool caches, if `who` is not in it: else it is the cache of `who` itself."""
        if self.shared is None or who in self._caps.part(device.uuid).joined:
            return {}
        return {POOL: self.shared.usage(device)}

    def _usages(self, device: Device) -> dict[str, Usage | None]:
        return {name: framework.usage(device) for name, framework in self._caps.frameworks.items()}

    def _parts(
        self, plan: DevicePlan, usages: Mapping[str, Usage | None], spent: set[str] | frozenset[str] = frozenset()
    ) -> dict[str, lending.Part]:
        """The figures for `lending`, one for each cap: that of the shared pool by the first framework that draws from
        it. `spent`: their caches did not come back."""
        parts: dict[str, lending.Part] = {}
        frameworks = self._caps.frameworks
        offers = {one.name: one.most for one in lending.reclaimable_caches(usages, "")}
        for name, cap in plan.caps.items():
            if name in plan.joined:
                held = sum(policy.known_held(usages.get(one)) for one in plan.joined)
                parts.setdefault(plan.joined[0], lending.Part(cap, cap, cap, held, asks=frameworks[name].asks))
                continue
            framework, usage = frameworks[name], usages.get(name)
            least, most = plan.elastic.get(name, (cap, cap))
            if name in self._fixed or framework.fixed() or not self._caps.movable(name):
                least = most = cap
            held, promised = policy.known_held(usage), 0
            if usage is not None and usage.held is None:
                held = max(held, cap)
            else:
                promised = self._reserved.not_taken(name, plan.device.uuid, policy.in_use(usage))
            idle = 0 if name in spent else offers.get(name, 0)
            parts[name] = lending.Part(least, most, cap, held + promised, idle, framework.asks, promised)
        return parts

    def _set(self, device: Device, caps: Mapping[str, int]) -> bool:
        """Set these caps, the lowered ones first. False if one could not be set, or was passed meanwhile."""
        uuid, done = device.uuid, True
        for name, cap in caps.items():
            now = self._caps.part(uuid).caps[name]
            if cap > now and not done:
                return False
            try:
                self._caps.set_cap(name, uuid, cap)
            except Exception as error:  # of the framework too: a cap that does not move must not fail a request
                why = error.reason if isinstance(error, CapNotApplied) else words_of(error)
                _log.warning("%s: its cap stays at %s: %s", name, format_size(now), why)
                self._fixed.add(name)
                done = False
                continue
            usage = self._caps.frameworks[name].usage(device) if cap < now else None
            held = (usage.held or 0) if usage is not None else 0
            if cap < now and held + self._reserved.not_taken(name, uuid, policy.in_use(usage)) > cap:
                self._caps.set_cap(name, uuid, now)  # it has allocated meanwhile, or has it reserved
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

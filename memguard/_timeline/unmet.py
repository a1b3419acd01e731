"""The requests refused while a timeline was recorded: each once, with its need. Pure.

The unmet need of a request is the framework's unreclaimable memory at the refusal plus the requested bytes, whether or
not the program caught the error. Events of older versions lack the figures of the refusal: the last sample's replace
them. All sizes are bytes; None is unknown.
"""

from __future__ import annotations

from collections.abc import Callable

from memguard._base.specs import NEVER_GIVE_BACK, SPECS
from memguard._base.types import DevicePlan, DeviceSample, Event, FrameworkSample, Plan, Sample
from memguard._base.units import GRANULE, is_whole
from memguard._budget import FRAMEWORKS
from memguard._timeline.format import Oom
from memguard._timeline.refusals import Refusal, Reported, is_counted, moment_of, once, reported, times_of

REGIONS = frozenset(row.name for row in SPECS.values() if row.regions)
"""Frameworks whose pool grows by regions that it neither joins nor returns: a request must fit into one of them."""
MOST = 1000
"""The most refusals kept for each framework on each GPU, those with the largest needs."""
Key = tuple[str, str]
"""UUID and framework."""


class Unmet:
    """Collects the refusals in the records of one timeline, in order. `plan` is the timeline's own.

    `pinned` returns a framework's unreclaimable bytes in a sample. `elsewhere` counts the errors of requesters without
    a cap.
    """

    def __init__(self, plan: Plan, pinned: Callable[[str, FrameworkSample], int]) -> None:
        self._plan, self._pinned = plan, pinned
        self._known = {part.device.uuid for part in plan.devices}
        self._first = plan.devices[0].device.uuid if plan.devices else None
        self._pooled = pooled(plan)
        self._refused: dict[Key, list[Refusal]] = {}
        self._reported: dict[Key, list[Reported]] = {}
        self.last: Sample | None = None
        self.elsewhere: dict[str, int] = {}
        self.cut = False

    def found(self) -> dict[Key, tuple[Refusal, ...]]:
        """All refusals, by UUID and framework."""
        return {key: once(events, self._reported[key]) for key, events in self._refused.items()}

    def key(self, name: object, uuid: object) -> Key | None:
        """The key; None for an unknown framework, or for a GPU outside the plan."""
        if uuid is None:
            uuid = self._first
        if name not in FRAMEWORKS or not isinstance(name, str) or uuid not in self._known:
            return None
        return str(uuid), name

    def event(self, event: Event) -> None:
        """Add an event of kind `refused`."""
        key = self.key(event.framework, event.uuid)
        if key is None:
            return
        held, cap, free = self._before(key)
        cap = cap if event.cap is None else event.cap
        if (then := self._pinned_of(key, event.held, event.in_use, event.reclaimable, cap)) is not None:
            held = then
        free = free if event.free is None else event.free
        times = times_of(event.times)
        asked = event.bytes if is_whole(event.bytes) else None
        self._add(key, self._refusal(key, event.time, asked, held, cap, free, times))

    def oom(self, record: Oom) -> None:
        """Add an out-of-memory report."""
        report = record.report
        if report.get("memory", "gpu") != "gpu":
            return
        who = report.get("requester")
        key = self.key(who, report.get("uuid"))
        if key is None:
            if isinstance(who, str):
                name = who if len(who) <= 40 else who[:37] + "..."
                self.elsewhere[name] = self.elsewhere.get(name, 0) + 1
            return
        moment = moment_of(report)
        asked = _whole(moment.get("requested"))
        asked = _whole(report.get("requested")) if asked is None else asked
        held, cap, free = self._before(key)
        # Figures of the refusal take precedence over the last sample's.
        of_then = _whole(moment.get("cap")), _whole(moment.get("free"))
        cap, free = (now if then is None else then for then, now in zip(of_then, (cap, free), strict=True))
        pool, in_use, reclaimable = (_whole(moment.get(name)) for name in ("held", "in_use", "reclaimable"))
        then = self._pinned_of(key, pool, in_use, reclaimable, cap)
        held = held if then is None else then
        refusal = self._refusal(key, record.time, asked, held, cap, free, 0 if is_counted(report) else 1)
        self._add(key, reported(report, refusal, then is not None))

    def _refusal(
        self, key: Key, time: float, asked: int | None, held: int | None, cap: int | None, free: int | None, times: int
    ) -> Refusal:
        need = (held or 0) + (asked or 0)
        if key[0] in self._pooled:
            cap = None  # the joint cap refused it: the sum of all frameworks in the pool
        full = cap is not None and asked is not None and need <= cap and free is not None and free < asked
        return Refusal(time, asked, held, cap, times, full)

    def _add(self, key: Key, one: Refusal | Reported) -> None:
        refused, reported = self._refused.setdefault(key, []), self._reported.setdefault(key, [])
        if isinstance(one, Refusal):
            refused.append(one)
            if len(refused) > 2 * MOST:
                refused.sort(key=lambda refusal: refusal.need, reverse=True)
                del refused[MOST:]
                self.cut = True
            return
        reported.append(one)
        if len(reported) > 2 * MOST:
            reported.sort(key=lambda report: report.refusal.need, reverse=True)
            del reported[MOST:]
            self.cut = True

    def _pinned_of(
        self, key: Key, held: int | None, in_use: int | None, reclaimable: int | None, cap: int | None
    ) -> int | None:
        """The framework's unreclaimable bytes at the refusal; None if neither figure is known.

        A request refused by a pool of regions fits into none of them. A pool smaller than its cap had grown, and needs
        a new region in addition to its others. A pool as large as its cap may have been allocated at once.
        """
        grown = held is not None and cap is not None and held < cap - GRANULE
        if key[1] in REGIONS and key[0] not in self._pooled and grown:
            return held
        return _pinned_of(key[1], held, in_use, reclaimable)

    def _before(self, key: Key) -> tuple[int | None, int | None, int | None]:
        """By the last sample: the framework's unreclaimable bytes, its cap, and the GPU's free memory."""
        uuid, name = key
        devices: tuple[DeviceSample, ...] = () if self.last is None else self.last.devices
        device = next((one for one in devices if one.uuid == uuid), None)
        cap = next((part.caps.get(name) for part in self._plan.devices if part.device.uuid == uuid), None)
        if device is None:
            return None, cap, None
        usage = device.frameworks.get(name)
        return (None, cap, device.free) if usage is None else (self._pinned(name, usage), usage.cap, device.free)


def pooled(plan: Plan) -> set[str]:
    """The UUIDs of the GPUs on which frameworks share a joint cap."""
    return {part.device.uuid for part in plan.devices if _one_pool(part)}


def _one_pool(part: DevicePlan) -> bool:
    """Detect a joint cap, which counts once in the sum, as older timelines do not name its frameworks."""
    return bool(part.joined) or sum(part.caps.values()) + part.unallocated + part.reserve > part.limit


def _pinned_of(name: str, held: int | None, in_use: int | None, reclaimable: int | None) -> int | None:
    """The framework's unreclaimable bytes at the refusal; None if neither figure is known."""
    if held is None and in_use is None:
        return None
    pinned = in_use if in_use is not None else held
    if held is not None and reclaimable is not None and name not in NEVER_GIVE_BACK:
        pinned = max(held - reclaimable, pinned or 0)
    return pinned


def _whole(value: object) -> int | None:
    return value if is_whole(value) else None

"""Collect the requests refused while a timeline was recorded, each once, with its need. Pure.

The unmet need of a request is the framework's unreclaimable memory at the refusal plus the requested bytes, whether or
not the program caught the error. Events of older versions lack the figures of the refusal: the last sample's replace
them. A request is recorded as an event, as an out-of-memory report, or as both. A report names the event that counts
its request. Reports of memguard 0.1.0, and reports whose record was lost, do not: `counting_event` matches these
by time and size. All sizes are bytes; None is unknown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from operator import attrgetter
from typing import Any

from memguard._base.types import DeviceSample, Event, FrameworkSample, Plan, Sample
from memguard._base.units import GRANULE, is_whole
from memguard._budget import FRAMEWORKS
from memguard._frameworks.specs import NEVER_GIVE_BACK, SPECS
from memguard._timeline.format import Oom

_MOMENT, _REPORT = 0.01, 1.0
"""The most seconds between a request's event and its recorded moment, and between its event and its report."""
REGIONS = frozenset(row.name for row in SPECS.values() if row.regions)
"""Frameworks whose pool grows by regions that it neither joins nor returns: a request must fit into one of them."""
MOST = 1000
"""The most refusals kept for each framework on each GPU: the refusals with the largest needs."""
Key = tuple[str, str]
"""UUID and framework."""


@dataclass(frozen=True)
class Refusal:
    """A refused request. `time` is as of `time.time()`, `held` the framework's unreclaimable bytes at the refusal.

    `times` counts the requests; 0 if an event has counted it already. `full`: the GPU was full, not the cap.
    """

    time: float
    asked: int | None  # the name is part of `--json`
    held: int | None
    cap: int | None
    times: int
    full: bool

    @property
    def need(self) -> int:
        """The least memory under which the request would have succeeded. If the cap refused it, this is more than that
        cap."""
        need = (self.held or 0) + (self.asked or 0)
        return need if self.full or self.cap is None else max(need, self.cap + GRANULE)


@dataclass(frozen=True)
class Reported:
    """The refusal of an out-of-memory report. `moment` is its time, None if only the report's time is known.

    `exact`: `held` is from that moment, and not from the last sample. `event` is the unique time of the event that
    counts the request; None if the report names no event.
    """

    refusal: Refusal
    moment: float | None
    exact: bool
    event: float | None = None


def moment_of(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """The report's figures from the moment of the refusal; empty if the report has none."""
    moment = report.get("moment")
    return moment if isinstance(moment, Mapping) else {}


def is_counted(report: Mapping[str, Any]) -> bool:
    """True if the allocator reported the request when it refused it: then an event of the timeline counts the request
    too."""
    return moment_of(report).get("source") in ("refusal", "observer")


def reported(report: Mapping[str, Any], refusal: Refusal, exact: bool = False) -> Reported:
    """The report's `refusal`, with the keys that find its event."""
    moment = moment_of(report)
    if not is_counted(report):
        return Reported(refusal, None, exact)
    time = moment.get("event")
    return Reported(refusal, _time(moment.get("time")), exact, time if type(time) in (int, float) else None)


def times_of(times: int | None) -> int:
    """The number of requests that an event of kind `refused` counts."""
    return times if is_whole(times) and times else 1


def _time(value: object) -> float | None:
    """A time in a report, as of `time.time()`; None if invalid."""
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def once(events: Sequence[Refusal], reports: Sequence[Reported]) -> tuple[Refusal, ...]:
    """All refusals, each request once. An event of n requests matches n reports."""
    found = sorted(events, key=lambda event: event.time)
    left = [event.times for event in found]
    alone = []
    for report in sorted(reports, key=lambda report: (report.event is None, report.refusal.time)):
        at = counting_event(found, left, report)
        if at is None:
            alone.append(report.refusal)
            continue
        left[at] -= 1
        found[at] = _merged(found[at], report)
    return (*found, *alone)


def counting_event(events: Sequence[Refusal], left: Sequence[int], report: Reported) -> int | None:
    """The index of the event that counts the report's request; None if no event does.

    `events` are one framework's on one GPU, by time; `left` is the number of reports that each may still match. An
    event of several requests has the time of the last.
    """
    if report.event is not None:
        at = bisect_left(events, report.event, key=attrgetter("time"))
        return at if at < len(events) and events[at].time == report.event and left[at] else None
    when, by = (report.refusal.time, _REPORT) if report.moment is None else (report.moment, _MOMENT)
    requested, counted = report.refusal.asked, not report.refusal.times
    first = bisect_left(events, when - by, key=attrgetter("time"))
    for at in range(first, len(events)):
        event = events[at]
        if event.time > when + by and not (at == first and event.times > 1 and counted):
            return None
        if left[at] and (requested is None or event.asked is None or requested == event.asked):
            return at
    return None


def _merged(event: Refusal, report: Reported) -> Refusal:
    """The report's figures of the moment if it has them, else the figures with the larger need; with the event's count.

    The figures of an event of several requests are another request's, unless only time and size matched them.
    """
    best = report.refusal
    another = report.event is not None and event.times > 1
    if (another or not report.exact) and event.need > best.need:
        best = event
    requested = event.asked if best.asked is None else best.asked
    return replace(best, time=event.time, asked=requested, times=event.times)


class RefusalCollector:
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
        """The key of the refusal; None for an unknown framework, or for a GPU outside the plan."""
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
        requested = event.bytes if is_whole(event.bytes) else None
        self._add(key, self._refusal(key, event.time, requested, held, cap, free, times))

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
        requested = _whole(moment.get("requested"))
        requested = _whole(report.get("requested")) if requested is None else requested
        held, cap, free = self._before(key)
        # Figures of the refusal take precedence over the last sample's.
        of_then = _whole(moment.get("cap")), _whole(moment.get("free"))
        cap, free = (now if then is None else then for then, now in zip(of_then, (cap, free), strict=True))
        pool, in_use, reclaimable = (_whole(moment.get(name)) for name in ("held", "in_use", "reclaimable"))
        then = self._pinned_of(key, pool, in_use, reclaimable, cap)
        held = held if then is None else then
        refusal = self._refusal(key, record.time, requested, held, cap, free, 0 if is_counted(report) else 1)
        self._add(key, reported(report, refusal, then is not None))

    def _refusal(
        self,
        key: Key,
        time: float,
        requested: int | None,
        held: int | None,
        cap: int | None,
        free: int | None,
        times: int,
    ) -> Refusal:
        need = (held or 0) + (requested or 0)
        if key[0] in self._pooled:
            cap = None  # the joint cap refused it: the sum of all frameworks in the pool
        full = cap is not None and requested is not None and need <= cap and free is not None and free < requested
        return Refusal(time, requested, held, cap, times, full)

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
        pinned = in_use if in_use is not None else held
        if held is not None and reclaimable is not None and key[1] not in NEVER_GIVE_BACK:
            pinned = max(held - reclaimable, pinned or 0)
        return pinned

    def _before(self, key: Key) -> tuple[int | None, int | None, int | None]:
        """Figures of the last sample: the framework's unreclaimable bytes, the framework's cap, and the GPU's free
        memory."""
        uuid, name = key
        devices: tuple[DeviceSample, ...] = () if self.last is None else self.last.devices
        device = next((one for one in devices if one.uuid == uuid), None)
        cap = next((part.caps.get(name) for part in self._plan.devices if part.device.uuid == uuid), None)
        if device is None:
            return None, cap, None
        usage = device.frameworks.get(name)
        return (None, cap, device.free) if usage is None else (self._pinned(name, usage), usage.cap, device.free)


def pooled(plan: Plan) -> set[str]:
    """The UUIDs of the GPUs on which frameworks share a joint cap.

    Older timelines do not name the frameworks of a joint cap. There it follows from the plan's sum of caps, which
    counts a joint cap once.
    """
    return {
        part.device.uuid
        for part in plan.devices
        if part.joined or sum(part.caps.values()) + part.unallocated + part.reserve > part.limit
    }


def _whole(value: object) -> int | None:
    return value if is_whole(value) else None

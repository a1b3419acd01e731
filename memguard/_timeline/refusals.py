"""Collects the allocation requests that were refused while a timeline was recorded, each request once; no I/O.

The need of a refused request is the framework's unreclaimable memory at the refusal plus the requested bytes, even if
the program caught the error. Events of older memguard versions lack these figures; the figures of the last sample
replace them. A refused request is recorded as an event, as an out-of-memory report, or as both. If there are both, the
report has the time of the event. Reports of memguard 0.1.0, and some later reports, lack the time of the event.
`counting_event` finds the events of such reports by the report's own time and the requested size. All sizes are bytes;
None means unknown.
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
"""The most seconds between the time of a request's event and the time of the refusal in the report (`moment`), and
between the event and the report."""
REGIONS = frozenset(row.name for row in SPECS.values() if row.regions)
"""Frameworks whose pool consists of regions, which are never merged or freed. A request must fit into one region."""
MOST = 1000
"""The most refusals stored for each framework on each GPU. The refusals with the smallest needs are dropped."""
Key = tuple[str, str]
"""The GPU's UUID and the framework's name."""


@dataclass(frozen=True)
class Refusal:
    """A refused request, or the last request of an event that counts several.

    `time` is as of `time.time()`; `held` is the framework's unreclaimable bytes at the refusal.

    `times` is the number of requests that this refusal counts; 0 for a report whose request an event counts. `full`:
    the request would have fit under the cap, but the GPU had too little free memory.
    """

    time: float
    asked: int | None  # `--json` prints this field name
    held: int | None
    cap: int | None
    times: int
    full: bool

    @property
    def need(self) -> int:
        """The smallest cap under which the request would have succeeded. If the cap refused the request, the need is
        larger than the cap."""
        need = (self.held or 0) + (self.asked or 0)
        return need if self.full or self.cap is None else max(need, self.cap + GRANULE)


@dataclass(frozen=True)
class Reported:
    """A refusal found in an out-of-memory report. `moment` is the time of the refusal; None if only the time of the
    report is known.

    `exact`: `refusal.held` was read at the refusal; otherwise it is from the last sample. `event` is the time, unique
    among events, of the event that counts the request; None if the report does not have that time.
    """

    refusal: Refusal
    moment: float | None
    exact: bool
    event: float | None = None


def moment_of(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """The figures in the report that were read at the refusal; empty if there are none."""
    moment = report.get("moment")
    return moment if isinstance(moment, Mapping) else {}


def is_counted(report: Mapping[str, Any]) -> bool:
    """True if the allocator reported the refusal to memguard. In this case an event also counts the request."""
    return moment_of(report).get("source") in ("refusal", "observer")


def reported(report: Mapping[str, Any], refusal: Refusal, exact: bool = False) -> Reported:
    """Return `refusal` with the times in the report by which `counting_event` finds the event of the same request."""
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
    """Merge events and reports, so that each request is counted once. An event of n requests matches n reports."""
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

    `events` are the events of one framework on one GPU, sorted by time. `left` has, for each event, the number of
    reports that may still match it. The time of an event of several requests is the time of the last request.
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
    """Merge an event with the report of a request that the event counts. Keeps the event's time and count.

    The other figures are the report's if they were read at the refusal, else the figures with the larger need. If the
    report names an event of several requests, the event's figures may be of another request, and the larger need wins.
    """
    best = report.refusal
    another = report.event is not None and event.times > 1
    if (another or not report.exact) and event.need > best.need:
        best = event
    requested = event.asked if best.asked is None else best.asked
    return replace(best, time=event.time, asked=requested, times=event.times)


class RefusalCollector:
    """Collects the refusals in one timeline's records, in order. `plan` is the plan in the timeline's header.

    `pinned` returns a framework's unreclaimable bytes in a sample. `elsewhere` counts, by requester,
    the reports whose requester is no known framework or whose GPU is not in the plan. `cut` is True
    if refusals were dropped (see `MOST`).
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
        """The `Key` of a framework on a GPU; None if the framework is unknown or the GPU is not in the plan."""
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
        # Figures read at the refusal take precedence over figures of the last sample.
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
            cap = None  # the cap applies to all frameworks of the pool together
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
        """The framework's unreclaimable bytes at the refusal; None if `held` and `in_use` are unknown.

        If a pool of regions (see `REGIONS`) refuses a request, no region can contain the request. A pool smaller than
        its cap grows by regions, so the request needs a new region in addition to all held bytes. A pool as large as
        its cap may be a single region, so only its bytes in use count.
        """
        grown = held is not None and cap is not None and held < cap - GRANULE
        if key[1] in REGIONS and key[0] not in self._pooled and grown:
            return held
        pinned = in_use if in_use is not None else held
        if held is not None and reclaimable is not None and key[1] not in NEVER_GIVE_BACK:
            pinned = max(held - reclaimable, pinned or 0)
        return pinned

    def _before(self, key: Key) -> tuple[int | None, int | None, int | None]:
        """The framework's unreclaimable bytes, the framework's cap, and the GPU's free memory in the last sample."""
        uuid, name = key
        devices: tuple[DeviceSample, ...] = () if self.last is None else self.last.devices
        device = next((one for one in devices if one.uuid == uuid), None)
        cap = next((part.caps.get(name) for part in self._plan.devices if part.device.uuid == uuid), None)
        if device is None:
            return None, cap, None
        usage = device.frameworks.get(name)
        return (None, cap, device.free) if usage is None else (self._pinned(name, usage), usage.cap, device.free)


def pooled(plan: Plan) -> set[str]:
    """The UUIDs of the GPUs on which frameworks share a pool with a joint cap.

    In older timelines the plan does not list the frameworks of a joint cap (`joined`). In such a plan each of these
    frameworks has the joint cap, so that the sum of all caps exceeds the limit.
    """
    return {
        part.device.uuid
        for part in plan.devices
        if part.joined or sum(part.caps.values()) + part.unallocated + part.reserve > part.limit
    }


def _whole(value: object) -> int | None:
    return value if is_whole(value) else None

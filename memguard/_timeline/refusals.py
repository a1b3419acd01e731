"""Deduplicate a timeline's refused requests, each recorded as an event, as an out-of-memory report, or as both. Pure.

A report names the event that counts its request. Reports of memguard 0.1.0, and reports whose record was lost, do not:
`counting_event` matches these by time and size. All sizes are bytes; None is unknown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from memguard._base.units import GRANULE, is_whole

_MOMENT, _REPORT = 0.01, 1.0
"""The most seconds between two times of one request: to its recorded moment, and to its later report."""


@dataclass(frozen=True)
class Refusal:
    """A refused request. `time` is as of `time.time()`, `held` the framework's unreclaimable bytes at the refusal.

    `times` counts the requests; 0 if an event has counted it already. `full`: the GPU was full, not the cap.
    """

    time: float
    asked: int | None
    held: int | None
    cap: int | None
    times: int
    full: bool

    @property
    def need(self) -> int:
        """The least memory that would have served it. If the cap refused, it is more than that cap."""
        need = (self.held or 0) + (self.asked or 0)
        return need if self.full or self.cap is None else max(need, self.cap + GRANULE)


@dataclass(frozen=True)
class Reported:
    """The refusal of an out-of-memory report. `moment` is its time, None if only the report's time is known.

    `exact`: `held` is from that moment, and not from the last sample. `event` is the unique time of the event that
    counts it; None if the report does not name it.
    """

    refusal: Refusal
    moment: float | None
    exact: bool
    event: float | None = None


def moment_of(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """The report's figures from the moment of the refusal; empty if it has none."""
    moment = report.get("moment")
    return moment if isinstance(moment, Mapping) else {}


def is_counted(report: Mapping[str, Any]) -> bool:
    """Whether an event counts the report's request: its allocator reported it at the refusal."""
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
    """The index of the event that counts the report's request; None if there is none.

    `events` are one framework's on one GPU, by time; `left` is the number of reports that each may still match. An
    event of several requests has the time of the last.
    """
    if report.event is not None:
        at = bisect_left(events, report.event, key=_when)
        return at if at < len(events) and events[at].time == report.event and left[at] else None
    when, by = (report.refusal.time, _REPORT) if report.moment is None else (report.moment, _MOMENT)
    asked, counted = report.refusal.asked, not report.refusal.times
    first = bisect_left(events, when - by, key=_when)
    for at in range(first, len(events)):
        event = events[at]
        if event.time > when + by and not (at == first and event.times > 1 and counted):
            return None
        if left[at] and (asked is None or event.asked is None or asked == event.asked):
            return at
    return None


def _when(event: Refusal) -> float:
    return event.time


def _merged(event: Refusal, report: Reported) -> Refusal:
    """The report's figures of the moment, if any, or else the figures with the larger need; and the event's count.

    The figures of an event of several requests are another request's, unless only time and size matched them.
    """
    best = report.refusal
    another = report.event is not None and event.times > 1
    if (another or not report.exact) and event.need > best.need:
        best = event
    asked = event.asked if best.asked is None else best.asked
    return replace(best, time=event.time, asked=asked, times=event.times)

"""Requests that were refused. A timeline may have one twice: as an event, and as the out-of-memory report. Pure.

A report names the event that counts its request. Those of memguard 0.1.0 do not: they are matched by time and size.
All sizes are bytes; None is unknown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memguard._base.units import GRANULE

_MOMENT, _REPORT = 0.01, 1.0
"""Seconds by which the times of one request differ: the moment's, which is written, and the report's, made later."""


@dataclass(frozen=True)
class Refusal:
    """A request that was refused. `time` is as of `time.time()`, `held` what the framework could not return then.

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
        """The least that would have served it. Under a cap it is more than that cap."""
        need = (self.held or 0) + (self.asked or 0)
        return need if self.full or self.cap is None else max(need, self.cap + GRANULE)


@dataclass(frozen=True)
class Reported:
    """A refusal of an out-of-memory report. `moment` is when it was refused, None if only the report's time is known.

    `exact`: what was held is of that moment, and not of the last sample. `event` is the time of the event that counts
    it, which no other has; None if the report does not name it.
    """

    refusal: Refusal
    moment: float | None
    exact: bool
    event: float | None = None


def event_of(moment: Mapping[str, Any]) -> float | None:
    """The time of the event that counts the request of a report with this `moment`; None if it names none."""
    time = moment.get("event")
    return time if type(time) in (int, float) else None


def once(events: Sequence[Refusal], reports: Sequence[Reported]) -> tuple[Refusal, ...]:
    """All of them, each request once. An event of several requests takes as many reports."""
    found = sorted(events, key=lambda event: event.time)
    times, left = [event.time for event in found], [event.times for event in found]
    alone = []
    for report in sorted(reports, key=lambda report: (report.event is None, report.refusal.time)):
        at = _event(found, times, left, report)
        if at is None:
            alone.append(report.refusal)
            continue
        left[at] -= 1
        found[at] = _merged(found[at], report)
    return (*found, *alone)


def _event(events: Sequence[Refusal], times: Sequence[float], left: Sequence[int], report: Reported) -> int | None:
    """The index of the event that tells of the same request. One of several requests has the time of the last."""
    if report.event is not None:
        at = bisect_left(times, report.event)
        return at if at < len(times) and times[at] == report.event and left[at] else None
    when, by = (report.refusal.time, _REPORT) if report.moment is None else (report.moment, _MOMENT)
    asked, counted = report.refusal.asked, not report.refusal.times
    first = bisect_left(times, when - by)
    for at in range(first, len(events)):
        event = events[at]
        if event.time > when + by and not (at == first and event.times > 1 and counted):
            return None
        if left[at] and (asked is None or event.asked is None or asked == event.asked):
            return at
    return None


def _merged(event: Refusal, report: Reported) -> Refusal:
    """The figures of the moment, if there are any, or else those that need more; the event's count.

    The figures of an event of several requests are another request's, unless only time and size matched them.
    """
    best = report.refusal
    another = report.event is not None and event.times > 1
    if (another or not report.exact) and event.need > best.need:
        best = event
    asked = event.asked if best.asked is None else best.asked
    return replace(best, time=event.time, asked=asked, times=event.times)

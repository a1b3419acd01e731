"""Finds the refused request of which a timeline has both an event and an error: the report shows it once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from memguard._base.types import Event
from memguard._base.units import is_whole
from memguard._timeline import Oom
from memguard._timeline.refusals import Refusal, Reported, counting_event, is_counted, moment_of, reported, times_of
from memguard._tools.report.model import Entry

_SAME = 0.002
"""Seconds: an event of several requests has the time of the last, and a timeline has milliseconds."""


class Refused(NamedTuple):
    """Who was refused memory on which GPU, as an event or an error tells it."""

    framework: str | None
    uuid: str | None
    told: Refusal | Reported


def of_event(event: Event) -> Refused | None:
    if event.kind != "refused":
        return None
    told = _refusal(event.time, event.bytes, times_of(event.times))
    return Refused(event.framework, event.uuid, told)


def of_oom(oom: Oom) -> Refused | None:
    """The refusal that the error came of, if it was recorded when it happened: then an event has it too."""
    report = oom.report
    if not is_counted(report):
        return None
    told = reported(report, _refusal(oom.time, moment_of(report).get("requested"), 0))
    who, uuid = (one if isinstance(one, str) else None for one in (report.get("requester"), report.get("uuid")))
    return None if told.moment is None else Refused(who, uuid, told)


def _refusal(time: float, asked: object, times: int) -> Refusal:
    return Refusal(time, asked if is_whole(asked) else None, None, None, times, False)


def merged(entries: Iterable[Entry], requests: Mapping[int, Refused]) -> list[Entry]:
    """The entries, each request once. `requests` has the refusal of an entry by its `id()`.

    The error stays, with what the event said. An event of several requests stays too, and the error says so.
    """
    found = list(entries)
    known = [(entry, requests[id(entry)]) for entry in found if id(entry) in requests]
    gone: set[int] = set()
    instead: dict[int, Entry] = {}
    for key in {request[:2] for _, request in known}:
        own = [(entry, request.told) for entry, request in known if request[:2] == key]
        counted = [(told, entry) for entry, told in own if isinstance(told, Refusal)]
        counted.sort(key=lambda one: one[0].time)
        events, left = [told for told, _ in counted], [told.times for told, _ in counted]
        for entry, told in own:
            if not isinstance(told, Reported) or (at := counting_event(events, left, told)) is None:
                continue
            left[at] -= 1
            event, said = events[at], counted[at][1].title
            if event.times == 1:
                gone.add(id(counted[at][1]))
            else:
                last = told.event is None and event.time - (told.moment or 0) <= _SAME
                said = f"{'the last' if last else 'one'} of {event.times:,} requests, which an event counts together"
            instead[id(entry)] = replace(entry, lines=(*entry.lines, ("refused", said)))
    return [instead.get(id(entry), entry) for entry in found if id(entry) not in gone]

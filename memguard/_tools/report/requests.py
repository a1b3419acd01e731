"""Finds the refused request of which a timeline has both an event and an error: the report shows it once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from memguard._base.types import Event
from memguard._base.units import is_whole
from memguard._timeline import Oom
from memguard._timeline.refusals import event_of
from memguard._tools.report.model import Entry

_SAME = 0.002
"""Seconds: both have the time of the refusal, and a timeline has milliseconds. Reports of 0.1.0 name no event."""


class Refused(NamedTuple):
    """Who asked for how much, and when that was refused.

    `times` says how many requests it stands for. `event` is the time of the event that counts it, if a report names it.
    """

    framework: object
    uuid: object
    size: object
    time: float
    times: int = 1
    event: float | None = None

    def counts(self, other: Refused) -> bool:
        """Whether this event counts the request of a report."""
        if other.event is not None:
            return self.time == other.event
        return self[:3] == other[:3] and abs(self.time - other.time) <= _SAME


def of_event(event: Event) -> Refused | None:
    if event.kind != "refused":
        return None
    times = event.times if is_whole(event.times) and event.times else 1
    return Refused(event.framework, event.uuid, event.bytes, event.time, times)


def of_oom(oom: Oom) -> Refused | None:
    """The refusal that the error came of, if it was recorded when it happened: then an event has it too."""
    report: Mapping[str, Any] = oom.report
    moment = report.get("moment")
    if not isinstance(moment, Mapping) or moment.get("source") not in ("refusal", "observer"):
        return None
    try:
        time = datetime.fromisoformat(moment["time"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return None
    requester, uuid, event = report.get("requester"), report.get("uuid"), event_of(moment)
    return Refused(requester, uuid, moment.get("requested"), time, event=event)


def merged(entries: Iterable[Entry], requests: Mapping[int, Refused]) -> list[Entry]:
    """The entries, each request once. `requests` has the refusal of an entry by its `id()`.

    The error stays, with what the event said. An event of several requests stays too, and the error says so.
    """
    found = list(entries)
    events = [entry for entry in found if entry.severity != "oom" and id(entry) in requests]
    gone: set[int] = set()
    instead: dict[int, Entry] = {}
    for entry in found:
        request = requests.get(id(entry))
        if request is None or entry.severity != "oom":
            continue
        event = next((one for one in events if id(one) not in gone and requests[id(one)].counts(request)), None)
        if event is None:
            continue
        times = requests[id(event)].times
        which = "the last" if request.event is None else "one"
        said = event.title if times == 1 else f"{which} of {times:,} requests, which an event counts together"
        instead[id(entry)] = replace(entry, lines=(*entry.lines, ("refused", said)))
        if times == 1:
            gone.add(id(event))
    return [instead.get(id(entry), entry) for entry in found if id(entry) not in gone]

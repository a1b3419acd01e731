"""Refused requests as events of the timeline: the first at once, repetitions together.

Readers join an out-of-memory report with the event that counts its request. The event itself cannot carry the ids of
its requests, because memguard 0.1.0 refuses an event with a field that it does not know. So each event gets a time of
its own, and the report names its request's id and that time.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from memguard._base.types import Event, RefusedRequest
from memguard._base.units import format_size

EVERY = 10.0
"""Seconds between two events of one framework on one GPU: a program may probe batch sizes thousands of times."""
_KEPT = 256
"""Requests whose event is remembered, and events whose time is. Only the report of a recent one is still to come."""


class _Waiting:
    """What came since the last event."""

    def __init__(self, since: float) -> None:
        self.since, self.count = since, 0
        self.last: RefusedRequest | None = None
        self.ids: deque[str | None] = deque(maxlen=_KEPT)


class Refusals:
    """Thread-safe. Its lock is reentrant, for a signal handler, and held for no more than a few lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.RLock()
        self._waiting: dict[tuple[str, str | None], _Waiting] = {}
        self._events: dict[str, float] = {}
        """By the id of a request, the time of the event that counts it."""
        self._times: deque[float] = deque(maxlen=_KEPT)

    def refused(self, moment: RefusedRequest) -> list[Event]:
        """The events to write now."""
        key = moment.framework, moment.uuid
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting is None:
                self._waiting[key] = _Waiting(self._clock())
                return [self._counted(moment, 1, [moment.id])]
            waiting.count, waiting.last = waiting.count + 1, moment
            waiting.ids.append(moment.id)
            return self._due(False)

    def forked(self) -> None:
        """In a forked child: the parent writes its events, and another thread of it may have held the lock."""
        self._lock, self._waiting = threading.RLock(), {}

    def due(self, everything: bool = False) -> list[Event]:
        """The events that have waited long enough, or all."""
        if not self._waiting:  # mostly
            return []
        with self._lock:
            return self._due(everything)

    def event_of(self, request: str | None) -> float | None:
        """The time of the event that counts the request with this id, as the timeline has it; None if unknown."""
        return None if request is None else self._events.get(request)

    def _counted(self, moment: RefusedRequest, count: int, ids: Iterable[str | None]) -> Event:
        """The event, at a time that no other has. A timeline's times are whole milliseconds."""
        when = round(moment.time, 3)
        while when in self._times:
            when = round(when + 0.001, 3)
        self._times.append(when)
        self._events.update((one, when) for one in ids if one is not None)
        while len(self._events) > _KEPT:
            del self._events[next(iter(self._events))]
        return _event(moment._replace(time=when), count)

    def _due(self, everything: bool) -> list[Event]:
        now, events = self._clock(), []
        for key, waiting in list(self._waiting.items()):
            if not everything and 0 <= now - waiting.since < EVERY:
                continue
            if waiting.last is None:
                del self._waiting[key]
                continue
            events.append(self._counted(waiting.last, waiting.count, waiting.ids))
            self._waiting[key] = _Waiting(now)
        return events


def _event(moment: RefusedRequest, count: int) -> Event:
    size = "" if moment.requested is None else f" for {format_size(moment.requested)}"
    held = ""
    if moment.held is not None and moment.cap is not None:
        held = f"; it held {format_size(moment.held)} of its cap of {format_size(moment.cap)}"
    free = "" if moment.free is None else f", and the GPU had {format_size(moment.free)} free"
    what = f"a request{size} was refused" if count == 1 else f"{count} more requests were refused, the last{size}"
    unhelped = "" if moment.no_room is None else f"; no room was made for it: {moment.no_room}"
    text = f"{moment.framework}: {what}{held}{free}{unhelped}"
    return Event(
        moment.time, "refused", text, uuid=moment.uuid, framework=moment.framework, bytes=moment.requested, times=count,
        held=moment.held, in_use=moment.in_use, reclaimable=moment.reclaimable, cap=moment.cap, free=moment.free,
    )  # fmt: skip

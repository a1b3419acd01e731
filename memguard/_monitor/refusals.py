"""Refused requests as events of the timeline: the first at once, repetitions together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from memguard._types import Event, Moment
from memguard._units import format_size

EVERY = 10.0
"""Seconds between two events of one framework on one GPU: a program may probe batch sizes thousands of times."""


class _Waiting:
    """What came since the last event."""

    def __init__(self, since: float) -> None:
        self.since, self.count = since, 0
        self.last: Moment | None = None


class Refusals:
    """Thread-safe. Its lock is reentrant, for a signal handler, and held for no more than a few lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.RLock()
        self._waiting: dict[tuple[str, str | None], _Waiting] = {}

    def refused(self, moment: Moment) -> list[Event]:
        """The events to write now."""
        key = moment.framework, moment.uuid
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting is None:
                self._waiting[key] = _Waiting(self._clock())
                return [_event(moment, 1)]
            waiting.count, waiting.last = waiting.count + 1, moment
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

    def _due(self, everything: bool) -> list[Event]:
        now, events = self._clock(), []
        for key, waiting in list(self._waiting.items()):
            if not everything and 0 <= now - waiting.since < EVERY:
                continue
            if waiting.last is None:
                del self._waiting[key]
                continue
            events.append(_event(waiting.last, waiting.count))
            self._waiting[key] = _Waiting(now)
        return events


def _event(moment: Moment, count: int) -> Event:
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

"""How this process leaves its GPUs and comes back: through a helper process and the driver, or simulated.

What speaks against it is looked for first. What came of the flow (`Outcome`) becomes a `Suspension`, or an error.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from memguard import _api
from memguard._devices.checkpoint import State
from memguard._suspend import facts, flow, refusals
from memguard._suspend.client import Client
from memguard._suspend.door import Card, Door
from memguard._suspend.identity import this_process
from memguard._suspend.steps import End
from memguard._suspend.types import Process, Suspension, Wait, Why
from memguard._suspend.waiting import Calls
from memguard._types import MemoryInfo
from memguard._units import format_size
from memguard.errors import CannotResume, CannotSuspend

_UNCHANGED = (End.RUNNING, End.UNTOUCHED, End.ENDED)
_AGAIN = 0.5
"""Seconds between two looks for room."""
_READING = 2.0
"""Seconds that a ledger waits for the helper's figures."""


class Route:
    """This process's way through a `Door`."""

    def __init__(self, door: Door) -> None:
        self.door, self.process = door, this_process()

    def check(self, ignore_host_memory: bool) -> None:
        """Nothing speaks against it."""

    def off(self, why: Why, timeout: float, calls: Calls, close: Callable[[], None]) -> Suspension:
        self.door.state(self.process)  # the helper's start, before anything waits for it
        if calls.stop.is_set():
            raise _refused(("interrupted", "this was interrupted", "try again"))
        close()
        done = flow.take_off(
            self.process,
            client=self.door,
            lock_timeout=timeout,
            cancel=calls.stop,
            give_up=calls.give_up,
        )
        if done.end in _UNCHANGED:
            raise _refused(_split("driver", done.text))
        if done.end is not End.SUSPENDED:
            raise CannotResume(done.text, lost=done.end is End.LOST)
        since = time.time()
        return Suspension(self.process, done.bytes or {}, done.host, since, done.seconds, why, done.parts)

    def back(self, found: Suspension, timeout: float | None, calls: Calls) -> None:
        room = waiting(timeout, calls)
        needs = found.bytes or None
        done = flow.bring_back(self.process, client=self.door, needs=needs, room=room, cancel=calls.stop)
        if done.end is not End.RUNNING:
            raise CannotResume(done.text, lost=done.end is End.LOST)

    def returned(self, seconds: float) -> bool:
        time.sleep(seconds)
        return self.door.state(self.process).state is State.RUNNING

    def memory(self, uuid: str) -> MemoryInfo | None:
        card = (self.door.usage(_READING) or {}).get(uuid)
        if card is None or card.used is None:
            return None
        return MemoryInfo(card.total, None, card.used, card.free)

    def close(self) -> None:
        pass


class Real(Route):
    """Through a helper process."""

    door: Client

    def __init__(self) -> None:
        super().__init__(Client())
        self._watched = False

    def check(self, ignore_host_memory: bool) -> None:
        held = self._held()
        found = facts.collect(
            self.process, inside=True, bytes=held, together=() if not self.door.pid else (self.door.pid,)
        )
        reasons = refusals.reasons(found, needs_host=refusals.host_needed(held), override_memory=ignore_host_memory)
        if reasons:
            raise CannotSuspend([(one.code, one.reason, one.remedy) for one in reasons])

    def _held(self) -> dict[str, int]:
        """What this process has on each GPU, in bytes; at most, where NVML does not name it."""
        cards = self.door.usage() or {}
        pid = self.process.pid
        if any(pid in card.processes for card in cards.values()):
            return {uuid: size for uuid, card in cards.items() if (size := card.processes.get(pid))}
        session = _api._active
        if session is not None and session.guard.active:
            parts = session.guard.ledger().devices
            if all(part.process is not None for part in parts):
                return {part.device.uuid: part.process for part in parts if part.process}
        return {uuid: card.used for uuid, card in cards.items() if card.used}

    def returned(self, seconds: float) -> bool:
        if not self._watched:
            self._watched = True
            self.door.watch(self.process)
        event = self.door.next_event(seconds)
        return event is not None and event.what == "running"

    def close(self) -> None:
        self.door.close()


class Simulated(Route):
    """Without a driver: what the budget's simulated GPUs say that this process has."""

    def __init__(self, cards: Mapping[str, int], own: Mapping[str, int]) -> None:
        from memguard._devices.simulated_checkpoint import SimulatedCheckpoint, Target
        from memguard._suspend.simulated import Direct

        self.driver = SimulatedCheckpoint(cards)
        self.driver.targets[os.getpid()] = Target(dict(own))
        super().__init__(Direct(self.driver))


def of_this_process() -> Route:
    session = _api._active
    if session is None or not session.guard.active or not session.guard.host.simulated:
        return Real()
    reading = session.guard.ledger()
    cards = {part.device.uuid: part.device.usable for part in reading.devices}
    return Simulated(cards, {part.device.uuid: part.process for part in reading.devices if part.process})


def waiting(timeout: float | None, calls: Calls) -> flow.Room:
    """A `Room` that looks again and again until there is room, and says what is missing."""

    @contextlib.contextmanager
    def room(process: Process, needs: flow.Needs, door: Door, cancel: threading.Event | None) -> Iterator[str]:
        began = time.monotonic()
        while True:
            with flow.free_now(process, needs, door, cancel) as lacking:
                spent = time.monotonic() - began
                stopped = cancel is not None and cancel.is_set()
                if not lacking or stopped or (timeout is not None and spent >= timeout):
                    yield lacking
                    return
            for look in _looks(door.usage() or {}, needs or {}, spent):
                calls.tell(look)
            calls.stop.wait(_AGAIN)

    return room


def _looks(cards: Mapping[str, Card], needs: Mapping[str, int], seconds: float) -> Iterator[Wait]:
    for uuid, size in needs.items():
        card = cards.get(uuid)
        if card is None or card.free >= size:
            continue
        most = sorted(card.processes.items(), key=lambda one: -(one[1] or 0))
        yield Wait(uuid, size, card.free, 0, tuple(f"pid {pid}: {format_size(held)}" for pid, held in most), seconds)


def _split(code: str, text: str) -> tuple[str, str, str]:
    reason, _, remedy = text.partition("\n    fix: ")
    return code, reason or "the driver did not do it", remedy or "try again"


def _refused(reason: tuple[str, str, str]) -> CannotSuspend:
    return CannotSuspend([reason])

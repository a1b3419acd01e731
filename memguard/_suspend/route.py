"""How this process leaves its GPUs and comes back: through a helper process and the driver, or simulated.

What speaks against it is looked for first. What came of the flow (`Outcome`) becomes a `Suspension`, or an error.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping

from memguard import _api
from memguard._devices.checkpoint import State
from memguard._suspend import facts, flow, refusals
from memguard._suspend.client import Client
from memguard._suspend.door import Door
from memguard._suspend.identity import this_process
from memguard._suspend.room import Waiting
from memguard._suspend.steps import End
from memguard._suspend.types import Suspension, Why
from memguard._suspend.waiting import Calls
from memguard._types import MemoryInfo
from memguard.errors import CannotResume, CannotSuspend

_UNCHANGED = (End.RUNNING, End.UNTOUCHED, End.ENDED)
_READING = 2.0
"""Seconds that a ledger waits for the helper's figures."""


class Route:
    """This process's way through a `Door`. `where` is the folder of the GPUs' turns; None: the user's own."""

    where: str | None = None

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
            room=Waiting(None, calls.tell, where=self.where),
        )
        if done.end in _UNCHANGED:
            raise _refused(_split("driver", done.text))
        if done.end is not End.SUSPENDED:
            raise CannotResume(done.text, lost=done.end is End.LOST)
        since = time.time()
        return Suspension(self.process, done.bytes or {}, done.host, since, done.seconds, why, done.parts)

    def back(self, found: Suspension, timeout: float | None, calls: Calls) -> None:
        room = Waiting(timeout, calls.tell, where=self.where)
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
        self._folder = tempfile.TemporaryDirectory(prefix="memguard-simulated-")  # nobody else waits for these GPUs
        self.where = self._folder.name

    def close(self) -> None:
        self._folder.cleanup()


def of_this_process() -> Route:
    session = _api._active
    if session is None or not session.guard.active or not session.guard.host.simulated:
        return Real()
    reading = session.guard.ledger()
    cards = {part.device.uuid: part.device.usable for part in reading.devices}
    return Simulated(cards, {part.device.uuid: part.process for part in reading.devices if part.process})


def _split(code: str, text: str) -> tuple[str, str, str]:
    reason, _, remedy = text.partition("\n    fix: ")
    return code, reason or "the driver did not do it", remedy or "try again"


def _refused(reason: tuple[str, str, str]) -> CannotSuspend:
    return CannotSuspend([reason])

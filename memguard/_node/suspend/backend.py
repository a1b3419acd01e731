"""How this process leaves its GPUs and comes back: through a helper process and the driver, or simulated.

What speaks against it is looked for first. What came of the flow (`Outcome`) becomes a `Suspension`, or an error.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping

from memguard._base.advice import Advice
from memguard._base.types import MemoryInfo
from memguard._devices.checkpoint import State
from memguard._node.identity import this_process
from memguard._node.suspend.checks import facts, refusals
from memguard._node.suspend.course import flow
from memguard._node.suspend.course.room import Waiting
from memguard._node.suspend.course.steps import End
from memguard._node.suspend.course.task import Calls
from memguard._node.suspend.driver.channel import CheckpointChannel
from memguard._node.suspend.driver.client import Client
from memguard._node.suspend.store.work_lock import BusyError, Work
from memguard._node.suspend.types import Suspension, Why
from memguard._runtime.runtime import this
from memguard.errors import CannotResume, CannotSuspend, MemguardError

_UNCHANGED = (End.RUNNING, End.UNTOUCHED, End.ENDED)
_FOLDER = "free space there, or set XDG_RUNTIME_DIR to a folder of your own that can be written"
_READING = 2.0
"""Seconds that a ledger waits for the helper's figures."""


class SuspendBackend:
    """Takes this process off its GPUs and back through a `CheckpointChannel`; `Real`, `Simulated`, or a test's.

    `where` is the folder of the GPUs' turns; None: the user's own.
    """

    where: str | None = None
    held: Mapping[str, int] | None = None

    def __init__(self, door: CheckpointChannel) -> None:
        self.door, self.process = door, this_process()
        self.held: dict[str, int] = {}
        """Bytes by GPU that it has, for its record; at most."""

    def check(self, ignore_host_memory: bool) -> None:
        """Raise CannotSuspend with each reason why not. On the caller's thread: its captures count."""

    def off(self, why: Why, timeout: float, calls: Calls, close: Callable[[], None]) -> Suspension:
        """Take it off. `close` is called before anything is touched, once nothing speaks against it.

        Raises CannotSuspend: it is on its GPUs, as it was. Any other error after `close`: it may be off its GPUs.
        """
        self.door.state(self.process)  # the helper's start, before anything waits for it
        if calls.stop.is_set():
            raise _refused(("interrupted", "this was interrupted", "try again"))
        try:
            with self._recorded(why, calls, 0.0) as work:
                close()
                done = flow.take_off(
                    self.process,
                    client=self.door,
                    lock_timeout=timeout,
                    on_step=work,
                    cancel=calls.stop,
                    give_up=calls.give_up,
                    room=Waiting(None, calls.tell, where=self.where),
                )
                work.ended(done.end.value, done.bytes)
        except BusyError as error:
            raise _refused(_because("busy", error.advice)) from None
        if done.end in _UNCHANGED and isinstance(done.interruption, OSError):
            raise _refused(("record", f"its record cannot be written: {done.interruption}", _FOLDER))
        if done.end in _UNCHANGED:
            raise _refused(_because("driver", done.said))
        if done.end is not End.SUSPENDED:
            raise CannotResume(done.said or "", lost=done.end is End.LOST)
        since = time.time()
        return Suspension(self.process, done.bytes or {}, done.host, since, done.seconds, why, done.parts)

    def back(self, found: Suspension, timeout: float | None, calls: Calls) -> None:
        """Raises CannotResume: it stays suspended and whole, or is lost. `calls.tell` gets each `Wait` for room."""
        room = Waiting(timeout, calls.tell, where=self.where)
        needs = found.bytes or None
        try:
            with self._recorded(found.why, calls, timeout) as work:
                done = flow.bring_back(
                    self.process, client=self.door, needs=needs, room=room, on_step=work, cancel=calls.stop
                )
                work.ended(done.end.value)
        except BusyError as error:
            raise CannotResume(error.advice) from None
        if done.end is not End.RUNNING:
            raise CannotResume(done.said or "", lost=done.end is End.LOST)

    @contextlib.contextmanager
    def _recorded(self, why: Why, calls: Calls, patience: float | None) -> Iterator[Work]:
        """It is written down for other processes, and done by one of them at a time. Raises BusyError.

        It waits as long for another one (`memguard resume PID`) as for room.
        """
        guard = this.session.guard if this.session is not None else None
        budget = guard.budget.source if guard is not None and guard.active else None
        until = None if patience is None else time.monotonic() + patience
        while True:
            work = Work(self.process, why, sizes=lambda: self.held, budget=budget, where=self.where)
            try:
                work.__enter__()
                break
            except BusyError:
                if calls.stop.is_set() or (until is not None and time.monotonic() >= until):
                    raise
            except (OSError, MemguardError) as error:
                said = error.advice if isinstance(error, MemguardError) else Advice(str(error), _FOLDER)
                raise BusyError(self.process, why=said.within("its record cannot be written")) from None
        try:
            yield work
        finally:
            work.__exit__()

    def returned(self, seconds: float) -> bool:
        """Whether somebody else has brought it back, or does within that time."""
        time.sleep(seconds)
        return self.door.state(self.process).state is State.RUNNING

    def memory(self, uuid: str) -> MemoryInfo | None:
        """What NVML says of a GPU, without this process asking it."""
        card = (self.door.usage(_READING) or {}).get(uuid)
        if card is None or card.used is None:
            return None
        return MemoryInfo(card.total, None, card.used, card.free)

    def used(self, pid: int) -> bool | None:
        """Whether another process has used a GPU since that was asked last, without this one asking NVML."""
        return None

    def close(self) -> None:
        pass


class Real(SuspendBackend):
    """Through a helper process."""

    door: Client

    def __init__(self) -> None:
        super().__init__(Client())
        self._watched = False

    def check(self, ignore_host_memory: bool) -> None:
        held = self.held = self._held()
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
        session = this.session
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

    def used(self, pid: int) -> bool | None:
        return self.door.used(pid)

    def close(self) -> None:
        self.door.close()


class Simulated(SuspendBackend):
    """Without a driver: what the budget's simulated GPUs say that this process has."""

    def __init__(self, cards: Mapping[str, int], own: Mapping[str, int]) -> None:
        from memguard._devices.simulated_checkpoint import SimulatedCheckpoint, Target
        from memguard._node.suspend.driver.simulated import Direct

        self.driver = SimulatedCheckpoint(cards)
        self.driver.targets[os.getpid()] = Target(dict(own))
        super().__init__(Direct(self.driver))
        # Nobody else waits for these GPUs. Not a TemporaryDirectory, which a forked child would remove at its end.
        self.where = tempfile.mkdtemp(prefix="memguard-simulated-")

    def close(self) -> None:
        if self.where is not None:
            shutil.rmtree(self.where, ignore_errors=True)


def of_this_process() -> SuspendBackend:
    session = this.session
    if session is None or not session.guard.active or not session.guard.host.simulated:
        return Real()
    reading = session.guard.ledger()
    cards = {part.device.uuid: part.device.usable for part in reading.devices}
    return Simulated(cards, {part.device.uuid: part.process for part in reading.devices if part.process})


def _because(code: str, why: Advice | None) -> tuple[str, str, str]:
    why = why or Advice("the driver did not do it")
    return code, why.reason, why.fix or "try again"


def _refused(reason: tuple[str, str, str]) -> CannotSuspend:
    return CannotSuspend([reason])

"""Takes a process off its GPUs, and brings it back: any process of this user, through a `CheckpointChannel`.

What went wrong is in the `Outcome`, which says how the process is now; nothing is raised for it. A flow is to run on a
thread of its own: Ctrl-C comes to the main thread, which sets `cancel`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from memguard._base.advice import Advice
from memguard._base.units import MIB, format_size
from memguard._devices.checkpoint import IN_PROGRESS
from memguard._node.identity import Process, anonymous_bytes, stopped
from memguard._node.suspend.course import bytes_left, end_of_wait, messages, settling
from memguard._node.suspend.course.room import bytes_of, short
from memguard._node.suspend.course.steps import Course, Do, End, Goal, Why
from memguard._node.suspend.driver.channel import Answer, Card, CheckpointChannel

OnStep = Callable[[str], object]
"""Told before each step: `state`, `lock`, `settle`, `checkpoint`, `room`, `restore`, `unlock`."""
Needs = Mapping[str, int] | None
Room = Callable[[Process, Needs, CheckpointChannel, threading.Event | None], AbstractContextManager[Advice | None]]
"""Makes room for a restore and keeps it within the block, in which the restore is called.

It gets the process, its bytes by GPU (None: nobody knows), the channel to hold them with, and the event that ends its
wait: nobody wants it any more, or the process is back already. It gives "" if there is room, else why not: then no
restore is begun.
"""


@dataclass(frozen=True)
class Limits:
    """Seconds after which a call counts as hanging. A copy's grow with its bytes."""

    state: float = 10.0
    lock: float = 20.0
    """Beyond the lock's own time."""
    unlock: float = 60.0
    copy: float = 120.0
    rate: int = 128 * MIB
    """Bytes a second: a tenth of what was measured, as host memory may be swapped."""
    unknown: float = 1800.0
    """Of a copy of nobody knows how many bytes."""

    def of_copy(self, needs: Needs) -> float:
        return self.unknown if needs is None else self.copy + sum(needs.values()) / self.rate


@dataclass(frozen=True)
class Outcome:
    """How it ended, and what it took.

    `said` is what went wrong, with its remedy; None if all went as asked. `bytes` left each GPU (UUID), None if that
    is not known; `host` is what its anonymous host memory grew by. `parts` are seconds by step. `interruption` came out
    of `on_step`, `room` or a wait (a KeyboardInterrupt): the caller raises it.
    """

    end: End
    said: Advice | None = None
    bytes: Mapping[str, int] | None = None
    host: int | None = None
    seconds: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    why: Why | None = None
    interruption: BaseException | None = None

    @property
    def text(self) -> str:
        """What went wrong, for people; empty if all went as asked."""
        return "" if self.said is None else str(self.said)


def take_off(
    process: Process,
    *,
    client: CheckpointChannel,
    lock_timeout: float = 10.0,
    settle: float = 0.1,
    on_step: OnStep | None = None,
    cancel: threading.Event | None = None,
    room: Room | None = None,
    give_up: threading.Event | None = None,
    limits: Limits | None = None,
) -> Outcome:
    """Off its GPUs: SUSPENDED, or what prevented it.

    `lock_timeout`: seconds in which its work on the GPU must end. `settle`: the least seconds between the lock and
    the copy, in which threads that were just about to synchronize do it (`settling`). `cancel`: it is taken back,
    and if it is off its GPUs already, it is brought back; `give_up` ends the wait for `room` then.
    """
    flow = _Flow(process, client, on_step, cancel, room, limits or Limits(), lock_timeout, settle)
    off = flow.run(Goal.OFF)
    wanted_back = flow.interruption is not None or (cancel is not None and cancel.is_set())
    if off.end is not End.SUSPENDED or not wanted_back:
        return off
    flow.cancel, flow.needs, flow.quiet = give_up, off.bytes or None, True
    on = flow.run(Goal.ON)
    why = Why(Do.CHECKPOINT, None, "cancelled")
    words = on.said if on.end is not End.RUNNING else messages.advice(Goal.OFF, End.RUNNING, why, process)
    return replace(on, said=words, bytes=off.bytes, host=off.host, seconds=off.seconds + on.seconds)


def bring_back(
    process: Process,
    *,
    client: CheckpointChannel,
    needs: Needs = None,
    room: Room | None = None,
    on_step: OnStep | None = None,
    cancel: threading.Event | None = None,
    limits: Limits | None = None,
) -> Outcome:
    """Back on its GPUs: RUNNING, whatever state it was in; SUSPENDED if there is no room, or `cancel` was set first.

    Also one that somebody left who has died: locked, off its GPUs, half restored. `needs`: the bytes of its
    `Suspension`. Without them, `room` has to know.
    """
    return _Flow(process, client, on_step, cancel, room, limits or Limits(), needs=needs).run(Goal.ON)


@contextlib.contextmanager
def free_now(
    process: Process, needs: Needs, client: CheckpointChannel, cancel: threading.Event | None
) -> Iterator[Advice | None]:
    """A `Room` that waits for nobody and holds nothing: whether the bytes are free now, as NVML says.

    Where nobody knows the bytes, each GPU must have what the process has in host memory.
    """
    cards = client.usage()
    if cards is None:
        yield Advice("NVML does not say what is free")
        return
    wanted = bytes_of(process, cards) if needs is None else needs
    if wanted is None:
        yield Advice("nobody knows how many bytes it needs")
        return
    for uuid, lacks in short(wanted, cards).items():
        free = cards[uuid].free if uuid in cards else 0
        yield Advice(f"{uuid} has {format_size(free)} free, and it needs {format_size(free + lacks)}")
        return
    yield None


_AGAIN = 0.1
"""Seconds between two questions for the state while an operation is in progress."""
_NO_NVML = Advice("NVML does not say how much memory it has on which GPU", "run `nvidia-smi` and check the driver")


class _Flow:
    def __init__(
        self,
        process: Process,
        client: CheckpointChannel,
        on_step: OnStep | None,
        cancel: threading.Event | None,
        room: Room | None,
        limits: Limits,
        lock_timeout: float = 10.0,
        settle: float = 0.1,
        needs: Needs = None,
    ) -> None:
        self.process, self.client, self.on_step, self.cancel = process, client, on_step, cancel
        self.room, self.limits = room or free_now, limits
        self.needs = needs or None  # none at all is not known: a context has bytes
        self.lock_timeout, self.settle = lock_timeout, settle
        self.parts: dict[str, float] = {}
        self.interruption: BaseException | None = None
        self.quiet = False
        """An interruption has been taken into account."""
        self.before: Mapping[str, Card] | None = None
        self.host: int | None = None

    def run(self, goal: Goal) -> Outcome:
        started = time.monotonic()
        course = Course(goal)
        while isinstance(course.next, Do):
            if self._cancelled():
                course = course.cancel()
            if isinstance(course.next, Do):
                course = course.after(self._taken(course.next, course))
        left, host = None, None
        if goal is Goal.OFF and course.next is End.SUSPENDED:
            left, host = self._left(), self._grown()
        assert isinstance(course.next, End)
        words = messages.advice(goal, course.next, course.why, self.process, course.state, stopped(self.process))
        seconds = time.monotonic() - started
        return Outcome(course.next, words, left, host, seconds, self.parts, course.why, self.interruption)

    def _cancelled(self) -> bool:
        return (self.interruption is not None and not self.quiet) or (self.cancel is not None and self.cancel.is_set())

    def _tell(self, step: str) -> None:
        if self.on_step is not None and self.interruption is None:
            self.on_step(step)

    def _taken(self, step: Do, course: Course) -> Answer:
        """Take the step. What interrupts it is kept, and its answer is unknown."""
        started = time.monotonic()
        name = "room" if step is Do.RESTORE else step.value
        try:
            self._tell(name)
            if step is Do.RESTORE:
                return self._restored()
            return self._done(step, course)
        except BaseException as error:
            self.interruption = self.interruption or error
            return Answer(None, trouble="interrupted")
        finally:
            if step is not Do.RESTORE:
                self._count(name, started)

    def _count(self, name: str, started: float) -> None:
        self.parts[name] = self.parts.get(name, 0.0) + time.monotonic() - started

    def _done(self, step: Do, course: Course) -> Answer:
        client, process, limits = self.client, self.process, self.limits
        if step is Do.ASK:
            return self._asked(course)
        if step is Do.LOCK:
            self.before, self.host = client.usage(), anonymous_bytes(process)
            if self.before is None:  # then nobody could tell whether there is room for it to come back
                return Answer(None, trouble="start", text=_NO_NVML.reason, fix=_NO_NVML.fix)
            if self.needs is None:
                self.needs = bytes_left.left(process.pid, self.before, None)
            return client.lock(process, max(1, round(1000 * self.lock_timeout)), self.lock_timeout + limits.lock)
        if step is Do.SETTLE:
            settling.wait(process.pid, self.settle, self.cancel)
            return Answer(0)
        if step is Do.CHECKPOINT:
            return client.checkpoint(process, limits.of_copy(self.needs))
        return client.unlock(process, limits.unlock)

    def _asked(self, course: Course) -> Answer:
        """The state, once the operation in progress has ended. Older drivers wait for that themselves."""
        until = time.monotonic() + (patience := self._patience(course))
        while True:
            answer = self.client.state(self.process, patience)
            if answer.state not in IN_PROGRESS or (course.goal is Goal.OFF and not course.touched):
                return answer
            if (patience := until - time.monotonic()) <= 0:
                return Answer(None, trouble="timeout")
            time.sleep(min(_AGAIN, patience))

    def _patience(self, course: Course) -> float:
        """Seconds for the state to be asked: it waits while an operation is under way, also of one who has died."""
        if stopped(self.process) or course.given_up or not (course.long or course.goal is Goal.ON):
            return self.limits.state
        if course.goal is Goal.OFF and course.why is not None and course.why.step is Do.LOCK:
            return self.lock_timeout + self.limits.lock
        return self._longest()

    def _longest(self) -> float:
        """Seconds that a copy may take."""
        size = anonymous_bytes(self.process) if self.needs is None else None
        return self.limits.of_copy(self.needs if size is None else {"": size})

    def _restored(self) -> Answer:
        """Wait for room, and restore within it. Until the restore begins, an interruption leaves it suspended."""
        begun = False
        started = time.monotonic()
        try:
            patience = self._longest()
            with (
                end_of_wait.end_of_wait(self.process, self.client, self.cancel, patience) as stop,
                self.room(self.process, self.needs, self.client, stop) as lacking,
            ):
                self._count("room", started)
                if self._cancelled():
                    return Answer(None, trouble="cancelled")
                if lacking is not None:
                    return Answer(None, trouble="room", text=lacking.reason, fix=lacking.fix)
                self._tell("restore")
                begun, started = True, time.monotonic()
                answer = self.client.restore(self.process, self.limits.of_copy(self.needs))
                self._count("restore", started)
                return answer
        except BaseException as error:
            self.interruption = self.interruption or error
            return Answer(None, trouble="interrupted" if begun else "cancelled")

    def _left(self) -> dict[str, int] | None:
        return bytes_left.left(self.process.pid, self.before, self.client.usage())

    def _grown(self) -> int | None:
        now = anonymous_bytes(self.process)
        return None if now is None or self.host is None else max(0, now - self.host)

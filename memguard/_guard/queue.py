"""Thread-safe reservations: compare-and-swap updates, waiting and wake-up.

`Reservations` are immutable. An update replaces the object by a compare-and-swap on its identity. A reservation is
removed when its `Ticket` is garbage-collected, so that an interrupted thread leaves no reservation behind.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from memguard._base.blocks import WITHIN
from memguard._base.locks import LockedRunner, LockOrder
from memguard._guard.reservations import EMPTY, Reservations, ended

_LOCK_TIMEOUT = 1.0
"""Seconds to wait for the lock while another thread runs a compare-and-swap, which normally takes microseconds."""
_numbers = itertools.count(1)


class Ticket:
    """The handle of one workload's reservation, from the start of the wait to the end of the workload's `with`
    block."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.ended = False
        self.created_by = thread_and_task()
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()  # `put` is safe in signal handlers
        self._wake: Callable[[], object] = functools.partial(self._woken.put, None)  # avoids a reference cycle

    def wake(self) -> None:
        """Make the workload retry its reservation. Callable on any thread, in a signal handler and in a finalizer."""
        with contextlib.suppress(RuntimeError):  # raised if the event loop is closed
            self._wake()

    def pause(self, seconds: float) -> None:
        """Block this thread until `wake`, for at most `seconds`."""
        with contextlib.suppress(queue.Empty):
            self._woken.get(timeout=seconds)
            while True:
                self._woken.get_nowait()

    async def pause_in_loop(self, seconds: float) -> None:
        """Like `pause`, without blocking the event loop."""
        import asyncio

        loop, event = asyncio.get_running_loop(), asyncio.Event()
        before, self._wake = self._wake, lambda: loop.call_soon_threadsafe(event.set)
        try:
            if self._woken.empty():  # skip the wait if `wake` was called already
                await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            pass
        finally:
            self._wake = before
            with contextlib.suppress(queue.Empty):
                while True:
                    self._woken.get_nowait()


class ReservationQueue:
    """The current reservations of one budget, and the tickets of its workloads."""

    def __init__(self) -> None:
        self.current: Reservations = EMPTY
        self._locked = LockedRunner(order=LockOrder.RESERVATIONS)
        self._tickets: dict[int, weakref.ref[Ticket]] = {}

    @property
    def idle(self) -> bool:
        """True if no workload holds or awaits a reservation."""
        return self.current is EMPTY

    def forked(self) -> None:
        """In a forked child, drop all reservations and replace the lock inherited from the parent."""
        self.current, self._locked, self._tickets = EMPTY, LockedRunner(order=LockOrder.RESERVATIONS), {}

    def ticket(self) -> Ticket:
        made = Ticket()
        self._tickets[made.number] = weakref.ref(made, functools.partial(self._collected, made.number))
        return made

    def replace(self, before: Reservations, after: Reservations) -> bool:
        """Compare-and-swap: replace `before` with `after`. Returns False if `before` is no longer current; the caller
        then reads again."""

        def put() -> bool:
            if self.current is before:  # CPython runs no signal handler before the assignment
                self.current = after
                return True
            return False

        return self._locked.run(put, _LOCK_TIMEOUT) == (True,)

    def prune(self) -> Reservations:
        """Remove reservations whose ticket has ended or was garbage-collected. Returns the remaining reservations."""
        while True:
            before = found = self.current
            for number in self._ended(found):
                found = ended(found, number)
            if found is before or self.replace(before, found):
                return found

    def pruned(self) -> Reservations:
        """The result that `prune` would return. Replaces nothing and takes no lock, because an allocation may call
        this method."""
        found = self.current
        for number in self._ended(found):
            found = ended(found, number)
        return found

    def leave(
        self,
        ticket: Ticket,
        read: Callable[[], dict[str, int | None]],
        before: Reservations = EMPTY,
        in_use: dict[str, int | None] | None = None,
    ) -> None:
        """End an active or waiting ticket, and wake the waiting tickets.

        `read` returns the bytes in use of the ticket's framework by GPU UUID. `in_use` is an earlier result of `read`,
        used if the reservations are still `before`.
        """
        leave(ticket)
        try:
            while ticket.number in (now := self.prune()).ids:
                found = in_use if in_use is not None and now is before else read()
                if self.replace(now, ended(now, ticket.number, found)):
                    break
        finally:
            ticket.ended = True
            self._tickets.pop(ticket.number, None)
            self.wake()

    def created_here(self, numbers: frozenset[int]) -> frozenset[int]:
        """The tickets among `numbers` that the current thread or task created, and which no other thread or task
        ends."""
        own, found = thread_and_task(), set()
        for number in numbers:
            ticket = known() if (known := self._tickets.get(number)) is not None else None
            if ticket is not None and ticket.created_by == own:
                found.add(number)
        return frozenset(found)

    def wake(self) -> None:
        """Wake all waiting tickets, because memory may have become free."""
        for reservation in self.current.waiting:
            found = self._tickets.get(reservation.id)
            if found is not None and (ticket := found()) is not None:
                ticket.wake()

    def _ended(self, reservations: Reservations) -> list[int]:
        dead = []
        for reservation in (*reservations.active, *reservations.waiting):
            found = self._tickets.get(reservation.id)
            ticket = found() if found is not None else None
            if ticket is None or ticket.ended:
                dead.append(reservation.id)
        return dead

    def _collected(self, number: int, _: Any) -> None:
        """Weak-reference callback: wake waiting tickets, because the collected ticket's block may have been interrupted
        before `leave`."""
        self._tickets.pop(number, None)
        if self.current is not EMPTY:
            self.wake()


def enclosing_tickets() -> frozenset[int]:
    """The numbers of the tickets whose `with` blocks enclose the running code. Some of these tickets may have ended."""
    return WITHIN.get()


def enter(ticket: Ticket, enclosing: frozenset[int]) -> None:
    """Mark the running code as inside the ticket's block. `enclosing`: the numbers of the enclosing tickets that have
    not ended."""
    WITHIN.set(enclosing | {ticket.number})


def leave(ticket: Ticket) -> None:
    """Undo `enter`. Does not use `ContextVar.reset`, which raises if a generator is closed in another context."""
    found = WITHIN.get()
    if ticket.number in found:
        WITHIN.set(found - {ticket.number})


def thread_and_task() -> tuple[int, int]:
    """The ids of the current thread and the current asyncio task; 0 without a task."""
    task = _task()
    return threading.get_ident(), 0 if task is None else id(task)


def owner_name() -> str:
    """The name of the current asyncio task; without a task, of the current thread."""
    task = _task()
    return f"thread {threading.current_thread().name}" if task is None else f"task {task.get_name()}"


def _task() -> Any:
    if "asyncio" not in sys.modules:
        return None
    try:
        return sys.modules["asyncio"].current_task()
    except RuntimeError:  # no event loop runs on this thread
        return None

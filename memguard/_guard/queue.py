"""Thread-safe reservations: compare-and-swap updates, waiting and wake-up.

`Reservations` are never changed, only replaced, if they are still the object that was looked at. A reservation lives as
long as its `Ticket`: whatever interrupts the thread that has it, nothing stays reserved.
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
from memguard._base.locks import Rank, Turn
from memguard._guard import reservations
from memguard._guard.reservations import EMPTY, Reservations

_PATIENCE = 1.0
"""Seconds to wait for another thread that replaces the reservations, which takes no time."""
_numbers = itertools.count(1)


class Ticket:
    """The place of one workload among the reservations: it waits, and then it holds."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.over = False
        self.here = whereabouts()
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()  # its `put` may be called anywhere
        self._wake: Callable[[], object] = functools.partial(self._woken.put, None)  # no circle: it is to go at once

    def wake(self) -> None:
        """Have it look again. Any thread, also in a signal handler or a finalizer."""
        with contextlib.suppress(RuntimeError):  # its event loop is closed
            self._wake()

    def pause(self, seconds: float) -> None:
        """Wait on this thread until it is woken, or for that long."""
        with contextlib.suppress(queue.Empty):
            self._woken.get(timeout=seconds)
            while True:
                self._woken.get_nowait()

    async def pause_in_loop(self, seconds: float) -> None:
        """The same without blocking the event loop."""
        import asyncio

        loop, event = asyncio.get_running_loop(), asyncio.Event()
        before, self._wake = self._wake, lambda: loop.call_soon_threadsafe(event.set)
        try:
            if self._woken.empty():  # else it was woken before this
                await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            pass
        finally:
            self._wake = before
            with contextlib.suppress(queue.Empty):
                while True:
                    self._woken.get_nowait()


class ReservationQueue:
    """The reservations of one budget, which threads replace and wait for."""

    def __init__(self) -> None:
        self.current: Reservations = EMPTY
        self._turn = Turn(rank=Rank.RESERVATIONS)
        self._tickets: dict[int, weakref.ref[Ticket]] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing is reserved, and nobody waits."""
        return self.current is EMPTY

    def forked(self) -> None:
        """In a forked child: nothing is reserved, and no lock of the parent's is waited for."""
        self.current, self._turn, self._tickets = EMPTY, Turn(rank=Rank.RESERVATIONS), {}

    def ticket(self) -> Ticket:
        made = Ticket()
        self._tickets[made.number] = weakref.ref(made, functools.partial(self._gone, made.number))
        return made

    def replace(self, before: Reservations, after: Reservations) -> bool:
        """Put `after` in the place of `before`. False if that is not in force any more: look again."""

        def put() -> bool:
            if self.current is before:  # no signal handler comes between this and the next line
                self.current = after
                return True
            return False

        return self._turn.take(put, _PATIENCE) == (True,)

    def settled(self) -> Reservations:
        """The reservations without those that are over, or whose ticket is gone."""
        while True:
            before = book = self.current
            for number in self._dead(book):
                book = reservations.ended(book, number)
            if book is before or self.replace(before, book):
                return book

    def view(self) -> Reservations:
        """As `settled`, and changes nothing: for calls within an allocation."""
        book = self.current
        for number in self._dead(book):
            book = reservations.ended(book, number)
        return book

    def leave(
        self,
        ticket: Ticket,
        read: Callable[[], dict[str, int | None]],
        before: Reservations = EMPTY,
        in_use: dict[str, int | None] | None = None,
    ) -> None:
        """End it, whether it holds or waits, and have the others look. `read` reads what its framework has in use, by
        UUID. `in_use` was read already, when the reservations were `before`.
        """
        leave(ticket)
        try:
            while ticket.number in (now := self.settled()).ids:
                found = in_use if in_use is not None and now is before else read()
                if self.replace(now, reservations.ended(now, ticket.number, found)):
                    break
        finally:
            ticket.over = True
            self._tickets.pop(ticket.number, None)
            self.wake()

    def here(self, numbers: frozenset[int]) -> frozenset[int]:
        """Those of the tickets that this thread, or the task on it, got itself: it can end no other one."""
        own, found = whereabouts(), set()
        for number in numbers:
            ticket = known() if (known := self._tickets.get(number)) is not None else None
            if ticket is not None and ticket.here == own:
                found.add(number)
        return frozenset(found)

    def wake(self) -> None:
        """Have all that wait look again: something may have become free."""
        for entry in self.current.waiting:
            found = self._tickets.get(entry.id)
            if found is not None and (ticket := found()) is not None:
                ticket.wake()

    def _dead(self, book: Reservations) -> list[int]:
        dead = []
        for entry in (*book.active, *book.waiting):
            found = self._tickets.get(entry.id)
            ticket = found() if found is not None else None
            if ticket is None or ticket.over:
                dead.append(entry.id)
        return dead

    def _gone(self, number: int, _: Any) -> None:
        """A ticket was dropped. Perhaps it was never left: its block was interrupted, or given up without an end."""
        self._tickets.pop(number, None)
        if self.current is not EMPTY:
            self.wake()


def within() -> frozenset[int]:
    """The numbers of the tickets whose blocks this code runs within; some may be over."""
    return WITHIN.get()


def enter(ticket: Ticket, mine: frozenset[int]) -> None:
    """From here on the code runs within that ticket's block too. `mine` are those of the others that are not over."""
    WITHIN.set(mine | {ticket.number})


def leave(ticket: Ticket) -> None:
    """Without `ContextVar.reset`, which refuses another context: a generator may be closed in one."""
    found = WITHIN.get()
    if ticket.number in found:
        WITHIN.set(found - {ticket.number})


def whereabouts() -> tuple[int, int]:
    """This thread, and the task that runs on it; 0 if none does."""
    task = _task()
    return threading.get_ident(), 0 if task is None else id(task)


def who() -> str:
    """This thread, or the task that runs on it, in words."""
    task = _task()
    return f"thread {threading.current_thread().name}" if task is None else f"task {task.get_name()}"


def _task() -> Any:
    if "asyncio" not in sys.modules:
        return None
    try:
        return sys.modules["asyncio"].current_task()
    except RuntimeError:  # no event loop runs here
        return None

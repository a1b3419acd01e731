"""Re-entrant locks that stay consistent if a signal handler or a finalizer interrupts their owner; and their order."""

from __future__ import annotations

import os
import sys
import threading
from _thread import RLock
from collections.abc import Callable
from enum import IntEnum
from types import FrameType
from typing import Any, TypeVar

from memguard._base.advice import MemguardError

T = TypeVar("T")
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_WITHIN = 2.0
"""Seconds that a call waits for another thread, if that may be waiting for the call that this one interrupted."""
_LOOK = 0.05
"""Seconds from one look to the next, meanwhile, whether it is."""
_patient: list[int] = []
"""Threads that wait in a call that interrupted another one."""
_awaited: list[int] = []
"""Threads that another thread waits for by `awaiting`, perhaps with a lock of its own."""


class Rank(IntEnum):
    """The lock order, outermost first: a thread that has one of these locks may wait only for locks of later ranks.

    Not for a lock that it has already. A try that does not wait may be made in any order, and so may a call that
    interrupted another one on its thread: `InterruptSafeLock` bounds its wait.
    """

    SUSPENSION = 1
    """`_node.suspend.own`: one suspension or resumption of this process at a time. Its holder waits for the thread that
    carries it out, which takes the others."""
    RUNTIME = 2
    """`api`: `init` and `shutdown`."""
    GUARD = 3
    """`CapTable.lock`: caps change, and caches are trimmed."""
    READER = 4
    """`LedgerReader`: readings that charge something. Never taken within an allocation."""
    ALLOCATOR = 5
    """The allocator of a framework. It lets go before it asks the guard for room."""
    RESERVATIONS = 6
    """`ReservationQueue`: one compare-and-swap."""
    DRIFT = 7
    """`CapTable.noting`: what changed of a cap is noted."""
    TIMELINE = 8
    """`Writer`: one line of the timeline."""


check_order: Callable[[Any, Rank], Any] | None = None
"""Set by a test before the locks are made: it returns a lock that checks the order, in place of the one it is given."""


def ranked(lock: Any, rank: Rank) -> Any:
    """The lock, which has that place in the order."""
    return lock if check_order is None else check_order(lock, rank)


def interrupting() -> bool:
    """Whether this call came within another call of memguard on this thread: from a signal handler, a finalizer or a
    callback. That call may have locks, which other threads wait for.
    """
    frame: FrameType | None = sys._getframe(1)
    outside = False
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_HERE):
            outside = True
        elif outside:
            return True
        frame = frame.f_back
    return False


class InterruptSafeLock(RLock):  # type: ignore[misc]  # final for type checkers only
    """The lock of a public call, as `with lock:`. Entering it raises MemguardError where it could wait for ever.

    That is where this call interrupted another memguard call on this thread: the other one may have a lock for which
    the thread that has this one waits. Such a call waits a bounded time, in the acquisition itself: a look at the lock
    before an unbounded `with` would let another thread take it in between.

    `__exit__` is that of `RLock`, in C: an interruption cannot come between the end of the block and the release. The
    inherited `acquire` is for callers that give a timeout.
    """

    _is_owned: Callable[[], bool]

    def __enter__(self) -> bool:  # type: ignore[override]  # declared as `acquire` there
        if self._is_owned():
            # After a call Python may run a signal handler, whose exception would leave it acquired. Unpacking is none.
            (taken,) = map(_acquire, (self,))
            return taken
        try:
            if self.acquire(False) or (self._in_time() if interrupting() else self.acquire()):
                return True
            raise MemguardError(
                "this call could deadlock: it interrupted another memguard call on this thread, and a second thread "
                "holds memguard's lock",
                fix="do not call it in a signal handler, a finalizer or a callback; memguard.ledger() may be",
            )
        except BaseException:  # a Ctrl-C may have come right after the acquisition
            try:
                _leave(self)
            finally:
                _leave(self)
            raise

    def _in_time(self) -> bool:
        """One wait at a time on each thread: under a storm of signals, waits within waits would add up to minutes."""
        thread = threading.get_ident()
        if thread in _patient:
            return False
        try:
            _patient.append(thread)
            for _ in range(max(round(_WITHIN / _LOOK), 1)):
                if thread in _awaited:
                    return self.acquire(False)
                if self.acquire(timeout=_LOOK):
                    return True
            return False
        finally:
            if thread in _patient:
                _patient.remove(thread)


_acquire = RLock.acquire


def awaiting(thread: int, wait: Callable[..., T], *given: Any) -> T:
    """`wait(*given)`, which waits for that thread. What interrupted its work does not wait for this one meanwhile."""
    try:
        _awaited.append(thread)
        return wait(*given)
    finally:
        if thread in _awaited:
            _awaited.remove(thread)


def free(lock: Any, seconds: float) -> bool:
    """Whether this thread has the lock, or could have it within that time."""
    if lock._is_owned():
        return True
    try:
        try:
            return bool(lock.acquire(timeout=seconds))
        finally:
            _leave(lock)
    finally:
        _leave(lock)


def _leave(lock: Any) -> None:
    if lock._is_owned():
        lock.release()


class Turn:
    """A re-entrant lock for work that is handed in, so that a Ctrl-C at any point leaves it free.

    `lock` is one that others take by themselves; without it, one of its own of that rank.
    """

    def __init__(self, lock: Any = None, rank: Rank | None = None) -> None:
        own = threading.RLock() if lock is None else lock
        self._lock: Any = own if rank is None else ranked(own, rank)

    @property
    def mine(self) -> bool:
        """Whether this thread has it: the caller was called within the work, by a signal handler or a finalizer."""
        return bool(self._lock._is_owned())

    def take(self, work: Callable[..., T], patience: float, *given: Any) -> tuple[T] | None:
        """Do the work while no other thread does any. What `work(*given)` returns, in a tuple.

        None if another thread's work takes longer than `patience` seconds.
        """
        lock = self._lock
        if lock._is_owned():
            return (work(*given),)
        try:
            try:
                return (work(*given),) if lock.acquire(timeout=patience) else None
            finally:  # as `_leave`, without the call: each reading comes here
                if lock._is_owned():
                    lock.release()
        finally:
            if lock._is_owned():  # again: a Ctrl-C may have come into the one before
                lock.release()

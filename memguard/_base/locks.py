"""Re-entrant locks that stay consistent if a signal handler or finalizer interrupts their owner; and the lock order."""

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
"""Seconds that an interrupting call waits for a thread that may itself wait for the interrupted call."""
_LOOK = 0.05
"""Seconds between two checks for such a deadlock during that wait."""
_patient: list[int] = []
"""Threads that wait in a call that interrupted another memguard call."""
_awaited: list[int] = []
"""Threads for which another thread waits in `awaiting`, perhaps while holding a lock."""


class LockOrder(IntEnum):
    """The lock order, outermost first: a thread that holds one of these locks may wait only for later ones.

    It may not wait for a lock that it holds. A non-blocking attempt may be made in any order, and so may an attempt by
    a call that interrupted another memguard call on its thread: `InterruptSafeLock` bounds its wait. Locks that are not
    listed (NVML's, the shared pool's, the leases') are leaf locks: code that holds one must not wait for another lock
    of memguard.
    """

    SUSPENSION = 1
    """`_node.suspend.self_suspend`: one suspension or resumption of this process at a time. Its holder waits for the
    worker thread of the suspension, which takes the other locks."""
    RUNTIME = 2
    """`Runtime.lock`: `init` and `shutdown`."""
    GUARD = 3
    """`CapTable.lock`: cap changes and trims."""
    READER = 4
    """`LedgerReader`: readings that attribute overhead. Never taken within an allocation."""
    ALLOCATOR = 5
    """The allocator of a framework. It releases its lock before it requests room from the guard."""
    RESERVATIONS = 6
    """`ReservationQueue`: one compare-and-swap."""
    DRIFT = 7
    """`CapTable.drift_locked`: records drift of a cap."""
    TIMELINE = 8
    """`Writer`: one line of the timeline."""


check_order: Callable[[Any, LockOrder], Any] | None = None
"""A test sets this before the locks are created: it wraps a lock in a lock that checks the order."""


def ordered(lock: Any, order: LockOrder) -> Any:
    """Set the lock's place in the lock order, and return the lock."""
    return lock if check_order is None else check_order(lock, order)


def interrupting() -> bool:
    """Whether this call interrupted another memguard call on this thread: from a signal handler, a finalizer or a
    callback. The interrupted call may hold locks for which other threads wait.
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
    """The lock of a public call, as `with lock:`. Entering it raises MemguardError if it could deadlock: this call
    interrupted another memguard call on this thread, and that call may hold a lock for which this lock's owner waits.
    Such a call waits a bounded time within the acquisition itself. To test the lock first and then enter an unbounded
    `with` would let another thread take it in between.

    `__exit__` is `RLock.__exit__`, in C: no interruption can come between the end of the block and the release. The
    inherited `acquire` is for callers that give a timeout.
    """

    _is_owned: Callable[[], bool]

    def __enter__(self) -> bool:  # type: ignore[override]  # declared as `acquire` there
        if self._is_owned():
            # After a call Python may run a signal handler, which may raise with the lock held. Unpacking is no call.
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
        except BaseException:  # a Ctrl-C may have interrupted right after the acquisition
            try:
                _leave(self)
            finally:
                _leave(self)
            raise

    def _in_time(self) -> bool:
        """Wait for the lock, at most one wait at a time on each thread: with many signals, nested waits would add up to
        minutes."""
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
    """Return `wait(*given)`, which waits for `thread`. During the wait, a call that interrupts the work of `thread`
    does not wait for this thread."""
    try:
        _awaited.append(thread)
        return wait(*given)
    finally:
        if thread in _awaited:
            _awaited.remove(thread)


def free(lock: Any, seconds: float) -> bool:
    """Whether this thread holds the lock, or can acquire it within `seconds`."""
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


class LockedRunner:
    """A re-entrant lock that runs a function while held, so that a Ctrl-C at any point leaves it free.

    `lock` is a lock that other code also takes directly; without it, a new lock with the place `order`.
    """

    def __init__(self, lock: Any = None, order: LockOrder | None = None) -> None:
        own = threading.RLock() if lock is None else lock
        self._lock: Any = own if order is None else ordered(own, order)

    @property
    def held_here(self) -> bool:
        """Whether this thread holds the lock: a signal handler or finalizer made this call during the work."""
        return bool(self._lock._is_owned())

    def run(self, work: Callable[..., T], timeout: float, *given: Any) -> tuple[T] | None:
        """Run `work(*given)` with the lock held. Returns its result in a tuple.

        Returns None if another thread holds the lock for more than `timeout` seconds.
        """
        lock = self._lock
        if lock._is_owned():
            return (work(*given),)
        try:
            try:
                return (work(*given),) if lock.acquire(timeout=timeout) else None
            finally:  # the body of `_leave` without the call: every path runs it
                if lock._is_owned():
                    lock.release()
        finally:
            if lock._is_owned():  # true if a Ctrl-C interrupted the release above
                lock.release()

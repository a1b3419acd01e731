"""The lock order, and re-entrant locks that stay consistent if a signal handler or finalizer interrupts their owner."""

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
"""Seconds that a call waits for a lock if the call interrupted another memguard call. An unbounded wait could deadlock,
because the lock's owner may wait for the interrupted call."""
_LOOK = 0.05
"""Seconds between two deadlock checks while a call waits up to `_WITHIN`."""
_patient: list[int] = []
"""Ids of threads on which a call that interrupted another memguard call waits for a lock."""
_awaited: list[int] = []
"""Ids of threads that another thread waits for in `awaiting`. The waiting thread may hold an `InterruptSafeLock`, so a
memguard call that interrupts a listed thread does not wait for such a lock."""


class LockOrder(IntEnum):
    """The lock order, outermost first: a thread that holds one of these locks may wait only for later ones.

    No thread may wait for a lock that it already holds. Non-blocking attempts are allowed in any order. So are waits by
    a call that interrupted another memguard call, because `InterruptSafeLock` bounds them. Locks not listed (NVML's,
    the shared pool's, the leases') are leaf locks: code that holds one must not wait for another lock of memguard.
    """

    SUSPENSION = 1
    """The lock of `_node.suspend.self_suspend`, held during a suspension or resumption of this process. The holder
    waits for the suspension's worker thread, which acquires other locks of this list."""
    RUNTIME = 2
    """`Runtime.lock`, held during `init` and `shutdown`."""
    GUARD = 3
    """`CapTable.lock`, held during cap changes and trims."""
    READER = 4
    """The lock of `LedgerReader`, held while memory is attributed to overhead. Never acquired within an allocation."""
    ALLOCATOR = 5
    """The lock of a framework's allocator, which releases it before requesting memory from the guard."""
    RESERVATIONS = 6
    """The lock of `ReservationQueue`, held for one compare-and-swap."""
    DRIFT = 7
    """`CapTable.drift_locked`, held while `CapTable` records that other code changed a cap."""
    TIMELINE = 8
    """The lock of `Writer`, held while it writes one line of the timeline."""


check_order: Callable[[Any, LockOrder], Any] | None = None
"""Wraps a lock in a lock that checks the lock order. Set by tests before memguard's locks are created."""


def ordered(lock: Any, order: LockOrder) -> Any:
    """Return `lock`; in tests, wrapped in a lock that checks that threads follow the lock order."""
    return lock if check_order is None else check_order(lock, order)


def interrupting() -> bool:
    """True if a signal handler, finalizer or callback made this call during another memguard call on this thread. The
    interrupted call may hold locks for which other threads wait.
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
    """The lock that a public call holds: `with lock:`. If the call interrupted another memguard call on this thread,
    waiting could deadlock, because this lock's owner may wait for a lock that the interrupted call holds. Such a call
    waits only a bounded time, and then raises MemguardError. The acquisition itself has this timeout. To
    test the lock before an unbounded `with` is unsafe, because another thread could acquire the lock in between.

    `__exit__` is `RLock.__exit__`, which is C code: no interruption can come between the end of the block and the
    release. The inherited `acquire` is for callers that give a timeout.
    """

    _is_owned: Callable[[], bool]

    def __enter__(self) -> bool:  # type: ignore[override]  # typeshed declares it as `acquire`
        if self._is_owned():
            # `map` acquires in C: after a call in Python code a signal handler could run and raise with the lock held.
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
        """Wait up to `_WITHIN` for the lock; True if acquired. A nested call on the same thread does not wait, because
        with many signals the nested waits would add up to minutes."""
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
    """Return `wait(*given)`, which waits for `thread`. Meanwhile a memguard call that interrupts `thread` waits for no
    `InterruptSafeLock`, because the calling thread may hold it."""
    try:
        _awaited.append(thread)
        return wait(*given)
    finally:
        if thread in _awaited:
            _awaited.remove(thread)


def free(lock: Any, seconds: float) -> bool:
    """True if this thread holds the lock, or can acquire it within `seconds`. Does not keep a lock that it acquired."""
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
    """Runs functions with a re-entrant lock held, and releases the lock even if a Ctrl-C interrupts at any point.

    `lock` is for a lock that other code also acquires directly; by default a new lock is created. `order` is the lock's
    position in the lock order.
    """

    def __init__(self, lock: Any = None, order: LockOrder | None = None) -> None:
        own = threading.RLock() if lock is None else lock
        self._lock: Any = own if order is None else ordered(own, order)

    @property
    def held_here(self) -> bool:
        """True if this thread holds the lock, as when a signal handler or finalizer makes this call during `run`."""
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
            finally:  # `_leave(lock)`, inlined
                if lock._is_owned():
                    lock.release()
        finally:
            if lock._is_owned():  # true if a Ctrl-C interrupted the release above
                lock.release()

"""A lock that a signal handler or a finalizer may want while this thread has it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from memguard.errors import MemguardError

T = TypeVar("T")
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_WITHIN = 2.0
"""Seconds that a call waits for another thread, if that may be waiting for the call that this one interrupted."""
_LOOK = 0.05
"""Seconds from one look to the next, meanwhile, whether it is."""
_patient: list[int] = []
"""Threads that wait in `not_for_ever`."""
_awaited: list[int] = []
"""Threads that another thread waits for by `awaiting`, perhaps with a lock of its own."""


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


def not_for_ever(lock: Any) -> None:
    """Before `with lock` in a public call: raise MemguardError if the threads would wait for each other.

    Another thread has the lock, and this call interrupted one that may have a lock which that thread waits for.
    """
    if not free(lock, 0) and interrupting() and not _free_in_time(lock):
        raise MemguardError(
            "another thread is within a call of memguard, and this one was made within another on this thread, so "
            "that they may wait for each other\n"
            "    fix: do not call it in a signal handler, a finalizer or a callback; memguard.ledger() may be"
        )


def _free_in_time(lock: Any) -> bool:
    """One wait at a time on each thread: under a storm of signals, waits within waits would add up to minutes."""
    thread = threading.get_ident()
    if thread in _patient:
        return False
    try:
        _patient.append(thread)
        for _ in range(max(round(_WITHIN / _LOOK), 1)):
            if thread in _awaited:
                return free(lock, 0)
            if free(lock, _LOOK):
                return True
        return False
    finally:
        if thread in _patient:
            _patient.remove(thread)


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

    `lock` is one that others take by themselves.
    """

    def __init__(self, lock: Any = None) -> None:
        self._lock: Any = threading.RLock() if lock is None else lock

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

"""A lock that a signal handler or a finalizer may want while this thread has it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Turn:
    """A re-entrant lock for work that is handed in, so that a Ctrl-C at any point leaves it free."""

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()

    @property
    def mine(self) -> bool:
        """Whether this thread has it: the caller was called within the work, by a signal handler or a finalizer."""
        return bool(self._lock._is_owned())

    def take(self, work: Callable[[], object], patience: float) -> bool:
        """Do the work while no other thread does any. False if another one's takes longer than `patience` seconds."""
        if self.mine:
            work()
            return True
        try:
            try:
                if not self._lock.acquire(timeout=patience):
                    return False
                work()
                return True
            finally:
                self._leave()
        finally:
            self._leave()  # again: a Ctrl-C may have come into the one before

    def _leave(self) -> None:
        if self._lock._is_owned():
            self._lock.release()

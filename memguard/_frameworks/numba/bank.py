"""Which of Numba's contexts share the cap of a GPU."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from memguard._base.locks import Rank, ranked


class Bank:
    """The capped managers of one GPU, whose contexts share its cap.

    Who allocates has the lock, also while the GPU is waited for. So readings do not wait for it.
    """

    def __init__(self) -> None:
        self.lock: Any = ranked(threading.RLock(), Rank.ALLOCATOR)
        self.members: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that have allocated since their last reset."""
        self.single = True

    def add(self, manager: Any) -> None:
        self.members.add(manager)
        self.single = len(self.members) == 1

    def remove(self, manager: Any) -> None:
        self.members.discard(manager)
        self.single = len(self.members) <= 1

    def all(self) -> list[Any]:
        """The members, also while another thread adds one."""
        while True:
            try:
                return list(self.members)
            except RuntimeError:  # it changed while it was looked through
                continue

    def elsewhere(self, manager: Any) -> int:
        """The bytes that the other contexts of the GPU hold."""
        if self.single:
            return 0
        return sum(other.held() for other in self.all() if other is not manager)

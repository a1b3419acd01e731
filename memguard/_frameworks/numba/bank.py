"""The contexts of Numba that share a GPU's cap."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from memguard._base.locks import Rank, ranked


class Bank:
    """The capped managers of one GPU, whose contexts share its cap.

    An allocating thread holds the lock, even while it synchronises the GPU. So readings do not take it.
    """

    def __init__(self) -> None:
        self.lock: Any = ranked(threading.RLock(), Rank.ALLOCATOR)
        self.members: weakref.WeakSet[Any] = weakref.WeakSet()
        """The managers that have allocated since their last reset."""
        self.single = True

    def add(self, manager: Any) -> None:
        self.members.add(manager)
        self.single = len(self.members) == 1

    def remove(self, manager: Any) -> None:
        self.members.discard(manager)
        self.single = len(self.members) <= 1

    def all(self) -> list[Any]:
        """The members, safe while another thread adds one."""
        while True:
            try:
                return list(self.members)
            except RuntimeError:  # another thread changed it during the iteration
                continue

    def elsewhere(self, manager: Any) -> int:
        """The bytes that the other contexts of the GPU hold."""
        if self.single:
            return 0
        return sum(other.held() for other in self.all() if other is not manager)

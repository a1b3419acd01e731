"""What Numba holds on one GPU: in each of its contexts, and in all of them, which share the cap."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from memguard._frameworks.driver_pages import DriverPages, slabs
from memguard._frameworks.numba.pool import Block


class Bank:
    """The capped managers of one GPU, whose contexts share its cap."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.members: weakref.WeakSet[Any] = weakref.WeakSet()
        """Those that have allocated since their last reset."""
        self.single = True

    def add(self, manager: Any) -> None:
        self.members.add(manager)
        self.single = len(self.members) == 1

    def elsewhere(self, manager: Any) -> int:
        """The bytes that the other contexts of the GPU hold."""
        return sum(other.held() for other in list(self.members) if other is not manager)


class Figures:
    """What one manager holds, in bytes. Call with the lock held; only `log` may be appended to without it."""

    def __init__(self, uuid: str) -> None:
        self.pages = DriverPages(slabs[uuid])
        self.in_use = self.peak = 0
        self.log: deque[tuple[Callable[[Block, int], None], Block, int]] = deque()
        self._resting: dict[Block, None] = {}  # those that no array has: their free is pending, or they are pooled
        self._reclaimable: int | None = None  # None: it has to be added up
        self._applying = False

    def apply(self) -> None:
        if self._applying:
            return
        self._applying = True
        log = self.log
        try:
            while log:
                step, block, size = log.popleft()
                step(block, size)
        finally:
            self._applying = False

    # What the log is made of: `size` is what the array asked for, as it was then.

    def taken(self, block: Block, size: int) -> None:
        self.pages.add(block.address, block.size)
        self.used(block, size)

    def used(self, block: Block, size: int) -> None:
        self._resting.pop(block, None)
        self._reclaimable = None
        self.in_use += size
        if self.in_use > self.peak:
            self.peak = self.in_use

    def left(self, block: Block, size: int) -> None:
        self._resting[block] = None
        self._reclaimable = None
        self.in_use -= size

    def gone(self, block: Block, size: int) -> None:
        self._resting.pop(block, None)
        self._reclaimable = None
        self.pages.gone(block.address, block.size)

    def reclaimable(self) -> int:
        if self._reclaimable is None:
            self._reclaimable = self.pages.returned_by((block.address, block.size) for block in self._resting)
        return self._reclaimable

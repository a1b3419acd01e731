"""Counts the bytes that Numba holds: in one context (`Figures`), and in all that share a GPU's cap (`Bank`)."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

from memguard._base.locks import LockOrder, ordered
from memguard._base.units import round_up
from memguard._frameworks.driver_pages import DriverPages, slabs
from memguard._frameworks.numba.pool import PENDING, USED, Block, Taker


class Figures:
    """The bytes of one manager. Callers hold the lock, except for `left` and `freed`.

    `left` and `used` are atomic, as they make no calls: a request of a finalizer or a signal handler finds consistent
    figures. The next `apply` counts the blocks that the driver freed.
    """

    def __init__(self, uuid: str) -> None:
        self.pages = DriverPages(slabs[uuid])
        self.in_use = self.peak = 0
        self.blocks: dict[Block, None] = {}
        """All blocks counted in `pages`."""
        self.freed: deque[tuple[Any, Block]] = deque()
        """Blocks that the driver freed, each after the driver's result."""
        self._resting: dict[Block, None] = {}  # blocks without an array: their free is pending, or they are pooled
        self._changes = 0
        self._reclaimable = (0, 0)  # the number of changes at the last sum, and the sum

    def taken(self, block: Block) -> None:
        """Count a block that the driver has allocated."""
        pages, size = self.pages, block.size
        whole_pages = round_up(size)
        # No call in between, so a Ctrl-C finds all of it or nothing.
        self.blocks[block] = None
        pages.coming += whole_pages
        pages.changes.append((pages.adding, block.address, size))
        pages.settle()

    def used(self, block: Block, size: int) -> None:
        """Count the block's array of `size` bytes."""
        block.state = USED
        block.asked = size
        self.in_use += size
        self._changes += 1
        if self.in_use > self.peak:
            self.peak = self.in_use
        self._resting.pop(block, None)

    def left(self, block: Block, memory: Taker | None) -> bool:
        """Count the end of a block's array: the block's free is pending. False if it had no array.

        Atomically marks the array's `memory` as freed: the block may soon belong to another array.
        """
        if block.state is USED:
            if memory is not None:
                memory._freed = True
            block.state = PENDING
            self.in_use -= block.asked
            block.asked = 0
            self._resting[block] = None
            self._changes += 1
            return True
        return False

    def apply(self) -> None:
        """Count the blocks that the driver freed."""
        freed, pages = self.freed, self.pages
        try:
            while freed:
                entry = freed[0]
                block = entry[1]
                self._resting.pop(block, None)
                if block in self.blocks:  # else a signal handler counted it first
                    del self.blocks[block]
                    self._changes += 1
                    pages.changes.append((pages.leaving, block.address, block.size))
                    pages.settle()
                if freed[0] is entry:
                    freed.popleft()
        except IndexError:
            pass
        if pages.changes:  # from an interruption by Ctrl-C
            pages.settle()

    def settle(self, lock: Any) -> None:
        """`apply` for a reading: only if the lock is free."""
        got: list[bool] = []
        try:
            got.extend(map(lock.acquire, (False,)))  # one call: a Ctrl-C finds it recorded
            if got[0]:
                self.apply()
        finally:
            if got and got[0]:
                lock.release()

    def reclaimable(self) -> int:
        changes, found = self._reclaimable
        if changes != self._changes:
            changes = self._changes
            found = self.pages.returned_by([(block.address, block.size) for block in list(self._resting)])
            self._reclaimable = changes, found
        return found


class Bank:
    """The capped managers of one GPU, whose contexts share its cap.

    An allocating thread holds the lock, even while it synchronises the GPU. So readings do not take it.
    """

    def __init__(self) -> None:
        self.lock: Any = ordered(threading.RLock(), LockOrder.ALLOCATOR)
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

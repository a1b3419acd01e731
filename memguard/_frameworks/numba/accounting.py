"""Counts Numba's device memory: in one context (`Figures`), and in all contexts of a GPU (`ManagerGroup`)."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Any

from memguard._base.locks import LockOrder, ordered
from memguard._base.units import round_up
from memguard._frameworks.driver_pages import DriverPages, slabs
from memguard._frameworks.numba.pool import PENDING, USED, Block, BlockOwner


class Figures:
    """The byte counts of one memory manager. Callers hold the lock, except for `count_ended` and appends to `freed`.

    `count_ended` and `count_used` make no call between their changes of the counts, hence are atomic, so a finalizer or
    signal handler that allocates reads consistent counts. Blocks that the driver freed are counted until the next
    `apply`.
    """

    def __init__(self, uuid: str) -> None:
        self.pages = DriverPages(slabs[uuid])
        self.in_use = self.peak = 0
        self.blocks: dict[Block, None] = {}
        """All blocks that `pages` counts, as keys."""
        self.freed: deque[tuple[Any, Block]] = deque()
        """The driver's result and the block, for each block that was freed and that `apply` has not yet removed."""
        self._resting: dict[Block, None] = {}  # blocks without an array: their free is pending, or they are pooled
        self._changes = 0
        self._reclaimable = (0, 0)  # `_changes` when `reclaimable` was last computed, and the result

    def count_allocated(self, block: Block) -> None:
        """Count a block that the driver has just allocated."""
        pages, size = self.pages, block.size
        whole_pages = round_up(size)
        # No call before `changes.append`, so that a Ctrl-C cannot separate these changes.
        self.blocks[block] = None
        pages.queued += whole_pages
        pages.changes.append((pages.apply_add, block.address, size))
        pages.apply_changes()

    def count_used(self, block: Block, size: int) -> None:
        """Record that an array of `size` bytes uses the block."""
        block.state = USED
        block.requested = size
        self.in_use += size
        self._changes += 1
        if self.in_use > self.peak:
            self.peak = self.in_use
        self._resting.pop(block, None)

    def count_ended(self, block: Block, memory: BlockOwner | None) -> bool:
        """Record that the block's array was freed, so that the block's free is pending. False if the block had
        no array.

        Sets `memory._freed` of the array in the same uninterruptible step, because another array may soon use the
        block.
        """
        if block.state is USED:
            if memory is not None:
                memory._freed = True
            block.state = PENDING
            self.in_use -= block.requested
            block.requested = 0
            self._resting[block] = None
            self._changes += 1
            return True
        return False

    def apply(self) -> None:
        """Stop counting the blocks that the driver freed."""
        freed, pages = self.freed, self.pages
        try:
            while freed:
                entry = freed[0]
                block = entry[1]
                self._resting.pop(block, None)
                if block in self.blocks:  # a signal handler may have removed the block
                    del self.blocks[block]
                    self._changes += 1
                    pages.changes.append((pages.apply_remove, block.address, block.size))
                    pages.apply_changes()
                if freed[0] is entry:
                    freed.popleft()
        except IndexError:
            pass
        if pages.changes:  # a Ctrl-C interrupted the last call
            pages.apply_changes()

    def apply_if_unlocked(self, lock: Any) -> None:
        """Run `apply`, unless another thread holds the lock."""
        got: list[bool] = []
        try:
            got.extend(map(lock.acquire, (False,)))  # one C call acquires the lock and records the result
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


class ManagerGroup:
    """The capped memory managers of one GPU, whose contexts share the cap.

    A thread that allocates may hold the lock while it synchronises the GPU, so usage readings do not wait for the lock.
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
        """The members as a list. Safe if another thread adds a member meanwhile."""
        while True:
            try:
                return list(self.members)
            except RuntimeError:  # another thread changed the set during the iteration
                continue

    def elsewhere(self, manager: Any) -> int:
        """The bytes that the GPU's other managers hold."""
        if self.single:
            return 0
        return sum(other.held() for other in self.all() if other is not manager)

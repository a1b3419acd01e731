"""What Numba holds in one of its contexts."""

from __future__ import annotations

from collections import deque
from typing import Any

from memguard._base.units import round_up
from memguard._frameworks.driver_pages import DriverPages, slabs
from memguard._frameworks.numba.pool import PENDING, USED, Block, Taker


class Figures:
    """What one manager holds, in bytes. Change it with the lock held; only `left` and `freed` need none.

    `left` and `used` make no calls, so that nothing comes in between: a request of a finalizer or a signal handler
    finds what is true. What the driver took back follows with the next `apply`.
    """

    def __init__(self, uuid: str) -> None:
        self.pages = DriverPages(slabs[uuid])
        self.in_use = self.peak = 0
        self.blocks: dict[Block, None] = {}
        """All blocks that count in `pages`."""
        self.freed: deque[tuple[Any, Block]] = deque()
        """Blocks that the driver took back, each behind its answer."""
        self._resting: dict[Block, None] = {}  # those that no array has: their free is pending, or they are pooled
        self._changes = 0
        self._reclaimable = (0, 0)  # the number of changes for which it was added up, and the sum

    def taken(self, block: Block) -> None:
        """The driver has given the block."""
        pages, size = self.pages, block.size
        whole_pages = round_up(size)
        # No call in between: a Ctrl-C finds all of it or nothing.
        self.blocks[block] = None
        pages.coming += whole_pages
        pages.changes.append((pages.adding, block.address, size))
        pages.settle()

    def used(self, block: Block, size: int) -> None:
        """An array of `size` bytes has the block."""
        block.state = USED
        block.asked = size
        self.in_use += size
        self._changes += 1
        if self.in_use > self.peak:
            self.peak = self.in_use
        self._resting.pop(block, None)

    def left(self, block: Block, memory: Taker | None) -> bool:
        """No array has the block any more; its free is pending. False if no array had it.

        Its `memory` knows in the same moment that it has nothing left to free: the block may soon be another's.
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
        """Count what the driver took back."""
        freed, pages = self.freed, self.pages
        try:
            while freed:
                entry = freed[0]
                block = entry[1]
                self._resting.pop(block, None)
                if block in self.blocks:  # else a signal handler came first
                    del self.blocks[block]
                    self._changes += 1
                    pages.changes.append((pages.leaving, block.address, block.size))
                    pages.settle()
                if freed[0] is entry:
                    freed.popleft()
        except IndexError:
            pass
        if pages.changes:  # left by a Ctrl-C
            pages.settle()

    def settle(self, lock: Any) -> None:
        """`apply` for a reading: only if nobody has the lock."""
        got: list[bool] = []
        try:
            got.extend(map(lock.acquire, (False,)))  # one call: a Ctrl-C finds it noted
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

"""The bins of PyCUDA's pool, and `Aside`, which keeps idle blocks of them from the pool's `free_held`.

That gives all of them back otherwise. Those that stay are taken out as allocations that nobody has, and dropped again.
Asked of the pool by the size of a bin, an idle block of that bin is what it hands out: no memory is taken for it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from operator import index
from typing import Any
from weakref import ref

from memguard._frameworks.driver_pages import DriverPages
from memguard._frameworks.least import addresses

NEVER = sys.maxsize
"""Of `Bin.enough`: no bin has so many entries."""


class Bin:
    """The blocks of one size, and how many of them are known to lie idle.

    Whatever frees a block, on whatever thread, runs no Python here: the weak reference to its allocation appends itself
    to `idle`. A request takes one entry out before it asks the pool. So there are never more entries than idle blocks.
    """

    __slots__ = ("enough", "freed", "held", "idle", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: dict[int, ref[Any] | None] = {}
        """All blocks by address, with the allocation that each was handed out as last."""
        self.idle: list[object] = []
        """One entry for each block that was freed since the pool was known to have none. It may miss some."""
        self.freed: Callable[[object], None] = self.idle.append
        self.enough = NEVER
        """As long as each bin has so many entries, no more of the pool is in use than when the peak was looked at last:
        since then the pool got no block, and no idle block without an entry got one. The first that has fewer ends
        that for all."""

    def hand_out(self, address: int, allocation: Any) -> None:
        """The pool has handed out a block without an entry having been taken."""
        with contextlib.suppress(IndexError):  # a `hit` may take the last one at any moment
            self.idle.pop()
        reference = ref(allocation, self.freed)
        if address in self.held:
            self.held[address] = reference

    def put_back(self) -> None:
        """The entry that a request took was not needed."""
        self.idle.append(None)

    def free(self, address: int) -> bool:
        """Whether no allocation has the block, though it may be on its way to one."""
        allocation = self.held.get(address)
        return allocation is None or allocation() is None


class Aside:
    """The blocks of one pool that are set aside: none, but within its `free_held`. With the adapter's lock held."""

    def __init__(self, allocate: Callable[[Any, int], Any]) -> None:
        self._allocate = allocate
        self._taken: list[tuple[Bin, Any]] = []
        self._refs: list[ref[Any]] = []

    def __bool__(self) -> bool:
        return bool(self._taken)

    def bytes(self) -> int:
        """What PyCUDA counts as active for them."""
        return sum([found.size for found, _ in self._taken])

    def take(self, pool: Any, bins: Iterable[Bin], small: list[object], pages: DriverPages, needed: int) -> None:
        """Set aside what can stay when `needed` bytes have to go back to the driver: nothing, if all has to go.

        Only blocks with an entry: as many as that lie idle. One of `small` stays in the pool, which must never be
        without an idle block for long: if the next free came where no context is current, it would end the process.
        """
        for found in bins:
            spared = int(found.idle is small)
            while len(found.idle) > spared:
                try:
                    found.idle.pop()
                except IndexError:  # a `hit` was faster
                    break
                # One call: whoever comes in between finds it counted. The callback is that of each free.
                self._taken.extend(zip((found,), map(self._allocate, (pool,), (found.size,)), strict=False))
                if index(self._taken[-1][1]) in found.held:
                    self._refs.append(ref(self._taken[-1][1], found.freed))
                else:  # not as known: it goes
                    self._taken.pop()
        blocks = [(index(allocation), found.size) for found, allocation in self._taken]
        go = addresses(pages, blocks, needed)
        if go is None:
            self._taken.clear()
        else:
            self._taken[:] = [one for one in self._taken if index(one[1]) not in go]

    def end(self) -> None:
        """All of them lie idle in the pool again. Where a Ctrl-C came before, this is to be called again."""
        self._taken.clear()  # one call, which also brings their entries
        self._refs.clear()

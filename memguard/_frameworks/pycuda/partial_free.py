"""Frees only a part of the idle blocks of PyCUDA's pool: `SetAsideBlocks` keeps the others from the pool's `free_held`.

`free_held` frees all idle blocks. To keep some, `SetAsideBlocks` allocates them during the call, and then drops the
allocations. A request of a bin's size gets an idle block of that bin, so this takes no driver memory. `Bin` counts the
pool's blocks of one size.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable
from operator import index
from typing import Any
from weakref import ref

from memguard._frameworks.driver_pages import DriverPages, addresses_to_free

NEVER = sys.maxsize
"""A value of `Bin.enough`: no bin has so many entries."""


class Bin:
    """The blocks of one size, with a count of those known to be idle.

    A free on any thread runs no Python code here: the weak reference to the allocation appends itself to `idle`. A
    request removes one entry before it calls the pool. So there are never more entries than idle blocks.
    """

    __slots__ = ("enough", "freed", "held", "idle", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: dict[int, ref[Any] | None] = {}
        """All blocks by address, with the latest allocation of each."""
        self.idle: list[object] = []
        """One entry for each block freed since the pool was known to have no idle block. Some entries may be
        missing."""
        self.freed: Callable[[object], None] = self.idle.append
        self.enough = NEVER
        """A lower bound of the entries. While no bin is below its bound, the pool's in-use bytes are at most those at
        the last update of the peak: since then the pool has got no block, and no idle block without an entry was used.
        The first bin below its bound resets all bounds."""

    def record_allocation(self, address: int, allocation: Any) -> None:
        """Record a block that the pool allocated without the removal of an entry."""
        with contextlib.suppress(IndexError):  # a `hit` may remove the last one at any moment
            self.idle.pop()
        reference = ref(allocation, self.freed)
        if address in self.held:
            self.held[address] = reference

    def restore_entry(self) -> None:
        """Restore the entry that a request removed in vain."""
        self.idle.append(None)

    def free(self, address: int) -> bool:
        """Whether no allocation has the block, though a request may be about to get it."""
        allocation = self.held.get(address)
        return allocation is None or allocation() is None


class SetAsideBlocks:
    """The blocks of one pool that are set aside, only during its `free_held`. Callers hold the adapter's lock."""

    def __init__(self, allocate: Callable[[Any, int], Any]) -> None:
        self._allocate = allocate
        self._taken: list[tuple[Bin, Any]] = []
        self._refs: list[ref[Any]] = []

    def __bool__(self) -> bool:
        return bool(self._taken)

    def bytes(self) -> int:
        """The bytes that PyCUDA counts as active for these blocks."""
        return sum([found.size for found, _ in self._taken])

    def take(self, pool: Any, bins: Iterable[Bin], small: list[object], pages: DriverPages, needed: int) -> None:
        """Set aside the blocks that can stay when `needed` bytes must go back to the driver: none, if that takes all.

        It takes only blocks with an entry, which are certainly idle. One block of `small` stays in the pool, which must
        never be without an idle block for long: a free without a current context would then abort the process.
        """
        for found in bins:
            spared = int(found.idle is small)
            while len(found.idle) > spared:
                try:
                    found.idle.pop()
                except IndexError:  # a `hit` removed the last one
                    break
                # One call: an interruption finds the block counted. The callback is the one of each free.
                self._taken.extend(zip((found,), map(self._allocate, (pool,), (found.size,)), strict=False))
                if index(self._taken[-1][1]) in found.held:
                    self._refs.append(ref(self._taken[-1][1], found.freed))
                else:  # an unknown block: free it
                    self._taken.pop()
        blocks = [(index(allocation), found.size) for found, allocation in self._taken]
        go = addresses_to_free(pages, blocks, needed)
        if go is None:
            self._taken.clear()
        else:
            self._taken[:] = [one for one in self._taken if index(one[1]) not in go]

    def end(self) -> None:
        """Make all of these blocks idle in the pool again. Repeat the call after a Ctrl-C."""
        self._taken.clear()  # one call, which also appends their entries
        self._refs.clear()

"""Frees only some idle blocks of PyCUDA's pool: `SetAsideBlocks` protects the others from the pool's `free_held`.

`free_held` frees all idle blocks. To keep some blocks, `SetAsideBlocks` allocates them during the call, and then drops
the allocations. A request of a bin's size gets an idle block of that bin, so these allocations take no driver memory.
`Bin` counts the pool's blocks of one size.
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
"""A value of `Bin.enough` above any number of entries."""


class Bin:
    """The blocks of one size, and entries for those known to be idle.

    A free runs no Python code, on any thread: the allocation's weak reference has `idle.append` as its callback. A
    request removes one entry before it calls the pool. So there are never more entries than idle blocks.
    """

    __slots__ = ("enough", "freed", "held", "idle", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: dict[int, ref[Any] | None] = {}
        """All blocks by address, each with its latest allocation."""
        self.idle: list[object] = []
        """One entry for each block freed since the pool last had no idle block. Some entries may be missing."""
        self.freed: Callable[[object], None] = self.idle.append
        self.enough = NEVER
        """A lower bound of the number of entries. While no bin is below its bound, the pool's in-use bytes are at most
        those at the last update of the peak: since then the pool has allocated no block, and used no idle block without
        an entry. The first bin below its bound resets all bounds."""

    def record_allocation(self, address: int, allocation: Any) -> None:
        """Record the allocation of a block for which the request removed no entry."""
        with contextlib.suppress(IndexError):  # a concurrent `hit` may remove the last block
            self.idle.pop()
        reference = ref(allocation, self.freed)
        if address in self.held:
            self.held[address] = reference

    def restore_entry(self) -> None:
        """Restore the entry of a request that did not use the block."""
        self.idle.append(None)

    def free(self, address: int) -> bool:
        """True if the block is idle. A concurrent request may be about to use it."""
        allocation = self.held.get(address)
        return allocation is None or allocation() is None


class SetAsideBlocks:
    """The blocks of one pool that its current `free_held` must not free. Callers hold the adapter's lock."""

    def __init__(self, allocate: Callable[[Any, int], Any]) -> None:
        self._allocate = allocate
        self._taken: list[tuple[Bin, Any]] = []
        self._refs: list[ref[Any]] = []

    def __bool__(self) -> bool:
        return bool(self._taken)

    def bytes(self) -> int:
        """The bytes of the set-aside blocks, which PyCUDA counts as active."""
        return sum([found.size for found, _ in self._taken])

    def take(self, pool: Any, bins: Iterable[Bin], small: list[object], pages: DriverPages, needed: int) -> None:
        """Set aside the blocks that need not be freed to return `needed` bytes to the driver. Sets none aside if all
        are needed.

        It allocates only blocks with an entry, which are certainly idle. One block of `small` stays in the pool: while
        the pool has no idle block, a free without a current context aborts the process.
        """
        for found in bins:
            spared = int(found.idle is small)
            while len(found.idle) > spared:
                try:
                    found.idle.pop()
                except IndexError:  # a concurrent `hit` removed the last block
                    break
                # One C call allocates and records the block, so that no interruption can lose it.
                self._taken.extend(zip((found,), map(self._allocate, (pool,), (found.size,)), strict=False))
                if index(self._taken[-1][1]) in found.held:
                    self._refs.append(ref(self._taken[-1][1], found.freed))
                else:  # an unknown block, which `free_held` may free
                    self._taken.pop()
        blocks = [(index(allocation), found.size) for found, allocation in self._taken]
        go = addresses_to_free(pages, blocks, needed)
        if go is None:
            self._taken.clear()
        else:
            self._taken[:] = [one for one in self._taken if index(one[1]) not in go]

    def end(self) -> None:
        """Make all set-aside blocks idle again. Repeat the call after a Ctrl-C."""
        self._taken.clear()  # one C call, which also appends the blocks' entries
        self._refs.clear()

"""Frees only some idle blocks of a PyCUDA pool, although the pool's `free_held` frees all idle blocks.

To keep a block, `SetAsideBlocks` allocates it from the pool before `free_held` and drops the allocation afterwards. A
request of a bin's size gets an idle block of that bin, so these allocations take no driver memory. `Bin` records the
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
"""A value of `Bin.enough` that exceeds every possible length of `Bin.idle`."""


class Bin:
    """The blocks of one size, and one entry in `idle` for each block known to be idle.

    When an allocation object is deleted, its weak reference calls `idle.append`, so a free runs no Python code. A
    request removes one entry before it allocates from the pool, so there are never more entries than idle blocks.
    """

    __slots__ = ("enough", "freed", "held", "idle", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: dict[int, ref[Any] | None] = {}
        """All blocks of this size: by address, a weak reference to the block's latest allocation object."""
        self.idle: list[object] = []
        """One entry for each block freed since the list was last cleared. Some entries may be missing."""
        self.freed: Callable[[object], None] = self.idle.append
        self.enough = NEVER
        """The length of `idle` at the last update of the peak, as a lower bound. While no bin's `idle` is shorter than
        its bound, the pool's bytes in use cannot exceed the bytes at that update, and `hit` skips the check for a new
        peak. The first bin below its bound resets all bounds to `NEVER`."""

    def record_allocation(self, address: int, allocation: Any) -> None:
        """Record that `allocation` uses the block at `address`, and remove one entry from `idle`. Not for requests
        served by `Pool.hit`, which removes the entry itself."""
        with contextlib.suppress(IndexError):  # a concurrent `hit` may remove the last entry
            self.idle.pop()
        reference = ref(allocation, self.freed)
        if address in self.held:
            self.held[address] = reference

    def restore_entry(self) -> None:
        """Restore the entry that a request removed without then using a block."""
        self.idle.append(None)

    def free(self, address: int) -> bool:
        """True if the block at this address is idle. A concurrent request may be about to use the block."""
        allocation = self.held.get(address)
        return allocation is None or allocation() is None


class SetAsideBlocks:
    """The idle blocks of one pool that the `free_held` in progress must not free. Callers hold the adapter's lock."""

    def __init__(self, allocate: Callable[[Any, int], Any]) -> None:
        self._allocate = allocate
        self._taken: list[tuple[Bin, Any]] = []
        self._refs: list[ref[Any]] = []

    def __bool__(self) -> bool:
        return bool(self._taken)

    def bytes(self) -> int:
        """The bytes of the set-aside blocks, which PyCUDA's `active_bytes` includes."""
        return sum([found.size for found, _ in self._taken])

    def take(self, pool: Any, bins: Iterable[Bin], small: list[object], pages: DriverPages, needed: int) -> None:
        """Set aside all idle blocks except those whose free returns `needed` bytes to the driver. Sets no block aside
        if only freeing all blocks returns `needed` bytes.

        Allocates only blocks with an entry in `idle`, which are certainly idle. Does not allocate the last block of the
        bin whose `idle` list is `small`, because in a pool without idle blocks, a free without a current context aborts
        the process.
        """
        for found in bins:
            spared = int(found.idle is small)
            while len(found.idle) > spared:
                try:
                    found.idle.pop()
                except IndexError:  # a concurrent `hit` removed the last entry
                    break
                # One C call allocates and records the block, so that an interruption cannot lose the block.
                self._taken.extend(zip((found,), map(self._allocate, (pool,), (found.size,)), strict=False))
                if index(self._taken[-1][1]) in found.held:
                    self._refs.append(ref(self._taken[-1][1], found.freed))
                else:  # the block is unrecorded, so `free_held` may free it
                    self._taken.pop()
        blocks = [(index(allocation), found.size) for found, allocation in self._taken]
        go = addresses_to_free(pages, blocks, needed)
        if go is None:
            self._taken.clear()
        else:
            self._taken[:] = [one for one in self._taken if index(one[1]) not in go]

    def end(self) -> None:
        """Make all set-aside blocks idle again. If a Ctrl-C interrupts this call, the caller repeats it."""
        self._taken.clear()  # one C call; the weak references append the entries to `idle`
        self._refs.clear()

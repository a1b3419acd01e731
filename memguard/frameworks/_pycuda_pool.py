"""What PyCUDA's pools hold of the driver's memory, counted: PyCUDA itself tells neither blocks nor pages."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from memguard.frameworks._driver_bytes import SMALL, whole_share
from memguard.units import round_up

_log = logging.getLogger("memguard")


class Pool:
    """A PyCUDA pool with what it does not tell: how many blocks of each bin exist and are handed out.

    `active` may count too many (an allocation freed by hand counts until its object dies), never too few,
    so a block reported as free is free.

    One small block always lies idle in the pool: PyCUDA's pool takes the current context when its first block
    is given back, and where none is current, as at exit or on another thread, that aborts the process (measured).
    """

    def __init__(self, pool: Callable[[], Any], context: int, uuid: str, raw: Any) -> None:
        self.context, self.uuid = context, uuid
        self.active: Counter[int] = Counter()
        self._pool, self._raw = pool, raw  # a pool of the user's own is referred to weakly
        self._blocks: Counter[int] = Counter()
        self._slabs = 0

    def bin_size(self, size: int) -> int:
        pool = self._pool()
        return int(pool.alloc_size(pool.bin_number(size)))

    def has_free(self, bin_size: int) -> bool:
        return self._there() and self._blocks[bin_size] > self.active[bin_size]

    def growth(self, bin_size: int) -> int:
        """Bytes by which `held` grows with one more block of this size."""
        there = self._there()
        large = round_up(bin_size) if bin_size > SMALL else 0
        slabs = max(self._slabs, self._slabs_with(0 if large else bin_size))
        return large + (slabs - max(self._slabs, self._slabs_with(0)) if there else slabs)

    def take(self, size: int, bin_size: int) -> Any:
        allocation = self._take(size, bin_size)
        self.active[bin_size] += 1
        self._keep_one_idle()
        return allocation

    def free_held(self) -> None:
        pool = self._pool()
        if pool is None:
            return
        self._raw.free_held(pool)
        self._blocks &= self.active
        if not self._small():  # a slab goes back when its last piece does: until then none is counted as gone
            self._slabs = 0
        self._keep_one_idle()

    def held(self) -> int:
        """Bytes taken from the driver: what it rounds the pool's blocks up to."""
        if not self._there():
            return 0
        large = sum(round_up(size) * count for size, count in self._blocks.items() if size > SMALL)
        return large + max(self._slabs, self._slabs_with(0))

    def active_bytes(self) -> int:
        pool = self._pool()
        return int(pool.active_bytes) if pool is not None else 0

    def idle_bytes(self) -> int:
        pool = self._pool()
        return int(pool.managed_bytes - pool.active_bytes) if pool is not None else 0

    def _take(self, size: int, bin_size: int) -> Any:
        pool = self._pool()
        before = pool.managed_bytes
        counted = self.has_free(bin_size)  # freed by hand and given back already, it may not be there any more
        try:
            allocation = self._raw.allocate(pool, size)
        except BaseException:
            if pool.managed_bytes != before:  # it gave idle blocks back, and still the driver refused
                self.free_held()
            raise
        grown = pool.managed_bytes - before
        if grown not in (0, bin_size):
            # The driver refused once, and PyCUDA gave idle blocks back, who knows which: now all of them are gone.
            self._raw.free_held(pool)
            self._blocks, counted = self._blocks & self.active, False
        if grown != 0 and not counted:
            self._blocks[bin_size] += 1
            self._slabs = max(self._slabs, round_up(self._small()))
        return allocation

    def _keep_one_idle(self) -> None:
        pool = self._pool()
        if pool.held_blocks == 0 and pool.managed_bytes:
            try:
                self._take(1, self.bin_size(1))  # dropped at once: the block stays in the pool
            except Exception as error:  # the card is full, which is no reason to fail what is there
                _log.debug("pycuda: no idle block for the pool: %s", error)

    def _there(self) -> bool:
        """Whether the pool has any memory; where not, no block of it is left either."""
        pool = self._pool()
        if pool is not None and pool.managed_bytes:
            return True
        self._blocks.clear()
        self._slabs = 0
        return False

    def _slabs_with(self, size: int) -> int:
        """Slabs for the small blocks, one of `size` and the idle one."""
        idle = self.bin_size(1) if self._pool() is not None else 0
        return round_up(self._small() + whole_share(size) + (0 if self._blocks[idle] > self.active[idle] else idle))

    def _small(self) -> int:
        return sum(whole_share(size) * count for size, count in self._blocks.items() if size <= SMALL)

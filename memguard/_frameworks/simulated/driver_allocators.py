"""Models of CuPy's pool and Numba's memory manager, and of the driver pages that their driver allocations occupy.

The models follow the sources of CuPy's MemoryPool and Numba's memory manager, and were checked against figures measured
on an H200. They omit streams, memory hooks, `gc.collect()`, pending modules and events, and `defer_cleanup`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from memguard._base.units import GRANULE, round_up
from memguard._frameworks.driver_pages import SMALL, whole, whole_share
from memguard._frameworks.simulated.allocators import Allocator, serving
from memguard._frameworks.simulated.arena import Arena, Chunk

UNIT = 512
"""Bytes. CuPy rounds requests up to a multiple of this size; the driver also rounds allocations in a slab to it."""


class Piece(NamedTuple):
    """One driver allocation of `size` bytes. `part` is the allocation's chunk of a shared 2 MiB slab; None if the
    allocation has pages of its own."""

    size: int
    part: Chunk | None


class SimulatedPages:
    """Models how the driver places allocations in 2 MiB pages. `take` allocates pages (False if refused), `give` frees
    them.

    Measured: the driver rounds each allocation above 1 MiB up to 2 MiB, and places a smaller allocation within one slab
    of 2 MiB. Assumed: best fit within the slabs; the driver frees a slab when the last allocation in it is freed.
    """

    def __init__(self, take: Callable[[int], bool], give: Callable[[int], None]) -> None:
        self._take, self._give = take, give
        self._slabs = Arena()
        self._parts: Counter[int] = Counter()

    def allocate(self, nbytes: int) -> Piece | None:
        """Allocate; None if a new page is needed and `take` refuses."""
        if nbytes > SMALL:
            pages = round_up(nbytes)
            return Piece(pages, None) if self._take(pages) else None
        size = round_up(nbytes, UNIT)
        chunk = self._slabs.fit(size)
        if chunk is None:
            if not self._take(GRANULE):
                return None
            chunk = self._slabs.add(GRANULE)
        part = self._slabs.occupy(chunk, size)
        self._parts[_slab(part)] += 1
        return Piece(size, part)

    def gap(self, size: int) -> bool:
        """True if a slab has a free chunk of `size` bytes."""
        return size <= SMALL and self._slabs.fit(size) is not None

    def free(self, piece: Piece) -> None:
        if piece.part is None:
            self._give(piece.size)
            return
        slab = _slab(piece.part)
        rest = self._slabs.release(piece.part)
        self._parts[slab] -= 1
        if not self._parts[slab]:
            del self._parts[slab]
            self._slabs.drop(rest)
            self._give(GRANULE)

    def returned_by(self, pieces: Iterable[Piece]) -> int:
        """The bytes that the driver would get back if these allocations were freed."""
        own = [piece.size for piece in pieces if piece.part is None]
        parts = Counter(_slab(piece.part) for piece in pieces if piece.part is not None)
        return sum(own) + GRANULE * sum(count == self._parts[slab] for slab, count in parts.items())


def _slab(part: Chunk) -> int:
    return part.address // (GRANULE + 1)  # an arena leaves one byte between regions


class CuPyPool(Allocator):
    """CuPy 14's MemoryPool with one stream. `held` is the pool's `total_bytes()`; the driver's pages may be larger.

    Without a cap, models plain CuPy; with a cap, CuPy with memguard's allocator, which rounds sizes by `whole_share`.
    """

    def __init__(self, take: Callable[[int], None], give: Callable[[int], None], cap: int | None = None) -> None:
        super().__init__(take, give, cap)
        self._pages = SimulatedPages(self._draw, self._give)
        self._arena = Arena()
        self._pieces: dict[int, Piece] = {}  # driver allocations, by start address of their arena region
        self._blocks: dict[int, Chunk] = {}

    @property
    def reclaimable(self) -> int:
        return self._arena.whole()

    def trim(self) -> int:
        """`free_all_blocks()`: frees only unsplit chunks."""
        before = self.held
        for chunk in self._arena.drop_whole():
            self._pages.free(self._pieces.pop(chunk.address))
            self.held -= chunk.size
        return before - self.held

    def _allocate(self, block: int, nbytes: int, exact: bool) -> int:
        wrapped = self.cap is not None and not exact  # an `exact` size was recorded after rounding
        size = round_up(whole_share(nbytes) if wrapped else nbytes, UNIT)
        chunk = self._arena.fit(size) or self._miss(size)
        if chunk is None:
            self.trim()
            chunk = self._miss(size)
        if chunk is None and wrapped:  # the size before `whole_share` may need no new driver page
            size = round_up(nbytes, UNIT)
            chunk = self._arena.fit(size) or (self._miss(size) if self._pages.gap(size) else None)
        if chunk is None:
            raise self._refused(nbytes)
        self._blocks[block] = self._arena.occupy(chunk, size)
        return size

    def _free(self, block: int) -> int:
        chunk = self._blocks.pop(block)
        size = chunk.size
        self._arena.release(chunk)
        return size

    def _miss(self, size: int) -> Chunk | None:
        """Allocate a chunk from the driver; None if it would exceed the cap or the driver refuses."""
        piece = self._pages.allocate(size) if self._below_cap(size) else None
        if piece is None:
            return None
        self._count(size)
        chunk = self._arena.add(size)
        self._pieces[chunk.address] = piece
        return chunk


class NumbaMemory(Allocator):
    """Numba's memory manager. Without a cap it has no pool: each array is one driver allocation.

    Numba defers frees until more than ten of them, or more than a fifth of `total` (the device's bytes), are pending.
    Under a cap, memguard puts memory whose deferred free is due into a pool, and reuses it for requests that the driver
    rounds up to the same size. `managed` is True if Numba's memory manager was created under a cap, and never changes
    afterwards.
    """

    MOST_PENDING, PENDING_SHARE = 10, 5

    def __init__(
        self, take: Callable[[int], None], give: Callable[[int], None], cap: int | None = None, *, total: int
    ) -> None:
        super().__init__(take, give, cap)
        self._pages = SimulatedPages(self._grow, self._shrink)
        self.managed = cap is not None
        self._most = total // self.PENDING_SHARE
        self._blocks: dict[int, tuple[Piece, int]] = {}  # allocation and requested bytes, by block id
        self._pending: list[Piece] = []
        self._pending_bytes = 0
        self._pooled: dict[int, list[Piece]] = {}

    @property
    def reclaimable(self) -> int:
        return self._pages.returned_by([*self._pending, *(piece for kept in self._pooled.values() for piece in kept)])

    def trim(self) -> int:
        """Run the pending frees (`deallocations.clear()`), then free the pool."""
        before = self.held
        self._flush()
        while self._free_pooled_block():
            pass
        return before - self.held

    def trim_partly(self, needed: int) -> None:
        """Run the pending frees, then free the fewest pooled blocks that return `needed` bytes, blocks in slabs
        last."""
        before = self.held
        self._flush()
        while self._pooled and (short := needed - before + self.held) > 0:
            self._free_pooled_block(serving(self._pooled, short))

    def _flush(self) -> None:
        for piece in self._pending:
            if self.managed and self.cap is not None:
                self._pooled.setdefault(whole(piece.size), []).append(piece)
            else:
                self._pages.free(piece)
        self._pending, self._pending_bytes = [], 0

    def _free_pooled_block(self, size: int | None = None) -> bool:
        """Free one pooled block, by default of the size that was added last. False if the pool is empty."""
        if not self._pooled:
            return False
        size = next(reversed(self._pooled)) if size is None else size
        self._pages.free(self._pooled[size].pop())
        if not self._pooled[size]:
            del self._pooled[size]
        return True

    def _allocate(self, block: int, nbytes: int, exact: bool) -> int:
        piece = self._from_pool(nbytes) or self._pages.allocate(nbytes)
        if piece is None:
            self._flush()
            piece = self._from_pool(nbytes) or self._pages.allocate(nbytes)
        while piece is None and self._free_pooled_block():
            piece = self._pages.allocate(nbytes)
        if piece is None:
            raise self._refused(nbytes)
        self._blocks[block] = piece, nbytes
        return nbytes

    def _from_pool(self, nbytes: int) -> Piece | None:
        """A pooled block; None if there is none, or if `held` exceeds the cap, so that `_allocate` frees pooled
        blocks."""
        kept = self._pooled.get(whole(nbytes))
        if not kept or self.cap is None or self.held > self.cap:
            return None
        piece = kept.pop()
        if not kept:
            del self._pooled[whole(nbytes)]
        return piece

    def _free(self, block: int) -> int:
        piece, nbytes = self._blocks.pop(block)
        self._pending.append(piece)
        self._pending_bytes += nbytes
        if len(self._pending) > self.MOST_PENDING or self._pending_bytes > self._most:
            self._flush()
        return nbytes

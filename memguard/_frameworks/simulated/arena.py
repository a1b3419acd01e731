"""Memory regions divided into chunks, used by the models of allocators and of the driver's slabs."""

from __future__ import annotations

import bisect


class Chunk:
    __slots__ = ("address", "next", "prev", "size", "used")

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size, self.used = address, size, False
        self.prev: Chunk | None = None
        self.next: Chunk | None = None


class Arena:
    """Allocates chunks of regions by best fit, at the lowest address first among equal sizes. Splits chunks, and merges
    free neighbours within a region."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int, Chunk]] = []
        self._address = 0

    def add(self, size: int) -> Chunk:
        """Add a region; returns its free chunk. After any split or merge the returned object is the region's first
        chunk."""
        chunk = Chunk(self._address, size)
        self._insert(chunk)
        self._address += size + 1  # the gap prevents merging across regions
        return chunk

    def fit(self, size: int) -> Chunk | None:
        """The smallest free chunk of at least `size` bytes; None if there is none. The chunk stays free."""
        at = bisect.bisect_left(self._free, (size,))
        return self._free[at][2] if at < len(self._free) else None

    def occupy(self, chunk: Chunk, size: int | None) -> Chunk:
        """Mark the first `size` bytes (None: all) of a free chunk as used."""
        self._remove(chunk)
        if size is not None and size < chunk.size:
            rest = Chunk(chunk.address + size, chunk.size - size)
            rest.prev, rest.next = chunk, chunk.next
            if chunk.next:
                chunk.next.prev = rest
            chunk.next, chunk.size = rest, size
            self._insert(rest)
        chunk.used = True
        return chunk

    def release(self, chunk: Chunk) -> Chunk:
        """Free a chunk; returns the chunk after merging it with its free neighbours."""
        chunk.used = False
        after, before = chunk.next, chunk.prev
        if after and not after.used:
            self._remove(after)
            self._merge(chunk, after)
        if before and not before.used:
            self._remove(before)
            self._merge(before, chunk)
            chunk = before
        self._insert(chunk)
        return chunk

    def whole(self) -> int:
        """Total bytes of the wholly free regions."""
        return sum(size for size, _, chunk in self._free if chunk.prev is chunk.next is None)

    def drop_whole(self) -> list[Chunk]:
        """Remove the wholly free regions; returns their chunks."""
        dropped = [chunk for _, _, chunk in self._free if chunk.prev is chunk.next is None]
        if dropped:
            self._free = [entry for entry in self._free if not entry[2].prev is entry[2].next is None]
        return dropped

    def drop(self, chunk: Chunk) -> None:
        """Remove a wholly free region, given by its only chunk."""
        self._remove(chunk)

    @staticmethod
    def _merge(left: Chunk, right: Chunk) -> None:
        left.size += right.size
        left.next = right.next
        if right.next:
            right.next.prev = left

    def _insert(self, chunk: Chunk) -> None:
        bisect.insort(self._free, (chunk.size, chunk.address, chunk))

    def _remove(self, chunk: Chunk) -> None:
        del self._free[bisect.bisect_left(self._free, (chunk.size, chunk.address))]

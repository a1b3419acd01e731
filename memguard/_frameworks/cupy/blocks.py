"""Computes the bytes that CuPy's `MemoryPool` would release: the unsplit idle blocks of each stream.

`free_all_blocks` frees an idle block only as a whole. CuPy has no public figure for these bytes, but since 14.1 its
single-GPU pool has an index of idle blocks, for its own tests (`_debug_arena_get_index`). `Blocks` checks for the index
before use; if it is missing or has another form, the result is None. CuPy does not free a referenced idle block. So
`Blocks` keeps no reference: one C call reads sizes and addresses, during which no other Python thread runs.

The driver frees a slab with its last piece, but the pool counts the bytes of its small allocations instead of their
slabs, and does not report driver allocations and frees. So `Pieces` tracks them by address. If a small request
allocated memory, the pool's total has grown. If that memory was freed, the driver reports another allocation id at its
address.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import Any

from memguard._base.locks import LockedRunner
from memguard._base.logs import log as _log
from memguard._base.units import GRANULE, round_up
from memguard._devices import contexts
from memguard._frameworks.driver_pages import SMALL, UNIT, DriverPages, Slabs

MOST = 4096
"""The most idle blocks to read, which takes 1.3 ms (measured, CuPy 14.2). With more, the result is None."""
FRESH = 0.1
"""Seconds for which a result is reused while the pool's own figures stay equal: the blocks may change while these
figures stay equal."""
_WITHIN = 0.02
"""Seconds to wait at most for another thread's reading."""
_FULL = GRANULE - 16 * UNIT
"""In a slab with this many idle bytes, other frameworks' pieces have no significant room."""
INDEX = "_debug_arena_get_index"
_block = itemgetter(1)
_figures = attrgetter("size", "mem.size", "mem.ptr")
_COLLECTS_ANYWHERE = sys.version_info < (3, 12)
"""Whether Python may collect garbage within a C call. A finalizer that allocates would deadlock there, since its own
thread holds the pool's lock."""


class Blocks:
    """The idle blocks of CuPy's pools. Thread-safe."""

    def __init__(self) -> None:
        self._locked = LockedRunner()
        self._unreadable = False

    def reclaimable(self, pool: Any, ordinal: int, pieces: Callable[[int], int] | None = None) -> int | None:
        """Bytes that `free_all_blocks()` would return to the driver; None if this CuPy lacks the index.

        `pieces` returns the number of known pieces in an address's slab. A slab counts as returned if it contains no
        known piece in use, or no room for other frameworks: unknown pieces of those may keep it allocated.
        """
        one = self._of_one_gpu(pool, ordinal)
        rows = self._rows(one) if one is not None and one.n_free_blocks() <= MOST else None
        return None if rows is None else _returned(rows, pieces)

    def free(self, pool: Any, ordinal: int, needed: int) -> bool:
        """Free the blocks of as many streams as return `needed` bytes together, the largest first, on the current GPU.

        Frees nothing and returns False if all streams are needed, or if the index is missing.
        """
        one = self._of_one_gpu(pool, ordinal)
        streams = self._streams(one) if one is not None else ()
        if one is None or len(streams) < 2 or one.n_free_blocks() > MOST:
            return False
        found = []
        for stream in streams:
            rows = self._rows(one, (stream,)) or ()
            found.append((sum(round_up(size) for size, whole, _ in rows if size == whole > SMALL), stream))
        chosen, got = [], 0
        for size, stream in sorted(found, reverse=True):
            if got >= needed:
                break
            chosen.append(stream)
            got += size
        if got < needed or len(chosen) == len(found):
            return False
        for stream in chosen:
            pool.free_all_blocks(stream=SimpleNamespace(ptr=stream))
        return True

    def _of_one_gpu(self, pool: Any, ordinal: int) -> Any:
        """The GPU's own pool inside a `MemoryPool`; None if this CuPy has no index of idle blocks."""
        if self._unreadable:
            return None
        for part in gc.get_referents(pool):
            if type(part) is tuple and ordinal < len(part) and callable(getattr(part[ordinal], INDEX, None)):
                return part[ordinal]
        return None

    def _streams(self, one: Any) -> list[int]:
        """The streams with blocks in the pool. Reading another stream's index would create the index."""
        for part in gc.get_referents(one):
            if type(part) is dict:
                refs = list(part.items())
                if all(isinstance(ref, weakref.ref) for _, ref in refs):
                    return [stream for stream, ref in refs if ref() is not None]
        return []

    def _rows(self, one: Any, streams: Iterable[int] | None = None) -> list[tuple[int, int, int]] | None:
        """For each idle block its size, the size of the whole driver block, and its address. None if the index cannot
        be read now."""
        streams = self._streams(one) if streams is None else streams
        try:
            done = self._locked.run(_read, _WITHIN, getattr(one, INDEX), streams)
        except (AttributeError, TypeError, IndexError) as failure:
            self._unreadable = True
            _log.debug("cupy: what its pool would give back is unknown: %s", str(failure))
            return None
        return done[0] if done is not None else None


def _read(index: Callable[[int], Any], streams: Iterable[int]) -> list[tuple[int, int, int]]:
    collecting = _COLLECTS_ANYWHERE and gc.isenabled()
    try:
        try:
            if collecting:
                gc.disable()
            return list(map(_figures, map(_block, chain.from_iterable(map(index, streams)))))
        finally:
            if collecting:
                gc.enable()
    finally:
        if collecting:  # repeated if a Ctrl-C interrupted the first call
            gc.enable()


def _returned(rows: Iterable[tuple[int, int, int]], pieces: Callable[[int], int] | None) -> int:
    """The bytes that freeing all unsplit blocks returns to the driver: whole pages, and whole slabs."""
    found, slabs = 0, dict[int, tuple[int, int]]()
    for size, whole, address in rows:
        if size != whole:
            continue
        if size > SMALL:
            found += round_up(size)
        else:
            number, filled = slabs.get(address // GRANULE, (0, 0))
            slabs[address // GRANULE] = number + 1, filled + round_up(size, UNIT)
    for slab, (number, filled) in slabs.items():
        known = pieces(slab * GRANULE) if pieces is not None else 0
        if known == number or (known < number and filled >= _FULL):
            found += GRANULE
    return found


_MOST_NEW = 1000
"""After this many new pieces, query the driver which pieces still exist, unless a reading has done so."""


class Pieces:
    """The pool's small driver allocations on one GPU. Its context must be current. Thread-safe."""

    def __init__(self, slabs: Slabs) -> None:
        self._lock = threading.RLock()  # re-entrant: a signal handler or a finalizer may interrupt a call
        self._dropping = False
        self._pages = DriverPages(slabs, whole=False)  # the pool's own figure counts the pieces' exact bytes
        self._there: dict[int, tuple[int, int]] = {}  # by address: size, and the driver's allocation id
        self._new: deque[tuple[int, int, int]] = deque()
        self._total = 0

    def took(self, address: int) -> None:
        """Record a driver allocation that starts at this address, if it is small. Call it after the pool has grown."""
        start, size = contexts.allocation(address) or (0, 0)
        number = contexts.buffer(address) if start == address and size <= SMALL else None
        if number is not None:
            self._new.append((address, size, number))
            if len(self._new) > max(_MOST_NEW, len(self._there)):  # so that each piece is checked twice on average
                self.drop_freed(self._total)

    def gap(self, size: int) -> bool:
        """Whether a slab may have room for one more piece. Its gaps may be too short, or contain other frameworks'
        pieces."""
        with self._lock:
            return self._pages.gap(size)

    def in_known_slab(self, address: int) -> bool:
        """Whether this address's slab contains recorded pieces."""
        with self._lock:
            return self._pages.known(address)

    def drop_freed(self, total: int) -> None:
        """Drop the freed pieces. It queries the driver (0.5 µs for each piece) only if the pool's `total` changed."""
        if total == self._total and not self._new:
            return
        with self._lock:
            if self._dropping:
                return  # the interrupted call drops them
            self._dropping = True
            try:
                self._drop_freed(total)
            finally:
                self._dropping = False

    def _drop_freed(self, total: int) -> None:
        self._total = total
        for address, (size, number) in list(self._there.items()):
            if contexts.buffer(address) != number and self._there.pop(address, None) is not None:
                self._pages.remove(address, size)
        while self._new:
            try:
                address, size, number = self._new.popleft()
            except IndexError:  # a signal handler emptied the queue
                return
            if address not in self._there and contexts.buffer(address) == number:
                self._there[address] = size, number
                self._pages.add(address, size)

    def forget(self) -> None:
        """Forget every piece."""
        with self._lock:
            self._new.clear()
            for address, (size, _) in list(self._there.items()):
                if self._there.pop(address, None) is not None:
                    self._pages.remove(address, size)

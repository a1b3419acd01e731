"""Computes the bytes that `free_all_blocks` of CuPy's `MemoryPool` would return to the driver.

`free_all_blocks` frees an idle block only if the block is unsplit. CuPy does not report the bytes of such blocks, but
since 14.1 its single-GPU pool has an index of idle blocks for CuPy's own tests (`_debug_arena_get_index`). If the index
is missing or has another form, `Blocks` returns None. CuPy does not free an idle block that a Python object references.
So `Blocks` keeps no reference, and reads sizes and addresses in one C call, during which no other Python thread runs.

The driver packs allocations of up to 1 MiB ("pieces") into 2 MiB slabs, and frees a slab with its last piece. CuPy's
pool counts the pieces' bytes, not the slabs, and reports neither driver allocations nor frees. So `Pieces` records each
piece by address. A small request made a driver allocation if the pool's total grew. A recorded piece was freed if the
driver reports another allocation id at the piece's address.
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
"""The maximum number of idle blocks to read (1.3 ms with CuPy 14.2). A pool with more idle blocks is not read."""
FRESH = 0.1
"""Seconds for which a result is reused while the pool's held and used bytes are unchanged. The result expires because
the idle blocks may change while these two totals do not."""
_WITHIN = 0.02
"""The maximum seconds to wait while another thread reads the index."""
_FULL = GRANULE - 16 * UNIT
"""A slab with this many idle bytes of CuPy's is assumed to contain no pieces of other frameworks."""
INDEX = "_debug_arena_get_index"
_block = itemgetter(1)
_figures = attrgetter("size", "mem.size", "mem.ptr")
_COLLECTS_ANYWHERE = sys.version_info < (3, 12)
"""True if Python may run the garbage collector within a C call. A finalizer that allocates from CuPy would then
deadlock, because the finalizer's thread already holds the pool's lock."""


class Blocks:
    """Reads and frees the idle blocks of CuPy's pools. Thread-safe."""

    def __init__(self) -> None:
        self._locked = LockedRunner()
        self._unreadable = False

    def reclaimable(self, pool: Any, ordinal: int, pieces: Callable[[int], int] | None = None) -> int | None:
        """The bytes that `free_all_blocks()` would return to the driver; None if the index is missing or unreadable.

        `pieces` returns the number of recorded pieces, of all frameworks, in the slab at an address. A slab counts as
        returned if the number of idle blocks in the slab equals the number of recorded pieces. A slab with more idle
        blocks counts only if they fill the slab, because it may contain unrecorded pieces of other frameworks.
        """
        one = self._of_one_gpu(pool, ordinal)
        rows = self._rows(one) if one is not None and one.n_free_blocks() <= MOST else None
        return None if rows is None else _returned(rows, pieces)

    def free(self, pool: Any, ordinal: int, needed: int) -> bool:
        """Free the idle blocks of the fewest streams that together return `needed` bytes, on the current GPU.

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
        """The handles of the streams that have an index of idle blocks in the pool. Reading the index of any other
        stream would create that index."""
        for part in gc.get_referents(one):
            if type(part) is dict:
                refs = list(part.items())
                if all(isinstance(ref, weakref.ref) for _, ref in refs):
                    return [stream for stream, ref in refs if ref() is not None]
        return []

    def _rows(self, one: Any, streams: Iterable[int] | None = None) -> list[tuple[int, int, int]] | None:
        """For each idle block of `streams` (default: all), the block's size, and the size and address of the driver
        allocation that contains the block. None if the index cannot be read at present."""
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
        if collecting:  # in case a Ctrl-C interrupted the first call
            gc.enable()


def _returned(rows: Iterable[tuple[int, int, int]], pieces: Callable[[int], int] | None) -> int:
    """The bytes of whole pages and whole slabs that the driver gets back if all unsplit idle blocks are freed."""
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
"""If this many new pieces are queued, `took` queries the driver which pieces still exist."""


class Pieces:
    """Records the pool's small driver allocations on one GPU. That GPU's context must be current. Thread-safe."""

    def __init__(self, slabs: Slabs) -> None:
        self._lock = threading.RLock()  # re-entrant: a signal handler or a finalizer may interrupt a call
        self._dropping = False
        self._pages = DriverPages(slabs, whole=False)  # CuPy's pool counts the pieces' exact bytes
        self._there: dict[int, tuple[int, int]] = {}  # by address: size, and the driver's allocation id
        self._new: deque[tuple[int, int, int]] = deque()
        self._total = 0

    def took(self, address: int) -> None:
        """Record the driver allocation that starts at this address, if its size is at most `SMALL`. Call after the
        pool has grown."""
        start, size = contexts.allocation(address) or (0, 0)
        number = contexts.buffer(address) if start == address and size <= SMALL else None
        if number is not None:
            self._new.append((address, size, number))
            if len(self._new) > max(_MOST_NEW, len(self._there)):  # so that each piece is checked twice on average
                self.drop_freed(self._total)

    def gap(self, size: int) -> bool:
        """True if a slab may have free space for another piece of `size` bytes. The free space may be fragmented, or
        contain other frameworks' pieces."""
        with self._lock:
            return self._pages.gap(size)

    def in_known_slab(self, address: int) -> bool:
        """True if the slab at this address contains recorded pieces."""
        with self._lock:
            return self._pages.known(address)

    def drop_freed(self, total: int) -> None:
        """Stop counting freed pieces. Queries the driver (0.5 µs per piece) only if `total`, the pool's
        `total_bytes()`, has changed since the last call or new pieces are queued."""
        if total == self._total and not self._new:
            return
        with self._lock:
            if self._dropping:
                return  # a signal handler or finalizer has interrupted `drop_freed`, which continues afterwards
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
        """Stop counting all pieces."""
        with self._lock:
            self._new.clear()
            for address, (size, _) in list(self._there.items()):
                if self._there.pop(address, None) is not None:
                    self._pages.remove(address, size)

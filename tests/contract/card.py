"""The driver's memory on two GPUs, for the models of CuPy, Numba and PyCUDA: pages, slabs, addresses.

As measured on an H200. Slabs serve whoever allocates on the GPU, so all models in a process take from `cards`.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from bisect import bisect
from itertools import count

MIB = 1 << 20
PAGE = 2 * MIB
UNIT = 512
CONTEXT = 518 * MIB


_lock = threading.RLock()


class OutOfMemory(Exception):
    pass


@contextlib.contextmanager
def alone():
    """No other thread, and no finalizer of the garbage collector's: a driver, or a library's core, is not Python."""
    with _lock:
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()


class Card:
    """Above 1 MiB whole pages. Up to there a piece of a slab, which is one page and goes back with its last piece."""

    def __init__(self, number, total):
        self.total, self.taken, self.most, self.aside, self.contexts = total, 0, 0, 0, 0
        self._live = {}  # by address: size as it was rounded, and id
        self._slabs = {}  # by address, the oldest first: the gaps in it, in order
        self._unused = (number + 1) << 40
        self._given_back = {}  # addresses by size, to be used again

    def take(self, size):
        """The address of an allocation."""
        assert size > 0, "the driver refuses it"
        unit = PAGE if size > MIB else UNIT
        size = -(-size // unit) * unit
        with alone():
            address = self._pages(size) if size > MIB else self._piece(size)
            self._live[address] = size, next(_ids)
            return address

    def give(self, address):
        with alone():
            size, _ = self._live.pop(address)
            if size > MIB:
                self._back(address, size)
            else:
                self._mend(address, address + size)

    def buffer(self, address):
        """The id of the live allocation that starts here, which no other ever gets."""
        return self._live.get(address, (0, None))[1]

    def allocation(self, address):
        """Start and size, as it was rounded, of the live allocation that an address lies in."""
        with alone():
            found = ((start, size) for start, (size, _) in self._live.items() if start <= address < start + size)
            return next(found, None)

    def set_aside(self, size):
        """The driver's own pools take so much of the total, or give it back: as contexts, it is not in `taken`."""
        with alone():
            if size > 0:
                self._room(size)
            self.aside += size

    def clear(self):
        """Everybody's memory is destroyed."""
        with alone():
            self._live.clear()
            self._slabs.clear()
            self.taken = 0

    def _piece(self, size):
        for gaps in self._slabs.values():
            for place, (start, end) in enumerate(gaps):
                if end - start >= size:
                    gaps[place : place + 1] = [(start + size, end)] if end - start > size else []
                    return start
        slab = self._pages(PAGE)
        self._slabs[slab] = [(slab + size, slab + PAGE)]
        return slab

    def _mend(self, start, end):
        """One more gap, which becomes one with those beside it."""
        slab = start // PAGE * PAGE
        gaps = self._slabs[slab]
        place = bisect(gaps, (start, end))
        if place < len(gaps) and gaps[place][0] == end:
            end = gaps.pop(place)[1]
        if place and gaps[place - 1][1] == start:
            place -= 1
            start = gaps.pop(place)[0]
        gaps.insert(place, (start, end))
        if end - start == PAGE:
            del self._slabs[slab]
            self._back(slab, PAGE)

    def _pages(self, size):
        self._room(size)
        self.taken += size
        self.most = max(self.most, self.taken)
        if given_back := self._given_back.get(size):
            return given_back.pop()
        self._unused += size
        return self._unused - size

    def _back(self, address, size):
        self.taken -= size
        self._given_back.setdefault(size, []).append(address)

    def _room(self, size):
        if self.taken + self.aside + size > self.total:
            raise OutOfMemory


cards = [Card(0, 16 << 30), Card(1, 16 << 30)]
"""By CUDA's ordinal."""
_ids = count(1)


def give(address):
    """`Card.give` of the one that the address belongs to."""
    cards[(address >> 40) - 1].give(address)


def buffer(address):
    """`Card.buffer` of whichever card it is."""
    return next((found for card in cards if (found := card.buffer(address)) is not None), None)

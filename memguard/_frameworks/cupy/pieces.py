"""Tracks CuPy's small driver allocations by address, because its pool counts their bytes, not their slabs.

CuPy does not report its driver allocations and frees. If a small request allocated memory, the pool's total has grown.
If that memory was freed, the driver's id of the allocation at its address has changed.
"""

from __future__ import annotations

import threading
from collections import deque

from memguard._devices import contexts
from memguard._frameworks.driver_pages import SMALL, DriverPages, Slabs

_MOST_NEW = 1000
"""Record so many new pieces before checking with the driver which of them still exist, if no reading does it first."""


class Pieces:
    """The small allocations of one GPU, whose context must be current. Thread-safe."""

    def __init__(self, slabs: Slabs) -> None:
        self._lock = threading.RLock()  # re-entrant: a signal handler or a finalizer may interrupt a call
        self._settling = False
        self._pages = DriverPages(slabs, whole=False)  # the pool's own figure contains their exact bytes
        self._there: dict[int, tuple[int, int]] = {}  # size and the driver's id, by address
        self._new: deque[tuple[int, int, int]] = deque()
        self._total = 0

    def took(self, address: int) -> None:
        """Record the driver's allocation at this address, if one starts here and is small. The pool has grown."""
        start, size = contexts.allocation(address) or (0, 0)
        number = contexts.buffer(address) if start == address and size <= SMALL else None
        if number is not None:
            self._new.append((address, size, number))
            if len(self._new) > max(_MOST_NEW, len(self._there)):  # so each piece is checked twice on average
                self.settle(self._total)

    def gap(self, size: int) -> bool:
        """Whether a slab may have room for one more piece: its gaps may be too short, or contain others' pieces."""
        with self._lock:
            return self._pages.gap(size)

    def beside(self, address: int) -> bool:
        """Whether the slab of this address contains recorded pieces."""
        with self._lock:
            return self._pages.known(address)

    def settle(self, total: int) -> None:
        """Drop the pieces that were freed. Queries the driver (0.5 µs each) only if the pool's `total` changed."""
        if total == self._total and not self._new:
            return
        with self._lock:
            if self._settling:
                return  # the interrupted call does it
            self._settling = True
            try:
                self._settle(total)
            finally:
                self._settling = False

    def _settle(self, total: int) -> None:
        self._total = total
        for address, (size, number) in list(self._there.items()):
            if contexts.buffer(address) != number and self._there.pop(address, None) is not None:
                self._pages.gone(address, size)
        while self._new:
            try:
                address, size, number = self._new.popleft()
            except IndexError:  # a signal handler cleared the list
                return
            if address not in self._there and contexts.buffer(address) == number:
                self._there[address] = size, number
                self._pages.add(address, size)

    def forget(self) -> None:
        """Drop every piece."""
        with self._lock:
            self._new.clear()
            for address, (size, _) in list(self._there.items()):
                if self._there.pop(address, None) is not None:
                    self._pages.gone(address, size)

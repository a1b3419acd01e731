"""The small allocations that CuPy takes from the driver, by address. Its pool counts their bytes, not their slabs.

CuPy tells neither what it takes from the driver nor what it gives back. If a small request took memory, the pool's
total has grown. If that memory is gone, the driver's id of the allocation at its address has changed.
"""

from __future__ import annotations

import threading
from collections import deque

from memguard._devices import contexts
from memguard._frameworks.driver_pages import SMALL, DriverPages, Slabs

_MOST_NEW = 1000
"""So many new pieces are noted before the driver is asked which of them are still there, if nobody reads meanwhile."""


class Pieces:
    """The small allocations of one GPU, whose context must be current. Thread-safe."""

    def __init__(self, slabs: Slabs) -> None:
        self._lock = threading.RLock()  # a signal handler or a finalizer may come within
        self._settling = False
        self._pages = DriverPages(slabs, whole=False)  # the pool's own figure includes them already, to the byte
        self._there: dict[int, tuple[int, int]] = {}  # size and the driver's id, by address
        self._new: deque[tuple[int, int, int]] = deque()
        self._total = 0

    def took(self, address: int) -> None:
        """The pool has grown: note the driver's allocation at this address, if one starts here and is small."""
        start, size = contexts.allocation(address) or (0, 0)
        number = contexts.buffer(address) if start == address and size <= SMALL else None
        if number is not None:
            self._new.append((address, size, number))
            if len(self._new) > max(_MOST_NEW, len(self._there)):  # each piece is asked about twice, on average
                self.settle(self._total)

    def gap(self, size: int) -> bool:
        """Whether a slab may have room for one more piece: its gaps may be too short, or others' pieces lie there."""
        with self._lock:
            return self._pages.gap(size)

    def beside(self, address: int) -> bool:
        """Whether the slab of this address is one in which pieces lie."""
        with self._lock:
            return self._pages.known(address)

    def settle(self, total: int) -> None:
        """Forget what the driver has back. Asks the driver (0.5 µs each) only if the pool's `total` changed."""
        if total == self._total and not self._new:
            return
        with self._lock:
            if self._settling:
                return  # the call that this one interrupted does it
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
            except IndexError:  # a signal handler has forgotten all
                return
            if address not in self._there and contexts.buffer(address) == number:
                self._there[address] = size, number
                self._pages.add(address, size)

    def forget(self) -> None:
        """Count nothing any longer."""
        with self._lock:
            self._new.clear()
            for address, (size, _) in list(self._there.items()):
                if self._there.pop(address, None) is not None:
                    self._pages.gone(address, size)

"""CuPy's small allocations of the driver's, by address: its pool counts their bytes, and not the slabs they lie in.

CuPy tells neither what it takes from the driver nor what it gives back. That a small request took memory shows in
the pool's total; that it is gone, in the driver's id of the allocation at that address.
"""

from __future__ import annotations

import threading
from collections import deque

from memguard._devices import contexts
from memguard._frameworks.driver_pages import SMALL, DriverPages, Slabs


class Pieces:
    """Those of one GPU, whose context has to be current. On any thread."""

    def __init__(self, slabs: Slabs) -> None:
        self._lock = threading.Lock()
        self._pages = DriverPages(slabs, whole=False)  # the pool's own figure holds them already, to the byte
        self._there: dict[int, tuple[int, int]] = {}  # size and the driver's id, by address
        self._new: deque[tuple[int, int, int]] = deque()
        self._total = 0

    def took(self, address: int) -> None:
        """The pool has grown: here, if the driver's allocation starts here and is a small one."""
        start, size = contexts.allocation(address) or (0, 0)
        number = contexts.buffer(address) if start == address and size <= SMALL else None
        if number is not None:
            self._new.append((address, size, number))

    def settle(self, total: int) -> None:
        """Let go of what the driver has back. Asks it only where the pool's `total` changed, 0.5 µs for each."""
        if total == self._total and not self._new:
            return
        with self._lock:
            self._total = total
            for address, (size, number) in list(self._there.items()):
                if contexts.buffer(address) != number:
                    del self._there[address]
                    self._pages.gone(address, size)
            while self._new:
                address, size, number = self._new.popleft()
                if address not in self._there and contexts.buffer(address) == number:
                    self._there[address] = size, number
                    self._pages.add(address, size)

    def forget(self) -> None:
        """Nothing of it is counted any more."""
        with self._lock:
            self._new.clear()
            for address, (size, _) in self._there.items():
                self._pages.gone(address, size)
            self._there.clear()

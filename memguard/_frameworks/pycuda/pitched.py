"""Counts PyCUDA's pitched allocations, which bypass its pools."""

from __future__ import annotations

from memguard._frameworks.driver_pages import DriverPages


class Pitched:
    """The pitched allocations on one GPU."""

    def __init__(self, pages: DriverPages) -> None:
        self.in_use = 0
        self._pages = pages

    def add(self, address: int, size: int) -> None:
        self.in_use += size
        self._pages.add(address, size)

    def gone(self, address: int, size: int) -> None:
        self.in_use -= size
        self._pages.gone(address, size)

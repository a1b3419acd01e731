"""Keeps idle blocks of PyCUDA's pool from its `free_held`, which otherwise gives all of them back.

They are taken out as allocations that nobody has, and dropped again. Asked of the pool by the size of a bin, an idle
block of that bin is what it hands out: no memory is taken for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import index
from typing import TYPE_CHECKING, Any
from weakref import ref

from memguard._frameworks.driver_pages import DriverPages
from memguard._frameworks.least import addresses

if TYPE_CHECKING:
    from memguard._frameworks.pycuda.pool import Bin


class Aside:
    """The blocks of one pool that are set aside: none, but within its `free_held`. With the adapter's lock held."""

    def __init__(self, allocate: Callable[[Any, int], Any]) -> None:
        self._allocate = allocate
        self._taken: list[tuple[Bin, Any]] = []
        self._refs: list[ref[Any]] = []

    def __bool__(self) -> bool:
        return bool(self._taken)

    def bytes(self) -> int:
        """What PyCUDA counts as active for them."""
        return sum([found.size for found, _ in self._taken])

    def take(self, pool: Any, bins: Iterable[Bin], small: list[object], pages: DriverPages, needed: int) -> None:
        """Set aside what can stay when `needed` bytes have to go back to the driver: nothing, if all has to go.

        Only blocks with an entry: as many as that lie idle. One of `small` stays in the pool, which must never be
        without an idle block for long: if the next free came where no context is current, it would end the process.
        """
        for found in bins:
            spared = int(found.idle is small)
            while len(found.idle) > spared:
                try:
                    found.idle.pop()
                except IndexError:  # a `hit` was faster
                    break
                # One call: whoever comes in between finds it counted. The callback is that of each free.
                self._taken.extend(zip((found,), map(self._allocate, (pool,), (found.size,)), strict=False))
                if index(self._taken[-1][1]) in found.held:
                    self._refs.append(ref(self._taken[-1][1], found.freed))
                else:  # not as known: it goes
                    self._taken.pop()
        blocks = [(index(allocation), found.size) for found, allocation in self._taken]
        go = addresses(pages, blocks, needed)
        if go is None:
            self._taken.clear()
        else:
            self._taken[:] = [one for one in self._taken if index(one[1]) not in go]

    def end(self) -> None:
        """All of them lie idle in the pool again. Where a Ctrl-C came before, this is to be called again."""
        self._taken.clear()  # one call, which also brings their entries
        self._refs.clear()

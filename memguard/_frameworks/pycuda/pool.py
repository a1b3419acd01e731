"""Counts what PyCUDA's pools hold of the driver's memory, because PyCUDA reports neither blocks nor pages."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from memguard._devices import contexts
from memguard._frameworks.driver_pages import DriverPages
from memguard._logs import log as _log


class Active:
    """What a pool has handed out: how many live allocations there are at each address, and of each size.

    It may count too many (an allocation freed by hand counts until its object is collected), never too few.
    """

    def __init__(self) -> None:
        self.at: Counter[int] = Counter()
        self.of: Counter[int] = Counter()

    def born(self, address: int, size: int) -> None:
        self.at[address] += 1
        self.of[size] += 1

    def gone(self, address: int, size: int) -> None:
        self.at[address] -= 1
        self.of[size] -= 1
        if not self.at[address]:
            del self.at[address]


class Pitched:
    """Pitched allocations, which come from no pool."""

    def __init__(self, pages: DriverPages) -> None:
        self.in_use = 0
        self._pages = pages

    def add(self, address: int, size: int) -> None:
        self.in_use += size
        self._pages.add(address, size)

    def gone(self, address: int, size: int) -> None:
        self.in_use -= size
        self._pages.gone(address, size)


@dataclass(frozen=True)
class RawPool:
    """PyCUDA's own `DeviceMemoryPool`: its class, and its methods as they were before they were replaced."""

    make: Callable[[], Any]
    allocate: Callable[[Any, int], Any]
    free_held: Callable[[Any], None]


class Pool:
    """A PyCUDA pool, and what it does not report: which blocks it has, and which of them are handed out.

    One small block always stays idle in the pool. PyCUDA's pool asks for the current context when its first block is
    given back; if none is current, as at exit or on another thread, that aborts the process (measured).
    """

    def __init__(
        self, pool: Callable[[], Any], context: int, uuid: str, pages: DriverPages, raw: RawPool, made_in: Any = None
    ) -> None:
        """`made_in` is the context that was current when the pool was made, if it was made on this thread."""
        self.context, self.uuid = context, uuid
        self._made_in, self._thread = made_in, threading.get_ident()
        self.active = Active()
        self._pool, self._raw = pool, raw  # the user's own pools are weakly referenced
        self._pages = pages
        self._blocks: dict[int, int] = {}  # size by address
        self._by_size: Counter[int] = Counter()
        self._witness: tuple[int, int | None] | None = None  # one of its blocks, and the driver's id of it

    def dead(self) -> bool:
        """Whether the context is gone, and its memory with it. The addresses may then belong to others."""
        if self._witness is None:
            return False
        address, known = self._witness
        return known is not None and contexts.buffer(address) != known

    def bin_size(self, size: int) -> int:
        pool = self._pool()
        return int(pool.alloc_size(pool.bin_number(size)))

    def has_free(self, bin_size: int) -> bool:
        return self._there() and self._by_size[bin_size] > self.active.of[bin_size]

    def take(self, size: int, bin_size: int) -> Any:
        allocation = self._take(size, bin_size)
        self.active.born(int(allocation), bin_size)
        self._keep_one_idle()
        return allocation

    def give_back(self, allocation: Any, bin_size: int) -> None:
        """Free an allocation that was just taken: its block becomes idle."""
        self.active.gone(int(allocation), bin_size)
        allocation.free()

    def free_held(self) -> None:
        pool = self._pool()
        if pool is None:
            return
        self._within(self._raw.free_held, pool)
        self._only_active()
        self._keep_one_idle()

    def look(self) -> None:
        """Forget the blocks of a pool that no longer has memory."""
        self._there()

    def active_bytes(self) -> int:
        pool = self._pool()
        return int(pool.active_bytes) if pool is not None else 0

    def idle(self) -> list[tuple[int, int]]:
        """Address and size of the blocks that a trim gives back: those without an allocation."""
        if not self._blocks or not self._there():
            return []
        at = self.active.at
        return [(address, size) for address, size in self._blocks.items() if not at[address]]

    def _take(self, size: int, bin_size: int) -> Any:
        pool = self._pool()
        before, idle = pool.managed_bytes, self.has_free(bin_size)
        try:
            allocation = self._within(self._raw.allocate, pool, size)
        except BaseException:
            if pool.managed_bytes != before:  # it gave idle blocks back, but the driver still refused
                self.free_held()
            raise
        grown = pool.managed_bytes - before
        if grown not in (0, bin_size):
            # The driver refused once, and PyCUDA gave back some idle blocks, unknown which: give back all of them.
            self._within(self._raw.free_held, pool)
            self._only_active()
        elif grown and idle:  # freed by hand, and given back before their objects were collected
            self._only_active(bin_size)
        if grown or int(allocation) not in self._blocks:
            self._forget(int(allocation))
            self._blocks[int(allocation)] = bin_size
            self._by_size[bin_size] += 1
            self._witness = int(allocation), contexts.buffer(int(allocation))
            self._pages.add(int(allocation), bin_size)
        return allocation

    def _within(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the pool. On a thread other than the pool's, PyCUDA refuses to take memory for it and leaks
        what it should give back, unless the very context object that the pool was made in is current. Another object
        with the same handle is not enough."""
        if self._made_in is None or self._thread == threading.get_ident():
            return call(*arguments)
        self._made_in.push()
        try:
            return call(*arguments)
        finally:
            self._made_in.pop()

    def _keep_one_idle(self) -> None:
        pool = self._pool()
        if pool.held_blocks == 0 and pool.managed_bytes:
            try:
                self._take(1, self.bin_size(1))  # dropped at once, so the block stays in the pool
            except Exception as error:  # the GPU is full, which must not fail this allocation
                _log.debug("pycuda: no idle block for the pool: %s", error)

    def _there(self) -> bool:
        """Whether the pool has any memory. If not, forgets its blocks."""
        pool = self._pool()
        if pool is not None and pool.managed_bytes:
            return True
        self.forget()
        return False

    def _only_active(self, size: int | None = None) -> None:
        """Forget every block that is not handed out, of this size or of all sizes: the pool gave it back."""
        idle = [at for at, of in self._blocks.items() if not self.active.at[at] and size in (None, of)]
        for address in idle:
            self._forget(address)

    def forget(self) -> None:
        """Stop counting its blocks."""
        for address in list(self._blocks):
            self._forget(address)

    def _forget(self, address: int) -> None:
        size = self._blocks.pop(address, None)
        if size is not None:
            self._by_size[size] -= 1
            if self._witness is not None and self._witness[0] == address:
                self._witness = None
            self._pages.gone(address, size)


def destroyed(pools: Mapping[int, Pool], uuid: str, by_ordinal: Mapping[int, str]) -> list[int]:
    """The handles of contexts on this GPU that are gone, and their pools' memory with them. The primary context is not
    checked: other frameworks keep it alive, and this runs with each reading.
    """
    on_it = [handle for handle, pool in pools.items() if pool.uuid == uuid]
    if not on_it:
        return []
    primary = next((contexts.primary(ordinal) for ordinal, known in by_ordinal.items() if known == uuid), None)
    return [handle for handle in on_it if handle != primary and pools[handle].dead()]

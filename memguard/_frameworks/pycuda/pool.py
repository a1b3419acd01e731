"""Counts the driver memory of PyCUDA's pools and pitched allocations: PyCUDA reports neither blocks nor pages."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Any
from weakref import ref

from memguard._base.logs import log as _log
from memguard._base.units import GRANULE, round_up
from memguard._devices import contexts
from memguard._frameworks.driver_pages import DriverPages
from memguard._frameworks.pycuda.partial_free import NEVER, Bin, SetAsideBlocks

_MOST_TIMES = 8
_MOST_SIZES = 4096
"""Request sizes to remember, with their bin. More than a program repeats, and less than a megabyte."""


@dataclass(frozen=True)
class RawPool:
    """PyCUDA's own `DeviceMemoryPool`: its class, and its original methods."""

    make: Callable[[], Any]
    allocate: Callable[[Any, int], Any]
    free_held: Callable[[Any], None]


class Pool:
    """A PyCUDA pool with the facts that it does not report: its blocks, and which of them are in use.

    A request that an idle block serves does not change the driver's memory. So `hit` checks neither the cap nor the
    driver's pages, and takes no lock. All other methods need the adapter's lock.

    One small block always stays idle in the pool. At the first free of a block, PyCUDA's pool reads the current
    context; without one, as at exit or on another thread, that aborts the process (measured).
    """

    def __init__(
        self, pool: Callable[[], Any], context: int, uuid: str, pages: DriverPages, raw: RawPool, made_in: Any = None
    ) -> None:
        """`made_in` is the context that was current at the pool's creation, if this thread created it."""
        self.context, self.uuid = context, uuid
        self.reference = pool
        self.own: Any = None
        """PyCUDA's pool, if it is memguard's own."""
        self.peak_room = -1
        """When the pool's `active_bytes` exceed this, it calls `on_new_peak`: there may be a new peak."""
        self.on_new_peak: Callable[[Pool], None] = lambda _: None
        self.lives: Callable[[], bool] = _unknown
        """Checks with the driver whether the pool's memory still exists. False also while the pool has none."""
        self.context_id: int | None = None
        """The id of the driver's context with the pool's memory; None if unknown, or without memory."""
        self.made_in, self._thread = made_in, threading.get_ident()
        self._raw, self._pages = raw, pages
        self._allocate = raw.allocate
        self._set_aside = SetAsideBlocks(raw.allocate)
        self.wanted = 0
        """Idle bytes needed by a thread that could not free them: the pool's next request must free them."""
        self._bins: dict[int, Bin] = {}
        self._where: dict[int, Bin] = {}
        self._ids: dict[int, int | None] = {}
        self._witness: int | None = None
        # Freeing idle blocks replaces this dictionary: a concurrent `hit` then gives up.
        self._ready: dict[int, Bin] = {}
        self._small: list[object] = []
        self._holds, self._emptying, self._again, self._keeping = True, False, False, False
        self._sum = 0
        """Bytes of the known blocks, by PyCUDA's count."""
        self._refreshed = -1, -1
        """PyCUDA's bytes and `_sum` when `refresh` last found a difference."""
        self._others: int = pool().managed_bytes
        """Bytes of blocks from before the budget. A request that gets such a block detects it."""

    def hit(self, pool: Any, size: int) -> Any:
        """An idle block of PyCUDA's `pool` for the request; None if there is none, or if a check fails."""
        ready = self._ready
        try:
            found = ready[size]
            found.idle.pop()
        except (IndexError, KeyError, TypeError):
            return None
        # CPython runs no other thread and no signal handler from here to the call of `allocate`: from 3.11 on it does
        # so only after calls and at backward jumps (tried on 3.11, 3.12 and 3.13, 3 million rounds each). Elsewhere
        # `open` lets no request get here. An interruption within the call, such as a finalizer's, shows in the address.
        if self._ready is not ready:
            return None
        if not (found.idle or self._small or pool.held_blocks > 1):
            found.restore_entry()
            return None
        try:
            allocation = self._allocate(pool, size)
        except Exception:  # PyCUDA raises it again on the slow path, which reports it
            return None
        reference = ref(allocation, found.freed)
        address, held = index(allocation), found.held
        if address not in held:  # `tidy` finds the unknown block, or a request gets it as a new one
            self._others = -1
            return None
        held[address] = reference
        if len(found.idle) < found.enough:
            if found.enough != NEVER:
                self.check_peak()
            if pool.active_bytes > self.peak_room:
                self.on_new_peak(self)
        return allocation

    def check_peak(self) -> list[tuple[Bin, int]]:
        """Make each `hit` check the bytes in use from now on. Returns the argument for `skip_peak_check`."""
        bins = list(self._bins.values())
        for found in bins:
            found.enough = NEVER
        return [(found, len(found.idle)) for found in bins]

    def skip_peak_check(self, noted: list[tuple[Bin, int]]) -> None:
        """Let `hit` skip that check, as the peak now includes the bytes in use. `noted` was read before those bytes:
        allocations and frees meanwhile only make the bounds stricter."""
        for found, idle in noted:
            found.enough = max(idle, len(found.idle))

    def dead(self) -> bool:
        """Whether the context and its memory are gone. Other memory may then have the addresses."""
        while self._witness is not None:
            lives = self.lives
            if lives():
                return False
            if self.lives is lives:  # else a signal handler freed the checked block
                return True
        return False

    def empty(self) -> bool:
        return not self._where and not self.reference().managed_bytes

    def bin_size(self, size: int) -> int:
        pool = self.reference()
        return int(pool.alloc_size(pool.bin_number(size)))

    def has_free(self, size: int) -> bool:
        """Whether a block of this size is idle."""
        found = self._bins.get(size)
        return found is not None and not self._emptying and bool(found.idle or any(map(found.free, list(found.held))))

    def tidy(self) -> None:
        """Make all blocks known before a request that idle blocks may not serve."""
        if self.reference().managed_bytes != self._others + self._sum:
            self.free_held()

    def take(self, size: int, bin_size: int) -> Any:
        allocation = self._take(size, bin_size)
        self._keep_one_idle()
        return allocation

    def reachable(self, context: int | None) -> bool:
        """Whether this thread, with this context current in PyCUDA, can free the pool's idle blocks.

        A free on a thread other than the pool's leaks in PyCUDA, unless the same context object is current. memguard
        knows that object for its own pools, and pushes it on a thread without a context.
        """
        if context is not None:
            return context == self.context and (self.made_in is not None or self._thread == threading.get_ident())
        return self.made_in is not None and self._witness is not None and self.lives()

    def undo_allocation(self, allocation: Any) -> None:
        """Free an allocation that exceeds the cap right after it was made, so that no other request gets its block."""
        self.free_held(allocation=allocation)

    def close(self) -> None:
        """Disable `hit` for all requests, until `open` enables it for a size."""
        self._ready = {}

    def open(self, size: int, bin_size: int) -> None:
        """Enable `hit` for requests of this size, if the pool has blocks for it."""
        found = self._bins.get(bin_size)
        if found is None or not self._holds or self._emptying or self.wanted or not _undisturbed():
            return
        if len(self._ready) >= _MOST_SIZES:
            self._ready = {}
        self._ready[size] = found

    def free_held(
        self, call: Callable[[Any], None] | None = None, allocation: Any = None, needed: int | None = None
    ) -> None:
        """Free the idle blocks, by `call` instead of PyCUDA's own `free_held` if given.

        `allocation`: free its block too. `needed`: free only as many blocks as return these bytes to the driver. Until
        the end, no idle block serves a request.
        """
        pool = self.reference()
        if pool is None:
            return
        if self._emptying:  # a signal handler or a finalizer interrupted another call, which then starts again
            self._again = True
            self._free(allocation)
            return
        try:
            try:
                self._emptying = True
                self.close()
                self._free(allocation)
                with self._pages.expecting(GRANULE):  # reserves the next small block, ahead of other requests
                    self._within(self._shrink, pool, call or self._raw.free_held, needed)
            finally:
                self._emptying = False
        finally:
            self._emptying = False

    def _shrink(self, pool: Any, free_held: Callable[[Any], None], needed: int | None) -> None:
        for _ in range(_MOST_TIMES):
            self._again = False
            self._empty(pool, free_held, needed)
            self._keep_one_idle()
            self._others = pool.managed_bytes - self._sum
            if not self._again:
                break
            needed = None  # the interrupting call frees all

    def _free(self, allocation: Any) -> None:
        if allocation is not None:
            allocation.free()
            self.freed(index(allocation), allocation)

    def _empty(self, pool: Any, free_held: Callable[[Any], None], needed: int | None) -> None:
        set_aside = self._set_aside
        try:
            try:
                self.close()
                set_aside.end()  # from an interruption by Ctrl-C
                if needed is not None and self._holds:
                    set_aside.take(pool, list(self._bins.values()), self._small, self._pages, needed)
                self._free_rest(pool, free_held)
            finally:
                set_aside.end()
        finally:
            set_aside.end()

    def _free_rest(self, pool: Any, free_held: Callable[[Any], None]) -> None:
        """Free the idle blocks. The small one stays if others do, or if it lies in a slab opened by other code while
        the pool has live blocks: its replacement might open a slab, and exceed the cap."""
        small_block: Any = None
        if self._small and self._holds and pool.active_bytes:
            try:
                small_block = self._raw.allocate(pool, 1)
            except Exception as error:  # without a current context, where PyCUDA frees the small block too
                _log.debug("pycuda: the pool's idle block goes too: %s", error)
        address = index(small_block) if small_block is not None else 0
        where = self._where.get(address)
        if where is not None and (self._set_aside or self._pages.in_slab_of_others(address, where.size)):
            where.record_allocation(address, small_block)
        else:
            small_block = None
        self._witness, self.lives = None, _unknown  # the free of the witness block would look like the context's end
        try:
            free_held(pool)
            self._clear()
            self._set_aside.end()
            self._forget_freed()
        finally:
            self._choose_witness()

    def stop_holding(self, call: Callable[[Any], None]) -> None:
        self._stop()
        self.free_held(call)

    def freed(self, address: int, allocation: Any) -> bool:
        """Record an explicit free of an allocation whose object still exists. False if it is not of this pool."""
        found = self._where.get(address)
        known = found.held.get(address) if found is not None else None
        if found is None or known is None or known() is not allocation:
            return False
        if address in found.held:  # else a signal handler has freed the block since
            found.held[address] = None  # drops the reference and its callback: the object's end is no second free
            found.freed(None)
        return True

    def refresh(self) -> None:
        """Drop the blocks that other code has freed."""
        pool = self.reference()
        managed = pool.managed_bytes if pool is not None else 0
        if not managed:
            self.forget(unless_used=True)
        elif managed != self._others + self._sum and (managed, self._sum) != self._refreshed:
            self._clear()
            self._forget_freed()
            self._refreshed = managed, self._sum

    def refreshed_figures(self) -> tuple[int, list[tuple[int, int]]]:
        """`active_bytes` after a `refresh`, with address and size of each block without an allocation: a trim would
        free these."""
        pool = self.reference()
        if pool is None or pool.managed_bytes != self._others + self._sum or not self._sum:
            self.refresh()
        unused = [
            (address, found.size)
            for found in list(self._bins.values())
            if found.held
            for address, allocation in list(found.held.items())
            if allocation is None or allocation() is None
        ]
        active = int(pool.active_bytes) if pool is not None else 0
        return active - self._set_aside.bytes() if self._emptying else active, unused

    def active_bytes(self) -> int:
        pool = self.reference()
        active = int(pool.active_bytes) if pool is not None else 0
        return active - self._set_aside.bytes() if self._emptying else active

    def forget(self, *, unless_used: bool = False) -> None:
        """Stop counting the pool's blocks; with `unless_used` only while the pool has none at all."""
        self.close()
        for address, known in list(self._ids.items()):
            pool = self.reference() if unless_used else None
            if pool is not None and pool.managed_bytes:  # a signal handler has allocated
                return
            self._forget(address, known)

    def _bin(self, size: int) -> Bin:
        found = self._bins.get(size)
        return found if found is not None else self._bins.setdefault(size, Bin(size))

    def _take(self, size: int, bin_size: int) -> Any:
        with self._pages.expecting(bin_size):
            return self._grow(size, bin_size)

    def _grow(self, size: int, bin_size: int) -> Any:
        pool = self.reference()
        self.check_peak()
        before = pool.managed_bytes
        try:
            allocation = self._within(self._raw.allocate, pool, size)
        except BaseException:
            if pool.managed_bytes != before:  # it freed idle blocks, but the driver still refused
                self.free_held()
            raise
        address, grown = index(allocation), pool.managed_bytes - before
        found = self._bin(bin_size)
        known = self._ids.get(address)
        if grown and address in self._where and known != contexts.buffer(address):
            self._forget(address, known)  # an earlier block, freed by other code
        as_foreseen = grown == bin_size if address not in self._where else grown == 0 and address in found.held
        if address not in found.held:
            self._forget(address, known)
            self._add(address, found)
        found.record_allocation(address, allocation)
        if not as_foreseen:
            # PyCUDA freed some idle blocks, unknown which, because the driver refused once; or the block existed before
            # the budget. So free all idle blocks.
            self.free_held()
        return allocation

    def _within(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the pool, with the pool's context current.

        On a thread other than the pool's, PyCUDA refuses to allocate for the pool and leaks its frees, unless the
        context object of the pool's creation is current. Another object with the same handle does not suffice. Without
        a current context, the first idle block would abort the process.
        """
        ours = self.made_in
        current = None if ours is None else type(ours).get_current()
        if ours is None or current is ours or (current is not None and self._thread == threading.get_ident()):
            return call(*arguments)
        try:
            try:
                ours.push()
                return call(*arguments)
            except BaseException as error:  # frees objects in its frames here, while a context is current
                traceback.clear_frames(error.__traceback__)
                raise
            finally:
                if type(ours).get_current() is ours:
                    ours.pop()
        finally:  # again, in case a Ctrl-C interrupted the first: a context left on the stack would abort the process
            if type(ours).get_current() is ours:
                ours.pop()

    def _keep_one_idle(self) -> None:
        pool = self.reference()
        if self._keeping or not self._holds or pool.held_blocks or not pool.managed_bytes:
            return
        size = self.bin_size(1)
        try:
            self._keeping = True
            self._take(1, size)  # dropped at once, so the block stays idle in the pool
        except Exception as error:  # the GPU is full, which must not fail this allocation
            _log.debug("pycuda: no idle block for the pool: %s", error)
            return
        finally:
            self._keeping = False
        self._small = self._bin(size).idle
        if pool.held_blocks == 0:  # its user stopped it in a way that memguard does not observe
            self._stop()
            self._forget_freed()

    def _stop(self) -> None:
        """Make the pool keep no blocks: each free goes to the driver at once."""
        self._holds = False
        self._clear()

    def _clear(self) -> None:
        """Drop the knowledge of idle blocks. A request that gets one of them detects it."""
        self.close()
        for found in list(self._bins.values()):
            found.idle.clear()

    def _forget_freed(self) -> None:
        """Drop the blocks that the pool has freed. The driver reports which, as a concurrent `hit` may be using one."""
        for address, known in list(self._ids.items()):
            where = self._where.get(address)
            if where is not None and where.free(address) and not _there(address, known):
                self._forget(address, known)
        if sum(found.size for found in list(self._where.values())) > self.reference().managed_bytes:
            # Explicitly freed in a way that memguard does not observe: their objects are still alive.
            for address, known in list(self._ids.items()):
                if known is not None and not _there(address, known):
                    self._forget(address, known)

    def _add(self, address: int, found: Bin) -> None:
        known, pages, size = contexts.buffer(address), self._pages, found.size
        whole_pages = round_up(size)
        # No call in between, so a Ctrl-C finds all of it or nothing.
        self._ids[address], self._where[address] = known, found
        found.held[address] = None
        self._sum += size
        pages.queued += whole_pages
        pages.changes.append((pages.apply_add, address, size))
        pages.apply_changes()
        if self._witness is None:
            self._choose_witness()

    def _forget(self, address: int, known: int | None) -> None:
        """Stop counting the block with this id. A signal handler may have done so, and added another at its address."""
        pages = self._pages
        # No call down to `changes`, so that no signal handler runs in between.
        if address not in self._where or self._ids[address] != known:
            return
        found = self._where[address]
        del self._where[address], self._ids[address]
        if address in found.held:
            del found.held[address]
        self._sum -= found.size
        pages.changes.append((pages.apply_remove, address, found.size))
        if self._witness == address:
            self._choose_witness()
        pages.apply_changes()

    def _choose_witness(self) -> None:
        """Choose a block as witness: while the driver reports its id, the context is the same."""
        self._witness, self.lives = None, _unknown
        for address in list(self._ids):
            known = self._ids.get(address)
            if known is not None:
                lives = contexts.watch(address, known)
                if self._ids.get(address) == known:  # no signal handler has freed it since
                    self._witness, self.lives = address, lives
                    if self.context_id is None:
                        self.context_id = contexts.current_id(self.context)
                    return
        self.context_id = None


def _undisturbed() -> bool:
    """Whether this Python runs other threads and signal handlers only after calls and at backward jumps.

    Without the GIL, threads run at any time.
    """
    gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return gil()


def _there(address: int, known: int | None) -> bool:
    """Whether a block is still allocated from the driver. False if the block's id is unknown."""
    return known is not None and contexts.buffer(address) == known


def _unknown() -> bool:
    return False


class Pitched:
    """The pitched allocations on one GPU, which bypass the pools."""

    def __init__(self, pages: DriverPages) -> None:
        self.in_use = 0
        self._pages = pages

    def add(self, address: int, size: int) -> None:
        self.in_use += size
        self._pages.add(address, size)

    def remove(self, address: int, size: int) -> None:
        self.in_use -= size
        self._pages.remove(address, size)

"""Counts the driver memory of PyCUDA's pools and pitched allocations, because PyCUDA does not report their blocks."""

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
"""The maximum number of request sizes whose bin is cached. The cache takes less than a megabyte."""


@dataclass(frozen=True)
class RawPool:
    """PyCUDA's own `DeviceMemoryPool`: the class and the original methods that memguard replaces."""

    make: Callable[[], Any]
    allocate: Callable[[Any, int], Any]
    free_held: Callable[[Any], None]


class Pool:
    """Tracks the blocks of one PyCUDA pool and which of them are in use, because PyCUDA reports neither.

    A request served by an idle block takes no driver memory. So `hit` checks neither the cap nor the driver's pages,
    and takes no lock. Callers of all other methods hold the adapter's lock.

    memguard keeps one small block idle in the pool. When a block is freed into a pool without idle blocks, PyCUDA reads
    the current context; without a context, as at exit or on another thread, PyCUDA aborts the process (measured).
    """

    def __init__(
        self, pool: Callable[[], Any], context: int, uuid: str, pages: DriverPages, raw: RawPool, made_in: Any = None
    ) -> None:
        """`pool` returns PyCUDA's pool object; None if the user has deleted the pool. `context` is the handle of the
        pool's CUDA context, and `pages` counts driver pages on the GPU `uuid`. `made_in` is None for a user's pool, and
        else the PyCUDA context object that was current when memguard created the pool."""
        self.context, self.uuid = context, uuid
        self.reference = pool
        self.own: Any = None
        """PyCUDA's pool object, if memguard created the pool. None for a user's pool, which must not be kept alive."""
        self.peak_room = -1
        """If `active_bytes` exceeds this number, `hit` calls `on_new_peak`, because a new peak is possible."""
        self.on_new_peak: Callable[[Pool], None] = lambda _: None
        self.memory_exists: Callable[[], bool] = _unknown
        """Asks the driver whether the pool's memory still exists. Returns False also while the pool has no memory."""
        self.context_id: int | None = None
        """The driver's id of the context that owns the pool's memory; None if unknown, or if the pool has no memory."""
        self.made_in, self._thread = made_in, threading.get_ident()
        self._raw, self._pages = raw, pages
        self._allocate = raw.allocate
        self._set_aside = SetAsideBlocks(raw.allocate)
        self.wanted = 0
        """Idle bytes that another thread needs but cannot free. The adapter frees these bytes on a suitable thread."""
        self._bins: dict[int, Bin] = {}
        self._bin_at: dict[int, Bin] = {}
        self._ids: dict[int, int | None] = {}
        self._witness: int | None = None
        # For each request size that `hit` may serve, its bin. Before idle blocks are freed, `close` replaces this
        # dictionary, and a concurrent `hit` then returns None.
        self._ready: dict[int, Bin] = {}
        self._small: list[object] = []
        self._keeps_idle, self._freeing, self._again, self._keeping = True, False, False, False
        self._known_bytes = 0
        """The bytes of all blocks that this object has recorded."""
        self._refreshed = -1, -1
        """The pool's `managed_bytes` and `_known_bytes` after `refresh` last searched for freed blocks."""
        self._earlier_bytes: int = pool().managed_bytes
        """The bytes of blocks that the pool allocated before the budget. A block is recorded when it serves
        a request."""

    def hit(self, pool: Any, size: int) -> Any:
        """Allocate an idle block of PyCUDA's `pool`. None if no such block is recorded, or if a check fails."""
        ready = self._ready
        try:
            found = ready[size]
            found.idle.pop()
        except (IndexError, KeyError, TypeError):
            return None
        # From here to the call of `allocate`, CPython runs no other thread and no signal handler: since 3.11 it does so
        # only after calls and at backward jumps (tested on 3.11, 3.12 and 3.13, 3 million rounds each). On other
        # interpreters `open` never enables `hit`. If a finalizer inside `allocate` takes the block, `address` is new.
        if self._ready is not ready:
            return None
        if not (found.idle or self._small or pool.held_blocks > 1):
            found.restore_entry()
            return None
        try:
            allocation = self._allocate(pool, size)
        except Exception:  # the caller then allocates without `hit`, and reports errors
            return None
        reference = ref(allocation, found.freed)
        address, held = index(allocation), found.held
        if address not in held:  # an unrecorded block; -1 makes the next `free_if_unknown` free all idle blocks
            self._earlier_bytes = -1
            return None
        held[address] = reference
        if len(found.idle) < found.enough:
            if found.enough != NEVER:
                self.check_peak()
            if pool.active_bytes > self.peak_room:
                self.on_new_peak(self)
        return allocation

    def check_peak(self) -> list[tuple[Bin, int]]:
        """Make every later `hit` check for a new peak. Returns the argument for `skip_peak_check`."""
        bins = list(self._bins.values())
        for found in bins:
            found.enough = NEVER
        return [(found, len(found.idle)) for found in bins]

    def skip_peak_check(self, noted: list[tuple[Bin, int]]) -> None:
        """Let `hit` skip the check for a new peak, because the recorded peak now includes the bytes in use. `noted` is
        the result of `check_peak`, read before the bytes in use, so concurrent allocations and frees only make the
        bounds stricter."""
        for found, idle in noted:
            found.enough = max(idle, len(found.idle))

    def dead(self) -> bool:
        """True if the pool's context, and thus its memory, was destroyed. The driver may have reused the memory's
        addresses."""
        while self._witness is not None:
            lives = self.memory_exists
            if lives():
                return False
            if self.memory_exists is lives:  # no signal handler has chosen another witness block
                return True
        return False

    def empty(self) -> bool:
        return not self._bin_at and not self.reference().managed_bytes

    def bin_size(self, size: int) -> int:
        pool = self.reference()
        return int(pool.alloc_size(pool.bin_number(size)))

    def has_free(self, size: int) -> bool:
        """True if a recorded block of this bin size is idle."""
        found = self._bins.get(size)
        return found is not None and not self._freeing and bool(found.idle or any(map(found.free, list(found.held))))

    def free_if_unknown(self) -> None:
        """Free the idle blocks if the pool has unrecorded blocks. Called before a request that `hit` did not serve."""
        if self.reference().managed_bytes != self._earlier_bytes + self._known_bytes:
            self.free_held()

    def take(self, size: int, bin_size: int) -> Any:
        allocation = self._take(size, bin_size)
        self._keep_one_idle()
        return allocation

    def reachable(self, context: int | None) -> bool:
        """True if this thread, whose current PyCUDA context is `context`, can free the pool's idle blocks.

        On a thread that did not create the pool, PyCUDA leaks freed memory unless the context object of the pool's
        creation is current. memguard has that object for its own pools, and pushes it on a thread without a context.
        """
        if context is not None:
            return context == self.context and (self.made_in is not None or self._thread == threading.get_ident())
        return self.made_in is not None and self._witness is not None and self.memory_exists()

    def undo_allocation(self, allocation: Any) -> None:
        """Free an allocation that exceeds the cap and return its block to the driver, so that the pool does not keep
        the block."""
        self.free_held(allocation=allocation)

    def close(self) -> None:
        """Disable `hit` for all sizes, until `open` enables `hit` for a size."""
        self._ready = {}

    def open(self, size: int, bin_size: int) -> None:
        """Enable `hit` for requests of this size, if the pool has blocks of the bin."""
        found = self._bins.get(bin_size)
        if found is None or not self._keeps_idle or self._freeing or self.wanted or not _undisturbed():
            return
        if len(self._ready) >= _MOST_SIZES:
            self._ready = {}
        self._ready[size] = found

    def free_held(
        self, call: Callable[[Any], None] | None = None, allocation: Any = None, needed: int | None = None
    ) -> None:
        """Free the idle blocks by `call`, by default PyCUDA's own `free_held`.

        `allocation`: free this allocation's block too. `needed`: free only as many blocks as return this number of
        bytes to the driver. During the call, no request on another thread gets an idle block.
        """
        pool = self.reference()
        if pool is None:
            return
        if self._freeing:  # a signal handler or finalizer interrupted `free_held`, which then repeats
            self._again = True
            self._free(allocation)
            return
        try:
            try:
                self._freeing = True
                self.close()
                self._free(allocation)
                with self._pages.expecting(GRANULE):  # reserves a part of the cap for a new small idle block
                    self._in_context(self._shrink, pool, call or self._raw.free_held, needed)
            finally:
                self._freeing = False
        finally:
            self._freeing = False

    def _shrink(self, pool: Any, free_held: Callable[[Any], None], needed: int | None) -> None:
        for _ in range(_MOST_TIMES):
            self._again = False
            self._empty(pool, free_held, needed)
            self._keep_one_idle()
            self._earlier_bytes = pool.managed_bytes - self._known_bytes
            if not self._again:
                break
            needed = None  # the interrupting call must free all idle blocks

    def _free(self, allocation: Any) -> None:
        if allocation is not None:
            allocation.free()
            self.freed(index(allocation), allocation)

    def _empty(self, pool: Any, free_held: Callable[[Any], None], needed: int | None) -> None:
        set_aside = self._set_aside
        try:
            try:
                self.close()
                set_aside.end()  # in case a Ctrl-C interrupted the last call
                if needed is not None and self._keeps_idle:
                    set_aside.take(pool, list(self._bins.values()), self._small, self._pages, needed)
                self._free_rest(pool, free_held)
            finally:
                set_aside.end()
        finally:
            set_aside.end()

    def _free_rest(self, pool: Any, free_held: Callable[[Any], None]) -> None:
        """Free the idle blocks that are not set aside.

        While the pool has live blocks, keeps the small idle block if other blocks are set aside, or if the small block
        lies in another framework's slab, because a replacement block might open a slab and exceed the cap.
        """
        small_block: Any = None
        if self._small and self._keeps_idle and pool.active_bytes:
            try:
                small_block = self._raw.allocate(pool, 1)
            except Exception as error:  # for example without a current context
                _log.debug("pycuda: the pool's idle block goes too: %s", error)
        address = index(small_block) if small_block is not None else 0
        where = self._bin_at.get(address)
        if where is not None and (self._set_aside or self._pages.in_slab_of_others(address, where.size)):
            where.record_allocation(address, small_block)
        else:
            small_block = None
        # Forget the witness block (`_choose_witness`), because its free would look like a destroyed context.
        self._witness, self.memory_exists = None, _unknown
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
        """Record that the program called `allocation.free()`. False if the allocation belongs to another pool."""
        found = self._bin_at.get(address)
        known = found.held.get(address) if found is not None else None
        if found is None or known is None or known() is not allocation:
            return False
        if address in found.held:  # a signal handler may have freed the block
            # Remove the weak reference: when the allocation object ends, its callback must not record a second free.
            found.held[address] = None
            found.freed(None)
        return True

    def refresh(self) -> None:
        """Stop counting blocks that were freed without a call of this class."""
        pool = self.reference()
        managed = pool.managed_bytes if pool is not None else 0
        if not managed:
            self.forget(unless_used=True)
        elif managed != self._earlier_bytes + self._known_bytes and (managed, self._known_bytes) != self._refreshed:
            self._clear()
            self._forget_freed()
            self._refreshed = managed, self._known_bytes

    def refreshed_figures(self) -> tuple[int, list[tuple[int, int]]]:
        """Refresh; return `active_bytes`, and the address and size of each idle block, which a trim would free."""
        pool = self.reference()
        if pool is None or pool.managed_bytes != self._earlier_bytes + self._known_bytes or not self._known_bytes:
            self.refresh()
        unused = [
            (address, found.size)
            for found in list(self._bins.values())
            if found.held
            for address, allocation in list(found.held.items())
            if allocation is None or allocation() is None
        ]
        active = int(pool.active_bytes) if pool is not None else 0
        return active - self._set_aside.bytes() if self._freeing else active, unused

    def active_bytes(self) -> int:
        pool = self.reference()
        active = int(pool.active_bytes) if pool is not None else 0
        return active - self._set_aside.bytes() if self._freeing else active

    def forget(self, *, unless_used: bool = False) -> None:
        """Stop counting the pool's blocks. With `unless_used`, return early if the pool has allocated again."""
        self.close()
        for address, known in list(self._ids.items()):
            pool = self.reference() if unless_used else None
            if pool is not None and pool.managed_bytes:  # a signal handler has allocated from the pool
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
            allocation = self._in_context(self._raw.allocate, pool, size)
        except BaseException:
            if pool.managed_bytes != before:  # PyCUDA freed idle blocks and retried
                self.free_held()
            raise
        address, grown = index(allocation), pool.managed_bytes - before
        found = self._bin(bin_size)
        known = self._ids.get(address)
        if grown and address in self._bin_at and known != contexts.buffer(address):
            self._forget(address, known)  # the recorded block at this address no longer exists
        as_foreseen = grown == bin_size if address not in self._bin_at else grown == 0 and address in found.held
        if address not in found.held:
            self._forget(address, known)
            self._add(address, found)
        found.record_allocation(address, allocation)
        if not as_foreseen:
            # Either the driver first refused, and PyCUDA then freed some idle blocks without reporting them, or the
            # block is older than the budget. Freeing all idle blocks makes the record correct again.
            self.free_held()
        return allocation

    def _in_context(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the pool, with the pool's context current.

        On a thread that did not create the pool, PyCUDA refuses the pool's allocations and leaks freed memory, unless
        the context object of the pool's creation is current. Another object with the same handle does not suffice.
        Without a current context, a free into a pool without idle blocks aborts the process.
        """
        ours = self.made_in
        current = None if ours is None else type(ours).get_current()
        if ours is None or current is ours or (current is not None and self._thread == threading.get_ident()):
            return call(*arguments)
        try:
            try:
                ours.push()
                return call(*arguments)
            except BaseException as error:  # frees the frames' allocations while the context is current
                traceback.clear_frames(error.__traceback__)
                raise
            finally:
                if type(ours).get_current() is ours:
                    ours.pop()
        finally:  # pop even after a Ctrl-C, because a context left on the stack aborts the process at exit
            if type(ours).get_current() is ours:
                ours.pop()

    def _keep_one_idle(self) -> None:
        pool = self.reference()
        if self._keeping or not self._keeps_idle or pool.held_blocks or not pool.managed_bytes:
            return
        size = self.bin_size(1)
        try:
            self._keeping = True
            self._take(1, size)  # the allocation is dropped immediately, so the block is idle
        except Exception as error:  # a full GPU must not make the caller's allocation fail
            _log.debug("pycuda: no idle block for the pool: %s", error)
            return
        finally:
            self._keeping = False
        self._small = self._bin(size).idle
        if pool.held_blocks == 0:  # the program called PyCUDA's original `stop_holding`
            self._stop()
            self._forget_freed()

    def _stop(self) -> None:
        """Record that the pool, after `stop_holding`, keeps no idle blocks."""
        self._keeps_idle = False
        self._clear()

    def _clear(self) -> None:
        """Disable `hit`, and remove all entries of idle blocks. The blocks can still serve requests."""
        self.close()
        for found in list(self._bins.values()):
            found.idle.clear()

    def _forget_freed(self) -> None:
        """Stop counting the blocks that the pool has freed. Queries the driver for each idle block, because a
        concurrent `hit` may have used the block."""
        for address, known in list(self._ids.items()):
            where = self._bin_at.get(address)
            if where is not None and where.free(address) and not _still_allocated(address, known):
                self._forget(address, known)
        if sum(found.size for found in list(self._bin_at.values())) > self.reference().managed_bytes:
            # The program freed blocks by PyCUDA's original `free`, and still has the allocation objects.
            for address, known in list(self._ids.items()):
                if known is not None and not _still_allocated(address, known):
                    self._forget(address, known)

    def _add(self, address: int, found: Bin) -> None:
        known, pages, size = contexts.buffer(address), self._pages, found.size
        whole_pages = round_up(size)
        # No call before `changes.append`, so that a Ctrl-C cannot separate these changes.
        self._ids[address], self._bin_at[address] = known, found
        found.held[address] = None
        self._known_bytes += size
        pages.queued += whole_pages
        pages.changes.append((pages.apply_add, address, size))
        pages.apply_changes()
        if self._witness is None:
            self._choose_witness()

    def _forget(self, address: int, known: int | None) -> None:
        """Stop counting the block with this address and driver id `known`. Does nothing if a signal handler has already
        removed the block, and possibly recorded another block at the address."""
        pages = self._pages
        # No call before `changes.append`, so that no signal handler runs in between.
        if address not in self._bin_at or self._ids[address] != known:
            return
        found = self._bin_at[address]
        del self._bin_at[address], self._ids[address]
        if address in found.held:
            del found.held[address]
        self._known_bytes -= found.size
        pages.changes.append((pages.apply_remove, address, found.size))
        if self._witness == address:
            self._choose_witness()
        pages.apply_changes()

    def _choose_witness(self) -> None:
        """Choose a witness block: while the driver reports this block's id, the pool's context exists."""
        self._witness, self.memory_exists = None, _unknown
        for address in list(self._ids):
            known = self._ids.get(address)
            if known is not None:
                lives = contexts.watch(address, known)
                if self._ids.get(address) == known:  # a signal handler may have freed the block
                    self._witness, self.memory_exists = address, lives
                    if self.context_id is None:
                        self.context_id = contexts.current_id(self.context)
                    return
        self.context_id = None


def _undisturbed() -> bool:
    """True if this Python switches to other threads and signal handlers only after calls and at backward jumps.

    False without the GIL, because other threads then run at any time.
    """
    gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return gil()


def _still_allocated(address: int, known: int | None) -> bool:
    """True if the block with driver id `known` is still allocated. False if the id is unknown."""
    return known is not None and contexts.buffer(address) == known


def _unknown() -> bool:
    return False


class Pitched:
    """Counts the allocations of `mem_alloc_pitch` on one GPU, which the pools do not serve."""

    def __init__(self, pages: DriverPages) -> None:
        self.in_use = 0
        self._pages = pages

    def add(self, address: int, size: int) -> None:
        self.in_use += size
        self._pages.add(address, size)

    def remove(self, address: int, size: int) -> None:
        self.in_use -= size
        self._pages.remove(address, size)

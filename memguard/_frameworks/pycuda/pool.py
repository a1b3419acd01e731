"""Counts the driver memory of PyCUDA's pools and pitched allocations, as PyCUDA reports neither blocks nor pages."""

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
"""The most request sizes whose bin is cached: more than a program uses, in less than a megabyte."""


@dataclass(frozen=True)
class RawPool:
    """PyCUDA's own `DeviceMemoryPool`: its class, and its original methods."""

    make: Callable[[], Any]
    allocate: Callable[[Any, int], Any]
    free_held: Callable[[Any], None]


class Pool:
    """A PyCUDA pool that also records its blocks and which of them are in use: PyCUDA reports neither.

    A request served by an idle block does not change the driver's memory. So `hit` checks neither the cap nor the
    driver's pages, and takes no lock. Callers of all other methods hold the adapter's lock.

    One small block always stays idle in the pool. When a pool gets its first idle block, PyCUDA reads the current
    context; without one, as at exit or on another thread, that aborts the process (measured).
    """

    def __init__(
        self, pool: Callable[[], Any], context: int, uuid: str, pages: DriverPages, raw: RawPool, made_in: Any = None
    ) -> None:
        """`made_in` is PyCUDA's context object at the pool's creation, for memguard's own pools."""
        self.context, self.uuid = context, uuid
        self.reference = pool
        self.own: Any = None
        """PyCUDA's pool object, for memguard's own pools."""
        self.peak_room = -1
        """If `active_bytes` exceeds this, the pool calls `on_new_peak`, because a new peak is possible."""
        self.on_new_peak: Callable[[Pool], None] = lambda _: None
        self.memory_exists: Callable[[], bool] = _unknown
        """Queries the driver whether the pool's memory still exists. Also False while the pool has no memory."""
        self.context_id: int | None = None
        """The driver's id of the context that owns the pool's memory; None if unknown, or if the pool has no memory."""
        self.made_in, self._thread = made_in, threading.get_ident()
        self._raw, self._pages = raw, pages
        self._allocate = raw.allocate
        self._set_aside = SetAsideBlocks(raw.allocate)
        self.wanted = 0
        """Idle bytes that another thread needs but cannot free: this pool's next request must free them."""
        self._bins: dict[int, Bin] = {}
        self._bin_at: dict[int, Bin] = {}
        self._ids: dict[int, int | None] = {}
        self._witness: int | None = None
        # The bin by request size. Freeing idle blocks replaces this dictionary, which makes a concurrent `hit` return
        # None.
        self._ready: dict[int, Bin] = {}
        self._small: list[object] = []
        self._keeps_idle, self._freeing, self._again, self._keeping = True, False, False, False
        self._known_bytes = 0
        """Bytes of the known blocks, as PyCUDA counts them."""
        self._refreshed = -1, -1
        """PyCUDA's bytes and `_known_bytes` when `refresh` last found a difference."""
        self._earlier_bytes: int = pool().managed_bytes
        """Bytes of blocks allocated before the budget. A request that is served by such a block adds the block to the
        known ones."""

    def hit(self, pool: Any, size: int) -> Any:
        """Allocate an idle block of PyCUDA's `pool`. None if there is none, or if a check fails."""
        ready = self._ready
        try:
            found = ready[size]
            found.idle.pop()
        except (IndexError, KeyError, TypeError):
            return None
        # From here to the call of `allocate`, CPython runs no other thread and no signal handler: since 3.11 it does so
        # only after calls and at backward jumps (tested on 3.11, 3.12 and 3.13, 3 million rounds each). On other
        # interpreters `open` never enables a `hit`. The address shows an interruption within the call, such as a
        # finalizer's.
        if self._ready is not ready:
            return None
        if not (found.idle or self._small or pool.held_blocks > 1):
            found.restore_entry()
            return None
        try:
            allocation = self._allocate(pool, size)
        except Exception:  # the slow path raises the error again and reports it
            return None
        reference = ref(allocation, found.freed)
        address, held = index(allocation), found.held
        if address not in held:  # `free_if_unknown` finds the unknown block, or a later request adds it as a new one
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
        """Make each `hit` check the bytes in use from now on. Returns the argument for `skip_peak_check`."""
        bins = list(self._bins.values())
        for found in bins:
            found.enough = NEVER
        return [(found, len(found.idle)) for found in bins]

    def skip_peak_check(self, noted: list[tuple[Bin, int]]) -> None:
        """Make `hit` skip the check of the bytes in use, because the recorded peak now includes them. `noted` was read
        before those bytes, so concurrent allocations and frees only make the bounds stricter."""
        for found, idle in noted:
            found.enough = max(idle, len(found.idle))

    def dead(self) -> bool:
        """True if the context, and with it the pool's memory, was destroyed. The driver may have reused the
        addresses."""
        while self._witness is not None:
            lives = self.memory_exists
            if lives():
                return False
            if self.memory_exists is lives:  # false if a signal handler freed the checked block
                return True
        return False

    def empty(self) -> bool:
        return not self._bin_at and not self.reference().managed_bytes

    def bin_size(self, size: int) -> int:
        pool = self.reference()
        return int(pool.alloc_size(pool.bin_number(size)))

    def has_free(self, size: int) -> bool:
        """True if a block of this size is idle."""
        found = self._bins.get(size)
        return found is not None and not self._freeing and bool(found.idle or any(map(found.free, list(found.held))))

    def free_if_unknown(self) -> None:
        """Before a request of the slow path, free the idle blocks if the pool has unknown blocks."""
        if self.reference().managed_bytes != self._earlier_bytes + self._known_bytes:
            self.free_held()

    def take(self, size: int, bin_size: int) -> Any:
        allocation = self._take(size, bin_size)
        self._keep_one_idle()
        return allocation

    def reachable(self, context: int | None) -> bool:
        """True if this thread, whose current PyCUDA context has this handle, can free the pool's idle blocks.

        On a thread other than the pool's, PyCUDA's free leaks unless the same context object is current. For its own
        pools memguard has that object, and pushes it on a thread without a context.
        """
        if context is not None:
            return context == self.context and (self.made_in is not None or self._thread == threading.get_ident())
        return self.made_in is not None and self._witness is not None and self.memory_exists()

    def undo_allocation(self, allocation: Any) -> None:
        """Free an allocation that exceeds the cap, and return its block to the driver, so that no other request gets
        the block."""
        self.free_held(allocation=allocation)

    def close(self) -> None:
        """Disable `hit` for all sizes, until `open` enables it for a size."""
        self._ready = {}

    def open(self, size: int, bin_size: int) -> None:
        """Enable `hit` for requests of this size, if the pool has blocks for it."""
        found = self._bins.get(bin_size)
        if found is None or not self._keeps_idle or self._freeing or self.wanted or not _undisturbed():
            return
        if len(self._ready) >= _MOST_SIZES:
            self._ready = {}
        self._ready[size] = found

    def free_held(
        self, call: Callable[[Any], None] | None = None, allocation: Any = None, needed: int | None = None
    ) -> None:
        """Free the idle blocks, with `call` if given, else with PyCUDA's own `free_held`. `allocation`: free this
        allocation's block too. `needed`: free only as many blocks as return these bytes to the driver. During the call
        no idle block serves a request.
        """
        pool = self.reference()
        if pool is None:
            return
        if self._freeing:  # this call interrupts another one (signal handler, finalizer), which starts again afterwards
            self._again = True
            self._free(allocation)
            return
        try:
            try:
                self._freeing = True
                self.close()
                self._free(allocation)
                with self._pages.expecting(GRANULE):  # reserves room for the next small block
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
            needed = None  # an interrupting call requested to free all

    def _free(self, allocation: Any) -> None:
        if allocation is not None:
            allocation.free()
            self.freed(index(allocation), allocation)

    def _empty(self, pool: Any, free_held: Callable[[Any], None], needed: int | None) -> None:
        set_aside = self._set_aside
        try:
            try:
                self.close()
                set_aside.end()  # nothing to end unless a Ctrl-C interrupted the last call
                if needed is not None and self._keeps_idle:
                    set_aside.take(pool, list(self._bins.values()), self._small, self._pages, needed)
                self._free_rest(pool, free_held)
            finally:
                set_aside.end()
        finally:
            set_aside.end()

    def _free_rest(self, pool: Any, free_held: Callable[[Any], None]) -> None:
        """Free the idle blocks. The small one stays if blocks are set aside, or if it lies in another framework's slab
        while the pool has live blocks: a new small block might open a slab, and exceed the cap."""
        small_block: Any = None
        if self._small and self._keeps_idle and pool.active_bytes:
            try:
                small_block = self._raw.allocate(pool, 1)
            except Exception as error:  # without a current context PyCUDA frees the small block too
                _log.debug("pycuda: the pool's idle block goes too: %s", error)
        address = index(small_block) if small_block is not None else 0
        where = self._bin_at.get(address)
        if where is not None and (self._set_aside or self._pages.in_slab_of_others(address, where.size)):
            where.record_allocation(address, small_block)
        else:
            small_block = None
        # Freeing the witness block would look like the end of its context.
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
        """Record an explicit free of an allocation whose object still exists. False if the allocation belongs to
        another pool."""
        found = self._bin_at.get(address)
        known = found.held.get(address) if found is not None else None
        if found is None or known is None or known() is not allocation:
            return False
        if address in found.held:  # false if a signal handler has freed the block
            # Drops the weak reference and its callback: the object's end must not count as a second free.
            found.held[address] = None
            found.freed(None)
        return True

    def refresh(self) -> None:
        """Stop counting the blocks that other code has freed."""
        pool = self.reference()
        managed = pool.managed_bytes if pool is not None else 0
        if not managed:
            self.forget(unless_used=True)
        elif managed != self._earlier_bytes + self._known_bytes and (managed, self._known_bytes) != self._refreshed:
            self._clear()
            self._forget_freed()
            self._refreshed = managed, self._known_bytes

    def refreshed_figures(self) -> tuple[int, list[tuple[int, int]]]:
        """`active_bytes` after a `refresh`, with address and size of each block without an allocation: a trim would
        free these."""
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
        """Stop counting the pool's blocks. With `unless_used`, stop if the pool allocates one."""
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
            allocation = self._in_context(self._raw.allocate, pool, size)
        except BaseException:
            if pool.managed_bytes != before:  # PyCUDA freed idle blocks, but the driver refused again
                self.free_held()
            raise
        address, grown = index(allocation), pool.managed_bytes - before
        found = self._bin(bin_size)
        known = self._ids.get(address)
        if grown and address in self._bin_at and known != contexts.buffer(address):
            self._forget(address, known)  # an earlier block at this address, freed by other code
        as_foreseen = grown == bin_size if address not in self._bin_at else grown == 0 and address in found.held
        if address not in found.held:
            self._forget(address, known)
            self._add(address, found)
        found.record_allocation(address, allocation)
        if not as_foreseen:
            # Either the driver refused once, and PyCUDA freed some idle blocks without reporting which; or the block
            # existed before the budget. So free all idle blocks.
            self.free_held()
        return allocation

    def _in_context(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the pool, with the pool's context current.

        On a thread other than the pool's, PyCUDA refuses allocations of the pool and leaks its frees, unless the
        context object of the pool's creation is current. Another object with the same handle does not suffice. Without
        a current context, a pool's first idle block aborts the process.
        """
        ours = self.made_in
        current = None if ours is None else type(ours).get_current()
        if ours is None or current is ours or (current is not None and self._thread == threading.get_ident()):
            return call(*arguments)
        try:
            try:
                ours.push()
                return call(*arguments)
            except BaseException as error:  # frees the frames' objects here, while the context is current
                traceback.clear_frames(error.__traceback__)
                raise
            finally:
                if type(ours).get_current() is ours:
                    ours.pop()
        finally:  # repeated after a Ctrl-C: a context left on the stack aborts the process at exit
            if type(ours).get_current() is ours:
                ours.pop()

    def _keep_one_idle(self) -> None:
        pool = self.reference()
        if self._keeping or not self._keeps_idle or pool.held_blocks or not pool.managed_bytes:
            return
        size = self.bin_size(1)
        try:
            self._keeping = True
            self._take(1, size)  # dropping the allocation at once makes the block idle
        except Exception as error:  # a full GPU must not make the caller's allocation fail
            _log.debug("pycuda: no idle block for the pool: %s", error)
            return
        finally:
            self._keeping = False
        self._small = self._bin(size).idle
        if pool.held_blocks == 0:  # the user stopped the pool through a function that memguard does not replace
            self._stop()
            self._forget_freed()

    def _stop(self) -> None:
        """Record that the pool keeps no idle blocks: it frees each block at once."""
        self._keeps_idle = False
        self._clear()

    def _clear(self) -> None:
        """Forget which blocks are idle. A request that gets one of them detects it."""
        self.close()
        for found in list(self._bins.values()):
            found.idle.clear()

    def _forget_freed(self) -> None:
        """Stop counting the blocks that the pool has freed. Queries the driver for each block, because a concurrent
        `hit` may be using one."""
        for address, known in list(self._ids.items()):
            where = self._bin_at.get(address)
            if where is not None and where.free(address) and not _still_allocated(address, known):
                self._forget(address, known)
        if sum(found.size for found in list(self._bin_at.values())) > self.reference().managed_bytes:
            # Blocks freed explicitly through a function that memguard does not replace, with live allocation objects.
            for address, known in list(self._ids.items()):
                if known is not None and not _still_allocated(address, known):
                    self._forget(address, known)

    def _add(self, address: int, found: Bin) -> None:
        known, pages, size = contexts.buffer(address), self._pages, found.size
        whole_pages = round_up(size)
        # No call in between: a Ctrl-C comes before all of these changes or after them.
        self._ids[address], self._bin_at[address] = known, found
        found.held[address] = None
        self._known_bytes += size
        pages.queued += whole_pages
        pages.changes.append((pages.apply_add, address, size))
        pages.apply_changes()
        if self._witness is None:
            self._choose_witness()

    def _forget(self, address: int, known: int | None) -> None:
        """Stop counting the block with this id. A signal handler may have done so already, and added another block at
        this address."""
        pages = self._pages
        # No call until `changes`, so that no signal handler runs in between.
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
                if self._ids.get(address) == known:  # false if a signal handler has freed the block
                    self._witness, self.memory_exists = address, lives
                    if self.context_id is None:
                        self.context_id = contexts.current_id(self.context)
                    return
        self.context_id = None


def _undisturbed() -> bool:
    """Whether this Python runs other threads and signal handlers only after calls and at backward jumps.

    False without the GIL, where threads run at any time.
    """
    gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return gil()


def _still_allocated(address: int, known: int | None) -> bool:
    """Whether the driver still has this block. False if the block's id is unknown."""
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

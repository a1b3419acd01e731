"""Counts what PyCUDA's pools hold of the driver's memory, because PyCUDA reports neither blocks nor pages."""

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
from memguard._frameworks.pycuda.aside import NEVER, Aside, Bin

_MOST_TIMES = 8
_MOST_SIZES = 4096
"""So many sizes of requests are remembered with their bin. More than a program repeats, and less than a megabyte."""


@dataclass(frozen=True)
class RawPool:
    """PyCUDA's own `DeviceMemoryPool`: its class, and its methods as they were before they were replaced."""

    make: Callable[[], Any]
    allocate: Callable[[Any, int], Any]
    free_held: Callable[[Any], None]


class Pool:
    """A PyCUDA pool, and what it does not report: which blocks it has, and which of them are handed out.

    A request that an idle block serves changes nothing that the driver holds. So neither the cap nor the driver's
    pages have to be looked at, and `hit` takes no lock. All other methods need the adapter's.

    One small block always stays idle in the pool. PyCUDA's pool asks for the current context when its first block is
    given back; if none is current, as at exit or on another thread, that aborts the process (measured).
    """

    def __init__(
        self, pool: Callable[[], Any], context: int, uuid: str, pages: DriverPages, raw: RawPool, made_in: Any = None
    ) -> None:
        """`made_in` is the context that was current when the pool was made, if it was made on this thread."""
        self.context, self.uuid = context, uuid
        self.reference = pool
        self.own: Any = None
        """PyCUDA's pool, if it is memguard's own."""
        self.peak_room = -1
        """Once the pool's `active_bytes` are above this, it calls `on_new_peak`: there may be one."""
        self.on_new_peak: Callable[[Pool], None] = lambda _: None
        self.lives: Callable[[], bool] = _unknown
        """Asks the driver whether the pool's memory is still there. False also while it has none."""
        self.context_id: int | None = None
        """That of the driver's context in which the pool's memory lies; None if not known, or while it has none."""
        self.made_in, self._thread = made_in, threading.get_ident()
        self._raw, self._pages = raw, pages
        self._allocate = raw.allocate
        self._aside = Aside(raw.allocate)
        self.wanted = 0
        """So many of its idle bytes somebody needed who could not give them back: the next request has to."""
        self._bins: dict[int, Bin] = {}
        self._where: dict[int, Bin] = {}
        self._ids: dict[int, int | None] = {}
        self._witness: int | None = None
        # Whoever gives idle blocks back puts another dictionary in its place: a `hit` under way then gives up.
        self._ready: dict[int, Bin] = {}
        self._small: list[object] = []
        self._holds, self._emptying, self._again, self._keeping = True, False, False, False
        self._sum = 0
        """Bytes of the known blocks, as PyCUDA counts them."""
        self._looked = -1, -1
        """What PyCUDA and `_sum` said when `look` last found that they differ."""
        self._others: int = pool().managed_bytes
        """Those of blocks from before the budget. None is handed out here without being found."""

    def hit(self, pool: Any, size: int) -> Any:
        """An idle block for the request, of PyCUDA's `pool`; None if there is none, or something is not as known."""
        ready = self._ready
        try:
            found = ready[size]
            found.idle.pop()
        except (IndexError, KeyError, TypeError):
            return None
        # CPython runs no other thread and no signal handler from here to the call of `allocate`: from 3.11 on it does
        # so only after calls and at jumps back (tried on 3.11, 3.12 and 3.13, 3 million rounds each). Where that does
        # not hold, `open` lets no request get here. What comes within the call, as a finalizer may, shows in the
        # address.
        if self._ready is not ready:
            return None
        if not (found.idle or self._small or pool.held_blocks > 1):
            found.put_back()
            return None
        try:
            allocation = self._allocate(pool, size)
        except Exception:  # PyCUDA says so again where it can be told
            return None
        reference = ref(allocation, found.freed)
        address, held = index(allocation), found.held
        if address not in held:  # `tidy` finds that the pool has more than is known, or gets it as a new one
            self._others = -1
            return None
        held[address] = reference
        if len(found.idle) < found.enough:
            if found.enough != NEVER:
                self.doubt()
            if pool.active_bytes > self.peak_room:
                self.on_new_peak(self)
        return allocation

    def doubt(self) -> list[tuple[Bin, int]]:
        """From now on each `hit` asks what is in use. Returns what `trust` needs."""
        bins = list(self._bins.values())
        for found in bins:
            found.enough = NEVER
        return [(found, len(found.idle)) for found in bins]

    def trust(self, noted: list[tuple[Bin, int]]) -> None:
        """The peak includes what is in use. `noted` is from before that was read: what was allocated or freed
        meanwhile only makes the bounds stricter."""
        for found, idle in noted:
            found.enough = max(idle, len(found.idle))

    def dead(self) -> bool:
        """Whether the context is gone, and its memory with it. The addresses may then belong to others."""
        while self._witness is not None:
            lives = self.lives
            if lives():
                return False
            if self.lives is lives:  # else a signal handler gave back the block that was asked for
                return True
        return False

    def empty(self) -> bool:
        return not self._where and not self.reference().managed_bytes

    def bin_size(self, size: int) -> int:
        pool = self.reference()
        return int(pool.alloc_size(pool.bin_number(size)))

    def has_free(self, size: int) -> bool:
        """Whether a block of this size lies idle."""
        found = self._bins.get(size)
        return found is not None and not self._emptying and bool(found.idle or any(map(found.free, list(found.held))))

    def tidy(self) -> None:
        """Before a request that idle blocks may not serve: make sure that all blocks are known."""
        if self.reference().managed_bytes != self._others + self._sum:
            self.free_held()

    def take(self, size: int, bin_size: int) -> Any:
        allocation = self._take(size, bin_size)
        self._keep_one_idle()
        return allocation

    def reachable(self, context: int | None) -> bool:
        """Whether its idle blocks can be given back by this thread, on which PyCUDA has this context current.

        PyCUDA leaks what is freed on another thread than the pool's, unless the very context object is current. That
        object is known of memguard's own pools: on a thread without a context it is made current for that.
        """
        if context is not None:
            return context == self.context and (self.made_in is not None or self._thread == threading.get_ident())
        return self.made_in is not None and self._witness is not None and self.lives()

    def give_back(self, allocation: Any) -> None:
        """Free an allocation that was just taken and passes the cap, so that nobody else is served by its block."""
        self.free_held(allocation=allocation)

    def close(self) -> None:
        """From now on no request is a `hit`, until `open` says so for its size."""
        self._ready = {}

    def open(self, size: int, bin_size: int) -> None:
        """From now on requests of this size may be a `hit`, if the pool has blocks for it."""
        found = self._bins.get(bin_size)
        if found is None or not self._holds or self._emptying or self.wanted or not _undisturbed():
            return
        if len(self._ready) >= _MOST_SIZES:
            self._ready = {}
        self._ready[size] = found

    def free_held(
        self, call: Callable[[Any], None] | None = None, allocation: Any = None, needed: int | None = None
    ) -> None:
        """Give the idle blocks back, through `call` if it is not PyCUDA's own `free_held` that does so.

        With `allocation` its block too. With `needed` only so many that the driver gets these bytes back. Until the end
        nothing that lies idle serves a request.
        """
        pool = self.reference()
        if pool is None:
            return
        if self._emptying:  # a signal handler or a finalizer came into another one, which then begins again
            self._again = True
            self._free(allocation)
            return
        try:
            try:
                self._emptying = True
                self.close()
                self._free(allocation)
                with self._pages.expecting(GRANULE):  # the next small block, which nobody's request may come before
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
            needed = None  # whoever came in between wants all

    def _free(self, allocation: Any) -> None:
        if allocation is not None:
            allocation.free()
            self.freed(index(allocation), allocation)

    def _empty(self, pool: Any, free_held: Callable[[Any], None], needed: int | None) -> None:
        aside = self._aside
        try:
            try:
                self.close()
                aside.end()  # left by a Ctrl-C
                if needed is not None and self._holds:
                    aside.take(pool, list(self._bins.values()), self._small, self._pages, needed)
                self._give_rest(pool, free_held)
            finally:
                aside.end()
        finally:
            aside.end()

    def _give_rest(self, pool: Any, free_held: Callable[[Any], None]) -> None:
        """Give the idle blocks back. The small one stays if others do, or if it lies in a slab of somebody else and
        there are live ones: the one that takes its place might open a slab, and pass the cap."""
        kept: Any = None
        if self._small and self._holds and pool.active_bytes:
            try:
                kept = self._raw.allocate(pool, 1)
            except Exception as error:  # without a current context, where PyCUDA frees all the same
                _log.debug("pycuda: the pool's idle block goes too: %s", error)
        address = index(kept) if kept is not None else 0
        where = self._where.get(address)
        if where is not None and (self._aside or self._pages.in_slab_of_others(address, where.size)):
            where.hand_out(address, kept)
        else:
            kept = None
        self._witness, self.lives = None, _unknown  # its end would look like that of the context
        try:
            free_held(pool)
            self._clear()
            self._aside.end()
            self._forget_gone()
        finally:
            self._choose_witness()

    def stop_holding(self, call: Callable[[Any], None]) -> None:
        self._stop()
        self.free_held(call)

    def freed(self, address: int, allocation: Any) -> bool:
        """The user has freed an allocation by hand, whose object lives on. False if it is not of this pool."""
        found = self._where.get(address)
        known = found.held.get(address) if found is not None else None
        if found is None or known is None or known() is not allocation:
            return False
        if address in found.held:  # else a signal handler has given the block back since
            found.held[address] = None  # with the reference goes its callback: the object's end is no second free
            found.freed(None)
        return True

    def look(self) -> None:
        """Forget the blocks that the pool no longer has, if something freed them that is not seen here."""
        pool = self.reference()
        managed = pool.managed_bytes if pool is not None else 0
        if not managed:
            self.forget(unless_used=True)
        elif managed != self._others + self._sum and (managed, self._sum) != self._looked:
            self._clear()
            self._forget_gone()
            self._looked = managed, self._sum

    def looked_at(self) -> tuple[int, list[tuple[int, int]]]:
        """`active_bytes` after a `look`, with address and size of the blocks that a trim gives back: those without an
        allocation."""
        pool = self.reference()
        if pool is None or pool.managed_bytes != self._others + self._sum or not self._sum:
            self.look()
        unused = [
            (address, found.size)
            for found in list(self._bins.values())
            if found.held
            for address, allocation in list(found.held.items())
            if allocation is None or allocation() is None
        ]
        active = int(pool.active_bytes) if pool is not None else 0
        return active - self._aside.bytes() if self._emptying else active, unused

    def active_bytes(self) -> int:
        pool = self.reference()
        active = int(pool.active_bytes) if pool is not None else 0
        return active - self._aside.bytes() if self._emptying else active

    def forget(self, *, unless_used: bool = False) -> None:
        """Stop counting its blocks; with `unless_used` only as long as the pool has none at all."""
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
        self.doubt()
        before = pool.managed_bytes
        try:
            allocation = self._within(self._raw.allocate, pool, size)
        except BaseException:
            if pool.managed_bytes != before:  # it gave idle blocks back, but the driver still refused
                self.free_held()
            raise
        address, grown = index(allocation), pool.managed_bytes - before
        found = self._bin(bin_size)
        known = self._ids.get(address)
        if grown and address in self._where and known != contexts.buffer(address):
            self._forget(address, known)  # of a block that went unseen
        as_foreseen = grown == bin_size if address not in self._where else grown == 0 and address in found.held
        if address not in found.held:
            self._forget(address, known)
            self._add(address, found)
        found.hand_out(address, allocation)
        if not as_foreseen:
            # PyCUDA gave back some idle blocks, unknown which, because the driver refused once; or the block was there
            # before the budget. Then all idle ones go.
            self.free_held()
        return allocation

    def _within(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the pool. On a thread other than the pool's, PyCUDA refuses to take memory for it and leaks
        what it should give back, unless the very context object that the pool was made in is current. Another object
        with the same handle is not enough. Where none is current, the first idle block would end the process."""
        ours = self.made_in
        current = None if ours is None else type(ours).get_current()
        if ours is None or current is ours or (current is not None and self._thread == threading.get_ident()):
            return call(*arguments)
        try:
            try:
                ours.push()
                return call(*arguments)
            except BaseException as error:  # what its frames keep goes now, and not where no context is current
                traceback.clear_frames(error.__traceback__)
                raise
            finally:
                if type(ours).get_current() is ours:
                    ours.pop()
        finally:  # again: a Ctrl-C may have come into the one before, and left on the stack it would end the process
            if type(ours).get_current() is ours:
                ours.pop()

    def _keep_one_idle(self) -> None:
        pool = self.reference()
        if self._keeping or not self._holds or pool.held_blocks or not pool.managed_bytes:
            return
        size = self.bin_size(1)
        try:
            self._keeping = True
            self._take(1, size)  # dropped at once, so the block stays in the pool
        except Exception as error:  # the GPU is full, which must not fail this allocation
            _log.debug("pycuda: no idle block for the pool: %s", error)
            return
        finally:
            self._keeping = False
        self._small = self._bin(size).idle
        if pool.held_blocks == 0:  # its user made it stop in a way that is not seen here
            self._stop()
            self._forget_gone()

    def _stop(self) -> None:
        """The pool keeps nothing any more: what is freed goes back to the driver at once."""
        self._holds = False
        self._clear()

    def _clear(self) -> None:
        """Nothing is known to lie idle. What does is found when it is handed out again."""
        self.close()
        for found in list(self._bins.values()):
            found.idle.clear()

    def _forget_gone(self) -> None:
        """Forget the blocks that the pool has given back. The driver says which: a `hit` may be under way with one."""
        for address, known in list(self._ids.items()):
            where = self._where.get(address)
            if where is not None and where.free(address) and not _there(address, known):
                self._forget(address, known)
        if sum(found.size for found in list(self._where.values())) > self.reference().managed_bytes:
            # Freed by hand in a way that is not seen here: their objects are still alive.
            for address, known in list(self._ids.items()):
                if known is not None and not _there(address, known):
                    self._forget(address, known)

    def _add(self, address: int, found: Bin) -> None:
        known, pages, size = contexts.buffer(address), self._pages, found.size
        whole_pages = round_up(size)
        # No call in between: a Ctrl-C finds all of it or nothing.
        self._ids[address], self._where[address] = known, found
        found.held[address] = None
        self._sum += size
        pages.coming += whole_pages
        pages.changes.append((pages.adding, address, size))
        pages.settle()
        if self._witness is None:
            self._choose_witness()

    def _forget(self, address: int, known: int | None) -> None:
        """Stop counting the block with this id. A handler may have done so, and got another one at its address."""
        pages = self._pages
        # Down to `changes` no call is made, so that no handler comes in between.
        if address not in self._where or self._ids[address] != known:
            return
        found = self._where[address]
        del self._where[address], self._ids[address]
        if address in found.held:
            del found.held[address]
        self._sum -= found.size
        pages.changes.append((pages.leaving, address, found.size))
        if self._witness == address:
            self._choose_witness()
        pages.settle()

    def _choose_witness(self) -> None:
        """The driver's id of a block tells, as long as the block is there, that the context is the same."""
        self._witness, self.lives = None, _unknown
        for address in list(self._ids):
            known = self._ids.get(address)
            if known is not None:
                lives = contexts.watch(address, known)
                if self._ids.get(address) == known:  # no signal handler has given it back since
                    self._witness, self.lives = address, lives
                    if self.context_id is None:
                        self.context_id = contexts.current_id(self.context)
                    return
        self.context_id = None


def _undisturbed() -> bool:
    """Whether this Python runs other threads and signal handlers only after calls and at jumps back.

    Without the GIL threads run at any time.
    """
    gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return gil()


def _there(address: int, known: int | None) -> bool:
    """Whether a block is still allocated from the driver. False if the driver did not say what it is."""
    return known is not None and contexts.buffer(address) == known


def _unknown() -> bool:
    return False

"""Numba's memory manager under a cap: allocation, accounting, pooling and release.

Finalizers run at any time and on any thread, even inside `memalloc` on the same thread. So they take no lock: they
change the state of their block and one figure, and append to the pool or to the freed blocks. A signal handler, or a
finalizer that allocates, runs within another allocation. So a request counts before the driver call, and a block passes
to one `Memory` without a moment between two owners. A Ctrl-C loses no block either: its `Memory` frees it. Numba's own
calls can lose memory as without memguard: a driver result that a Ctrl-C interrupts on its way through them, and an
array whose finalizer a Ctrl-C interrupts before the first statement.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from memguard._base.units import format_size, round_up
from memguard._devices import contexts, streams, suspension
from memguard._frameworks.base import TRIES, short_of, within
from memguard._frameworks.driver_pages import addresses_to_free, whole
from memguard._frameworks.numba.accounting import Bank, Figures
from memguard._frameworks.numba.contexts import current_uuid, handle_of, numba_contexts, uuid_of
from memguard._frameworks.numba.memory import memories
from memguard._frameworks.numba.pool import BACK, NEW, PENDING, Block, Mark, Pool, Taker
from memguard._frameworks.numba.watch import default_alone, ended
from memguard.errors import DeviceError, Suspended

_OUT_OF_MEMORY = 2


class Owner(Protocol):
    """The adapter, which sets the caps. `caps` are bytes by UUID."""

    caps: dict[str, int]

    def room_for(self, error: BaseException, uuid: str, size: int) -> bool: ...
    def tell(self, error: BaseException, uuid: str, size: int) -> None: ...


def capped(driver: Any) -> type:
    """The class of memory managers that check the cap of the adapter in `memguard` before they allocate."""
    Memory, Pending = memories(driver), _pending_frees(driver)  # noqa: N806 (classes)

    class MemguardMemoryManager(driver.NumbaCUDAMemoryManager):  # type: ignore[misc]
        """Numba's own memory manager, capped by memguard."""

        memguard: ClassVar[Owner | None] = None
        pooling: ClassVar[bool] = False
        """Whether the pool's marks cover all streams that Numba uses. Once False, never True again."""
        banks: ClassVar[defaultdict[str, Bank]] = defaultdict(Bank)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # Without a context, Numba only reads the version. An unknown device becomes the current one at the first
            # allocation.
            self.pool = Pool(_record)
            self.proxy = None if self.context is None else weakref.proxy(self.context)
            self._home: int | None = None  # the context's handle; 0 if Numba makes no arrays in it
            self._attach("" if self.context is None else uuid_of(self.context))
            self.deallocations = Pending(self)

        def _attach(self, uuid: str) -> None:
            """Allocate on this GPU from now on."""
            self.uuid, self.bank, self.figures = uuid, self.banks[uuid], Figures(uuid)
            self._freed = self.figures.freed
            self._member = False

        def held(self) -> int:
            """Bytes held. Callers hold the lock."""
            self.figures.apply()
            return self.figures.pages.held()

        def usage(self) -> tuple[int, int, int, int]:
            """Bytes held, in use, reclaimable, and the peak in use. Takes no lock, as its owner may wait long."""
            figures = self.figures
            if self._freed or figures.pages.changes:
                figures.settle(self.bank.lock)
            return figures.pages.counted(), figures.in_use, figures.reclaimable(), figures.peak

        def alone(self) -> bool:
            """Whether it is the only manager that has allocated on its GPU."""
            return self._member and bool(self.bank.single)

        def memalloc(self, size: int) -> Any:
            if not self.uuid and (here := current_uuid()):
                self._attach(here)
            memory, more = Memory(self, size), TRIES
            while True:
                try:
                    with self.bank.lock:
                        self._serve(memory, size)
                    return memory
                except driver.CudaAPIError as error:
                    framework = self.memguard
                    if framework is None or "OUT_OF_MEMORY" not in str(error):
                        raise
                    if more <= 0 or within(self.bank.lock) or not framework.room_for(error, self.uuid, size):
                        framework.tell(error, self.uuid, size)
                        raise
                more -= 1  # after the error and its frames are gone

        def _serve(self, memory: Taker, size: int) -> None:
            framework = self.memguard
            cap = None if framework is None else framework.caps.get(self.uuid)
            if not self._member:
                self._member = True
                self.bank.add(self)
            if cap is not None and self.pool.idle and self._from_pool(self.pool.take, memory, size, cap):
                return
            if not self._from_driver(memory, size, cap):
                with contexts.capture_safe():
                    self._after_making_room(memory, size, cap)

        def _from_pool(self, take: Callable[[int, Taker], Block | None], memory: Taker, size: int, cap: int) -> bool:
            """Serve the request with a block of the pool; not above the cap, where pooled blocks must be released."""
            figures = self.figures
            if self._freed:
                figures.apply()
            held = figures.pages.held()
            if not self.bank.single:
                held += self.bank.elsewhere(self)
            block = take(whole(size), memory) if held <= cap else None
            if block is None:
                return False
            figures.used(block, size)
            return True

        def _from_driver(self, memory: Taker, size: int, cap: int | None, last: bool = False) -> bool:
            """Serve the request from the driver, if the cap allows it. Raises the driver's error on a full GPU at
            `last`."""
            figures = self.figures
            if self._freed:
                figures.apply()
            pages, elsewhere = figures.pages, self.bank.elsewhere
            if cap is not None and not pages.fits(size, cap - elsewhere(self)):
                return False
            pooled = self._pools(cap)
            taken = whole(size) if pooled else size
            block = Block(taken, pooled)
            with pages.expecting(taken):
                # The second check, now that no other thread can take the room: a signal handler may have taken it.
                if cap is not None and not pages.fits(taken, cap - elsewhere(self) + round_up(taken)):
                    return False
                try:
                    memory._block = block
                    # One C call records the driver's result atomically.
                    deque(map(setattr, (block,), ("pointer",), map(driver.driver.cuMemAlloc, (taken,))), 0)
                except driver.CudaAPIError as error:  # its text has no size
                    if int(error.code) == _OUT_OF_MEMORY and not last:
                        return False
                    if int(error.code) == _OUT_OF_MEMORY:
                        short_of(error, size, round_up(taken), full=True)
                    raise
                block.address = int(getattr(block.pointer, "value", block.pointer))
                block.buffer = contexts.buffer(block.address)
                figures.taken(block)
            if cap is not None and self.held() + elsewhere(self) > cap:
                self._to_driver(block, NEW)  # no hole of a slab had room: the driver opened another slab
                return False
            figures.used(block, size)
            return True

        def _after_making_room(self, memory: Taker, size: int, cap: int | None) -> None:
            """Serve the request after flushing the pending frees, or after releasing as many pooled bytes as it needs.

            Releases pooled blocks within `defer_cleanup` too, which only protects pending frees: it waits rather than
            refuses. Raises Numba's own error if the cap, or the GPU, still does not allow the request with nothing
            pending or pooled.
            """
            members = [self]
            if not self.bank.single:
                members += [other for other in self.bank.all() if other is not self]
            for manager in members:
                manager.deallocations.clear()
            if cap is not None and self.pool.idle and self._from_pool(self.pool.wait, memory, size, cap):
                return
            for manager in members:
                for idle, state in manager.pool.drain():
                    manager._to_driver(idle, state)
                    if cap is not None and self._from_driver(memory, size, cap):
                        return
            if self._from_driver(memory, size, cap, last=True):
                return
            held = sum(manager.held() for manager in members)
            raise short_of(
                driver.CudaAPIError(
                    driver.binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY if hasattr(driver, "binding") else _OUT_OF_MEMORY,
                    f"Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY: asked for {format_size(size)}, holds "
                    f"{format_size(held)} of the {format_size(cap)} that the memguard budget gives numba",
                ),
                size,
                round_up(size),
                full=False,
            )

        def _pools(self, cap: int | None) -> bool:
            """Whether new blocks may enter the pool: only in the context in which marks are recorded."""
            if not self.pooling or cap is None:
                return False
            if self._home is None:
                ours = self.context is not None and any(one is self.context for one in numba_contexts())
                self._home = handle_of(self.context) if ours else 0
            return self._home != 0 and contexts.current_handle() == self._home

        def drop(self, memory: Any) -> None:
            """Make the block of an ended array pending. Called by finalizers."""
            block: Block = memory._block
            size = block.asked
            try:
                if self.figures.left(block, memory):  # else a reset has freed it
                    self.deallocations.add_item(self.carry_out, block, size)
                elif block.state is NEW and block.pointer is not None:  # a Ctrl-C came before it had an array
                    self._to_driver(block, NEW)
            except BaseException:
                self.deallocations.again()
                raise

        def carry_out(self, block: Block) -> None:
            """Carry out Numba's pending free. Called by finalizers."""
            if block.state is not PENDING:
                return
            if block.pooled and self.pooling and not block.exported:
                self.pool.put(block)
            else:
                self._to_driver(block, PENDING)

        def _to_driver(self, block: Block, state: object) -> None:
            """Free the block if it is still in this state. Called by finalizers."""
            try:
                if block.state is not state:
                    return
                if suspension.now is not None:  # the driver would block this thread until the resume
                    block.state = PENDING
                    self.pool.idle.pop(block, None)
                    self.deallocations.add_later(self.carry_out, block)
                    return
                block.state = BACK
                self.pool.idle.pop(block, None)
                # One C call records the driver's free atomically.
                self._freed.extend(zip(map(driver.driver.cuMemFree, (block.pointer,)), (block,), strict=False))
            except driver.CudaDriverError:  # the driver keeps it
                raise
            except BaseException:
                if block.state is BACK and block.buffer is not None:
                    if contexts.buffer(block.address) == block.buffer:
                        block.state = PENDING
                        self.deallocations.again()
                    else:
                        self._freed.append((None, block))  # a second record is ignored
                raise

        def give_back(self, needed: int | None = None) -> int:
            """Flush the pending frees and free pooled blocks. Callers hold the lock. Returns the bytes freed.

            `needed`: free only as many blocks as return these bytes to the driver; None: all.
            """
            before = self.held()
            self.deallocations.clear()
            if needed is None:
                self.drain()
            elif (missing := needed - before + self.held()) > 0:
                idle = list(self.pool.drain())
                go = addresses_to_free(self.figures.pages, [(block.address, block.size) for block, _ in idle], missing)
                for block, state in idle:
                    if go is None or block.address in go:
                        self._to_driver(block, state)
                self.pool.tidy()
            return int(before - self.held())

        def drain(self) -> None:
            """Free every pooled block, which needs no current context. Callers hold the lock."""
            for block, state in self.pool.drain():
                self._to_driver(block, state)

        def reset(self) -> None:
            """Free everything at once, even within `defer_cleanup`: the context may end right after it."""
            with self.bank.lock:
                super().reset()
                for block in list(self.figures.blocks):
                    self.figures.left(block, None)
                    state = block.state
                    if state is not BACK:
                        self._to_driver(block, state)
                self.drain()
                self.figures.apply()
                self._home, self._member = None, False  # if the context continues, the next allocation counts again
                self.bank.remove(self)
            if self.context is not None:
                streams.forget(handle_of(self.context))
                ended.forget(handle_of(self.context))

    return MemguardMemoryManager


def _pending_frees(driver: Any) -> type:
    class Pending(driver._PendingDeallocs):  # type: ignore[misc]
        """Numba's pending frees. Each flush records one mark for all its blocks."""

        def __init__(self, manager: Any) -> None:
            super().__init__()
            self._manager, self._pool = manager, manager.pool

        def add_later(self, free: Callable[[Block], None], block: Block) -> None:
            """Pend a free without checking whether a flush is due."""
            self._cons.append((free, block, 0))

        def clear(self) -> None:
            if suspension.now is not None:  # also pend streams, events and modules until the resume
                return
            try:
                super().clear()
            except BaseException as error:
                if not self._emptied(error):
                    self.again()
                    raise
            finally:
                if self._pool.unmarked:
                    self._pool.mark()

        def _emptied(self, error: BaseException) -> bool:
            """Whether Numba's queue of pending frees became empty between its check and its removal."""
            trace = error.__traceback__ and error.__traceback__.tb_next
            return isinstance(error, IndexError) and trace is not None and trace.tb_next is None

        def again(self) -> None:
            """Pend again the frees that a Ctrl-C interrupted. A block that then pends twice is freed once."""
            waiting = {id(handle) for _, handle, _ in self._cons.copy()}
            for block in list(self._manager.figures.blocks):
                if block.state is PENDING and id(block) not in waiting:
                    self._cons.append((self._manager.carry_out, block, 0))

    return Pending


def _record() -> Sequence[Mark] | None:
    """An event on the legacy default stream of each context of Numba: another GPU's kernels may read an array too.

    None while a stream that the legacy one waits for is capturing a CUDA graph, and where CUDA refuses. Empty if Numba
    has one context and only the legacy stream, and its work is done.
    """
    made: list[Mark] = []
    try:
        there = numba_contexts()
        if len(there) == 1 and default_alone() and _at_rest(there[0]):
            return ()
        places = [(int(context.device.id), handle_of(context)) for context in there]
        with contexts.capture_safe():
            if any(streams.awaits_capture(handle) for _, handle in places):
                return None
            made.extend(ended.under_way())
            made.extend(streams.Mark(ordinal, streams.LEGACY, handle) for ordinal, handle in places)
    except (DeviceError, Suspended):
        for mark in made:
            mark.close()
        return None
    return made


def _at_rest(context: Any) -> bool:
    """Whether all work of a context's legacy default stream is done; False unless it is the cached primary context.
    Raises DeviceError if the query would break a capture, or CUDA refuses."""
    ordinal = int(context.device.id)
    return contexts.primary(ordinal) == handle_of(context) and bool(streams.quick_idle(ordinal, streams.LEGACY, None))

"""Numba's memory manager with a cap: it allocates, counts, pools and frees the memory of Numba's arrays.

Finalizers run at any time and on any thread, even inside `memalloc` on the same thread. So they take no lock: they
change a block's state and the bytes in use, and append the block to the pool or to the freed blocks. A signal handler,
or a finalizer that allocates, may run within another allocation. So a request's bytes are reserved before the driver
call, and a block always has exactly one owner. A Ctrl-C leaks no block, because the array's `Memory` object frees it.
Numba's own code can leak memory, even without memguard, if a Ctrl-C comes between a driver call and the use of the
result, or before the first statement of an array's finalizer.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from memguard._base.units import format_size, round_up
from memguard._devices import contexts, streams, suspension
from memguard._frameworks.base import TRIES, attach_shortage, holds_lock
from memguard._frameworks.driver_pages import addresses_to_free, whole
from memguard._frameworks.numba.accounting import Figures, ManagerGroup
from memguard._frameworks.numba.contexts import current_uuid, handle_of, numba_contexts, uuid_of
from memguard._frameworks.numba.memory import memories
from memguard._frameworks.numba.pool import BACK, NEW, PENDING, Block, BlockOwner, Mark, Pool
from memguard._frameworks.numba.watch import default_alone, ended
from memguard.errors import DeviceError, Suspended

_OUT_OF_MEMORY = 2


class Owner(Protocol):
    """The methods of the adapter that a memory manager uses. `caps` is the cap in bytes, by the GPU's UUID."""

    caps: dict[str, int]

    def room_for(self, error: BaseException, uuid: str, size: int) -> bool: ...
    def report_refusal(self, error: BaseException, uuid: str, size: int) -> None: ...


def capped(driver: Any) -> type:
    """Create a memory manager class for Numba that enforces the caps of the adapter in the attribute `memguard`."""
    Memory, Pending = memories(driver), _pending_frees(driver)  # noqa: N806 (classes)

    class MemguardMemoryManager(driver.NumbaCUDAMemoryManager):  # type: ignore[misc]
        """Numba's own memory manager, capped by memguard."""

        memguard: ClassVar[Owner | None] = None
        pooling: ClassVar[bool] = False
        """True if freed blocks may enter the pool: only while the pool's events cover all streams that Numba uses. Once
        pooling has ended, it does not resume."""
        groups: ClassVar[defaultdict[str, ManagerGroup]] = defaultdict(ManagerGroup)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # Numba also creates a manager without a context, to read the manager's interface version. If the GPU is
            # unknown, the first allocation sets it to the current GPU.
            self.pool = Pool(_record)
            self.proxy = None if self.context is None else weakref.proxy(self.context)
            self._home: int | None = None  # handle of the context; 0 if the context is not Numba's
            self._attach("" if self.context is None else uuid_of(self.context))
            self.deallocations = Pending(self)

        def _attach(self, uuid: str) -> None:
            """Assign this manager to the GPU with this UUID."""
            self.uuid, self.group, self.figures = uuid, self.groups[uuid], Figures(uuid)
            self._freed = self.figures.freed
            self._member = False

        def held(self) -> int:
            """The bytes of driver memory that this manager holds. Callers hold the lock."""
            self.figures.apply()
            return self.figures.pages.held()

        def usage(self) -> tuple[int, int, int, int]:
            """The bytes held, in use and reclaimable, and the peak of the bytes in use. Does not wait for the lock,
            which an allocation may hold for a long time."""
            figures = self.figures
            if self._freed or figures.pages.changes:
                figures.apply_if_unlocked(self.group.lock)
            return figures.pages.counted(), figures.in_use, figures.reclaimable(), figures.peak

        def alone(self) -> bool:
            """True if no other manager has allocated on this manager's GPU."""
            return self._member and bool(self.group.single)

        def memalloc(self, size: int) -> Any:
            if not self.uuid and (here := current_uuid()):
                self._attach(here)
            memory, more = Memory(self, size), TRIES
            while True:
                try:
                    with self.group.lock:
                        self._serve(memory, size)
                    return memory
                except driver.CudaAPIError as error:
                    framework = self.memguard
                    if framework is None or "OUT_OF_MEMORY" not in str(error):
                        raise
                    if more <= 0 or holds_lock(self.group.lock) or not framework.room_for(error, self.uuid, size):
                        framework.report_refusal(error, self.uuid, size)
                        raise
                more -= 1  # retry outside the `except` block, whose end frees the error and its frames

        def _serve(self, memory: BlockOwner, size: int) -> None:
            framework = self.memguard
            cap = None if framework is None else framework.caps.get(self.uuid)
            if not self._member:
                self._member = True
                self.group.add(self)
            if cap is not None and self.pool.idle and self._from_pool(self.pool.take, memory, size, cap):
                return
            if not self._from_driver(memory, size, cap):
                with contexts.capture_safe():
                    self._after_making_room(memory, size, cap)

        def _from_pool(
            self, take: Callable[[int, BlockOwner], Block | None], memory: BlockOwner, size: int, cap: int
        ) -> bool:
            """Serve the request with a pooled block, found by `take` (`Pool.take` or `Pool.wait`). False if there is
            none, or if the held bytes exceed the cap, because pooled blocks must then be freed."""
            figures = self.figures
            if self._freed:
                figures.apply()
            held = figures.pages.held()
            if not self.group.single:
                held += self.group.elsewhere(self)
            block = take(whole(size), memory) if held <= cap else None
            if block is None:
                return False
            figures.count_used(block, size)
            return True

        def _from_driver(self, memory: BlockOwner, size: int, cap: int | None, last: bool = False) -> bool:
            """Serve the request by a driver allocation. False if the allocation would exceed the cap, or if the GPU is
            out of memory. With `last`, raises the driver's error if the GPU is out of memory."""
            figures = self.figures
            if self._freed:
                figures.apply()
            pages, elsewhere = figures.pages, self.group.elsewhere
            if cap is not None and not pages.fits(size, cap - elsewhere(self)):
                return False
            pooled = self._pools(cap)
            taken = whole(size) if pooled else size
            block = Block(taken, pooled)
            with pages.expecting(taken):
                # Check again now that the bytes are reserved: a signal handler may have allocated in between.
                if cap is not None and not pages.fits(taken, cap - elsewhere(self) + round_up(taken)):
                    return False
                try:
                    memory._block = block
                    # One C call allocates and stores the pointer, so that an interruption cannot leak the memory.
                    deque(map(setattr, (block,), ("pointer",), map(driver.driver.cuMemAlloc, (taken,))), 0)
                except driver.CudaAPIError as error:  # `attach_shortage` adds the size
                    if int(error.code) == _OUT_OF_MEMORY and not last:
                        return False
                    if int(error.code) == _OUT_OF_MEMORY:
                        attach_shortage(error, size, round_up(taken), full=True)
                    raise
                block.address = int(getattr(block.pointer, "value", block.pointer))
                block.buffer = contexts.buffer(block.address)
                figures.count_allocated(block)
            if cap is not None and self.held() + elsewhere(self) > cap:
                self._to_driver(block, NEW)  # the held bytes exceed the cap, because the driver opened a new slab
                return False
            figures.count_used(block, size)
            return True

        def _after_making_room(self, memory: BlockOwner, size: int, cap: int | None) -> None:
            """Serve the request after carrying out the pending frees and, if needed, after freeing pooled blocks.

            Within Numba's `defer_cleanup`, pending frees stay pending, but pooled blocks are freed, although each free
            synchronises the GPU. If the request then still exceeds the cap or the GPU's free memory, raises Numba's
            own error.
            """
            members = [self]
            if not self.group.single:
                members += [other for other in self.group.all() if other is not self]
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
            raise attach_shortage(
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
            """True if a block allocated now may be pooled later. False unless the manager's Numba context is current,
            because the pool records CUDA events in that context."""
            if not self.pooling or cap is None:
                return False
            if self._home is None:
                ours = self.context is not None and any(one is self.context for one in numba_contexts())
                self._home = handle_of(self.context) if ours else 0
            return self._home != 0 and contexts.current_handle() == self._home

        def drop(self, memory: Any) -> None:
            """Queue the free of the block of a freed array as pending. Called by finalizers."""
            block: Block = memory._block
            size = block.requested
            try:
                if self.figures.count_ended(block, memory):  # `reset` may already have freed the block
                    self.deallocations.add_item(self.carry_out, block, size)
                elif block.state is NEW and block.pointer is not None:  # a Ctrl-C came before `count_used`
                    self._to_driver(block, NEW)
            except BaseException:
                self.deallocations.requeue_interrupted()
                raise

        def carry_out(self, block: Block) -> None:
            """Carry out a pending free: put the block into the pool or free it. Called by finalizers."""
            if block.state is not PENDING:
                return
            if block.pooled and self.pooling and not block.exported:
                self.pool.put(block)
            else:
                self._to_driver(block, PENDING)

        def _to_driver(self, block: Block, state: object) -> None:
            """Return the block to the driver, if the block's state is still `state`. Called by finalizers."""
            try:
                if block.state is not state:
                    return
                if suspension.now is not None:  # `cuMemFree` would block until the resume
                    block.state = PENDING
                    self.pool.idle.pop(block, None)
                    self.deallocations.add_later(self.carry_out, block)
                    return
                block.state = BACK
                self.pool.idle.pop(block, None)
                # One C call frees the block and records the free, so that no interruption comes in between.
                self._freed.extend(zip(map(driver.driver.cuMemFree, (block.pointer,)), (block,), strict=False))
            except driver.CudaDriverError:  # the driver did not free the block
                raise
            except BaseException:
                if block.state is BACK and block.buffer is not None:
                    if contexts.buffer(block.address) == block.buffer:
                        block.state = PENDING
                        self.deallocations.requeue_interrupted()
                    else:
                        self._freed.append((None, block))  # `apply` ignores a second record of a block
                raise

        def trim_partly(self, needed: int | None = None) -> int:
            """Carry out the pending frees, then free pooled blocks. Returns the bytes freed. Callers hold the lock.

            `needed`: free only as many pooled blocks as return this number of bytes to the driver; None: all.
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
            """Free all pooled blocks. Needs no current context. Callers hold the lock."""
            for block, state in self.pool.drain():
                self._to_driver(block, state)

        def reset(self) -> None:
            """Free all memory immediately, even within `defer_cleanup`, because Numba may next destroy the context."""
            with self.group.lock:
                super().reset()
                for block in list(self.figures.blocks):
                    self.figures.count_ended(block, None)
                    state = block.state
                    if state is not BACK:
                        self._to_driver(block, state)
                self.drain()
                self.figures.apply()
                self._home, self._member = None, False  # the next allocation adds this manager to the group again
                self.group.remove(self)
            if self.context is not None:
                streams.forget(handle_of(self.context))
                ended.forget(handle_of(self.context))

    return MemguardMemoryManager


def _pending_frees(driver: Any) -> type:
    class Pending(driver._PendingDeallocs):  # type: ignore[misc]
        """Numba's queue of pending frees. Each `clear` records one set of CUDA events for the blocks that it pools."""

        def __init__(self, manager: Any) -> None:
            super().__init__()
            self._manager, self._pool = manager, manager.pool

        def add_later(self, free: Callable[[Block], None], block: Block) -> None:
            """Add a pending free, without the `clear` that Numba's `add_item` may start."""
            self._cons.append((free, block, 0))

        def clear(self) -> None:
            if suspension.now is not None:  # all frees stay pending, also of streams, events and modules
                return
            try:
                super().clear()
            except BaseException as error:
                if not self._emptied_by_other(error):
                    self.requeue_interrupted()
                    raise
            finally:
                if self._pool.unmarked:
                    self._pool.mark()

        def _emptied_by_other(self, error: BaseException) -> bool:
            """True if Numba's removal of an entry failed because another thread had just emptied the queue."""
            trace = error.__traceback__ and error.__traceback__.tb_next
            return isinstance(error, IndexError) and trace is not None and trace.tb_next is None

        def requeue_interrupted(self) -> None:
            """Queue again the pending frees that a Ctrl-C interrupted. A block that is queued twice is freed once."""
            waiting = {id(handle) for _, handle, _ in self._cons.copy()}
            for block in list(self._manager.figures.blocks):
                if block.state is PENDING and id(block) not in waiting:
                    self._cons.append((self._manager.carry_out, block, 0))

    return Pending


def _record() -> Sequence[Mark] | None:
    """Record a CUDA event on the legacy default stream of every Numba context, because another GPU's kernels may also
    use a block.

    The result includes the uncompleted events of Numba's destroyed streams. Returns None while a CUDA graph capture
    includes a stream that the legacy stream waits for, or if CUDA refuses. Returns an empty sequence, without recording
    events, if Numba has one context, works only on the legacy stream, and has no unfinished work.
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
            made.extend(ended.unfinished())
            made.extend(streams.Mark(ordinal, streams.LEGACY, handle) for ordinal, handle in places)
    except (DeviceError, Suspended):
        for mark in made:
            mark.close()
        return None
    return made


def _at_rest(context: Any) -> bool:
    """True if all work on the context's legacy default stream is done. False if memguard has cached another context as
    the GPU's primary context. Raises DeviceError if the query would break a capture, or if CUDA refuses."""
    ordinal = int(context.device.id)
    return contexts.primary(ordinal) == handle_of(context) and bool(streams.quick_idle(ordinal, streams.LEGACY, None))

"""Numba's memory manager under a cap: what it takes from the driver, counts, pools and gives back.

Finalizers run at any time and on any thread, even inside `memalloc` on the same one. So they take no lock: they append
to the log, which is applied under the GPU's lock, and to the pool. A signal handler that allocates within an allocation
finds the log being applied; what it adds follows.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from memguard._devices import contexts, streams
from memguard._frameworks.base import with_size
from memguard._frameworks.driver_pages import whole
from memguard._frameworks.numba.figures import Bank, Figures
from memguard._frameworks.numba.places import ARRAYS, current_uuid, handle_of, numba_contexts, uuid_of
from memguard._frameworks.numba.pool import Block, Mark, Pool
from memguard._frameworks.numba.watch import Addresses, covered, ended
from memguard._units import format_size
from memguard.errors import DeviceError

_OUT_OF_MEMORY = 2


class Owner(Protocol):
    """Who caps: the adapter. `caps` are bytes by UUID."""

    caps: dict[str, int]

    def tell(self, error: BaseException, uuid: str, size: int) -> None: ...


def capped(driver: Any) -> type:
    """The class of memory managers that ask the adapter in `memguard` before they take memory."""
    addresses = Addresses(driver, sys.modules.get(ARRAYS))
    exported = addresses.exported
    ctypes_of = driver.MemoryPointer.device_ctypes_pointer.fget
    value_of = driver.MemoryPointer.device_pointer_value.fget

    class Memory(driver.MemoryPointer):  # type: ignore[misc]
        """A block that an array has. It ends as Numba's own pointers do: its free becomes pending.

        Asked for its address by others than Numba's kernels and copies, it notes that.
        """

        refct = 1
        is_managed = True
        _owner = None
        _freed = False
        _block: Block

        def __init__(self, manager: Any, block: Block, size: int) -> None:
            # Numba's own would make a finalizer, which costs more than all the rest.
            self.context = manager.proxy
            self.size = self._cuda_memsize_ = size
            self._manager = manager
            self._block = block

        def _asked(self, frame: Any) -> Any:
            block = self._block
            if not block.exported and exported(frame):
                block.exported = True
            return block.pointer

        @property
        def device_pointer(self) -> Any:
            return self._asked(sys._getframe(1))

        @property
        def handle(self) -> Any:
            return self._asked(sys._getframe(1))

        @property
        def device_ctypes_pointer(self) -> Any:
            self._asked(sys._getframe(1))
            return ctypes_of(self)

        @property
        def device_pointer_value(self) -> Any:
            self._asked(sys._getframe(1))
            return value_of(self)

        def memset(self, byte: int, count: int | None = None, stream: Any = 0) -> None:
            if not covered(stream):
                self._block.exported = True
            super().memset(byte, count, stream)

        def view(self, start: int, stop: int | None = None) -> Any:
            return _cut(super().view(start, stop))

        def free(self) -> None:
            if self._freed:
                raise RuntimeError("Freeing dead memory")
            self._freed = True
            self._manager.drop(self._block)

        def __copy__(self) -> Any:
            return self

        def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:  # `sys` may be gone by then
            if not self._freed and not ends():
                self._manager.drop(self._block)

    class View(driver.OwnedPointer):  # type: ignore[misc]
        """A part of a block, which keeps it."""

        def view(self, start: int, stop: int | None = None) -> Any:
            return _cut(self._view.view(start, stop))

        @property
        def device_ctypes_pointer(self) -> Any:
            self._view.owner._asked(sys._getframe(1))
            return vars(self)["device_ctypes_pointer"]

        def __getattr__(self, name: str) -> Any:
            if name in ("device_pointer", "handle", "device_pointer_value"):
                self._view.owner._asked(sys._getframe(1))
            elif name == "memset":
                self._view.owner._block.exported = True
            return super().__getattr__(name)

    def _cut(part: Any) -> Any:
        part.__class__ = View
        return part

    class Pending(driver._PendingDeallocs):  # type: ignore[misc]
        """Numba's pending frees. After a flush one mark is recorded for all blocks that it brought."""

        def __init__(self, pool: Pool) -> None:
            super().__init__()
            self._pool = pool

        def clear(self) -> None:
            try:
                super().clear()
            finally:
                if self._pool.unmarked:
                    self._pool.mark()

    class MemguardMemoryManager(driver.NumbaCUDAMemoryManager):  # type: ignore[misc]
        """Numba's own memory manager, capped by memguard."""

        memguard: ClassVar[Owner | None] = None
        pooling: ClassVar[bool] = False
        """Whether all streams that Numba is given are covered by the pool's marks. Once False, never True again."""
        banks: ClassVar[defaultdict[str, Bank]] = defaultdict(Bank)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # With no context Numba only asks for the version. A device that is not known yet is the current one of the
            # first allocation.
            self.pool = Pool(_record)
            self.deallocations = Pending(self.pool)
            self.proxy = None if self.context is None else weakref.proxy(self.context)
            self._live: set[Block] = set()
            self._home: int | None = None  # the context's handle; 0 if it is not one that Numba makes arrays in
            self._of("" if self.context is None else uuid_of(self.context))

        def _of(self, uuid: str) -> None:
            self.uuid, self.bank, self.figures = uuid, self.banks[uuid], Figures(uuid)
            self._log = self.figures.log
            self._member = False

        def held(self) -> int:
            """Bytes, with the lock held."""
            self.figures.apply()
            return self.figures.pages.held()

        def usage(self) -> tuple[int, int, int, int]:
            """Bytes held, in use, reclaimable, and in use at most, with the lock held."""
            figures = self.figures
            if self._log:
                figures.apply()
            return figures.pages.held(), figures.in_use, figures.reclaimable(), figures.peak

        def alone(self) -> bool:
            """Whether it is the only one that has allocated on its GPU."""
            return self._member and bool(self.bank.single)

        def memalloc(self, size: int) -> Any:
            if not self.uuid and (here := current_uuid()):
                self._of(here)
            try:
                with self.bank.lock:
                    return Memory(self, self._block(size), size)
            except driver.CudaAPIError as error:
                framework = self.memguard
                if framework is not None and "OUT_OF_MEMORY" in str(error):
                    framework.tell(error, self.uuid, size)
                raise

        def _block(self, size: int) -> Block:
            framework = self.memguard
            cap = None if framework is None else framework.caps.get(self.uuid)
            block = None
            if not self._member:
                self._member = True
                self.bank.add(self)
            if cap is not None and self.pool.idle:
                block = self._pooled(self.pool.take, size, cap)
            if block is None:
                block = self._drawn(size, cap)
                if block is None:
                    block = self._given_way(size, cap)
            self._live.add(block)
            return block

        def _pooled(self, take: Callable[[int], Block | None], size: int, cap: int) -> Block | None:
            """A block of the pool; none above the cap, where it has to be given back."""
            figures = self.figures
            if self._log:
                figures.apply()
            held = figures.pages.held()
            if not self.bank.single:
                held += self.bank.elsewhere(self)
            block = take(whole(size)) if held <= cap else None
            if block is not None:
                block.asked = size
                self._log.append((figures.used, block, size))
                figures.apply()
            return block

        def _drawn(self, size: int, cap: int | None, last: bool = False) -> Block | None:
            """A block of the driver's; None if the cap does not allow it. On a full card too; its error at `last`."""
            if self._log:
                self.figures.apply()
            pages, elsewhere = self.figures.pages, 0 if self.bank.single else self.bank.elsewhere(self)
            pooled = self._pools(cap)
            taken = whole(size) if pooled else size
            if cap is not None and not pages.fits(taken, cap - elsewhere):
                return None
            try:
                pointer = driver.driver.cuMemAlloc(taken)
            except driver.CudaAPIError as error:  # its text names no size
                if int(error.code) == _OUT_OF_MEMORY and not last:
                    return None
                with_size(error, size)
                raise
            block = Block(int(getattr(pointer, "value", pointer)), pointer, taken)
            block.asked, block.pooled = size, pooled
            self._log.append((self.figures.taken, block, size))
            if cap is not None and self.held() + elsewhere > cap:
                self._log.append(
                    (self.figures.left, block, size)
                )  # it fitted no hole in a slab: the driver opened another
                self._back(block)
                return None
            return block

        def _given_way(self, size: int, cap: int | None) -> Block:
            """Served after the pending frees were flushed, or after as much was given back as it needs.

            Raises Numba's own error if the cap, or the card, does not allow it with nothing pending and nothing pooled.
            """
            members = [self, *(other for other in list(self.bank.members) if other is not self)]
            for manager in members:
                manager.deallocations.clear()
            if cap is not None and self.pool.idle:
                block = self._pooled(self.pool.wait, size, cap)
                if block is not None:
                    return block
            for manager in members:
                for idle in manager.pool.drain():
                    manager._back(idle)
                    if cap is not None and (block := self._drawn(size, cap)) is not None:
                        return block
            block = self._drawn(size, cap, last=True)
            if block is not None:
                return block
            held = sum(manager.held() for manager in members)
            raise with_size(
                driver.CudaAPIError(
                    driver.binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY if hasattr(driver, "binding") else _OUT_OF_MEMORY,
                    f"Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY: asked for {format_size(size)}, holds "
                    f"{format_size(held)} of the {format_size(cap)} that the memguard budget gives numba",
                ),
                size,
            )

        def _pools(self, cap: int | None) -> bool:
            """Whether what is taken now may come into the pool: only in the context that marks are recorded in."""
            if not self.pooling or cap is None:
                return False
            if self._home is None:
                ours = self.context is not None and any(one is self.context for one in numba_contexts())
                self._home = handle_of(self.context) if ours else 0
            return self._home != 0 and contexts.current_handle() == self._home

        def drop(self, block: Block) -> None:
            """No array has the block any more. Called by finalizers."""
            try:
                self._live.remove(block)
            except KeyError:  # a reset has freed it
                return
            self._pend(block)

        def _pend(self, block: Block) -> None:
            self._log.append((self.figures.left, block, block.asked))
            self.deallocations.add_item(self._freed, block, block.asked)

        def _freed(self, block: Block) -> None:
            """Numba carries out the pending free. Called by finalizers."""
            if block.pooled and self.pooling and not block.exported:
                self.pool.put(block)
            else:
                self._back(block)

        def _back(self, block: Block) -> None:
            driver.driver.cuMemFree(block.pointer)
            self._log.append((self.figures.gone, block, block.asked))

        def give_back(self) -> None:
            """Flush the pending frees and give every pooled block to the driver, with the lock held."""
            self.deallocations.clear()
            self.drain()

        def drain(self) -> None:
            """Give every pooled block to the driver, which needs no current context, with the lock held."""
            for block in self.pool.drain():
                self._back(block)

        def reset(self) -> None:
            with self.bank.lock:
                while self._live:
                    block = self._live.pop()
                    block.pooled = False
                    self._pend(block)
                super().reset()
                self.give_back()
            if self.context is not None:
                streams.forget(handle_of(self.context))
                ended.forget(handle_of(self.context))
            self._home, self._member = None, False  # the context may be gone; if not, the next allocation counts again
            self.bank.members.discard(self)

    return MemguardMemoryManager


def _record() -> Sequence[Mark] | None:
    """An event on the legacy default stream of every context of Numba's: another GPU's kernels may read an array too.

    None while a stream that the legacy one waits for is capturing a CUDA graph, and where CUDA refuses.
    """
    made: list[Mark] = []
    try:
        places = [(int(context.device.id), handle_of(context)) for context in numba_contexts()]
        with contexts.beside_captures():
            if any(streams.awaits_capture(handle) for _, handle in places):
                return None
            made.extend(ended.under_way())
            made.extend(streams.Mark(ordinal, streams.LEGACY, handle) for ordinal, handle in places)
    except DeviceError:
        for mark in made:
            mark.close()
        return None
    return made

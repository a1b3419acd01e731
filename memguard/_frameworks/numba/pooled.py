"""Makes Numba allocate from the driver pool that all frameworks share under `strategy: pool`.

A memory manager allocates the memory of Numba's arrays from the shared pool. Numba's own manager defers frees until
more than ten frees, or more than a fifth of the GPU's memory, are pending. Other frameworks cannot use memory whose
free is pending. So this manager frees blocks of 2 MiB or more immediately, and defers the free of smaller blocks as
Numba does.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

from memguard._base.types import Applied, Device, Enforcement
from memguard._base.undo import Undo
from memguard._base.units import GRANULE
from memguard._devices import contexts, pool_blocks
from memguard._devices.pool_blocks import PoolBlock
from memguard._frameworks.numba.adapter import Numba
from memguard._frameworks.numba.contexts import DRIVER, handle_of, numba_contexts
from memguard._frameworks.pooled_blocks import PooledBlocks
from memguard._frameworks.replacements import Replacements
from memguard.errors import CapNotApplied, ConflictingSetting


class PooledNumba(PooledBlocks, Numba):
    """Makes Numba allocate its device arrays from the shared pool."""

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        driver: Any = sys.modules.get(DRIVER)
        needed = ("set_memory_manager", "NumbaCUDAMemoryManager", "_memory_manager", "CudaAPIError", "AutoFreePointer")
        lacking = [name for name in needed if not hasattr(driver, name)]
        if driver is None or lacking:
            what = lacking[0] if lacking else "driver"
            raise CapNotApplied(self.name, f"this numba.cuda has no {what}", "pip install -U numba-cuda")
        before = driver._memory_manager
        chosen = str(getattr(getattr(driver, "config", None), "CUDA_MEMORY_MANAGER", "default"))
        if chosen != "default" or before not in (None, driver.NumbaCUDAMemoryManager):
            setting = f"NUMBA_CUDA_MEMORY_MANAGER={chosen}" if chosen != "default" else f"set_memory_manager({before})"
            fix = "remove it, or write 'strategy: caps' in the budget"
            raise ConflictingSetting(self.name, setting, "allocates for Numba, past the shared pool", fix)
        live = [context.memory_manager for context in numba_contexts()]
        if not all(hasattr(manager, "memguard_client") for manager in live):
            why = "it was live before memguard.init(): its context keeps its memory manager"
            raise CapNotApplied(self.name, why, "call memguard.init() before Numba's first array or kernel")
        manager: Any = type(live[0]) if live else joined(driver)  # reuse the class of an earlier budget
        replaced, self._user_manager = Replacements(), before

        def restore() -> None:
            replaced.undo()
            if driver._memory_manager is manager:
                driver._memory_manager = self._user_manager
            manager.memguard_client = self._manager = None  # existing contexts then allocate as without memguard
            self.shared_pool.forget(self.name)
            self._pool_caps = {}

        undo.add(self.name, restore)
        driver.set_memory_manager(manager)
        self._pool_caps, self._manager, manager.memguard_client = dict(caps), manager, self
        self.shared_pool.count(self.name, self._counted_on)
        for owner in (driver, sys.modules.get("numba.cuda")):
            replaced.put(owner, "set_memory_manager", lambda original: self._set_later(original, driver))
        return Applied(Enforcement.ENFORCED)

    def trim(self, device: Device) -> None:
        for context in numba_contexts():
            pending = getattr(context.memory_manager, "deallocations", None)
            if pending is not None:
                with contexts.pushed(int(context.device.id)) as there:
                    if there:
                        pending.clear()
        super().trim(device)

    def forked(self) -> None:
        self._pool_caps = {}
        if self._manager is not None:
            self._manager.memguard_client = None


def joined(driver: Any) -> type:
    """Create a memory manager class for Numba, which allocates from the shared pool while `memguard_client` is set."""

    class PooledMemoryManager(driver.NumbaCUDAMemoryManager):  # type: ignore[misc]
        """Numba's own memory manager, except that arrays are allocated from memguard's shared pool."""

        memguard_client: ClassVar[PooledNumba | None] = None

        def memalloc(self, size: int) -> Any:
            owner = self.memguard_client
            blocks = None if owner is None or size <= 0 else owner.shared_pool.blocks(owner.name)
            if owner is None or blocks is None:
                return super().memalloc(size)
            held = owner._from_pool(blocks, size, self.deallocations.clear)
            if held is None:
                code = driver.binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY if hasattr(driver, "binding") else 2
                text = "Call to cuMemAllocFromPoolAsync results in CUDA_ERROR_OUT_OF_MEMORY: " + owner._no_room_text(
                    size
                )
                # A variable and the error's traceback would form a cycle, and keep the program's arrays alive.
                raise owner._with_reported_refusal_here(driver.CudaAPIError(code, text), size)
            return self._array_of(held)

        def _array_of(self, held: PoolBlock) -> Any:
            """Create Numba's pointer for the block `held`. If a Ctrl-C comes before the pointer has its finalizer, the
            block is freed with the last reference to `held`."""
            address, size = held.address, held.size
            as_pointer = getattr(getattr(driver, "binding", None), "CUdeviceptr", None)
            pointer = as_pointer(address) if as_pointer is not None else address
            allocations, pending = self.allocations, self.deallocations

            def carry_out(block: PoolBlock) -> None:
                block.give()

            def finish() -> None:
                allocations.pop(address, None)
                pending.add_item(carry_out, held, size)
                if size >= GRANULE:  # other frameworks may need this memory
                    pending.clear()

            made = driver.AutoFreePointer(weakref.proxy(self.context), pointer, size, finalizer=finish)
            allocations[address] = made
            return made.own()

        def reset(self) -> None:
            super().reset()
            if self.context is not None:
                pool_blocks.forget(handle_of(self.context))

    return PooledMemoryManager

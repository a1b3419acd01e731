"""Makes PyCUDA allocate from the driver pool that all frameworks share under `strategy: pool`.

`mem_alloc`, `mem_alloc_pitch`, `gpuarray` and `DeviceMemoryPool` use the shared pool. An allocation is a
`PointerHolderBase` object, because Python code cannot create a `DeviceAllocation` from an address. PyCUDA accepts
either type everywhere, also as an argument of a kernel. The shared pool belongs to the primary context, so allocations
in other contexts do not use the pool.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from memguard._base.types import Applied, Device, Enforcement, TraceEvent
from memguard._base.undo import Undo
from memguard._devices.pool_blocks import PoolBlock
from memguard._frameworks.pooled_blocks import PooledBlocks
from memguard._frameworks.pycuda.adapter import PyCUDA, _swap_defaults
from memguard._frameworks.pycuda.contexts import current_context, serve_by_primary, watch_streams
from memguard._frameworks.replacements import Replacements
from memguard.errors import CapNotApplied

_PITCH = 512


class PooledPyCUDA(PooledBlocks, PyCUDA):
    """Makes PyCUDA's device allocations in the shared pool."""

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        # This runs inside the import of pycuda.driver, so use only names of that module.
        drv: Any = sys.modules["pycuda.driver"]
        lacking = [name for name in ("PointerHolderBase", "DeviceMemoryPool", "MemoryError") if not hasattr(drv, name)]
        if lacking:
            raise CapNotApplied(self.name, f"this pycuda.driver has no {lacking[0]}", "pip install -U pycuda")
        notes = []
        if self._live(drv):
            notes.append("pycuda: it was live before memguard.init(): what it allocated before is not counted")
        raw_alloc, raw_pitch, pool_class = drv.mem_alloc, drv.mem_alloc_pitch, drv.DeviceMemoryPool
        raw_pool, replaced, kind = pool_class.allocate, Replacements(), _block_class(drv)

        def mem_alloc(size: int) -> Any:
            found = self._block(drv, kind, size) if replaced.active else None
            return raw_alloc(size) if found is None else found

        def allocate(pool: Any, size: int) -> Any:
            # A user's `DeviceMemoryPool` also allocates from the shared pool.
            found = self._block(drv, kind, size) if replaced.active else None
            return raw_pool(pool, size) if found is None else found

        def mem_alloc_pitch(width: int, height: int, access_size: int) -> Any:
            pitch = -(-width // _PITCH) * _PITCH
            found = self._block(drv, kind, pitch * height) if replaced.active else None
            return raw_pitch(width, height, access_size) if found is None else (found, pitch)

        def restore() -> None:
            replaced.undo()
            if self._mem_alloc is not None:
                _swap_defaults(self._mem_alloc, raw_alloc)
            self.shared_pool.forget(self.name)
            self._pool_caps, self._mem_alloc = {}, None

        undo.add(self.name, restore)
        self._pool_caps = dict(caps)
        self.shared_pool.count(self.name, self._counted_on)
        replaced.put(drv, "mem_alloc", lambda _: mem_alloc, direct=True)
        self._mem_alloc = drv.mem_alloc
        replaced.put(drv, "mem_alloc_pitch", lambda _: mem_alloc_pitch, direct=True)
        replaced.put(pool_class, "allocate", lambda _: allocate, direct=True)
        serve_by_primary(drv, replaced)
        imported = not getattr(drv.__spec__, "_initializing", False)
        watch_streams(drv, replaced, used=imported)
        _swap_defaults(raw_alloc, self._mem_alloc)
        return Applied(Enforcement.ENFORCED, notes=tuple(notes))

    def contexts(self, device: Device) -> frozenset[int]:
        return frozenset()

    def record(self) -> Callable[[], list[TraceEvent]] | None:
        return None

    def forked(self) -> None:
        self._pool_caps = {}

    def _block(self, drv: Any, kind: Any, size: int) -> Any:
        """Allocate a block of the shared pool. None if PyCUDA must serve the request itself. Raises PyCUDA's own
        MemoryError if the shared pool has too little memory."""
        if size <= 0 or current_context(drv) is None:
            return None
        blocks = self.shared_pool.blocks(self.name)
        if blocks is None:
            self._add_note(
                "pycuda: it works in a CUDA context that is not the primary one: what it allocates there lies outside "
                "the shared pool, and outside every cap"
            )
            return None
        held = self._from_pool(blocks, size, lambda: None)
        if held is not None:
            return kind(held)
        # A variable and the error's traceback would form a cycle, and keep the program's arrays alive.
        raise self._with_reported_refusal_here(drv.MemoryError("out of memory: " + self._no_room_text(size)), size)


def _block_class(drv: Any) -> type:
    class PoolAllocation(drv.PointerHolderBase):  # type: ignore[misc]
        """A block of memguard's shared pool, freed by `free` or when this object is garbage-collected."""

        def __init__(self, held: PoolBlock) -> None:
            super().__init__()
            self._held, self._address = held, held.address

        def get_pointer(self) -> int:
            return self._address

        @property
        def gpudata(self) -> int:
            """The address, which PyCUDA passes to a kernel."""
            return self._address

        def __int__(self) -> int:
            return self._address

        def __index__(self) -> int:
            return self._address

        def free(self) -> None:
            if not self._held.there:
                raise drv.LogicError("device_allocation::free failed: invalid resource handle")
            self._held.give()

    return PoolAllocation

"""The base class of the shared pool's adapters of PyCUDA and Numba, whose blocks memguard allocates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memguard._base.types import Device, Usage
from memguard._base.units import format_size
from memguard._devices import contexts
from memguard._devices.pool_blocks import PoolBlock, PoolBlocks
from memguard._frameworks.pooled import MOST_TIMES, PooledCapped
from memguard._frameworks.shared_pool import SharedPool


class PooledBlocks(PooledCapped):
    """Base class of adapters whose frameworks get their memory from memguard, which allocates from the shared pool."""

    def __init__(self, host: Any, shared_pool: SharedPool) -> None:
        super().__init__(host, shared_pool)
        self._pool_caps: dict[str, int] = {}

    def usage(self, device: Device) -> Usage | None:
        """The bytes of the framework's live blocks; the cache belongs to the pool. None if the framework has never
        allocated on the GPU."""
        blocks = self.shared_pool.blocks_on(self.name, device.uuid)
        if blocks is None:
            return None
        in_use = blocks.in_use()
        return Usage(in_use, in_use, 0)

    def trim(self, device: Device) -> None:
        """Wait for the framework's queued frees, then release the pool's idle memory to the driver."""
        blocks = self.shared_pool.blocks_on(self.name, device.uuid)
        if blocks is not None and contexts.initialised():
            blocks.wait()
            self.shared_pool.release(device.uuid)

    def about(self) -> dict[str, str]:
        return {"strategy": "pool"} if self._pool_caps else {}

    def _counted_on(self, uuid: str) -> int:
        blocks = self.shared_pool.blocks_on(self.name, uuid)
        return 0 if blocks is None else blocks.in_use()

    def _from_pool(self, blocks: PoolBlocks, size: int, flush: Callable[[], object]) -> PoolBlock | None:
        """Allocate a block; None if the pool has too little memory even after `flush` and after other frameworks
        released memory."""
        held = blocks.take(size)
        for _ in range(MOST_TIMES):
            if held is not None:
                break
            flush()
            blocks.wait()
            held = blocks.take(size)
            if held is not None or not self._request_room(self._shortage_on(self._here(), size, self._pool_caps)):
                break
        return held

    def _here(self) -> str:
        return contexts.uuid_of(contexts.current())

    def _no_room_text(self, size: int) -> str:
        """The part of the error message that lists the requested, allowed, held and in-use bytes."""
        uuid = self._here()
        held, used = self.shared_pool.figures(uuid) or (0, 0)
        return (
            f"asked for {format_size(size)}; the shared pool of the memguard budget may hold "
            f"{format_size(self._pool_caps.get(uuid))}, holds {format_size(held)}, and {format_size(used)} are in use"
        )

    def _with_reported_refusal_here(self, error: BaseException, size: int) -> BaseException:
        """Report the refused request on the current GPU. Returns the error, with the requested size attached."""
        return self._with_reported_refusal(self._here(), error, size, self._pool_caps)

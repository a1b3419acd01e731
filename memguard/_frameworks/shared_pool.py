"""The driver pool that several frameworks share under `strategy: pool`: creation, accounting and undo.

Measured on an H200: with a current pool of `maxSize` 4 GiB, torch's `cudaMallocAsync` and CuPy's async allocator stop
at 4,096 MiB together, and each reuses blocks that the other freed. memguard sets the release threshold to its maximum,
so that freed memory stays in the pool for the next request. Other code may change the threshold (CuPy's
`MemoryAsyncPool.set_limit` does), so each reading checks and restores the threshold.

Each framework registers with `SharedPool.count` a function that returns its in-use bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from memguard._base.logs import log as _log
from memguard._base.types import POOL, Device, Drift, Usage, cached
from memguard._base.units import format_size, round_up
from memguard._devices import contexts
from memguard._frameworks.base import Allocator, Framework
from memguard._frameworks.driver_pages import PIECE, returned_by_trim
from memguard._frameworks.specs import pool_capped
from memguard.errors import CapNotApplied, DeviceError

if TYPE_CHECKING:
    from memguard._devices.pool_blocks import PoolBlocks, PoolCap
    from memguard._devices.pools import CappedPool, DefaultPool


class SharedPool(Allocator):
    """One pool for each GPU. `caps` maps each GPU's UUID to the size of its pool in bytes. `warn` is called with a
    sentence for each change by other code.

    If `capped`, the driver refuses requests above the pool's size. Otherwise the pool is the device's default pool, the
    only pool that TensorFlow and JAX use. The default pool has no maximum size, so memguard's own allocators refuse
    requests, and the usage of the other frameworks is only measured.
    """

    name, requests_room = POOL, True

    def __init__(self, caps: Mapping[str, int], warn: Callable[[str], None], clients: Sequence[str] = ()) -> None:
        self.caps, self.clients, self.capped = dict(caps), tuple(clients), pool_capped(clients)
        self.adapters: dict[str, Framework] = {}
        """The adapters of the frameworks that use the pool, by name. `registry` adds them."""
        self._warn = warn
        self._pools: dict[str, CappedPool | DefaultPool] = {}
        self._limits: dict[str, PoolCap] = {}  # caps that memguard enforces, for pools that the driver does not cap
        self._ordinals: dict[str, int] = {}
        self._counts: dict[str, Callable[[str], int]] = {}
        self._blocks: dict[tuple[str, int], PoolBlocks] = {}  # by framework and context
        self._of: dict[tuple[str, str], PoolBlocks] = {}  # by framework and GPU
        self._lock = threading.RLock()
        self._making = self._over = False

    def use(self, framework: str, uuid: str, ordinal: int) -> CappedPool | DefaultPool | None:
        """The GPU's pool. The first call creates the pool and makes it the current pool. CUDA must be initialised.

        Called during allocations. Returns None for a GPU without a cap, after `restore`, and to a signal handler or
        finalizer that allocates during the pool's creation. Raises CapNotApplied if the driver cannot create the pool.
        """
        pool = self._pools.get(uuid)
        if pool is not None or uuid not in self.caps:
            return pool
        with self._lock:
            if self._making or self._over or uuid in self._pools:
                return self._pools.get(uuid)
            try:
                self._making = True
                return self._make(uuid, ordinal)
            except DeviceError as error:
                raise CapNotApplied(
                    framework,
                    f"no memory pool could be made for 'strategy: pool' ({error.advice.reason})",
                    "write 'strategy: caps', or update the NVIDIA driver to 535 or newer (CUDA 12.2)",
                ) from error
            finally:
                self._making = False

    def _make(self, uuid: str, ordinal: int) -> CappedPool | DefaultPool:
        from memguard._devices import pools
        from memguard._devices.pool_blocks import PoolCap

        pool = pools.CappedPool(ordinal, self.caps[uuid]) if self.capped else pools.DefaultPool(ordinal)
        if not self.capped:
            self._limits[uuid] = PoolCap(pool.used, self.caps[uuid])
        self._ordinals[uuid] = ordinal
        self._pools[uuid] = pool
        return pool

    def blocks(self, framework: str) -> PoolBlocks | None:
        """The framework's blocks on the GPU of this thread's current context. None if that context is not the GPU's
        primary context, or if there is no pool.

        Raises CapNotApplied like `use`.
        """
        context = contexts.current_handle()
        known = self._blocks.get((framework, context or 0))
        if known is not None:
            return known
        ordinal = contexts.current()
        if context is None or ordinal is None or contexts.primary(ordinal) != context:
            return None
        uuid = contexts.uuid_of(ordinal)
        pool = self.use(framework, uuid, ordinal)
        if pool is None:
            return None
        from memguard._devices.pool_blocks import PoolBlocks

        made = PoolBlocks(pool, ordinal, context, self._limits.get(uuid))
        found = self._blocks.setdefault((framework, context), made)
        self._of[framework, uuid] = found
        return found

    def blocks_on(self, framework: str, uuid: str) -> PoolBlocks | None:
        """The framework's blocks on a GPU; None if the framework never allocated on that GPU."""
        return self._of.get((framework, uuid))

    def begin(self, framework: str, uuid: str) -> None:
        """Create the pool. Called at the first reading of a framework that does not allocate through memguard."""
        if uuid in self._pools or self._over:
            return
        ordinal = contexts.ordinals().get(uuid)
        if ordinal is not None:
            self.use(framework, uuid, ordinal)

    def limit(self, uuid: str) -> PoolCap | None:
        """The cap that memguard's allocators check before an allocation; None if the driver caps the pool."""
        return self._limits.get(uuid)

    def count(self, framework: str, counted: Callable[[str], int]) -> None:
        """Register the function that returns the framework's in-use bytes on a GPU."""
        self._counts[framework] = counted

    def forget(self, framework: str) -> None:
        """Unregister the function that counts the framework's bytes."""
        self._counts.pop(framework, None)

    def figures(self, uuid: str) -> tuple[int, int] | None:
        """Held and used bytes of the GPU's pool; None if there is no pool yet."""
        pool = self._pools.get(uuid)
        if pool is None:
            return None
        used = pool.used()
        return max(pool.reserved(), used), used

    def remainder(self, uuid: str) -> int:
        """Bytes in use that no registered framework counts."""
        found = self.figures(uuid)
        return 0 if found is None else remainder(found[1], self._counted(uuid))

    def usage(self, device: Device) -> Usage | None:
        """Usage of the whole pool; None before the pool exists. `reclaimable` is None (unknown) while a block is live,
        because a trim releases only 32-MiB chunks without a live block, whose number the driver does not report."""
        found = self.figures(device.uuid)
        if found is None:
            return None
        self._keep(device)
        reserved, used = found
        return Usage(reserved, used, None if used else reserved)

    def trim(self, device: Device) -> None:
        """Release all idle memory, after the frameworks' queued frees have run."""
        for framework in self.adapters.values():
            if framework.usage(device) is not None:
                framework.trim(device)
        self.release(device.uuid)  # needed for TensorFlow and JAX, whose `trim` does nothing

    def trim_partly(self, device: Device, needed: int) -> None:
        """Release at least `needed` idle bytes, first without waiting.

        The driver counts memory as in use while its free is queued behind other GPU work. So if too few bytes are idle,
        `trim` makes each framework wait for its queued frees.
        """
        if self._shrink(device.uuid, needed) < needed:
            self.trim(device)

    def reusable(self, usage: Usage) -> int:
        """All idle bytes of the pool, which can serve any framework's request even if a trim would release none."""
        return cached(usage)

    def fixed(self) -> bool:
        return True

    def cache(self, device: Device, counted: int, remainder: bool) -> Usage | None:
        """Usage of the ledger's row for the pool's cache, which is the pool's memory beyond the bytes that frameworks
        count (`counted`). None if there is no pool.

        With `remainder`, a framework reports all uncounted in-use bytes as its own. Otherwise these bytes belong to
        other code that uses the current pool, and this row counts them as in use. Restores the release threshold if
        other code changed it.
        """
        found = self.figures(device.uuid)
        if found is None:
            return None
        self._keep(device)
        reserved, used = found
        unseen = 0 if remainder else max(used - counted, 0)
        return Usage(max(reserved - counted, 0), unseen, returned_by_trim(reserved, used))

    def release(self, uuid: str) -> None:
        """Release the pool's unused memory to the driver."""
        pool = self._pools.get(uuid)
        if pool is not None:
            pool.trim()

    def _shrink(self, uuid: str, needed: int) -> int:
        """Release at least `needed` bytes of idle memory to the driver, or all idle memory if it is less. Returns the
        released bytes."""
        pool = self._pools.get(uuid)
        if pool is None:
            return 0
        before = pool.reserved()
        pool.trim(max(before - round_up(needed, PIECE), 0))  # the argument is the number of bytes that the pool keeps
        return before - pool.reserved()

    def drift(self) -> list[Drift]:
        """Changes by other code that broke the pool's cap for frameworks that use the current pool; usually empty."""
        change = "another memory pool was made current on cuda:{} after memguard.init"
        return [
            Drift(change.format(self._ordinals[uuid]), "its cap does not hold")
            for uuid, pool in list(self._pools.items())
            if not pool.current()
        ]

    def restore(self) -> None:
        """Make the former pools current again. The driver destroys each pool of this object once its last allocation is
        freed.

        After an interruption, a second call restores the remaining pools.
        """
        self._over = True
        while self._pools:
            uuid = next(iter(self._pools))
            self._pools[uuid].restore()
            self._limits.pop(uuid, None)
            self._pools.pop(uuid, None)

    def forked(self) -> None:
        """Forget the pools in a forked child, because the child cannot use the parent's CUDA context."""
        self._lock, self._pools, self._over = threading.RLock(), {}, True
        self._blocks, self._of, self._limits = {}, {}, {}

    def _counted(self, uuid: str) -> dict[str, int]:
        return {name: count(uuid) for name, count in list(self._counts.items())}

    def _keep(self, device: Device) -> None:
        pool = self._pools.get(device.uuid)
        try:
            found = None if pool is None else pool.keep()
        except DeviceError as error:
            _log.debug("the shared pool's release threshold was not read: %s", error)
            return
        if found is not None:
            self._warn(
                f"the shared pool's release threshold on cuda:{self._ordinals[device.uuid]} was set to "
                f"{format_size(found)} by somebody else; memguard has set it to 'never' again"
            )


def remainder(used: int, others: Mapping[str, int]) -> int:
    """Bytes in use in the pool that no other framework counts. Never negative, although `used` and `others` are read at
    different times."""
    return max(used - sum(others.values()), 0)

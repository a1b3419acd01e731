"""The driver pool that several frameworks share under `strategy: pool`: creation, accounting and undo.

Measured on an H200: with a current pool of `maxSize` 4 GiB, torch's `cudaMallocAsync` and CuPy's async allocator stop
at 4,096 MiB together, and each reuses blocks that the other freed. The release threshold is the maximum: freed memory
stays in the pool for the next request. Other code may change the threshold (CuPy's `MemoryAsyncPool.set_limit` does),
so each reading checks it and restores it.

Each framework registers here the function that counts its bytes.
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
    """One pool for each GPU. `caps` has the size of each pool in bytes, by UUID. `warn` is called with a sentence for
    each change by other code.

    `capped`: the driver refuses requests above that size. Otherwise the pool is the device's default pool, the only one
    that TensorFlow and JAX use. The default pool has no maximum size, so memguard's own allocators refuse requests, and
    the other frameworks are only watched.
    """

    name, requests_room = POOL, True

    def __init__(self, caps: Mapping[str, int], warn: Callable[[str], None], clients: Sequence[str] = ()) -> None:
        self.caps, self.clients, self.capped = dict(caps), tuple(clients), pool_capped(clients)
        self.adapters: dict[str, Framework] = {}
        """The adapters of the frameworks that use the pool, by name. `registry` adds them."""
        self._warn = warn
        self._pools: dict[str, CappedPool | DefaultPool] = {}
        self._limits: dict[str, PoolCap] = {}  # caps that memguard enforces, of pools that the driver does not cap
        self._ordinals: dict[str, int] = {}
        self._counts: dict[str, Callable[[str], int]] = {}
        self._blocks: dict[tuple[str, int], PoolBlocks] = {}  # by framework and context
        self._of: dict[tuple[str, str], PoolBlocks] = {}  # by framework and GPU
        self._lock = threading.RLock()
        self._making = self._over = False

    def use(self, framework: str, uuid: str, ordinal: int) -> CappedPool | DefaultPool | None:
        """The GPU's pool. The first call creates it and makes it the current one. CUDA must be initialised.

        Called by allocations. None for a GPU without a cap, after `restore`, and for a signal handler or a finalizer
        that allocates during the pool's creation. Raises CapNotApplied if the driver cannot create the pool.
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
        """The framework's blocks on the GPU of this thread's current context. None if that context is not a primary
        one, or if there is no pool.

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
        """The framework's blocks on a GPU; None if it never allocated there."""
        return self._of.get((framework, uuid))

    def begin(self, framework: str, uuid: str) -> None:
        """Create the pool. Called at the first reading of a framework that allocates by itself."""
        if uuid in self._pools or self._over:
            return
        ordinal = contexts.ordinals().get(uuid)
        if ordinal is not None:
            self.use(framework, uuid, ordinal)

    def limit(self, uuid: str) -> PoolCap | None:
        """The cap that allocators check before an allocation; None if the driver caps the pool."""
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
        """Usage of the whole pool; None before it exists. `reclaimable` is None while a block is live: idle memory
        serves any client's request, but a trim releases only whole pieces."""
        found = self.figures(device.uuid)
        if found is None:
            return None
        self._keep(device)
        reserved, used = found
        return Usage(reserved, used, None if used else reserved)

    def trim(self, device: Device) -> None:
        """Release all idle memory, after the clients' queued frees have run."""
        for framework in self.adapters.values():
            if framework.usage(device) is not None:
                framework.trim(device)
        self.release(device.uuid)  # TensorFlow and JAX have no function to synchronise

    def trim_partly(self, device: Device, needed: int) -> None:
        """Release at least `needed` idle bytes in whole pieces. First releases memory that is idle now, without
        waiting.

        For the driver, memory is in use while its free is queued behind other work. So if too little is idle, each
        client synchronises as in its own trim.
        """
        if self._shrink(device.uuid, needed) < needed:
            self.trim(device)

    def reusable(self, usage: Usage) -> int:
        """All idle memory of the pool: it serves any client's request, even if a trim would release none of it."""
        return cached(usage)

    def fixed(self) -> bool:
        return True

    def cache(self, device: Device, counted: int, remainder: bool) -> Usage | None:
        """The ledger's row for the common cache: the pool's memory beyond the bytes that frameworks count (`counted`).
        None if there is no pool.

        `remainder`: a framework owns the uncounted bytes. Otherwise other code that uses the current pool owns them,
        and this row counts them as in use. Restores the release threshold if other code changed it.
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
        """Release whole pieces of idle memory to the driver, at least `needed` bytes if so many are idle. Returns the
        released bytes."""
        pool = self._pools.get(uuid)
        if pool is None:
            return 0
        before = pool.reserved()
        pool.trim(max(before - round_up(needed, PIECE), 0))  # the least size of the pool after the trim
        return before - pool.reserved()

    def drift(self) -> list[Drift]:
        """Changes by other code that broke the joint cap for frameworks that use the current pool; usually empty."""
        change = "another memory pool was made current on cuda:{} after memguard.init"
        return [
            Drift(change.format(self._ordinals[uuid]), "its cap does not hold")
            for uuid, pool in list(self._pools.items())
            if not pool.current()
        ]

    def restore(self) -> None:
        """Make the former pools current again. The driver destroys each pool of this object with its last allocation.

        A second call continues an interrupted call.
        """
        self._over = True
        while self._pools:
            uuid = next(iter(self._pools))
            self._pools[uuid].restore()
            self._limits.pop(uuid, None)
            self._pools.pop(uuid, None)

    def forked(self) -> None:
        """In a forked child: drop the pools, as the child cannot use CUDA."""
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
    """Bytes in use in the pool that no other framework counts. Clamped at 0, because the readings are taken at
    different times."""
    return max(used - sum(others.values()), 0)

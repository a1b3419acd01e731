"""The driver pool that several frameworks draw from under `strategy: pool`: made, kept, counted and taken back.

Measured on an H200: with a pool of `maxSize` 4 GiB made current, torch's `cudaMallocAsync` and CuPy's async allocator
stop at 4,096 MiB together, and each reuses the blocks that the other has freed. Its release threshold is "never": what
is freed stays, for whoever asks next. Others set that too (CuPy's `MemoryAsyncPool.set_limit` is it), so it is read
back with each reading and set again.

The frameworks do not see each other: each counts its own here, by its name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from memguard._base.logs import log as _log
from memguard._base.types import Device, Usage
from memguard._base.units import format_size, round_up
from memguard._budget import joint
from memguard._devices import contexts
from memguard._frameworks.driver_pools import PIECE, returned_by_trim
from memguard.errors import CapNotApplied, DeviceError

if TYPE_CHECKING:
    from memguard._devices.pool_blocks import PoolBlocks
    from memguard._devices.pool_cap import PoolCap
    from memguard._devices.pools import CappedPool, DefaultPool


class JointPool:
    """One pool for each GPU. `caps` is its size in bytes by UUID, `warn` is told of what changed meanwhile.

    `capped`: the driver refuses what would pass that. Else it is the device's default pool, the only one from which
    TensorFlow and JAX take, which cannot be capped: memguard's own allocators refuse, the others are watched.
    """

    def __init__(self, caps: Mapping[str, int], warn: Callable[[str], None], capped: bool = True) -> None:
        self.caps, self.capped = dict(caps), capped
        self._warn = warn
        self._pools: dict[str, CappedPool | DefaultPool] = {}
        self._limits: dict[str, PoolCap] = {}  # of those that the driver does not cap
        self._ordinals: dict[str, int] = {}
        self._counts: dict[str, Callable[[str], int]] = {}
        self._blocks: dict[tuple[str, int], PoolBlocks] = {}  # by framework and context
        self._of: dict[tuple[str, str], PoolBlocks] = {}  # by framework and GPU
        self._lock = threading.RLock()
        self._making = self._over = False

    def use(self, framework: str, uuid: str, ordinal: int) -> CappedPool | DefaultPool | None:
        """The GPU's pool, made its current one if it is the first time. CUDA must be initialised.

        Called within allocations. None for a GPU without a cap, after the end, and for a signal handler or a finalizer
        that allocates while the pool is made. Raises CapNotApplied if the driver cannot do it.
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
        from memguard._devices.pool_cap import PoolCap

        pool = pools.CappedPool(ordinal, self.caps[uuid]) if self.capped else pools.DefaultPool(ordinal)
        if not self.capped:
            self._limits[uuid] = PoolCap(pool.used, self.caps[uuid])
        self._ordinals[uuid] = ordinal
        self._pools[uuid] = pool
        return pool

    def blocks(self, framework: str) -> PoolBlocks | None:
        """The framework's blocks of the GPU whose primary context is current on this thread; None if there are none.

        Raises CapNotApplied as `use` does.
        """
        context = contexts.current_handle()
        known = self._blocks.get((framework, context or 0))
        if known is not None:
            return known
        ordinal = contexts.current()
        if context is None or ordinal is None or contexts.primary(ordinal) != context:
            return None
        uuid = next((uuid for uuid, number in contexts.ordinals().items() if number == ordinal), "")
        pool = self.use(framework, uuid, ordinal)
        if pool is None:
            return None
        from memguard._devices.pool_blocks import PoolBlocks

        made = PoolBlocks(pool, ordinal, context, self._limits.get(uuid))
        found = self._blocks.setdefault((framework, context), made)
        self._of[framework, uuid] = found
        return found

    def blocks_on(self, framework: str, uuid: str) -> PoolBlocks | None:
        """Those that it has had on a GPU; None if it has had none."""
        return self._of.get((framework, uuid))

    def begin(self, framework: str, uuid: str) -> None:
        """At a reading of a framework that allocates by itself: the pool is there from now on."""
        if uuid in self._pools or self._over:
            return
        ordinal = contexts.ordinals().get(uuid)
        if ordinal is not None:
            self.use(framework, uuid, ordinal)

    def limit(self, uuid: str) -> PoolCap | None:
        """Who is asked before an allocation, where the driver does not cap the pool; None where it does."""
        return self._limits.get(uuid)

    def count(self, framework: str, counted: Callable[[str], int]) -> None:
        """What the framework has in use on a GPU, in bytes, from now on."""
        self._counts[framework] = counted

    def forget(self, framework: str) -> None:
        """The framework does not count there any more."""
        self._counts.pop(framework, None)

    def figures(self, uuid: str) -> tuple[int, int] | None:
        """What the pool holds of the GPU and what is in use of it, in bytes; None if there is no pool yet."""
        pool = self._pools.get(uuid)
        if pool is None:
            return None
        used = pool.used()
        return max(pool.reserved(), used), used

    def remainder(self, uuid: str) -> int:
        """What is in use and nobody who counts has, in bytes."""
        found = self.figures(uuid)
        return 0 if found is None else joint.counted(found[1], self._counted(uuid))

    def usage(self, device: Device, counted: int, remainder: bool) -> Usage | None:
        """What the pool has beyond the bytes `counted` of the frameworks: the cache of all. None if there is no pool.

        `remainder`: a framework has what nobody counts. Else it is somebody's who uses the current pool unseen, and
        is in use here. Sets the release threshold again, where somebody has changed it.
        """
        found = self.figures(device.uuid)
        if found is None:
            return None
        self._keep(device)
        reserved, used = found
        unseen = 0 if remainder else max(used - counted, 0)
        return Usage(max(reserved - counted, 0), unseen, returned_by_trim(reserved, used))

    def trim(self, uuid: str) -> None:
        """Give what nobody uses back to the driver."""
        pool = self._pools.get(uuid)
        if pool is not None:
            pool.trim()

    def give_back(self, uuid: str, needed: int) -> int:
        """Give whole pieces of what idles now to the driver, of so many bytes or somewhat more. The bytes by which the
        pool has shrunk."""
        pool = self._pools.get(uuid)
        if pool is None:
            return 0
        before = pool.reserved()
        pool.trim(max(before - round_up(needed, PIECE), 0))  # it keeps that much at least
        return before - pool.reserved()

    def drift(self, framework: str) -> list[str]:
        """Why the joint cap does not hold any more for a framework that takes from the current pool; mostly nothing."""
        return [
            f"{framework}: another memory pool was made current on cuda:{self._ordinals[uuid]} after memguard.init: "
            "its cap does not hold"
            for uuid, pool in list(self._pools.items())
            if not pool.current()
        ]

    def restore(self) -> None:
        """Make the former pools current again. Each of these goes when its last allocation is freed.

        A second call does what an interrupted one has left.
        """
        self._over = True
        while self._pools:
            uuid = next(iter(self._pools))
            self._pools[uuid].restore()
            self._limits.pop(uuid, None)
            self._pools.pop(uuid, None)

    def forked(self) -> None:
        """In a forked child, where CUDA cannot be used."""
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

"""The driver's memory pools: one with a maximum size, and the device's default pool.

memguard uses the maximum size as the cap of torch's `cudaMallocAsync` backend, and of the budget's `strategy: pool`.
"""

from __future__ import annotations

from ctypes import c_int, c_uint64, c_void_p

from memguard._devices import contexts
from memguard._devices.libcuda import CUmemLocation, CUmemPoolProps, check
from memguard.errors import DeviceError

_PINNED, _ON_DEVICE = 1, 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
_RELEASE_THRESHOLD, _RESERVED, _RESERVED_PEAK, _USED = 4, 5, 6, 7  # CU_MEMPOOL_ATTR_…
_NO_RELEASE = 2**64 - 1
_FIRST_WITH_MAX_SIZE = 12020  # CUDA 12.2, as cuDriverGetVersion encodes it
_POOLS_SUPPORTED = 115  # CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED


class _Pool:
    """A memory pool of one GPU. Raises DeviceError if CUDA is not initialised or a call fails."""

    def __init__(self, ordinal: int) -> None:
        cuda = self._cuda = contexts.driver()
        version, device = c_int(), c_int()
        check("cuDriverGetVersion", cuda.cuDriverGetVersion(version))
        if version.value < _FIRST_WITH_MAX_SIZE:
            here = f"{version.value // 1000}.{version.value % 1000 // 10}"
            raise DeviceError(
                f"CUDA: a driver for CUDA {here} cannot limit a memory pool",
                fix="update the NVIDIA driver to 535 or newer (CUDA 12.2)",
            )
        check("cuDeviceGet", cuda.cuDeviceGet(device, ordinal))
        self._device, there = device.value, c_int()
        check("cuDeviceGetAttribute", cuda.cuDeviceGetAttribute(there, _POOLS_SUPPORTED, self._device))
        if not there.value:
            raise DeviceError(
                "CUDA: this GPU or driver has no memory pools (CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED is 0)",
                fix="use allocators that need none: torch's native backend, and 'strategy: caps' in the budget",
            )
        self._before = self._current()
        self._pool = 0

    @property
    def handle(self) -> int:
        return self._pool

    def reserved(self) -> int:
        """Bytes that the pool has allocated from the driver."""
        return self._attribute(_RESERVED)

    def peak(self) -> int:
        """The peak of `reserved`, in bytes."""
        return self._attribute(_RESERVED_PEAK)

    def used(self) -> int:
        """Bytes of live allocations."""
        return self._attribute(_USED)

    def keep(self) -> int | None:
        """Set memguard's release threshold again if other code changed it. Returns the value that other code set; None
        if unchanged."""
        found = self._attribute(_RELEASE_THRESHOLD)
        if found == _NO_RELEASE:
            return None
        self._set_threshold(_NO_RELEASE)
        return found

    def current(self) -> bool:
        """True while this pool is the device's current pool, from which `cudaMallocAsync` allocates."""
        return self._current() == self._pool

    def trim(self, keep: int = 0) -> None:
        """Release unused memory to the driver, but let the pool hold at least `keep` bytes."""
        self._cuda.cuMemPoolTrimTo(self._pool, keep)

    def _set_threshold(self, size: int) -> None:
        """Set the bytes of unused memory that the pool keeps at a synchronisation."""
        wanted = c_uint64(size)
        check("cuMemPoolSetAttribute", self._cuda.cuMemPoolSetAttribute(self._pool, _RELEASE_THRESHOLD, wanted))

    def _current(self) -> int:
        pool = c_void_p()
        check("cuDeviceGetMemPool", self._cuda.cuDeviceGetMemPool(pool, self._device))
        return pool.value or 0

    def _attribute(self, which: int) -> int:
        value = c_uint64()
        check("cuMemPoolGetAttribute", self._cuda.cuMemPoolGetAttribute(self._pool, which, value))
        return value.value


def trim_to(pool: int, keep: int) -> None:
    """Release unused memory of a pool, given by its handle, until it holds at most `keep` bytes.

    Raises DeviceError if CUDA is not initialised or a call fails.
    """
    check("cuMemPoolTrimTo", contexts.driver().cuMemPoolTrimTo(pool, keep))


class CappedPool(_Pool):
    """A memory pool of at most `max_size` bytes, made the device's current one: `cudaMallocAsync` allocates from it.

    Measured: PyTorch's async backend stops at exactly `maxSize` and raises its own OutOfMemoryError; PyTorch's memory
    fraction alone let the default pool hold 4 % more. Raises DeviceError if CUDA is not initialised or a call fails.
    """

    def __init__(self, ordinal: int, max_size: int) -> None:
        super().__init__(ordinal)
        self._destroyed = False
        cuda, pool = self._cuda, c_void_p()
        wanted = CUmemPoolProps(_PINNED, 0, CUmemLocation(_ON_DEVICE, ordinal), None, max_size)
        check("cuMemPoolCreate", cuda.cuMemPoolCreate(pool, wanted))
        self._pool = pool.value or 0
        try:
            # As PyTorch does with the default pool, so that freed memory stays in the pool until a trim.
            self._set_threshold(_NO_RELEASE)
            check("cuDeviceSetMemPool", cuda.cuDeviceSetMemPool(self._device, self._pool))
        except BaseException:
            cuda.cuMemPoolDestroy(self._pool)
            raise

    def restore(self) -> None:
        """Make the former pool current again. The driver destroys this pool after its last allocation is freed."""
        if self._destroyed:
            return
        if self._current() == self._pool:
            check("cuDeviceSetMemPool", self._cuda.cuDeviceSetMemPool(self._device, self._before))
        self._destroyed = True  # set first, so that an interruption cannot lead to a second destroy
        self._cuda.cuMemPoolDestroy(self._pool)


class DefaultPool(_Pool):
    """Makes the device's default pool the current one. The default pool has no maximum size. The release threshold is
    set to the maximum, so that the pool keeps freed memory."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        pool = c_void_p()
        check("cuDeviceGetDefaultMemPool", self._cuda.cuDeviceGetDefaultMemPool(pool, self._device))
        self._pool = pool.value or 0
        self._threshold = self._attribute(_RELEASE_THRESHOLD)
        """The release threshold to restore: the latest value that other code set."""
        try:
            self._set_threshold(_NO_RELEASE)
            if self._before != self._pool:
                check("cuDeviceSetMemPool", self._cuda.cuDeviceSetMemPool(self._device, self._pool))
        except BaseException:
            self._set_threshold(self._threshold)
            raise

    def keep(self) -> int | None:
        found = super().keep()
        if found is not None:
            self._threshold = found
        return found

    def restore(self) -> None:
        """Restore the release threshold that other code set last, and the former current pool."""
        if self._attribute(_RELEASE_THRESHOLD) == _NO_RELEASE:
            self._set_threshold(self._threshold)
        if self._before != self._pool and self._current() == self._pool:
            check("cuDeviceSetMemPool", self._cuda.cuDeviceSetMemPool(self._device, self._before))

"""A driver memory pool that stops at a size: the cap under PyTorch's `cudaMallocAsync` backend."""

from __future__ import annotations

from ctypes import c_int, c_uint64, c_void_p

from memguard._devices import contexts
from memguard._devices.libcuda import CUmemLocation, CUmemPoolProps, check
from memguard.errors import DeviceError

_PINNED, _ON_DEVICE = 1, 1  # CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE
_RELEASE_THRESHOLD, _RESERVED, _RESERVED_PEAK, _USED = 4, 5, 6, 7  # CU_MEMPOOL_ATTR_…
_NO_RELEASE = 2**64 - 1
_FIRST_WITH_MAX_SIZE = 12020  # CUDA 12.2, as cuDriverGetVersion counts


class CappedPool:
    """A memory pool of at most `max_size` bytes, made the device's current one: `cudaMallocAsync` takes from it.

    Measured: PyTorch's async backend stops at exactly `maxSize` and raises its own OutOfMemoryError, while the
    fraction alone let the default pool hold 4 % more. Raises DeviceError if CUDA is not initialised or refuses.
    """

    def __init__(self, ordinal: int, max_size: int) -> None:
        self._destroyed = False
        cuda = self._cuda = contexts.driver()
        version, device, pool = c_int(), c_int(), c_void_p()
        check("cuDriverGetVersion", cuda.cuDriverGetVersion(version))
        if version.value < _FIRST_WITH_MAX_SIZE:
            here = f"{version.value // 1000}.{version.value % 1000 // 10}"
            raise DeviceError(
                f"CUDA: a driver for CUDA {here} cannot limit a memory pool\n"
                "    fix: update the NVIDIA driver to 535 or newer (CUDA 12.2)"
            )
        check("cuDeviceGet", cuda.cuDeviceGet(device, ordinal))
        self._device = device.value
        self._before = self._current()
        wanted = CUmemPoolProps(_PINNED, 0, CUmemLocation(_ON_DEVICE, ordinal), None, max_size)
        check("cuMemPoolCreate", cuda.cuMemPoolCreate(pool, wanted))
        self._pool = pool.value or 0
        try:
            # As PyTorch sets it on the default pool: freed memory stays in the pool until it is trimmed.
            never = c_uint64(_NO_RELEASE)
            check("cuMemPoolSetAttribute", cuda.cuMemPoolSetAttribute(self._pool, _RELEASE_THRESHOLD, never))
            check("cuDeviceSetMemPool", cuda.cuDeviceSetMemPool(self._device, self._pool))
        except BaseException:
            cuda.cuMemPoolDestroy(self._pool)
            raise

    def reserved(self) -> int:
        """Bytes that the pool holds from the driver."""
        return self._attribute(_RESERVED)

    def peak(self) -> int:
        """The most bytes that it ever held from the driver."""
        return self._attribute(_RESERVED_PEAK)

    def used(self) -> int:
        """Bytes of live allocations."""
        return self._attribute(_USED)

    def trim(self, keep: int = 0) -> None:
        """Give the unused part back to the driver, but for what the pool needs to hold `keep` bytes at least."""
        self._cuda.cuMemPoolTrimTo(self._pool, keep)

    def restore(self) -> None:
        """Make the former pool current again. The driver frees this one after its last allocation is freed."""
        if self._destroyed:
            return
        if self._current() == self._pool:
            check("cuDeviceSetMemPool", self._cuda.cuDeviceSetMemPool(self._device, self._before))
        self._destroyed = True  # first: nobody may destroy it twice, whatever comes in between
        self._cuda.cuMemPoolDestroy(self._pool)

    def _current(self) -> int:
        pool = c_void_p()
        check("cuDeviceGetMemPool", self._cuda.cuDeviceGetMemPool(pool, self._device))
        return pool.value or 0

    def _attribute(self, which: int) -> int:
        value = c_uint64()
        check("cuMemPoolGetAttribute", self._cuda.cuMemPoolGetAttribute(self._pool, which, value))
        return value.value


def trim_to(pool: int, keep: int) -> None:
    """Have a pool, given by its handle, give back what idles, until it holds no more than `keep` bytes.

    Raises DeviceError if CUDA is not initialised or refuses.
    """
    check("cuMemPoolTrimTo", contexts.driver().cuMemPoolTrimTo(pool, keep))

"""CUDA before anything has initialised it, and its memory pools. The only door to `cuda-bindings` (optional).

Where CUDA is initialised `contexts` asks the driver itself: importing the bindings takes up to 0.2 s.

No call here runs `cuInit` in this process: that takes 215 ms on an H200 and makes CUDA unusable in
forked children. Where CUDA is not initialised yet, a short child process is asked instead.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from typing import Any

from memguard._devices import contexts
from memguard._devices.contexts import CudaDevice
from memguard.errors import DeviceError

_log = logging.getLogger("memguard")
_CHILD_TIMEOUT = 60.0


def available() -> bool:
    """Whether `cuda-bindings` is installed."""
    try:
        spec = importlib.util.find_spec("cuda")  # only the top level: a submodule's would import a user's own cuda.py
    except (ImportError, ValueError):
        return False
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return any(os.path.isdir(os.path.join(folder, "bindings")) for folder in folders)


def hides_all(visible_devices: str | None) -> bool:
    """Whether this CUDA_VISIBLE_DEVICES shows no GPU on any machine. Whatever else it says, only CUDA knows."""
    return visible_devices in ("", "-1", "NoDevFiles")


def visible(*, ask_child: bool = True) -> tuple[CudaDevice, ...] | None:
    """The devices CUDA shows this process, by ordinal; None where it could not be asked.

    Honours CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER because CUDA itself answers. A child process costs
    about 0.4 s and takes `cuda-bindings`; only where CUDA is not initialised here and `ask_child` allows it.
    """
    if contexts.initialised():
        return contexts.visible()
    return _ask_child() if ask_child and available() else None


class CappedPool:
    """A memory pool with `maxSize`, made the device's current one: what `cudaMallocAsync` then takes from.

    Measured: PyTorch's async backend stops at exactly `maxSize` of it and raises its own OutOfMemoryError,
    while the fraction alone let the default pool hold 4 % more.
    """

    def __init__(self, ordinal: int, max_size: int) -> None:
        d = self._d = _driver()
        self._device = d.CUdevice(ordinal)
        properties = d.CUmemPoolProps()
        properties.allocType = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        properties.maxSize = max_size
        self._before = _check(d, "cuDeviceGetMemPool", d.cuDeviceGetMemPool(self._device))
        self._pool = _check(d, "cuMemPoolCreate", d.cuMemPoolCreate(properties))
        try:
            keep = d.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
            # As PyTorch sets it on the default pool: freed memory stays until it is trimmed.
            _check(d, "release threshold", d.cuMemPoolSetAttribute(self._pool, keep, d.cuuint64_t(2**64 - 1)))
            _check(d, "cuDeviceSetMemPool", d.cuDeviceSetMemPool(self._device, self._pool))
        except BaseException:
            d.cuMemPoolDestroy(self._pool)
            raise

    def reserved(self) -> int:
        """Bytes the pool holds from the driver."""
        return self._attribute("CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT")

    def used(self) -> int:
        """Bytes of live allocations."""
        return self._attribute("CU_MEMPOOL_ATTR_USED_MEM_CURRENT")

    def trim(self) -> None:
        """Give the unused part back to the driver."""
        self._d.cuMemPoolTrimTo(self._pool, 0)

    def restore(self) -> None:
        """Make the former pool current again; this one goes once its last allocation is freed."""
        current = _check(self._d, "cuDeviceGetMemPool", self._d.cuDeviceGetMemPool(self._device))
        if int(current) == int(self._pool):
            _check(self._d, "cuDeviceSetMemPool", self._d.cuDeviceSetMemPool(self._device, self._before))
        self._d.cuMemPoolDestroy(self._pool)

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._d.CUmemPool_attribute, name)
        return int(_check(self._d, name, self._d.cuMemPoolGetAttribute(self._pool, attribute)))


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _check(driver: Any, what: str, result: tuple[Any, ...]) -> Any:
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"CUDA: {what}: {result[0].name}\n    fix: run `nvidia-smi` and check the driver")
    return result[1] if len(result) > 1 else None


def _ask_child() -> tuple[CudaDevice, ...] | None:
    code = "from memguard._devices import libcuda; libcuda._answer_parent()"
    path = [entry for entry in sys.path if isinstance(entry, str)]
    try:
        answer = subprocess.run(
            [sys.executable, "-I", "-c", f"import sys; sys.path[:] = {path!r}\n{code}"],
            capture_output=True,
            text=True,
            timeout=_CHILD_TIMEOUT,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        return tuple(CudaDevice(*fields) for fields in json.loads(answer.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, ValueError, TypeError, IndexError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        _log.debug("CUDA could not be asked: %s", said.splitlines()[-1] if said else type(error).__name__)
        return None


def _answer_parent() -> None:
    driver = _driver()
    (code,) = driver.cuInit(0)
    if code == driver.CUresult.CUDA_ERROR_NO_DEVICE:  # CUDA_VISIBLE_DEVICES hides every GPU
        print("[]")
        return
    _check(driver, "cuInit", (code,))
    found = contexts.visible()
    if found is None:
        raise DeviceError("the bindings have initialised another libcuda than libcuda.so.1")
    print(json.dumps([(d.ordinal, d.uuid, d.multiprocessors) for d in found]))

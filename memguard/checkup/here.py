"""The process that called `memguard.doctor()`: what it has loaded, holds and has swapped. Looks, and starts nothing."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from memguard.checkup.facts import Process
from memguard.checkup.probes._main import libraries
from memguard.devices import contexts
from memguard.devices.nvml import Nvml
from memguard.errors import DeviceError

_MODULES = {
    "torch", "tensorflow", "jax", "jaxlib", "cupy", "pycuda", "pycuda.driver", "pycuda.autoinit",
    "pycuda.autoprimaryctx", "pycuda.gl.autoinit", "numba", "numba.cuda", "rmm", "keras",
}  # fmt: skip


def process(uuids: Iterable[str]) -> Process:
    """This process; `uuids` are the GPUs' that NVML knows."""
    from memguard import active

    guard = active._active
    return Process(
        modules=tuple(name for name in list(sys.modules) if name in _MODULES),
        libraries=tuple(libraries()),
        contexts=_bytes(uuids),
        foreign_context=_foreign(),
        allocators=allocators(sys.modules),
        budget=guard is not None and guard.active,
    )


def _bytes(uuids: Iterable[str]) -> dict[str, int | None]:
    found = {}
    nvml = Nvml()
    try:
        for uuid in uuids:
            with contextlib.suppress(DeviceError):
                processes = nvml.processes(uuid)
                if os.getpid() in processes:
                    found[uuid] = processes[os.getpid()]
    finally:
        nvml.close()
    return found


def _foreign() -> bool | None:
    """Whether the context that is current on this thread is not its GPU's primary one; None where none is current."""
    ordinal = contexts.current()
    if ordinal is None or "pycuda.driver" not in sys.modules:
        return None
    if contexts.active(ordinal) is False:
        return True
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1", mode=getattr(os, "RTLD_NOLOAD", 4))
        now, primary, device = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
        if driver.cuCtxGetCurrent(ctypes.byref(now)) or driver.cuDeviceGet(ctypes.byref(device), ordinal):
            return None
        if driver.cuDevicePrimaryCtxRetain(ctypes.byref(primary), device):  # it exists: this makes none
            return None
        driver.cuDevicePrimaryCtxRelease_v2(device)
        return now.value != primary.value
    return None


def allocators(modules: Mapping[str, Any]) -> dict[str, str]:
    """What stands in for a framework's own allocator, by framework. Asks none that is not imported."""
    found: dict[str, str | None] = {}
    for name, ask in (("torch", _torch), ("cupy", _cupy), ("numba", _numba)):
        try:
            found[name] = ask(modules)
        except Exception:  # of a version that has it elsewhere: unknown
            found[name] = None
    return {name: swapped for name, swapped in found.items() if swapped is not None}


def _torch(modules: Mapping[str, Any]) -> str | None:
    memory = modules.get("torch.cuda.memory")
    if memory is None or not hasattr(modules["torch"]._C, "_cuda_getAllocatorBackend"):
        return None
    backend = str(memory.get_allocator_backend())
    return None if backend == "native" else backend


def _cupy(modules: Mapping[str, Any]) -> str | None:
    cupy = modules.get("cupy")
    if cupy is None:
        return None
    allocator = cupy.cuda.get_allocator()
    pool = getattr(allocator, "__self__", None)
    if pool is not None and pool is cupy.get_default_memory_pool():
        return None
    owner = type(pool) if pool is not None else allocator
    name = getattr(owner, "__qualname__", type(allocator).__qualname__)
    module = str(getattr(owner, "__module__", type(allocator).__module__))
    return None if module.startswith("memguard.") else f"{module}.{name}"


def _numba(modules: Mapping[str, Any]) -> str | None:
    driver = modules.get("numba.cuda.cudadrv.driver")
    manager = getattr(driver, "_memory_manager", None)
    if manager is None or manager is getattr(driver, "NumbaCUDAMemoryManager", None):
        return None
    cls = manager if isinstance(manager, type) else type(manager)
    return None if cls.__module__.startswith("memguard.") else f"{cls.__module__}.{cls.__qualname__}"

"""What a build without CUDA lacks, put in its place: only that. Imported by the code of the tests."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.capping import apply_caps
from support.drifts import drifts

from memguard._base.types import Device
from memguard._devices.simulated import SimulatedHost
from memguard.errors import CapNotApplied, ConflictingSetting

__all__ = [
    "GIB",
    "MIB",
    "PLUGIN",
    "TOTAL",
    "Host",
    "apply_caps",
    "backend",
    "card",
    "drifts",
    "gpus",
    "json",
    "numbas",
    "os",
    "raised",
    "setting",
    "sys",
]

GIB, MIB = 1 << 30, 1 << 20
TOTAL = 143_156 * MIB
"""What CUDA reports as the total of an H200 (measured)."""
PLUGIN = str(Path(__file__).parents[1] / "contract" / "fake_jax" / "plugin")
"""A folder for the path, with what looks like a CUDA plugin of JAX."""


class Host(SimulatedHost):
    """For the real classes: GPUs by UUID and ordinal, and the driver's count of multiprocessors."""

    simulated = False

    def __init__(self, *names: str) -> None:
        super().__init__(names or ("h200",))
        self.gpus: tuple[Device, ...] = self.devices()
        self.uuids = [gpu.uuid for gpu in self.gpus]


def raised(call: Callable[[], object]) -> str | None:
    """The text of the CapNotApplied that a call raises."""
    try:
        call()
    except CapNotApplied as error:
        return str(error)
    return None


def setting(call: Callable[[], object]) -> str | None:
    """The setting that a ConflictingSetting names; any other error comes out."""
    try:
        call()
    except ConflictingSetting as error:
        return error.setting
    return None


def card(host: Host, *, order: tuple[int, ...] = (), backend: str = "native", expandable: bool = False) -> Any:
    """CUDA for a torch that is built without it: fractions, statistics and properties of the host's GPUs."""
    import torch

    order = order or tuple(range(len(host.gpus)))
    found = types.SimpleNamespace(
        fractions={}, stats={}, emptied=0, capturing=False, multiprocessors=132, total=TOTAL, started=0, observers=[]
    )

    def start() -> None:
        found.started += 1

    def set_fraction(fraction: float, ordinal: int) -> None:
        found.fractions[ordinal] = fraction

    def properties(ordinal: int) -> Any:
        uuid = host.uuids[order[ordinal]].removeprefix("GPU-")  # as torch gives it
        return types.SimpleNamespace(total_memory=found.total, uuid=uuid, multi_processor_count=found.multiprocessors)

    def empty() -> None:
        found.emptied += 1

    missing = {
        "_cuda_init": start,
        "_cuda_getDeviceCount": lambda: len(order),
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": lambda ordinal: found.fractions.get(ordinal, 1.0),
        "_cuda_memoryStats": lambda ordinal: found.stats,
        "_cuda_getAllocatorBackend": lambda: backend,
        "_cuda_attach_out_of_memory_observer": found.observers.append,
        "_cuda_memorySnapshot": lambda _: {"allocator_settings": {"expandable_segments": expandable}},
    }
    for name, value in missing.items():
        assert not hasattr(torch._C, name), f"this torch has {name}: nothing to stand in for"
        setattr(torch._C, name, value)
    torch.cuda._cudart = object()
    torch.cuda.device_count = lambda: len(order)
    torch.cuda.get_device_properties = properties
    torch.cuda.empty_cache = empty
    torch.cuda.is_current_stream_capturing = lambda: found.capturing
    return found


def gpus(count: int = 1) -> list[Any]:
    """GPUs in the device list of a TensorFlow that sees none."""
    from tensorflow.python.eager import context

    held = context.context()
    held._initialize_physical_devices()
    added = [context.PhysicalDevice(f"/physical_device:GPU:{number}", "GPU") for number in range(count)]
    for gpu in added:
        held._physical_device_to_index[gpu] = len(held._physical_devices)
        held._physical_devices.append(gpu)
        held._visible_device_list.append(gpu)
        held._memory_growth_map[gpu] = None
    return added


def backend(*limits: int | None, held: int = 0) -> list[Any]:
    """A CUDA backend of JAX that has started with these limits, one GPU for each (None: an allocator that has none)."""
    bridge = sys.modules["jax._src.xla_bridge"]

    def stats(limit: int | None) -> dict[str, int] | None:
        if limit is None:
            return None
        return {"bytes_limit": limit, "pool_bytes": held, "bytes_in_use": held // 2, "peak_bytes_in_use": held}

    local = [
        types.SimpleNamespace(id=7 + number, local_hardware_id=number, memory_stats=lambda limit=limit: stats(limit))
        for number, limit in enumerate(limits)
    ]
    bridge._backends["cuda"] = types.SimpleNamespace(local_devices=lambda: local)  # type: ignore[attr-defined]
    return local


def numbas(host: Host) -> Any:
    """A driver for a Numba that finds none: the calls of its driver object. `start` makes a GPU's context current."""
    import weakref

    from cuda.bindings import driver as binding
    from numba.cuda.cudadrv import driver as module

    driver = module.driver
    found = types.SimpleNamespace(live={}, freed=[], current=0, contexts={}, total=TOTAL, driver=module)
    module._logger = module.make_logger()
    driver.is_initialized, driver.initialization_error = True, None

    def take(size: int) -> Any:
        """Pages, each address used once."""
        if sum(found.live.values()) + size > found.total:
            raise module.CudaAPIError(binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY, "Call to cuMemAlloc: out of memory")
        address = (1 << 40) + sum(-(-size // (2 * MIB)) for _, size in found.freed) * 2 * MIB
        address += sum(-(-size // (2 * MIB)) for size in found.live.values()) * 2 * MIB
        found.live[address] = size
        return binding.CUdeviceptr(address)

    def give(address: Any) -> None:
        found.freed.append((int(address), found.live.pop(int(address))))

    def device(number: int) -> Any:
        made = object.__new__(module.Device)
        made.id, made.uuid, made.name, made.compute_capability = number, host.uuids[number], "H200", (9, 0)
        made.primary_context = None
        return made

    def start(number: int = 0) -> Any:
        gpu = driver.devices[number]
        if gpu.primary_context is None:
            gpu.primary_context = module.Context(weakref.proxy(gpu), number + 1)
        found.current = number + 1
        gpu.primary_context.prepare_for_use()
        return gpu.primary_context

    calls = {
        "cuMemAlloc": take,
        "cuMemAllocManaged": lambda size, flags: take(size),
        "cuMemFree": give,
        "cuMemGetInfo": lambda: (found.total - sum(found.live.values()), found.total),
        "cuCtxGetCurrent": lambda: found.current,
        "cuCtxGetDevice": lambda: found.current - 1,
        "cuDeviceGetCount": lambda: len(host.gpus),
        "cuEventCreate": lambda flags: binding.CUevent(0x7F00 + flags),
        "cuEventDestroy": lambda handle: None,
    }
    for name, call in calls.items():
        call.__name__ = name
        setattr(driver, name, call)
    for number in range(len(host.gpus)):
        driver.devices[number] = device(number)
    found.start = start
    return found

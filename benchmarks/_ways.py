"""How torch, CuPy, PyCUDA and Numba allocate GPU memory: each plain, under memguard, on RMM's pool and on its own pool.

A `Way` is begun once in a process of its own, before anything of the library was imported.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

MIB, GIB = 1 << 20, 1 << 30
PAGE = 2 * MIB
"""What the driver gives out at a time."""
SIZES = (1 << 10, MIB, 64 * MIB)
"""What is allocated and freed, in bytes."""
SHARES = (0.10, 0.90, 0.999)
"""The parts of the cap that the library's memory stands at meanwhile."""
AT_ITS_END = ", at its end"
"""Behind the name of a way whose process did not end as it should."""


def cell(size: int, share: float) -> str:
    """The name of one size at one part of the cap."""
    return f"{size // MIB} MiB at {share:.1%}" if size >= MIB else f"{size >> 10} KiB at {share:.1%}"


class Allocator(NamedTuple):
    """One library's memory. `take` allocates bytes; the memory goes back with the object.

    held    the bytes that it has taken from the driver; None if it does not say, so that live bytes are counted
    adds    the most that one more allocation of this size adds to them
    trim    gives idle memory back to the driver
    asks    how often some work makes it ask the driver for memory; None if that cannot be counted
    """

    take: Callable[[int], Any]
    held: Callable[[], int] | None = None
    adds: Callable[[int], int] = lambda size: -(-size // PAGE) * PAGE
    trim: Callable[[], None] = lambda: None
    asks: Callable[[Callable[[], Any]], int] | None = None


class Way(NamedTuple):
    """`says`: what it is, for the table. `begin` gets the cap in bytes."""

    says: str
    begin: Callable[[int], Allocator]


def budget(library: str, cap: int) -> None:
    """One framework under its cap, without a monitor."""
    import memguard

    memguard.init({"version": 1, "device": {"limit": cap + 6 * GIB}, "frameworks": {library: {"limit": cap}}})


def under_memguard(library: str, found: Allocator) -> Allocator:
    """What is held as memguard says it, and a trim of all that it keeps for the library."""
    import memguard
    from memguard import _api

    guard: Any = _api.current()
    framework, device = guard.frameworks[library], guard.plan.devices[0].device

    def trim() -> None:
        found.trim()
        memguard.trim(library)

    return Allocator(
        found.take,
        lambda: int(framework.usage(device).held),
        lambda size: max(found.adds(size), framework.footprint(size)),
        trim,
        found.asks,
    )


def rmm_pool(cap: int) -> Any:
    """A pool of RMM's over cudaMalloc that has all of its memory from the start, as its current resource."""
    import rmm

    size = cap // 256 * 256
    pool = rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=size, maximum_pool_size=size)
    rmm.mr.set_current_device_resource(pool)
    return pool


def _torch() -> Allocator:
    import torch

    empty, uint8 = torch.empty, torch.uint8
    empty(1, dtype=uint8, device="cuda")
    asked = lambda: int(torch.cuda.memory_stats().get("num_device_alloc", 0))  # noqa: E731

    def asks(work: Callable[[], Any]) -> int:
        before = asked()
        work()
        return asked() - before

    return Allocator(
        lambda size: empty(size, dtype=uint8, device="cuda"), torch.cuda.memory_reserved, trim=torch.cuda.empty_cache,
        asks=asks,
    )  # fmt: skip


def torch_plain(cap: int) -> Allocator:
    return _torch()


def torch_memguard(cap: int) -> Allocator:
    budget("torch", cap)
    return under_memguard("torch", _torch())


def torch_rmm(cap: int) -> Allocator:
    import torch
    from rmm.allocators.torch import rmm_torch_allocator

    rmm_pool(cap)
    torch.cuda.memory.change_current_allocator(rmm_torch_allocator)
    return Allocator(_torch().take)


def _cupy() -> Allocator:
    import cupy

    cupy.empty(1, cupy.uint8)
    pool = cupy.get_default_memory_pool()

    class Asked(cupy.cuda.MemoryHook):  # type: ignore[misc]
        name, times = "asked", 0

        def alloc_preprocess(self, **_: Any) -> None:
            self.times += 1

    def asks(work: Callable[[], Any]) -> int:
        with Asked() as hook:
            work()
        return int(hook.times)

    return Allocator(lambda size: cupy.empty(size, cupy.uint8), pool.total_bytes, trim=pool.free_all_blocks, asks=asks)


def cupy_plain(cap: int) -> Allocator:
    return _cupy()


def cupy_memguard(cap: int) -> Allocator:
    budget("cupy", cap)
    return under_memguard("cupy", _cupy())


def cupy_rmm(cap: int) -> Allocator:
    import cupy
    from rmm.allocators.cupy import rmm_cupy_allocator

    rmm_pool(cap)
    cupy.cuda.set_allocator(rmm_cupy_allocator)
    return Allocator(_cupy().take)


def _pycuda() -> Any:
    """PyCUDA's driver module, in the GPU's primary context until the process ends."""
    import pycuda.driver as drv

    drv.init()
    context = drv.Device(0).retain_primary_context()
    context.push()
    atexit.register(context.pop)
    return drv


def _pycuda_pool() -> Allocator:
    from pycuda.tools import DeviceMemoryPool

    pool = DeviceMemoryPool()
    adds = lambda size: -(-pool.alloc_size(pool.bin_number(size)) // PAGE) * PAGE  # noqa: E731
    return Allocator(pool.allocate, lambda: int(pool.managed_bytes), adds, pool.free_held)


def pycuda_plain(cap: int) -> Allocator:
    return Allocator(_pycuda().mem_alloc)


def pycuda_own(cap: int) -> Allocator:
    _pycuda()
    return _pycuda_pool()


def pycuda_memguard(cap: int) -> Allocator:
    budget("pycuda", cap)
    return under_memguard("pycuda", Allocator(_pycuda().mem_alloc))


def pycuda_memguard_pool(cap: int) -> Allocator:
    budget("pycuda", cap)
    _pycuda()
    return under_memguard("pycuda", _pycuda_pool())


def _numba() -> Allocator:
    import numpy as np
    from _run import put_row_stack_back
    from numba import cuda

    put_row_stack_back()
    context = cuda.current_context()

    def trim() -> None:
        with contextlib.suppress(AttributeError):  # RMM's plugin has no pending frees
            context.memory_manager.deallocations.clear()

    def asks(work: Callable[[], Any]) -> int:
        from numba.cuda.cudadrv.driver import driver

        real, seen = driver.cuMemAlloc, []
        driver.cuMemAlloc = lambda size: (seen.append(size), real(size))[1]
        try:
            work()
        finally:
            driver.cuMemAlloc = real
        return len(seen)

    return Allocator(lambda size: cuda.device_array(size, np.uint8), trim=trim, asks=asks)


def numba_plain(cap: int) -> Allocator:
    return _numba()


def numba_memguard(cap: int) -> Allocator:
    budget("numba", cap)
    return under_memguard("numba", _numba())


def numba_rmm(cap: int) -> Allocator:
    from numba import cuda
    from rmm.allocators.numba import RMMNumbaManager

    rmm_pool(cap)
    cuda.set_memory_manager(RMMNumbaManager)
    return _numba()


AGAIN = ", again"
"""The same way in another process: the control."""
WAYS: dict[str, dict[str, Way]] = {
    "torch": {
        "plain": Way("torch.empty, on its own caching allocator", torch_plain),
        "memguard": Way("torch.empty", torch_memguard),
        "rmm": Way("torch.empty, through rmm_torch_allocator", torch_rmm),
    },
    "cupy": {
        "plain": Way("cupy.empty, on its own MemoryPool", cupy_plain),
        "memguard": Way("cupy.empty", cupy_memguard),
        "rmm": Way("cupy.empty, through rmm_cupy_allocator", cupy_rmm),
    },
    "pycuda": {
        "plain": Way("mem_alloc", pycuda_plain),
        "own pool": Way("DeviceMemoryPool", pycuda_own),
        "memguard": Way("mem_alloc", pycuda_memguard),
        "memguard, pool": Way("DeviceMemoryPool", pycuda_memguard_pool),
    },
    "numba": {
        "plain": Way("device_array", numba_plain),
        "memguard": Way("device_array", numba_memguard),
        "rmm": Way("device_array, through RMMNumbaManager, which takes every array on the default stream", numba_rmm),
    },
}  # fmt: skip
CONTROLLED = {"torch": ("plain",), "cupy": ("plain",), "pycuda": ("plain", "own pool"), "numba": ("plain", "rmm")}
"""The ways that run twice: what others are compared with."""
for _library, _names in CONTROLLED.items():
    for _name in _names:
        WAYS[_library][_name + AGAIN] = WAYS[_library][_name]
NOT_THERE = {
    "torch": {"own pool": "its caching allocator is what plain has"},
    "cupy": {"own pool": "its MemoryPool is what plain has"},
    "pycuda": {"rmm": "RMM has no allocator for PyCUDA"},
    "numba": {"own pool": "Numba has none: each array is one call of the driver"},
}
"""Ways that do not exist, and why."""
COMPARED = {
    "torch": {"memguard": "plain", "rmm": "plain"},
    "cupy": {"memguard": "plain", "rmm": "plain"},
    "pycuda": {"memguard": "own pool", "memguard, pool": "own pool", "plain": "own pool"},
    "numba": {"memguard": "rmm", "plain": "rmm"},
}
"""What each way is compared with."""


def pairs(library: str) -> dict[str, str]:
    """Every way that is compared, and with what: the controls too."""
    return {**COMPARED[library], **{name + AGAIN: name for name in CONTROLLED[library]}}

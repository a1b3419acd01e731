"""How torch, CuPy, PyCUDA and Numba allocate GPU memory: each plain, under memguard, on RMM's pool and on its own pool.

A way is begun once in a process of its own, before anything of the library was imported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.programs.arrays import primary_of_pycuda
from bench.programs.six import GIB, PAGE, put_row_stack_back

if TYPE_CHECKING:
    from memguard.types import FrameworkName


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


def under_memguard(library: FrameworkName, cap: int, make: Callable[[], Allocator]) -> Allocator:
    """Under its cap without a monitor, with what is held as memguard says it, and a trim of all that it keeps."""
    import memguard

    budget = {"version": 1, "device": {"limit": cap + 6 * GIB}, "frameworks": {library: {"limit": cap}}}
    guard: Any = memguard.init(budget)
    found, framework, device = make(), guard.frameworks[library], guard.plan.devices[0].device

    def trim() -> None:
        found.trim()
        memguard.trim(library)

    return Allocator(
        found.take, lambda: int(framework.usage(device).held),
        lambda size: max(found.adds(size), framework.footprint(size)), trim, found.asks,
    )  # fmt: skip


def rmm_pool(cap: int) -> None:
    """A pool of RMM's over cudaMalloc that has all of its memory from the start, as its current resource."""
    import rmm

    size = cap // 256 * 256
    pool = rmm.mr.PoolMemoryResource(rmm.mr.CudaMemoryResource(), initial_pool_size=size, maximum_pool_size=size)
    rmm.mr.set_current_device_resource(pool)


def _torch() -> Allocator:
    import torch

    empty, uint8 = torch.empty, torch.uint8
    empty(1, dtype=uint8, device="cuda")
    return Allocator(
        lambda size: empty(size, dtype=uint8, device="cuda"), torch.cuda.memory_reserved, trim=torch.cuda.empty_cache
    )


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
    return Allocator(lambda size: cupy.empty(size, cupy.uint8), pool.total_bytes, trim=pool.free_all_blocks)


def cupy_rmm(cap: int) -> Allocator:
    import cupy
    from rmm.allocators.cupy import rmm_cupy_allocator

    rmm_pool(cap)
    cupy.cuda.set_allocator(rmm_cupy_allocator)
    return Allocator(_cupy().take)


def _pycuda_pool() -> Allocator:
    from pycuda.tools import DeviceMemoryPool

    primary_of_pycuda()
    pool = DeviceMemoryPool()
    adds = lambda size: -(-pool.alloc_size(pool.bin_number(size)) // PAGE) * PAGE  # noqa: E731
    return Allocator(pool.allocate, lambda: int(pool.managed_bytes), adds, pool.free_held)


def _pycuda() -> Allocator:
    return Allocator(primary_of_pycuda().mem_alloc)


def _numba() -> Allocator:
    import numpy as np

    put_row_stack_back()
    from numba import cuda

    context = cuda.current_context()

    def trim() -> None:
        with contextlib.suppress(AttributeError):  # RMM's plugin has no pending frees
            context.memory_manager.deallocations.clear()

    def asks(work: Callable[[], Any]) -> int:
        from numba.cuda.cudadrv.driver import driver

        real, times = driver.cuMemAlloc, 0

        def counted(size: int) -> Any:
            nonlocal times
            times += 1
            return real(size)

        driver.cuMemAlloc = counted
        try:
            work()
        finally:
            driver.cuMemAlloc = real
        return times

    return Allocator(lambda size: cuda.device_array(size, np.uint8), trim=trim, asks=asks)


def numba_rmm(cap: int) -> Allocator:
    from numba import cuda
    from rmm.allocators.numba import RMMNumbaManager

    rmm_pool(cap)
    cuda.set_memory_manager(RMMNumbaManager)
    return _numba()


AGAIN = ", again"  # The same way in another process: the control.
WAYS: dict[str, dict[str, Callable[[int], Allocator]]] = {
    "torch": {
        "plain": lambda cap: _torch(), "memguard": lambda cap: under_memguard("torch", cap, _torch), "rmm": torch_rmm,
    },
    "cupy": {
        "plain": lambda cap: _cupy(), "memguard": lambda cap: under_memguard("cupy", cap, _cupy), "rmm": cupy_rmm,
    },
    "pycuda": {
        "plain": lambda cap: _pycuda(), "own pool": lambda cap: _pycuda_pool(),
        "memguard": lambda cap: under_memguard("pycuda", cap, _pycuda),
        "memguard, pool": lambda cap: under_memguard("pycuda", cap, _pycuda_pool),
    },
    "numba": {
        "plain": lambda cap: _numba(), "memguard": lambda cap: under_memguard("numba", cap, _numba), "rmm": numba_rmm,
    },
}  # fmt: skip
"""Each way of a library. It gets the cap in bytes. RMM has no allocator for PyCUDA."""
CONTROL = {"torch": "plain", "cupy": "plain", "pycuda": "own pool", "numba": "rmm"}
"""What memguard's way is compared with. It runs twice."""
for _library, _name in CONTROL.items():
    WAYS[_library][_name + AGAIN] = WAYS[_library][_name]

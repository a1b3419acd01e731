"""All six frameworks in one process: how to load, use and fill each, and what NVML and the bare driver say of it.

Runs in child processes. Sizes are bytes unless a name says otherwise."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memguard.types import FrameworkName

MIB, GIB = 1 << 20, 1 << 30
PAGE = 2 * MIB  # What the driver gives out, and caps are multiples of.
SHARES: dict[FrameworkName, str] = {
    "tensorflow": "20%", "torch": "25%", "jax": "20%", "cupy": "15%", "pycuda": "10%", "numba": "10%",
}  # fmt: skip
NAMES = tuple(SHARES)
RETURNING: tuple[FrameworkName, ...] = ("torch", "cupy", "pycuda", "numba")
"""The frameworks that give freed memory back, so that the driver's figure without them says what they held."""
SLOW = ("tensorflow", "jax")  # A refusal takes each of these ten seconds of retries.


def budget(limit: int | str, shares: Mapping[Any, str] = SHARES, **tensorflow: Any) -> dict[str, Any]:
    """Shares of `limit`, with more settings for TensorFlow (`growth=False`: it takes its whole cap at once)."""
    frameworks: dict[FrameworkName, dict[str, Any]] = {name: {"share": share} for name, share in shares.items()}
    if tensorflow:
        frameworks["tensorflow"].update(tensorflow)
    return {"version": 1, "device": {"limit": limit}, "frameworks": frameworks}


def put_row_stack_back() -> None:
    """numba-cuda 0.30 compiles with a name that NumPy 2.5 removed."""
    import numpy as np

    if not hasattr(np, "row_stack"):
        np.row_stack = np.vstack


def load(name: str) -> None:
    """Import the framework as a program does."""
    if name == "pycuda":
        import pycuda.autoinit  # noqa: F401
    elif name == "numba":
        import numba.cuda  # noqa: F401
    else:
        __import__(name)


def _torch() -> None:
    import torch

    a = torch.randn(1024, 1024, device="cuda")
    conv = torch.nn.Conv2d(3, 8, 3, device="cuda")
    (conv(torch.randn(4, 3, 64, 64, device="cuda")).sum() + (a @ a).sum()).backward()
    torch.cuda.synchronize()


def _tensorflow() -> None:
    import tensorflow as tf

    with tf.device("GPU:0"):
        a = tf.random.normal((1024, 1024))
        kernel = tf.random.normal((3, 3, 3, 8))
        images = tf.random.normal((4, 64, 64, 3))
        float(tf.reduce_sum(tf.matmul(a, a))) + float(tf.reduce_sum(tf.nn.conv2d(images, kernel, 1, "SAME")))


def _jax() -> None:
    import jax
    import jax.numpy as jnp

    a = jnp.ones((1024, 1024))
    assert float((a @ a)[0, 0]) == 1024.0
    kernel = jnp.ones((8, 3, 3, 3))
    jax.lax.conv(jnp.ones((1, 3, 64, 64)), kernel, (1, 1), "SAME").block_until_ready()
    jnp.linalg.svd(a[:256, :256] + jnp.eye(256))[1].block_until_ready()


def _cupy() -> None:
    import cupy

    a = cupy.ones((1024, 1024), dtype=cupy.float32)
    assert float((a @ a)[0, 0]) == 1024.0
    cupy.linalg.svd(a[:256, :256] + cupy.eye(256, dtype=cupy.float32))


def _pycuda() -> None:
    import numpy as np
    import pycuda.gpuarray as gpuarray

    a = gpuarray.to_gpu(np.ones(100_000, dtype=np.float32))
    (a + a).get()


def _numba() -> None:
    import numpy as np
    from numba import cuda

    put_row_stack_back()

    @cuda.jit
    def double(values):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        if i < values.size:
            values[i] *= 2

    values = cuda.to_device(np.ones(1000, dtype=np.float32))
    double[8, 128](values)
    assert values.copy_to_host().sum() == 2000.0


WORK: dict[FrameworkName, Callable[[], None]] = {
    "tensorflow": _tensorflow, "torch": _torch, "jax": _jax, "cupy": _cupy, "pycuda": _pycuda, "numba": _numba,
}  # fmt: skip


def all_live(config: dict[str, Any], names: Iterable[Any] = NAMES) -> tuple[Any, list[dict[str, Any]]]:
    """All imported under a budget in this order, and each used; the guard, and a reading after each step."""
    import memguard

    guard = memguard.init(config)
    readings = [reading()]
    for name in names:
        load(name)
    readings.append(reading())
    for name in names:
        WORK[name]()
        readings.append(reading())
    return guard, readings


def reading() -> dict[str, Any]:
    """One reading of the ledger. Its rows add up to the total whatever they say: `unaccounted` is the remainder."""
    import memguard

    part = memguard.ledger().devices[0]
    rows = {row.name: {"held": row.bytes, "in_use": row.in_use} for row in part.rows if row.kind == "framework"}
    outside = {name: part.row(name).bytes for name in ("unaccounted", "overhead")}
    rest = sum(row.bytes for row in part.rows if row.bytes is not None) - part.device.total
    return {"process": part.process, **outside, "frameworks": rows, "sum_minus_total": rest}


def row_of(name: str) -> dict[str, Any]:
    row: dict[str, Any] = reading()["frameworks"][name]
    return row


def held(name: str) -> int:
    """Bytes that the ledger says a framework holds. ValueError if it does not know."""
    size: int | None = row_of(name)["held"]
    if size is None:
        raise ValueError(f"the ledger does not know what {name} holds")
    return size


def worst(readings: list[dict[str, Any]]) -> int:
    """The largest `unaccounted` in bytes, whatever its sign."""
    return int(max(abs(one["unaccounted"]) for one in readings))


def first_gpu() -> tuple[Any, Any]:
    """NVML's module and its handle of the first GPU. Raises what NVML raises where there is none."""
    import pynvml

    pynvml.nvmlInit()
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    by_uuid = shown.startswith("GPU-") and "," not in shown
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(shown) if by_uuid else pynvml.nvmlDeviceGetHandleByIndex(0)


class Card:
    """NVML's figures of the first GPU, in bytes."""

    def __init__(self) -> None:
        self._nvml, self._handle = first_gpu()

    def free(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).free)

    def total(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).total)

    def listed(self) -> dict[int, int]:
        """Bytes by the PID of each process on the GPU."""
        running = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return {one.pid: int(one.usedGpuMemory or 0) for one in running}

    def own(self) -> int:
        """This process's. RuntimeError if NVML does not tell."""
        found = self.listed().get(os.getpid())
        if not found:
            raise RuntimeError("NVML does not tell this process's bytes")
        return found


def bytes_now() -> int:
    """Bytes of the first GPU that this process holds, by NVML. RuntimeError if NVML does not list it."""
    return Card().own()


class Raw:
    """Memory from the driver itself, in the primary context of the first GPU: past every framework."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)

    def take(self, size: int) -> int:
        address = ctypes.c_uint64()
        self._within("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return int(address.value)

    def give(self, address: int) -> None:
        self._within("cuMemFree_v2", ctypes.c_uint64(address))

    def second_context(self) -> int:
        """Bytes that one more context takes. It is destroyed again."""
        before, made = bytes_now(), ctypes.c_void_p()
        self.call("cuCtxCreate_v2", ctypes.byref(made), 0, 0)
        taken = bytes_now() - before
        self.call("cuCtxDestroy_v2", made)
        return taken

    def wait(self) -> None:
        """Until the GPU has no work left from this process."""
        self._within("cuCtxSynchronize")

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with {code}")

    def _within(self, name: str, *arguments: Any) -> None:
        self.call("cuCtxPushCurrent_v2", self.context)
        try:
            self.call(name, *arguments)
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def allocator(name: str) -> tuple[Callable[[int], Any], type[BaseException]]:
    """How to take n bytes, and the framework's own out-of-memory error."""
    if name == "torch":
        import torch

        return (lambda n: torch.empty(n, dtype=torch.uint8, device="cuda")), torch.OutOfMemoryError
    if name == "tensorflow":
        import tensorflow as tf

        def allocate(n: int) -> Any:
            with tf.device("GPU:0"):
                return tf.zeros((max(n // 4, 1),), tf.float32)

        return allocate, tf.errors.ResourceExhaustedError
    if name == "jax":
        import jax
        import numpy as np

        source: Any = np.zeros(300 * MIB, np.uint8)
        return (lambda n: jax.device_put(source[:n]).block_until_ready()), jax.errors.JaxRuntimeError
    if name == "cupy":
        import cupy

        return (lambda n: cupy.empty(n, cupy.uint8)), cupy.cuda.memory.OutOfMemoryError
    if name == "pycuda":
        import pycuda.driver as drv

        return (lambda n: drv.mem_alloc(n)), drv.MemoryError
    import numpy as np
    from numba import cuda
    from numba.cuda.cudadrv.driver import CudaAPIError

    return (lambda n: cuda.device_array(n, np.uint8)), CudaAPIError


class Driven:
    """One framework under its cap: random requests until it refuses, and the most that it held by its own count."""

    def __init__(self, name: str, cap: int, seed: int) -> None:
        import memguard.api

        guard: Any = memguard.api.current()
        self.name, self.cap, self.rng = name, cap, random.Random(seed)
        self.take, self.native = allocator(name)
        self.framework, self.device = guard.frameworks[name], guard.plan.devices[0].device
        self.live: list[Any] = []
        self.most = 0

    def held(self) -> int:
        usage = self.framework.usage(self.device)
        if usage is None:
            return 0
        size = usage.held if usage.held is not None else usage.held_at_least
        return size or 0

    def add(self, low: int, high: int) -> None:
        self.live.append(self.take(self.rng.randint(low, high)))
        self.most = max(self.most, self.held())

    def until_refused(self, low: int, high: int) -> None:
        """Requests of `low` to `high` bytes until the framework's own error. AssertionError if another comes."""
        for _ in range(100_000):
            try:
                self.add(low, high)
            except self.native:
                self.most = max(self.most, self.held())
                return
            except Exception as error:
                raise AssertionError(f"{self.name}: no own out-of-memory error, but {type(error)}: {error}") from None
        raise AssertionError(f"{self.name}: 100,000 allocations and no refusal")

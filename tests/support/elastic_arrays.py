"""One framework's arrays, each filled with a pattern of its own and read back through the framework or the driver.

Nothing here asks memguard, so that memory that was given to two at once shows.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Callable
from typing import Any

MIB, GIB = 1 << 20, 1 << 30
SIX = ("tensorflow", "torch", "jax", "cupy", "pycuda", "numba")
WINDOW = 1 << 10
"""Bytes that are read back at a place."""
XLA = ("tensorflow", "jax")
"""Their arrays cannot be written: each is made with its value."""


def put_row_stack_back() -> None:
    """Numba-CUDA 0.30 compiles with a name that NumPy 2.5 took away."""
    import numpy as np

    if not hasattr(np, "row_stack"):
        np.row_stack = np.vstack


class Written:
    """Memory of any framework, written and read through the driver in the primary context of the first GPU."""

    def __init__(self) -> None:
        self._cuda, self._context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), 0)

    def fill(self, address: int, size: int, word: int) -> None:
        words, rest = divmod(size, 4)
        if words:
            self._within("cuMemsetD32_v2", ctypes.c_uint64(address), ctypes.c_uint(word), ctypes.c_size_t(words))
        if rest:
            last = ctypes.c_uint64(address + 4 * words)
            self._within("cuMemsetD8_v2", last, ctypes.c_ubyte(word & 0xFF), ctypes.c_size_t(rest))

    def read(self, address: int, size: int) -> bytes:
        room = ctypes.create_string_buffer(size)
        self._within("cuMemcpyDtoH_v2", room, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return room.raw

    def _within(self, name: str, *arguments: Any) -> None:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with {code}")


def word_of(seed: int) -> int:
    """Four bytes that no other array is likely to have."""
    return random.Random(seed).getrandbits(32) | 1


def value_of(seed: int) -> float:
    """A whole number that 32-bit floats hold."""
    return float(word_of(seed) % 1_000_003)


def windows(size: int, seed: int, step: int) -> list[tuple[int, int]]:
    """Where it is read back, and how much, in bytes: the beginning, the end, and six places between.

    Both are multiples of `step`, of which `size` is one.
    """
    draw, length = random.Random(seed), min(WINDOW, size)
    starts = [0, size - length, *(draw.randint(0, size - length) // step * step for _ in range(6))]
    return [(start, length) for start in starts]


class Arrays:
    """One framework's arrays. `take` makes one of `size` bytes; `write` fills it, and `right` reads it back."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._take: Callable[[int], Any] | None = None
        self._memory: Written | None = None
        self._small: list[Any] = []

    def load(self) -> None:
        """Import the framework, and no more: no context is made."""
        if self.name == "pycuda":
            import pycuda.driver  # noqa: F401
        elif self.name == "numba":
            put_row_stack_back()
            import numba.cuda  # noqa: F401
        else:
            __import__(self.name)

    def begin(self) -> None:
        """Make it live, in the primary context, with the kernels that its arrays need."""
        if self.name == "pycuda":
            import atexit

            import pycuda.driver as drv

            drv.init()
            context = drv.Device(0).retain_primary_context()
            context.push()
            atexit.register(context.pop)
        elif self.name == "numba":
            from numba import cuda

            cuda.current_context()
        one = self.take(8 * MIB)
        self.write(one, 8 * MIB, 1)
        assert self.right(one, 8 * MIB, 1), f"{self.name} does not read what it wrote"

    def take(self, size: int, seed: int = 1) -> Any:
        """Raises what the framework raises."""
        if self.name == "tensorflow":
            import tensorflow as tf

            with tf.device("/GPU:0"):
                made = tf.fill([max(size // 8, 1)], tf.constant(value_of(seed), tf.float64))
            made[:1].numpy()  # an error of the work shows here
            return made
        if self.name == "jax":
            return _jax(size, value_of(seed))
        if self._take is None:
            self._take = allocator(self.name)
        return self._take(size)

    def write(self, array: Any, size: int, seed: int) -> None:
        """Does nothing for those whose arrays are made with their value."""
        if self.name not in XLA:
            self.memory.fill(address(self.name, array), size, word_of(seed))

    def right(self, array: Any, size: int, seed: int) -> bool:
        if self.name in XLA:
            places = [(at // 8, count // 8) for at, count in windows(max(size // 8, 1) * 8, seed, 8)]
            found = [self._part(array, at, count) for at, count in places]
            return all(part.size > 0 and bool((part == value_of(seed)).all()) for part in found)
        four, at = word_of(seed).to_bytes(4, "little"), address(self.name, array)
        if size < 4:
            return self.memory.read(at, size) == four[:1] * size
        places = windows(size // 4 * 4, seed, 4)
        return all(self.memory.read(at + a, n) == four * (n // 4) for a, n in places)

    def _part(self, array: Any, at: int, count: int) -> Any:
        """So many elements of an array of TensorFlow or JAX, on the host."""
        import numpy as np

        if self.name == "tensorflow":
            return array[at : at + count].numpy()
        import jax

        return np.asarray(jax.lax.dynamic_slice(array, (np.int32(at),), (count,)))  # compiled once for each shape

    @property
    def memory(self) -> Written:
        if self._memory is None:
            self._memory = Written()
        return self._memory


def address(name: str, array: Any) -> int:
    if name == "torch":
        return int(array.data_ptr())
    if name == "cupy":
        return int(array.data.ptr)
    if name == "pycuda":
        return int(array)
    return int(array.__cuda_array_interface__["data"][0])


def _jax(size: int, value: float) -> Any:
    import jax
    import jax.numpy as jnp

    global _made
    if _made is None:
        _made = jax.jit(lambda count, x: jnp.full((count,), x, jnp.complex64), static_argnums=0)
    return _made(max(size // 8, 1), value).block_until_ready()


_made: Any = None


def allocator(name: str) -> Callable[[int], Any]:
    """How to take n bytes of PyTorch, CuPy, PyCUDA or Numba."""
    if name == "torch":
        import torch

        return lambda n: torch.empty(n, dtype=torch.uint8, device="cuda")
    if name == "cupy":
        import cupy

        return lambda n: cupy.empty(n, cupy.uint8)
    if name == "pycuda":
        import pycuda.driver as drv

        return lambda n: drv.mem_alloc(n)
    import numpy as np
    from numba import cuda

    return lambda n: cuda.device_array(n, np.uint8)


class Card:
    """NVML's figures of the first GPU, and of this process on it, in bytes."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        by_uuid = shown.startswith("GPU-") and "," not in shown
        self._nvml = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(shown) if by_uuid else pynvml.nvmlDeviceGetHandleByIndex(0)

    def free(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).free)

    def total(self) -> int:
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).total)

    def own(self) -> int:
        """RuntimeError if NVML does not tell."""
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
        raise RuntimeError("NVML does not tell this process's bytes")


class Most:
    """The most that this process has on the card while the block runs, by NVML every 20 ms, from a thread."""

    def __init__(self, card: Card) -> None:
        self._card, self._over, self.bytes = card, threading.Event(), 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Most:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.bytes = max(self.bytes, self._card.own())


def text_of(error: BaseException) -> dict[str, str]:
    """What is kept of an error: nothing that keeps its arrays."""
    return {"exception": f"{type(error).__module__}.{type(error).__qualname__}", "text": str(error)[:300]}

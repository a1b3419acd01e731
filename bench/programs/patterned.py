"""One framework's arrays, each filled with a pattern of its own and read back, and NVML's figures of the card.

Nothing here asks memguard. Arrays are read back through the framework or the driver, so memory that was given to two
owners at once shows."""

from __future__ import annotations

import ctypes
import gc
import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from bench.child import emit
from bench.programs.arrays import begin
from bench.programs.six import GIB, MIB, Card, Raw, allocator, load

__all__ = ["GIB", "MIB", "Arrays", "Card", "serve", "torch_first"]
XLA = ("tensorflow", "jax")  # Their arrays cannot be written: each is made with its value.
WINDOW = 1 << 10  # Bytes that are read back at one place.


def serve(actions: Mapping[str, Callable[..., Mapping[str, Any] | None]]) -> None:
    """In a child: answer each line of stdin, `NAME {"argument": …}`, with what that action returns and when it ended.
    `at` is CLOCK_MONOTONIC, which all processes of a machine share. An exception ends the process."""
    for line in sys.stdin:
        name, _, arguments = line.strip().partition(" ")
        found = actions[name](**json.loads(arguments or "{}"))
        emit({"at": time.monotonic(), **(found or {})})


class Written(Raw):
    """Memory of any framework, written and read by the driver in the primary context."""

    def fill(self, address: int, size: int, word: int) -> None:
        """Write the same four bytes throughout."""
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


def word_of(seed: int) -> int:
    """Four bytes that no other array is likely to have."""
    return random.Random(seed).getrandbits(32) | 1


def value_of(seed: int) -> float:
    """A whole number that 32-bit floats hold."""
    return float(word_of(seed) % 1_000_003)


def windows(size: int, seed: int, step: int) -> list[tuple[int, int]]:
    """Offset and length in bytes of the places that are read back: the beginning, the end, and six between. Both are
    multiples of `step`, of which `size` is one."""
    draw, length = random.Random(seed), min(WINDOW, size)
    starts = [0, size - length, *(draw.randint(0, size - length) // step * step for _ in range(6))]
    return [(start, length) for start in starts]


class Arrays:
    """One framework's arrays. `take` makes one of `size` bytes; `write` fills it, and `right` reads it back."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._take: Callable[[int], Any] | None = None
        self._memory: Written | None = None

    def load(self) -> None:
        """Import the framework. Makes no context."""
        if self.name == "pycuda":
            import pycuda.driver  # noqa: F401
        else:
            load(self.name)

    def begin(self) -> None:
        """Make it live, in the primary context, with the kernels that its arrays need."""
        if self.name in ("pycuda", "numba"):
            begin(self.name)
        one = self.take(8 * MIB)
        self.write(one, 8 * MIB, 1)
        assert self.right(one, 8 * MIB, 1), f"{self.name} does not read what it wrote"

    def take(self, size: int, seed: int = 1) -> Any:
        """Raises what the framework raises."""
        if self.name == "tensorflow":
            import tensorflow as tf

            with tf.device("/GPU:0"):
                made = tf.fill([max(size // 8, 1)], tf.constant(value_of(seed), tf.float64))
            made[:1].numpy()  # an error of the kernel shows here
            return made
        if self.name == "jax":
            return _jax(size, value_of(seed))
        if self._take is None:
            self._take = allocator(self.name)[0]
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
        return all(self.memory.read(at + offset, count) == four * (count // 4) for offset, count in places)

    def _part(self, array: Any, at: int, count: int) -> Any:
        """So many elements of an array of TensorFlow or JAX, on the host."""
        import numpy as np

        if self.name == "tensorflow":
            return array[at : at + count].numpy()
        import jax

        return np.asarray(jax.lax.dynamic_slice(array, (np.int32(at),), (count,)))  # compiled once for each shape

    def trim(self) -> None:
        """Give idle memory back, as far as the framework can. Without memguard."""
        gc.collect()
        if self.name == "torch":
            import torch

            torch.cuda.empty_cache()
        elif self.name == "cupy":
            import cupy

            cupy.get_default_memory_pool().free_all_blocks()
        elif self.name == "numba":
            from numba import cuda

            cuda.current_context().deallocations.clear()

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


def torch_first(names: Any) -> list[str]:
    """PyTorch before TensorFlow: the other order breaks it."""
    return sorted(names, key=lambda name: name != "torch")

"""Random bytes of each framework on the GPU, and every kind of CUDA call that a program makes through it.

Nothing here calls memguard."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.programs import six
from bench.programs.six import MIB, put_row_stack_back

Calls = dict[str, Callable[[], Any]]
BLOCK = 1 << 30  # A large array consists of such blocks.
SMALL = 1 << 20  # Size in elements of the arrays that the calls use.


def random_bytes(size: int, seed: int) -> Any:
    return np.frombuffer(np.random.Generator(np.random.PCG64(seed)).bytes(size), np.uint8).copy()


class Library:
    """One framework. `put` copies bytes from the host to a GPU array, `get` copies them back from the GPU."""

    name = ""

    def begin(self) -> None:
        """Import and initialise it."""

    def put(self, data: Any) -> Any:
        raise NotImplementedError

    def get(self, array: Any) -> Any:
        raise NotImplementedError

    def fill(self, size: int, value: int) -> Any:
        """An array filled with one byte on the GPU, for sizes too large for a host array."""
        raise NotImplementedError

    def ends(self, array: Any, size: int) -> Any:
        """Its first and last 4 KiB, on the host."""
        raise NotImplementedError

    def computed(self, array: Any) -> int:
        """Its sum, by one of the framework's kernels; 0 if it has none."""
        return 0

    def calls(self) -> Calls:
        """Every kind of CUDA call that a program makes through it. One thread repeats each of them."""
        raise NotImplementedError

    def enter(self) -> None:
        """Set up each calling thread, once."""

    def trim(self) -> None:
        """Free idle memory, as far as the framework can."""


class Torch(Library):
    name = "torch"

    def begin(self) -> None:
        import torch

        self.torch = torch
        torch.zeros(1, device="cuda")

    def put(self, data: Any) -> Any:
        return self.torch.from_numpy(data).cuda()

    def get(self, array: Any) -> Any:
        return array.cpu().numpy()

    def fill(self, size: int, value: int) -> Any:
        return self.torch.full((size,), value, dtype=self.torch.uint8, device="cuda")

    def ends(self, array: Any, size: int) -> Any:
        return np.concatenate([array[:4096].cpu().numpy(), array[-4096:].cpu().numpy()])

    def computed(self, array: Any) -> int:
        return int(array.sum(dtype=self.torch.int64))

    def trim(self) -> None:
        self.torch.cuda.empty_cache()

    def calls(self) -> Calls:
        torch = self.torch
        x, host = torch.ones(SMALL, device="cuda"), torch.ones(SMALL).pin_memory()
        square = torch.ones((256, 256), device="cuda")
        stream = torch.cuda.Stream()
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        x.add_(0)
        last.record()
        graph, still = torch.cuda.CUDAGraph(), torch.ones(SMALL, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = still + 1
        torch.cuda.synchronize()
        self.kept = (out, x, host, square)
        taken = torch.cuda.synchronize

        def event_ends() -> None:
            one = torch.cuda.Event()
            one.record(stream)
            del one

        return {
            "device synchronize": lambda: torch.cuda.synchronize(),
            "device synchronize, taken by name before": lambda: taken(),
            "stream synchronize": lambda: stream.synchronize(),
            "default stream synchronize": lambda: torch.cuda.default_stream().synchronize(),
            "stream query": lambda: stream.query(), "event synchronize": lambda: last.synchronize(),
            "event query": lambda: last.query(), "event elapsed_time": lambda: first.elapsed_time(last),
            "event record": event_ends, "item": lambda: x[0].item(), "copy to host": lambda: x.cpu(),
            "copy to device": lambda: torch.ones(SMALL).cuda(),
            "copy, non_blocking": lambda: x.copy_(host, non_blocking=True),
            "allocation": lambda: torch.empty(SMALL, device="cuda"), "kernel": lambda: x + 1,
            "matmul": lambda: square @ square, "graph replay": lambda: graph.replay(),
            "empty_cache": lambda: torch.cuda.empty_cache(), "mem_get_info": lambda: torch.cuda.mem_get_info(),
            "pin_memory": lambda: torch.ones(SMALL).pin_memory(), "stream created": lambda: torch.cuda.Stream(),
            "print": lambda: str(x[:4]),
        }  # fmt: skip


class TensorFlow(Library):
    name = "tensorflow"

    def begin(self) -> None:
        import tensorflow as tf

        self.tf = tf
        with tf.device("/GPU:0"):
            tf.identity(tf.constant([1.0])).numpy()

    def put(self, data: Any) -> Any:
        with self.tf.device("/GPU:0"):
            return self.tf.identity(self.tf.constant(data))

    def get(self, array: Any) -> Any:
        return array.numpy()

    def fill(self, size: int, value: int) -> Any:
        with self.tf.device("/GPU:0"):
            return self.tf.fill([size // 8], self.tf.constant(_float_of(value), self.tf.float64))

    def ends(self, array: Any, size: int) -> Any:
        with self.tf.device("/GPU:0"):
            return np.concatenate([array[:512].numpy(), array[-512:].numpy()]).view(np.uint8)

    def computed(self, array: Any) -> int:
        with self.tf.device("/GPU:0"):
            return int(self.tf.reduce_sum(self.tf.cast(array, self.tf.int64)))

    def calls(self) -> Calls:
        tf = self.tf
        with tf.device("/GPU:0"):
            x = tf.identity(tf.ones([SMALL]))
            square = tf.identity(tf.ones([256, 256]))
        host = np.ones(SMALL, np.float32)

        @tf.function
        def compiled(value: Any) -> Any:
            return value * 2 + 1

        def on_gpu(call: Callable[[], Any]) -> Callable[[], Any]:
            def do() -> Any:
                with tf.device("/GPU:0"):
                    return call()

            return do

        compiled(x)
        found: Calls = {
            "numpy": on_gpu(lambda: (x + 1).numpy()), "numpy of what is there": lambda: x.numpy(),
            "kernel": on_gpu(lambda: x + 1), "matmul": on_gpu(lambda: tf.matmul(square, square)),
            "constant to device": on_gpu(lambda: tf.identity(tf.constant(host))),
            "compiled function": lambda: compiled(x), "reduce to int": on_gpu(lambda: int(tf.reduce_sum(x))),
            "allocation": on_gpu(lambda: tf.zeros([SMALL])), "print": lambda: str(x[:4]),
        }  # fmt: skip
        if hasattr(tf.test.experimental, "sync_devices"):
            found["sync_devices"] = lambda: tf.test.experimental.sync_devices()
        return found


class Jax(Library):
    name = "jax"

    def begin(self) -> None:
        import jax
        import jax.numpy as jnp

        self.jax, self.np = jax, jnp
        jnp.zeros(1).block_until_ready()
        self._copied = jax.jit(lambda x: x.copy())
        self._filled = jax.jit(lambda count, x: jnp.full((count,), x, jnp.uint32), static_argnums=0)
        self._part = jax.jit(lambda x, at: jax.lax.dynamic_slice(x, (at,), (1024,)))

    def put(self, data: Any) -> Any:
        return self.jax.device_put(data).block_until_ready()

    def get(self, array: Any) -> Any:
        return np.asarray(self._copied(array))  # after a read, an array keeps a copy on the host

    def fill(self, size: int, value: int) -> Any:
        return self._filled(size // 4, np.uint32(value * 0x01010101)).block_until_ready()

    def ends(self, array: Any, size: int) -> Any:
        last = np.int32(size // 4 - 1024)
        found = [np.asarray(self._part(array, at)) for at in (np.int32(0), last)]
        return np.concatenate(found).view(np.uint8)

    def computed(self, array: Any) -> int:
        return int(self.np.sum(array, dtype=self.np.uint32))

    def calls(self) -> Calls:
        jax, jnp = self.jax, self.np
        x, square = jnp.ones(SMALL).block_until_ready(), jnp.ones((256, 256)).block_until_ready()
        host = np.ones(SMALL, np.float32)
        compiled = jax.jit(lambda value: value * 2 + 1)
        compiled(x).block_until_ready()
        numbers = iter(range(1, 1 << 30))

        def compiles() -> Any:
            number = float(next(numbers))
            return jax.jit(lambda value: value * number)(x)

        return {
            "block_until_ready": lambda: (x + 1).block_until_ready(),
            "block_until_ready of what is there": lambda: x.block_until_ready(),
            "compiled function": lambda: compiled(x), "compiled function, read": lambda: np.asarray(compiled(x)),
            "compilation": compiles, "operator": lambda: x + 1, "matmul": lambda: jnp.dot(square, square),
            "device_put": lambda: jax.device_put(host), "device_get": lambda: jax.device_get(x + 2),
            "item": lambda: (x[0] + 1).item(), "allocation": lambda: jnp.zeros(SMALL), "print": lambda: str(x[:4]),
        }  # fmt: skip


class Cupy(Library):
    name = "cupy"

    def begin(self) -> None:
        import cupy

        self.cupy = cupy
        cupy.zeros(1)

    def put(self, data: Any) -> Any:
        return self.cupy.asarray(data)

    def get(self, array: Any) -> Any:
        return array.get()

    def fill(self, size: int, value: int) -> Any:
        return self.cupy.full(size, value, self.cupy.uint8)

    def ends(self, array: Any, size: int) -> Any:
        return np.concatenate([array[:4096].get(), array[-4096:].get()])

    def computed(self, array: Any) -> int:
        return int(array.sum(dtype=self.cupy.int64))

    def trim(self) -> None:
        self.cupy.get_default_memory_pool().free_all_blocks()

    def calls(self) -> Calls:
        cupy = self.cupy
        x, square, host = cupy.ones(SMALL), cupy.ones((256, 256)), np.ones(SMALL)
        stream, first, last = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(), cupy.cuda.Event()
        first.record()
        last.record()
        raw = cupy.RawKernel('extern "C" __global__ void one(double *x) { x[threadIdx.x] = 1; }', "one")
        raw((1,), (32,), (x,))
        numbers = iter(range(1 << 30))

        def compiles() -> None:
            text = f'extern "C" __global__ void k(double *x) {{ x[0] = {next(numbers)}; }}'
            cupy.RawModule(code=text).get_function("k")

        def through_pool() -> None:
            pool.malloc(SMALL)

        pool = cupy.cuda.MemoryAsyncPool()
        through_pool()
        return {
            "device synchronize": lambda: cupy.cuda.Device().synchronize(),
            "runtime.deviceSynchronize": lambda: cupy.cuda.runtime.deviceSynchronize(),
            "stream synchronize": lambda: stream.synchronize(),
            "null stream synchronize": lambda: cupy.cuda.Stream.null.synchronize(), "stream done": lambda: stream.done,
            "event synchronize": lambda: last.synchronize(), "event done": lambda: last.done,
            "event elapsed time": lambda: cupy.cuda.get_elapsed_time(first, last),
            "event record": lambda: cupy.cuda.Event().record(stream), "copy to host": lambda: x.get(),
            "copy to device": lambda: cupy.asarray(host), "item": lambda: x[0].item(),
            "allocation": lambda: cupy.empty(SMALL), "allocation in order of a stream": through_pool,
            "kernel": lambda: x + 1, "matmul": lambda: square @ square, "raw kernel": lambda: raw((1,), (32,), (x,)),
            "module loaded and unloaded": compiles, "free_all_blocks": lambda: self.trim(),
            "mem_info": lambda: cupy.cuda.Device().mem_info,
            "pinned memory": lambda: cupy.cuda.alloc_pinned_memory(SMALL),
            "stream created": lambda: cupy.cuda.Stream(non_blocking=True), "print": lambda: str(x[:4]),
        }  # fmt: skip


class Pycuda(Library):
    name = "pycuda"

    def begin(self) -> None:
        import atexit

        import pycuda.driver as drv

        self.drv = drv
        drv.init()
        self.context = drv.Device(0).retain_primary_context()
        self.context.push()
        atexit.register(self.context.pop)

    def enter(self) -> None:
        self.context.push()

    def put(self, data: Any) -> Any:
        array = self.drv.mem_alloc(data.nbytes)
        self.drv.memcpy_htod(array, data)
        return array, data.nbytes

    def get(self, array: Any) -> Any:
        found = np.empty(array[1], np.uint8)
        self.drv.memcpy_dtoh(found, array[0])
        return found

    def fill(self, size: int, value: int) -> Any:
        array = self.drv.mem_alloc(size)
        self.drv.memset_d8(array, value, size)
        return array, size

    def ends(self, array: Any, size: int) -> Any:
        found = np.empty(8192, np.uint8)
        self.drv.memcpy_dtoh(found[:4096], int(array[0]))
        self.drv.memcpy_dtoh(found[4096:], int(array[0]) + size - 4096)
        return found

    def calls(self) -> Calls:
        drv = self.drv
        data = np.ones(SMALL, np.float32)
        x, out = drv.mem_alloc(data.nbytes), np.empty_like(data)
        drv.memcpy_htod(x, data)
        stream, first, last = drv.Stream(), drv.Event(), drv.Event()
        first.record()
        last.record()
        self.context.synchronize()

        def frees() -> None:
            drv.mem_alloc(SMALL).free()

        return {
            "context synchronize": lambda: drv.Context.synchronize(),
            "stream synchronize": lambda: stream.synchronize(), "stream is_done": lambda: stream.is_done(),
            "event synchronize": lambda: last.synchronize(), "event query": lambda: last.query(),
            "event time_since": lambda: last.time_since(first), "event record": lambda: drv.Event().record(stream),
            "copy to host": lambda: drv.memcpy_dtoh(out, x), "copy to device": lambda: drv.memcpy_htod(x, data),
            "memset": lambda: drv.memset_d8(x, 1, 4096), "allocation": lambda: drv.mem_alloc(SMALL),
            "allocation and free": frees, "pinned memory": lambda: drv.pagelocked_empty(SMALL, np.uint8),
            "mem_get_info": lambda: drv.mem_get_info(), "stream created": lambda: drv.Stream(),
        }  # fmt: skip


class Numba(Library):
    name = "numba"

    def begin(self) -> None:
        put_row_stack_back()
        from numba import cuda

        self.cuda = cuda
        cuda.current_context()

        @cuda.jit
        def kernel(x: Any, total: Any) -> None:
            at = cuda.grid(1)
            if at < x.size:
                cuda.atomic.add(total, 0, x[at])

        self._sum = kernel

    def put(self, data: Any) -> Any:
        return self.cuda.to_device(data)

    def get(self, array: Any) -> Any:
        return array.copy_to_host()

    def fill(self, size: int, value: int) -> Any:
        array = self.cuda.device_array(size, np.uint8)
        self.cuda.driver.device_memset(array, value, size)
        return array

    def ends(self, array: Any, size: int) -> Any:
        return np.concatenate([array[:4096].copy_to_host(), array[size - 4096 :].copy_to_host()])

    def computed(self, array: Any) -> int:
        total = self.cuda.to_device(np.zeros(1, np.uint64))
        self._sum[(array.size + 255) // 256, 256](array, total)
        return int(total.copy_to_host()[0])

    def trim(self) -> None:
        self.cuda.current_context().deallocations.clear()

    def calls(self) -> Calls:
        cuda = self.cuda
        data = np.ones(SMALL, np.float32)
        x, counts, total = (
            cuda.to_device(data), cuda.to_device(np.ones(1024, np.uint8)), cuda.to_device(np.zeros(1, np.uint64)),
        )  # fmt: skip
        stream, first, last = cuda.stream(), cuda.event(), cuda.event()
        first.record()
        last.record()
        self._sum[4, 256](counts, total)
        cuda.synchronize()
        return {
            "synchronize": lambda: cuda.synchronize(), "stream synchronize": lambda: stream.synchronize(),
            "event synchronize": lambda: last.synchronize(), "event query": lambda: last.query(),
            "event elapsed time": lambda: cuda.event_elapsed_time(first, last),
            "event record": lambda: cuda.event().record(stream), "copy to host": lambda: x.copy_to_host(),
            "copy to device": lambda: cuda.to_device(data), "allocation": lambda: cuda.device_array(SMALL, np.uint8),
            "kernel": lambda: self._sum[4, 256](counts, total), "deallocations": lambda: self.trim(),
            "get_memory_info": lambda: cuda.current_context().get_memory_info(),
            "pinned memory": lambda: cuda.pinned_array(SMALL, np.uint8), "stream created": lambda: cuda.stream(),
        }  # fmt: skip


def _float_of(value: int) -> float:
    """The number whose eight bytes all have this value."""
    return float(np.full(8, value, np.uint8).view(np.float64)[0])


def library(name: str) -> Library:
    kinds: dict[str, type[Library]] = {kind.name: kind for kind in (Torch, TensorFlow, Jax, Cupy, Pycuda, Numba)}
    return kinds[name]()


class Kept:
    """One framework's arrays, with their expected contents: random bytes kept on the host, or blocks of one byte
    value."""

    def __init__(self, name: str) -> None:
        self.library = library(name)
        self.library.begin()
        self._random: list[tuple[Any, Any, int]] = []
        self._blocks: list[tuple[Any, int, int]] = []

    def random(self, size: int, seed: int, parts: int = 4) -> None:
        """Add `size` bytes in several arrays; `wrong` reads each back completely."""
        for part in range(parts):
            data = random_bytes(max(size // parts, 4096), seed + part)
            array = self.library.put(data)
            self._random.append((array, data, self.library.computed(array)))

    def large(self, size: int) -> None:
        """Add blocks of 1 GiB; `wrong` reads back both ends of each, but not its middle."""
        while size > 0:
            piece, value = min(size, BLOCK), 1 + len(self._blocks) % 120
            self._blocks.append((self.library.fill(piece, value), piece, value))
            size -= piece

    def wrong(self) -> int:
        """The number of arrays whose values changed."""
        found = 0
        for array, data, total in self._random:
            found += not (np.array_equal(self.library.get(array), data) and self.library.computed(array) == total)
        for array, size, value in self._blocks:
            found += not bool((self.library.ends(array, size) == value).all())
        return found

    @property
    def count(self) -> int:
        return len(self._random) + len(self._blocks)

    def drop(self) -> None:
        self._random.clear()
        self._blocks.clear()
        gc.collect()
        self.library.trim()


class Raw(six.Raw):
    """Raw CUDA memory of no framework, in a process that is never suspended. The creating thread has its context
    current."""

    def __init__(self) -> None:
        super().__init__()
        self.call("cuCtxPushCurrent_v2", self.context)

    def take(self, size: int) -> int | None:  # type: ignore[override]
        """Its address; None if there is no room."""
        try:
            return super().take(size)
        except RuntimeError:
            return None


PIECES = (1 << 30, 64 * MIB, 2 * MIB)  # The frameworks that fill a GPU.

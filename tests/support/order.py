"""Exchanges while the producer's kernel still runs, and views dropped while the consumer's kernel still reads.

Each framework is a producer (`work` starts about a millisecond of work, ending in a fill with the round's number, on a
stream with no ordering) and a consumer (`right` reads the whole array on its own stream)."""

from __future__ import annotations

import contextlib
import ctypes
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from support.arrays import ON_CPU, device, driver, on_gpu, start, wait

SIZE = 65_536
SECONDS = 0.001  # Duration of a producer's work.
_EYE = 256 if ON_CPU else 2048


class Producer:
    """`work(number)` returns an array that contains the number everywhere a millisecond later."""

    def context(self) -> Any:
        """Context for the exchange: the producer's stream is current."""
        return contextlib.nullcontext()

    def work(self, number: int) -> Any:
        raise NotImplementedError

    def running(self) -> bool | None:
        """Whether the producer is still working; None if the framework cannot tell."""
        return None


class Busy:
    """Whether the current context has unfinished work, by the driver: query an event that covers all its streams. For
    TensorFlow, whose stream is not exposed: in a round it is the only one working before the exchange."""

    _NOT_READY = 600
    _DISABLE_TIMING = 2

    def __init__(self) -> None:
        self.event, self.context = ctypes.c_void_p(), ctypes.c_void_p()
        cuda: Any = None if ON_CPU else driver()
        there = cuda is not None and hasattr(cuda, "cuCtxRecordEvent")  # CUDA 12.5 has this function
        made = there and not cuda.cuEventCreate(ctypes.byref(self.event), self._DISABLE_TIMING)
        self.cuda: Any = cuda if made else None

    def __call__(self) -> bool | None:
        """None if the driver cannot tell."""
        if self.cuda is None or self.cuda.cuCtxGetCurrent(ctypes.byref(self.context)) or not self.context:
            return None
        if self.cuda.cuCtxRecordEvent(self.context, self.event):
            return None
        code = self.cuda.cuEventQuery(self.event)
        return None if code not in (0, self._NOT_READY) else bool(code)


class TorchProducer(Producer):
    def __init__(self) -> None:
        import torch

        self.torch, self.x = torch, torch.zeros(SIZE, device=device())
        self.stream = None if ON_CPU else torch.cuda.Stream()
        wait()

    def context(self) -> Any:
        return self.torch.cuda.stream(self.stream) if self.stream is not None else contextlib.nullcontext()

    def work(self, number: int) -> Any:
        sleep(SECONDS)
        self.x.fill_(float(number))
        return self.x

    def running(self) -> bool | None:
        return None if self.stream is None else not self.stream.query()


class CuPyProducer(Producer):
    def __init__(self) -> None:
        import cupy
        import torch

        self.torch, self.x = torch, cupy.zeros(SIZE, cupy.float32)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.same = torch.cuda.ExternalStream(self.stream.ptr)
        with self.stream:
            self.x.fill(0)
        wait()

    def context(self) -> Any:
        return self.stream

    def work(self, number: int) -> Any:
        with self.torch.cuda.stream(self.same):
            sleep(SECONDS)
        self.x.fill(float(number))
        return self.x

    def running(self) -> bool | None:
        return not self.stream.done


class JaxProducer(Producer):
    """JAX's own asynchronous dispatch: products with the identity, then the fill."""

    def __init__(self) -> None:
        import jax
        import jax.numpy as jnp

        self.eye = jnp.eye(_EYE)
        self.x: Any = None

        def chain(count: int) -> Any:
            @jax.jit
            def produce(eye: Any, number: Any) -> Any:
                z = eye
                for _ in range(count):
                    z = z @ eye
                return jnp.full((SIZE,), number, jnp.float32) * z[0, 0]

            return produce

        self.produce, self.seconds = _long_enough(
            lambda count: chain(count), lambda call: call(self.eye, 1.0).block_until_ready()
        )

    def work(self, number: int) -> Any:
        self.x = self.produce(self.eye, float(number))
        return self.x

    def running(self) -> bool | None:
        return not self.x.is_ready()


class TensorFlowProducer(Producer):
    """The same in a `tf.function`; it counts the round's number on the GPU, because feeding the number would block."""

    def __init__(self) -> None:
        import tensorflow as tf

        self.count = None
        with on_gpu():
            self.eye, self.one = tf.eye(_EYE), tf.identity(tf.constant([1.0]))
            self.ones = tf.identity(tf.ones((SIZE,)))
        self.number = 0
        self.tf, self.busy = tf, Busy()

        def chain(count: int) -> Any:
            @tf.function
            def produce(eye: Any, ones: Any, number: Any) -> Any:
                z = eye
                for _ in range(count):
                    z = tf.linalg.matmul(z, eye)
                return ones * (z[0, 0] * number)

            return produce

        def once(call: Any) -> None:
            with on_gpu():
                call(self.eye, self.ones, self.one)[0].numpy()

        self.produce, self.seconds = _long_enough(chain, once)

    def work(self, number: int) -> Any:
        with on_gpu():
            if number != self.number + 1 or self.count is None:
                self.count = self.tf.identity(self.tf.constant([float(number)]))
            else:
                self.count = self.count + self.one
            self.number = number
            return self.produce(self.eye, self.ones, self.count)

    def running(self) -> bool | None:
        return self.busy()


class PyCUDAProducer(Producer):
    """A non-blocking PyCUDA stream, filled through PyTorch: PyCUDA needs nvcc to compile kernels."""

    def __init__(self) -> None:
        import numpy as np
        import pycuda.driver as drv
        import torch
        from pycuda import gpuarray

        self.torch = torch
        self.x = gpuarray.to_gpu(np.zeros(SIZE, np.float32))
        self.seen = torch.as_tensor(self.x, device="cuda")
        self.stream = _non_blocking(drv)
        self.same = torch.cuda.ExternalStream(int(self.stream.handle))
        wait()

    def work(self, number: int) -> Any:
        with self.torch.cuda.stream(self.same):
            sleep(SECONDS)
            self.seen.fill_(float(number))
        return self.x

    def running(self) -> bool | None:
        return not self.stream.is_done()


def _non_blocking(drv: Any) -> Any:
    return drv.Stream(1)  # CU_STREAM_NON_BLOCKING


class NumbaProducer(Producer):
    """Every second array names its stream in the interface; `numba.cuda.stream()` only creates blocking streams."""

    def __init__(self) -> None:
        import numpy as np
        import torch
        from numba import cuda

        self.torch, self.stream = torch, torch.cuda.Stream()
        named = cuda.external_stream(self.stream.cuda_stream)
        plain = cuda.to_device(np.zeros(SIZE, np.float32))
        self.arrays = (plain, plain.bind(named))
        self.seen = torch.as_tensor(plain, device="cuda")
        wait()

    def work(self, number: int) -> Any:
        with self.torch.cuda.stream(self.stream):
            sleep(SECONDS)
            self.seen.fill_(float(number))
        return self.arrays[number % 2]

    def running(self) -> bool | None:
        return not self.stream.query()


class Consumer:
    """Reads on its own stream, which no other stream waits for."""

    def __init__(self, name: str) -> None:
        self.name, self.stream, self.pinned = name, None, None
        if name == "torch":
            import torch

            self.torch = torch
            self.stream = None if ON_CPU else torch.cuda.Stream()
        elif name == "cupy":
            import cupy

            self.stream = cupy.cuda.Stream(non_blocking=True)
        elif name == "jax":
            import jax

            self.same = jax.jit(lambda y, number: (y == number).all())
        elif name == "tensorflow":
            import tensorflow as tf

            self.tf = tf
        elif name == "pycuda":
            import numpy as np
            import pycuda.driver as drv

            self.drv, self.stream = drv, _non_blocking(drv)
            self.pinned = drv.pagelocked_empty(SIZE, np.float32)
        elif name == "numba":
            import numpy as np
            import torch
            from numba import cuda

            self.side = torch.cuda.Stream()
            self.stream = cuda.external_stream(self.side.cuda_stream)
            self.pinned = cuda.pinned_array(SIZE, np.float32)

    def context(self) -> Any:
        if self.stream is None or self.name in ("pycuda", "numba"):
            return contextlib.nullcontext()
        return self.torch.cuda.stream(self.stream) if self.name == "torch" else self.stream

    def right(self, y: Any, number: int) -> bool:
        """Whether the whole array contains the number, as read on the consumer's stream."""
        if self.name in ("torch", "cupy"):
            return bool((y == float(number)).all())
        if self.name == "jax":
            return bool(self.same(y, float(number)))
        if self.name == "tensorflow":
            with on_gpu():
                return bool(self.tf.reduce_all(self.tf.equal(y, float(number))))
        if self.name == "pycuda":
            self.drv.memcpy_dtoh_async(self.pinned, int(y.gpudata), self.stream)
            self.stream.synchronize()
        else:
            y.copy_to_host(self.pinned, stream=self.stream)
            self.stream.synchronize()
        return bool((self.pinned == float(number)).all())


PRODUCERS: dict[str, Callable[[], Producer]] = {
    "torch": TorchProducer, "tensorflow": TensorFlowProducer, "cupy": CuPyProducer, "jax": JaxProducer,
    "pycuda": PyCUDAProducer, "numba": NumbaProducer,
}  # fmt: skip


def rounds(
    producer: Producer, consumer: Consumer, hand: Callable[[Any], Any], count: int, within: float = 1e9
) -> dict[str, Any]:
    """Exchange arrays with unfinished work: count stale reads, and measure the host's waiting time. Continue until the
    kernel was seen running just before `count` exchanges: the others prove nothing. At most four times as many rounds,
    and `within` seconds."""
    stale, before, after, took, done = 0, 0, 0, [], 0
    ends = time.monotonic() + within
    for number in range(1, 4 * count + 1):
        with producer.context():
            x = producer.work(number)
            with consumer.context():
                before += producer.running() is True
                begun = time.perf_counter()
                y = hand(x)
                took.append(time.perf_counter() - begun)
                after += producer.running() is True
                stale += not consumer.right(y, number)
                del y
        done = number
        if before >= count or time.monotonic() > ends:
            break
    return {
        "rounds": done, "stale": stale, "running_before": before, "running_after": after,
        "hand_over_us": round(statistics.median(took) * 1e6, 1),
    }  # fmt: skip


def sleep(seconds: float) -> None:
    """Enqueue that much work on PyTorch's current stream."""
    if not ON_CPU:
        import torch

        torch.cuda._sleep(int(seconds * _cycles()))


class Edge:
    """Durations of work near the tipping point: the work ends at about the time of the check, however long the code in
    between takes. Each call of `told` moves the next duration closer. Each duration is drawn from half to one and a
    half times the middle. The middle grows after a round whose work had ended, and shrinks after any other. So both
    outcomes are about equally frequent on any GPU, and most durations are near the edge."""

    SHORTEST, LONGEST, STEP = 1.0, 1e8, 1.15

    def __init__(self, seed: int, middle: float) -> None:
        self.draw, self.middle = random.Random(seed), middle
        self.ended, self.under_way = 0, 0

    def length(self) -> int:
        return max(round(self.middle * self.draw.uniform(0.5, 1.5)), 1)

    def told(self, ended: bool) -> None:
        self.ended += ended
        self.under_way += not ended
        middle = self.middle * self.STEP if ended else self.middle / self.STEP
        self.middle = min(max(middle, self.SHORTEST), self.LONGEST)


def _cycles() -> float:
    """Cycles of `torch.cuda._sleep` per second at the GPU's highest clock: at a lower clock it sleeps longer. Computed,
    not measured: other processes use the GPU at the same time, in turns."""
    global _rate
    if not _rate:
        try:
            import pynvml

            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            _rate = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM) * 1e6
        except Exception:
            _rate = 2e9
    return _rate


_rate = 0.0


def _long_enough(chain: Callable[[int], Any], once: Callable[[Any], Any]) -> tuple[Any, float]:
    """A chain of products that runs for at least `SECONDS`, and its duration."""
    call, took = None, 0.0
    for count in (8, 16, 32, 64):
        call, times = chain(count), []
        for _ in range(5):
            wait()
            begun = time.perf_counter()
            once(call)
            times.append(time.perf_counter() - begun)
        took = min(times[1:])
        if took >= 1.5 * SECONDS:
            break
    return call, took


def controls(count: int) -> dict[str, Any]:
    """Imports by hand without ordering: they must be stale, or the rounds with memguard prove nothing."""
    start("torch", "tensorflow", "cupy", "numba")
    import tensorflow as tf
    import torch
    from numba import cuda

    take = tf.experimental.dlpack.from_dlpack
    ways: dict[str, tuple[Producer, Consumer, Callable[[Any], Any]]] = {
        "torch > tensorflow: tf.experimental.dlpack.from_dlpack(x.__dlpack__(stream=-1))": (
            TorchProducer(), Consumer("tensorflow"), lambda x: take(x.__dlpack__(stream=-1)),
        ),
        "torch > tensorflow: tf.experimental.dlpack.from_dlpack(x.__dlpack__())": (
            TorchProducer(), Consumer("tensorflow"), lambda x: take(x.__dlpack__()),
        ),
        "torch > numba: numba.cuda.as_cuda_array(x, sync=False)": (
            TorchProducer(), Consumer("numba"), lambda x: cuda.as_cuda_array(x, sync=False),
        ),
        "cupy > torch: torch.as_tensor(x)": (
            CuPyProducer(), Consumer("torch"), lambda x: torch.as_tensor(x, device="cuda"),
        ),
    }  # fmt: skip
    outcome = {}
    for name, (producer, consumer, hand) in ways.items():
        hand(producer.work(0))
        wait()
        outcome[name] = rounds(producer, consumer, hand, count)
        wait()
    return {"ways": outcome}


# The view is dropped while the consumer still reads

_LONG = 0.005


class LateReader:
    """`read(y)` enqueues a read of y behind 5 ms of other work, and returns the array that will contain the values."""

    def __init__(self, name: str) -> None:
        self.name = name
        if name == "tensorflow":
            import tensorflow as tf

            self.tf = tf
            with on_gpu():
                self.eye = tf.eye(_EYE)
                for self.count in (16, 32, 64, 128):
                    self._chain()[0, 0].numpy()
                    begun = time.perf_counter()
                    self._chain()[0, 0].numpy()
                    if time.perf_counter() - begun >= 2 * _LONG:
                        break
        else:
            import torch

            self.torch = torch
            self.stream = torch.cuda.Stream()

    def _chain(self) -> Any:
        z = self.eye
        for _ in range(self.count):
            z = self.tf.linalg.matmul(z, self.eye)
        return z

    def context(self) -> Any:
        return self.torch.cuda.stream(self.stream) if self.name == "torch" else contextlib.nullcontext()

    def ahead(self) -> Any:
        """The other work."""
        if self.name == "tensorflow":
            with on_gpu():
                return self._chain()[0, 0]
        sleep(_LONG)
        return 1.0

    def read(self, y: Any, factor: Any) -> Any:
        if self.name == "tensorflow":
            with on_gpu():
                return y * factor
        return y * factor

    def wrong(self, out: Any, number: int) -> bool:
        if self.name == "tensorflow":
            with on_gpu():
                return not bool(self.tf.reduce_all(self.tf.equal(out, float(number))))
        with self.torch.cuda.stream(self.stream):
            return not bool((out == float(number)).all())


AGAIN = 8  # Arrays created right after the lender's is freed: one of them reuses its memory, if that is free.


class Bare:
    """An array's address without a reference that keeps it alive, as `torch.as_tensor` reads it."""

    def __init__(self, x: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape), "typestr": "<f4", "data": (_address(x), False), "version": 3, "strides": None,
        }  # fmt: skip


def dropped(producer: str, consumer: str, hand: Callable[[Any], Any], count: int) -> dict[str, Any]:
    """The producer deletes its array at once, then allocates memory of the same size and overwrites it."""
    make = _filler(producer)
    reads = LateReader(consumer)
    wrong = reused = 0
    for number in range(1, count + 1):
        x = make(float(number))
        wait()
        address = _address(x)
        with reads.context():
            factor = reads.ahead()
            y = hand(x)
            out = reads.read(y, factor)
            del y
        del x
        again = [make(-1.0) for _ in range(AGAIN)]
        reused += address in [_address(one) for one in again]
        wrong += reads.wrong(out, number)
        wait()
        del again, out, factor
    return {"rounds": count, "wrong": wrong, "memory_taken_again": reused}


def _filler(name: str) -> Callable[[float], Any]:
    size = 1 << 22
    if name == "torch":
        import torch

        return lambda value: torch.full((size,), value, device=device())
    if name == "cupy":
        import cupy

        return lambda value: cupy.full(size, value, cupy.float32)
    import jax
    import jax.numpy as jnp

    full = jax.jit(lambda value: jnp.full((size,), value, jnp.float32))
    return lambda value: full(value)


def _address(x: Any) -> int:
    if hasattr(x, "data_ptr"):
        return int(x.data_ptr())
    return int(x.data.ptr) if hasattr(x, "get") and hasattr(x, "data") else int(x.unsafe_buffer_pointer())

"""Create, read and pass arrays by each framework's own API: the reference for the tests of memguard.exchange.

Nothing here calls memguard. With MEMGUARD_EXCHANGE_CPU=1 the arrays are on the host, for a trial without a GPU."""

from __future__ import annotations

import ctypes
import os
from typing import Any, NamedTuple

from bench.programs.arrays import begin, owner
from bench.programs.six import Card

ON_CPU = os.environ.get("MEMGUARD_EXCHANGE_CPU") == "1"
NAMES = ("torch", "tensorflow", "jax") if ON_CPU else ("torch", "tensorflow", "cupy", "jax", "pycuda", "numba")
BUFFERS = () if ON_CPU else ("rmm", "cuda.core")  # Libraries that can only produce arrays.
PAIRS = tuple((source, target) for source in NAMES for target in NAMES if source != target)
DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "bfloat16", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "float8_e8m0fnu",
)  # fmt: skip
TAKES = {
    "torch": frozenset(DTYPES),
    "jax": frozenset(DTYPES),
    "tensorflow": frozenset(name for name in DTYPES if not name.startswith("float8")),
    "cupy": frozenset(name for name in DTYPES if not name.startswith("float8")),
    "pycuda": frozenset(name for name in DTYPES if not name.startswith(("float8", "bfloat16"))),
    "numba": frozenset(name for name in DTYPES if not name.startswith(("float8", "bfloat16"))),
}  # The dtypes that docs/exchange.md lists for each framework.


def start(*names: str, settings: bool = True) -> None:
    """Initialise the frameworks, PyTorch first. `settings` makes their memory grow instead of preallocating it."""
    if settings:
        os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for name in sorted(names, key=lambda name: name != "torch"):
        if name == "torch":
            import torch

            torch.zeros(1, device=device())
        elif name == "tensorflow":
            import tensorflow as tf

            with on_gpu():
                tf.identity(tf.constant([1.0]))
        elif name in BUFFERS:
            __import__(name)
        else:
            begin(name)


def device() -> str:
    return "cpu" if ON_CPU else "cuda"


def on_gpu() -> Any:
    import tensorflow as tf

    return tf.device("/CPU:0" if ON_CPU else "/GPU:0")


def host(dtype: str, count: int = 16) -> Any:
    """Small integer values of a dtype, in host memory."""
    import ml_dtypes
    import numpy as np

    values = np.arange(count) % 2 if dtype == "bool" else np.arange(count) % 8
    if dtype == "float8_e8m0fnu":  # powers of two only
        values = 2.0 ** (np.arange(count) % 8)
    return values.astype(np.dtype(getattr(ml_dtypes, dtype, dtype) if "float8" in dtype or dtype[0] == "b" else dtype))


def make(name: str, values: Any) -> Any:
    """Create the framework's array with these values, in its own memory. Raises the framework's own errors."""
    import numpy as np

    values = np.ascontiguousarray(values).reshape(values.shape)
    plain = values.dtype.isbuiltin == 1  # numpy's own dtypes only, not ml_dtypes
    if name == "torch":
        import torch

        if plain:
            return torch.from_numpy(_aligned(values)).to(device())
        whole = torch.from_numpy(_aligned(values.view(np.uint8))).to(device())
        return whole.view(getattr(torch, values.dtype.name))
    if name == "tensorflow":
        return _tensorflow(values)
    if name == "jax":
        import jax.numpy as jnp

        made = jnp.array(values)
        if made.dtype != values.dtype:
            raise TypeError(f"JAX made {made.dtype} of {values.dtype}")
        return made.block_until_ready()
    if name == "cupy":
        import cupy

        if plain:
            return cupy.asarray(values)
        return cupy.asarray(values.view(f"u{values.itemsize}")).view(values.dtype)
    if name == "pycuda":
        from pycuda import gpuarray

        if not plain:
            raise TypeError(f"PyCUDA has no {values.dtype}")
        return gpuarray.to_gpu(values)
    if name == "numba":
        from numba import cuda

        if not plain:
            raise TypeError(f"Numba has no {values.dtype}")
        return cuda.to_device(values)
    if name == "rmm":
        import rmm

        return rmm.DeviceBuffer.to_device(values.tobytes())
    if name == "cuda.core":
        made = _buffer(values.nbytes)
        copied = driver().cuMemcpyHtoD_v2(
            ctypes.c_uint64(int(made.handle)), ctypes.c_void_p(values.ctypes.data), ctypes.c_size_t(values.nbytes)
        )
        assert copied == 0, copied
        return made
    raise ValueError(name)


def _aligned(values: Any) -> Any:
    """On the host: a copy aligned to 64 bytes, as GPU allocators align by default."""
    import numpy as np

    if not ON_CPU:
        return values
    room = np.empty(values.nbytes + 64, np.uint8)
    first = -room.ctypes.data % 64
    made = room[first : first + values.nbytes].view(values.dtype).reshape(values.shape)
    made[...] = values
    return made


def _tensorflow(values: Any) -> Any:
    """Create it on the GPU for any dtype. TensorFlow keeps int32 in host memory, so build it from bytes."""
    import numpy as np
    import tensorflow as tf

    with on_gpu():
        if values.dtype == np.float32:
            return tf.identity(tf.constant(values))
        if values.dtype == np.bool_:
            return tf.cast(tf.identity(tf.constant(values.view(np.uint8))), tf.bool)
        size = values.dtype.itemsize
        flat = values.view(np.uint8).reshape(*values.shape, size) if size > 1 else values.view(np.uint8)
        return tf.bitcast(tf.identity(tf.constant(flat)), tf.as_dtype(values.dtype.name))


def _buffer(nbytes: int) -> Any:
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    stream = device.create_stream()
    _streams.append(stream)  # the buffers are freed on this stream
    made = device.memory_resource.allocate(nbytes, stream=stream)
    stream.sync()
    return made


_streams: list[Any] = []


class Facts(NamedTuple):
    """Address in bytes, strides in bytes, shape and dtype of an array, as its framework reports them."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    readonly: bool = False


def facts(x: Any) -> Facts:
    name = owner(x)
    if name == "torch":
        item = x.element_size()
        return Facts(
            x.data_ptr(), tuple(x.shape), tuple(s * item for s in x.stride()), str(x.dtype).removeprefix("torch.")
        )
    if name == "tensorflow":
        import tensorflow as tf
        import torch

        x = x.value() if isinstance(x, tf.Variable) else x
        seen = torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(x))
        return Facts(seen.data_ptr(), tuple(x.shape), None, x.dtype.name)
    if name == "jax":
        return Facts(x.unsafe_buffer_pointer(), tuple(x.shape), None, str(x.dtype))
    if name == "cupy":
        return Facts(x.data.ptr, tuple(x.shape), tuple(x.strides), str(x.dtype))
    if name == "cuda":
        return Facts(int(x.handle), (x.size,), None, "uint8")
    import numpy as np

    shown = x.__cuda_array_interface__
    address, readonly = shown["data"]
    return Facts(
        int(address or 0), tuple(shown["shape"]), shown.get("strides"), np.dtype(shown["typestr"]).name, bool(readonly)
    )


def read(x: Any) -> Any:
    """Copy the values to the host, by the framework's own method if it supports this layout."""
    import numpy as np

    name = owner(x)
    if name == "torch":
        return x.detach().cpu().numpy()
    if name == "tensorflow":
        return x.numpy()
    if name == "jax":
        return np.asarray(x)
    if name == "pycuda" and x.flags.c_contiguous:
        return x.get()
    if name == "numba" and x.is_c_contiguous():
        return x.copy_to_host()
    import cupy

    return cupy.asnumpy(cupy.asarray(x))


def raw(address: int, nbytes: int) -> bytes:
    """Synchronise and copy raw bytes of memory, in the same way for every framework and dtype."""
    if ON_CPU:
        return ctypes.string_at(address, nbytes)
    block = ctypes.create_string_buffer(max(nbytes, 1))
    cuda = driver()
    assert cuda.cuCtxSynchronize() == 0
    if nbytes:
        assert cuda.cuMemcpyDtoH_v2(block, ctypes.c_uint64(address), ctypes.c_size_t(nbytes)) == 0
    return block.raw[:nbytes]


def use(x: Any) -> None:
    """Compute with float32 values: if the consumer lacks access to the memory, the process crashes here at the
    latest."""
    name = owner(x)
    if name == "torch":
        float((x * 2).sum())
        if x.ndim == 2 and x.numel():
            float((x @ x.t()).sum())
    elif name == "tensorflow":
        import tensorflow as tf

        float(tf.reduce_sum(x * 2))
        if x.shape.rank == 2 and x.shape.num_elements():
            float(tf.reduce_sum(tf.linalg.matmul(x, x, transpose_b=True)))
    elif name == "jax":
        import jax

        jax.jit(lambda v: (v * 2).sum())(x).block_until_ready()
        if x.ndim == 2 and x.size:
            (x @ x.T).block_until_ready()
    elif name == "cupy":
        float((x * 2).sum())
        if x.ndim == 2 and x.size:
            float((x @ x.T).sum())
    elif name == "numba" and x.ndim == 1 and x.size:
        _doubled(x)
    read(x)


def _doubled(x: Any) -> None:
    from numba import cuda

    global _kernel
    if _kernel is None:

        @cuda.jit
        def double(values, out):  # type: ignore[no-untyped-def]
            i = cuda.grid(1)
            if i < values.size:
                out[i] = values[i] * 2

        _kernel = double
        one = cuda.device_array(1, x.dtype)
        try:
            _kernel[1, 1](one, one)
        except Exception:  # Numba cannot compile here, whatever the array
            _kernel = False
    if _kernel is False:
        return
    out = cuda.device_array(x.shape, x.dtype)
    _kernel[-(-x.size // 128), 128](x, out)
    cuda.synchronize()


_kernel: Any = None


def wait() -> None:
    """Wait until the GPU has finished this process's work."""
    if not ON_CPU:
        driver().cuCtxSynchronize()


def driver() -> ctypes.CDLL:
    global _cuda
    if _cuda is None:
        _cuda = ctypes.CDLL("libcuda.so.1")
    return _cuda


_cuda: Any = None


class ReadOnly:
    """Mark an array's memory read-only in the CUDA array interface."""

    def __init__(self, x: Any) -> None:
        seen = facts(x)
        self.__cuda_array_interface__ = {
            "shape": seen.shape, "typestr": "<f4", "data": (seen.address, True), "version": 3, "strides": None,
        }  # fmt: skip
        self._keep = x


def nvml_bytes() -> int:
    """This process's GPU memory by NVML; -1 if NVML does not report it."""
    try:
        return Card().listed().get(os.getpid(), 0)
    except Exception:
        return -1


def nvml_bytes_of(gpu: int) -> int:
    """This process's memory on the GPU of this number, by NVML."""
    import pynvml

    pynvml.nvmlInit()
    listed = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(gpu))
    return sum(int(one.usedGpuMemory or 0) for one in listed if one.pid == os.getpid())

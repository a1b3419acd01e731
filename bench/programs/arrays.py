"""Float32 arrays of each framework, and the ways by hand from one to another: what memguard.exchange is compared with.

Runs in child processes. Nothing here asks memguard.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from bench.programs.six import put_row_stack_back

if TYPE_CHECKING:
    from memguard.types import FrameworkName

NAMES: tuple[FrameworkName, ...] = ("torch", "tensorflow", "cupy", "jax", "pycuda", "numba")
PAIRS = tuple((source, target) for source in NAMES for target in NAMES if source != target)


def start(*names: str) -> None:
    """Make the frameworks live, PyTorch first. Their memory grows instead of being taken at once."""
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for name in sorted(names, key=lambda name: name != "torch"):
        if name == "torch":
            import torch

            torch.zeros(1, device="cuda")
        elif name == "tensorflow":
            import tensorflow as tf

            with tf.device("/GPU:0"):
                tf.identity(tf.constant([1.0]))
        elif name == "jax":
            import jax.numpy as jnp

            jnp.zeros(1).block_until_ready()
        elif name == "cupy":
            import cupy

            cupy.zeros(1)
        elif name == "pycuda":
            primary_of_pycuda()
        else:
            put_row_stack_back()
            from numba import cuda

            cuda.current_context()


def primary_of_pycuda() -> Any:
    """PyCUDA's driver module, in the GPU's primary context until the process ends."""
    import pycuda.driver as drv

    drv.init()
    context = drv.Device(0).retain_primary_context()
    context.push()
    atexit.register(context.pop)
    return drv


def make(name: str, values: Any) -> Any:
    """The framework's array with these float32 values, in memory of its own."""
    if name == "torch":
        import torch

        return torch.from_numpy(values).to("cuda")
    if name == "tensorflow":
        import tensorflow as tf

        with tf.device("/GPU:0"):
            return tf.identity(tf.constant(values))
    if name == "jax":
        import jax.numpy as jnp

        return jnp.array(values).block_until_ready()
    if name == "cupy":
        import cupy

        return cupy.asarray(values)
    if name == "pycuda":
        from pycuda import gpuarray

        return gpuarray.to_gpu(values)
    from numba import cuda

    return cuda.to_device(values)


def owner(x: Any) -> str:
    """The framework that an array is of."""
    root = type(x).__module__.partition(".")[0]
    return {"jaxlib": "jax", "numba_cuda": "numba"}.get(root, root)


def address(x: Any) -> int:
    name = owner(x)
    if name == "torch":
        return int(x.data_ptr())
    if name == "tensorflow":
        import tensorflow as tf
        import torch

        return int(torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(x)).data_ptr())
    if name == "jax":
        return int(x.unsafe_buffer_pointer())
    if name == "cupy":
        return int(x.data.ptr)
    return int(x.__cuda_array_interface__["data"][0] or 0)


def read(x: Any) -> Any:
    """The values in host memory, by the framework's own way."""
    import numpy as np

    name = owner(x)
    if name == "torch":
        return x.cpu().numpy()
    if name == "tensorflow":
        return x.numpy()
    if name == "jax":
        return np.asarray(x)
    if name == "numba":
        return x.copy_to_host()
    return x.get()  # CuPy and PyCUDA


def wait() -> None:
    """Until the GPU has no work left from this process."""
    global _cuda
    if _cuda is None:
        _cuda = ctypes.CDLL("libcuda.so.1")
    _cuda.cuCtxSynchronize()


_cuda: Any = None


class Box:
    """A capsule as the object that `from_dlpack` functions ask for."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def by_hand(source: str, target: str) -> dict[str, Callable[[Any], Any]]:
    """The ways without memguard from one framework to another: those published, and by way of a third."""
    return dict(_ways(source, target))


def _joined(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: second(first(x))


def _ways(source: str, target: str) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    if source in ("pycuda", "numba") and target in ("jax", "tensorflow"):
        for third in ("torch", "cupy"):
            ((way, first),) = _ways(source, third)
            for then, second in _ways(third, target):
                yield f"{way}, {then}", _joined(first, second)
    elif source == "tensorflow" and target in ("pycuda", "numba"):
        ((way, first),) = _ways("tensorflow", "torch")
        for then, second in _ways("torch", target):
            yield f"{way}, {then}", _joined(first, second)
    elif target == "torch":
        import torch

        if source == "tensorflow":
            import tensorflow as tf

            dlpack, out = torch.utils.dlpack.from_dlpack, tf.experimental.dlpack.to_dlpack
            yield "torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(x))", lambda x: dlpack(out(x))
        elif source in ("pycuda", "numba"):
            yield "torch.as_tensor(x)", lambda x: torch.as_tensor(x, device="cuda")
        else:
            yield "torch.from_dlpack(x)", torch.from_dlpack
    elif target == "tensorflow":
        import tensorflow as tf

        take = tf.experimental.dlpack.from_dlpack
        yield "tf.experimental.dlpack.from_dlpack(x.__dlpack__())", lambda x: take(x.__dlpack__())
    elif target == "jax":
        import jax

        yield "jax.dlpack.from_dlpack(x)", jax.dlpack.from_dlpack
        if source == "tensorflow":
            import tensorflow as tf

            give, get = tf.experimental.dlpack.to_dlpack, jax.dlpack.from_dlpack
            yield "jax.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(x))", lambda x: get(Box(give(x)))
    elif target == "cupy":
        import cupy

        if source == "tensorflow":
            import tensorflow as tf

            export = tf.experimental.dlpack.to_dlpack
            yield "cupy.from_dlpack(tf.experimental.dlpack.to_dlpack(x))", lambda x: cupy.from_dlpack(Box(export(x)))
        elif source in ("pycuda", "numba"):
            yield "cupy.asarray(x)", cupy.asarray
        else:
            yield "cupy.from_dlpack(x)", cupy.from_dlpack
    elif target == "pycuda":
        from pycuda.gpuarray import GPUArray

        places: dict[str, Callable[[Any], Any]] = {
            "torch": lambda x: x.data_ptr(),
            "jax": lambda x: x.unsafe_buffer_pointer(),
            "cupy": lambda x: x.data.ptr,
            "numba": lambda x: x.__cuda_array_interface__["data"][0],
        }
        yield (
            "pycuda.gpuarray.GPUArray(gpudata=address)",
            lambda x: GPUArray(tuple(x.shape), "float32", gpudata=places[source](x), base=x),
        )
    else:
        from numba import cuda

        yield "numba.cuda.as_cuda_array(x)", cuda.as_cuda_array
        if source == "jax":
            import torch

            yield (
                "torch.from_dlpack(x), numba.cuda.as_cuda_array(x)",
                lambda x: cuda.as_cuda_array(torch.from_dlpack(x)),
            )

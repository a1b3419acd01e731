"""Float32 arrays of each framework, and the ways by hand from one to another: what memguard.exchange is compared with.

Runs in child processes. Nothing here asks memguard."""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Callable
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
        begin(name)


def begin(name: str) -> None:
    """Make one framework live, in the primary context."""
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


def by_hand(source: str, target: str) -> list[Callable[[Any], Any]]:
    """The ways without memguard from one framework to another: those published, and by way of a third."""
    import cupy
    import jax
    import tensorflow as tf
    import torch
    from numba import cuda
    from pycuda.gpuarray import GPUArray

    def then(first: Callable[[Any], Any], second: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: second(first(x))

    def chained(*thirds: str) -> list[Callable[[Any], Any]]:
        return [then(by_hand(source, one)[0], second) for one in thirds for second in by_hand(one, target)]

    out, bare = tf.experimental.dlpack.to_dlpack, source in ("pycuda", "numba")
    if bare and target in ("jax", "tensorflow"):
        return chained("torch", "cupy")
    if source == "tensorflow" and target in ("pycuda", "numba"):
        return chained("torch")
    if target == "torch":
        if source == "tensorflow":
            return [lambda x: torch.utils.dlpack.from_dlpack(out(x))]
        return [lambda x: torch.as_tensor(x, device="cuda")] if bare else [torch.from_dlpack]
    if target == "tensorflow":
        return [lambda x: tf.experimental.dlpack.from_dlpack(x.__dlpack__())]
    if target == "jax":
        boxed = [lambda x: jax.dlpack.from_dlpack(Box(out(x)))] if source == "tensorflow" else []
        return [jax.dlpack.from_dlpack, *boxed]
    if target == "cupy":
        if source == "tensorflow":
            return [lambda x: cupy.from_dlpack(Box(out(x)))]
        return [cupy.asarray if bare else cupy.from_dlpack]
    if target == "numba":
        through = [lambda x: cuda.as_cuda_array(torch.from_dlpack(x))] if source == "jax" else []
        return [cuda.as_cuda_array, *through]
    return [lambda x: GPUArray(tuple(x.shape), "float32", gpudata=address(x), base=x)]

"""The functions of JAX that wait while the process is suspended.

A compiled function that ran before runs again without Python code (`PjitFunction`), as do arithmetic operators. No gate
covers the launch of these functions and operators, which waits in the driver, but a gate covers reading their results.
Whether JAX releases the GIL is unknown.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

from memguard._frameworks.optional_modules import Gates, NativeThread, entries, kinds


def of_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the method's array is on a GPU."""
    return bool(args[0].platform() != "cpu")


def any_of_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if an array in the list (the first argument) is on a GPU."""
    return any(one.platform() != "cpu" for one in args[0])


def gpu_program(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the method's compiled program is for GPUs."""
    return bool(args[0].client.platform != "cpu")


def gpu_client(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the method's client uses GPUs."""
    return bool(args[0].platform != "cpu")


def gpu_live(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """`with_gpu` with the signature of `touches`; ignores the call's arguments."""
    return with_gpu()


def with_gpu() -> bool:
    """True if JAX has started a GPU backend."""
    return any(one.platform != "cpu" for one in _clients())


def first_use(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if no JAX backend has started and this call would start a GPU backend."""
    bridge = sys.modules["jax._src.xla_bridge"]
    asked = bridge.config.jax_platforms.value
    if bridge._backends or (asked and "cuda" not in asked and "gpu" not in asked):
        return False
    return any(find_spec(f"jax_cuda{major}_plugin") is not None for major in (12, 13))


def programs() -> object:
    """All compiled programs. The gate keeps them alive, because a program that JAX drops from its caches unloads its
    CUDA module."""
    return [client.live_executables() for client in _clients()]


def _clients() -> list[Any]:
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    return [*getattr(bridge, "_backends", {}).values()]


_JAXLIB = "jaxlib._jax"

GATES = (
    Gates(
        hook="jax",
        waits=(
            *entries(
                _JAXLIB,
                "wait",
                "the end of the array's computation, then cuMemcpyDtoHAsync",
                "ArrayImpl.block_until_ready ArrayImpl.copy_to_host_async ArrayImpl._value ArrayImpl.__array__"
                " ArrayImpl.__dlpack__ ArrayImpl._copy_single_device_array_to_host_async"
                " ArrayImpl._single_device_array_to_np_array_did_copy ArrayImpl.__getitem__ ArrayImpl.item"
                " ArrayImpl.tolist ArrayImpl.__bool__ ArrayImpl.__int__ ArrayImpl.__float__ ArrayImpl.__complex__"
                " ArrayImpl.__index__ ArrayImpl.__repr__ ArrayImpl.__str__ ArrayImpl.__reduce__",
                touches=of_gpu,
            ),
            *entries(_JAXLIB, "wait", "the end of the computations", "batched_block_until_ready", touches=any_of_gpu),
            *entries("jax._src.xla_bridge", "hold", "cuInit, cuDevicePrimaryCtxRetain", "backends", touches=first_use),
            *entries(
                _JAXLIB,
                "wait",
                "cuLaunchKernel",
                "LoadedExecutable.execute_sharded LoadedExecutable.execute LoadedExecutable.execute_with_token",
                optional=True,
                touches=gpu_program,
            ),
            *entries(
                _JAXLIB,
                "wait",
                "cuModuleLoadDataEx, cuMemAlloc for autotuning, cuStreamSynchronize",
                "Client.compile_and_load Client.compile Client.deserialize_executable Client.defragment",
                optional=True,
                touches=gpu_client,
            ),
            *entries(
                "jax._src.interpreters.pxla", "wait", "cuLaunchKernel", "ExecuteReplicated.__call__", touches=gpu_live
            ),
            *entries(
                "jax",
                "wait",
                "cuMemcpyHtoDAsync, the end of the computations",
                "device_put device_get block_until_ready effects_barrier",
                touches=gpu_live,
            ),
            *entries("jax", "crash", "cuModuleUnload", "clear_caches", touches=gpu_live),
        ),
        kept_alive=kinds(_JAXLIB, "cuModuleUnload crashes", "LoadedExecutable"),
        holds=programs,
        # From XLA's sources of 2026 (stream_executor/cuda: host_callback_registry.cc, cuda_executor.h, cuda_stream.cc):
        # a monitor thread polls each stream every 5 s. The thread only checks for errors, and treats a completed stream
        # in the same way as a running stream.
        natives=(NativeThread("xla_cuda_plugin.so", "cuStreamQuery", 5.0, b"cuda_stream_monitor", with_gpu),),
        not_gated=(
            "jax: a compiled function that ran before, and operators: the launch waits in the driver",
            "jax: a program that is compiled anew while suspended waits, and is not kept alive",
        ),
    ),
)

"""The functions of PyTorch that wait while the process is suspended.

The names come from PyTorch's Python sources (2.13). The driver functions in `why` are inferred from the names.
Whether PyTorch releases the GIL in these calls is unknown. The functions of `torch._C` are optional: only CUDA builds
have them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from memguard._frameworks.optional_modules import Gates, entries, kinds


def of_cuda(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if the method's tensor is on a GPU."""
    return bool(args[0].is_cuda)


def to_cuda(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if an argument is on a GPU, names a GPU or requests page-locked memory."""
    return bool(kwargs.get("pin_memory")) or any(_cuda(one) for one in (*args, *kwargs.values()))


def _cuda(one: Any) -> bool:
    if isinstance(one, str):
        return one.startswith("cuda")
    return bool(getattr(one, "is_cuda", False)) or getattr(one, "type", None) == "cuda"


def freed_on_gpu(tensor: Any) -> bool:
    """True if the tensor's memory is on a GPU or page-locked, so that a free may record a CUDA event."""
    return bool(tensor.is_cuda or tensor.is_pinned())


_ASKS_NO_GPU = frozenset(
    (
        "__get__", "size", "dim", "stride", "numel", "nelement", "ndimension", "element_size", "storage_offset",
        "data_ptr", "get_device", "is_contiguous", "is_floating_point", "is_complex", "is_pinned",
    )
)  # fmt: skip
"""Tensor methods that do not call the driver, even for a tensor on a GPU. `__get__` reads attributes such as
`shape`."""


def refusing(enter: Callable[[str], None]) -> AbstractContextManager[object]:
    """A context manager in which, on this thread, every function and operator with a GPU tensor first calls `enter`
    with the name of the function or operator.

    A `TorchFunctionMode` intercepts these calls from Python. Work that runs entirely in C++, such as a backward pass,
    also begins with a call from Python.
    """
    from torch.overrides import TorchFunctionMode

    class Refusing(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = {} if kwargs is None else kwargs
            name = getattr(func, "__name__", "a function")
            if name not in _ASKS_NO_GPU and any(_any_cuda(one) for one in (*args, *given.values())):
                enter(f"torch's {name}")
            return func(*args, **given)

    made: AbstractContextManager[object] = Refusing()
    return made


def _any_cuda(one: Any) -> bool:
    return any(_cuda(part) for part in one) if isinstance(one, (list, tuple)) else _cuda(one)


_SYNCHRONIZES = "cuStreamSynchronize, after a copy that waits in the driver"
_PINS = "cuEventQuery of what uses page-locked memory (CachingHostAllocator::process_events)"

GATES = (
    Gates(
        hook="torch",
        waits=(
            *entries("torch.cuda", "crash", "cuCtxSynchronize", "synchronize"),
            *entries("torch.cuda", "hold", "cuIpcCloseMemHandle", "ipc_collect"),
            *entries("torch.cuda", "crash", "cuEventSynchronize, cuMemFree", "empty_cache"),
            *entries("torch.cuda", "fail", "cuMemGetInfo", "mem_get_info"),
            *entries("torch.cuda", "wait", "cuInit, cuDevicePrimaryCtxRetain", "init _lazy_init"),
            *entries("torch.accelerator", "crash", "cuCtxSynchronize", "synchronize", optional=True),
            *entries(
                "torch._C",
                "crash",
                "cuCtxSynchronize",
                "_cuda_synchronize _accelerator_synchronizeDevice",
                optional=True,
            ),
            *entries(
                "torch._C",
                "crash",
                "cuEventSynchronize, cuMemFree",
                "_cuda_emptyCache _accelerator_emptyCache _accelerator_emptyHostCache _host_emptyCache"
                " _cuda_releasePool",
                optional=True,
            ),
            *entries("torch._C", "fail", "cuMemGetInfo", "_cudart.cudaMemGetInfo", optional=True),
            *entries(
                "torch._C",
                "hold",
                "cuMemHostRegister and the like",
                "_cudart.cudaHostRegister _cudart.cudaHostUnregister _cudart.cudaStreamCreate"
                " _cudart.cudaStreamDestroy _cudart.cudaProfilerStart _cudart.cudaProfilerStop _cuda_ipc_collect"
                " _cuda_cudaCachingAllocator_raw_alloc _cuda_cudaCachingAllocator_raw_delete"
                " _cuda_getCurrentBlasHandle _cuda_init",
                optional=True,
            ),
            *entries("torch._C", "crash", "cuStreamSynchronize", "_CudaStreamBase.synchronize", optional=True),
            *entries("torch._C", "crash", "cuStreamQuery", "_CudaStreamBase.query", optional=True),
            *entries("torch._C", "crash", "cuEventQuery", "_CudaEventBase.query", optional=True),
            *entries("torch._C", "crash", "cuEventSynchronize", "_CudaEventBase.synchronize", optional=True),
            *entries("torch._C", "crash", "cuEventElapsedTime", "_CudaEventBase.elapsed_time", optional=True),
            *entries(
                "torch._C",
                "wait",
                "cuEventCreate, cuEventRecord",
                "_CudaEventBase.record _CudaEventBase.ipc_handle",
                optional=True,
            ),
            *entries(
                "torch._C",
                "crash",
                "a synchronize or a query",
                "Stream.synchronize Stream.query Event.synchronize Event.query Event.elapsed_time",
            ),
            *entries("torch._C", "wait", "cuEventRecord", "Stream.record_event Event.record"),
            *entries(
                "torch.cuda.streams", "crash", "cuStreamSynchronize, cuStreamQuery", "Stream.synchronize Stream.query"
            ),
            *entries(
                "torch.cuda.streams",
                "crash",
                "cuEventSynchronize, cuEventQuery, cuEventElapsedTime",
                "Event.synchronize Event.query Event.elapsed_time",
            ),
            *entries(
                "torch.cuda.streams", "wait", "cuEventRecord", "Event.record Event.ipc_handle Stream.record_event"
            ),
            *entries(
                "torch.cuda.graphs",
                "wait",
                "cuGraphLaunch and the like",
                "CUDAGraph.capture_begin CUDAGraph.capture_end CUDAGraph.replay CUDAGraph.reset",
            ),
            *entries("torch", "crash", _PINS, "Tensor.pin_memory"),
            *entries(
                "torch",
                "wait",
                _SYNCHRONIZES,
                "Tensor.item Tensor.tolist Tensor.cpu Tensor.__bool__ Tensor.__int__ Tensor.__float__"
                " Tensor.__complex__ Tensor.__index__ Tensor.__array__ Tensor.__repr__ Tensor.__format__"
                " Tensor.__reduce_ex__ Tensor.__dlpack__ Tensor.__deepcopy__ Tensor.nonzero Tensor.clone"
                " Tensor.numpy Tensor.backward Tensor.__getitem__ Tensor.record_stream",
                touches=of_cuda,
            ),
            *entries(
                "torch", "wait", _SYNCHRONIZES, "Tensor.to Tensor.type Tensor.copy_ Tensor.__setitem__", touches=to_cuda
            ),
            *entries("torch", "wait", "cuMemAlloc, cuMemcpy", "Tensor.cuda"),
            *entries(
                "torch",
                "wait",
                "cuMemAlloc, cuLaunchKernel; page-locked: cuEventQuery, which crashes",
                "tensor as_tensor asarray empty zeros ones full rand randn randint arange linspace eye empty_strided"
                " empty_like zeros_like ones_like full_like rand_like randn_like",
                touches=to_cuda,
            ),
        ),
        kept_alive=(
            *kinds("torch._C", "cuEventDestroy, with the GIL", "_CudaEventBase Event"),
            *kinds("torch._C", "cuGraphExecDestroy", "_CUDAGraph"),
            *kinds("torch._C", "cuMemFree", "_MemPool"),
            *kinds(
                "torch",
                "cuEventRecord after record_stream, cuMemFreeAsync with backend:cudaMallocAsync; with the GIL",
                "Tensor",
                freed_on_gpu,
            ),
        ),
        not_gated=(
            "torch: operators on GPU tensors wait in the driver; on the thread of a `suspended` block they raise",
            "torch: compiled graphs and scripted functions wait in the driver",
        ),
        refuses=refusing,
    ),
)

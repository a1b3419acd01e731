"""The functions of cuda-python (`cuda.bindings`, `cuda.core`) that wait while the process is suspended.

Whether these functions release the GIL is unknown. `cuda.core` calls the driver in C and bypasses the names of
`cuda.bindings`. Numba uses both. For a type written in C, the table omits the methods that start with two underscores.
"""

from __future__ import annotations

from memguard._frameworks.optional_modules import Gates, entries, kinds

AT_ONCE = (
    "cuCheckpoint*",
    "cuGetError*",
    "cuGetProcAddress*",
    "cuGetExportTable",
    "cuDriverGetVersion",
    "cuDeviceGet*",
    "cuDeviceComputeCapability",
    "cuDeviceTotalMem",
    "cuCtxGet*",
    "cuCtxSetCurrent",
    "cuCtxPushCurrent",
    "cuCtxPopCurrent",
    "cuPointerGetAttribute",
    "cuPointerGetAttributes",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuDevicePrimaryCtxGetState",
    "cuDevicePrimaryCtxRetain",
    "cuMemPoolTrimTo",
    "cuMemPoolGetAttribute",
    "cuMemPoolSetAttribute",
    "cuMemAddressReserve",
)
"""Functions without a gate: in a suspended process the driver returns from them at once (H200, driver 580.159), or they
do not call the driver."""
_RUNTIME_AT_ONCE = (
    "cudaGetError*",
    "cudaGetLastError",
    "cudaPeekAtLastError",
    "cudaGetDevice*",
    "cudaSetDevice",
    "cudaDriverGetVersion",
    "cudaRuntimeGetVersion",
    "cudaDeviceGetAttribute",
    "cudaPointerGetAttributes",
)
_EACH = "each function of the driver that does not answer at once"

GATES = (
    Gates(
        hook="cuda.bindings.driver",
        waits=entries("cuda.bindings.driver", "crash", _EACH, "cu[A-Z]*", but=AT_ONCE),
        not_gated=("cuda.bindings.cydriver: code in C or Cython that calls it goes past the gate",),
    ),
    Gates(
        hook="cuda.bindings.runtime",
        waits=entries(
            "cuda.bindings.runtime",
            "crash",
            _EACH,
            "cuda[A-Z]*",
            but=_RUNTIME_AT_ONCE,
        ),
    ),
    Gates(
        hook="cuda.core",
        waits=(
            *entries("cuda.core._stream", "crash", "cuStreamSynchronize", "Stream.sync"),
            *entries(
                "cuda.core._stream", "wait", "cuEventRecord, cuStreamDestroy", "Stream.record Stream.wait Stream.close"
            ),
            *entries("cuda.core._event", "crash", "cuEventSynchronize, cuEventQuery", "Event.sync Event.is_done"),
            *entries("cuda.core._event", "wait", "cuEventDestroy", "Event.close"),
            *entries("cuda.core._device", "crash", "cuCtxSynchronize, cuMemAllocAsync", "Device.sync Device.allocate"),
            *entries(
                "cuda.core._device", "wait", "cuStreamCreate, cuEventCreate", "Device.create_stream Device.create_event"
            ),
            *entries("cuda.core._launcher", "wait", "cuLaunchKernelEx", "launch"),
            *entries("cuda.core", "wait", "cuLaunchKernelEx", "launch"),
            *entries(
                "cuda.core._module",
                "wait",
                "cuLibraryLoadData, cuLibraryGetKernel",
                "ObjectCode.get_kernel ObjectCode.handle",
            ),
            *entries("cuda.core._memory._buffer", "wait", "cuMemcpyAsync", "Buffer.copy_to Buffer.copy_from"),
            *entries(
                "cuda.core._memory._buffer",
                "wait",
                "cuMemFreeAsync, cuMemsetD8Async",
                "Buffer.close Buffer.fill",
                optional=True,
            ),
            *entries(
                "cuda.core._memory._memory_pool", "crash", "cuMemAllocFromPoolAsync", "_MemPool.allocate", optional=True
            ),
            *entries(
                "cuda.core._memory._memory_pool",
                "wait",
                "cuMemFreeAsync, cuMemPoolDestroy",
                "_MemPool.deallocate _MemPool.close",
                optional=True,
            ),
            *entries(
                "cuda.core._memory._legacy",
                "wait",
                "cuMemAlloc, cuMemHostAlloc",
                "_SynchronousMemoryResource.allocate _SynchronousMemoryResource.deallocate"
                " LegacyPinnedMemoryResource.allocate LegacyPinnedMemoryResource.deallocate",
                optional=True,
            ),
            *entries(
                "cuda.core.graph._graph_builder",
                "wait",
                "cuGraphLaunch",
                "Graph.launch Graph.upload Graph.close",
                optional=True,
            ),
        ),
        kept_alive=(
            *kinds("cuda.core._module", "cuLibraryUnload, taken to crash as cuModuleUnload does", "ObjectCode Kernel"),
            *kinds("cuda.core._stream", "cuStreamDestroy", "Stream"),
            *kinds("cuda.core._event", "cuEventDestroy", "Event"),
            *kinds("cuda.core._memory._buffer", "cuMemFreeAsync", "Buffer MemoryResource"),
            *kinds("cuda.core.graph._graph_builder", "cuGraphExecDestroy", "Graph"),
        ),
    ),
)

"""Lists the CuPy functions that memguard makes wait while the process is suspended.

From CuPy's sources: `cupy_backends/cuda/api/{runtime,driver}.pyx` release the GIL around each driver call that may
block, except queries and `memGetInfo`. CuPy's own code calls these functions in C, so a replaced Python name does not
affect those calls. The table therefore also lists methods of CuPy's classes.
"""

from __future__ import annotations

from memguard._frameworks.optional_modules import Gates, entries, kinds

_RUNTIME = "cupy_backends.cuda.api.runtime"
_DRIVER = "cupy_backends.cuda.api.driver"
_COPIES = "cuMemcpyDtoHAsync, which waits without the GIL, then cuStreamSynchronize"

GATES = (
    Gates(
        hook="cupy",
        waits=(
            *entries(_RUNTIME, "crash", "cuCtxSynchronize", "deviceSynchronize"),
            *entries(_RUNTIME, "crash", "cuStreamSynchronize, cuStreamQuery", "streamSynchronize streamQuery"),
            *entries(
                _RUNTIME,
                "crash",
                "cuEventSynchronize, cuEventQuery, cuEventElapsedTime",
                "eventSynchronize eventQuery eventElapsedTime",
            ),
            *entries(_RUNTIME, "crash", "cuMemAllocAsync", "mallocAsync mallocFromPoolAsync"),
            *entries(_RUNTIME, "fail", "cuMemGetInfo, cuIpcGetMemHandle", "memGetInfo ipcGetMemHandle"),
            *entries(
                _RUNTIME,
                "hold",
                "cuIpcOpenMemHandle and the like",
                "ipcOpenMemHandle ipcCloseMemHandle ipcGetEventHandle ipcOpenEventHandle deviceEnablePeerAccess"
                " deviceDisablePeerAccess deviceSetLimit profilerStart profilerStop",
            ),
            *entries(
                _RUNTIME,
                "wait",
                "the driver's function of that name",
                "malloc mallocManaged malloc3DArray mallocArray hostAlloc hostRegister hostUnregister free freeHost"
                " freeArray freeAsync memcpy memcpyAsync memcpyPeer memcpyPeerAsync memcpy2D memcpy2DAsync"
                " memcpy2DFromArray memcpy2DFromArrayAsync memcpy2DToArray memcpy2DToArrayAsync memcpy3D memcpy3DAsync"
                " memset memsetAsync memPrefetchAsync memAdvise memPoolCreate memPoolDestroy streamCreate"
                " streamCreateWithFlags streamDestroy streamAddCallback launchHostFunc streamBeginCapture"
                " streamEndCapture eventCreate eventCreateWithFlags eventDestroy eventRecord createTextureObject"
                " destroyTextureObject createSurfaceObject destroySurfaceObject graphDestroy graphExecDestroy"
                " graphInstantiate graphLaunch graphUpload",
            ),
            *entries(_RUNTIME, "wait", "as above", "streamCreateWithPriority graphDebugDotPrint", optional=True),
            *entries(_DRIVER, "crash", "cuModuleUnload", "moduleUnload"),
            *entries(
                _DRIVER,
                "wait",
                "the driver's function of that name",
                "devicePrimaryCtxRelease ctxCreate ctxDestroy linkCreate linkAddData linkAddFile linkComplete"
                " linkDestroy moduleLoad moduleLoadData moduleGetFunction moduleGetGlobal launchKernel"
                " launchCooperativeKernel funcGetAttribute funcSetAttribute",
            ),
            *entries("cupy.cuda.device", "crash", "cuCtxSynchronize", "Device.synchronize"),
            *entries("cupy.cuda.device", "fail", "cuMemGetInfo", "Device.mem_info"),
            *entries(
                "cupy.cuda.device",
                "wait",
                "cublasCreate and the like",
                "Device.cublas_handle Device.cusolver_handle Device.cusolver_sp_handle Device.cusparse_handle"
                " Device.cutensor_handle",
            ),
            *entries(
                "cupy.cuda.stream",
                "crash",
                "cuStreamSynchronize, cuStreamQuery",
                "_BaseStream.synchronize _BaseStream.done",
            ),
            *entries("cupy.cuda.stream", "crash", "cuEventSynchronize, cuEventQuery", "Event.synchronize Event.done"),
            *entries("cupy.cuda.stream", "crash", "cuEventElapsedTime", "get_elapsed_time"),
            *entries("cupy.cuda", "crash", "cuEventElapsedTime", "get_elapsed_time"),
            *entries(
                "cupy.cuda.stream",
                "wait",
                "cuEventRecord, cuStreamCreate, cuLaunchHostFunc",
                "Event.__init__ Event.record Stream.__init__ _BaseStream.record _BaseStream.add_callback"
                " _BaseStream.launch_host_func _BaseStream.begin_capture _BaseStream.end_capture",
            ),
            *entries("cupy.cuda.memory", "crash", "cuMemAllocAsync", "MemoryAsyncPool.malloc malloc_async"),
            *entries("cupy.cuda", "crash", "cuMemAllocAsync", "malloc_async"),
            *entries("cupy.cuda.memory", "crash", "cuStreamSynchronize", "MemoryAsyncPool.free_all_blocks"),
            *entries(
                "cupy.cuda.memory",
                "wait",
                "cuMemAlloc, cuMemFree, copies",
                "alloc MemoryPool.malloc MemoryPool.free_all_blocks MemoryPool.free_all_free malloc_managed"
                " MemoryPointer.copy_from_device MemoryPointer.copy_from_device_async MemoryPointer.copy_from_host"
                " MemoryPointer.copy_from_host_async MemoryPointer.copy_from MemoryPointer.copy_from_async"
                " MemoryPointer.copy_to_host MemoryPointer.copy_to_host_async MemoryPointer.memset"
                " MemoryPointer.memset_async",
            ),
            *entries("cupy.cuda", "wait", "cuMemAlloc", "alloc malloc_managed"),
            *entries(
                "cupy.cuda.pinned_memory",
                "crash",
                "cuEventQuery of page-locked blocks in use, cuMemHostAlloc",
                "PinnedMemoryPool.malloc PinnedMemoryPool.free_all_blocks alloc_pinned_memory",
            ),
            *entries("cupy.cuda", "crash", "cuEventQuery of page-locked blocks in use", "alloc_pinned_memory"),
            *entries("cupy.cuda.graph", "wait", "cuGraphLaunch", "Graph.launch Graph.upload"),
            *entries(
                "cupy.cuda.function",
                "wait",
                "cuModuleLoadData and the like",
                "Module.load Module.load_file Module.get_function Module.get_global_var Function.linear_launch",
            ),
            *entries(
                "cupy._core.core",
                "wait",
                _COPIES,
                "_ndarray_base.get _ndarray_base.set _ndarray_base.item _ndarray_base.tolist _ndarray_base.tobytes"
                " _ndarray_base.tofile _ndarray_base.dump _ndarray_base.dumps _ndarray_base.copy _ndarray_base.fill"
                " _ndarray_base.astype _ndarray_base.nonzero _ndarray_base.toDlpack",
            ),
            *entries(
                "cupy",
                "wait",
                _COPIES,
                "ndarray.__bool__ ndarray.__int__ ndarray.__float__ ndarray.__complex__ ndarray.__repr__"
                " ndarray.__str__ ndarray.__format__ ndarray.__reduce__ ndarray.__dlpack__ ndarray.__getitem__"
                " ndarray.__setitem__ asnumpy asarray array",
            ),
        ),
        later=(
            *entries("cupy.cuda.stream", "wait", "cuEventDestroy", "Event.__del__"),
            *entries("cupy.cuda.stream", "wait", "cuStreamDestroy", "Stream.__del__"),
            *entries("cupy.cuda.pinned_memory", "wait", "cuMemFreeHost", "PinnedMemory.__del__"),
        ),
        kept_alive=(
            *kinds("cupy.cuda.function", "cuModuleUnload crashes", "Module"),
            *kinds("cupy.cuda.memory", "cuMemFree, cuMemFreeAsync", "Memory MemoryAsync ManagedMemory PooledMemory"),
            *kinds("cupy.cuda.graph", "cuGraphExecDestroy", "Graph"),
            *kinds("cupy.cuda.texture", "cuTexObjectDestroy", "TextureObject SurfaceObject CUDAarray"),
            *kinds("cupy.cuda.device", "cublasDestroy and the like, which synchronize", "Handle"),
            *kinds("cupy.cuda.cufft", "cufftDestroy, which frees memory", "Plan1d PlanNd"),
        ),
        imports=("cupy.cuda.cufft", "cupy.cuda.cub", "cupy.cuda.thrust", "cupy.cuda.nccl"),
        not_gated=("cupy: kernels on existing arrays wait in the driver, without the GIL",),
    ),
)

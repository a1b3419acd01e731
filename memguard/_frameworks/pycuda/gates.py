"""Lists the PyCUDA functions that memguard makes wait while the process is suspended.

From PyCUDA's sources `src/cpp/cuda.hpp` and `src/wrapper/wrap_cudadrv.cpp`: PyCUDA releases the GIL during copies,
memsets, synchronization and the older launch functions (`CUDAPP_CALL_GUARDED_THREADED`). It holds the GIL during
`_launch_kernel`, allocations, frees, the loading of modules (`CUDAPP_CALL_GUARDED`), and destructors.
"""

from __future__ import annotations

from memguard._frameworks.optional_modules import GatedFunction, Gates, entries, kinds

_FUNCTIONS = (
    ("fail", "cuMemGetInfo, cuIpcGetMemHandle", "mem_get_info mem_get_ipc_handle"),
    (
        "hold",
        "cuMemAlloc, cuMemAllocPitch, cuMemAllocManaged",
        "mem_alloc mem_alloc_pitch managed_empty mem_get_address_range",
    ),
    ("hold", "cuMemHostAlloc, cuMemHostRegister", "pagelocked_empty register_host_memory"),
    ("hold", "cuModuleLoadDataEx, cuModuleLoad", "module_from_buffer module_from_file"),
    (
        "wait",
        "the driver's function of that name",
        "memset_d8 memset_d16 memset_d32 memset_d2d8 memset_d2d16 memset_d2d32 memset_d8_async memset_d16_async"
        " memset_d32_async memset_d2d8_async memset_d2d16_async memset_d2d32_async",
    ),
    ("hold", "cuProfilerStart and the like", "initialize_profiler start_profiler stop_profiler"),
    ("wait", "cuInit", "init"),
    (
        "wait",
        "the driver's function of that name",
        "memcpy_htod memcpy_htod_async memcpy_dtoh memcpy_dtoh_async memcpy_dtod memcpy_dtod_async memcpy_peer"
        " memcpy_peer_async memcpy_dtoa memcpy_atod memcpy_atoa",
    ),
)


def _functions(module: str) -> tuple[GatedFunction, ...]:
    """The entries of `_FUNCTIONS` for `module`: `pycuda.driver` or `pycuda._driver`, which both have all of them."""
    return tuple(
        entry
        for harm, why, names in _FUNCTIONS
        for entry in entries(module, harm, why, names)  # type: ignore[arg-type]
    )


GATES = (
    Gates(
        hook="pycuda.driver",
        waits=(
            *_functions("pycuda.driver"),
            *_functions("pycuda._driver"),
            *entries("pycuda._driver", "crash", "cuCtxSynchronize", "Context.synchronize"),
            *entries(
                "pycuda._driver", "crash", "cuStreamSynchronize, cuStreamQuery", "Stream.synchronize Stream.is_done"
            ),
            *entries(
                "pycuda._driver",
                "crash",
                "cuEventSynchronize, cuEventQuery, cuEventElapsedTime",
                "Event.synchronize Event.query Event.time_since Event.time_till",
            ),
            *entries(
                "pycuda._driver",
                "hold",
                "cuCtxDetach, cuCtxSetLimit, cuCtxEnablePeerAccess, cuDevicePrimaryCtxRetain",
                "Context.detach Context.set_limit Context.enable_peer_access Context.disable_peer_access"
                " Context.set_cache_config Context.set_shared_config Device.retain_primary_context",
            ),
            *entries("pycuda._driver", "wait", "cuCtxCreate", "Device.make_context"),
            *entries(
                "pycuda._driver",
                "hold",
                "cuEventCreate, cuEventRecord, cuStreamCreate, cuIpcGetEventHandle",
                "Event.__init__ Event.record Event.ipc_handle Event.from_ipc_handle Stream.__init__",
            ),
            *entries(
                "pycuda._driver",
                "hold",
                "cuLaunchKernel, cuFuncSetAttribute and the like",
                "Function._launch_kernel Function.get_attribute Function.set_attribute Function.set_cache_config"
                " Function._set_block_shape Function._set_shared_size Function._param_set_size Function._param_seti"
                " Function._param_setf Function._param_setv Function.param_set_texref",
            ),
            *entries(
                "pycuda._driver",
                "wait",
                "cuLaunch, cuLaunchGrid",
                "Function._launch Function._launch_grid Function._launch_grid_async",
            ),
            *entries(
                "pycuda._driver",
                "hold",
                "cuModuleGetFunction and the like, cuLinkComplete",
                "Module.get_function Module.get_global Module.get_texref Module.get_surfref Linker.__init__"
                " Linker.add_data Linker.add_file Linker.link_module",
            ),
            *entries(
                "pycuda._driver",
                "hold",
                "cuMemFree, cuArrayDestroy, cuMemFreeHost",
                "DeviceAllocation.free Array.free Array.__init__ PagelockedHostAllocation.free HostAllocation.free"
                " RegisteredHostMemory.unregister IPCMemoryHandle.close IPCMemoryHandle.__init__"
                " ManagedAllocation.attach HostPointer.get_device_pointer",
            ),
            *entries(
                "pycuda._driver",
                "hold",
                "cuMemAlloc, cuMemFree",
                "DeviceMemoryPool.allocate DeviceMemoryPool.free_held DeviceMemoryPool.stop_holding"
                " PageLockedMemoryPool.allocate PageLockedMemoryPool.free_held PageLockedMemoryPool.stop_holding",
            ),
            *entries(
                "pycuda._driver",
                "wait",
                "cuMemcpy2D, cuMemcpy3D",
                "Memcpy2D.__call__ Memcpy3D.__call__ Memcpy3DPeer.__call__",
            ),
        ),
        kept_alive=(
            *kinds("pycuda._driver", "cuModuleUnload crashes", "Module"),
            *kinds(
                "pycuda._driver",
                "cuMemFree and the like, with the GIL",
                "DeviceAllocation PooledDeviceAllocation DeviceMemoryPool PagelockedHostAllocation HostAllocation"
                " PooledHostAllocation PageLockedMemoryPool RegisteredHostMemory ManagedAllocation IPCMemoryHandle"
                " Array TextureReference",
            ),
            *kinds("pycuda._driver", "cuStreamDestroy, cuEventDestroy, with the GIL", "Stream Event"),
            *kinds("pycuda._driver", "cuCtxDetach, with the GIL", "Context"),
        ),
        imports=("pycuda.autoinit", "pycuda.autoprimaryctx", "pycuda.gl", "pycuda.gl.autoinit"),
    ),
)

"""`numba.cuda`: contexts are made by the first call that needs one."""

from numba.cuda.cudadrv import driver
from numba.cuda.cudadrv.devicearray import DeviceNDArrayBase as Array
from numba.cuda.cudadrv.driver import (
    BaseCUDAMemoryManager,
    HostOnlyCUDAMemoryManager,
    close,
    gpus,
    require,
    set_memory_manager,
)

__all__ = [
    "Array",
    "BaseCUDAMemoryManager",
    "HostOnlyCUDAMemoryManager",
    "close",
    "current_context",
    "default_stream",
    "defer_cleanup",
    "device_array",
    "event",
    "external_stream",
    "gpus",
    "launch",
    "managed_array",
    "per_thread_default_stream",
    "set_memory_manager",
    "stream",
]  # fmt: skip


def current_context():
    return require()


def device_array(nbytes):
    return Array(require().memalloc(nbytes))


def managed_array(nbytes):
    return Array(require().memallocmanaged(nbytes))


def stream():
    return require().create_stream()


def external_stream(ptr):
    return require().create_external_stream(ptr)


def default_stream():
    return driver.Stream(0)


def per_thread_default_stream():
    return driver.Stream(driver.PER_THREAD)


def launch(array, stream=0):
    """A kernel that reads the array. It runs until the test says `driver.gpu.finish` of what this returns."""
    stream = driver._to_core_stream(stream)
    handle = stream.handle if stream else 0
    return driver.gpu.start(handle, array._strided_memory_view_shim, array.nbytes)


def event():
    return require().create_event()


def defer_cleanup():
    return require().defer_cleanup()

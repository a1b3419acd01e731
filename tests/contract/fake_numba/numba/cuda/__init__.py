"""`numba.cuda`: contexts are made by the first call that needs one."""

from numba.cuda.cudadrv.driver import (
    BaseCUDAMemoryManager,
    HostOnlyCUDAMemoryManager,
    close,
    gpus,
    require,
    set_memory_manager,
)

__all__ = [
    "Array", "BaseCUDAMemoryManager", "HostOnlyCUDAMemoryManager", "close", "current_context", "defer_cleanup",
    "device_array", "event", "gpus", "managed_array", "set_memory_manager",
]  # fmt: skip


class Array:
    """An array of bytes on the GPU; it owns its memory as Numba's do."""

    def __init__(self, memory):
        self.gpu_data, self.nbytes = memory, memory.size


def current_context():
    return require()


def device_array(nbytes):
    return Array(require().memalloc(nbytes))


def managed_array(nbytes):
    return Array(require().memallocmanaged(nbytes))


def event():
    return require().create_event()


def defer_cleanup():
    return require().defer_cleanup()

"""`rmm.allocators.cupy`."""

import cupy

from rmm import mr


class DeviceBuffer:
    """What it was given by goes on being what it is given back to."""

    def __init__(self, size):
        self.size, self._ordinal = size, cupy.cuda.runtime.getDevice()
        self._resource = mr.get_per_device_resource(self._ordinal)
        self.ptr = self._resource.allocate(size)

    def __del__(self):
        if hasattr(self, "ptr"):
            self._resource.deallocate(self.ptr, self.size, self._ordinal)


def rmm_cupy_allocator(nbytes):
    buffer = DeviceBuffer(nbytes)
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(buffer.ptr, buffer.size, buffer), 0)

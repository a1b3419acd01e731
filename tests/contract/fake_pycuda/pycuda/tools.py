"""`pycuda.tools`: as in PyCUDA, it imports `pycuda.driver` before it has anything of its own."""

from pycuda import driver as cuda

DeviceMemoryPool = cuda.DeviceMemoryPool


class DebugMemoryPool(DeviceMemoryPool):
    def allocate(self, size):
        return DeviceMemoryPool.allocate(self, size)

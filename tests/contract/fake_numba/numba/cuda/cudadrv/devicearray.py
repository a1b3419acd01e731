"""`numba.cuda.cudadrv.devicearray`: how an array gives its address to kernels, to copies and to others."""

import functools

from numba.cuda.cudadrv import driver


class DeviceNDArrayBase:
    """An array of bytes on the GPU; it owns its memory as Numba's do."""

    def __init__(self, memory, stream=0):
        self.gpu_data, self.nbytes, self.stream = memory, memory.size, stream

    @property
    def device_ctypes_pointer(self):
        return self.gpu_data.device_ctypes_pointer

    @property
    def __cuda_array_interface__(self):
        return {"data": (self.device_ctypes_pointer.value, False), "shape": (self.nbytes,), "version": 3}

    @functools.cached_property
    def _strided_memory_view_shim(self):
        return self.device_ctypes_pointer.value

    def copy_to_host(self, stream=0):
        driver.device_to_host(self, self.nbytes, stream=stream or self.stream)

    def bind(self, stream):
        return DeviceNDArrayBase(self.gpu_data, stream)

    def __getitem__(self, part):
        return DeviceNDArrayBase(self.gpu_data.view(part.start, part.stop))

    def get_ipc_handle(self):
        return driver.device_extents(self.gpu_data), self.gpu_data.handle

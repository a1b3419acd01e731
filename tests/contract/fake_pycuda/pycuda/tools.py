"""`pycuda.tools`: the memory pool. Its bins are those of PyCUDA, measured and checked elsewhere."""

from __future__ import annotations

from memguard.frameworks import allocators
from pycuda import driver


class PooledDeviceAllocation:
    """Keeps its pool alive, the Python object too, as Boost.Python's shared pointers do."""

    def __init__(self, pool, size, number):
        self._pool, self.size, self._number = pool, size, number

    def free(self):
        pool, self._pool = self._pool, None
        pool._blocks.release(self._number, self.size)

    def __del__(self):
        if getattr(self, "_pool", None) is not None:
            self.free()


class _Blocks:
    """What a pool holds."""

    def __init__(self):
        self.free, self.gpu = {}, None
        self.active_blocks = self.managed_bytes = self.active_bytes = 0

    @property
    def held_blocks(self):
        return sum(self.free.values())

    def release(self, number, size):
        if not self.held_blocks and driver._current() is None:
            driver.counters["aborts"] += 1  # the process ends here: it takes the context for its first idle block
        self.free[number] = self.free.get(number, 0) + 1
        self.active_blocks -= 1
        self.active_bytes -= size

    def drop(self, number):
        self.free[number] -= 1
        if not self.free[number]:
            del self.free[number]
        size = allocators.alloc_size(number)
        self.managed_bytes -= size
        self.gpu.give(size)


class DeviceMemoryPool:
    def __init__(self):
        self._blocks = _Blocks()

    held_blocks = property(lambda self: self._blocks.held_blocks)
    active_blocks = property(lambda self: self._blocks.active_blocks)
    managed_bytes = property(lambda self: self._blocks.managed_bytes)
    active_bytes = property(lambda self: self._blocks.active_bytes)

    @staticmethod
    def bin_number(size):
        return allocators.bin_number(size)

    @staticmethod
    def alloc_size(number):
        return allocators.alloc_size(number)

    def allocate(self, size):
        if size < 0:
            raise driver.LogicError("a block of no size")
        blocks, number = self._blocks, allocators.bin_number(size)
        context = driver._required()
        if number in blocks.free:
            blocks.free[number] -= 1
            if not blocks.free[number]:
                del blocks.free[number]
        else:
            blocks.gpu = driver.gpus[context.ordinal]
            while True:
                try:
                    blocks.gpu.take(allocators.alloc_size(number))
                    break
                except driver.MemoryError:
                    if not blocks.free:
                        raise
                    blocks.drop(max(blocks.free))
            blocks.managed_bytes += allocators.alloc_size(number)
        blocks.active_blocks += 1
        blocks.active_bytes += size
        return PooledDeviceAllocation(self, size, number)

    def free_held(self):
        driver.counters["free_held"] += 1
        self.__del__()

    def __del__(self):
        while self._blocks.free:
            self._blocks.drop(max(self._blocks.free))

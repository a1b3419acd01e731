"""The memory pool, in PyCUDA part of `pycuda._driver`. Its bins are those of PyCUDA, measured and checked elsewhere."""

from __future__ import annotations

import contextlib
import threading

import card

from memguard._frameworks.simulated import allocators
from pycuda import driver


class PooledDeviceAllocation:
    """Keeps its pool alive, the Python object too, as Boost.Python's shared pointers do."""

    def __init__(self, pool, size, number, address):
        self._pool, self.size, self._number, self._address = pool, size, number, address

    def __int__(self):
        return self._address

    __index__ = __int__

    def __len__(self):
        return self.size

    def free(self):
        if self._pool is None:
            raise driver.LogicError("pooled_device_allocation::free failed: invalid resource handle")
        self._give()

    def _give(self):
        pool, self._pool = self._pool, None
        pool._blocks.release(self._number, self.size, self._address)

    def __del__(self):
        if getattr(self, "_pool", None) is not None:
            self._give()


class _Blocks:
    """What a pool holds."""

    def __init__(self):
        self.context = None  # the object that was current when the pool was made
        self.lock = threading.RLock()  # a real pool is not Python: one call of it is one step
        self.holds = True
        self.free = {}  # by bin: addresses, of which the last goes first
        self.active_blocks = self.managed_bytes = self.active_bytes = 0

    @property
    def held_blocks(self):
        return sum(map(len, list(self.free.values())))  # at once, as PyCUDA's own: it has the GIL

    def release(self, number, size, address):
        if not self.held_blocks and driver._current() is None:
            driver.counters["aborts"] += 1  # the process ends here: it takes the context for its first idle block
        with self.lock:
            self.active_blocks -= 1
            self.active_bytes -= size
            if self.holds:
                self.free.setdefault(number, []).append(address)
            else:
                self.to_driver(number, address)

    def pop(self, number):
        address = self.free[number].pop()
        if not self.free[number]:
            del self.free[number]
        return address

    def drop(self):
        """The driver gets one block back, of the largest."""
        number = max(self.free)
        self.to_driver(number, self.pop(number))

    def to_driver(self, number, address):
        self.managed_bytes -= allocators.alloc_size(number)
        if self.reachable():
            with contextlib.suppress(KeyError):  # its context has taken it along
                card.give(address)
        else:
            driver.counters["leaked"] += 1  # PyCUDA says so on standard error

    def reachable(self):
        """PyCUDA goes by the object, and by the thread that made it: not by the handle."""
        context = self.context
        return context is None or driver._current() is context or context.thread == threading.get_ident()


class DeviceMemoryPool:
    def __init__(self):
        self._blocks = _Blocks()
        self._blocks.context = driver._current() if driver._initialised else None

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
        driver._required()
        with self._blocks.lock:
            return self._allocate(size, self._blocks, allocators.bin_number(size))

    def _allocate(self, size, blocks, number):
        if number in blocks.free:
            address = blocks.pop(number)
        else:
            if not blocks.reachable():
                raise driver.LogicError("cannot activate out-of-thread context")
            while True:
                try:
                    address = driver._take(allocators.alloc_size(number))
                    break
                except driver.MemoryError:
                    if not blocks.free:
                        raise
                    blocks.drop()
            blocks.managed_bytes += allocators.alloc_size(number)
        blocks.active_blocks += 1
        blocks.active_bytes += size
        return PooledDeviceAllocation(self, size, number, address)

    def free_held(self):
        driver.counters["free_held"] += 1
        self.__del__()

    def stop_holding(self):
        self._blocks.holds = False
        self.__del__()

    def __del__(self):
        with self._blocks.lock:
            while self._blocks.free:
                self._blocks.drop()

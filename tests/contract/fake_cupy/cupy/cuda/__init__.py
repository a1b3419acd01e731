"""`cupy.cuda`: what of it memguard and the tests use."""

import contextlib

import fake_card

from cupy.cuda import memory, runtime
from cupy.cuda.memory import (
    MemoryAsyncPool,
    MemoryPointer,
    MemoryPool,
    PythonFunctionAllocator,
    UnownedMemory,
    alloc,
    get_allocator,
    malloc_managed,
    set_allocator,
)

__all__ = [
    "Device",
    "MemoryAsyncPool",
    "MemoryPointer",
    "MemoryPool",
    "PythonFunctionAllocator",
    "Stream",
    "UnownedMemory",
    "alloc",
    "get_allocator",
    "get_current_stream",
    "malloc_managed",
    "memory",
    "runtime",
    "set_allocator",
    "using_allocator",
]


@contextlib.contextmanager
def using_allocator(allocator=None):
    """For this thread only."""
    thread = memory._thread
    before, thread.allocator = getattr(thread, "allocator", None), allocator or memory._malloc
    try:
        yield
    finally:
        thread.allocator = before


class Device:
    """As a context manager: since CUDA 12 it makes a context on the device it names, and on the former one."""

    def __init__(self, ordinal):
        self.id = ordinal

    def use(self):
        fake_card.use(self.id)

    def __enter__(self):
        self._before = fake_card.here()
        self.use()

    def __exit__(self, *_):
        fake_card.use(self._before)


class Stream:
    """As a context manager: the current one of this thread. By default the null stream."""

    def __init__(self, ptr=0):
        self.ptr = ptr

    def __enter__(self):
        self._before, memory._thread.stream = getattr(memory._thread, "stream", 0), self.ptr

    def __exit__(self, *_):
        memory._thread.stream = self._before

    def synchronize(self):
        fake_card.runtime()
        fake_card.synchronized += 1

    def is_capturing(self):
        fake_card.runtime()
        if fake_card.capturing == "elsewhere":  # the null stream beside a capture
            raise runtime.CUDARuntimeError(runtime._CAPTURE_IMPLICIT)
        if fake_card.capturing == "broken":
            raise runtime.CUDARuntimeError(runtime._CONTEXT_IS_DESTROYED)
        return bool(fake_card.capturing)


def get_current_stream(device_id=-1):
    return Stream(getattr(memory._thread, "stream", 0))

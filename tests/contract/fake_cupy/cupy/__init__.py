"""A small model of CuPy in plain Python, for tests without a GPU: pools, limits and allocators."""

from cupy import cuda
from cupy.cuda import memory

__version__ = "14.2.0"

_pool = memory.MemoryPool()
cuda.set_allocator(_pool.malloc)


def get_default_memory_pool():
    return _pool

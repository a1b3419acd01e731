"""`cupy.cuda.memory`: one pool per device, which caches, splits and merges, and looks once more at its limit."""

import gc
import itertools
import os
import sys
import threading
import types
import weakref

import card
import fake_card

from cupy.cuda import runtime

_UNIT = 512
_addresses = itertools.count(1 << 50, _UNIT)
_thread = threading.local()


class OutOfMemoryError(MemoryError):
    def __init__(self, size, total, limit=0):
        limited = f", limit set to: {limit:,} bytes" if limit else ""
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes{limited}).")


class Memory:
    """Straight from the driver."""

    def __init__(self, size):
        self.size, self.device_id = size, fake_card.here()
        self.ptr = runtime.malloc(size) if size else 0

    def __del__(self):
        if getattr(self, "ptr", 0):
            card.give(self.ptr)


class MemoryAsync:
    """From the driver's own pool of the device, which everybody shares. Each address is used once."""

    ptr = 0

    def __init__(self, size, stream=None):
        self._gpu = fake_card.gpu_here()
        try:
            self._gpu.malloc_async(size)
        except card.OutOfMemory:
            raise runtime.CUDARuntimeError(runtime._OUT_OF_MEMORY) from None
        self.size = size
        if size:
            self.ptr = next(_addresses)

    def __del__(self):
        if hasattr(self, "size"):
            self._gpu.free_async(self.size)


class UnownedMemory:
    """Somebody else's memory, kept alive by its owner."""

    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem, offset):
        self.mem, self.ptr = mem, mem.ptr + offset


def _malloc(module, size):
    return MemoryPointer(Memory(size), 0)


def malloc_managed(module, size):
    return MemoryPointer(Memory(size), 0)


# Built-in functions, as CuPy's are, have their module as `__self__`.
_malloc = _allocator = types.MethodType(_malloc, sys.modules[__name__])
malloc_managed = types.MethodType(malloc_managed, sys.modules[__name__])


def set_allocator(allocator=None):
    global _allocator
    if getattr(_thread, "allocator", None) is not None:
        raise ValueError("Can't change the global allocator inside `using_allocator` context manager")
    _allocator = _malloc if allocator is None else allocator


def _get_thread_local_allocator():
    return getattr(_thread, "allocator", None)


def get_allocator():
    return getattr(_thread, "allocator", None) or _allocator


def alloc(size):
    return get_allocator()(size)


class _Chunk:
    """A part of a block from the driver, between its neighbours."""

    def __init__(self, mem, offset, size, arena):
        self.mem, self.offset, self.size, self.arena = mem, offset, size, arena
        self.prev, self.next, self.idle = None, None, False

    def split(self, size):
        rest = _Chunk(self.mem, self.offset + size, self.size - size, self.arena)
        rest.prev, rest.next, self.next, self.size = self, self.next, rest, size
        if rest.next is not None:
            rest.next.prev = rest
        return rest

    def swallow(self):
        behind = self.next
        self.size, self.next = self.size + behind.size, behind.next
        if self.next is not None:
            self.next.prev = self


class _Arena:
    """What idles of one stream."""

    def __init__(self):
        self.idle = []


class PooledMemory:
    def __init__(self, pool, chunk):
        self.pool = self._owner = weakref.ref(pool)
        self._chunk, self.size = chunk, chunk.size
        self.ptr, self.device_id = chunk.mem.ptr + chunk.offset, chunk.mem.mem.device_id

    def __del__(self):
        pool = self._owner()
        if pool is not None:
            pool.free(self._chunk)


class _OfOneDevice:
    __slots__ = ("__dict__", "__weakref__", "_arenas")  # Python's collector is told of its arenas, as CuPy tells it

    def __init__(self, allocator):
        self._allocate, self._used, self._total = allocator, 0, 0
        self._arenas, self._kept = {}, []  # by stream, weakly: there it is the arena's own blocks that keep it
        text = os.environ.get("CUPY_GPU_MEMORY_LIMIT")
        if text is None:
            self.set_limit()
        elif text.endswith("%"):
            self.set_limit(fraction=float(text[:-1]) / 100)
        else:
            self.set_limit(size=int(text))

    @property
    def idle(self):
        """Of all streams."""
        return [chunk for arena in self._kept for chunk in arena.idle]

    def _arena(self, stream):
        if stream not in self._arenas:
            self._kept.append(_Arena())
            self._arenas[stream] = weakref.ref(self._kept[-1])
        return self._arenas[stream]()

    def _debug_arena_get_index(self, stream):
        return sorted(((chunk.size, chunk) for chunk in self._arena(stream).idle), key=lambda entry: entry[0])

    def malloc(self, size):
        size = -(-size // _UNIT) * _UNIT
        if not size:
            return MemoryPointer(Memory(0), 0)
        arena = self._arena(getattr(_thread, "stream", 0))
        fitting = [chunk for chunk in arena.idle if chunk.size >= size]
        if fitting:
            chunk = min(fitting, key=lambda found: found.size)
            arena.idle.remove(chunk)
            chunk.idle = False
            if chunk.size > size:
                self._keep(chunk.split(size))
        else:
            chunk = _Chunk(self._from_driver(size), 0, size, arena)
        self._used += chunk.size
        return MemoryPointer(PooledMemory(self, chunk), 0)

    def _from_driver(self, size):
        for attempt in range(3):
            if attempt == 2:
                gc.collect()
            if attempt:
                self.free_all_blocks()
            if self._limit and self._total + size > self._limit:
                continue
            try:
                block = self._allocate(size)
            except runtime.CUDARuntimeError as error:
                if error.status != runtime._OUT_OF_MEMORY:
                    raise
                continue
            self._total += size
            block.size = size
            return block
        raise OutOfMemoryError(size, self._total, self._limit)

    def free(self, chunk):
        self._used -= chunk.size
        idle = chunk.arena.idle
        if chunk.next is not None and chunk.next.idle:
            idle.remove(chunk.next)
            chunk.swallow()
        if chunk.prev is not None and chunk.prev.idle:
            chunk = chunk.prev
            idle.remove(chunk)
            chunk.swallow()
        self._keep(chunk)

    def _keep(self, chunk):
        chunk.idle = True
        chunk.arena.idle.append(chunk)

    def free_all_blocks(self, stream=None):
        if stream is not None and stream.ptr not in self._arenas:
            return
        for arena in self._kept if stream is None else [self._arenas[stream.ptr]()]:
            arena.idle, whole = (
                [chunk for chunk in arena.idle if chunk.prev or chunk.next],
                [chunk for chunk in arena.idle if not (chunk.prev or chunk.next)],
            )
            self._total -= sum(chunk.size for chunk in whole)

    def n_free_blocks(self):
        return len(self.idle)

    def used_bytes(self):
        return self._used

    def free_bytes(self):
        return sum(chunk.size for chunk in self.idle)

    def total_bytes(self):
        return self._total

    def get_limit(self):
        return self._limit

    def set_limit(self, size=None, fraction=None):
        if size is None:
            if fraction is not None and not 0 <= fraction <= 1:
                raise ValueError(f"memory limit fraction out of range: {fraction}")
            size = 0 if fraction is None else int(fraction * runtime.memGetInfo()[1])
        if size < 0:
            raise ValueError(f"memory limit size out of range: {size}")
        self._limit = size


class MemoryPool:
    __slots__ = ("__dict__", "_pools")

    def __init__(self, allocator=None):
        self._allocator, self._pools, self._lock = allocator or _malloc, None, threading.Lock()

    def _here(self):
        ordinal = runtime.getDevice()
        with self._lock:
            if self._pools is None:
                self._pools = tuple(_OfOneDevice(self._allocator) for _ in fake_card.gpus)
            return self._pools[ordinal]

    def malloc(self, size):
        return self._here().malloc(size)

    def free_all_blocks(self, stream=None):
        self._here().free_all_blocks(stream)

    def n_free_blocks(self):
        return self._here().n_free_blocks()

    def used_bytes(self):
        return self._here().used_bytes()

    def free_bytes(self):
        return self._here().free_bytes()

    def total_bytes(self):
        return self._here().total_bytes()

    def get_limit(self):
        return self._here().get_limit()

    def set_limit(self, size=None, fraction=None):
        self._here().set_limit(size, fraction)


class MemoryAsyncPool:
    """The limit of this one is the release threshold of the driver's pool."""

    @property
    def _pools(self):
        """The driver's handles, by ordinal."""
        return list(range(len(fake_card.gpus)))

    def malloc(self, size):
        return MemoryPointer(MemoryAsync(-(-size // _UNIT) * _UNIT), 0)

    def free_all_blocks(self, stream=None):
        fake_card.gpu_here().trim_pool()

    def used_bytes(self):
        return fake_card.gpu_here().pool_used

    def total_bytes(self):
        return fake_card.gpu_here().pool_held

    def get_limit(self):
        return fake_card.gpu_here().threshold

    def set_limit(self, size=None, fraction=None):
        fake_card.gpu_here().threshold = size or 0


class PythonFunctionAllocator:
    def __init__(self, malloc_func, free_func):
        self._malloc, self._free = malloc_func, free_func

    def malloc(self, size):
        ordinal = runtime.getDevice()
        return MemoryPointer(UnownedMemory(self._malloc(size, ordinal), size, self, ordinal), 0)

"""`numba.cuda.cudadrv.driver` with the names and rules of numba-cuda, over the model of the driver's memory.

`cards`, `current` and `gpu` are for tests to look at and to set; Numba has no such thing.
"""

import contextlib
import ctypes
import os
import threading
import types
import weakref
from collections import deque, namedtuple
from enum import IntEnum

import card
from card import cards

config = types.SimpleNamespace(
    CUDA_MEMORY_MANAGER=os.environ.get("NUMBA_CUDA_MEMORY_MANAGER", "default"),
    CUDA_DEALLOCS_COUNT=10,
    CUDA_DEALLOCS_RATIO=0.2,
    CUDA_PER_THREAD_DEFAULT_STREAM=int(os.environ.get("NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM", "0")),
)
LEGACY, PER_THREAD = 1, 2


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201


binding = types.SimpleNamespace(CUresult=CUresult)
MemoryInfo = namedtuple("MemoryInfo", "free,total")


class CudaDriverError(Exception):
    pass


class CudaAPIError(CudaDriverError):
    def __init__(self, code, msg):
        self.code, self.msg = code, msg
        super().__init__(code, msg)


current = threading.local()


def _stack():
    if not hasattr(current, "ordinals"):
        current.ordinals = []
    return current.ordinals


class Work:
    """A kernel or a copy that reads or writes some bytes, until the test says that it is over or somebody waits."""

    def __init__(self, stream, address, size):
        self.stream, self.start, self.end = stream, address, address + size


class Gpu:
    """Both GPUs' work that is not over, and their streams: those that the legacy default stream waits for."""

    def __init__(self):
        self.work = []
        self.blocking = {0, LEGACY}
        self.captures = set()
        self.marks = 0
        self._handles = 0x100

    def stream(self, blocking):
        """The handle of a new one, anybody's."""
        self._handles += 0x10
        if blocking:
            self.blocking.add(self._handles)
        return self._handles

    def start(self, stream, address, size):
        self.work.append(found := Work(stream, address, size))
        return found

    def finish(self, work):
        with contextlib.suppress(ValueError):
            self.work.remove(work)

    def wait(self):
        self.work.clear()

    def using(self, address, size):
        """What was given to the GPU and still reads or writes some of these bytes."""
        return [work for work in self.work if work.start < address + size and address < work.end]

    def awaits_capture(self, context):
        return bool(self.captures & self.blocking)


gpu = Gpu()


class Mark:
    """In the place of `memguard._devices.streams.Mark`: on the legacy default stream, or another one."""

    def __init__(self, ordinal, stream, context):
        assert context == handle_of(ordinal) and (stream == LEGACY or stream in gpu.blocking)
        if stream == LEGACY:
            assert not gpu.awaits_capture(context), "this ended somebody's capture of a CUDA graph"
            gpu.marks += 1
        self.covered = [work for work in gpu.work if work.stream in (gpu.blocking if stream == LEGACY else (stream,))]

    def passed(self):
        return not any(work in gpu.work for work in self.covered)

    def wait(self):
        for work in self.covered:
            gpu.finish(work)

    def close(self):
        self.covered = []


def handle_of(ordinal):
    return 0x7F0000 + ordinal


class Driver:
    """The calls that the model needs. Taking wants a current context; giving back does not (measured)."""

    def __init__(self):
        self.devices = {}
        self.events = set()

    def _here(self, call):
        if not _stack():
            raise CudaAPIError(CUresult.CUDA_ERROR_INVALID_CONTEXT, f"Call to {call} results in INVALID_CONTEXT")
        return cards[_stack()[-1]]

    def get_device(self, number):
        if number not in self.devices:
            self.devices[number] = Device(number)
        return self.devices[number]

    def _take(self, call, size):
        try:
            return self._here(call).take(size)
        except card.OutOfMemory:
            raise CudaAPIError(CUresult.CUDA_ERROR_OUT_OF_MEMORY, f"Call to {call} results in OUT_OF_MEMORY") from None

    def cuMemAlloc(self, size):  # noqa: N802
        return self._take("cuMemAlloc", size)

    def cuMemAllocManaged(self, size):  # noqa: N802
        return self._take("cuMemAllocManaged", size)

    def cuMemFree(self, address):  # noqa: N802
        gpu.wait()
        card.give(int(address))

    def cuStreamCreate(self):  # noqa: N802
        return gpu.stream(blocking=True)

    def cuStreamDestroy(self, handle):  # noqa: N802
        gpu.blocking.discard(handle)  # its work goes on, and the legacy stream may no longer wait for it

    def cuMemGetInfo(self):  # noqa: N802
        here = self._here("cuMemGetInfo")
        return here.total - here.taken, here.total

    def cuEventCreate(self):  # noqa: N802
        self.events.add(handle := len(self.events) + 1)
        return handle

    def cuEventDestroy(self, handle):  # noqa: N802
        self.events.discard(handle)


driver = Driver()


class Device:
    uuids: tuple[str, ...] = ()  # set by the test: those of its host

    def __init__(self, number):
        self.id, self.uuid, self.primary_context = number, self.uuids[number], None

    def get_primary_context(self):
        if self.primary_context is None:
            cards[self.id].contexts += 1
            self.primary_context = Context(weakref.proxy(self))
        return self.primary_context

    def reset(self):
        if self.primary_context is not None:
            self.primary_context.memory_manager.reset()
            self.primary_context.deallocations.clear()
            self.primary_context = None
        cards[self.id].clear()


class BaseCUDAMemoryManager:
    interface_version = 1

    def __init__(self, *args, **kwargs):
        if "context" not in kwargs:
            raise RuntimeError("Memory manager requires a context")
        self.context = kwargs.pop("context")

    def initialize(self):
        pass

    def reset(self):
        pass


class HostOnlyCUDAMemoryManager(BaseCUDAMemoryManager):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.allocations = {}
        self.deallocations = _PendingDeallocs()

    def _attempt_allocation(self, allocator):
        try:
            return allocator()
        except CudaAPIError as e:
            if e.code != binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise
            self.deallocations.clear()
            return allocator()

    def memallocmanaged(self, size):
        return self._owned(self._attempt_allocation(lambda: driver.cuMemAllocManaged(size)), size)

    def _owned(self, address, size):
        mem = AutoFreePointer(address, size, _alloc_finalizer(self, address, size))
        self.allocations[address] = mem
        return mem.own()

    def reset(self):
        self.allocations.clear()
        self.deallocations.clear()

    @contextlib.contextmanager
    def defer_cleanup(self):
        with self.deallocations.disable():
            yield


class NumbaCUDAMemoryManager(HostOnlyCUDAMemoryManager):
    def initialize(self):
        if self.deallocations.memory_capacity == 0:
            self.deallocations.memory_capacity = MemoryInfo(*driver.cuMemGetInfo()).total

    def memalloc(self, size):
        return self._owned(self._attempt_allocation(lambda: driver.cuMemAlloc(size)), size)


def _alloc_finalizer(manager, address, size):
    allocations, deallocations = manager.allocations, manager.deallocations

    def core():
        allocations.pop(address, None)
        deallocations.add_item(driver.cuMemFree, address, size)

    return core


_memory_manager = None


def _ensure_memory_manager():
    global _memory_manager
    if _memory_manager is None:
        _memory_manager = NumbaCUDAMemoryManager


def set_memory_manager(mm_plugin):
    global _memory_manager
    dummy = mm_plugin(context=None)
    if dummy.interface_version != 1:
        raise RuntimeError("EMM Plugin interface has another version")
    _memory_manager = mm_plugin


class _PendingDeallocs:
    def __init__(self, capacity=0):
        self._cons = deque()
        self._disable_count = 0
        self._size = 0
        self.memory_capacity = capacity

    def add_item(self, dtor, handle, size=0):
        assert dtor.__name__, "Numba's log wants it"
        self._cons.append((dtor, handle, size))
        self._size += int(size)
        if (
            len(self._cons) > config.CUDA_DEALLOCS_COUNT
            or self._size > self.memory_capacity * config.CUDA_DEALLOCS_RATIO
        ):
            self.clear()

    def clear(self):
        if not self._disable_count:
            while self._cons:
                dtor, handle, _ = self._cons.popleft()
                dtor(handle)
            self._size = 0

    @contextlib.contextmanager
    def disable(self):
        self._disable_count += 1
        try:
            yield
        finally:
            self._disable_count -= 1

    def __len__(self):
        return len(self._cons)


class Context:
    def __init__(self, device):
        self.device, self.handle = device, handle_of(device.id)
        self.deallocations = _PendingDeallocs(1 << 30)  # of events and modules
        _ensure_memory_manager()
        self.memory_manager = _memory_manager(context=self)

    def push(self):
        _stack().append(self.device.id)
        self.memory_manager.initialize()

    def memalloc(self, size):
        return self.memory_manager.memalloc(size)

    def memallocmanaged(self, size):
        return self.memory_manager.memallocmanaged(size)

    def create_event(self):
        handle = driver.cuEventCreate()
        event = Event(handle)
        weakref.finalize(event, self.deallocations.add_item, driver.cuEventDestroy, handle).atexit = False
        return event

    def create_stream(self):
        handle = driver.cuStreamCreate()
        return Stream(handle, finalizer=lambda: self.deallocations.add_item(driver.cuStreamDestroy, handle))

    def create_external_stream(self, ptr):
        return Stream(ptr, external=True)

    @contextlib.contextmanager
    def defer_cleanup(self):
        with self.memory_manager.defer_cleanup(), self.deallocations.disable():
            yield


class Stream:
    def __init__(self, handle, finalizer=None, external=False):
        self.handle, self.external = handle, external
        if finalizer is not None:
            weakref.finalize(self, finalizer).atexit = False


def _to_core_stream(stream):
    """A launch's stream: Numba's own, one of cuda.core, or 0."""
    return stream or 0


def _stream_handle(stream):
    """A copy's stream."""
    return 0 if stream == 0 else stream.handle


def device_ctypes_pointer(obj):
    return obj.device_ctypes_pointer


def device_pointer(obj):
    return device_ctypes_pointer(obj).value


def device_to_host(src, size, stream=0):
    gpu.start(_stream_handle(stream), device_pointer(src), size)


def device_extents(devmem):
    return device_ctypes_pointer(devmem).value


class Event:
    def __init__(self, handle):
        self.handle = handle


class MemoryPointer:
    def __init__(self, address, size, owner=None):
        self.device_pointer = self.handle = address
        self.size, self._owner, self.refct = size, owner, 1

    @property
    def owner(self):
        return self if self._owner is None else self._owner

    @property
    def device_pointer_value(self):
        return int(getattr(self.device_pointer, "value", self.device_pointer)) or None

    @property
    def device_ctypes_pointer(self):
        return ctypes.c_size_t(int(getattr(self.device_pointer, "value", self.device_pointer)))

    def memset(self, byte, count=None, stream=0):
        gpu.start(stream.handle if stream else 0, self.device_pointer, self.size if count is None else count)

    def view(self, start, stop=None):
        size = (self.size if stop is None else stop) - start
        part = MemoryPointer(self.device_pointer_value + start, size, owner=self.owner)
        return OwnedPointer(weakref.proxy(self.owner), part)


class AutoFreePointer(MemoryPointer):
    """Gives its memory back when nobody owns it any more."""

    def __init__(self, address, size, finalizer):
        super().__init__(address, size)
        self.refct = 0
        self._finalizer = weakref.finalize(self, finalizer)
        self._finalizer.atexit = False

    def own(self):
        return OwnedPointer(weakref.proxy(self))

    def free(self):
        self._finalizer()


class OwnedPointer:
    def __init__(self, mem, view=None):
        self._mem = mem
        self._view = mem if view is None else view
        self._mem.refct += 1
        self.device_ctypes_pointer = self._view.device_ctypes_pointer

        def deref():
            with contextlib.suppress(ReferenceError):
                mem.refct -= 1
                if mem.refct == 0:
                    mem.free()

        weakref.finalize(self, deref).atexit = False

    def __getattr__(self, name):
        return getattr(self._view, name)


class _Gpu:
    def __init__(self, number):
        self.number = number

    def __enter__(self):
        driver.get_device(self.number).get_primary_context().push()

    def __exit__(self, *error):
        _stack().pop()


gpus = [_Gpu(0), _Gpu(1)]


def require():
    """The context that is current on this thread, or the first GPU's, made and pushed."""
    if not _stack():
        gpus[0].__enter__()
    return driver.get_device(_stack()[-1]).get_primary_context()


def close():
    """Every context is destroyed, and with it everybody's memory."""
    _stack().clear()
    for device in driver.devices.values():
        device.reset()


@contextlib.contextmanager
def pushed(ordinal):
    """In the place of `memguard._devices.contexts.pushed`: the primary context for a block, where it exists."""
    if not cards[ordinal].contexts:
        yield False
        return
    _stack().append(ordinal)
    try:
        yield True
    finally:
        _stack().pop()


def current_handle():
    """In the place of `memguard._devices.contexts.current_handle`."""
    return handle_of(_stack()[-1]) if _stack() else None


def blocking(handle):
    """In the place of `memguard._devices.streams.blocking`."""
    return handle in gpu.blocking


def primary(ordinal):
    """In the place of `memguard._devices.contexts.primary`."""
    return handle_of(ordinal)


def quick_idle(ordinal, stream, other):
    """In the place of `memguard._devices.streams.quick_idle`: of the legacy stream, without those that it waits for."""
    assert stream == LEGACY and other is None
    if gpu.awaits_capture(handle_of(ordinal)):
        from memguard._devices.streams import Captured

        raise Captured("asked of the legacy stream")
    return not any(work.stream in (0, LEGACY) for work in gpu.work)

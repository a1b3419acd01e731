"""`numba.cuda.cudadrv.driver` with the names and rules of numba-cuda, over the model of the driver's memory.

`cards` and `current` are for tests to look at and to set; Numba has no such thing.
"""

import contextlib
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
)


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
        card.give(int(address))

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
        self.device = device
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

    @contextlib.contextmanager
    def defer_cleanup(self):
        with self.memory_manager.defer_cleanup(), self.deallocations.disable():
            yield


class Event:
    def __init__(self, handle):
        self.handle = handle


class AutoFreePointer:
    """Gives its memory back when nobody owns it any more."""

    def __init__(self, address, size, finalizer):
        self.address, self.size, self.refct = address, size, 0
        self._finalizer = weakref.finalize(self, finalizer)
        self._finalizer.atexit = False

    @property
    def device_pointer_value(self):
        return self.address or None

    def own(self):
        return OwnedPointer(weakref.proxy(self))

    def free(self):
        self._finalizer()


class OwnedPointer:
    def __init__(self, mem):
        self._mem = mem
        self._mem.refct += 1

        def deref():
            with contextlib.suppress(ReferenceError):
                mem.refct -= 1
                if mem.refct == 0:
                    mem.free()

        weakref.finalize(self, deref).atexit = False

    def __getattr__(self, name):
        return getattr(self._mem, name)


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

"""`pycuda.driver`: contexts on a stack for each thread, over the model of the driver's memory.

`gpus` and `counters` are for tests to look at and to set; PyCUDA has no such thing.
"""

from __future__ import annotations

import threading
from itertools import count

import card
from card import CONTEXT
from card import cards as gpus


class Error(Exception):
    pass


class LogicError(Error):
    pass


class MemoryError(Error):  # noqa: A001 (PyCUDA calls it so)
    pass


counters = {"aborts": 0, "free_held": 0}
_initialised = False
_stack = threading.local()
_handles = count(1)


def init():
    global _initialised
    _initialised = True


def _contexts():
    if not hasattr(_stack, "contexts"):
        _stack.contexts = []
    return _stack.contexts


def _current():
    if not _initialised:
        raise LogicError("cuCtxGetCurrent failed: initialization error")
    stack = _contexts()
    return stack[-1] if stack else None


def _required():
    context = _current()
    if context is None:
        raise LogicError("no currently active context?")
    return context


class Context:
    def __init__(self, ordinal, primary):
        self.ordinal, self.primary, self.handle = ordinal, primary, next(_handles)
        gpus[ordinal].contexts += 1
        gpus[ordinal].aside += CONTEXT  # which is never refused here

    @staticmethod
    def get_current():
        return _current()

    @staticmethod
    def get_device():
        return Device(_required().ordinal)

    @staticmethod
    def pop():
        _contexts().pop()

    def push(self):
        _contexts().append(self)


_primary: dict[int, Context] = {}


class Device:
    def __init__(self, ordinal):
        if not _initialised:
            raise LogicError("cuDeviceGet failed: initialization error")
        self.ordinal = ordinal

    @staticmethod
    def count():
        return len(gpus)

    def __eq__(self, other):
        return isinstance(other, Device) and self.ordinal == other.ordinal

    def __hash__(self):
        return hash(self.ordinal)

    def make_context(self, flags=0):
        context = Context(self.ordinal, primary=False)
        context.push()
        return context

    def retain_primary_context(self):
        if self.ordinal not in _primary:
            _primary[self.ordinal] = Context(self.ordinal, primary=True)
        return _primary[self.ordinal]


def _take(size):
    try:
        return gpus[_required().ordinal].take(size)
    except card.OutOfMemory:
        raise MemoryError("cuMemAlloc failed: out of memory") from None


class DeviceAllocation:
    """Gives itself back when it dies, once."""

    _live = False

    def __init__(self, size):
        self._address, self._live = _take(size), True

    def __int__(self):
        return self._address

    def free(self):
        if not self._live:
            raise LogicError("device_allocation::free failed: invalid resource handle")
        self._live = False
        card.give(self._address)

    def __del__(self):
        if self._live:
            self.free()


def mem_alloc(size):
    if size <= 0:
        raise LogicError("cuMemAlloc failed: invalid argument")
    return DeviceAllocation(size)


def mem_alloc_pitch(width, height, access_size):
    pitch = -(-width // 512) * 512
    return DeviceAllocation(pitch * height), pitch

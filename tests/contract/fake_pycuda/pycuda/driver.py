"""`pycuda.driver`: contexts on a stack for each thread, over the model of the driver's memory.

`gpus` and `counters` are for tests to look at and to set; PyCUDA has no such thing.
"""

from __future__ import annotations

import atexit
import os
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


counters = {"aborts": 0, "free_held": 0, "leaked": 0, "pushes": 0, "pops": 0}
ENDS = "FAKE_PYCUDA_ENDS" in os.environ
"""For a program of its own: what happens at exit happens here too."""
_initialised = False
_stacks: dict[int, list[Context]] = {}
"""By thread: those that are not empty. A thread that ends with one ends the process."""
_handles = count(1)


def _ended():
    if _stacks:
        os.write(2, b"PyCUDA ERROR: The context stack was not empty upon module cleanup.\n")
        os.abort()


if ENDS:
    atexit.register(_ended)  # the first to be registered: the last to run


def init():
    global _initialised
    _initialised = True


def _current():
    if not _initialised:
        raise LogicError("cuCtxGetCurrent failed: initialization error")
    stack = _stacks.get(threading.get_ident())
    return stack[-1] if stack else None


def _required():
    context = _current()
    if context is None:
        raise LogicError("no currently active context?")
    return context


class Context:
    """One object of a context: of the primary one there are many, and they have its handle."""

    def __init__(self, ordinal, primary, handle=None):
        self.ordinal, self.primary, self.handle = ordinal, primary, handle or next(_handles)
        self.thread = threading.get_ident()
        if handle is None:
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
        stack = _stacks.get(threading.get_ident())
        if not stack:
            raise LogicError("context::pop failed: invalid device context - cannot pop non-current context")
        counters["pops"] += 1
        stack.pop()
        if not stack:
            del _stacks[threading.get_ident()]

    def push(self):
        counters["pushes"] += 1
        _stacks.setdefault(threading.get_ident(), []).append(self)

    def detach(self):
        """Its memory is gone with it. The context is the current one, as it is in tests."""
        assert not self.primary and _current() is self
        self.pop()
        gpus[self.ordinal].contexts -= 1
        gpus[self.ordinal].aside -= CONTEXT


_primary: dict[int, dict[int, Context]] = {}
"""By GPU and thread."""


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
        known = _primary.setdefault(self.ordinal, {})
        if threading.get_ident() not in known:
            handle = next((context.handle for context in known.values()), None)
            known[threading.get_ident()] = Context(self.ordinal, primary=True, handle=handle)
        return known[threading.get_ident()]


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


from pycuda._pools import DeviceMemoryPool, PooledDeviceAllocation  # noqa: E402, F401 (it needs the names above)

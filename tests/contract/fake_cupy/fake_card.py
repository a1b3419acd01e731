"""Two GPUs and their driver, for the models of CuPy and RMM: pages, slabs, primary contexts, a current one per thread.

`stand_in` puts it where memguard asks libcuda, at `devices.contexts`, and nowhere else.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
from itertools import count

MIB = 1 << 20
PAGE = 2 * MIB
CONTEXT = 518 * MIB
STEP = 32 * MIB
"""In which the driver's own pools grow."""


class OutOfMemory(Exception):
    pass


class Gpu:
    """Above 1 MiB whole pages. Up to there a piece of a slab, which is one page and goes back with its last piece."""

    def __init__(self, number):
        self.uuid = bytes.fromhex(f"00000000000040008000{number:012x}")
        self.total, self.context, self.pages, self.blocks = 16 << 30, False, 0, {}
        self.slabs = []  # each the gaps in it, in order
        self.pool_held = self.pool_used = self.threshold = 0

    @property
    def taken(self):
        """What it has handed out, in whole pages."""
        return (self.pages + len(self.slabs)) * PAGE + self.pool_held

    def malloc(self, size):
        pointer = next(_numbers)
        if size > MIB:
            pages = -(-size // PAGE)
            self._room(pages * PAGE)
            self.pages += pages
            self.blocks[pointer] = None, 0, pages
        else:
            self.blocks[pointer] = self._piece(-(-size // 512) * 512)
        return pointer

    def _piece(self, size):
        for gaps in self.slabs:
            for place, (start, end) in enumerate(gaps):
                if end - start >= size:
                    gaps[place : place + 1] = [(start + size, end)] if end - start > size else []
                    return gaps, start, size
        self._room(PAGE)
        self.slabs.append([(size, PAGE)])
        return self.slabs[-1], 0, size

    def free(self, pointer):
        gaps, start, size = self.blocks.pop(pointer)
        if gaps is None:
            self.pages -= size
            return
        place = bisect.bisect(gaps, (start, 0))
        end = start + size
        if place < len(gaps) and gaps[place][0] == end:
            end = gaps.pop(place)[1]
        if place and gaps[place - 1][1] == start:
            start = gaps.pop(place - 1)[0]
            place -= 1
        gaps.insert(place, (start, end))
        if gaps == [(0, PAGE)]:
            self.slabs = [slab for slab in self.slabs if slab is not gaps]

    def malloc_async(self, size):
        grown = max(-(-(self.pool_used + size) // STEP) * STEP - self.pool_held, 0)
        self._room(grown)
        self.pool_held += grown
        self.pool_used += size

    def free_async(self, size):
        self.pool_used -= size

    def trim_pool(self):
        self.pool_held = -(-self.pool_used // STEP) * STEP

    def _room(self, size):
        if self.taken + size + CONTEXT * self.context > self.total:
            raise OutOfMemory


gpus = [Gpu(0), Gpu(1)]
"""By CUDA's ordinal, which is NVML's order unless a test puts them into another."""
asked = 0
"""How often the runtime was called."""
initialised = False
capturing = False
_numbers = count(1)
_thread = threading.local()


def runtime():
    """Any call of the runtime initialises CUDA; it makes no context by itself."""
    global asked, initialised
    asked += 1
    initialised = True


def stack():
    if not hasattr(_thread, "contexts"):
        _thread.contexts = []
    return _thread.contexts


def use(ordinal):
    """The primary context of the device, made where there is none, current on this thread from now on."""
    runtime()
    gpus[ordinal].context = True
    stack()[-1:] = [ordinal]


def here():
    """The device of this thread."""
    runtime()
    return stack()[-1] if stack() else 0


def gpu_here():
    use(here())
    return gpus[here()]


def current():
    return stack()[-1] if initialised and stack() else None


@contextlib.contextmanager
def pushed(ordinal):
    if not (initialised and gpus[ordinal].context):
        yield False
        return
    stack().append(ordinal)
    try:
        yield True
    finally:
        stack().pop()


def stand_in(monkeypatch):
    from memguard.devices import contexts

    monkeypatch.setattr(contexts, "pushed", pushed)
    monkeypatch.setattr(contexts, "current", current)
    monkeypatch.setattr(contexts, "initialised", lambda: initialised)

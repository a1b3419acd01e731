"""Two GPUs for the models of CuPy and RMM: primary contexts, a current one per thread, the driver's own pools.

`stand_in` puts it where memguard asks libcuda, at `devices.contexts`, and nowhere else.
"""

from __future__ import annotations

import contextlib
import threading

from card import CONTEXT, MIB, OutOfMemory, cards

STEP = 32 * MIB
"""In which the driver's own pools grow."""


class Gpu:
    """Its memory is `card`; the driver's own pool takes of the same total."""

    def __init__(self, number):
        self.uuid, self.card, self.context = bytes.fromhex(f"00000000000040008000{number:012x}"), cards[number], False
        self.pool_held = self.pool_used = self.threshold = 0
        self.pool_most = None

    @property
    def taken(self):
        """What it has handed out, in whole pages."""
        return self.card.taken + self.pool_held

    @property
    def total(self):
        return self.card.total

    @total.setter
    def total(self, size):
        self.card.total = size

    def malloc_async(self, size):
        grown = max(-(-(self.pool_used + size) // STEP) * STEP - self.pool_held, 0)
        if self.pool_most is not None and self.pool_held + grown > self.pool_most:
            raise OutOfMemory
        self._grow_pool(grown)
        self.pool_used += size

    def free_async(self, size):
        self.pool_used -= size

    def trim_pool(self, keep=0):
        """To the pieces that live blocks need, or somewhat more."""
        left = max(-(-self.pool_used // STEP), keep // STEP) * STEP
        self._grow_pool(min(left - self.pool_held, 0))

    def _grow_pool(self, size):
        self.card.set_aside(size)
        self.pool_held += size


gpus = [Gpu(0), Gpu(1)]
"""By CUDA's ordinal, which is NVML's order unless a test puts them into another."""
asked = synchronized = 0
"""How often the runtime was called, and a stream was waited for."""
initialised = False
capturing = False
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
    gpu = gpus[ordinal]
    if not gpu.context:
        gpu.card.aside += CONTEXT
        gpu.context = True
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


def ordinals():
    from memguard._base.units import gpu_uuid

    return {gpu_uuid(gpu.uuid): number for number, gpu in enumerate(gpus)} if initialised else {}


class _Driver:
    def cuMemPoolTrimTo(self, pool, keep):  # noqa: N802
        gpus[pool].trim_pool(keep)
        return 0


def stand_in(monkeypatch):
    from memguard._devices import contexts

    monkeypatch.setattr(contexts, "driver", _Driver)
    monkeypatch.setattr(contexts, "pushed", pushed)
    monkeypatch.setattr(contexts, "current", current)
    monkeypatch.setattr(contexts, "initialised", lambda: initialised)
    monkeypatch.setattr(contexts, "ordinals", ordinals)
    monkeypatch.setattr(contexts, "allocation", lambda address: gpu_here().card.allocation(address))
    monkeypatch.setattr(contexts, "buffer", lambda address: gpu_here().card.buffer(address))

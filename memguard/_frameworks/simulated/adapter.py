"""A framework that exists only as numbers: the contract of `base.py`, on a simulated host and allocator."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import ModuleType
from typing import Any

from memguard._devices.simulated import CONTEXT, SimulatedHost, SimulatedOutOfMemory
from memguard._frameworks.base import Framework
from memguard._frameworks.driver_pages import whole_share
from memguard._frameworks.simulated.allocators import (
    AllocationRefused,
    Allocator,
    BFCAllocator,
    PyCUDAPool,
    TorchCachingAllocator,
    alloc_size,
    bin_number,
    jax_default_limit,
    tensorflow_default_limit,
)
from memguard._frameworks.simulated.driver_allocators import CuPyPool, NumbaMemory
from memguard._types import Applied, Device, Enforcement, State, TraceEvent, Usage
from memguard._units import MIB, format_size, round_up
from memguard.errors import CapNotApplied, DeviceError

STYLES: Mapping[str, str] = {
    "torch": "torch",
    "tensorflow": "bfc",
    "cupy": "cupy",
    "jax": "xla",
    "pycuda": "pool",
    "numba": "emm",
}
"""Which allocator each framework is simulated with."""
MODULES: Mapping[str, int] = {
    "torch": 94 * MIB,
    "bfc": 4 * MIB,
    "cupy": 94 * MIB,
    "xla": 34 * MIB,
    "pool": 0,
    "emm": 2 * MIB,
}
"""What a framework's own kernels take beside the shared context, at its first work. Measured facts on an H200."""
_FIXED = ("bfc", "xla")
"""What takes its limit when it initialises, and keeps it."""
_REPORTING = ("torch", "pool")
"""What reports single allocations; of the others the recorder samples the level."""


class FrameworkOutOfMemory(SimulatedOutOfMemory):
    """A simulated framework's own out-of-memory error: bytes requested, held, its cap (None: no cap).

    `driver` is set where the card was full and not the cap reached.
    """

    def __init__(self, name: str, refused: AllocationRefused, free: int) -> None:
        self.framework, self.held, self.cap, self.driver = name, refused.held, refused.cap, refused.driver
        why = "the card is full" if refused.driver else "its cap is reached"
        limit = "no cap" if refused.cap is None else f"cap {format_size(refused.cap)}"
        text = (
            f"simulated {name}: out of memory: {format_size(refused.requested)} asked for, "
            f"{format_size(refused.held)} held, {limit}, {format_size(free)} free on the card: {why}"
        )
        super().__init__(text, refused.requested, free)


@functools.cache
def oom_type(name: str) -> type[FrameworkOutOfMemory]:
    """The out-of-memory class of the framework of that name: each has its own, as the real ones do."""
    return type(f"Simulated{name.title()}OutOfMemory", (FrameworkOutOfMemory,), {"__module__": __name__})


@dataclass(frozen=True)
class Stats:
    """An allocator's figures in bytes, those included that the real framework would not tell."""

    held: int
    in_use: int
    peak_held: int
    peak_in_use: int
    cap: int | None


class _BlankModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module by name, with nothing in it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        pass


class SimulatedFramework(Framework):
    """`name` is any name; `style` is one of `MODULES`, by default the name's own.

    Live from its first `allocate`, which opens the shared context. Without caps nothing but the card limits it; the
    `bfc` style then takes nearly the whole card at once, as TensorFlow does, and `xla` three quarters of it, as JAX.
    """

    name, module, hook, tested = "simulated", "memguard_simulated", "memguard_simulated", ("simulated",)

    def __init__(
        self, host: SimulatedHost, name: str = "torch", style: str | None = None, *, imported: bool = False
    ) -> None:
        super().__init__(host)
        style = style or STYLES.get(name, "")
        if style not in MODULES:
            raise ValueError(f"no simulated allocator for {name!r}: give a style, one of {', '.join(MODULES)}")
        # The contract has these per class; here each instance is a framework of its own. The hook is a module of
        # its own too, so that importing a real framework never touches a simulated one.
        vars(self).update(name=name, module=f"memguard_simulated_{name}", hook=f"memguard_simulated_{name}")
        self.style, self.imported = style, imported
        self._gpus = host
        self._caps: dict[str, int] = {}
        self._growth = False
        self._pools: dict[str, Allocator] = {}
        self._blocks: dict[int, tuple[Device, int]] = {}
        self._ids = count(1)
        self._recording: list[TraceEvent] | None = None
        self._recorded: set[int] = set()  # arrays whose allocation is in the recording: only their end belongs there
        self._lock = threading.RLock()

    def state(self) -> State:
        if self._pools:
            return State.LIVE
        return State.IMPORTED if self.imported else State.IMPORTABLE

    def why_absent(self) -> str | None:
        return None

    def _live(self, module: ModuleType) -> bool:
        return bool(self._pools)

    def start_importing(self) -> None:
        """As if the program imported the framework: import hooks that wait for `hook` run, and may raise."""
        if self.imported:
            return
        self.imported = True
        finder = _BlankModule(self.hook)
        sys.meta_path.append(finder)
        try:
            importlib.import_module(self.hook)
        except BaseException:
            self.imported = False
            raise
        finally:
            sys.meta_path.remove(finder)
            sys.modules.pop(self.hook, None)

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any]) -> Applied:
        """`options`: `growth` (TensorFlow; True by default, as in the budget) takes memory step by step."""
        with self._lock:
            self._check(caps)
            if why := self._too_late():
                remedy = "activate the budget before the first GPU operation"
                raise CapNotApplied(self.name, f"too late: it is live, and {why}", remedy)
            before = dict(self._caps), self._growth
            self._caps = dict(caps)
            self._growth = bool(options.get("growth", True))
            self._set()

            def undo() -> None:
                with self._lock:
                    if self.style in _FIXED and self._pools:
                        raise CapNotApplied(self.name, "its limit is permanent once it is live", "restart the process")
                    self._caps, self._growth = before
                    self._set()

            return Applied(Enforcement.ENFORCED, undo, notes=("simulated",))

    def resize(self, caps: Mapping[str, int]) -> None:
        if self.style in _FIXED:
            super().resize(caps)
        with self._lock:
            self._check(caps)
            self._caps.update(caps)
            self._set()

    def usage(self, device: Device) -> Usage | None:
        """What the real framework would say: `peak` is of what was in use."""
        with self._lock:
            pool = self._pools.get(device.uuid)
            if pool is None:
                return None
            if self.style == "cupy":  # which does not say what of its cache is split, nor keeps a peak
                return Usage(pool.held, pool.in_use, None)
            if self.style != "bfc":
                return Usage(pool.held, pool.in_use, pool.reclaimable, peak=pool.peak_in_use)
            cap = self._caps.get(device.uuid)
            if cap is not None and not self._growth:
                return Usage(pool.held, pool.in_use, 0, peak=pool.peak_in_use)
            return Usage(
                None,
                pool.in_use,
                0,
                held_at_least=pool.peak_in_use,
                held_at_most=cap,
                peak=pool.peak_in_use,
            )

    def stats(self, device: Device) -> Stats:
        """All that the simulation knows, before the framework is live too (zeros)."""
        with self._lock:
            pool, cap = self._pools.get(device.uuid), self._caps.get(device.uuid)
            if pool is None:
                return Stats(0, 0, 0, 0, cap)
            return Stats(pool.held, pool.in_use, pool.peak_held, pool.peak_in_use, cap)

    def trim(self, device: Device) -> None:
        with self._lock:
            if device.uuid in self._pools:
                self._pools[device.uuid].trim()

    def footprint(self, size: int) -> int:
        if self.style == "torch":
            return 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else round_up(size)
        if self.style == "pool":
            return round_up(alloc_size(bin_number(max(size, 1))))
        if self.style == "cupy":
            return whole_share(size)
        return round_up(size) if self.style == "emm" else round_up(size, 256)

    def oom_types(self) -> tuple[type[BaseException], ...]:
        return (oom_type(self.name),) if self.imported else ()

    def record(self) -> Callable[[], list[TraceEvent]] | None:
        if self.style not in _REPORTING:
            return None
        with self._lock:
            events = self._recording = []
            self._recorded.clear()

        def stop() -> list[TraceEvent]:
            with self._lock:
                if self._recording is events:
                    self._recording = None
            return events

        return stop

    def allocate(self, nbytes: int, device: int = 0, *, exact: bool = False) -> int:
        """A live array's id; `device` is the position on the host. Raises the framework's own OOM."""
        gpu = self._device(device)
        self.start_importing()
        with self._lock:
            try:
                block = self._pool(gpu, nbytes).allocate(nbytes, exact=exact)
            except AllocationRefused as refused:
                raise oom_type(self.name)(self.name, refused, self._gpus.memory(gpu).free) from None
            array = next(self._ids)
            self._blocks[array] = gpu, block
            self._note("alloc", array, gpu, nbytes)
            return array

    def free(self, array: int) -> None:
        """ValueError where the array is not live."""
        with self._lock:
            if array not in self._blocks:
                raise ValueError(f"{self.name}: array {array} is not live (freed twice?)")
            gpu, block = self._blocks.pop(array)
            self._pools[gpu.uuid].free(block)
            self._note("free", array, gpu)

    def _pool(self, gpu: Device, nbytes: int) -> Allocator:
        """The device's allocator; the first call brings the framework to life there."""
        if gpu.uuid not in self._pools:
            cap = self._caps.get(gpu.uuid)
            try:
                self._gpus.open_context(gpu, CONTEXT)
                self._gpus.take(gpu, MODULES[self.style])
            except SimulatedOutOfMemory as error:
                raise AllocationRefused(nbytes, 0, cap, error.with_traceback(None)) from None
            self._pools[gpu.uuid] = self._new_pool(gpu, cap)
        return self._pools[gpu.uuid]

    def _new_pool(self, gpu: Device, cap: int | None) -> Allocator:
        take, give = functools.partial(self._gpus.take, gpu), functools.partial(self._gpus.give, gpu)
        if self.style == "bfc":
            limit = cap
            if limit is None:
                limit = tensorflow_default_limit(self._gpus.memory(gpu).free, gpu.architecture)
            return BFCAllocator(take, give, limit, self._growth)
        if self.style == "xla":  # the budget switches its preallocation off
            limit = jax_default_limit(gpu.usable) if cap is None else cap
            return BFCAllocator(take, give, limit, growth=cap is not None, collects=False)
        if self.style == "emm":
            return NumbaMemory(take, give, cap, total=gpu.usable)
        if self.style == "cupy":
            return CuPyPool(take, give, cap)
        return (TorchCachingAllocator if self.style == "torch" else PyCUDAPool)(take, give, cap)

    def _too_late(self) -> str | None:
        """Why a live framework takes no cap any more; None where it does."""
        if self.style in _FIXED and self._pools:
            return "its limit is fixed when it initialises"
        if any(isinstance(pool, NumbaMemory) and not pool.managed for pool in self._pools.values()):
            return "its context keeps the memory manager that it has"
        return None

    def _set(self) -> None:
        for uuid, pool in self._pools.items():
            pool.cap = self._caps.get(uuid)

    def _check(self, caps: Mapping[str, int]) -> None:
        strangers = set(caps) - {device.uuid for device in self._gpus.devices()}
        if strangers:
            raise CapNotApplied(
                self.name, f"no simulated GPU {min(strangers)}", "plan the budget for the simulated host's own devices"
            )

    def _device(self, position: int) -> Device:
        devices = self._gpus.devices()
        if not 0 <= position < len(devices):
            raise DeviceError(f"no simulated GPU {position}; there are {len(devices)}\n    fix: count from 0")
        return devices[position]

    def _note(self, op: str, array: int, gpu: Device, nbytes: int | None = None) -> None:
        if self._recording is None or (op == "free" and array not in self._recorded):
            return
        self._recorded.add(array)
        self._recording.append(TraceEvent(time.time(), self.name, op, array, nbytes, device=gpu.index))

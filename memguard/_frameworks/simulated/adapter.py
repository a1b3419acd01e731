"""Adapters of simulated frameworks, which use models of the real allocators."""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from types import ModuleType
from typing import Any

from memguard._base.framework_spec import FrameworkSpec
from memguard._base.types import Applied, Device, Enforcement, Shortage, State, TraceEvent, Usage
from memguard._base.undo import Undo
from memguard._base.units import MIB, format_size, round_up
from memguard._devices.simulated import CONTEXT, SimulatedHost, SimulatedOutOfMemory
from memguard._frameworks.base import Framework
from memguard._frameworks.driver_pages import whole_share
from memguard._frameworks.import_hook import enter, leave
from memguard._frameworks.simulated.allocators import (
    AllocationRefused,
    Allocator,
    PyCUDAPool,
    Start,
    TorchCachingAllocator,
    bfc,
    bfc_footprint,
    pool_footprint,
    torch_footprint,
    xla,
)
from memguard._frameworks.simulated.driver_allocators import CuPyPool, NumbaMemory
from memguard._frameworks.specs import SPECS
from memguard.errors import CapNotApplied, DeviceError

_MOST_ROOM_REQUESTS = 2
"""The most times that one allocation asks the guard, which applies the budget, for more memory before it fails."""
_NOTE = "the GPUs and frameworks of this budget are simulated: nothing real is limited"


@dataclass(frozen=True)
class AllocatorModel:
    """The simulation of one kind of allocator. Sizes are bytes, measured on an H200.

    make        creates the allocator of one GPU
    footprint   as `Framework.footprint`
    first_work  bytes that the framework's first operation takes for kernels and libraries, besides the CUDA context
    fixed       the memory limit cannot change after the allocator has initialised
    reports     the allocator reports each allocation; otherwise the recorder samples its usage
    silent      the allocator does not report its held bytes if it grows step by step (TensorFlow)
    totals      the allocator does not report its peak (CuPy)
    """

    make: Callable[[Start], Allocator]
    footprint: Callable[[int], int]
    first_work: int = 0
    fixed: bool = False
    reports: bool = False
    silent: bool = False
    totals: bool = False


_GENERIC = AllocatorModel(
    lambda start: TorchCachingAllocator(start.take, start.give, start.cap), torch_footprint, reports=True
)
MODELS: Mapping[str, AllocatorModel] = {
    "torch": replace(_GENERIC, first_work=94 * MIB),
    "bfc": AllocatorModel(bfc, bfc_footprint, 4 * MIB, fixed=True, silent=True),
    "cupy": AllocatorModel(
        lambda start: CuPyPool(start.take, start.give, start.cap), whole_share, 94 * MIB, totals=True
    ),
    "xla": AllocatorModel(xla, bfc_footprint, 34 * MIB, fixed=True),
    "pool": AllocatorModel(lambda start: PyCUDAPool(start.take, start.give, start.cap), pool_footprint, reports=True),
    "emm": AllocatorModel(
        lambda start: NumbaMemory(start.take, start.give, start.cap, total=start.gpu.usable), round_up, 2 * MIB
    ),
}
"""The model of an allocator, by `FrameworkSpec.allocator`. An allocator without a model gets the generic one, a caching
pool like torch's."""
_REQUESTS_ROOM = frozenset(row.allocator for row in SPECS.values() if row.requests_room)
"""The allocators that ask the guard for more memory before they refuse a request."""


class FrameworkOutOfMemory(SimulatedOutOfMemory):
    """A simulated framework's own out-of-memory error, with bytes requested, bytes held and the cap (None: no cap).

    `driver` is the driver's error; None if the cap was reached.
    """

    def __init__(self, name: str, refused: AllocationRefused, free: int, *, unified: bool = False) -> None:
        self.framework, self.held, self.cap, self.driver = name, refused.held, refused.cap, refused.driver
        place, full = ("in the machine", "the machine's memory") if unified else ("on the card", "the card")
        why = f"{full} is full" if refused.driver else "its cap is reached"
        limit = "no cap" if refused.cap is None else f"cap {format_size(refused.cap)}"
        text = (
            f"simulated {name}: out of memory: {format_size(refused.requested)} asked for, "
            f"{format_size(refused.held)} held, {limit}, {format_size(free)} free {place}: {why}"
        )
        super().__init__(text, refused.requested, free)

    def __reduce__(self) -> tuple[object, ...]:
        """Supports pickling, because parallel engines send a worker's exceptions to another process."""
        return _copied, (self.framework, self.args), vars(self)


def _copied(name: str, args: tuple[Any, ...]) -> FrameworkOutOfMemory:
    kind = oom_type(name)
    return kind.__new__(kind, *args)


@functools.cache
def oom_type(name: str) -> type[FrameworkOutOfMemory]:
    """The framework's out-of-memory class. Each simulated framework has its own class, like the real frameworks."""
    return type(f"Simulated{name.title()}OutOfMemory", (FrameworkOutOfMemory,), {"__module__": __name__})


@dataclass(frozen=True)
class Stats:
    """An allocator's figures in bytes, including figures that the real framework does not report."""

    held: int
    in_use: int
    peak_held: int
    peak_in_use: int
    cap: int | None


class _BlankModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder and loader that creates an empty module for one given name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        pass


class SimulatedFramework(Framework):
    """Simulates a framework of `SPECS`, or one of any `name` with `allocator`, a key of `MODELS`.

    The first `allocate` makes it live (initialised on the GPU) and opens the process's CUDA context, which all
    frameworks share. Without a cap, the allocator `bfc` takes nearly the whole GPU at its start, as TensorFlow's does,
    and `xla` takes three quarters, as JAX's does; the other allocators can use the whole GPU.
    """

    def __init__(
        self, host: SimulatedHost, name: str = "torch", allocator: str | None = None, *, imported: bool = False
    ) -> None:
        super().__init__(host)
        row = SPECS.get(name)
        if allocator not in MODELS if allocator is not None else row is None:
            raise ValueError(f"no simulated allocator for {name!r}: give one of {', '.join(MODELS)}")
        allocator = allocator or (row.allocator if row is not None else "")
        self.model = MODELS.get(allocator, _GENERIC)
        self.resizable = not self.model.fixed
        # A separate module name, so that the import of a real framework does not affect a simulated one.
        own = f"memguard_simulated_{name}"
        silent = row is not None and row.refuses_silently
        self.spec = FrameworkSpec(
            name=name,
            title=name,
            module=own,
            adapter="",
            modules=0,
            workspace=0,
            cap_is="",
            refuses_silently=silent,
            requests_room=allocator in _REQUESTS_ROOM,
        )
        self.imported = imported
        self._gpus = host
        self._caps: dict[str, int] = {}
        self._growth = False
        self._pools: dict[str, Allocator] = {}
        self._blocks: dict[int, tuple[Device, int]] = {}
        self._ids = count(1)
        self._recording: list[TraceEvent] | None = None
        self._recorded: set[int] = set()  # ids of arrays allocated during the recording; only their frees are recorded
        self._lock, self._importing = host.lock, threading.RLock()
        self._allocating = 0  # the id of the thread with an allocation in progress; 0 if none

    def state(self) -> State:
        if self._pools:
            return State.LIVE
        return State.IMPORTED if self.imported else State.IMPORTABLE

    def why_absent(self) -> str | None:
        return None

    def _live(self, module: ModuleType) -> bool:
        return bool(self._pools)

    def start_importing(self) -> None:
        """Import the module `hook`, which runs the import hooks. A hook may raise. Other threads wait until the import
        has ended."""
        with self._importing:
            if not self.imported:
                self._import()

    def _import(self) -> None:
        self.imported = True
        finder = _BlankModule(self.hook)
        enter(finder, last=True)
        try:
            importlib.import_module(self.hook)
        except BaseException:
            self.imported = False
            raise
        finally:
            leave(finder)
            sys.modules.pop(self.hook, None)

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        """With the option `growth` (TensorFlow; True by default, as in the budget) the allocator grows step by step."""
        with self._lock:
            self._check(caps)
            if why := self._too_late():
                remedy = "activate the budget before the first GPU operation"
                raise CapNotApplied(self.name, f"too late: it is live, and {why}", remedy)
            before = dict(self._caps), self._growth

            def restore() -> None:
                with self._lock:
                    if self.model.fixed and self._pools:
                        raise CapNotApplied(self.name, "its limit is permanent once it is live", "restart the process")
                    self._caps, self._growth = before
                    self._set()

            undo.add(self.name, restore)
            self._caps = dict(caps)
            self._growth = bool(options.get("growth", True))
            self._set()
            return Applied(Enforcement.ENFORCED, notes=(_NOTE,))

    def resize(self, caps: Mapping[str, int]) -> None:
        if self.model.fixed:
            super().resize(caps)
        with self._lock:
            self._check(caps)
            self._caps.update(caps)
            self._set()

    def usage(self, device: Device) -> Usage | None:
        """The figures that the real framework would report. `peak` is the peak of `in_use`."""
        with self._lock:
            pool = self._pools.get(device.uuid)
            if pool is None:
                return None
            if self.model.totals:
                return Usage(pool.held, pool.in_use, pool.reclaimable)
            if not self.model.silent:
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
        """All figures of the allocator, which are 0 before the framework is live."""
        with self._lock:
            pool, cap = self._pools.get(device.uuid), self._caps.get(device.uuid)
            if pool is None:
                return Stats(0, 0, 0, 0, cap)
            return Stats(pool.held, pool.in_use, pool.peak_held, pool.peak_in_use, cap)

    def trim(self, device: Device) -> None:
        with self._lock:
            if device.uuid in self._pools and not self._allocating:  # a signal handler during `allocate` must not trim
                self._pools[device.uuid].trim()

    def trim_partly(self, device: Device, needed: int) -> None:
        with self._lock:
            if device.uuid in self._pools and not self._allocating:
                self._pools[device.uuid].trim_partly(needed)

    def footprint(self, size: int) -> int:
        return self.model.footprint(size)

    def record(self) -> Callable[[], list[TraceEvent]] | None:
        if not self.model.reports:
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
        """Allocate; returns the array's id. `device` indexes the host's `devices()`. Raises FrameworkOutOfMemory."""
        gpu = self._device(device)
        self.start_importing()
        try:
            return self._served(gpu, nbytes, exact)
        except FrameworkOutOfMemory as error:
            if self.unseen() is None:
                self._report_refusal(error, gpu.uuid, nbytes)
            raise

    def _served(self, gpu: Device, nbytes: int, exact: bool) -> int:
        within = self._allocating == threading.get_ident()  # True: a signal handler or finalizer interrupted `allocate`
        for left in reversed(range(_MOST_ROOM_REQUESTS + 1 if self.requests_room and not within else 1)):
            try:
                return self._allocate(gpu, nbytes, exact)
            except FrameworkOutOfMemory as error:
                full = error.driver is not None
                short = Shortage(self.name, gpu.uuid, nbytes, self._needed(gpu, nbytes, full), full)
                if not left or not self._request_room(short):
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _needed(self, gpu: Device, nbytes: int, full: bool) -> int:
        """The most bytes that the request may take from the driver. If the GPU is full and the framework is not live on
        it, includes the bytes of the framework's start."""
        needed = round_up(self.footprint(nbytes))
        if full and gpu.uuid not in self._pools:
            needed += self.model.first_work + (0 if self._gpus.context_active(gpu) else CONTEXT)
        return needed

    def _allocate(self, gpu: Device, nbytes: int, exact: bool) -> int:
        with self._lock:
            before, self._allocating = self._allocating, threading.get_ident()
            try:
                block = self._pool(gpu, nbytes).allocate(nbytes, exact=exact)
            except AllocationRefused as refused:
                free = self._gpus.memory(gpu).free
                raise oom_type(self.name)(self.name, refused, free, unified=gpu.unified) from None
            finally:
                self._allocating = before
            array = next(self._ids)
            self._blocks[array] = gpu, block
            self._record_event("alloc", array, gpu, nbytes)
            return array

    def free(self, array: int) -> None:
        """Free an array by its id. Raises ValueError if the array is not live."""
        with self._lock:
            if array not in self._blocks:
                raise ValueError(f"{self.name}: array {array} is not live (freed twice?)")
            gpu, block = self._blocks.pop(array)
            self._pools[gpu.uuid].free(block)
            self._record_event("free", array, gpu)

    def _pool(self, gpu: Device, nbytes: int) -> Allocator:
        """The device's allocator. The first call makes the framework live on the device."""
        if gpu.uuid not in self._pools:
            cap = self._caps.get(gpu.uuid)
            try:
                self._gpus.open_context(gpu, CONTEXT)
                self._gpus.take(gpu, self.model.first_work)
            except SimulatedOutOfMemory as error:
                raise AllocationRefused(nbytes, 0, cap, error.with_traceback(None)) from None
            take, give = functools.partial(self._gpus.take, gpu), functools.partial(self._gpus.give, gpu)
            start = Start(take, give, cap, gpu, self._gpus.memory(gpu).free, self._growth)
            self._pools[gpu.uuid] = self.model.make(start)
        return self._pools[gpu.uuid]

    def _too_late(self) -> str | None:
        """The reason why a live framework can no longer be capped; None if it can."""
        if self.model.fixed and self._pools:
            return "its limit is fixed when it initialises"
        if any(isinstance(pool, NumbaMemory) and not pool.managed for pool in self._pools.values()):
            return "its context keeps its memory manager"
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
            raise DeviceError(f"no simulated GPU {position}; there are {len(devices)}", fix="count from 0")
        return devices[position]

    def _record_event(self, op: str, array: int, gpu: Device, nbytes: int | None = None) -> None:
        if self._recording is None or (op == "free" and array not in self._recorded):
            return
        self._recorded.add(array)
        self._recording.append(TraceEvent(time.time(), self.name, op, array, nbytes, device=gpu.index))

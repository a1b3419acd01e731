"""The state of the simulated GPUs; `catalog.py` has the names that a user may give them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memguard._base.framework_spec import ENTRY_POINTS
from memguard._base.locks import LockOrder, ordered
from memguard._base.types import Device, MemoryInfo
from memguard._base.units import MIB, format_size
from memguard._devices import catalog
from memguard._devices.catalog import Model
from memguard.errors import DeviceError

CONTEXT = 518 * MIB
"""Bytes of the primary CUDA context, allocated once per process and device. Measured: 518 MiB with PyCUDA on an
H200."""
PID = (1 << 22) + 1
"""The PID of the simulated process: one above the largest PID of Linux, so that no real process has it."""


class SimulatedOutOfMemory(RuntimeError):
    """A simulated device has fewer bytes free than were requested. `requested` and `free` are bytes."""

    def __init__(self, message: str, requested: int, free: int) -> None:
        self.requested, self.free = requested, free
        super().__init__(message)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.requested, self.free), vars(self)


@dataclass
class _State:
    device: Device
    model: Model
    context: int | None = None
    taken: int = 0
    peak: int = 0
    others: dict[int, int] = field(default_factory=dict)

    @property
    def process(self) -> int:
        return (self.context or 0) + self.taken

    def note_peak(self) -> None:
        process = self.process
        if process > self.peak:  # not `max(…)`: a signal handler that runs during `max` may raise the peak
            self.peak = process

    @property
    def used(self) -> int:
        return self.process + sum(self.others.values())

    @property
    def free(self) -> int:
        return self.device.usable - self.used


class SimulatedHost:
    """`Host` with simulated GPUs, and the calls through which simulated frameworks allocate. Thread-safe.

    `names` are `Model`s, or names that `catalog.models` accepts: most names give one GPU, a device file may define
    several. Figures are exact bytes: the simulated frameworks round to the 2 MiB pages of a real driver. Raises
    DeviceError for an unknown name, and ConfigError for an invalid file.
    """

    simulated = True

    def __init__(self, names: Sequence[str | Model] = ("h200",)) -> None:
        if isinstance(names, str):
            names = (names,)
        if not names:
            raise DeviceError("a simulated host needs at least one GPU", fix="name one, for example 'h200'")
        self.names = tuple(catalog.canonical(name) if isinstance(name, str) else name.name for name in names)
        kinds = [kind for name in names for kind in (catalog.models(name) if isinstance(name, str) else (name,))]
        # Re-entrant: a signal handler or a finalizer may interrupt a call.
        self.lock: Any = ordered(threading.RLock(), LockOrder.ALLOCATOR)
        """One lock for the machine and its simulated frameworks, because two locks could deadlock in a signal
        handler."""
        self._states: dict[str, _State] = {}
        for index, kind in enumerate(kinds):
            uuid = f"GPU-00000000-0000-4000-8000-{index:012x}"
            reserved = None if kind.unified else kind.reserved
            device = Device(
                uuid, kind.name, index, kind.total, reserved, kind.architecture, index, True, unified=kind.unified
            )
            self._states[uuid] = _State(device, kind)
        self._devices = tuple(state.device for state in self._states.values())
        self._loaded: frozenset[str] = frozenset()
        self._entries: dict[str, int] = {}
        self.spills = any(state.model.spills for state in self._states.values())

    @property
    def pid(self) -> int:
        return PID

    def devices(self, *, ordinals: bool = False) -> tuple[Device, ...]:
        return self._devices

    def memory(self, device: Device) -> MemoryInfo:
        """The figures of NVML v2: total = reserved + used + free, to the byte. For unified memory NVML reports no
        figures."""
        with self.lock:
            state = self._state(device)
            used, true = state.used, state.device
            free = true.usable - used
            if true.unified:
                return MemoryInfo(true.total, None, None, free, None if state.context is None else free)
            return MemoryInfo(true.total, true.reserved, used, free)

    def processes(self, device: Device) -> Mapping[int, int | None]:
        with self.lock:
            state = self._state(device)
            own = {PID: state.process} if state.context is not None or state.taken else {}
            found = {**own, **state.others}
            if state.model.processes == "nothing":
                return {}
            return found if state.model.processes == "bytes" else dict.fromkeys(found)

    def context_active(self, device: Device) -> bool:
        with self.lock:
            state = self._state(device)
            return state.context is not None

    def libraries(self) -> frozenset[str]:
        return self._loaded

    def load(self, *libraries: str) -> None:
        """Load libraries into this process, by their names in `LIBRARIES`. `take` allocates the memory of their first
        use."""
        with self.lock:
            self._loaded |= frozenset(libraries)

    def entries(self, mark: bool = True) -> frozenset[tuple[str, int]]:
        """See `Host.entries`. Before the first `enter` the result is empty, as on a machine where no library is
        observable."""
        return frozenset(self._entries.items())

    def enter(self, *libraries: str) -> None:
        """Simulate a thread of this process that runs the entry functions of these `ENTRY_POINTS`."""
        with self.lock:
            self._entries = {name: self._entries.get(name, 0) + (name in libraries) for name in ENTRY_POINTS}

    def multiprocessors(self, uuid: str) -> int | None:
        return self._states[uuid].model.multiprocessors if uuid in self._states else None

    def close(self) -> None:
        """Does nothing: a simulated host has no resources."""

    def take(self, device: Device, nbytes: int) -> None:
        """Allocate driver memory for this process. Raises SimulatedOutOfMemory if too few bytes are free."""
        with self.lock:
            state = self._state(device)
            self._check(state, nbytes)
            state.taken += nbytes
            state.note_peak()

    def give(self, device: Device, nbytes: int) -> None:
        """Free driver memory of this process. Raises ValueError for more bytes than this process holds."""
        with self.lock:
            state = self._state(device)
            if not 0 <= nbytes <= state.taken:
                raise ValueError(f"giving back {nbytes} bytes of {state.taken} taken")
            state.taken -= nbytes

    def open_context(self, device: Device, nbytes: int = CONTEXT) -> bool:
        """Open this process's primary context, which frameworks share. False if it is open already."""
        with self.lock:
            state = self._state(device)
            if state.context is not None:
                return False
            self._check(state, nbytes)
            state.context = nbytes
            state.note_peak()
            return True

    def occupy(self, device: Device, pid: int, nbytes: int) -> None:
        """Set the total bytes of another process; 0 removes the process."""
        if pid == PID:
            raise ValueError("occupy is for other processes; this one uses take and give")
        with self.lock:
            state = self._state(device)
            before = state.others.pop(pid, 0)
            try:
                self._check(state, nbytes)
            except (ValueError, SimulatedOutOfMemory):
                if before:
                    state.others[pid] = before
                raise
            if nbytes:
                state.others[pid] = nbytes

    def peak(self, device: Device) -> int:
        """The peak of this process's bytes on the device, its context included."""
        with self.lock:
            state = self._state(device)
            return state.peak

    @staticmethod
    def _check(state: _State, nbytes: int) -> None:
        if nbytes < 0:
            raise ValueError(f"{nbytes} is not a size")
        if nbytes > state.free:
            raise SimulatedOutOfMemory(
                f"simulated {state.device.name}: out of memory: {format_size(nbytes)} asked for, "
                f"{format_size(state.free)} of {format_size(state.device.usable)} free",
                nbytes,
                state.free,
            )

    def _state(self, device: Device) -> _State:
        """The state of one GPU. Callers hold the lock."""
        if device.uuid not in self._states:
            raise DeviceError(f"no simulated GPU {device.uuid} here", fix="use the devices of this host")
        return self._states[device.uuid]

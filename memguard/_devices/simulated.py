"""Simulated GPUs: the one place that holds their state.

The H200's figures are measured. The other totals come from public nvidia-smi output and were not measured by us; their
driver reserves vary with the driver version and are typical values.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from memguard._types import Device, MemoryInfo
from memguard._units import MIB, format_size
from memguard.errors import DeviceError

CONTEXT = 518 * MIB
"""The primary CUDA context, once per process and device. Measured: 518 MiB with PyCUDA on an H200."""
PID = (1 << 22) + 1
"""The simulated process: one above the largest PID of Linux, so that no real process has it."""


@dataclass(frozen=True)
class Model:
    """What NVML reports of one model of GPU. `total` and `reserved` (the driver's own part) are bytes."""

    name: str
    architecture: str
    total: int
    reserved: int = 0
    multiprocessors: int | None = None


CATALOGUE: Mapping[str, Model] = {
    "h200": Model("NVIDIA H200", "hopper", 143_771 * MIB, 615 * MIB, 132),  # measured
    "h100": Model("NVIDIA H100 80GB HBM3", "hopper", 81_559 * MIB, 551 * MIB, 132),
    "a100-40gb": Model("NVIDIA A100-SXM4-40GB", "ampere", 40_960 * MIB, 571 * MIB, 108),
    "a100-80gb": Model("NVIDIA A100-SXM4-80GB", "ampere", 81_920 * MIB, 869 * MIB, 108),
    "l40s": Model("NVIDIA L40S", "ada", 46_068 * MIB, 596 * MIB, 142),
    "l4": Model("NVIDIA L4", "ada", 23_034 * MIB, 467 * MIB, 58),
    "t4": Model("Tesla T4", "turing", 15_360 * MIB, 449 * MIB, 40),
    "rtx4090": Model("NVIDIA GeForce RTX 4090", "ada", 24_564 * MIB, 381 * MIB, 128),
}


class SimulatedOutOfMemory(RuntimeError):
    """A simulated device has fewer bytes free than were requested. `requested` and `free` are bytes."""

    def __init__(self, message: str, requested: int, free: int) -> None:
        self.requested, self.free = requested, free
        super().__init__(message)


def model(name: str) -> Model:
    """The catalogue's model with that short name or NVML name. DeviceError lists the known ones and the nearest."""
    wanted = name.strip().lower()
    for key, entry in CATALOGUE.items():
        if wanted in (key, entry.name.lower()):
            return entry
    names = {entry.name.lower(): key for key, entry in CATALOGUE.items()} | {key: key for key in CATALOGUE}
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.4)
    hint = f"; did you mean {names[near[0]]!r}?" if near else ""
    raise DeviceError(f"no simulated GPU {name[:60]!r}{hint}\n    fix: use one of {', '.join(CATALOGUE)}")


@dataclass
class _State:
    device: Device
    multiprocessors: int | None
    context: int | None = None
    taken: int = 0
    peak: int = 0
    others: dict[int, int] = field(default_factory=dict)

    @property
    def process(self) -> int:
        return (self.context or 0) + self.taken

    def note_peak(self) -> None:
        process = self.process
        if process > self.peak:  # not `max`: a call lets a signal handler in, which may raise the peak
            self.peak = process

    @property
    def free(self) -> int:
        return self.device.usable - self.process - sum(self.others.values())


class SimulatedHost:
    """`Host` with simulated GPUs, and the calls by which simulated frameworks take memory. Thread-safe.

    `names` are catalogue names, NVML names or `Model`s, one per device. Figures are exact bytes: the simulated
    frameworks round to the 2 MiB pages in which a real driver allocates.
    """

    simulated = True

    def __init__(self, names: Sequence[str | Model] = ("h200",)) -> None:
        if isinstance(names, str):
            names = (names,)
        if not names:
            raise DeviceError("a simulated host needs at least one GPU\n    fix: name one, for example 'h200'")
        self.names = tuple(name if isinstance(name, str) else name.name for name in names)
        self._lock = threading.RLock()  # a signal handler or a finalizer may come within a call
        self._states: dict[str, _State] = {}
        for index, name in enumerate(names):
            kind = model(name) if isinstance(name, str) else name
            uuid = f"GPU-00000000-0000-4000-8000-{index:012x}"
            device = Device(uuid, kind.name, index, kind.total, kind.reserved, kind.architecture, index, simulated=True)
            self._states[uuid] = _State(device, kind.multiprocessors)

    @property
    def pid(self) -> int:
        return PID

    def devices(self, *, ordinals: bool = False) -> tuple[Device, ...]:
        return tuple(state.device for state in self._states.values())

    def memory(self, device: Device) -> MemoryInfo:
        """As NVML v2 reports it: total = reserved + used + free, to the byte."""
        with self._state(device) as state:
            free, true = state.free, state.device
            return MemoryInfo(true.total, true.reserved, true.usable - free, free)

    def processes(self, device: Device) -> Mapping[int, int | None]:
        with self._state(device) as state:
            own = {PID: state.process} if state.context is not None or state.taken else {}
            return {**own, **state.others}

    def context_active(self, device: Device) -> bool:
        with self._state(device) as state:
            return state.context is not None

    def multiprocessors(self, uuid: str) -> int | None:
        return self._states[uuid].multiprocessors if uuid in self._states else None

    def close(self) -> None:
        """Nothing to release."""

    def take(self, device: Device, nbytes: int) -> None:
        """This process takes memory from the driver. SimulatedOutOfMemory if it is not free."""
        with self._state(device) as state:
            self._check(state, nbytes)
            state.taken += nbytes
            state.note_peak()

    def give(self, device: Device, nbytes: int) -> None:
        """This process gives memory back. ValueError for more than it took."""
        with self._state(device) as state:
            if not 0 <= nbytes <= state.taken:
                raise ValueError(f"giving back {nbytes} bytes of {state.taken} taken")
            state.taken -= nbytes

    def open_context(self, device: Device, nbytes: int = CONTEXT) -> bool:
        """Open this process's primary context; False if it is open already (it is shared)."""
        with self._state(device) as state:
            if state.context is not None:
                return False
            self._check(state, nbytes)
            state.context = nbytes
            state.note_peak()
            return True

    def occupy(self, device: Device, pid: int, nbytes: int) -> None:
        """Another process now holds `nbytes` in all; 0 if it has ended."""
        if pid == PID:
            raise ValueError("occupy is for other processes; this one uses take and give")
        with self._state(device) as state:
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
        """The most bytes that this process ever held on the device, its context included."""
        with self._state(device) as state:
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

    @contextmanager
    def _state(self, device: Device) -> Iterator[_State]:
        with self._lock:
            if device.uuid not in self._states:
                raise DeviceError(f"no simulated GPU {device.uuid} here\n    fix: use the devices of this host")
            yield self._states[device.uuid]

"""memguard's data, as frozen dataclasses and tuples. All sizes are bytes; None means unknown, never 0.

What each word means is in `docs/words.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple


class State(Enum):
    """How far a framework has come in this process."""

    ABSENT = "absent"
    IMPORTABLE = "importable"
    IMPORTED = "imported"
    LIVE = "live"


class Enforcement(Enum):
    """How a cap holds."""

    ENFORCED = "enforced"  # the framework's own allocator refuses
    PENDING = "pending"  # enforced as soon as the framework is imported or initialises CUDA
    WATCHED = "watched"  # only observed: nothing refuses, or what refused was changed since
    ABSENT = "absent"  # not installed, or a build without CUDA


@dataclass(frozen=True)
class Device:
    """One GPU. `index` is NVML's; `ordinal` is CUDA's in this process, None until CUDA was asked.

    `total` is NVML's total; `reserved` the part of it that the driver keeps (NVML v2; None on older
    drivers). `usable` is what CUDA reports as total: measured equal to total − reserved on an H200.
    """

    uuid: str
    name: str
    index: int
    total: int
    reserved: int | None
    architecture: str
    ordinal: int | None = None
    simulated: bool = False

    @property
    def usable(self) -> int:
        return self.total - (self.reserved or 0)


class MemoryInfo(NamedTuple):
    """NVML's memory figures of one device. With v2, total = reserved + used + free to the byte.

    Where `reserved` is None (NVML v1), `used` contains the driver's reserve.
    """

    total: int
    reserved: int | None
    used: int
    free: int


@dataclass(frozen=True)
class DevicePlan:
    """One device's part of a plan: limit = reserve + Σ caps + unallocated."""

    device: Device
    limit: int
    reserve: int
    caps: Mapping[str, int]
    unallocated: int
    reserve_source: str = "auto"


@dataclass(frozen=True)
class Plan:
    """The budget resolved against devices. `options` holds what a framework needs beside its caps."""

    devices: tuple[DevicePlan, ...]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def caps(self, framework: str) -> dict[str, int]:
        """The framework's cap on every device, by UUID."""
        return {d.device.uuid: d.caps[framework] for d in self.devices if framework in d.caps}


class Usage(NamedTuple):
    """What a framework holds on one device. A tuple, as the monitor makes them many times a second.

    held         bytes it has taken from the driver; None if it does not report them
    in_use       bytes that live arrays occupy
    reclaimable  the part of held − in_use that a trim would really return; None if not known
    held_at_least, held_at_most   bounds if `held` is None
    """

    held: int | None
    in_use: int | None
    reclaimable: int | None = None
    held_at_least: int | None = None
    held_at_most: int | None = None
    peak: int | None = None


@dataclass(frozen=True)
class Applied:
    """The result of applying a cap: how it holds, how to undo it, or why it cannot be undone.

    Exactly one of `undo` and `permanent` is set.
    """

    enforcement: Enforcement
    undo: Callable[[], None] | None = None
    permanent: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)  # a trace has millions of them
class TraceEvent:
    """One line of an allocation trace (`docs/trace.md`).

    `op` is `alloc` and `free` (with `id`), `in_use` (a framework that reports only its level), `trim`,
    or `mark` (what was really held and in use at that moment: for comparing, not for replaying).
    `time` is seconds; `device` the position in the trace header's device list.
    """

    time: float
    framework: str
    op: str
    id: int | None = None
    bytes: int | None = None
    held: int | None = None
    in_use: int | None = None
    device: int = 0


@dataclass
class WorkloadReport:
    """What a `workload` block did, in bytes in use. Filled in when the block ends; None if unknown.

    `peak` is also None if the process had been higher before the block: frameworks keep only one peak.
    """

    name: str
    framework: str
    before: int | None = None
    after: int | None = None
    peak: int | None = None

    @property
    def delta(self) -> int | None:
        """What the block left allocated."""
        return None if self.after is None or self.before is None else self.after - self.before


class Pressure(str, Enum):
    """How close a framework is to its cap, or the process to its limit on a GPU. Equal to its name as text."""

    OK = "ok"
    WARN = "warn"
    CRITICAL = "critical"

    def __str__(self) -> str:
        return str(self.value)

    @property
    def rank(self) -> int:
        return list(Pressure).index(self)


class FrameworkSample(NamedTuple):
    """One framework on one GPU at one moment, in bytes; None if unknown."""

    held: int | None
    in_use: int | None
    reclaimable: int | None
    cap: int | None


class DeviceSample(NamedTuple):
    """One GPU at one moment, in bytes. `process` is what this process holds by NVML; None if unknown."""

    uuid: str
    total: int
    used: int
    free: int
    process: int | None
    limit: int | None
    overhead: int
    unaccounted: int | None
    frameworks: Mapping[str, FrameworkSample]


class Sample(NamedTuple):
    """The ledger's figures without its rows, as the monitor reads them. `time` is as `time.time()`."""

    time: float
    devices: tuple[DeviceSample, ...]


class Event(NamedTuple):
    """Something that the monitor or the guard noticed, or that was done.

    kind: pressure (its level changed), forecast (cap or limit is reached in `seconds`), leak (a workload leaves more
    behind each time), probe (a probe failed, or works again), trim, oom, note (a cap no longer holds, or holds again).
    """

    time: float
    kind: str
    text: str
    level: Pressure | None = None
    uuid: str | None = None
    framework: str | None = None
    seconds: float | None = None
    bytes: int | None = None

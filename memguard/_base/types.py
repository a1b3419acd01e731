"""memguard's data types, in which all sizes are bytes, and None means unknown, never 0.

`docs/words.md` defines the terms. At import, Python generates and compiles six methods for each frozen dataclass, which
takes 0.4 ms; a NamedTuple takes 0.06 ms. So types that only memguard creates and reads are NamedTuples.
"""

# Without `from __future__ import annotations`, which would make typing compile each NamedTuple field's annotation.

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from memguard._base.text import html, shown, visible
from memguard._base.units import format_size

POOL: Final = "shared pool"
"""The name of the ledger row for the shared pool's cache: the pool's bytes that hold no framework's arrays."""


class State(Enum):
    """How far a framework is initialised in this process."""

    ABSENT = "absent"
    IMPORTABLE = "importable"
    IMPORTED = "imported"
    LIVE = "live"


class Enforcement(Enum):
    """How a cap is enforced."""

    ENFORCED = "enforced"  # the framework's own allocator refuses requests above the cap
    PENDING = "pending"  # enforced as soon as the framework is imported or initialises CUDA
    WATCHED = "watched"  # only observed: no allocator refuses requests above the cap, or other code undid the cap
    ABSENT = "absent"  # not installed, or a build without CUDA


@dataclass(frozen=True)
class Device:
    """One GPU. `index` is the NVML index. `ordinal` is the CUDA ordinal in this process; None until memguard has
    queried CUDA.

    `total` is the total that NVML reports; `reserved` is the memory of this total that the driver reserves (NVML v2;
    None on older drivers). `usable` is total − reserved, on an H200 measured equal to the total that CUDA reports.

    `unified` is True if the GPU has no memory of its own and uses the machine's (DGX Spark's GB10, Jetson). NVML
    then reports no memory: `total` is `cuDeviceTotalMem`, and `reserved` is None.
    """

    uuid: str
    name: str
    index: int
    total: int
    reserved: int | None
    architecture: str
    ordinal: int | None = None
    simulated: bool = False
    unified: bool = False

    def __post_init__(self) -> None:
        for name in ("uuid", "name", "architecture"):  # text from a driver or file may contain control characters
            object.__setattr__(self, name, visible(getattr(self, name), keep=""))

    @property
    def usable(self) -> int:
        return self.total - (self.reserved or 0)


class MemoryInfo(NamedTuple):
    """NVML's memory figures of one device. With v2, total = reserved + used + free to the byte.

    If `reserved` is None (NVML v1), `used` includes the memory that the driver reserves.

    For a GPU with unified memory NVML reports no figures: `used` is None, `total` is `cuDeviceTotalMem`, and `free` is
    the memory that the machine can allocate, at most `total`. `free` is the larger of the kernel's `MemAvailable` and
    of `cuda_free`. `cuda_free` is the figure of `cuMemGetInfo`, which excludes the file cache that the kernel would
    evict; None before this process has a CUDA context. The figures of such a GPU do not add up to `total`.
    """

    total: int
    reserved: int | None
    used: int | None
    free: int
    cuda_free: int | None = None


@dataclass(frozen=True)
class DevicePlan:
    """The plan of one device: limit = reserve + Σ caps + unallocated.

    `caps` has the current caps of elastic frameworks, and the fixed caps of all others. The frameworks in `joined`
    share one cap, which counts once in the sum.
    """

    device: Device
    limit: int
    reserve: int
    caps: Mapping[str, int]
    unallocated: int
    reserve_source: str = "auto"
    elastic: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The min and max of each elastic framework, in bytes. memguard moves the framework's cap between them."""
    joined: tuple[str, ...] = ()
    """The frameworks that allocate from one shared CUDA memory pool (`strategy: pool`)."""


@dataclass(frozen=True)
class Plan:
    """The budget resolved against devices. `options` holds each framework's settings other than its caps."""

    devices: tuple[DevicePlan, ...]
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def caps(self, framework: str) -> dict[str, int]:
        """The framework's cap on every device, by UUID."""
        return {d.device.uuid: d.caps[framework] for d in self.devices if framework in d.caps}


class Usage(NamedTuple):
    """One framework's memory on one device. A tuple, because the monitor creates many per second.

    held         bytes allocated from the driver; None if the framework does not report them
    in_use       bytes that live arrays occupy
    reclaimable  bytes of held − in_use that a trim would return to the driver; None if unknown
    held_at_least, held_at_most   bounds of the held bytes if `held` is None
    """

    held: int | None
    in_use: int | None
    reclaimable: int | None = None
    held_at_least: int | None = None
    held_at_most: int | None = None
    peak: int | None = None


usage_of: Callable[[tuple[int | None, int | None, int | None, int | None, int | None, int | None]], Usage]
usage_of = partial(tuple.__new__, Usage)
"""Build a Usage from a tuple of all its fields, in half the time of `Usage(...)`. Each reading of the memory
builds one Usage for each framework. The functions below that end in `_of` do the same for other classes."""
memory_info_of: Callable[[tuple[int, int | None, int | None, int, int | None]], MemoryInfo]
memory_info_of = partial(tuple.__new__, MemoryInfo)


def cached(usage: Usage) -> int:
    """The most bytes that a trim may return to the driver: `reclaimable`; if unknown, held − in_use, or else 0."""
    if usage.reclaimable is not None:
        return usage.reclaimable
    known = usage.held is not None and usage.in_use is not None
    return max((usage.held or 0) - (usage.in_use or 0), 0) if known else 0  # at least 0 even if in_use was read later


class NoHelp(StrEnum):
    """Why memguard made no memory available to a request that was then refused. Members are equal to their values."""

    CAPTURE = "capture"
    """The requesting thread was capturing a CUDA graph, and freeing memory would invalidate the capture."""
    COMMUNICATORS = "communicators"
    """A thread of memguard made the request while NCCL communicators existed, and a free would wait for other ranks."""
    LOCK_HELD = "lock held"
    """Another thread held memguard's lock for too long."""
    WITHIN_CALL = "within another call"
    """The request was made within another memguard call on the same thread."""
    NOTHING_IDLE = "nothing idle"
    """memguard searched, and the other frameworks had too little idle memory."""
    NOT_ASKED = "not asked"
    """The framework's allocator refused without requesting memory from memguard."""


class WhyNoHelp(NamedTuple):
    """Why memguard made no memory available to one refused request: the kind, and the reason as a sentence's end."""

    kind: NoHelp
    text: str


class Drift(NamedTuple):
    """A change by other code that breaks a cap, and the effect on the cap ("" if `change` implies the effect)."""

    change: str
    effect: str = ""

    def __str__(self) -> str:
        return f"{self.change}: {self.effect}" if self.effect else self.change


RECORD = "memguard_refusal"
"""The name of the exception attribute that holds `RefusedRequest.id` of the refusal that raised the exception."""


class RefusedRequest(NamedTuple):
    """One refused request for GPU memory, with the figures at the refusal. Sizes are bytes; None if unknown.

    `source` is the source of the figures: refusal (memguard's own allocator refused the request), observer (the
    framework's allocator reported the refusal), text (the error's text), peak (the framework's largest use so far) or
    sample (the monitor's last sample). `held`, `in_use` and `reclaimable` are the framework's, as in `Usage`; `free` is
    the GPU's. `thread` is 0 if unknown. `pooled` is the bytes of `in_use` that are idle in private pools; later
    readings of `in_use` exclude them. `id` identifies the record of the refusal by process and number, and is stored in
    the exception's attribute `memguard_refusal`; None if there is no record. `why_no_help` is why memguard made no
    memory available to the request; None if unknown, or if free memory would not have helped (a fixed cap refused the
    request).
    """

    framework: str
    source: Literal["refusal", "observer", "text", "peak", "sample"]
    time: float
    uuid: str | None = None
    requested: int | None = None
    held: int | None = None
    in_use: int | None = None
    reclaimable: int | None = None
    cap: int | None = None
    free: int | None = None
    thread: int = 0
    pooled: int | None = None
    id: str | None = None
    why_no_help: WhyNoHelp | None = None

    @property
    def cached(self) -> int | None:
        return None if self.held is None or self.in_use is None else max(self.held - self.in_use, 0)


class Shortage(NamedTuple):
    """A request that an allocator cannot serve yet, before the final refusal. Sizes are bytes.

    `requested` is the size of the request; `needed` is the most that the allocator would allocate from the driver for
    it. `full` is True if the driver refused because the GPU has too little free memory, False if the cap refused.
    """

    framework: str
    uuid: str
    requested: int
    needed: int
    full: bool


class Room(NamedTuple):
    """The result of raising the cap and trimming caches for one request, in bytes.

    `returned` has the bytes that each other framework returned to the driver, measured by NVML. `cap` is the requesting
    framework's cap before and after; None if it did not change. `missing` is the remaining shortage; 0 if the request
    now fits. `live` has the bytes of the other frameworks' live arrays beyond their guaranteed memory (their min): only
    the program can free them.
    """

    returned: Mapping[str, int]
    cap: tuple[int, int] | None
    missing: int
    live: Mapping[str, int]


class Applied(NamedTuple):
    """The result of applying a cap: how the cap is enforced, and why it cannot be undone (None if it can)."""

    enforcement: Enforcement
    permanent: str | None = None
    notes: tuple[str, ...] = ()


class TraceEvent(NamedTuple):
    """One line of an allocation trace (`docs/trace.md`).

    `op` is `alloc` or `free` (with `id`), `in_use` (the total of a framework that reports nothing else), `trim`,
    or `mark` (held and in-use bytes measured at `time`, for comparison, not for replay).
    `time` is in seconds; `device` is the index in the trace header's device list.
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
    """The memory use of a `workload` block, in bytes in use. Filled in when the block ends; None if unknown.

    `peak` is also None if the process used more before the block, because a framework records only one peak.
    `reserved` is the reservation that `needs` requested; `waited` is the seconds that the block waited for the
    reservation.
    """

    name: str
    framework: str
    before: int | None = None
    after: int | None = None
    peak: int | None = None
    reserved: int | None = None
    waited: float = 0.0

    @property
    def delta(self) -> int | None:
        """The change of the bytes in use over the block."""
        return None if self.after is None or self.before is None else self.after - self.before

    def __str__(self) -> str:
        peak = "no higher than it had been" if self.peak is None else format_size(self.peak)
        left = "what it left is unknown"
        if self.delta is not None:
            left = f"{format_size(abs(self.delta))} {'more' if self.delta >= 0 else 'less'} in use than before"
        waited = f", after it waited {self.waited:.1f} s" if self.waited else ""
        return shown(f"{visible(self.name, keep='')}: {self.framework} peak {peak}, {left}{waited}")

    def __repr__(self) -> str:
        return f"<WorkloadReport {self}>"


class Pressure(StrEnum):
    """How close a framework is to its cap, or the process to its limit on a GPU. Members are equal to their values."""

    OK = "ok"
    WARN = "warn"
    CRITICAL = "critical"

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
    """One GPU at one moment, in bytes. `process` is this process's memory as NVML reports it; None if unknown.

    `used` is the figure of NVML; None on a GPU with unified memory, where `free` is the memory that the machine can
    allocate.
    """

    uuid: str
    total: int
    used: int | None
    free: int
    process: int | None
    limit: int | None
    overhead: int
    unaccounted: int | None
    frameworks: Mapping[str, FrameworkSample]


class Sample(NamedTuple):
    """The memory of all GPUs at `time` (from `time.time()`), as the monitor samples it, without a `Ledger`'s rows."""

    time: float
    devices: tuple[DeviceSample, ...]


framework_sample_of: Callable[[tuple[int | None, int | None, int | None, int | None]], FrameworkSample]
framework_sample_of = partial(tuple.__new__, FrameworkSample)
device_sample_of: Callable[
    [tuple[str, int, int | None, int, int | None, int | None, int, int | None, Mapping[str, FrameworkSample]]],
    DeviceSample,
] = partial(tuple.__new__, DeviceSample)
sample_of: Callable[[tuple[float, tuple[DeviceSample, ...]]], Sample] = partial(tuple.__new__, Sample)


_LEVEL_STYLES = {"warn": "color: #a65f00", "critical": "color: #b3001b"}


class Event(NamedTuple):
    """A change that the monitor or the guard observed or made.

    kind: pressure (the pressure level changed), forecast (cap or limit will be reached in `seconds`), leak (a
    workload's memory in use grows with each run; without a framework: unaccounted memory keeps growing), probe (the
    GPUs cannot be read, or can again), trim, oom, note (a cap fails, holds again, or is affected by a later setting),
    refused (only in timelines: an allocator refused `times` requests, whether or not the program catches the errors),
    peak (only in timelines: an allocator reports a peak of `bytes` in use so far), workload (only in timelines: a
    workload ended after `seconds`, or `times` workloads in a row; `bytes` is the peak), reclaim (other frameworks
    returned `bytes` for `framework`, or the elastic cap of `framework` changed), retry (a function is run again, after
    `bytes` were freed), suspended (the process moved `bytes` off its GPUs within `seconds`; the next sample follows
    the resumption), resumed, lease (another process uses `bytes` of a GPU, above its lease or without one; or this
    process's lease was lost).

    For a refused request `bytes` is the size of the request. `held`, `in_use`, `reclaimable` and `cap` are the
    framework's at the time of the event, and `free` is the GPU's, all in bytes.
    """

    time: float
    kind: str
    text: str
    level: Pressure | None = None
    uuid: str | None = None
    framework: str | None = None
    seconds: float | None = None
    bytes: int | None = None
    times: int | None = None
    held: int | None = None
    in_use: int | None = None
    reclaimable: int | None = None
    cap: int | None = None
    free: int | None = None

    def __str__(self) -> str:
        """`critical pressure: torch: ...`, without the time."""
        return shown(f"{f'{self.level} ' if self.level is not None else ''}{self.kind}: {self.text}")

    def __repr__(self) -> str:
        """All fields that are not None."""
        known = ((name, getattr(self, name)) for name in self._fields)
        said = (f"{name}={(str(value) if name == 'level' else value)!r}" for name, value in known if value is not None)
        return shown(f"<Event {' '.join(said)}>")

    def _repr_html_(self) -> str:
        """Time of day, level, kind and text in one line."""
        import time

        at, level = time.strftime("%H:%M:%S", time.localtime(self.time)), str(self.level or "")
        marked = f'<b style="{_LEVEL_STYLES.get(level, "")}">{html(level)}</b> ' if level else ""
        return f"<div><code>{at}</code> {marked}{html(self.kind)}: {html(self.text)}</div>"

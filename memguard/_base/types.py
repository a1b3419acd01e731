"""memguard's data, as frozen dataclasses and tuples. All sizes are bytes; None means unknown, never 0.

`docs/words.md` defines the words. At import, Python generates and compiles six methods for each frozen dataclass, which
takes 0.4 ms; a NamedTuple takes 0.06 ms. So data that only memguard makes and reads is a NamedTuple.
"""

# No `from __future__ import annotations`: with it, typing compiles the annotation of each field of a NamedTuple.

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from memguard._base.text import html, shown, visible
from memguard._base.units import format_size

POOL: Final = "shared pool"
"""The ledger's row of the shared pool's bytes beyond the frameworks' arrays: one cache for all."""


class State(Enum):
    """How far a framework is initialised in this process."""

    ABSENT = "absent"
    IMPORTABLE = "importable"
    IMPORTED = "imported"
    LIVE = "live"


class Enforcement(Enum):
    """How a cap is enforced."""

    ENFORCED = "enforced"  # the framework's own allocator refuses
    PENDING = "pending"  # enforced as soon as the framework is imported or initialises CUDA
    WATCHED = "watched"  # only observed: no allocator refuses, or something else undid the cap
    ABSENT = "absent"  # not installed, or a build without CUDA


@dataclass(frozen=True)
class Device:
    """One GPU. `index` is NVML's; `ordinal` is CUDA's in this process, None until memguard has queried CUDA.

    `total` is NVML's total; `reserved` the part of it that the driver keeps (NVML v2; None on older
    drivers). `usable` is CUDA's total: measured equal to total − reserved on an H200.

    `unified`: the GPU has no memory of its own and allocates from the machine's (DGX Spark's GB10, Jetson), so that
    NVML reports no memory. `total` is then CUDA's (`cuDeviceTotalMem`), and `reserved` None.
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
        for name in ("uuid", "name", "architecture"):  # a driver or a file supplied them; a terminal may print them
            object.__setattr__(self, name, visible(getattr(self, name), keep=""))

    @property
    def usable(self) -> int:
        return self.total - (self.reserved or 0)


class MemoryInfo(NamedTuple):
    """NVML's memory figures of one device. With v2, total = reserved + used + free to the byte.

    Where `reserved` is None (NVML v1), `used` contains the driver's reserve.

    NVML has no figures of a GPU with unified memory: `used` is None, `total` is CUDA's, and `free` is what the machine
    can allocate, at most `total`. It is the larger of the kernel's `MemAvailable` and of `cuda_free`, CUDA's own figure
    (`cuMemGetInfo`), which excludes the file cache that the kernel would evict. `cuda_free` is None before this process
    has a context. There the figures do not add up to `total`.
    """

    total: int
    reserved: int | None
    used: int | None
    free: int
    cuda_free: int | None = None


@dataclass(frozen=True)
class DevicePlan:
    """One device's part of a plan: limit = reserve + Σ caps + unallocated.

    The caps of elastic frameworks are the current caps; all other caps are fixed. The frameworks in `joined` share one
    cap, which counts once in the sum.
    """

    device: Device
    limit: int
    reserve: int
    caps: Mapping[str, int]
    unallocated: int
    reserve_source: str = "auto"
    elastic: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """The min and max of each elastic framework, in bytes: its cap moves between them."""
    joined: tuple[str, ...] = ()
    """The frameworks that draw from one driver pool (`strategy: pool`)."""


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
    """One framework's memory on one device. A tuple, as the monitor makes them many times a second.

    held         bytes allocated from the driver; None if the framework does not report them
    in_use       bytes that live arrays occupy
    reclaimable  the part of held − in_use that a trim would return; None if unknown
    held_at_least, held_at_most   bounds if `held` is None
    """

    held: int | None
    in_use: int | None
    reclaimable: int | None = None
    held_at_least: int | None = None
    held_at_most: int | None = None
    peak: int | None = None


usage_of: Callable[[tuple[int | None, int | None, int | None, int | None, int | None, int | None]], Usage]
usage_of = partial(tuple.__new__, Usage)
"""Builds a Usage from a tuple of all its fields, in half the time of the class: each reading makes one for each
framework. The functions below that end in `_of` do the same for their classes."""
memory_info_of: Callable[[tuple[int, int | None, int | None, int, int | None]], MemoryInfo]
memory_info_of = partial(tuple.__new__, MemoryInfo)


def cached(usage: Usage) -> int:
    """The most that a trim of the framework may return: its whole cache if it does not report fragmentation."""
    if usage.reclaimable is not None:
        return usage.reclaimable
    known = usage.held is not None and usage.in_use is not None
    return max((usage.held or 0) - (usage.in_use or 0), 0) if known else 0  # clamped: two readings, at two moments


class NoHelp(StrEnum):
    """Why memguard freed no memory for a request that was then refused. Equal to its name as text."""

    CAPTURE = "capture"
    """This thread was capturing a CUDA graph, and freeing memory would invalidate the capture."""
    COMMUNICATORS = "communicators"
    """A thread of memguard made the request while NCCL communicators existed: a free would wait for other ranks."""
    LOCK_HELD = "lock held"
    """Another thread held memguard's lock for too long."""
    WITHIN_CALL = "within another call"
    """The request was made within another memguard call on the same thread."""
    NOTHING_IDLE = "nothing idle"
    """memguard searched, and the other frameworks had too little idle memory."""
    NOT_ASKED = "not asked"
    """The framework's allocator refused without requesting room from memguard."""


class WhyNoHelp(NamedTuple):
    """Why memguard freed no memory for one refused request: the kind, and the reason as the end of a sentence."""

    kind: NoHelp
    text: str


class Drift(NamedTuple):
    """A change by other code that breaks a cap, and its effect on the cap ("" if `change` implies the effect)."""

    change: str
    effect: str = ""

    def __str__(self) -> str:
        return f"{self.change}: {self.effect}" if self.effect else self.change


RECORD = "memguard_refusal"
"""The exception attribute that holds the id of its refusal's record, `RefusedRequest.id`."""


class RefusedRequest(NamedTuple):
    """One refused request for GPU memory, with the figures of that moment. Sizes are bytes; None if unknown.

    source: refusal (memguard's own allocator refused it), observer (the framework's allocator reported it), text (of
    the error), peak (the framework's largest use so far) or sample (the monitor's last one). `held`, `in_use` and
    `reclaimable` are the framework's, as in `Usage`; `free` is the GPU's. `thread` is 0 if unknown. `pooled` is the
    part of `in_use` that idles in private pools: later readings do not count it. `id` identifies the record of the
    refusal by process and number, as `memguard_refusal` on its exception; None without a record. `why_no_help` is why
    memguard made no room for it; None if unknown, or if room would not have helped (a fixed cap refused it).
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
    """A request that an allocator cannot serve, before it is refused for good. Sizes are bytes.

    `requested`: the size of the request. `needed`: the most that its allocator would take from the driver. `full`:
    the driver refused, as the GPU has too little free memory; otherwise the cap refused.
    """

    framework: str
    uuid: str
    requested: int
    needed: int
    full: bool


class Room(NamedTuple):
    """The result of raising the cap and trimming caches for one request, in bytes.

    `returned` has the bytes that each sibling returned, measured by NVML. `cap` is the requester's cap before and
    after; None if it did not change. `missing` is the remaining shortage; 0 if the request fits now. `live` is the
    siblings' live arrays beyond their guaranteed memory (their min): only the program can free them.
    """

    returned: Mapping[str, int]
    cap: tuple[int, int] | None
    missing: int
    live: Mapping[str, int]


class Applied(NamedTuple):
    """The result of applying a cap: its enforcement, and why it cannot be undone (None: it can)."""

    enforcement: Enforcement
    permanent: str | None = None
    notes: tuple[str, ...] = ()


class TraceEvent(NamedTuple):
    """One line of an allocation trace (`docs/trace.md`).

    `op` is `alloc` or `free` (with `id`), `in_use` (the total of a framework that reports nothing else), `trim`,
    or `mark` (the measured held and in use at that moment: for comparison, not for replay).
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
    """The memory use of a `workload` block, in bytes in use. Filled in when the block ends; None if unknown.

    `peak` is also None if the process's use was higher before the block, as a framework records only one peak.
    `reserved` is the reservation that `needs` requested; `waited` is the seconds that the block waited for it.
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
    """How close a framework is to its cap, or the process to its limit on a GPU. Equal to its name as text."""

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
    """One GPU at one moment, in bytes. `process` is this process's memory by NVML; None if unknown.

    `used` is NVML's; None on a GPU with unified memory, where `free` is what the machine can allocate.
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
    """The ledger's figures without its rows, for the monitor. `time` is as `time.time()`."""

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

    kind: pressure (its level changed), forecast (cap or limit is reached in `seconds`), leak (a workload's memory in
    use grows with each run; without a framework: unaccounted memory keeps growing), probe (a probe failed, or works
    again), trim, oom, note (a cap no longer holds, holds again, or is affected by a later setting), refused (only in
    timelines: an allocator refused `times` requests, whether or not the program catches the errors), peak (only in
    timelines: an allocator reports a peak of `bytes` in use so far), workload (only in timelines: one has ended, after
    `seconds`, or `times` of them in a row; `bytes` is the peak), reclaim (siblings returned `bytes` for `framework`, or
    its elastic cap changed), retry (a function is run again, after `bytes` were freed), suspended (the process moved
    `bytes` off its GPUs within `seconds`; the next sample follows its resumption), resumed, lease (another process uses
    `bytes` of a GPU, above its lease or without one; or this process's lease was lost).

    For a refused request `bytes` is its size. `held`, `in_use`, `reclaimable` and `cap` are the framework's at
    that moment, and `free` is the GPU's, all in bytes.
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
        """The fields that are set."""
        known = ((name, getattr(self, name)) for name in self._fields)
        said = (f"{name}={(str(value) if name == 'level' else value)!r}" for name, value in known if value is not None)
        return shown(f"<Event {' '.join(said)}>")

    def _repr_html_(self) -> str:
        """Time of day, level, kind and text in one line."""
        import time

        at, level = time.strftime("%H:%M:%S", time.localtime(self.time)), str(self.level or "")
        marked = f'<b style="{_LEVEL_STYLES.get(level, "")}">{html(level)}</b> ' if level else ""
        return f"<div><code>{at}</code> {marked}{html(self.kind)}: {html(self.text)}</div>"

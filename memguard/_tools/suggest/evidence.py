"""What one recorded run shows of its needs. Pure: records in, figures out. All sizes are bytes; None is unknown.

What a framework needed in the samples is decided by `replay_timeline`, in one place for `memguard replay` and this. Two
things are added to it, as samples do not show them:

- the peaks that allocators keep themselves, from events of kind `peak` (`uuid`, `framework`, and in `bytes` the most
  that the framework ever had in use). Timelines that have none are judged by their samples alone;
- what was refused, whether or not the program caught the error: an unmet need of what could not be returned at that
  time, and of what was asked for on top.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from memguard._base.types import Device, Event, Plan, Sample
from memguard._base.units import GRANULE, is_whole
from memguard._budget import FRAMEWORKS
from memguard._frameworks.specs import SPECS
from memguard._timeline.format import PEAK
from memguard._timeline.refusals import MOST, REGIONS, Refusal, pooled
from memguard._timeline.replay import TimelineOutcome, replay_timeline, unmet_under

NO_PEAK = frozenset(row.name for row in SPECS.values() if not row.tells_peak)
"""Frameworks whose allocators do not say their own peak. Their pools grow only when no idle block fits."""
UNCOUNTED = "uncounted"
"""The kind of an event that names a framework that was imported, and of which nobody knows what it holds."""


@dataclass(frozen=True)
class Need:
    """What one framework needed on one GPU. `sampled` is of the samples, `peak` its allocator's own.

    `cap` is the one that it was recorded under, None if it had none or drew from a common pool. `grown` is what a pool
    of regions grew to; None if it is none, or was as large from its first sample on, as one that was taken at once.
    """

    sampled: int = 0
    in_use: int | None = None
    in_use_at: float | None = None
    held: int | None = None
    cap: int | None = None
    peak: int | None = None
    peak_at: float | None = None
    grown: int | None = None
    refusals: tuple[Refusal, ...] = ()

    @property
    def bytes(self) -> int:
        return max(self.sampled, self.peak or 0, *(refusal.need for refusal in self.refusals), 0)

    def least(self, framework: str) -> int:
        """No limit should be below it, whatever the headroom: samples miss what came and went between two of them.

        Of an allocator that does not say its peak it is what its pool came to hold. That was never too little, and
        idle blocks that fit are used before it grows. So it is for a pool of regions: what is free in several of them
        serves no request that fits into none, however little is in use. It gets one step more, as JAX's limit is a
        fraction in single precision, up to some hundred bytes below the cap: too little for a last region of 2^n bytes.
        A cap that the pool filled was enough as it is.
        """
        if framework in REGIONS:
            if self.grown is None:
                return 0
            return max(self.grown, min(self.grown + GRANULE, self.cap or self.grown + GRANULE))
        return (self.held or 0) if framework in NO_PEAK and self.peak is None else 0

    @property
    def source(self) -> str:
        """What decided: `refused`, `allocator` or `samples`."""
        if self.bytes > max(self.sampled, self.peak or 0):
            return "refused"
        return "allocator" if self.peak is not None and self.peak >= self.sampled else "samples"

    @property
    def requests(self) -> int:
        return sum(refusal.times for refusal in self.refusals)


@dataclass(frozen=True)
class Run:
    """One process, from one timeline. `needs` is by UUID and framework.

    `outside` and `process` are by UUID: the most bytes outside all frameworks, and the most of the process by NVML.
    `begin` and `end` are the first and the last sample's, as of `time.time()`. `options` are those of its plan,
    `declared` the frameworks that it caps, and `versions` those that its timeline names.
    """

    file: str
    run: str
    rank: int | None
    simulated: bool
    begin: float
    end: float
    samples: int
    devices: Mapping[str, Device]
    needs: Mapping[tuple[str, str], Need]
    outside: Mapping[str, int]
    process: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    declared: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def used(self) -> tuple[str, ...]:
        """The UUIDs of the GPUs on which a framework of the run needed anything."""
        return tuple(dict.fromkeys(uuid for uuid, _ in self.needs))

    def without_refusals(self) -> Run:
        """The run as if nothing had been refused."""
        needs = {key: replace(need, refusals=()) for key, need in self.needs.items()}
        return replace(self, needs={key: need for key, need in needs.items() if need.bytes})


def observe(
    records: Iterable[object], plan: Plan, *, file: str, run: str, rank: int | None = None, simulated: bool = False
) -> Run:
    """The figures of one run, in memory that does not depend on its length."""
    return replayed(records, plan, file=file, run=run, rank=rank, simulated=simulated)[0]


def replayed(
    records: Iterable[object], plan: Plan, *, file: str, run: str, rank: int | None = None, simulated: bool = False
) -> tuple[Run, TimelineOutcome]:
    """The same, and the replay under the caps of the recording that they are from."""
    watch = _Watch(plan)
    outcome = replay_timeline(watch.passing(records), plan, recorded=True, unmet=watch.unmet)
    needs: dict[tuple[str, str], Need] = {}
    others: dict[str, None] = {}
    for row in outcome.frameworks:
        if row.framework not in FRAMEWORKS:
            others.setdefault(row.framework)
        elif row.peak_held or row.peak_in_use:
            at = watch.most.get((row.uuid, row.framework))
            needs[row.uuid, row.framework] = Need(
                max(row.needs, 1),
                row.peak_in_use,
                at[1] if at is not None else None,
                row.peak_held,
                None if row.uuid in watch.pooled else row.cap,
                grown=watch.grown(row.uuid, row.framework),
            )
    for key, (time, size) in watch.peaks.items():
        needs[key] = replace(needs.get(key, Need()), peak=size, peak_at=time)
    for key, refusals in watch.unmet.found().items():
        needs[key] = replace(needs.get(key, Need()), refusals=refusals)
    notes = [f"{name} cannot be named in a budget: what it held is not in this one" for name in others]
    notes += watch.notes()
    if watch.pooled:
        notes.append("its frameworks drew from one pool (strategy: pool): this budget gives each a limit of its own")
    devices = {part.device.uuid: part.device for part in plan.devices}
    declared = tuple(dict.fromkeys(name for part in plan.devices for name in part.caps if name in FRAMEWORKS))
    found = Run(
        file=file,
        run=run,
        rank=rank,
        simulated=simulated,
        begin=outcome.begin,
        end=outcome.end,
        samples=outcome.samples,
        devices=devices,
        needs={key: needs[key] for key in sorted(needs) if needs[key].bytes},
        outside={gpu.uuid: gpu.outside for gpu in outcome.devices},
        process={gpu.uuid: gpu.peak_process for gpu in outcome.devices if gpu.peak_process is not None},
        options=plan.options,
        declared=declared,
        notes=tuple(notes),
    )
    return found, outcome


class _Watch:
    """What `replay_timeline` does not keep, while it reads the records."""

    def __init__(self, plan: Plan) -> None:
        self.unmet = unmet_under(plan)
        self.pooled = pooled(plan)
        self.most: dict[tuple[str, str], tuple[int, float]] = {}
        self._pools: dict[tuple[str, str], tuple[int, int]] = {}  # at first, and at most
        self.peaks: dict[tuple[str, str], tuple[float, int]] = {}
        self._known = {part.device.uuid for part in plan.devices}
        self._uncounted: dict[str, None] = {}

    def passing(self, records: Iterable[object]) -> Iterator[object]:
        for record in records:
            if isinstance(record, Sample):
                self._sample(record)
            elif isinstance(record, Event) and record.kind == PEAK:
                self._peak(record)
            elif isinstance(record, Event) and record.kind == UNCOUNTED and record.framework in FRAMEWORKS:
                self._uncounted.setdefault(str(record.framework))
            yield record

    def notes(self) -> Iterator[str]:
        for name, count in self.unmet.elsewhere.items():
            times = "once" if count == 1 else f"{count:,} times"
            yield f"{name} ran out of GPU memory {times}: it has no cap, and that is not in these figures"
        for name in self._uncounted:
            yield f"{name} was imported, and counts nothing without a budget: record again under one that names it"
        if self.unmet.cut:
            yield f"of its refused requests the {MOST:,} largest were kept for each framework"

    def grown(self, uuid: str, name: str) -> int | None:
        """What the framework's pool of regions grew to while samples were taken; None if it did not."""
        first, most = self._pools.get((uuid, name), (0, 0))
        return most if most > first and uuid not in self.pooled else None

    def _sample(self, sample: Sample) -> None:
        for device in sample.devices:
            if device.uuid not in self._known:
                continue
            for name, usage in device.frameworks.items():
                size = usage.in_use if usage.in_use is not None else usage.held
                if size is not None and size > self.most.get((device.uuid, name), (0, 0.0))[0]:
                    self.most[device.uuid, name] = size, sample.time
                if name in REGIONS and usage.held:
                    first, most = self._pools.get((device.uuid, name), (usage.held, 0))
                    self._pools[device.uuid, name] = first, max(most, usage.held)

    def _peak(self, event: Event) -> None:
        key = self.unmet.key(event.framework, event.uuid)
        if key is not None and is_whole(event.bytes) and event.bytes > self.peaks.get(key, (0.0, 0))[1]:
            self.peaks[key] = event.time, event.bytes

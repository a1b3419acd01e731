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
from datetime import datetime
from typing import Any

from memguard._config import FRAMEWORKS
from memguard._monitor.peaks import PEAK
from memguard._specs import NEVER_GIVE_BACK
from memguard._suggest.refusals import Refusal, Reported, once
from memguard._timeline import Oom
from memguard._timeline.replay import TimelineOutcome, replay_timeline
from memguard._types import Device, DevicePlan, Event, FrameworkSample, Plan, Sample
from memguard._units import is_whole

UNCOUNTED = "uncounted"
"""The kind of an event that names a framework that was imported, and of which nobody knows what it holds."""
_MOST = 1000
"""Refusals that are kept of one run, those with the largest needs."""


@dataclass(frozen=True)
class Need:
    """What one framework needed on one GPU. `sampled` is of the samples, `peak` its allocator's own.

    `cap` is the one that it was recorded under, None if it had none or drew from a common pool.
    """

    sampled: int = 0
    in_use: int | None = None
    in_use_at: float | None = None
    held: int | None = None
    cap: int | None = None
    peak: int | None = None
    peak_at: float | None = None
    refusals: tuple[Refusal, ...] = ()

    @property
    def bytes(self) -> int:
        return max(self.sampled, self.peak or 0, *(refusal.need for refusal in self.refusals), 0)

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
    outcome = replay_timeline(watch.passing(records), plan, recorded=True)
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
            )
    for key, (time, size) in watch.peaks.items():
        needs[key] = replace(needs.get(key, Need()), peak=size, peak_at=time)
    for key, events in watch.refused.items():
        refusals = once(events, watch.reported[key])
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
        self._plan = plan
        self._known = {part.device.uuid for part in plan.devices}
        self._first = plan.devices[0].device.uuid if plan.devices else None
        self._last: Sample | None = None
        self.most: dict[tuple[str, str], tuple[int, float]] = {}
        self.peaks: dict[tuple[str, str], tuple[float, int]] = {}
        self.refused: dict[tuple[str, str], list[Refusal]] = {}
        self.reported: dict[tuple[str, str], list[Reported]] = {}
        self._caps: dict[tuple[str, str], int | None] = {}
        self.pooled = {part.device.uuid for part in plan.devices if _one_pool(part)}
        self._elsewhere: dict[str, int] = {}
        self._uncounted: dict[str, None] = {}
        self._cut = False

    def passing(self, records: Iterable[object]) -> Iterator[object]:
        for record in records:
            if isinstance(record, Sample):
                self._sample(record)
            elif isinstance(record, Oom):
                self._oom(record)
            elif isinstance(record, Event) and record.kind == "refused":
                self._event(record)
            elif isinstance(record, Event) and record.kind == PEAK:
                self._peak(record)
            elif isinstance(record, Event) and record.kind == UNCOUNTED and record.framework in FRAMEWORKS:
                self._uncounted.setdefault(str(record.framework))
            yield record

    def notes(self) -> Iterator[str]:
        for name, count in self._elsewhere.items():
            times = "once" if count == 1 else f"{count:,} times"
            yield f"{name} ran out of GPU memory {times}: it has no cap, and that is not in these figures"
        for name in self._uncounted:
            yield f"{name} was imported, and counts nothing without a budget: record again under one that names it"
        if self._cut:
            yield f"of its refused requests the {_MOST:,} largest were kept for each framework"

    def _sample(self, sample: Sample) -> None:
        self._last = sample
        for device in sample.devices:
            if device.uuid not in self._known:
                continue
            for name, usage in device.frameworks.items():
                self._caps[device.uuid, name] = usage.cap
                size = usage.in_use if usage.in_use is not None else usage.held
                if size is not None and size > self.most.get((device.uuid, name), (0, 0.0))[0]:
                    self.most[device.uuid, name] = size, sample.time

    def _peak(self, event: Event) -> None:
        key = self._key(event.framework, event.uuid)
        if key is not None and is_whole(event.bytes) and event.bytes > self.peaks.get(key, (0.0, 0))[1]:
            self.peaks[key] = event.time, event.bytes

    def _event(self, event: Event) -> None:
        key = self._key(event.framework, event.uuid)
        if key is not None:
            asked = event.bytes if is_whole(event.bytes) else None
            held, cap, free = self._before(key)
            times = event.times if is_whole(event.times) and event.times else 1
            self._add(key, self._refusal(key, event.time, asked, held, cap, free, times))

    def _oom(self, record: Oom) -> None:
        report = record.report
        if report.get("memory", "gpu") != "gpu":
            return
        who = report.get("requester")
        key = self._key(who, report.get("uuid"))
        if key is None:
            if isinstance(who, str):
                name = who if len(who) <= 40 else who[:37] + "..."
                self._elsewhere[name] = self._elsewhere.get(name, 0) + 1
            return
        moment = report.get("moment")
        if not isinstance(moment, Mapping):
            moment = {}
        asked = _whole(moment.get("requested"))
        asked = _whole(report.get("requested")) if asked is None else asked
        held, cap, free = self._before(key)
        then, reclaimable, in_use = (_whole(moment.get(name)) for name in ("held", "reclaimable", "in_use"))
        if in_use is not None or then is not None:
            held = in_use if in_use is not None else then
            if then is not None and reclaimable is not None and key[1] not in NEVER_GIVE_BACK:
                held = max(then - reclaimable, held or 0)
        # A figure of the moment is better than the last sample's.
        of_then = _whole(moment.get("cap")), _whole(moment.get("free"))
        cap, free = (now if then is None else then for then, now in zip(of_then, (cap, free), strict=True))
        counted = moment.get("source") in ("refusal", "observer")  # by an event
        when = _time(moment.get("time")) if counted else None
        refusal = self._refusal(key, record.time, asked, held, cap, free, 0 if counted else 1)
        self._add(key, Reported(refusal, when, then is not None or in_use is not None))

    def _refusal(
        self,
        key: tuple[str, str],
        time: float,
        asked: int | None,
        held: int | None,
        cap: int | None,
        free: int | None,
        times: int,
    ) -> Refusal:
        need = (held or 0) + (asked or 0)
        if key[0] in self.pooled:
            cap = None  # what refused it was the sum of all that draw from the pool
        full = cap is not None and asked is not None and need <= cap and free is not None and free < asked
        return Refusal(time, asked, held, cap, times, full)

    def _add(self, key: tuple[str, str], one: Refusal | Reported) -> None:
        refused, reported = self.refused.setdefault(key, []), self.reported.setdefault(key, [])
        if isinstance(one, Refusal):
            refused.append(one)
            if len(refused) > 2 * _MOST:
                refused.sort(key=lambda refusal: refusal.need, reverse=True)
                del refused[_MOST:]
                self._cut = True
            return
        reported.append(one)
        if len(reported) > 2 * _MOST:
            reported.sort(key=lambda report: report.refusal.need, reverse=True)
            del reported[_MOST:]
            self._cut = True

    def _before(self, key: tuple[str, str]) -> tuple[int | None, int | None, int | None]:
        """Of the last sample: what the framework could not return, its cap, and what the GPU had free."""
        uuid, name = key
        device = next((one for one in self._last.devices if one.uuid == uuid), None) if self._last is not None else None
        usage: FrameworkSample | None = None if device is None else device.frameworks.get(name)
        plans = (part.caps.get(name) for part in self._plan.devices if part.device.uuid == uuid)
        cap = self._caps[key] if key in self._caps else next(plans, None)
        if device is None or usage is None or self._last is None:
            return None, cap, None if device is None else device.free
        alone = device._replace(frameworks={name: usage})
        rows = replay_timeline([Sample(self._last.time, (alone,))], self._plan).frameworks
        return next((row.needs for row in rows if row.framework == name), None), cap, device.free

    def _key(self, name: object, uuid: object) -> tuple[str, str] | None:
        if uuid is None:
            uuid = self._first
        if name not in FRAMEWORKS or not isinstance(name, str) or uuid not in self._known:
            return None
        return str(uuid), name


def _one_pool(part: DevicePlan) -> bool:
    """Whether frameworks have one cap together. Older timelines do not name them; that cap counts once in the sum."""
    return bool(part.joined) or sum(part.caps.values()) + part.unallocated + part.reserve > part.limit


def _time(value: object) -> float | None:
    """As of `time.time()`, of what a report has."""
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except (ValueError, OverflowError, OSError):
        return None


def _whole(value: object) -> int | None:
    return value if is_whole(value) else None

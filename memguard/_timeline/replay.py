"""Replays a timeline under another budget: finds frameworks that exceed their caps, and the smallest budget that fits.

A sample shows an allocator's memory under the caps of the recording. Under a smaller cap the allocator would first have
trimmed its idle memory, so the replay compares the cap with a framework's unreclaimable memory:

- `refused`: the live arrays alone exceed the cap, so the allocator would have refused a request.
- `fragments`: the live arrays fit under the cap, but the memory blocks that contain them do not. The allocator would
  have refused a request unless the arrays were in fewer blocks.
- `cache`: held memory exceeds the cap only by idle memory, which would have been trimmed. No request is refused.

Samples do not show memory that was allocated and freed between two samples; the peaks of frameworks whose allocators
report peaks do. Samples also do not show requests that were refused during the recording. The replay counts such a
request separately, as an unmet need: a cap below the need refuses the request again. The module does no I/O.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

from memguard._base.types import DevicePlan, DeviceSample, Event, FrameworkSample, Plan, Sample
from memguard._base.units import GRANULE, MIB, format_size, round_up
from memguard._budget import FRAMEWORKS
from memguard._frameworks.specs import NEVER_GIVE_BACK, SPECS
from memguard._ledger.types import EXCHANGE
from memguard._timeline import Oom
from memguard._timeline.format import PEAK
from memguard._timeline.refusals import Refusal, RefusalCollector, is_counted, times_of

_WIDTH = 80


@dataclass(frozen=True)
class Above:
    """How often and by how much a figure exceeded its bound. `first` is the time of the first sample above the bound,
    as of `time.time()`; `most` is the largest excess in bytes.

    `times` is the number of rises from within the bound to above it, `samples` the number of samples above the bound.
    """

    first: float | None = None
    times: int = 0
    samples: int = 0
    most: int = 0


@dataclass(frozen=True)
class TimelineFramework:
    """The result for one framework on one GPU, in bytes. `cap` is None if the budget does not name the framework.
    `needs` is the smallest cap under which no sample counts as `refused` or `fragments`.

    `requests` is the number of requests refused during the recording, and `unmet` is their largest need. `again` is
    True if the cap would refuse such a request again, else None. `peak` is the allocator's own peak of bytes in use;
    None if the allocator does not report it.
    """

    framework: str
    device: int
    uuid: str
    cap: int | None
    peak_held: int | None
    peak_in_use: int | None
    needs: int
    refused: Above
    fragments: Above
    cache: Above
    requests: int = 0
    again: bool | None = None
    unmet: int = 0
    peak: int | None = None

    @property
    def least(self) -> int:
        """The smallest cap under which the replay finds no refused request."""
        return max(self.needs, self.peak or 0, self.unmet)

    @property
    def times(self) -> str:
        """The number of refusals under the cap, as text; `?` if unknown."""
        if self.requests and self.again:
            return str(max(self.requests, self.refused.times))
        return str(self.refused.times or "?") if self.requests else str(self.refused.times)


@dataclass(frozen=True)
class TimelineDevice:
    """The result for one GPU. `overhead` counts samples whose overhead exceeds the reserve; `outside` is the largest
    number of this process's bytes outside all frameworks.

    `together` counts samples in which the needs of the elastic frameworks above their minima add up to more than the
    memory that remains after the reserve, the fixed caps and all minima.
    """

    device: int
    uuid: str
    name: str
    limit: int
    reserve: int
    peak_process: int | None
    outside: int
    overhead: Above
    together: Above = Above()


@dataclass(frozen=True)
class SmallestBudget:
    """The smallest budget that fits. Sizes are bytes, in multiples of 2 MiB. `reserve` is None if no memory outside
    frameworks was measured."""

    limits: Mapping[str, int]
    reserve: int | None
    problem: str | None = None
    """The reason why no budget fits, for example because frameworks peaked on different GPUs and a budget has the same
    limits for each GPU. None if the budget fits."""

    def yaml(self) -> str:
        """A budget file that `memguard check` accepts."""
        lines = ["# the smallest budget that fits what was recorded; leave room for what was not", "version: 1"]
        if self.reserve is None:
            lines.append("device: {reserve: auto} # none was measured")
        else:
            limit = self.reserve + sum(self.limits.values())
            lines.append(f"device: {{limit: {limit // MIB}MiB, reserve: {self.reserve // MIB}MiB}}")
        lines.append("frameworks:")
        lines += [f"  {name}: {budget_entry(size, {})}" for name, size in self.limits.items()]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class TimelineOutcome:
    """The result of a replay. `recorded` is True if the replay used the caps of the recording."""

    samples: int
    begin: float
    end: float
    simulated: bool
    recorded: bool
    devices: tuple[TimelineDevice, ...]
    frameworks: tuple[TimelineFramework, ...]
    smallest: SmallestBudget | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """True if the replay finds no refused request, with arrays in their recorded blocks (see `fragments`)."""
        return not any(
            row.refused.times or row.fragments.times or (row.requests and row.again) for row in self.frameworks
        ) and not any(gpu.together.times for gpu in self.devices)

    def as_dict(self) -> dict[str, Any]:
        """The outcome as JSON types."""
        plain = {"memguard_replay": 1, "fits": self.fits, **asdict(self)}
        if self.smallest is not None:
            plain["smallest"]["yaml"] = self.smallest.yaml()
        return plain

    def render(self) -> str:
        """Plain text of at most 80 columns."""
        caps = "the caps it was recorded with" if self.recorded else "the budget's caps"
        mark = " (simulated GPUs)" if self.simulated else ""
        span = f"{self.samples:,} sample{'' if self.samples == 1 else 's'} over {_span(self.end - self.begin)}"
        lines = [*_wrap(f"replay of {span}{mark}, under {caps}"), ""]
        lines.append(f"{'framework':<12}{'GPU':>4}{'cap':>12}{'peak held':>13}{'peak in use':>13}{'refused':>9}")
        lines[-1] += f"{'tight':>7}{'cache':>7}"
        for row in self.frameworks:
            cap = "none" if row.cap is None else format_size(row.cap)
            in_use = max((size for size in (row.peak_in_use, row.peak) if size is not None), default=None)
            sizes = f"{cap:>12}{format_size(row.peak_held):>13}{format_size(in_use):>13}"
            counts = f"{row.times:>9}{row.fragments.times:>7}{row.cache.times:>7}"
            lines.append(f"{row.framework[:12]:<12}{row.device:>4}{sizes}{counts}")
        lines.append("")
        for gpu in self.devices:
            peak = f"process peak {format_size(gpu.peak_process)} of its limit of {format_size(gpu.limit)}"
            peak += f", at most {format_size(gpu.outside)} outside frameworks"
            lines += _wrap(f"GPU {gpu.device} {gpu.name}: {peak}")
            if gpu.overhead.times:
                lines += _wrap(f"GPU {gpu.device}: {self._above('overhead is above the reserve', gpu.overhead)}")
            if gpu.together.times:
                what = "elastic frameworks would together have needed more than there is for them"
                lines += _wrap(f"GPU {gpu.device}: {self._above(what, gpu.together)}")
        for row in self.frameworks:
            for what, above in _REFUSALS.items():
                if (found := getattr(row, above)).times:
                    lines += _wrap(f"{row.framework} on GPU {row.device} {self._above(what, found)}")
        for note in self.notes:
            lines += _wrap(f"note: {note}")
        if self.smallest is not None and self.smallest.problem is None:
            lines += ["", self.smallest.yaml().rstrip()]
        elif self.smallest is not None:
            lines += _wrap(f"note: {self.smallest.problem}")
        return "\n".join(lines)

    def _above(self, what: str, above: Above) -> str:
        assert above.first is not None
        when = datetime.fromtimestamp(above.first, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        times = "once" if above.times == 1 else f"{above.times:,} times"
        at = f"{_span(above.first - self.begin)} after the start ({when})"
        return f"{what} {times}, first {at}, by {format_size(above.most)} at the most"


_REFUSALS = {
    "would have been refused": "refused",
    "would have been refused unless its arrays lay closer": "fragments",
    "would have had to give back idle cache": "cache",
}


def replay_timeline(
    records: Iterable[object],
    plan: Plan,
    *,
    recorded: bool = False,
    simulated: bool = False,
    unmet: RefusalCollector | None = None,
) -> TimelineOutcome:
    """Compare each sample of a timeline's `records` with the caps of `plan`, in constant memory.

    `recorded`: `plan` is the plan in the timeline's header. For other plans pass `unmet_under(header.plan)` as `unmet`.
    """
    run = _Run(plan, unmet_under(plan) if unmet is None else unmet)
    for record in records:
        if isinstance(record, Sample):
            run.sample(record)
        elif isinstance(record, Oom):
            run.oom(record)
        elif isinstance(record, Event) and record.kind == "refused":
            run.unmet.event(record)
            run.refused(record.framework, record.uuid, times_of(record.times))
        elif isinstance(record, Event) and record.kind == PEAK:
            run.peak(record)
    return run.outcome(simulated, recorded)


def unmet_under(plan: Plan) -> RefusalCollector:
    """A collector of the requests refused during a recording under this plan."""
    return RefusalCollector(plan, _pinned)


def _pinned(name: str, usage: FrameworkSample) -> int:
    """The framework's unreclaimable bytes in a sample."""
    return _Cell(name, None).see(0.0, usage)


class _Count:
    """Accumulates, sample by sample, how often and by how much one figure exceeds its bound (`Above`)."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.now, self.times, self.samples, self.most = False, 0, 0, 0

    def see(self, time: float, by: int) -> None:
        """Count one sample whose figure is `by` bytes above the bound; if `by` is at most 0, it is within the bound."""
        if by > 0:
            self.samples += 1
            self.times += not self.now
            self.first = time if self.first is None else self.first
            self.most = max(self.most, by)
        self.now = by > 0

    def at_least(self, time: float, by: int) -> None:
        """Count an excess of `by` bytes at or before `time`, unless an earlier excess is at least as large."""
        if by > self.most:
            self.most, self.times = by, max(self.times, 1)
            self.first = time if self.first is None else self.first

    def done(self) -> Above:
        return Above(self.first, self.times, self.samples, self.most)


class _Cell:
    """The state of the replay for one framework on one GPU."""

    def __init__(self, name: str, cap: int | None) -> None:
        # `pool`: the framework's pool never shrinks, so its held bytes do not show the need under a smaller cap.
        self.cap, self.pool = cap, name in NEVER_GIVE_BACK
        self.held: int | None = None
        self.in_use: int | None = None
        self.peak: int | None = None  # the allocator's own peak of bytes in use
        self.needs, self.silent = 0, False
        self.requests = 0
        self.refused, self.fragments, self.cache = _Count(), _Count(), _Count()

    def see(self, time: float, usage: FrameworkSample) -> int:
        """Count one sample. Returns the framework's unreclaimable bytes in the sample."""
        held, in_use, reclaimable, _ = usage
        if held is None:
            self.silent = True
        elif self.held is None or held > self.held:
            self.held = held
        if in_use is None:
            if held is None:
                return 0
            live = pinned = held - (reclaimable or 0)  # an upper bound: the allocator does not report live arrays
        else:
            if self.in_use is None or in_use > self.in_use:
                self.in_use = in_use
            live = pinned = in_use
            if held is not None and reclaimable is not None and not self.pool:
                pinned = max(held - reclaimable, in_use)
        if pinned > self.needs:
            self.needs = pinned
        if (cap := self.cap) is not None:  # live <= pinned: count a sample only as its most severe case
            self.refused.see(time, live - cap)
            self.fragments.see(time, pinned - cap if live <= cap else 0)
            self.cache.see(time, held - cap if held is not None and pinned <= cap else 0)
        return pinned


class _Gpu:
    """The state of the replay for one GPU."""

    def __init__(self, index: int, part: DevicePlan) -> None:
        self.index, self.part = index, part
        self.cells: dict[str, _Cell] = {}
        self.process: int | None = None
        self.outside = 0
        self.above, self.together = _Count(), _Count()
        self.least = {name: part.elastic.get(name, (cap, 0))[0] for name, cap in part.caps.items()}
        self.spare = part.limit - part.reserve - sum(self.least.values())

    def see(self, time: float, device: DeviceSample) -> None:
        if device.process is not None and (self.process is None or device.process > self.process):
            self.process = device.process
        outside = overhead = device.overhead
        known = True
        more = 0  # the sum of the elastic frameworks' needs above their minima
        for name, usage in device.frameworks.items():
            if name == EXCHANGE:  # memory held for other processes is outside all frameworks
                outside += usage.held or 0
                continue
            needed = self.cell(name).see(time, usage)
            if name in self.part.elastic:
                more += max(needed - self.least[name], 0)
            known = known and usage.held is not None
        if known and device.unaccounted is not None and device.unaccounted > 0:
            outside += device.unaccounted  # if not `known`, `unaccounted` may include bytes of a framework
        self.outside = max(self.outside, outside)
        self.together.see(time, more - self.spare)
        self.above.see(time, overhead - self.part.reserve)

    def cell(self, name: str) -> _Cell:
        if name not in self.cells:
            cap = self.part.caps.get(name)
            if name in self.part.elastic:  # the highest cap while the other frameworks hold at most their minima
                least, most = self.part.elastic[name]
                cap = min(most, least + self.spare)
            self.cells[name] = _Cell(name, cap)
        return self.cells[name]


class _Run:
    def __init__(self, plan: Plan, unmet: RefusalCollector) -> None:
        self.unmet = unmet
        self.gpus = {part.device.uuid: _Gpu(index, part) for index, part in enumerate(plan.devices)}
        self.samples, self.ooms = 0, 0
        self.begin = self.end = 0.0
        self.others: set[str] = set()

    def oom(self, record: Oom) -> None:
        """Process an out-of-memory report. Counts its request, unless an event counts it."""
        self.unmet.oom(record)
        report = record.report
        if report.get("memory", "gpu") == "gpu" and not is_counted(report):
            self.refused(report.get("requester"), report.get("uuid"), 1)

    def refused(self, name: object, uuid: object, count: int) -> None:
        self.ooms += count
        gpu = self.gpus.get(uuid) if isinstance(uuid, str) else next(iter(self.gpus.values()), None)
        if gpu is not None and isinstance(name, str) and (name in gpu.part.caps or name in gpu.cells):
            gpu.cell(name).requests += count

    def peak(self, event: Event) -> None:
        """Process an event with the peak that an allocator reports."""
        key, size = self.unmet.key(event.framework, event.uuid), event.bytes
        gpu = None if key is None else self.gpus.get(key[0])
        if key is None or gpu is None or size is None:
            return
        cell = gpu.cell(key[1])
        if cell.peak is None or size > cell.peak:
            cell.peak = size
            if cell.cap is not None and size > cell.cap:
                cell.refused.at_least(event.time, size - cell.cap)

    def sample(self, sample: Sample) -> None:
        time = sample.time
        self.unmet.last = sample
        self.begin = min(self.begin, time) if self.samples else time
        self.end = max(self.end, time)
        self.samples += 1
        for device in sample.devices:
            gpu = self.gpus.get(device.uuid)
            if gpu is not None:
                gpu.see(time, device)
            else:
                self.others.add(device.uuid)

    def outcome(self, simulated: bool, recorded: bool) -> TimelineOutcome:
        for uuid, name in (refused := self.unmet.found()):
            if (gpu := self.gpus.get(uuid)) is not None:
                gpu.cell(name)
        rows = [
            self._row(gpu, name, cell, recorded, refused.get((uuid, name), ()))
            for uuid, gpu in self.gpus.items()
            for name, cell in gpu.cells.items()
        ]
        devices = [
            TimelineDevice(
                gpu.index,
                uuid,
                gpu.part.device.name,
                gpu.part.limit,
                gpu.part.reserve,
                gpu.process,
                gpu.outside,
                gpu.above.done(),
                gpu.together.done(),
            )
            for uuid, gpu in self.gpus.items()
        ]
        notes = tuple(self._notes(rows))
        smallest = _smallest(rows, [gpu for gpu in self.gpus.values() if gpu.cells])
        span = (self.samples, self.begin, self.end)
        return TimelineOutcome(*span, simulated, recorded, tuple(devices), tuple(rows), smallest, notes)

    @staticmethod
    def _row(gpu: _Gpu, name: str, cell: _Cell, recorded: bool, refusals: Sequence[Refusal]) -> TimelineFramework:
        above = (cell.refused.done(), cell.fragments.done(), cell.cache.done())
        uuid = gpu.part.device.uuid
        unmet = max((refusal.need for refusal in refusals), default=0)
        again = None
        if cell.requests and cell.cap is not None and (recorded or unmet > cell.cap):
            again = True
        figures = cell.cap, cell.held, cell.in_use, cell.needs
        return TimelineFramework(name, gpu.index, uuid, *figures, *above, cell.requests, again, unmet, cell.peak)

    def _notes(self, rows: Sequence[TimelineFramework]) -> Iterable[str]:
        if any(row.refused.times or row.fragments.times for row in rows):
            yield "after the first refusal the program would have behaved differently; the figures are as recorded"
        if self.ooms:
            times = "once" if self.ooms == 1 else f"{self.ooms:,} times"
            counts = {row.framework: 0 for row in rows if row.requests}
            for row in rows:
                counts[row.framework] = counts.get(row.framework, 0) + row.requests
            each = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
            who = f" ({each})" if self.ooms > 1 and each else ""
            yield f"memory was refused {times} during the recording{who}: the peaks do not include what was refused"
        requesters = {row.framework for row in rows if row.requests}
        for name in dict.fromkeys(row.framework for row in rows if row.peak_held or row.peak_in_use):
            if name in SPECS and SPECS[name].refuses_silently and name not in requesters:
                yield f"{name} tells nobody what it refused: if the program caught the error, it is not counted"
        cells = [(name, cell) for gpu in self.gpus.values() for name, cell in gpu.cells.items()]
        for name in dict.fromkeys(name for name, cell in cells if cell.silent):
            yield f"{name} does not always say what it holds: it is judged by its live arrays"
        for name in dict.fromkeys(row.framework for row in rows if row.cap is None):
            yield f"the budget does not name {name}, so it would have had no cap"
        elastic = dict.fromkeys(name for gpu in self.gpus.values() for name in gpu.cells if name in gpu.part.elastic)
        if elastic:
            yield f"{' and '.join(elastic)} could take what is spare: the cap is the most that it could rise to"
        if self.others:
            yield f"GPUs that are not in the budget's plan are left out: {', '.join(sorted(self.others))}"


def _smallest(rows: Sequence[TimelineFramework], gpus: Sequence[_Gpu]) -> SmallestBudget | None:
    needs: dict[str, int] = {}
    for row in rows:
        if row.framework in FRAMEWORKS and (row.peak_held or row.peak_in_use or row.least):
            needs[row.framework] = max(needs.get(row.framework, 0), with_headroom(row.least))
    if not needs:
        return None
    outside = max((gpu.outside for gpu in gpus), default=0)
    reserve = round_up(outside) if outside else None
    limit = (reserve or 0) + sum(needs.values())
    problem = None
    for gpu in gpus:
        if limit > gpu.part.device.usable:
            problem = (
                f"it does not fit GPU {gpu.index}, which has {format_size(gpu.part.device.usable)}: a budget gives a "
                "framework as much on every GPU, and they peaked on different ones; use several processes"
                if len(gpus) > 1
                else f"it does not fit GPU {gpu.index}: {format_size(limit)} of {format_size(gpu.part.device.usable)}"
            )
            break
    return SmallestBudget(dict(sorted(needs.items(), key=lambda item: -item[1])), reserve, problem)


def with_headroom(need: int, headroom: Fraction = Fraction(0)) -> int:
    """The need plus the fraction `headroom` of it, rounded up to a multiple of 2 MiB, at least 2 MiB."""
    return max(round_up(-(-need * (1 + headroom) // 1)), GRANULE)


def budget_entry(limit: int, options: Mapping[str, Any]) -> str:
    """A framework's entry in a budget file, such as `{limit: 512MiB, growth: false}`."""
    more = "".join(f", {key}: {str(value).lower()}" for key, value in options.items())
    return f"{{limit: {limit // MIB}MiB{more}}}"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="    ")

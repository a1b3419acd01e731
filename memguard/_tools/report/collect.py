"""Reads a timeline once and makes a `Run` of it, in memory that does not depend on its length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from memguard._base.types import DevicePlan, DeviceSample, Event, FrameworkSample, Sample
from memguard._runtime.timeline_extras import WORKLOAD
from memguard._timeline.format import PEAK
from memguard._timeline.parse import Record
from memguard._timeline.reader import Timeline
from memguard._timeline.replay import TimelineOutcome
from memguard._tools.report import diagnosis, requests
from memguard._tools.report.model import MOST_POINTS, Entry, FrameworkView, GpuView, Line, Moment, Peak, Run, Span
from memguard._tools.report.thinning import Thinner
from memguard._tools.suggest import decide, evidence, recorded

MOST_ENTRIES = 1000
"""Entries that are shown of one run: so many serious ones at most, and so many others as there is room left for."""
_ALL_POINTS = 240_000
"""Points of all series of one page together: a browser draws more of them only slowly."""
_FEWEST_POINTS = 600
MOST_SPANS = 200
"""Workloads that are drawn: the longest ones."""
_GAP = 1.0
"""Seconds between two workloads of one name that are drawn as one."""


def points(series: int) -> int:
    """How many points each of so many series may have."""
    return min(MOST_POINTS, max(_ALL_POINTS // max(series, 1), _FEWEST_POINTS))


def collect(
    timeline: Timeline,
    source: str,
    *,
    processes: bool = False,
    runs: int = 1,
    counted: Callable[[Iterator[Record]], Iterator[Record]] = iter,
) -> Run:
    """Read the timeline. `processes`: also name other processes by PID. `runs` is how many share the page.

    `counted` passes the records through, for whoever shows how far it is. Raises TimelineError at a damaged line.
    """
    plan = timeline.plan
    series = sum(4 + 4 * len(part.caps) for part in plan.devices) * runs
    reading = _Reading(plan.devices, points(series), processes)
    records = reading.watch(counted(timeline.records()))
    return reading.run(timeline, source, *recorded.read(source, timeline, records))


class _Series:
    """One figure, while reading."""

    __slots__ = ("peak", "thin")

    def __init__(self, most: int) -> None:
        self.thin: Thinner[tuple[float, int | None]] = Thinner(most)
        self.peak: Peak | None = None

    def add(self, time: float, value: int | None) -> None:
        if value is None:
            self.thin.add((time, None), None, 1)
            return
        self.thin.add((time, value), value)
        if self.peak is None or value > self.peak.size:
            self.peak = Peak(value, time)

    def line(self) -> Line:
        kept = list(self.thin)
        return Line(tuple(time for time, _ in kept), tuple(value for _, value in kept))


class _Steps:
    """A bound, which rarely changes: only its changes are kept."""

    __slots__ = ("_known", "_last", "_now", "_series")

    def __init__(self, most: int) -> None:
        self._series = _Series(most)
        self._known, self._last = False, 0.0
        self._now: int | None = None

    def see(self, time: float, value: int | None) -> None:
        if not self._known or value != self._now:
            self._series.add(time, value)
        self._known, self._now, self._last = True, value, time

    def line(self) -> Line:
        """With the last time at its end, so that it is drawn to there."""
        line = self._series.line()
        if self._known and line.times[-1] != self._last:
            return Line((*line.times, self._last), (*line.values, self._now))
        return line


class _Cell:
    """One framework on one GPU, while reading."""

    __slots__ = ("cap", "held", "in_use", "own", "seen", "silent")

    def __init__(self, most: int) -> None:
        self.own: Peak | None = None  # of what was in use, as its allocator says
        self.held, self.in_use, self.cap = _Series(most), _Series(most), _Steps(most)
        self.seen = self.silent = False

    def see(self, time: float, usage: FrameworkSample) -> None:
        held, in_use, _, cap = usage
        self.held.add(time, held)
        self.in_use.add(time, in_use)
        self.cap.see(time, cap)
        if held is None:
            self.silent = True

    @property
    def peak_in_use(self) -> Peak | None:
        """The larger one: samples miss what came and went between two of them."""
        sampled, own = self.in_use.peak, self.own
        return own if sampled is None or (own is not None and own.size > sampled.size) else sampled

    def gap(self, time: float) -> None:
        self.held.add(time, None)
        self.in_use.add(time, None)


class _Gpu:
    """One GPU, while reading."""

    def __init__(self, position: int, uuid: str, most: int, part: DevicePlan | None = None) -> None:
        self.position, self.uuid, self._most, self._part = position, uuid, most, part
        self.total = 0 if part is None else part.device.total
        self.cells = {name: _Cell(most) for name in (part.caps if part is not None else ())}
        self.moments: Thinner[Moment] = Thinner(most)
        self.limit = _Steps(most)
        self.process: Peak | None = None

    def see(self, time: float, device: DeviceSample) -> None:
        self.total = device.total
        self.limit.see(time, device.limit)
        cells, frameworks = self.cells, device.frameworks
        for name in frameworks:
            if name not in cells:
                cells[name] = _Cell(self._most)
        held: list[int | None] = []
        in_use: list[int | None] = []
        rank, gaps = 0, 0
        for name, cell in cells.items():
            usage = frameworks.get(name)
            if usage is None:
                cell.gap(time)
                held.append(None)
                in_use.append(None)
                continue
            cell.seen = True
            cell.see(time, usage)
            held.append(usage.held)
            in_use.append(usage.in_use)
            known = usage.held if usage.held is not None else usage.in_use
            if known is None:
                gaps += 1
            else:
                rank += known
        process = device.process
        if process is not None and (self.process is None or process > self.process.size):
            self.process = Peak(process, time)
        moment = Moment(time, tuple(held), tuple(in_use), device.overhead, device.unaccounted, process)
        self.moments.add(moment, rank, gaps)

    def gap(self, time: float) -> None:
        """Nothing is known of this moment: the lines end."""
        for cell in self.cells.values():
            cell.gap(time)
        nothing = (None,) * len(self.cells)
        self.moments.add(Moment(time, nothing, nothing, None, None, None), None, len(self.cells) + 1)

    def view(self, outcome: TimelineOutcome, limits: Mapping[str, int], limit: int | None) -> GpuView:
        asked = {row.framework: row.requests for row in outcome.frameworks if row.uuid == self.uuid}
        frameworks = tuple(
            FrameworkView(
                diagnosis.clean(name),
                cell.held.line(),
                cell.in_use.line(),
                cell.cap.line(),
                cell.held.peak,
                cell.peak_in_use,
                limits.get(name),
                asked.get(name, 0),
                cell.silent,
            )
            for name, cell in self.cells.items()
            if cell.seen
        )
        chosen = [at for at, cell in enumerate(self.cells.values()) if cell.seen]
        moments = tuple(
            row._replace(held=_of(row.held, chosen), in_use=_of(row.in_use, chosen)) for row in self.moments
        )
        device = None if self._part is None else self._part.device
        name = self.uuid if device is None else device.name
        index = None if device is None else device.index
        return GpuView(
            self.position, self.uuid, diagnosis.clean(name), index, self.total, self.limit.line(), moments, frameworks,
            self.process, limit,
        )  # fmt: skip


def _of(sizes: tuple[int | None, ...], chosen: Sequence[int]) -> tuple[int | None, ...]:
    """Those of the frameworks that were seen. A sample from before one was seen first says nothing of it."""
    return tuple(sizes[at] if at < len(sizes) else None for at in chosen)


def _longest(spans: Sequence[Span]) -> list[Span]:
    return sorted(spans, key=lambda span: span.begin - (span.end or span.begin))[:MOST_SPANS]


class _Reading:
    def __init__(self, devices: tuple[DevicePlan, ...], most: int, processes: bool) -> None:
        self._most, self._processes = most, processes
        self._gpus = {
            part.device.uuid: _Gpu(position, part.device.uuid, most, part) for position, part in enumerate(devices)
        }
        self._begin = self._end = 0.0
        self._counts: dict[str, int] = {}
        self._serious: list[Entry] = []
        self._others: list[Entry] = []
        self._spans: list[Span] = []  # suspensions
        self._loops: dict[tuple[str, str | None], Span] = {}  # workloads, by name and framework: the last one of each
        self._over: list[Span] = []
        self._requests: dict[int, requests.Refused] = {}

    def watch(self, records: Iterator[Record]) -> Iterator[Record]:
        """The records as they are, each of them seen."""
        for number, record in enumerate(records, 1):
            if number == 1:
                self._begin = self._end = record.time
            elif record.time > self._end:
                self._end = record.time
            elif record.time < self._begin:
                self._begin = record.time
            if isinstance(record, Sample):
                self._sample(record)
            elif isinstance(record, Event):
                self._event(record)
            else:
                self._entry(diagnosis.of_oom(record, self._processes), requests.of_oom(record))
            yield record

    def _sample(self, sample: Sample) -> None:
        for device in sample.devices:
            gpu = self._gpus.get(device.uuid)
            if gpu is None:
                gpu = self._gpus[device.uuid] = _Gpu(len(self._gpus), device.uuid, self._most)
            gpu.see(sample.time, device)

    def _event(self, event: Event) -> None:
        if event.kind == PEAK:
            self._peak(event)
            return
        self._entry(diagnosis.of_event(event, self._processes), requests.of_event(event))
        if event.kind == "suspended":
            for gpu in self._gpus.values():
                gpu.gap(event.time)
            if len(self._spans) < MOST_ENTRIES:
                self._spans.append(Span(event.time, None, "suspended", "suspended", None))
        elif event.kind == "resumed" and self._spans and self._spans[-1].end is None:
            self._spans[-1] = self._spans[-1]._replace(end=event.time)
        elif event.kind == WORKLOAD and event.seconds is not None:
            begin = event.time - max(event.seconds, 0.0)
            who = None if event.framework is None else diagnosis.clean(event.framework)
            self._workload(Span(begin, event.time, "workload", diagnosis.clean(event.text), who))

    def _peak(self, event: Event) -> None:
        """A figure for the table of peaks, and no entry of its own."""
        gpu = self._gpus.get(event.uuid or "")
        cell = None if gpu is None else gpu.cells.get(event.framework or "")
        if cell is not None and event.bytes is not None and (cell.own is None or event.bytes > cell.own.size):
            cell.own = Peak(event.bytes, event.time)

    def _workload(self, span: Span) -> None:
        """Steps of a loop are drawn as one. Of many workloads the longest are kept, so that there are few shapes."""
        key = span.name, span.framework
        before = self._loops.get(key)
        if before is not None and before.end is not None and span.begin - before.end <= _GAP:
            self._loops[key] = before._replace(end=span.end)
            return
        self._loops[key] = span
        if before is not None:
            self._over.append(before)
        if len(self._over) > 2 * MOST_SPANS:
            self._over = _longest(self._over)

    def _all_spans(self) -> tuple[Span, ...]:
        return tuple(sorted([*self._spans, *_longest([*self._over, *self._loops.values()])], key=lambda one: one.begin))

    def _entry(self, entry: Entry, request: requests.Refused | None) -> None:
        self._counts[entry.kind] = self._counts.get(entry.kind, 0) + 1
        chosen = self._serious if entry.severity in ("oom", "critical") else self._others
        most = MOST_ENTRIES // 2 if entry.kind == WORKLOAD else MOST_ENTRIES  # a loop has many, and they are drawn
        if len(chosen) < most:
            chosen.append(entry)
            if request is not None:
                self._requests[id(entry)] = request  # the entry is kept, and so its id stays its own

    def run(self, timeline: Timeline, source: str, needed: evidence.Run, outcome: TimelineOutcome) -> Run:
        serious = requests.merged(self._serious, self._requests)
        others = self._others[: max(MOST_ENTRIES - len(serious), 0)]
        entries = sorted([*serious, *others], key=lambda entry: entry.time)
        shown = len(entries) + len(self._serious) - len(serious)
        versions = {
            diagnosis.clean(name): diagnosis.clean(about["version"])
            for name, about in timeline.header.frameworks.items()
            if isinstance(about.get("version"), str)
        }
        header = timeline.header
        notes = (*outcome.notes, *timeline.plan.notes, *timeline.notes)
        needed = replace(needed, notes=tuple(diagnosis.clean(note, self._processes) for note in needed.notes))
        found = decide.suggest([needed], decide.HEADROOM)
        fits = found is not None and found.problem is None
        limits = {figure.framework: figure.limit for figure in found.figures} if found is not None and fits else {}
        limit = found.limit if found is not None and fits else None
        return Run(
            diagnosis.clean(source),
            diagnosis.clean(header.recorded),
            header.pid,
            header.rank,
            header.simulated,
            outcome.samples,
            self._begin,
            self._end,
            outcome.end - outcome.begin,
            tuple(gpu.view(outcome, limits, limit) for gpu in self._gpus.values()),
            tuple(entries),
            sum(self._counts.values()) - shown,
            self._all_spans(),
            self._counts,
            versions,
            found,
            tuple(diagnosis.clean(note, self._processes) for note in notes),
        )

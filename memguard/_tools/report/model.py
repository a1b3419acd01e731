"""What a report shows, as plain data. Sizes are bytes, times seconds as of `time.time()`; None is unknown, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from memguard._tools.suggest.decide import Suggestion

MOST_POINTS = 3999
"""Points that are drawn of one series at most."""


class Line(NamedTuple):
    """A figure over time, thinned: the extremes of what was read are in it, and None where it was unknown."""

    times: tuple[float, ...]
    values: tuple[int | None, ...]


class Peak(NamedTuple):
    """The most that was seen, and when first."""

    size: int
    time: float


class Moment(NamedTuple):
    """One sample of one GPU: what each framework held and had in use, in the order of the GPU's frameworks."""

    time: float
    held: tuple[int | None, ...]
    in_use: tuple[int | None, ...]
    overhead: int | None
    unaccounted: int | None
    process: int | None


@dataclass(frozen=True)
class FrameworkView:
    """One framework on one GPU. `cap` is drawn in steps; `suggested` is the cap in the suggested budget."""

    name: str
    held: Line
    in_use: Line
    cap: Line
    peak_held: Peak | None
    peak_in_use: Peak | None
    suggested: int | None
    refused: int
    """Requests that were refused while recording."""
    silent: bool
    """It did not always say what it holds."""


@dataclass(frozen=True)
class GpuView:
    """One GPU. `moments` are whole samples: those with the most and the least held, and with the most unknown."""

    position: int
    uuid: str
    name: str
    index: int | None
    total: int
    limit: Line
    moments: tuple[Moment, ...]
    frameworks: tuple[FrameworkView, ...]
    peak_process: Peak | None
    suggested: int | None
    """The limit of the suggested budget, None if none fits."""


class Holding(NamedTuple):
    """A row of a diagnosis: who held how much."""

    name: str
    size: str


@dataclass(frozen=True)
class Entry:
    """An event or an out-of-memory error: a marker, and a row of the table.

    `severity` is oom, critical, warn or note. `uuid` is None for all GPUs. `lines` says more, label and text each.
    """

    time: float
    kind: str
    severity: str
    framework: str | None
    uuid: str | None
    title: str
    lines: tuple[tuple[str, str], ...] = ()
    holders: tuple[Holding, ...] = ()
    remedies: tuple[str, ...] = ()


class Span(NamedTuple):
    """A time that has a name: a workload, or a suspension. `framework` is None for the whole process."""

    begin: float
    end: float | None
    kind: str
    name: str
    framework: str | None


@dataclass(frozen=True)
class Run:
    """One recorded run, from its first record to its last. `seconds` is from its first sample to its last.

    `counts` has all events by kind; `entries` are those that are shown, and `left_out` is how many are not.
    """

    source: str
    recorded: str
    pid: int
    rank: int | None
    simulated: bool
    samples: int
    begin: float
    end: float
    seconds: float
    gpus: tuple[GpuView, ...]
    entries: tuple[Entry, ...]
    left_out: int
    spans: tuple[Span, ...]
    counts: Mapping[str, int]
    versions: Mapping[str, str]
    suggestion: Suggestion | None
    """What `memguard suggest` says of this run, None if no framework needed anything."""
    notes: tuple[str, ...]

    @property
    def ooms(self) -> int:
        return self.counts.get("oom", 0)

"""Reads the timelines that a command line names: one Run for each process. Nothing else of this package reads files."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

from memguard._timeline import Timeline, load_timeline
from memguard._timeline.files import numbered
from memguard._timeline.reader import of_earlier_runs
from memguard._timeline.replay import TimelineOutcome
from memguard._tools.suggest.evidence import Run, replayed


def runs(names: Sequence[str], counted: Callable[[Iterable[object]], Iterable[object]] = iter) -> list[Run]:
    """One run for each timeline. Its older parts, which `run*.jsonl` names too, are read with the newest and not again.

    `counted` is given the records of each, and gives them back. Raises TimelineError.
    """
    given = {os.path.realpath(name): name for name in names}
    parts = {os.path.realpath(path) for name in given.values() for _, path in numbered(name)}
    loaded = {path: load_timeline(name) for path, name in given.items()}
    newest = {timeline.header.run for path, timeline in loaded.items() if path not in parts}
    # A part of an earlier run, which had the same name, is not read with the newest.
    chosen = {path: name for path, name in given.items() if path not in parts or loaded[path].header.run not in newest}
    found = [read(name, loaded[path], counted(loaded[path].records()), chosen)[0] for path, name in chosen.items()]
    seen: dict[tuple[str, int | None, float, float], Run] = {}
    for run in found:  # a copy of a timeline is no second process
        seen.setdefault((run.run, run.rank, run.begin, run.end), run)
    return list(seen.values())


def read(
    name: str, timeline: Timeline, records: Iterable[object], beside: Container[str] = ()
) -> tuple[Run, TimelineOutcome]:
    """The run of one timeline from all of its records, which may be watched on their way, and their replay.

    `beside`: the real paths of all files that are read as runs.
    """
    header = timeline.header
    run, outcome = replayed(
        records, timeline.plan, file=name, run=header.run, rank=header.rank, simulated=header.simulated
    )
    found = ((name, about.get("version")) for name, about in header.frameworks.items())
    versions = {name: version for name, version in found if isinstance(version, str)}
    notes = [*run.notes, *timeline.notes]
    if timeline.earlier:  # the reader of one timeline does not know which others are given
        left = [path for path in timeline.earlier if os.path.realpath(path) not in beside]
        at = notes.index(of_earlier_runs(timeline.earlier))
        notes[at : at + 1] = [of_earlier_runs(left)] if left else []
    return replace(run, notes=tuple(notes), versions=versions), outcome

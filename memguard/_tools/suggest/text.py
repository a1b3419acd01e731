"""A suggestion as a budget file with its evidence in comments, and as plain data. Pure.

File names, notes and names of GPUs come from elsewhere: a comment holds only what can be printed, in one line, so that
nothing in it ends the comment. The budget itself is written from whole numbers and memguard's own names.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

from memguard._base.text import visible
from memguard._base.units import GRANULE, MIB, format_duration, format_size, parse_percent
from memguard._budget.values import CRITICAL, WARN, percent_text
from memguard._frameworks.specs import NEVER_GIVE_BACK
from memguard._timeline.refusals import Refusal
from memguard._timeline.replay import budget_entry, with_headroom
from memguard._tools.suggest.decide import Figure, Reserve, Suggestion
from memguard._tools.suggest.evidence import Run

WIDTH = 100
_NAME = 200
"""Characters of a text from elsewhere that are kept."""
_REFUSALS = 3
"""Refused requests of one framework that are written out; the JSON has all that were kept."""
_RUNS = 20
"""Timelines that are listed; the others are counted."""


def comment(text: str, indent: str = "", hang: str = "  ") -> list[str]:
    """Lines of a YAML comment. Whatever the text holds, each begins with `#` and ends as a line."""
    words = visible(text, keep="")
    lines = textwrap.wrap(words, WIDTH - len(indent) - 2, subsequent_indent=hang, break_on_hyphens=False)
    return [f"{indent}# {line}" for line in lines or [""]]


def as_yaml(found: Suggestion) -> str:
    """A file that `memguard check` accepts. A suggestion that fits nowhere has none."""
    assert found.problem is None
    lines = [line for text in _head(found) for line in comment(text)]
    lines += ["version: 1", "device:"]
    for text in _reserve(found.reserve):
        lines += comment(text, "  ")
    lines.append(f"  reserve: {found.reserve.bytes // MIB}MiB")
    for text in _limit(found):
        lines += comment(text, "  ")
    lines += [f"  limit: {found.limit // MIB}MiB", "frameworks:"]
    for figure in found.figures:
        for text in _evidence(figure, len(found.runs)):
            lines += comment(text, "  ")
        lines.append(f"  {figure.framework}: {budget_entry(figure.limit, figure.options)}")
    lines += comment("To record the next run as well, with warnings only above what was recorded:")
    lines.append(f"# monitor: {{timeline: run.jsonl{_warn(found)}}}")
    return "\n".join(lines) + "\n"


def _warn(found: Suggestion) -> str:
    """A level above what the process had of its limit and each framework of its own, if the default is not."""
    needed = sum(figure.need.bytes for figure in found.figures) + found.reserve.bytes
    parts = [(needed, found.limit), *((figure.need.bytes, figure.limit) for figure in found.figures)]
    level = max(need * 100 // limit for need, limit in parts) + 2
    return f", warn: {level}%" if parse_percent(WARN) * 100 < level < parse_percent(CRITICAL) * 100 else ""


def _head(found: Suggestion) -> Iterator[str]:
    count = len(found.runs)
    yield (
        f"Written by `memguard suggest` from {count} timeline{'s' if count > 1 else ''}: what each framework needed at "
        f"most, {percent_text(found.headroom) if found.headroom else '0%'} of headroom, and whole steps of 2 MiB."
    )
    for run in found.runs[:_RUNS]:
        yield f"- {_run(run)}"
    if count > _RUNS:
        yield f"- and {count - _RUNS:,} more"
    if sampled := [figure.framework for figure in found.figures if figure.need.peak is None]:
        every = max((run.end - run.begin) / (run.samples - 1) if run.samples > 1 else 0.0 for run in found.runs)
        gap = f", up to {format_duration(every)} apart on average" if every else ""
        whose = "" if len(sampled) == len(found.figures) else f" of {' and '.join(sampled)}"
        yield f"The peaks{whose} are those of the samples{gap}: what came and went between two of them is not in them."
    for note in found.notes:
        yield f"Note: {cut(note)}"


def _run(run: Run) -> str:
    rank = "" if run.rank is None else f"rank {run.rank}, "
    if not run.samples:
        return f"{cut(run.file)}: {rank}no samples"
    requests = sum(need.requests for need in run.needs.values())
    refused = f", {requests:,} refused request{'s' if requests != 1 else ''}" if requests else ""
    span = format_duration(run.end - run.begin)
    samples = f"{run.samples:,} sample{'s' if run.samples != 1 else ''}"
    return f"{cut(run.file)}: {rank}{samples} over {span} from {when(run.begin)}{refused}"


def _reserve(reserve: Reserve) -> Iterator[str]:
    if reserve.source == "auto" or reserve.measured is None:
        yield "What lies outside every cap was not measured: this is what `reserve: auto` keeps."
        return
    size = format_size(reserve.measured)
    yield f"At most {size} lay outside every cap (context, library workspaces), as measured; no headroom."
    if reserve.source == "scaled":
        yield f"That was on {cut(reserve.on)}; contexts of this GPU's architecture are larger, so more is kept."


def _limit(found: Suggestion) -> Iterator[str]:
    yield "The reserve and all limits below."
    if peaks := [run.process[uuid] for run in found.runs for uuid in run.used if uuid in run.process]:
        yield f"Recorded: at most {format_size(max(peaks))} of a GPU in one process, as NVML says."
    if found.named:
        yield "The limits are bytes, so they are those of the recording; this GPU was not part of it:"
    for target in found.targets:
        share = found.limit * target.processes * 100 / target.device.usable
        times = f" for {target.processes} processes" if target.processes > 1 else ""
        size = format_size(target.device.usable)
        yield f"{share:.1f}% of the {size} of {cut(target.device.name)}{times}"


def _evidence(figure: Figure, runs: int) -> Iterator[str]:
    need = figure.need
    where = f" in {cut(figure.run.file)}" if runs > 1 else ""
    gpus = len({uuid for uuid, _ in figure.run.needs})
    if gpus > 1:
        where += f" on GPU {figure.run.devices[figure.uuid].index}"
    how = {"samples": "in the samples", "allocator": "its allocator's own peak", "refused": "what was refused counts"}
    version = figure.run.versions.get(figure.framework)
    name = f"{figure.framework} {cut(version)}" if version else figure.framework
    yield f"{name} needed {format_size(need.bytes)}{where}: {how[need.source]}."
    parts = []
    if need.in_use is not None:
        at = f" at {when(need.in_use_at)}" if need.in_use_at is not None else ""
        parts.append(f"peak in use {format_size(need.in_use)}{at}")
    if need.held is not None:
        parts.append(f"peak held {format_size(need.held)}")
    if need.peak is not None and need.peak_at is not None:
        parts.append(f"its allocator says {format_size(need.peak)}, by {when(need.peak_at)}")
    if parts:
        yield f"{', '.join(parts)}."
    if figure.framework in NEVER_GIVE_BACK:
        yield _pool(figure)
    elif figure.limit == with_headroom(need.least(figure.framework)):
        yield "Its allocator does not say its peak: its pool grew to that when it needed more, so it gets as much."
    elif need.held is None and need.sampled:
        yield "It does not say what it holds: judged by what was in use."
    largest = sorted(need.refusals, key=lambda refusal: (-refusal.need, refusal.time))
    for refusal in largest[:_REFUSALS]:
        yield _refused(refusal)
    if len(largest) > _REFUSALS:
        yield f"And {len(largest) - _REFUSALS:,} more refusals, of smaller needs."


def _pool(figure: Figure) -> str:
    need = figure.need
    if need.grown is not None and figure.limit == with_headroom(need.least(figure.framework)):
        said = "Its pool grew to that by regions that it neither joins nor gives back, so it gets as much."
    else:
        said = "Judged by what was in use: its pool keeps what it once had."
    if need.held is not None and need.held > figure.limit:
        said += " If its arrays lie apart it needs more: a limit of what it held served everything."
    if need.cap is not None and need.held is not None and need.held > need.cap - GRANULE:
        said += " The pool was as large as its cap: what it refused then is not known."
    return said


def _refused(refusal: Refusal) -> str:
    asked = f"{format_size(refusal.asked)} were" if refusal.asked is not None else "a request of unknown size was"
    why = ""
    if refusal.full:
        why = ", as the GPU was full"
    elif refusal.cap is not None:
        why = f" under a cap of {format_size(refusal.cap)}"
    times = f", the last of {refusal.times:,}" if refusal.times > 1 else ""
    held = "" if refusal.held is None else f" on top of {format_size(refusal.held)}"
    if refusal.cap is not None and refusal.need > (refusal.held or 0) + (refusal.asked or 0):
        why += ", so more than that was needed"
    return f"{when(refusal.time)}: {asked} refused{held}{why}{times}."


def when(time: float) -> str:
    """`2025-11-21 15:00:01 UTC`."""
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def cut(text: str) -> str:
    """The text as it can stand in a comment, and not too long."""
    text = visible(text, keep="")
    return text if len(text) <= _NAME else text[: _NAME - 3] + "..."


def as_dict(found: Suggestion) -> dict[str, Any]:
    """Plain data for JSON. Sizes are bytes, times as of `time.time()`, unknown is null, as `yaml` if nothing fits."""
    return {
        "memguard_suggest": 1,
        "recorded": True,
        "fits": found.problem is None,
        "problem": found.problem,
        "fix": found.fix,
        "headroom": _plain(found.headroom),
        "limit": found.limit,
        "reserve": vars(found.reserve),
        "frameworks": [_figure(figure) for figure in found.figures],
        "gpus": [
            {
                "uuid": None if found.named else target.device.uuid,
                "name": target.device.name,
                "usable": target.device.usable,
                "processes": target.processes,
            }
            for target in found.targets
        ],
        "runs": [_plain_run(run) for run in found.runs],
        "notes": list(found.notes),
        "yaml": as_yaml(found) if found.problem is None else None,
    }


def _figure(figure: Figure) -> dict[str, Any]:
    need = figure.need
    plain = {key: value for key, value in vars(need).items() if key != "refusals"}
    refusals: Iterable[Refusal] = need.refusals
    return {
        "framework": figure.framework,
        "limit": figure.limit,
        "needed": need.bytes,
        "source": need.source,
        "options": dict(figure.options),
        "file": visible(figure.run.file, keep=""),
        "uuid": figure.uuid,
        **plain,
        "refused": [{**vars(refusal), "need": refusal.need} for refusal in refusals],
    }


def _plain_run(run: Run) -> dict[str, Any]:
    names = ("run", "rank", "simulated", "begin", "end", "samples")
    return {"file": visible(run.file, keep=""), **{name: getattr(run, name) for name in names}}


def _plain(headroom: Fraction) -> float:
    return float(headroom)

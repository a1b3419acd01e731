"""A report as Markdown, for a pull request, and the samples of a timeline as CSV."""

from __future__ import annotations

import csv as csvs
import html
import io
import re
from collections.abc import Iterable, Iterator, Sequence

from memguard._base.types import DeviceSample
from memguard._base.units import format_duration, format_size
from memguard._timeline.reader import Timeline
from memguard._tools.report import tables
from memguard._tools.report.diagnosis import clean
from memguard._tools.report.model import Entry, Run
from memguard._tools.suggest.text import as_yaml

_SHOWN = 20
"""Errors and critical events that the Markdown lists of each run."""
_MARKS = re.compile(r"([\\`*_\[\]|~{}])")
COLUMNS = (
    "run", "time", "seconds", "gpu", "framework", "held", "in_use", "reclaimable", "cap", "process", "limit",
    "overhead", "unaccounted", "used", "free", "total",
)  # fmt: skip


def escaped(text: str) -> str:
    """The text in Markdown as it is: no markup, no link, no mention, no reference to an issue."""
    text = _MARKS.sub(r"\\\1", html.escape(text, quote=False))
    text = text.replace("@", "&#64;").replace("://", "&#58;//").replace("www.", "www&#46;")
    return re.sub(r"(?<!&)#", "&#35;", text)


def markdown(runs: Sequence[Run]) -> str:
    """One or two runs: their peaks beside each other, what went wrong, and the suggested budget."""
    lines = ["## memguard report", ""]
    for number, run in enumerate(runs):
        lines += [_head(run, tables.letter(number, len(runs))), ""]
    for position in range(max((len(run.gpus) for run in runs), default=0)):
        lines += [*_gpu(runs, position), ""]
    for number, run in enumerate(runs):
        lines += _errors(run, tables.letter(number, len(runs)))
    for number, run in enumerate(runs):
        found, of = run.suggestion, f" for {tables.letter(number, len(runs))}" if len(runs) > 1 else ""
        if found is not None and found.problem is not None:
            fix = f" With `memguard suggest`: {escaped(found.fix or '')}."
            lines += [f"No budget is suggested{of}: {escaped(found.problem)}.{fix}", ""]
        elif found is not None:
            lines += ["<details>", f"<summary>The suggested budget{of}</summary>", "", "```yaml"]
            lines += [as_yaml(found).rstrip().replace("`", "'"), "```", "", "</details>", ""]
    return "\n".join(lines).rstrip() + "\n"


def _head(run: Run, mark: str) -> str:
    simulated = " (simulated GPUs)" if run.simulated else ""
    errors = f"{run.ooms:,} out-of-memory error{'' if run.ooms == 1 else 's'}"
    length = f"{run.samples:,} sample{'' if run.samples == 1 else 's'} over {format_duration(run.seconds)}"
    name = f"{mark}: {escaped(run.source)}" if mark else escaped(run.source)
    return f"**{name}**{simulated}: process {run.pid}, {length}, {errors}"


def _gpu(runs: Sequence[Run], position: int) -> Iterator[str]:
    for number, run in enumerate(runs):
        if position < len(run.gpus):
            gpu = run.gpus[position]
            limit = next((size for size in reversed(gpu.limit.values) if size is not None), None)
            peak = "unknown" if gpu.peak_process is None else format_size(gpu.peak_process.size)
            of = "" if limit is None else f" of its limit of {format_size(limit)}"
            mark = tables.letter(number, len(runs))
            in_ = f" in {mark}" if mark else ""
            at = tables.number_of(gpu.index, gpu.position)
            yield f"GPU {at} {escaped(gpu.name)}{in_}: the process held at most {peak}{of}."
    found = tables.peaks_of(runs, position)
    yield ""
    yield "| framework | " + " | ".join(found.titles) + " |"
    yield "| --- |" + " ---: |" * len(found.titles)
    for name, cells in found.rows.items():
        yield f"| {escaped(name)} | " + " | ".join(cells) + " |"


def _errors(run: Run, mark: str) -> Iterator[str]:
    serious = [entry for entry in run.entries if entry.severity in ("oom", "critical")]
    if not serious:
        return
    yield f"### What went wrong{' in ' + mark if mark else ''}"
    yield ""
    for entry in serious[:_SHOWN]:
        yield f"- {tables.clock(entry.time, False)} UTC: {_said(entry)}"
    if len(serious) > _SHOWN:
        yield f"- and {len(serious) - _SHOWN:,} more"
    yield ""


def _said(entry: Entry) -> str:
    why = "".join(f": {escaped(text)}" for label, text in entry.lines if label == "why")
    remedy = f". To do: {escaped(entry.remedies[0])}" if entry.remedies else ""
    return f"**{escaped(entry.title)}**{why}{remedy}"


def csv(timelines: Iterable[tuple[str, Timeline]], processes: bool = False) -> Iterator[str]:
    """A row for each GPU and one for each framework of each sample; sizes in bytes, empty where unknown."""
    out = io.StringIO()
    write = csvs.writer(out, lineterminator="\n").writerow
    write(COLUMNS)
    for name, timeline in timelines:
        source = cell(clean(name))
        numbers = {part.device.uuid: part.device.index for part in timeline.plan.devices}
        begin = None
        for sample in timeline.samples():
            begin = sample.time if begin is None else begin
            when = tables.clock(sample.time).replace(" ", "T") + "Z"
            head = (source, when, f"{sample.time - begin:.3f}")
            for device in sample.devices:
                gpu = numbers.get(device.uuid, cell(clean(device.uuid)))
                for row in _rows(device):
                    write((*head, gpu, *row))
            yield out.getvalue()
            out.seek(0)
            out.truncate()
    yield out.getvalue()


def _rows(device: DeviceSample) -> Iterator[tuple[object, ...]]:
    of_gpu = (device.process, device.limit, device.overhead, device.unaccounted, device.used, device.free, device.total)
    yield ("", None, None, None, None, *of_gpu)
    for name, usage in device.frameworks.items():
        yield (cell(clean(name)), *usage, *(None for _ in of_gpu))


def cell(text: str) -> str:
    """The text so that no spreadsheet takes it for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text

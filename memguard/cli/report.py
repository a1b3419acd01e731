"""`memguard report`: a recorded run, or two beside each other, as one HTML file and for other tools."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING

import click

from memguard.cli.support import complete, options

if TYPE_CHECKING:
    from memguard._timeline.reader import Timeline
    from memguard._tools.report.model import Run

_FILE = click.Path()
_FORMATS = {".html": "html", ".htm": "html", ".md": "md", ".csv": "csv", ".json": "perfetto"}
"""The format of a file by its ending."""


def _files(context: click.Context, parameter: click.Parameter, files: tuple[str, ...]) -> tuple[str, ...]:
    """Explain a missing -o by the output among the arguments.

    click processes what the command line has first, so -o is not given if its value is not there yet.
    """
    if len(files) < 2 or "outputs" in context.params:
        return files
    if os.path.splitext(files[-1])[1].lower() in _FORMATS:
        words = " ".join(shlex.quote(click.format_filename(name)) for name in (*files[:-1], "-o", files[-1]))
        raise click.UsageError(f"the output is an option: memguard report {words}", context)
    return files


@click.command("report", short_help="Draw a recorded run, or two, as one HTML file.")
@click.argument(
    "files",
    metavar="TIMELINE [OTHER]",
    nargs=-1,
    required=True,
    type=_FILE,
    shell_complete=complete.timelines,
    callback=_files,
)
@click.option(
    "-o",
    "--output",
    "outputs",
    type=_FILE,
    multiple=True,
    required=True,
    metavar="FILE",
    help="Write this file; repeat for several; - is standard output. Its ending is its format.",
)
@click.option(
    "--format",
    "wanted",
    type=click.Choice(sorted({*_FORMATS.values()})),
    help="The format of - and of files with another ending.",
)
@click.option("--processes", is_flag=True, help="Also name other processes by PID; else they are one sum.")
@options.force
def report(files: tuple[str, ...], outputs: tuple[str, ...], wanted: str | None, processes: bool, force: bool) -> None:
    """Draw the timeline TIMELINE of a run, and OTHER next to it: memguard report run.jsonl -o report.html

    What each framework held and had in use over time, with its cap, events, out-of-memory errors and their diagnoses,
    peaks, and the budget that memguard suggest writes of it.

    Formats: .html, which needs no network; .md, for a pull request; .csv: each sample, with sizes in bytes, unknown is
    empty; .json: a Chrome trace, for ui.perfetto.dev (perfetto).

    Exit code 0: all was written; 2: a timeline is invalid, or a file cannot be written.
    """
    from memguard._timeline import load_timeline
    from memguard._timeline.files import parts_of_run
    from memguard._tools.report import perfetto as traces
    from memguard._tools.report import texts
    from memguard._tools.report.page import page
    from memguard.cli.support import output, working

    if len(files) > 2:
        raise click.UsageError(f"{len(files)} timelines are given: memguard report TIMELINE [OTHER] -o FILE")
    output.check(outputs, set().union(*map(parts_of_run, files)), force)
    formats = [(path, _format(path, wanted)) for path in outputs]
    if wanted is not None and all(form != wanted for _, form in formats):
        contradicted, form = formats[0]
        name = click.format_filename(contradicted)
        raise click.UsageError(f"--format {wanted} contradicts the ending of {name} ({form}): leave one out")
    timelines: list[tuple[str, Timeline]] = [(name, load_timeline(name)) for name in files]
    runs: list[Run] = []
    for path, form in formats:
        if form in ("html", "md"):
            runs = runs or _runs(timelines, processes)
            with working.on(f"writes {path}"):
                output.write(path, [page(runs) if form == "html" else texts.markdown(runs)], force)
        else:
            make = texts.csv if form == "csv" else traces.trace
            with working.on(f"writes {path}") as work:
                output.write(path, work.counted(make(timelines, processes)), force)


def _format(path: str, wanted: str | None) -> str:
    """By the ending, else `wanted`. Raises UsageError if neither says it."""
    found = _FORMATS.get(os.path.splitext(path)[1].lower(), wanted)
    if found is None:
        name = "standard output" if path == "-" else click.format_filename(path)
        endings = ", ".join(_FORMATS)
        raise click.UsageError(f"the ending of {name} names no format ({endings}): add --format md, or another")
    return found


def _runs(timelines: list[tuple[str, Timeline]], processes: bool) -> list[Run]:
    from memguard._tools.report.collect import collect
    from memguard.cli.support import working

    runs = []
    for name, timeline in timelines:
        with working.on(f"reads {name}") as work:
            runs.append(collect(timeline, name, processes=processes, runs=len(timelines), counted=work.counted))
    return runs

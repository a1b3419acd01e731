"""`memguard report`: a recorded run, or two beside each other, as one HTML file and for other tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from memguard.cli.support import complete

if TYPE_CHECKING:
    from memguard._timeline.reader import Timeline

_FILE = click.Path()


@click.command("report", short_help="Draw a recorded run, or two, as one HTML file.")
@click.argument(
    "files", metavar="TIMELINE [OTHER]", nargs=-1, required=True, type=_FILE, shell_complete=complete.timelines
)
@click.option("-o", "--output", type=_FILE, metavar="FILE", help="Write HTML that needs no network.")
@click.option("--md", type=_FILE, metavar="FILE", help="Write Markdown, for a pull request.")
@click.option("--csv", type=_FILE, metavar="FILE", help="Write each sample, sizes in bytes; unknown is empty.")
@click.option("--perfetto", type=_FILE, metavar="FILE", help="Write a Chrome trace, for ui.perfetto.dev.")
@click.option("--processes", is_flag=True, help="Also name other processes by PID; else they are one sum.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
def report(
    files: tuple[str, ...],
    output: str | None,
    md: str | None,
    csv: str | None,
    perfetto: str | None,
    processes: bool,
    force: bool,
) -> None:
    """Draw the timeline TIMELINE of a run, and OTHER beside it: memguard report run.jsonl -o report.html

    What each framework held and had in use over time, with its cap, events, out-of-memory errors and their diagnoses,
    peaks, and the budget that memguard suggest writes of it. FILE - is standard output.

    Exit code 0: all was written; 1: a file could not be written; 2: a timeline is invalid.
    """
    from memguard._timeline import load_timeline
    from memguard._tools.report import perfetto as traces
    from memguard._tools.report import texts
    from memguard._tools.report.collect import collect
    from memguard._tools.report.page import page
    from memguard.cli.support import output as outputs
    from memguard.cli.support import working

    if len(files) > 2:
        raise click.UsageError(f"{len(files)} timelines are given: memguard report TIMELINE [OTHER] -o FILE")
    wanted = [path for path in (output, md, csv, perfetto) if path is not None]
    if not wanted:
        raise click.UsageError(f"say what to write: memguard report {' '.join(files)} -o report.html")
    outputs.check(wanted, files, force)
    timelines: list[tuple[str, Timeline]] = [(name, load_timeline(name)) for name in files]
    if output is not None or md is not None:
        runs = []
        for name, timeline in timelines:
            with working.on(f"reads {name}") as work:
                runs.append(collect(timeline, name, processes=processes, runs=len(files), counted=work.counted))
        if output is not None:
            with working.on(f"writes {output}"):
                outputs.write(output, [page(runs)], force)
        if md is not None:
            outputs.write(md, [texts.markdown(runs)], force)
    for path, make in ((csv, texts.csv), (perfetto, traces.trace)):
        if path is not None:
            with working.on(f"writes {path}") as work:
                outputs.write(path, work.counted(make(timelines, processes)), force)

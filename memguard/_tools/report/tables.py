"""The parts of the page that need no script: figures, peaks, the comparison, events with their diagnoses. Pure.

Every text that goes into the page goes through `esc`.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from memguard._base.units import format_duration, format_size
from memguard._tools.report.diagnosis import clean
from memguard._tools.report.figures import LEVELS
from memguard._tools.report.model import Entry, FrameworkView, Peak, Run
from memguard._tools.suggest.text import as_yaml


def esc(text: object) -> str:
    """The text in HTML, also within an attribute."""
    return html.escape(str(text), quote=True)


def clock(time: float, digits: bool = True) -> str:
    """`2025-11-21 15:00:01.500`, in UTC."""
    text = datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
    return text[:-3] if digits else text[:-7]


def since(run: Run, time: float) -> str:
    """`1.500 s`, `12 min 5 s`: from the first record."""
    seconds = time - run.begin
    sign = "−" if seconds < 0 else ""
    return f"{sign}{abs(seconds):.1f} s" if abs(seconds) < 60 else f"{sign}{format_duration(abs(seconds))}"


def letter(number: int, runs: int) -> str:
    """`A` and `B`, where there are two runs."""
    return "AB"[number] if runs > 1 else ""


def number_of(gpu_index: int | None, position: int) -> int:
    return position if gpu_index is None else gpu_index


def head(run: Run, mark: str) -> str:
    """What the run was, and its most telling figures."""
    about = [f"process {run.pid}", *([] if run.rank is None else [f"rank {run.rank}"])]
    about.append(f"recorded {clock(run.begin, False)} UTC" if run.begin else f"recorded {run.recorded}")
    about += [f"{name} {version}" for name, version in run.versions.items()]
    tiles = [
        (format_duration(run.seconds), f"{run.samples:,} sample{'' if run.samples == 1 else 's'}", ""),
        (f"{run.ooms:,}", f"out-of-memory error{'' if run.ooms == 1 else 's'}", "alarm" if run.ooms else ""),
    ]
    for gpu in run.gpus:
        limit = next((size for size in reversed(gpu.limit.values) if size is not None), None)
        peak = "unknown" if gpu.peak_process is None else format_size(gpu.peak_process.size)
        of = "" if limit is None else f" of {format_size(limit)}"
        tiles.append((peak, f"peak on GPU {number_of(gpu.index, gpu.position)}{of}", ""))
    items = "".join(
        f'<li><strong class="{kind}">{esc(figure)}</strong><span>{esc(what)}</span></li>'
        for figure, what, kind in tiles
    )
    badge = ' <span class="badge note">simulated GPUs</span>' if run.simulated else ""
    name = f"{mark}: {run.source}" if mark else run.source
    notes = "".join(f"<li>{esc(note)}</li>" for note in run.notes)
    notes = f"<details><summary>Notes ({len(run.notes)})</summary><ul>{notes}</ul></details>" if notes else ""
    return (
        f'<section aria-label="{esc(name)}"><h2 class="run">{esc(name)}{badge}</h2>'
        f'<p class="soft">{esc(" · ".join(about))}</p>'
        f'<ul class="tiles">{items}</ul>{notes}</section>'
    )


class Peaks(NamedTuple):
    """The peaks on one GPU: the titles of the columns, and the cells of each framework."""

    titles: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]


def peaks_of(runs: Sequence[Run], position: int) -> Peaks:
    """The peaks of each framework on this GPU; of two runs beside each other, with what B held more than A."""
    there = [number for number, run in enumerate(runs) if position < len(run.gpus)]
    views = [{view.name: view for view in runs[number].gpus[position].frameworks} for number in there]
    names = dict.fromkeys(name for found in views for name in found)
    titles = tuple(f"{column} {letter(number, len(runs))}".strip() for column in _COLUMNS for number in there)
    rows: dict[str, tuple[str, ...]] = {}
    for name in names:
        found = [view.get(name) for view in views]
        cells = [_COLUMNS[column](view) if view is not None else "–" for column in _COLUMNS for view in found]
        rows[name] = (*cells, _difference(*found)) if len(found) == 2 else tuple(cells)
    return Peaks((*titles, "peak held, B − A") if len(there) == 2 else titles, rows)


def peaks(runs: Sequence[Run], position: int, colours: Mapping[str, str]) -> str:
    """The same as a table."""
    found = peaks_of(runs, position)
    titles = [esc(title).replace(" − ", "&nbsp;−&nbsp;") for title in found.titles]
    head = "".join(f'<th scope="col" class="number">{title}</th>' for title in titles)
    rows = "".join(
        f'<tr><th scope="row"><span class="swatch" style="background:{colours[name]}"></span>{esc(name)}</th>'
        + "".join(f'<td class="number">{esc(cell)}</td>' for cell in cells)
        + "</tr>"
        for name, cells in found.rows.items()
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Peaks on GPU {position}"><table class="peaks">'
        "<caption>Peaks of each framework</caption>"
        f'<thead><tr><th scope="col">framework</th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _cap(view: FrameworkView) -> str:
    caps = [size for size in view.cap.values if size is not None]
    return format_size(caps[-1]) if caps else "none"


def _difference(before: FrameworkView | None, after: FrameworkView | None) -> str:
    if before is None or after is None or before.peak_held is None or after.peak_held is None:
        return "unknown"
    more = after.peak_held.size - before.peak_held.size
    return f"{'+' if more > 0 else ''}{format_size(more)}".replace("-", "−")


def _peak(peak: Peak | None) -> str:
    return "unknown" if peak is None else format_size(peak.size)


_COLUMNS: Mapping[str, Callable[[FrameworkView], str]] = {
    "cap": _cap,
    "peak held": lambda view: _peak(view.peak_held),
    "peak in use": lambda view: _peak(view.peak_in_use),
    "suggested cap": lambda view: "–" if view.suggested is None else format_size(view.suggested),
    "refused": lambda view: f"{view.refused:,}",
}


def events(run: Run, mark: str, first: int) -> str:
    """The table of events. `first` is the number of its first row on the page."""
    name = f"Events of {mark}" if mark else "Events"
    if not run.entries:
        return f'<h3>{esc(name)}</h3><p class="soft">No event was recorded.</p>'
    rows = "".join(_row(run, entry, first + number) for number, entry in enumerate(run.entries))
    left = f"; {run.left_out:,} more are left out" if run.left_out else ""
    counted = "1 event or error" if len(run.entries) == 1 else f"{len(run.entries):,} events and errors"
    return (
        f"<h3>{esc(name)}</h3>"
        f'<table class="events"><caption>{counted}{left}. Times are in UTC.</caption>'
        '<thead><tr><th scope="col">time</th><th scope="col">kind</th><th scope="col">what</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _row(run: Run, entry: Entry, number: int) -> str:
    kind = LEVELS["oom"] if entry.severity == "oom" else entry.kind
    more = "".join(_more(run, entry))
    what = esc(entry.title)
    if more:
        what = f'<details><summary>{what}</summary><div class="diagnosis"><dl>{more}</dl></div></details>'
    serious = ' class="serious"' if entry.severity == "oom" else ""
    day, hour = clock(entry.time).split(" ")
    who = "" if entry.framework is None else f'<div class="who">{esc(entry.framework)}</div>'
    return (
        f'<tr id="entry-{number}" tabindex="-1"{serious}>'
        f'<td class="when">{day} <span>{hour}</span><div class="soft">after {esc(since(run, entry.time))}</div></td>'
        f'<td><span class="badge {entry.severity}">{esc(kind)}</span>{who}</td><td class="what">{what}</td></tr>'
    )


def _more(run: Run, entry: Entry) -> Iterator[str]:
    """The diagnosis: terms and what is said of them."""
    if not (entry.lines or entry.holders or entry.remedies):
        return
    for label, text in entry.lines:
        yield f"<dt>{esc(label)}</dt><dd>{esc(text)}</dd>"
    if entry.uuid is not None:
        gpu = next((gpu for gpu in run.gpus if gpu.uuid == entry.uuid), None)
        name = clean(entry.uuid) if gpu is None else f"{number_of(gpu.index, gpu.position)} {gpu.name}"
        yield f"<dt>GPU</dt><dd>{esc(name)}</dd>"
    if entry.holders:
        rows = "".join(f"<li>{esc(holder.name)}: {esc(holder.size)}</li>" for holder in entry.holders)
        yield f"<dt>who held it</dt><dd><ul>{rows}</ul></dd>"
    if entry.remedies:
        rows = "".join(f"<li>{esc(text)}</li>" for text in entry.remedies)
        yield f"<dt>what to do</dt><dd><ol>{rows}</ol></dd>"


def suggestion(run: Run, mark: str) -> str:
    """The budget that `memguard suggest` writes of this run, or why there is none."""
    found = run.suggestion
    if found is None:
        return ""
    title = f"<h3>{esc(mark)}</h3>" if mark else ""
    if found.problem is not None:
        said = f"<p>{esc(found.problem)}</p><p>With <code>memguard suggest</code>: {esc(found.fix)}</p>"
        return f"<section>{title}{said}</section>"
    return f'<section>{title}<pre tabindex="0">{esc(as_yaml(found).rstrip())}</pre></section>'

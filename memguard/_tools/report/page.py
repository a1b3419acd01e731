"""The page: one HTML file with its script, its style and its figures in it. Pure, but for reading the package's assets.

A Content-Security-Policy lets nothing run but the two scripts that are named by their hash, and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from memguard._tools.report import figures, palette, tables
from memguard._tools.report.model import Run
from memguard._tools.report.tables import esc

PLOTLY = "plotly-basic.min.js"
_TABLES = "over time; its peaks and events are in the tables below"
_LINES = (("cap or limit", palette.ALARM, "6 4"), ("suggested, from this run", palette.NEUTRAL, "2 3"))


def page(runs: Sequence[Run]) -> str:
    """The whole document of one or two runs."""
    colours = palette.colours(view.name for run in runs for gpu in run.gpus for view in gpu.frameworks)
    firsts = [sum(len(run.entries) for run in runs[:number]) for number in range(len(runs))]
    marks = [tables.letter(number, len(runs)) for number in range(len(runs))]
    drawn: list[dict[str, Any]] = []
    sections = "".join(_gpu(position, runs, marks, firsts, colours, drawn) for position in range(_most_gpus(runs)))
    title = "memguard report" if len(runs) == 1 else "memguard report: two runs"
    heads = "".join(tables.head(run, mark) for run, mark in zip(runs, marks, strict=True))
    suggested = "".join(tables.suggestion(run, mark) for run, mark in zip(runs, marks, strict=True))
    events = "".join(tables.events(*about) for about in zip(runs, marks, firsts, strict=True))
    two = " two" if len(runs) > 1 else ""
    body = (
        f'<main class="page"><h1>{esc(title)}</h1><div class="runs{two}">{heads}</div>{sections}'
        f'<h2 id="events">Events and errors</h2>{events}'
        + (f'<h2>Suggested budget</h2><div class="runs{two}">{suggested}</div>' if suggested else "")
        + '<p class="soft">Sizes are in base 1024. What is unknown has a gap and is never 0. A figure shows at most '
        f"{figures_points():,} points of each series, the extremes among them.</p></main>"
    )
    scripts = [_asset(PLOTLY), _asset("report.js")]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="generator" content="memguard">'
        f"<title>{esc(title)}: {esc(', '.join(run.source for run in runs))}</title>"
        f"<style>{_asset('report.css')}</style></head><body>{body}"
        f'<script type="application/json" id="figures">{script_json(drawn)}</script>'
        + "".join(f"<script>{script}</script>" for script in scripts)
        + "</body></html>\n"
    )


def figures_points() -> int:
    from memguard._tools.report.model import MOST_POINTS

    return MOST_POINTS + 1


def script_json(value: object) -> str:
    """JSON that can stand in a script element, whatever texts are in it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII only
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _most_gpus(runs: Sequence[Run]) -> int:
    return max((len(run.gpus) for run in runs), default=0)


def _gpu(
    position: int,
    runs: Sequence[Run],
    marks: Sequence[str],
    firsts: Sequence[int],
    colours: Mapping[str, str],
    drawn: list[dict[str, Any]],
) -> str:
    """One GPU: what both runs did on it, with axes of the same length."""
    there = [number for number, run in enumerate(runs) if position < len(run.gpus)]
    gpus = {number: runs[number].gpus[position] for number in there}
    titles = list(dict.fromkeys(f"GPU {tables.number_of(gpu.index, position)}: {gpu.name}" for gpu in gpus.values()))
    span = max(run.end - run.begin for run in runs) if len(runs) > 1 else None
    rows = figures.rows_of([runs[number] for number in there], list(gpus.values()), span)
    shown = []
    for number, gpu in gpus.items():
        drawn.append(figures.figure(runs[number], gpu, colours, rows, firsts[number]))
        about = f"{marks[number]}: {runs[number].source}" if marks[number] else ""
        caption = f"<figcaption><h3>{esc(about)}</h3></figcaption>" if about else ""
        height = drawn[-1]["layout"]["height"]
        shown.append(
            f"<figure>{caption}"
            f'<div class="plot" role="group" aria-label="{esc(" ".join((titles[0], marks[number], _TABLES)))}" '
            f'data-figure="{len(drawn) - 1}" data-gpu="{position}" style="height:{height}px"></div>'
            "</figure>"
        )
    two = " two" if len(shown) > 1 else ""
    return (
        f'<section aria-label="{esc(titles[0])}"><h2>{esc(" · ".join(titles))}</h2>'
        f"{''.join(_keys(rows.names, colours, position))}"
        "<noscript><p>The charts need JavaScript. The figures and events below do not.</p></noscript>"
        f'<div class="runs{two}">{"".join(shown)}</div>{tables.peaks(runs, position, colours)}</section>'
    )


def _keys(names: Sequence[str], colours: Mapping[str, str], position: int) -> Iterator[str]:
    """What the colours and lines mean; a box for each framework shows and hides it."""
    yield '<fieldset class="keys" aria-label="Frameworks that are shown">'
    for name in names:
        yield (
            f'<label><input type="checkbox" checked data-framework="{esc(name)}">'
            f'<span class="swatch" style="background:{colours[name]};margin:0"></span>{esc(name)}</label>'
        )
    yield '<span class="soft">dark: in use, pale: idle</span>'
    for what, colour in (("overhead", palette.OVERHEAD), ("reported by no framework", palette.UNACCOUNTED)):
        yield f'<span class="key">{_bar(colour)}{what}</span>'
    for what, colour, dash in _LINES:
        yield (
            '<span class="key"><svg width="26" height="8" aria-hidden="true"><line x1="0" y1="4" x2="26" y2="4" '
            f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/></svg>{what}</span>'
        )
    yield f'<button type="button" data-reset="{position}" hidden>Whole run</button></fieldset>'


def _bar(colour: str) -> str:
    return f'<span class="swatch" style="background:{colour};margin:0"></span>'


def _policy(scripts: Sequence[str]) -> str:
    allowed = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    text = resources.files("memguard._tools.report").joinpath("assets").joinpath(name).read_text(encoding="utf-8")
    if "</script" in text.lower() or "<!--" in text or "</style" in text.lower():
        raise AssertionError(f"{name} would end its own element")
    return text

"""The figure of one GPU of one run, as Plotly takes it. Pure.

From above: the stack of all frameworks, a lane of markers, and a panel for each framework. `x` names one of the shared
lists in `times`, which hold milliseconds since the run's start; `y` is MiB. The page's script makes axes of them.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from memguard._base.units import GIB, MIB, format_size
from memguard._tools.report import lanes, palette
from memguard._tools.report.edges import level, outside_of, with_edges
from memguard._tools.report.model import Entry, FrameworkView, GpuView, Line, Run, Span

_STACK, _LANE, _PANEL, _GAP = 300, 84, 92, 26
"""Pixels of each row, and between two."""
_TOP, _BOTTOM = 34, 52
_HEIGHTS = {"oom": 47, "critical": 34, "warn": 22, "note": 10}
"""How many pixels above the lower end of the lane a marker lies. Above them are the spans with their names."""
_MARKERS, _SPAN = 60, 18
"""Pixels of the lane that markers have, and that each further row of spans has."""
_NAMED = 0.04
"""The part of the run that a span must take to have its name on it: those of shorter ones would cover each other."""
_FAR = 3
"""A limit or cap so many times above all that was seen is left out of the picture: it would make that too small."""
_LINES = 60
"""So many out-of-memory errors are lines through all rows."""
_LABELS = 12
"""So many out-of-memory errors have their framework's name beside them."""
SYMBOLS = {"oom": "x", "critical": "triangle-up", "warn": "triangle-up-open", "note": "circle-open"}
_MARKS = {"oom": palette.ALARM, "critical": palette.ALARM, "warn": "#d55e00", "note": palette.NEUTRAL}
LEVELS = {"oom": "out of memory", "critical": "critical", "warn": "warning", "note": "note"}
_WRAP = 72
"""Characters of a line of a marker's text."""


def top_of(gpu: GpuView) -> int:
    """The upper end of its stack: above what was held, and above its limit unless that is far away."""
    held = [
        sum(map(level, moment.held, moment.in_use)) + (moment.overhead or 0) + (outside_of(moment) or 0)
        for moment in gpu.moments
    ]
    process = 0 if gpu.peak_process is None else gpu.peak_process.size
    return _top(max([process, *held]), gpu.limit, gpu.suggested)


def top_of_framework(view: FrameworkView) -> int:
    """The upper end of its panel."""
    peaks = [peak.size for peak in (view.peak_held, view.peak_in_use) if peak is not None]
    return _top(max(peaks, default=0), view.cap, view.suggested)


def _top(seen: int, bound: Line, suggested: int | None) -> int:
    highest = max((size for size in bound.values if size is not None), default=0)
    top = max(seen * 6 // 5 if highest > _FAR * seen else max(seen, highest), MIB)
    return max(top, suggested) if suggested is not None and suggested <= _FAR * top else top


class Rows(NamedTuple):
    """What all figures of one GPU have in common, so that their rows lie beside each other.

    `names` are the frameworks with a panel, also of those that only the other run has. `tops` is the upper end of each
    panel by name, and of the stack under "". `lane`: how many rows of spans lie above the events; 0 if there is neither
    a span nor an event. With a `span`, in seconds, the axis shows the time since the start up to that; else the time of
    day in UTC, up to the run's end.
    """

    names: tuple[str, ...]
    tops: Mapping[str, int]
    lane: int
    span: float | None


def rows_of(runs: Sequence[Run], gpus: Sequence[GpuView], span: float | None) -> Rows:
    """The rows of one GPU in all of its runs."""
    tops = {"": max(top_of(gpu) for gpu in gpus)}
    for gpu in gpus:
        for view in gpu.frameworks:
            tops[view.name] = max(tops.get(view.name, 0), top_of_framework(view))
    names = tuple(dict.fromkeys(view.name for gpu in gpus for view in gpu.frameworks))
    lane = max((lanes.count(run.spans, run.end) for run in runs if run.entries or run.spans), default=0)
    return Rows(names, tops, lane, span)


def figure(run: Run, gpu: GpuView, colours: Mapping[str, str], rows: Rows, first: int) -> dict[str, Any]:
    """The figure. `first` is the number of the run's first entry on the page."""
    drawing = _Drawing(run, gpu, colours, rows)
    drawing.stack()
    drawing.lane(first)
    views = {view.name: view for view in gpu.frameworks}
    for position, name in enumerate(rows.names):
        drawing.panel(position, name, views.get(name))
    return drawing.done()


class _Drawing:
    def __init__(self, run: Run, gpu: GpuView, colours: Mapping[str, str], shared: Rows) -> None:
        self.run, self.gpu, self.colours, self.names = run, gpu, colours, shared.names
        self.tops, self.span = shared.tops, shared.span
        self.lane_height = _LANE + _SPAN * (shared.lane - 1) if shared.lane else 1
        self.times: dict[str, list[int]] = {}
        self.traces: list[dict[str, Any]] = []
        self.shapes: list[dict[str, Any]] = []
        self.notes: list[dict[str, Any]] = []
        rows = [_STACK, self.lane_height, *(_PANEL for _ in self.names)]
        self.height = sum(rows) + _GAP * (len(rows) - 1)
        self.domains: list[list[float]] = []
        top = self.height
        for row in rows:
            self.domains.append([round((top - row) / self.height, 5), round(top / self.height, 5)])
            top -= row + _GAP

    def x(self, times: Sequence[float]) -> str:
        """The name of the list; the same times have one."""
        offsets = [round((time - self.run.begin) * 1000) for time in times]
        for name, known in self.times.items():
            if known == offsets:
                return name
        name = f"t{len(self.times)}"
        self.times[name] = offsets
        return name

    def add(self, name: str, figure: Line, **more: Any) -> None:
        self.traces.append(
            {
                "type": "scatter", "mode": "lines", "name": quoted(name), "x": self.x(figure.times),
                "y": [_mib(value) for value in figure.values], "showlegend": False, "xaxis": "x", **more,
            }
        )  # fmt: skip

    def stack(self) -> None:
        gpu = self.gpu
        moments = with_edges(gpu.moments)
        times = tuple(moment.time for moment in moments)
        self._band("overhead", times, [row.overhead for row in moments], palette.OVERHEAD, 0.75)
        for at, view in enumerate(gpu.frameworks):
            used: list[int | None] = []
            idle: list[int | None] = []
            for moment in moments:
                held, in_use = moment.held[at], moment.in_use[at]
                low = in_use if held is None or in_use is None else min(in_use, held)
                used.append(low)
                idle.append(None if held is None else held - (low or 0))
            colour = self.colours[view.name]
            meta = {"framework": view.name}
            self._band(f"{view.name} in use", times, used, colour, 0.85, meta={**meta, "hover": "stack"})
            self._band(f"{view.name} idle", times, idle, colour, 0.4, meta=meta, hoverinfo="skip")
        outside = [row.outside for row in moments]
        if any(outside):
            self._band("reported by no framework", times, outside, palette.UNACCOUNTED, 0.6)
        process = Line(times, tuple(moment.process for moment in moments))
        if any(size is not None for size in process.values):
            line = {"color": palette.NEUTRAL, "width": 1.5}
            self.add("process, by NVML", process, yaxis="y", line=line, meta={"hover": "size"})
        self._bound("limit", gpu.limit, "y")
        limits = [size for size in gpu.limit.values if size is not None]
        if limits:
            above = ", above the picture" if min(limits) > self.tops[""] * 1.05 else ""
            above += self._far(gpu.suggested, self.tops[""])
            self._title(0, f"<b>all together</b>  limit {format_size(limits[-1])}{above}")
        if gpu.suggested is not None:
            self._suggested("suggested limit", gpu.suggested, "y")

    def _band(
        self,
        name: str,
        times: tuple[float, ...],
        sizes: Sequence[int | None],
        colour: str,
        alpha: float,
        **more: Any,
    ) -> None:
        """One band of the stack. Where its figure is unknown it has no height, and the panel below has a gap."""
        about: dict[str, Any] = {"meta": {"hover": "size"}, "fillcolor": palette.pale(colour, alpha), **more}
        self.add(
            name, Line(times, tuple(sizes)), yaxis="y", stackgroup="all", stackgaps="infer zero",
            line={"width": 0, "color": colour}, **about,
        )  # fmt: skip

    def _bound(self, name: str, line: Line, axis: str, **meta: str) -> None:
        """A limit or a cap, in steps."""
        if any(size is not None for size in line.values):
            about = {"color": palette.ALARM, "width": 1.4, "dash": "dash", "shape": "hv"}
            self.add(name, line, yaxis=axis, line=about, hoverinfo="skip", meta=meta)

    def _suggested(self, name: str, size: int, axis: str, **meta: str) -> None:
        ends = Line((self.run.begin, self.run.end), (size, size))
        about = {"color": palette.NEUTRAL, "width": 1.6, "dash": "dot"}
        self.add(name, ends, yaxis=axis, line=about, hoverinfo="skip", meta=meta)

    @staticmethod
    def _far(size: int | None, top: int) -> str:
        """What is said of a suggested bound that is too high to be in the picture."""
        return f"; suggested {format_size(size)}, above the picture" if size is not None and size > top * 1.05 else ""

    def lane(self, first: int) -> None:
        """The markers, one series for each severity, and the spans beneath them."""
        for severity in reversed(SYMBOLS):
            chosen = [
                (first + number, entry)
                for number, entry in enumerate(self.run.entries)
                if entry.severity == severity and entry.uuid in (None, self.gpu.uuid) and entry.kind != "workload"
            ]
            if not chosen:
                continue
            about: dict[str, Any] = {"mode": "markers"}
            if severity == "oom" and len(chosen) <= _LABELS:
                names = [quoted(entry.framework or "unknown") for _, entry in chosen]
                about = {"mode": "markers+text", "text": names, "textposition": "middle right"}
            height = round(_HEIGHTS[severity] / self.lane_height, 3)
            self.traces.append(
                {
                    "type": "scatter", "name": LEVELS[severity], "showlegend": False, "xaxis": "x", "yaxis": "y2",
                    "x": self.x([entry.time for _, entry in chosen]), "y": [height] * len(chosen),
                    "meta": {"lane": True, "severity": severity},
                    "customdata": [number for number, _ in chosen],
                    "hovertext": [marker_text(entry) for _, entry in chosen],
                    "hovertemplate": "%{hovertext}<extra></extra>",
                    "marker": {
                        "symbol": SYMBOLS[severity], "color": _MARKS[severity], "size": 11 if severity == "oom" else 9,
                        "line": {"width": 1.5, "color": _MARKS[severity]},
                    },
                    **about,
                }
            )  # fmt: skip
            if severity == "oom":
                for _, entry in chosen[:_LINES]:
                    self._line_at(entry.time)
        if self.lane_height > 1:
            self._empty("y2")
        for span, row in zip(self.run.spans, lanes.rows(self.run.spans, self.run.end), strict=True):
            self._span(span, row)

    def _empty(self, axis: str) -> None:
        """A series without a figure: Plotly draws no axis that has no series."""
        self.add("", Line((self.run.begin, self.run.end), (None, None)), yaxis=axis, hoverinfo="skip", meta={})

    def _span(self, span: Span, row: int | None) -> None:
        """Its name in that row of the lane; a suspension also as a bar through all rows of the figure."""
        _, high = self.domains[1]
        top = min(_SPAN * (lanes.MOST - 1 if row is None else row), self.lane_height - _LANE)
        end = self._offset(self.run.end if span.end is None else span.end)
        colour = self.colours.get(span.framework or "", palette.NEUTRAL)
        about: dict[str, Any] = {
            "type": "rect",
            "xref": "x",
            "yref": "paper",
            "x0": self._offset(span.begin),
            "x1": end,
        }
        rest = {"layer": "below", "line": {"width": 0}}
        if span.kind == "suspended":
            self.shapes.append({**about, **rest, "y0": 0, "y1": 1, "fillcolor": palette.pale(colour, 0.14)})
        size = _LANE - _MARKERS if self.lane_height == _LANE else _SPAN - 2
        named: dict[str, Any] = {"y0": high - (top + size) / self.height, "y1": high - top / self.height}
        if row is not None and end - about["x0"] >= _NAMED * self._offset(self.run.end):
            named["label"] = {"text": quoted(span.name), "textposition": "middle left", "font": {"size": 11}}
        self.shapes.append({**about, **rest, **named, "fillcolor": palette.pale(colour, 0.35)})

    def _line_at(self, time: float) -> None:
        at = self._offset(time)
        self.shapes.append(
            {
                "type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1,
                "line": {"color": palette.ALARM, "width": 1, "dash": "dot"}, "layer": "above",
            }
        )  # fmt: skip

    def _offset(self, time: float) -> int:
        return round((time - self.run.begin) * 1000)

    def panel(self, position: int, name: str, view: FrameworkView | None) -> None:
        """A row for one framework, which is empty if only the other run has it."""
        axis, colour = f"y{position + 3}", self.colours[name]
        if view is None:
            self._title(position + 2, f"<b>{quoted(name)}</b>  not in this run")
            self._empty(axis)
            return
        for line, what, alpha in ((view.held, "held", 0.3), (view.in_use, "in use", 0.6)):
            if any(value is not None for value in line.values):
                self.add(
                    f"{name} {what}", line, yaxis=axis, line={"color": colour, "width": 1}, fill="tozeroy",
                    fillcolor=palette.pale(colour, alpha), meta={"hover": "size", "framework": name},
                )  # fmt: skip
        self._bound(f"{name} cap", view.cap, axis, framework=name)
        if view.suggested is not None:
            self._suggested(f"{name} suggested cap", view.suggested, axis, framework=name)
        caps = [size for size in view.cap.values if size is not None]
        cap = "no cap" if not caps else f"cap {format_size(caps[-1])}"
        if len(set(caps)) > 1:
            cap += ", moved"
        if caps and min(caps) > self.tops[name] * 1.05:
            cap += ", above the picture"
        cap += self._far(view.suggested, self.tops[name])
        self._title(position + 2, f"<b>{quoted(name)}</b>  {cap}")

    def _title(self, row: int, text: str) -> None:
        self.notes.append(
            {
                "xref": "paper", "yref": "paper", "x": 0, "y": self.domains[row][1], "xanchor": "left",
                "yanchor": "bottom", "text": text, "showarrow": False, "font": {"size": 12},
            }
        )  # fmt: skip

    def done(self) -> dict[str, Any]:
        layout: dict[str, Any] = {
            "height": self.height + _TOP + _BOTTOM,
            "margin": {"l": 64, "r": 14, "t": _TOP, "b": _BOTTOM},
            "shapes": self.shapes,
            "annotations": self.notes,
            "yaxis": _axis(self.domains[0], self.tops[""], 6),
            "yaxis2": {
                "domain": self.domains[1], "range": [0, 1], "fixedrange": True, "showgrid": False, "zeroline": False,
                "showticklabels": False, "title": {"text": "events", "font": {"size": 11}},
            },
        }  # fmt: skip
        for position, name in enumerate(self.names):
            layout[f"yaxis{position + 3}"] = _axis(self.domains[position + 2], self.tops[name], 3)
        return {
            "begin": round(self.run.begin * 1000),
            "span": round((self.run.end - self.run.begin if self.span is None else self.span) * 1000),
            "elapsed": self.span is not None,
            "last": f"y{len(self.names) + 2}",
            "times": self.times,
            "traces": self.traces,
            "layout": layout,
        }


def _axis(domain: Sequence[float], top: int, ticks: int) -> dict[str, Any]:
    """A y axis. `unit` is for the page's script, which scales its figures: MiB in one of it."""
    gib = top >= GIB * 3 // 4
    return {"domain": domain, "range": [0, _mib(round(top * 1.05))], "nticks": ticks, "unit": 1024 if gib else 1}


def marker_text(entry: Entry) -> str:
    """What a marker says: title, why, and the first remedy. In Plotly's own few tags, with everything else escaped."""
    lines = [f"<b>{LEVELS[entry.severity] if entry.severity == 'oom' else quoted(entry.kind)}</b>"]
    said = [entry.title, *(text for label, text in entry.lines if label == "why")]
    if entry.remedies:
        said.append(f"do: {entry.remedies[0]}")
    for text in said:
        lines += [quoted(line) for line in _wrapped(text)]
    return "<br>".join(lines)


def quoted(text: str) -> str:
    """The text for Plotly, which takes a few tags in texts, and `%{...}` in some for a figure of its own."""
    return html.escape(text, quote=False).replace("{", "&#123;")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WRAP, max_lines=4, placeholder=" …")


def _mib(size: int | None) -> float | None:
    return None if size is None else round(size / MIB, 2)

"""Events and out-of-memory reports of a timeline as entries of the report. Pure.

A report in a timeline is whatever a file holds: a figure of the wrong type is left out, and no text is trusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from memguard._base.text import visible
from memguard._base.types import Event, Pressure
from memguard._base.units import format_size, is_whole
from memguard._timeline import Oom
from memguard._tools.report.model import Entry, Holding

_TEXT = 600
"""Characters of one text that are shown."""
_MOST = 12
"""Holders, and remedies, that are shown."""
_SEVERITIES = {Pressure.CRITICAL: "critical", Pressure.WARN: "warn"}
_ALWAYS = {"leak": "warn", "refused": "critical", "probe": "warn"}
"""Kinds that are serious without a level."""
_PROCESS = re.compile(r"\b(?:process|pid) \d+", re.IGNORECASE)
_MEMORY = {"gpu": "GPU memory", "pinned": "page-locked host memory", "disk": "a file system", "host": "CPU memory"}
_FIGURES = {"held": "held", "in_use": "in use", "reclaimable": "reclaimable", "cap": "cap", "free": "free on the GPU"}


def clean(value: object, processes: bool = True) -> str:
    """A text of a timeline in one line, without control characters; of other processes only if asked for."""
    text = visible(str(value)[: 4 * _TEXT].replace("\n", " ").replace("\t", " "), keep="")
    text = text if processes else _PROCESS.sub("another process", text)
    return text if len(text) <= _TEXT else text[: _TEXT - 1] + "…"


def of_event(event: Event, processes: bool) -> Entry:
    """The entry of an event."""
    severity = _SEVERITIES.get(event.level, "note") if event.level is not None else _ALWAYS.get(event.kind, "note")
    lines = []
    if event.times is not None:
        lines.append(("times", f"{event.times:,}"))
    if event.bytes is not None:
        lines.append(("size", format_size(event.bytes)))
    if event.seconds is not None:
        lines.append(("seconds", f"{event.seconds:.3g}"))
    known = [
        f"{name} {format_size(size)}" for key, name in _FIGURES.items() if (size := getattr(event, key)) is not None
    ]
    if known:
        lines.append(("at the refusal", ", ".join(known)))
    return Entry(
        event.time,
        clean(event.kind),
        severity,
        None if event.framework is None else clean(event.framework),
        event.uuid,
        clean(event.text, processes),
        tuple(lines),
    )


def of_oom(oom: Oom, processes: bool) -> Entry:
    """The entry of an out-of-memory report, with its diagnosis."""
    report = oom.report
    who = _text(report.get("requester"))
    return Entry(
        oom.time,
        "oom",
        "oom",
        None if who is None else clean(who),
        _text(report.get("uuid")),
        _title(report),
        tuple((label, clean(text, processes)) for label, text in _lines(report)),
        tuple(_holders(report.get("holders"), processes)),
        tuple(_remedies(report.get("remedies"), processes)),
    )


def _title(report: Mapping[str, Any]) -> str:
    possibly = "" if report.get("certain") is True else "possibly "
    size = f": {format_size(report['requested'])} asked for" if is_whole(report.get("requested")) else ""
    what = _MEMORY.get(str(report.get("memory", "gpu")), "memory")
    who = _text(report.get("requester"))
    text = f"{possibly}out of {what}{size}" if who is None else f"{who} {possibly}ran out of {what}{size}"
    return clean(text[:1].upper() + text[1:] if who is None else text)


def _lines(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for label in ("why", "error"):
        if (text := _text(report.get(label))) is not None:
            yield label, text
    moment = report.get("moment")
    if isinstance(moment, Mapping):
        known = [f"{name} {format_size(moment[key])}" for key, name in _FIGURES.items() if is_whole(moment.get(key))]
        if known:
            yield "at the refusal" if moment.get("source") in ("refusal", "observer") else "then", ", ".join(known)
    if report.get("caught") is True:
        yield "caught", "the program caught the error, as it seems"
    cut = report.get("cut")
    if isinstance(cut, list) and cut:
        yield "left out", "too long for the timeline: " + ", ".join(map(str, cut[:_MOST]))


def _holders(rows: object, processes: bool) -> Iterator[Holding]:
    """Who held the memory, largest first; other processes in one row, unless they are asked for."""
    others = 0
    found: list[tuple[int, str, str]] = []
    for row in rows if isinstance(rows, list) else []:
        if not isinstance(row, Mapping) or not is_whole(size := row.get("bytes")):
            continue
        if row.get("kind") == "process" and not processes:
            others += size
            continue
        idle = row.get("reclaimable")
        more = f", {format_size(idle)} reclaimable" if is_whole(idle) and idle else ""
        most = "up to " if row.get("upper_bound") is True else ""
        found.append((size, clean(row.get("name"), processes), f"{most}{format_size(size)}{more}"))
    if others:
        found.append((others, "other processes", format_size(others)))
    for _, name, said in sorted(found, key=lambda row: -row[0])[:_MOST]:
        yield Holding(name, said)


def _remedies(rows: object, processes: bool) -> Iterator[str]:
    for row in (rows if isinstance(rows, list) else [])[:_MOST]:
        if isinstance(row, Mapping) and (text := _text(row.get("text"))) is not None:
            yield clean(text, processes)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None

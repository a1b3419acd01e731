"""Selects the lines to keep of a timeline's oldest files when its files reach their size limit; no I/O.

The oldest file is thinned, not removed, so that the timeline still answers three questions:

- Why did the run fail? Out-of-memory reports and events are few and give the cause, so the newest of these are kept
  with the highest priority.
- What is the smallest budget that fits? The peaks determine it, and a peak may occur anywhere in the run. So the sample
  with the highest value of each figure is kept. If all such samples fit, `memguard replay --smallest` prints the same
  budget as before thinning.
- How did memory use change over time? One sample in each interval of `every` seconds is kept. If these samples no
  longer fit, the interval is doubled, so that the same space covers the whole run in coarser steps.

Reports and peaks take precedence over samples at intervals because no other record can replace them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from memguard._timeline.format import MAGIC, Dropped

_BEGIN = re.compile(rb'\{"t":([0-9.e+]+),"(sample|event|oom|columns)":')
_FIRST = 1.0
"""Seconds between samples at the first thinning."""


@dataclass(frozen=True)
class Thinned:
    """The kept lines, without a header. The caller must write `columns` into the header. `dropped` counts the records
    that are not kept; `every` is the new interval."""

    lines: list[bytes]
    columns: dict[str, Any] | None
    dropped: Dropped
    every: float


class _Line(NamedTuple):
    time: float
    kind: str
    raw: bytes
    columns: int


def thin(lines: Iterable[bytes], room: int, every: float | None) -> Thinned:
    """Select at most `room` bytes of `lines`, which may include headers. `every` is the interval of the last thinning,
    None at the first.

    Keeps first reports, then events (in up to half of the remaining bytes), then peaks, then other samples. Of reports
    and events the newest are kept. Raises ValueError, LookupError or TypeError if a line is damaged.
    """
    found, columns = _read(lines)
    ooms, room = _newest([line for line in found if line.kind == "oom"], room)
    events, left = _newest([line for line in found if line.kind == "event"], room // 2)
    room -= room // 2 - left
    samples = [line for line in found if line.kind == "sample"]
    overhead = max((len(_columns_line(entry)) for entry in columns), default=0)
    peaks: list[_Line] = []
    for line in _peaks(samples, columns):
        size = len(line.raw) + (2 * overhead if len(columns) > 1 else 0)  # columns lines before and after
        if size <= room:
            peaks.append(line)
            room -= size
    spaced, every = _spaced(samples, {id(line) for line in peaks}, room, every or _FIRST, columns)
    kept = {id(line) for line in (*ooms, *events, *peaks, *spaced)}
    chosen = [line for line in found if id(line) in kept]
    counts = {kind: sum(line.kind == kind for line in found) for kind in ("sample", "event", "oom")}
    for line in chosen:
        counts[line.kind] -= 1
    current = next((line.columns for line in chosen if line.kind == "sample"), None)
    first = None if current is None else columns[current]
    written = []
    for line in chosen:
        if line.kind == "sample" and line.columns != current:
            current = line.columns
            written.append(_columns_line(columns[current], line.time))
        written.append(line.raw)
    return Thinned(written, first, Dropped(counts["sample"], counts["event"], counts["oom"]), every)


def _read(lines: Iterable[bytes]) -> tuple[list[_Line], list[dict[str, Any]]]:
    found: list[_Line] = []
    columns: list[dict[str, Any]] = []
    for raw in lines:
        match = _BEGIN.match(raw)
        if match is not None and match[2] != b"columns":
            found.append(_Line(float(match[1]), match[2].decode(), raw, len(columns) - 1))
        elif match is not None or raw.startswith(MAGIC):
            entry = json.loads(raw)["columns"]
            if not columns or columns[-1] != entry:
                columns.append(entry)
    return found, columns


def _newest(lines: list[_Line], room: int) -> tuple[list[_Line], int]:
    """The newest lines that fit into `room` bytes, newest first, and the remaining bytes."""
    kept = []
    for line in reversed(lines):
        if len(line.raw) > room:
            break
        kept.append(line)
        room -= len(line.raw)
    return kept, room


def _peaks(samples: list[_Line], columns: list[dict[str, Any]]) -> list[_Line]:
    """The samples with the highest value of each figure of a GPU, and of each framework's held, in-use and pinned (held
    less reclaimable) bytes."""
    most: dict[tuple[object, ...], tuple[int, _Line]] = {}

    def see(key: tuple[object, ...], value: int | None, line: _Line) -> None:
        if value is not None and (key not in most or value > most[key][0]):
            most[key] = value, line

    for line in samples:
        names = columns[line.columns]
        for at, used, _, process, overhead, unaccounted, *found in json.loads(line.raw)["sample"]:
            uuid = names["devices"][at][0]
            for what, value in (("used", used), ("process", process), ("overhead", overhead)):
                see((uuid, what), value, line)
            if all(not usage or usage[0] is not None for usage in found):  # else `unaccounted` includes pools
                see((uuid, "outside"), overhead + max(unaccounted or 0, 0), line)
            for position, usage in enumerate(found):
                if usage:
                    name = names["frameworks"][position]
                    held, in_use, reclaimable = usage
                    see((uuid, name, "held"), held, line)
                    see((uuid, name, "in use"), in_use, line)
                    if held is not None and reclaimable is not None:
                        see((uuid, name, "pinned"), held - reclaimable, line)
    return list({id(line): line for _, line in most.values()}.values())


def _spaced(
    samples: list[_Line], without: set[int], room: int, every: float, columns: list[dict[str, Any]]
) -> tuple[list[_Line], float]:
    """The first sample in each interval of `every` seconds, unless it is in `without`, and the final interval.

    Doubles the interval until the samples fit into `room` bytes.
    """
    sizes = [len(_columns_line(entry)) for entry in columns]
    while True:
        kept, needed, slot, current = [], 0, None, None
        for line in samples:
            if (now := int(line.time // every)) != slot:
                slot = now
                if id(line) not in without:
                    kept.append(line)
                    needed += len(line.raw) + (sizes[line.columns] if line.columns != current else 0)
                    current = line.columns
        if needed <= room:
            return kept, every
        if every > 1e10:
            return [], every
        every *= 2


def _columns_line(columns: dict[str, Any], time: float = 1763737200.123) -> bytes:
    return (json.dumps({"t": time, "columns": columns}, separators=(",", ":")) + "\n").encode()

"""The rows of the stack: what is known at each moment, with upright ends where something turns unknown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memguard._tools.report.model import Moment

_EDGE = 0.001
"""Seconds."""


class Row(NamedTuple):
    """A moment as the stack shows it. `outside` is what of the process no framework reports."""

    time: float
    held: tuple[int | None, ...]
    in_use: tuple[int | None, ...]
    overhead: int | None
    outside: int | None
    process: int | None


def with_edges(moments: Sequence[Moment]) -> list[Row]:
    """The moments, and around each change of what is unknown two more, so that a band ends and begins upright.

    Between a known and an unknown figure Plotly would draw a slope down to 0, which nobody has measured.
    """
    found: list[Row] = []
    before = None
    for moment in moments:
        row = Row(*moment[:4], outside_of(moment), moment.process)
        if before is not None and _pattern(before) != _pattern(row) and row.time > before.time:
            edge = min(_EDGE, (row.time - before.time) / 3)
            found.append(_blanked(before, row)._replace(time=before.time + edge))
            found.append(_blanked(row, before)._replace(time=row.time - edge))
        found.append(row)
        before = row
    return found


def _pattern(row: Row) -> tuple[bool, ...]:
    figures = (*row.held, *row.in_use, *row[3:])
    return tuple(size is None for size in figures)


def _blanked(row: Row, other: Row) -> Row:
    """The row without what is unknown in the other.

    Of what no framework reports the lesser stays: the rest may be a framework's that one of the two does not know.
    """
    held = tuple(None if b is None else a for a, b in zip(row.held, other.held, strict=True))
    in_use = tuple(None if b is None else a for a, b in zip(row.in_use, other.in_use, strict=True))
    overhead = None if other.overhead is None else row.overhead
    process = None if other.process is None else row.process
    outside = None if row.outside is None or other.outside is None else min(row.outside, other.outside)
    return Row(row.time, held, in_use, overhead, outside, process)


def outside_of(moment: Moment) -> int | None:
    """What of the process no framework reports: up to what NVML says it holds, if it says so."""
    if moment.process is None or moment.overhead is None:
        return None if moment.unaccounted is None or moment.overhead is None else max(moment.unaccounted, 0)
    known = sum(level(held, in_use) for held, in_use in zip(moment.held, moment.in_use, strict=True))
    return max(moment.process - moment.overhead - known, 0)


def level(held: int | None, in_use: int | None) -> int:
    return held if held is not None else in_use or 0

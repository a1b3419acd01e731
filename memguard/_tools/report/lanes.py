"""Spans that overlap lie in rows beneath each other, so that each can be seen and its name read. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from memguard._tools.report.model import Span

MOST = 4
"""So many rows are drawn. What finds no room in them lies over others in the last one, without a name."""


def rows(spans: Sequence[Span], end: float) -> list[int | None]:
    """The row of each span, from 0 on; None if it finds none that is free. `end` is that of a span without an end."""
    free = [float("-inf")] * MOST
    found: dict[int, int | None] = {}
    for number in sorted(range(len(spans)), key=lambda number: spans[number].begin):
        span = spans[number]
        row = next((row for row, over in enumerate(free) if over <= span.begin), None)
        if row is not None:
            free[row] = end if span.end is None else span.end
        found[number] = row
    return [found[number] for number in range(len(spans))]


def count(spans: Sequence[Span], end: float) -> int:
    """How many rows they take; 1 if there are none."""
    return max((MOST if row is None else row + 1 for row in rows(spans, end)), default=1)

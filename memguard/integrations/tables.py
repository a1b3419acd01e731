"""Convert a sample to plain data, and the data of several processes to one table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from memguard._base.text import shown
from memguard._base.types import Device, Pressure, Sample
from memguard._base.units import format_size

COLUMNS = ("GPU", "what", "held", "in use", "cap")
"""The columns of `rows`. A table has columns that identify the process before them."""


def summary(sample: Sample | None, devices: Mapping[str, Device], more: Mapping[str, Any]) -> dict[str, Any]:
    """A sample as plain data, in bytes; None if unknown. The entries of `more` come first."""
    parts: list[dict[str, Any]] = []
    for one in sample.devices if sample is not None else ():
        part = {key: value for key, value in one._asdict().items() if key != "frameworks"}
        part["name"] = devices[one.uuid].name if one.uuid in devices else one.uuid
        part["index"] = devices[one.uuid].index if one.uuid in devices else None
        part["frameworks"] = {name: usage._asdict() for name, usage in one.frameworks.items()}
        parts.append(part)
    return {**more, "time": sample.time if sample is not None else None, "devices": parts}


def worst(levels: Iterator[Pressure]) -> Pressure:
    return max(levels, key=lambda one: one.rank, default=Pressure.OK)


def rows(devices: Iterable[Mapping[str, Any]], pressure: str) -> Iterator[tuple[str, ...]]:
    """One row for each framework on each GPU of a summary, and one for the process."""
    for one in devices:
        gpu = one["name"] if one["index"] is None else f"{one['index']} {one['name']}"
        for what, usage in one["frameworks"].items():
            sizes = format_size(usage["held"]), format_size(usage["in_use"])
            yield gpu, what, *sizes, "none" if usage["cap"] is None else format_size(usage["cap"])
        yield gpu, f"process: {pressure}", format_size(one["process"]), "", format_size(one["limit"])


def table(head: Sequence[str], body: Iterable[Sequence[str]], simulated: bool) -> str:
    """Format the table as printable text, whatever characters a name contains. A row may be shorter than the head."""
    found = [(*row, *[""] * (len(head) - len(row))) for row in body]
    widths = [max(len(row[n]) for row in (head, *found)) for n in range(len(head))]
    lines = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *found)
    ]
    if simulated:
        lines.insert(0, "simulated GPUs: nothing real is limited")
    return shown("\n".join(lines))

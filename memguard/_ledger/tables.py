"""What a ledger's table says, cell by cell, and the table in HTML, for notebooks.

From its plain data, so that a ledger that was kept as JSON has a table too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from memguard._units import MIB, format_size

NUMBERS = ("held", "cap", "in use", "cached", "trimmable")
COLUMNS = ("MiB", *NUMBERS, "cap is")
_STYLE = {"right": "text-align: right", "left": "text-align: left"}
# Thin, and by inline styles: notebooks take style sheets out of what they show.
_RULE = "border-top: 1px solid #888"


def ledger_table(ledger: Mapping[str, Any]) -> str:
    """`ledger` is `Ledger.as_dict()`: one table for each GPU, sizes in MiB, and the notes behind them."""
    parts = [_device(part, ledger["simulated"]) for part in ledger["devices"]]
    parts += [f"<div>note: {escape(note)}</div>" for note in ledger["notes"]]
    return "\n".join(parts)


def cells(row: Mapping[str, Any]) -> list[str]:
    """The cells of one row, which is `vars()` of an `accounts.Row`, in the order of `COLUMNS`."""
    live = row["kind"] == "framework" and row["in_use"] is not None
    return [
        row["name"] + ("*" if row["note"] else ""),
        ("≥ " if row["at_least"] is not None else "") + _mib(row["bytes"]),
        "" if row["cap"] is None else _mib(row["cap"]),
        *(_mib(row[name]) if live else "" for name in ("in_use", "cached", "reclaimable")),
        row["enforcement"],
    ]


def total(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The cells of the last row."""
    return ["total", _mib(sum(row["bytes"] or 0 for row in rows)), *[""] * (len(COLUMNS) - 2)]


def _device(part: Mapping[str, Any], simulated: bool) -> str:
    mark = " (simulated)" if simulated else ""
    limit = "" if part["limit"] is None else f" of its limit of {format_size(part['limit'])}"
    lines = [f"<b>{escape(part['name'])}{mark}</b> {escape(part['uuid'])}"]
    lines += [f"this process: {format_size(part['process'])}{limit}"]
    rows = part["rows"]
    frameworks = [row for row in rows if row["kind"] == "framework"]
    others = [row for row in rows if row["kind"] != "framework"]
    groups = [[cells(row) for row in frameworks], [cells(row) for row in others], [total(rows)]]
    notes = [f"* {row['name']}: {row['note']}" for row in rows if row["note"]]
    return "\n".join(
        [
            "<table>",
            f'<caption style="{_STYLE["left"]}; caption-side: top">{"<br>".join(lines)}</caption>',
            f"<thead>{_row('th', COLUMNS)}</thead>",
            *(_group(group, bool(number)) for number, group in enumerate(groups) if group),
            "</table>",
            *(f"<div>{escape(note)}</div>" for note in notes),
        ]
    )


def _group(rows: Iterable[list[str]], ruled: bool) -> str:
    style = f' style="{_RULE}"' if ruled else ""
    return f"<tbody{style}>{''.join(_row('td', row) for row in rows)}</tbody>"


def _row(tag: str, row: Sequence[str]) -> str:
    sides = ["left", *["right"] * len(NUMBERS), "left"]
    written = (f'<{tag} style="{_STYLE[side]}">{escape(cell)}</{tag}>' for side, cell in zip(sides, row, strict=True))
    return f"<tr>{''.join(written)}</tr>"


def _mib(size: int | None) -> str:
    """One unit for the whole table, so that columns can be compared at a glance."""
    return "unknown" if size is None else f"{size / MIB:,.1f}"

"""A ledger as an HTML table, for notebooks. From its plain data, so that one that was kept as JSON has a table too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from memguard.units import MIB, format_size

_NUMBERS = ("held", "cap", "in use", "cached", "trimmable")
_STYLE = {"right": "text-align: right", "left": "text-align: left"}
# Thin, and by inline styles: notebooks take style sheets out of what they show.
_RULE = "border-top: 1px solid #888"


def ledger_table(ledger: Mapping[str, Any]) -> str:
    """`ledger` is `Ledger.as_dict()`: one table for each GPU, sizes in MiB, and the notes behind them."""
    parts = [_device(part, ledger["simulated"]) for part in ledger["devices"]]
    parts += [f"<div>note: {escape(note)}</div>" for note in ledger["notes"]]
    return "\n".join(parts)


def _device(part: Mapping[str, Any], simulated: bool) -> str:
    mark = " (simulated)" if simulated else ""
    limit = "" if part["limit"] is None else f" of its limit of {format_size(part['limit'])}"
    lines = [f"<b>{escape(part['name'])}{mark}</b> {escape(part['uuid'])}"]
    lines += [f"this process: {format_size(part['process'])}{limit}"]
    rows = part["rows"]
    frameworks = [row for row in rows if row["kind"] == "framework"]
    others = [row for row in rows if row["kind"] != "framework"]
    total = ["total", _mib(sum(row["bytes"] or 0 for row in rows)), *[""] * 5]
    groups = [[_cells(row) for row in frameworks], [_cells(row) for row in others], [total]]
    notes = [f"* {row['name']}: {row['note']}" for row in rows if row["note"]]
    return "\n".join(
        [
            "<table>",
            f'<caption style="{_STYLE["left"]}; caption-side: top">{"<br>".join(lines)}</caption>',
            f"<thead>{_row('th', ['MiB', *_NUMBERS, 'cap is'])}</thead>",
            *(_group(group, bool(number)) for number, group in enumerate(groups) if group),
            "</table>",
            *(f"<div>{escape(note)}</div>" for note in notes),
        ]
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    live = row["kind"] == "framework" and row["in_use"] is not None
    return [
        row["name"] + ("*" if row["note"] else ""),
        ("≥ " if row["at_least"] is not None else "") + _mib(row["bytes"]),
        "" if row["cap"] is None else _mib(row["cap"]),
        *(_mib(row[name]) if live else "" for name in ("in_use", "cached", "reclaimable")),
        row["enforcement"],
    ]


def _group(rows: Iterable[list[str]], ruled: bool) -> str:
    style = f' style="{_RULE}"' if ruled else ""
    return f"<tbody{style}>{''.join(_row('td', row) for row in rows)}</tbody>"


def _row(tag: str, cells: list[str]) -> str:
    sides = ["left", *["right"] * len(_NUMBERS), "left"]
    written = (f'<{tag} style="{_STYLE[side]}">{escape(cell)}</{tag}>' for side, cell in zip(sides, cells, strict=True))
    return f"<tr>{''.join(written)}</tr>"


def _mib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / MIB:,.1f}"

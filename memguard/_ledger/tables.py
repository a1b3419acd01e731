"""The ledger as tables: by rich for terminals and text, and in HTML for notebooks.

The HTML is written here because rich exports preformatted text of one width, whose cells no notebook can select.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from memguard._base.displays import table
from memguard._base.text import html, visible
from memguard._base.units import MIB, format_size
from memguard._ledger.types import DeviceLedger, Ledger, Row

if TYPE_CHECKING:
    from rich.console import RenderableType

NUMBERS = ("held", "cap", "in use", "cached", "trimmable")
COLUMNS = ("MiB", *NUMBERS, "cap is")
LINE, AT_LEAST = "─", "≥ "


def rich_ledger(ledger: Ledger, *, ascii_only: bool = False) -> RenderableType:
    """One table for each GPU, sizes in MiB, and the notes below them. `ascii_only`: in these characters alone."""
    from rich.console import Group
    from rich.text import Text

    tables = [_rich_table(part, ledger.simulated, ascii_only) for part in ledger.devices]
    return Group(*tables, *(Text(f"note: {visible(note)}") for note in ledger.notes))


def html_ledger(ledger: Ledger) -> str:
    """The same in HTML."""
    tables = [_html_table(part, ledger.simulated) for part in ledger.devices]
    return "\n".join([*tables, *(f"<div>note: {html(note)}</div>" for note in ledger.notes)])


def _rich_table(part: DeviceLedger, simulated: bool, ascii_only: bool) -> RenderableType:
    from rich import box
    from rich.table import Table

    ordinal = "" if part.device.ordinal is None else f"cuda:{part.device.ordinal}, "
    table = Table(
        title=f"{part.device.name}{' (simulated)' if simulated else ''}  {part.device.uuid}",
        caption="\n".join([ordinal + _process(part), *map(visible, _notes(part))]),
        title_justify="left",
        caption_justify="left",
        box=box.Box(str(box.SIMPLE_HEAD).replace(LINE, "-"), ascii=True) if ascii_only else box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True)
    for group in _groups(part):
        for row in group:
            table.add_row(*(visible(cell.replace(AT_LEAST, ">= ") if ascii_only else cell) for cell in row))
        table.add_section()
    return table


def _html_table(part: DeviceLedger, simulated: bool) -> str:
    mark = " (simulated)" if simulated else ""
    caption = f"<b>{html(part.device.name)}{mark}</b> {html(part.device.uuid)}<br>{_process(part)}"
    return "\n".join(
        [table(caption, COLUMNS, _groups(part), NUMBERS), *(f"<div>{html(note)}</div>" for note in _notes(part))]
    )


def _process(part: DeviceLedger) -> str:
    limit = "" if part.limit is None else f" of its limit of {format_size(part.limit)}"
    if part.suspended is not None:
        limit = "" if part.limit is None else f" (its limit: {format_size(part.limit)})"
        return f"this process: suspended, {format_size(part.suspended)} in host memory{limit}"
    return f"this process: {format_size(part.process)}{limit}"


def _notes(part: DeviceLedger) -> list[str]:
    return [f"* {row.name}: {note}" for row in part.rows if (note := _note(row))]


def _note(row: Row) -> str:
    """Its note, and how often it was refused memory."""
    notes = [row.note] if row.note else []
    if row.refused and row.last_refused is not None:
        times = "once" if row.refused == 1 else f"{row.refused:,} times, the last time"
        when = datetime.fromtimestamp(row.last_refused).strftime("%H:%M:%S")
        notes.append(f"was refused memory {times} at {when}: memguard.last_oom()")
    return "; ".join(notes)


def _groups(part: DeviceLedger) -> list[list[list[str]]]:
    """The cells in the order of `COLUMNS`: of the frameworks, of the other rows, of the sum and what follows it."""
    unified = part.device.unified
    summed = part.own_rows if unified else part.rows
    frameworks = [_cells(row) for row in summed if row.kind == "framework"]
    others = [_cells(row) for row in summed if row.kind != "framework"]
    empty = [""] * (len(COLUMNS) - 2)
    last = [["this process" if unified else "total", _mib(part.sum), *empty]]
    if unified:
        last += [_cells(row) for row in part.rows if row not in summed]
        last.append(["total by CUDA", _mib(part.device.total), *empty])
    return [frameworks, others, last]


def _cells(row: Row) -> list[str]:
    live = row.kind == "framework" and row.in_use is not None
    return [
        row.name + ("*" if _note(row) else ""),
        (AT_LEAST if row.at_least is not None else "") + _mib(row.bytes),
        "" if row.cap is None else _mib(row.cap),
        *(_mib(size) if live else "" for size in (row.in_use, row.cached, row.reclaimable)),
        row.enforcement,
    ]


def _mib(size: int | None) -> str:
    """One unit for the whole table, so that columns can be compared at a glance."""
    return "unknown" if size is None else f"{size / MIB:,.1f}"

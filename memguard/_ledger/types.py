"""The ledger's data types, and its tables for terminals and notebooks; no I/O.

A ledger lists each GPU's memory by holder. Its rows add up to the total that the driver reports:

frameworks + overhead + unaccounted + other processes + driver reserve + free = total, to the byte

NVML reports no used or free bytes for a GPU with unified memory (`Device.unified`). For such a GPU the first three rows
add up to this process's bytes:

frameworks + overhead + unaccounted = this process's bytes, to the byte
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from memguard._base.text import fitting, html, shown, visible
from memguard._base.types import Device
from memguard._base.units import MIB, format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

NUMBERS = ("held", "cap", "in use", "cached", "trimmable")
COLUMNS = ("MiB", *NUMBERS, "cap is")
LINE, AT_LEAST = "─", "≥ "
_OWN = ("framework", "overhead", "unaccounted", "suspended")
EXCHANGE = "exchange"
"""The name of the row for GPU memory that `memguard.exchange` keeps allocated for other processes."""


@dataclass(frozen=True, init=False)
class Row:
    """One row of the ledger. Sizes are bytes, None if unknown. `DeviceLedger.sum` adds `bytes`.

    kind: framework, overhead, unaccounted, suspended, other processes, driver reserve, free. `lent` is the number of a
    framework's bytes that other frameworks have views of, each byte counted once; None if there is no such view.
    `refused` counts the allocations that the framework's allocator refused on this GPU since the budget was applied;
    None if the allocator does not report refusals. `last_refused` is the time of the last refusal (seconds, as of
    `time.time()`); None if unknown. `refused` and `last_refused` are None in rows of other kinds.
    """

    kind: str
    name: str
    bytes: int | None
    cap: int | None = None
    in_use: int | None = None
    cached: int | None = None
    reclaimable: int | None = None
    enforcement: str = ""
    at_least: int | None = None
    at_most: int | None = None
    note: str = ""
    lent: int | None = None
    refused: int | None = None
    last_refused: float | None = None

    def __init__(
        self,
        kind: str,
        name: str,
        bytes: int | None,  # noqa: A002 (the field's name)
        cap: int | None = None,
        in_use: int | None = None,
        cached: int | None = None,
        reclaimable: int | None = None,
        enforcement: str = "",
        at_least: int | None = None,
        at_most: int | None = None,
        note: str = "",
        lent: int | None = None,
        refused: int | None = None,
        last_refused: float | None = None,
    ) -> None:
        # One update: the generated `__init__` of a frozen dataclass calls `object.__setattr__` for each field, which
        # takes three times as long.
        vars(self).update(
            kind=kind, name=name, bytes=bytes, cap=cap, in_use=in_use, cached=cached, reclaimable=reclaimable,
            enforcement=enforcement, at_least=at_least, at_most=at_most, note=note, lent=lent, refused=refused,
            last_refused=last_refused,
        )  # fmt: skip


@dataclass(frozen=True)
class Lent:
    """One framework's memory on a GPU that other frameworks have views of.

    `bytes` counts each byte once. `to` has the bytes that each consumer views.
    """

    bytes: int
    to: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = ", ".join(f"to {name} {format_size(size)}" for name, size in self.to.items())
        return f"lends {format_size(self.bytes)}: {parts}"


@dataclass(frozen=True)
class DeviceLedger:
    """The ledger of one GPU. `process`: this process's memory by NVML, None if unknown. `moved`: the figures changed
    while they were read, so the rows may be inconsistent.

    `sum`: the sum of the rows in bytes, which equals `device.total`. On a GPU with unified memory only the rows of this
    process are added: `sum` equals `process`, and is None if `process` is unknown.

    `suspended`: the process's bytes in host memory while the process is suspended (off the GPU); None otherwise. The
    other rows of a suspended process keep their last figures, a row of kind `suspended` subtracts them, and `process`
    is 0. A suspended process cannot read the GPU's free memory: `sum` is None unless another process reads the GPU.
    """

    device: Device
    rows: tuple[Row, ...]
    process: int | None
    limit: int | None = None
    moved: bool = False
    suspended: int | None = None

    @classmethod
    def later(
        cls, device: Device, rows: Callable[[], tuple[Row, ...]], process: int | None, limit: int | None, moved: bool
    ) -> DeviceLedger:
        """A ledger that calls `rows` when its attribute `rows` is first read. `rows` must always return equal rows."""
        found = cls.__new__(cls)
        vars(found).update(device=device, process=process, limit=limit, moved=moved, suspended=None, _rows=rows)
        return found

    def __getattr__(self, name: str) -> Any:
        """Call the function given to `later` on first access to `rows`."""
        make = vars(self).get("_rows") if name == "rows" else None
        if make is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        vars(self)["rows"] = rows = make()
        vars(self).pop("_rows", None)
        return rows

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.device, self.rows, self.process, self.limit, self.moved, self.suspended)

    @property
    def own_rows(self) -> tuple[Row, ...]:
        """This process's rows: frameworks, overhead, unaccounted, and `suspended`, which subtracts the others."""
        return tuple(row for row in self.rows if row.kind in _OWN)

    @property
    def sum(self) -> int | None:
        if self.suspended is not None and any(row.kind == "free" and row.bytes is None for row in self.rows):
            return None
        if not self.device.unified:
            return sum(row.bytes or 0 for row in self.rows)
        return None if self.process is None else sum(row.bytes or 0 for row in self.own_rows)

    def row(self, name: str) -> Row:
        """The row named `name`. Raises KeyError for an unknown name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)


@dataclass(frozen=True)
class Ledger:
    """The ledgers of all GPUs of the budget, from one reading. `print` it, or use `as_dict()` / `to_json()`."""

    time: float
    devices: tuple[DeviceLedger, ...]
    simulated: bool = False
    notes: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """The ledger as JSON types; sizes in bytes, unknown sizes as null. Format version 1 never renames a key."""
        return {
            "memguard_ledger": 1,
            "time": datetime.fromtimestamp(self.time, UTC).isoformat(),
            "simulated": self.simulated,
            "notes": list(self.notes),
            "devices": [
                {
                    "uuid": gpu.device.uuid,
                    "name": gpu.device.name,
                    "total": gpu.device.total,
                    "unified": gpu.device.unified,
                    "process": gpu.process,
                    "limit": gpu.limit,
                    "moved": gpu.moved,
                    "suspended": gpu.suspended,
                    "rows": [vars(row) for row in gpu.rows],
                }
                for gpu in self.devices
            ],
        }

    def to_json(self) -> str:
        """`as_dict()` as JSON text."""
        import json

        return json.dumps(self.as_dict(), indent=2)

    def __repr__(self) -> str:
        """One line, for a prompt; `print` shows the table."""
        mark = " (simulated)" if self.simulated else ""
        texts = []
        for gpu in self.devices:
            limit = "" if gpu.limit is None else f" of limit {format_size(gpu.limit)}"
            held = "suspended" if gpu.suspended is not None else f"{format_size(gpu.process)}{limit}"
            texts.append(f"{gpu.device.name}{mark}: {held}")
        return shown(f"<Ledger {'; '.join(texts) or 'of no GPU'}>")

    def __rich__(self) -> RenderableType:
        return rich_ledger(self)

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        out = StringIO()
        # By default rich displays the output itself in a notebook, and writes terminal codes if FORCE_COLOR is set.
        # Jupyter sets FORCE_COLOR.
        plain = Console(
            file=out, width=80, highlight=False, markup=False, no_color=True, force_jupyter=False, force_terminal=False
        )
        plain.print(rich_ledger(self, ascii_only=fitting(LINE) != LINE))
        return shown(out.getvalue().rstrip("\n"))

    def _repr_html_(self) -> str:
        return html_ledger(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The text that IPython shows in a terminal."""
        printer.text(str(self))


# Tables: rich renders them for terminals and as text. The HTML for notebooks is written here, because rich exports
# preformatted text of a fixed width, whose cells cannot be selected in a notebook.


def rich_ledger(ledger: Ledger, *, ascii_only: bool = False) -> RenderableType:
    """A table for each GPU, with sizes in MiB, and notes below the tables. `ascii_only`: use only ASCII characters."""
    from rich.console import Group
    from rich.text import Text

    tables = [_rich_table(gpu, ledger.simulated, ascii_only) for gpu in ledger.devices]
    return Group(*tables, *(Text(f"note: {visible(note)}") for note in ledger.notes))


def html_ledger(ledger: Ledger) -> str:
    """The tables and notes of `rich_ledger`, in HTML."""
    tables = [_html_table(gpu, ledger.simulated) for gpu in ledger.devices]
    return "\n".join([*tables, *(f"<div>note: {html(note)}</div>" for note in ledger.notes)])


def _rich_table(gpu: DeviceLedger, simulated: bool, ascii_only: bool) -> RenderableType:
    from rich import box
    from rich.table import Table

    ordinal = "" if gpu.device.ordinal is None else f"cuda:{gpu.device.ordinal}, "
    table = Table(
        title=f"{gpu.device.name}{' (simulated)' if simulated else ''}  {gpu.device.uuid}",
        caption="\n".join([ordinal + _process(gpu), *map(visible, _notes(gpu))]),
        title_justify="left",
        caption_justify="left",
        box=box.Box(str(box.SIMPLE_HEAD).replace(LINE, "-"), ascii=True) if ascii_only else box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True)
    for group in _groups(gpu):
        for row in group:
            table.add_row(*(visible(cell.replace(AT_LEAST, ">= ") if ascii_only else cell) for cell in row))
        table.add_section()
    return table


def _html_table(gpu: DeviceLedger, simulated: bool) -> str:
    from memguard._base.displays import table

    mark = " (simulated)" if simulated else ""
    caption = f"<b>{html(gpu.device.name)}{mark}</b> {html(gpu.device.uuid)}<br>{_process(gpu)}"
    return "\n".join(
        [table(caption, COLUMNS, _groups(gpu), NUMBERS), *(f"<div>{html(note)}</div>" for note in _notes(gpu))]
    )


def _process(gpu: DeviceLedger) -> str:
    limit = "" if gpu.limit is None else f" of its limit of {format_size(gpu.limit)}"
    if gpu.suspended is not None:
        limit = "" if gpu.limit is None else f" (its limit: {format_size(gpu.limit)})"
        off = next((row.note for row in gpu.own_rows if row.kind == "suspended"), "suspended")
        return f"this process: {off}{limit}"
    return f"this process: {format_size(gpu.process)}{limit}"


def _notes(gpu: DeviceLedger) -> list[str]:
    return [f"* {row.name}: {note}" for row in gpu.rows if (note := _note(row))]


def _note(row: Row) -> str:
    """The row's note, followed by the number and time of the framework's refusals."""
    notes = [row.note] if row.note else []
    if row.refused and row.last_refused is not None:
        times = "once" if row.refused == 1 else f"{row.refused:,} times, the last time"
        when = datetime.fromtimestamp(row.last_refused).strftime("%H:%M:%S")
        notes.append(f"was refused memory {times} at {when}: memguard.last_oom()")
    return "; ".join(notes)


def _groups(gpu: DeviceLedger) -> list[list[list[str]]]:
    """The cells in the order of `COLUMNS`, in three groups: frameworks; other rows; the sum and the rows below it."""
    unified = gpu.device.unified
    summed = gpu.own_rows if unified else gpu.rows
    frameworks = [_cells(row) for row in summed if row.kind == "framework"]
    others = [_cells(row) for row in summed if row.kind != "framework"]
    empty = [""] * (len(COLUMNS) - 2)
    last = [["this process" if unified else "total", _mib(gpu.sum), *empty]]
    if unified:
        last += [_cells(row) for row in gpu.rows if row not in summed]
        last.append(["total by CUDA", _mib(gpu.device.total), *empty])
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
    """A size in MiB, without the unit, which the table's header names."""
    return "unknown" if size is None else f"{size / MIB:,.1f}"

"""Who holds what on each GPU, in rows that add up to what the driver says. Pure; `guard` takes the readings.

    frameworks + overhead + unaccounted + other processes + driver reserve + free = total, to the byte

A framework that does not say what it holds (TensorFlow with growth) counts with the least it must hold; what
lies above that is in `unaccounted`, whose row then says so. `unaccounted` is signed.

Overhead (context, modules, library workspaces) is charged when it appears, never as what is left over: the
context, a framework's modules and NCCL's communicators in the first reading after they turn up (what a
communicator takes only at its first collective, then), a library's first use as one step of at most 112 MiB, or
two at once in the reading after that, all within what `policy` knows of the frameworks that are live. What grows
otherwise, or beyond that, is unaccounted. The gaps in the driver's slabs are counted by address. A second context
is often seen only after it was made: it is charged then, of what was nobody's until then, and has a row of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from memguard._policy import SLACK, modules, workspace
from memguard._specs import CONTEXT, SECOND_CONTEXT
from memguard._types import Device, DevicePlan, MemoryInfo, Usage
from memguard._units import MIB, format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

STEP = 112 * MIB
"""Above the largest growth seen at one library's first use on an H200: 98 MiB, cuSOLVER's modules."""
EXCHANGE = "exchange"
"""The row of what is held for other processes, beside the frameworks'."""


@dataclass(frozen=True)
class Overhead:
    """What has been charged as overhead on one device so far, and what had appeared by then.

    `gap` is the largest so far: what goes and comes back, or was counted a moment too early, is not charged twice.
    `last` is that of the last reading: what appears is charged with what it grew since, whatever came and went before.
    `owed` is what communicators may still take: one that is made eagerly takes most of it at its first collective.
    `slabs` is what the driver holds of its slabs beyond what frameworks count: of this reading, and no part of a gap.
    `fresh` where something appeared in the last reading. `second` is the part of `charged` that is for contexts beside
    the primary one.
    """

    charged: int = 0
    gap: int = 0
    appeared: frozenset[str] = frozenset()
    owed: int = 0
    last: int = 0
    slabs: int = 0
    fresh: bool = False
    second: int = 0

    @property
    def total(self) -> int:
        return self.charged + self.slabs

    def after(self, gap: int, appeared: frozenset[str], exact: bool = True) -> Overhead:
        """The state after a reading: `gap` is the process's bytes less what frameworks hold.

        Not `exact` where one does not say what it holds: part of the gap is then its pool, and no more is charged
        than was measured of what appeared.
        """
        growth, since = gap - self.gap, gap - self.last
        new, gone = appeared - self.appeared, self.appeared - appeared
        expected = expected_overhead(appeared, exact)
        if new:
            growth = max(growth, min(since, expected - expected_overhead(self.appeared, exact)))
        late = sum(map(modules, _second(new)))
        growth = max(growth, min(late, gap - self.charged))
        owed = min(self.owed, _of_libraries(appeared)) + _of_libraries(new)
        step = max(STEP, owed)
        if self.fresh:  # what has just turned up is put to work, and two libraries' first uses come at once
            step = max(step, min(expected_overhead(appeared, exact=False) - self.charged, 2 * STEP))
        charge = max(min(growth, expected - self.charged), 0) if new or growth <= step else 0
        if charge > STEP:
            owed = max(owed - charge, 0)
        shrunk, second = self.charged, self.second
        if ended := _second(gone):
            second -= second * len(ended) // len(_second(self.appeared))
        if "context" not in appeared:
            shrunk = min(shrunk, max(gap, 0))
        elif gone and since < 0:  # NCCL's communicators were destroyed, or a framework let go of the GPU
            shrunk = max(shrunk + max(since, -sum(workspace(name) for name in gone)), 0)
        most = gap if gone else max(gap, self.gap)
        second = min(second + min(charge, late), shrunk + charge)
        return Overhead(shrunk + charge, most, appeared, owed, gap, self.slabs, bool(new), second)


def _of_libraries(names: frozenset[str]) -> int:
    """What those of them may take that `Framework.libraries` numbers, as `nccl 1`."""
    return sum(workspace(name) for name in names - _second(names) if " " in name)


def _second(names: frozenset[str]) -> frozenset[str]:
    """Those that stand for contexts beside the primary one."""
    return frozenset(name for name in names if name.startswith(SECOND_CONTEXT))


def expected_overhead(appeared: frozenset[str], exact: bool = True) -> int:
    """What overhead may come to with this much live: the figures behind `reserve: auto`, or the measured ones."""
    if not appeared:
        return 0
    if not exact:
        return sum(modules(name) for name in appeared | {"context"})
    return CONTEXT + SLACK + sum(workspace(name) for name in appeared - {"context"})


@dataclass(frozen=True)
class Row:
    """One line of the ledger. `bytes` is what counts in the sum; None means unknown.

    kind: framework, overhead, unaccounted, other processes, driver reserve, free. `lent` is the part of a framework's
    memory that others have views of, each byte once; None where nothing is lent.
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


@dataclass(frozen=True)
class Lent:
    """What one framework lends on a device: `bytes` counts each byte once, `to` once for each borrower."""

    bytes: int
    to: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        said = ", ".join(f"to {name} {format_size(size)}" for name, size in self.to.items())
        return f"lends {format_size(self.bytes)}: {said}"


@dataclass(frozen=True)
class DeviceLedger:
    """One device's rows. `process` is what NVML says this process holds; None where it will not say."""

    device: Device
    rows: tuple[Row, ...]
    process: int | None
    limit: int | None = None
    moved: bool = False

    def row(self, name: str) -> Row:
        """The row of that name. KeyError where there is none."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)


@dataclass(frozen=True)
class Ledger:
    """One reading of every device of the budget. `print` it, or take `as_dict()` / `to_json()`."""

    time: float
    devices: tuple[DeviceLedger, ...]
    simulated: bool = False
    notes: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Plain data; sizes in bytes, unknown as null. The keys are stable within `memguard_ledger` 1."""
        return {
            "memguard_ledger": 1,
            "time": datetime.fromtimestamp(self.time, timezone.utc).isoformat(),
            "simulated": self.simulated,
            "notes": list(self.notes),
            "devices": [
                {
                    "uuid": part.device.uuid,
                    "name": part.device.name,
                    "total": part.device.total,
                    "process": part.process,
                    "limit": part.limit,
                    "moved": part.moved,
                    "rows": [vars(row) for row in part.rows],
                }
                for part in self.devices
            ],
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [_table(part, self.simulated) for part in self.devices]
        parts += [Text(f"note: {note}") for note in self.notes]
        return Group(*parts)

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        out = StringIO()
        # In a notebook rich would show it there and then; where FORCE_COLOR is set, as Jupyter does, in italics.
        plain = Console(
            file=out, width=80, highlight=False, markup=False, no_color=True, force_jupyter=False, force_terminal=False
        )
        plain.print(self)
        return out.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        from memguard._ledger.tables import ledger_table

        return ledger_table(self.as_dict())

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython shows in a terminal."""
        printer.text(str(self))


def device_ledger(
    device: Device,
    memory: MemoryInfo,
    own: int | None,
    usages: Mapping[str, Usage | None],
    enforcements: Mapping[str, str],
    overhead: Overhead,
    part: DevicePlan | None = None,
    moved: bool = False,
    makers: Sequence[str] = (),
    lent: Mapping[str, Lent] | None = None,
) -> DeviceLedger:
    """The rows of one device from one reading. `own` is what this process holds, `overhead` the state after it.

    `makers` are those of the contexts beside the primary one, `lent` is by framework.
    """
    rows = []
    counted = 0
    silent = []
    for name in dict.fromkeys([*(part.caps if part else ()), *usages]):
        usage = usages.get(name)
        cap = part.caps.get(name) if part else None
        if usage is None:
            rows.append(Row("framework", name, 0, cap, enforcement=enforcements.get(name, "")))
            continue
        size = usage.held if usage.held is not None else usage.held_at_least
        counted += size or 0
        if usage.held is None:
            silent.append(name)
        cached = usage.held - usage.in_use if usage.held is not None and usage.in_use is not None else None
        loan = lent.get(name) if lent else None
        notes = [] if usage.held is not None else [f"held unknown{', at least this' if size is not None else ''}"]
        notes += [] if loan is None else [str(loan)]
        rows.append(
            Row(
                "framework",
                name,
                size,
                cap,
                usage.in_use,
                cached,
                usage.reclaimable,
                enforcements.get(name, ""),
                usage.held_at_least if usage.held is None else None,
                usage.held_at_most if usage.held is None else None,
                "; ".join(notes),
                None if loan is None else loan.bytes,
            )
        )
    second = overhead.second if makers else 0
    rows.append(Row("overhead", "overhead", overhead.total - second))
    if makers:
        rows.append(Row("overhead", SECOND_CONTEXT, second or None, note=_of_contexts(makers, bool(second))))
    if own is None:
        rest = memory.used - counted - overhead.total
        note = "this process and others together: NVML does not name this process here"
        rows.append(Row("unaccounted", "unaccounted", rest, note=note))
        rows.append(Row("other processes", "other processes", None, note="unknown: see unaccounted"))
    else:
        note = f"includes what {' and '.join(silent)} may hold beyond what is known" if silent else ""
        rows.append(Row("unaccounted", "unaccounted", own - counted - overhead.total, note=note))
        rows.append(Row("other processes", "other processes", memory.used - own))
    reserve_note = "" if memory.reserved is not None else "unknown on this driver: counted under other processes"
    rows.append(Row("driver reserve", "driver reserve", memory.reserved, note=reserve_note))
    rows.append(Row("free", "free", memory.free))
    return DeviceLedger(device, tuple(rows), own, part.limit if part else None, moved)


def _of_contexts(makers: Sequence[str], charged: bool) -> str:
    """Who made the contexts beside the primary one, what they cost, and how not to have them."""
    many = f"{len(makers)} contexts, " if len(makers) > 1 else ""
    names = [name if name != "unknown" else "something unknown" for name in dict.fromkeys(makers)]
    where = "" if charged else "; its cost is in unaccounted"
    return (
        f"{many}made by {' and '.join(names)}, about {format_size(modules(SECOND_CONTEXT))} each (measured on an "
        f"H200){where}; fix: import pycuda.autoinit after memguard.init, with `context: primary` for pycuda in the "
        "budget, or use memguard.exchange.pycuda_context"
    )


def own_bytes(processes: Mapping[int, int | None], pid: int, active: bool) -> int | None:
    """What this process holds by NVML; None where NVML lists it without bytes, or not at all though it is active.

    The second is a container whose PIDs NVML knows by the host's numbers.
    """
    if pid in processes:
        return processes[pid]
    return None if active else 0


def gap(own: int | None, usages: Iterable[Usage | None], slabs: int = 0) -> int | None:
    """This process's bytes less what its frameworks are known to hold and the gaps in the driver's slabs."""
    if own is None:
        return None
    known = (u.held if u.held is not None else u.held_at_least or 0 for u in usages if u is not None)
    return own - sum(known) - slabs


def totals(usages: Iterable[Usage | None]) -> tuple[int | None, int | None]:
    """What one framework has in use on all GPUs together, and its peak; each None where one does not say."""
    known = [usage for usage in usages if usage is not None]
    peaks = [usage.peak for usage in known if usage.peak is not None]
    unsaid = any(usage.in_use is None for usage in known)
    return None if unsaid else sum(usage.in_use or 0 for usage in known), sum(peaks) if peaks else None


def _table(part: DeviceLedger, simulated: bool) -> RenderableType:
    from rich import box
    from rich.table import Table

    from memguard._ledger.tables import COLUMNS, NUMBERS, cells, total

    ordinal = "" if part.device.ordinal is None else f"cuda:{part.device.ordinal}, "
    limit = "" if part.limit is None else f" of its limit of {format_size(part.limit)}"
    captions = [f"{ordinal}this process: {format_size(part.process)}{limit}"]
    captions += [f"* {row.name}: {row.note}" for row in part.rows if row.note]
    table = Table(
        title=f"{part.device.name}{' (simulated)' if simulated else ''}  {part.device.uuid}",
        caption="\n".join(captions),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True)
    for row in part.rows:
        table.add_row(*cells(vars(row)), end_section=row is _last_framework(part.rows))
    table.add_section()
    table.add_row(*total(vars(row) for row in part.rows))
    return table


def _last_framework(rows: Sequence[Row]) -> Row | None:
    frameworks = [row for row in rows if row.kind == "framework"]
    return frameworks[-1] if frameworks else None

"""`memguard ps`: the processes with GPU memory, and those that are suspended."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from memguard.cli.support import options

if TYPE_CHECKING:
    from memguard._node.suspend.processes import Listing, Row

_HEAD = ("PID", "USER", "GPU MEMORY", "RECLAIMABLE", "BUSY", "BUDGET", "STATE", "COMMAND")
_PATIENCE = 2.0
"""Seconds in which all processes together may say what they could give back."""


@click.command("ps")
@options.as_json
def ps(as_json: bool) -> None:
    """List the processes with GPU memory, and those of yours that are suspended, which `nvidia-smi` does not list.

    BUSY is the utilisation over the last few seconds. "unknown" is what NVML does not say, and whether a process runs
    under a budget if it did not say so itself. Processes of other containers are not seen. Of a suspended process GPU
    MEMORY is what it needs to come back. RECLAIMABLE is what `memguard.trim()` in the process would return, known of a
    budget with `monitor: {top: true}`. One that is "locked", or "suspended" in the midst of a step, and that nobody
    works on, was left by a command that died: `memguard resume PID` brings it back. One that "failed" is lost: end it.

    Exit code 0: the list was printed; 3: no NVIDIA driver or GPU.
    """
    from memguard._node.suspend import processes
    from memguard._node.suspend.driver.client import Client

    with Client() as client:
        found = processes.listing(processes.read(lambda: client))
    sizes = _reclaimable({row.pid for row in found.rows if row.state == "running"})
    if as_json:
        shown = found.as_dict()
        shown["processes"] = [{**row, "reclaimable": sizes.get(row["pid"])} for row in shown["processes"]]
        click.echo(json.dumps(shown, indent=2))
        return
    click.echo(table(found, time.time(), sizes))


def _reclaimable(pids: set[int]) -> dict[int, int]:
    """The bytes that these processes could give back, by PID, of those that answer and know it."""
    from memguard._tools.top import client
    from memguard.errors import MemguardError

    found: dict[int, int] = {}
    until = time.monotonic() + _PATIENCE
    for process in client.listening():
        if process.pid in pids and time.monotonic() < until:
            try:
                target, _ = client.snapshot(process)
            except (MemguardError, OSError):
                continue
            sizes = [part.returnable for share in target.shares for part in share.frameworks]
            if None not in sizes:
                found[process.pid] = sum(size or 0 for size in sizes)
    return found


def table(found: Listing, now: float, reclaimable: Mapping[int, int]) -> str:
    """One line for each process. Pure."""
    numbers = {gpu.uuid: gpu.index for gpu in found.gpus}
    rows = [_HEAD, *(_cells(row, numbers, now, reclaimable.get(row.pid)) for row in found.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    if not found.rows:
        lines = ["no process with GPU memory is seen here"]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _cells(row: Row, numbers: dict[str, int], now: float, reclaimable: int | None) -> tuple[str, ...]:
    from memguard._base.text import visible
    from memguard._base.units import format_size

    sizes = ", ".join(f"{numbers.get(uuid, uuid)}: {format_size(size)}" for uuid, size in row.bytes.items())
    state = row.state
    if row.state != "running" and row.since is not None:
        state = f"{row.state} for {_span(now - row.since)}"  # type: ignore[assignment]
    if row.worker is not None or (row.step not in (None, row.state) and row.state != "running"):
        by = f" by {row.worker}" if row.worker else ""
        state = f"{state} ({row.step}{by})"  # type: ignore[assignment]
    busy = "unknown" if row.busy is None else f"{row.busy}%"
    texts = (row.user or "unknown", sizes or "unknown", format_size(reclaimable), busy)
    budget = row.budget or ("unknown" if row.budget is None else "yes")
    return (str(row.pid), *(visible(text, keep="") for text in (*texts, budget, state, row.command or "unknown")))


def _span(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"

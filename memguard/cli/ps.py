"""`memguard ps`: the processes with GPU memory, and those that are suspended."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from memguard.cli.support import options

if TYPE_CHECKING:
    from memguard._node.suspend.processes import Listing, Row

_HEAD = ("PID", "USER", "GPU MEMORY", "BUSY", "BUDGET", "STATE", "COMMAND")


@click.command("ps")
@options.as_json
def ps(as_json: bool) -> None:
    """List the processes with GPU memory, and those of yours that are suspended, which `nvidia-smi` does not list.

    BUSY is the utilisation over the last few seconds. "unknown" is what NVML does not say, and whether a process runs
    under a budget if it did not say so itself. Processes of other containers are not seen. Of a suspended process GPU
    MEMORY is what it needs to come back. One that is "locked", or "suspended" in the midst of a step, and that nobody
    works on, was left by a command that died: `memguard resume PID` brings it back. One that "failed" is lost: end it.

    Exit code 0: the list was printed; 3: no NVIDIA driver or GPU.
    """
    from memguard._node.suspend import processes
    from memguard._node.suspend.driver.client import Client

    with Client() as client:
        found = processes.listing(processes.read(lambda: client))
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
        return
    click.echo(table(found, time.time()))


def table(found: Listing, now: float) -> str:
    """One line for each process. Pure."""
    numbers = {gpu.uuid: gpu.index for gpu in found.gpus}
    rows = [_HEAD, *(_cells(row, numbers, now) for row in found.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    if not found.rows:
        lines = ["no process with GPU memory is seen here"]
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _cells(row: Row, numbers: dict[str, int], now: float) -> tuple[str, ...]:
    from memguard._base.text import visible
    from memguard._base.units import format_size

    sizes = ", ".join(f"{numbers.get(uuid, uuid)}: {format_size(size)}" for uuid, size in row.bytes.items())
    state = row.state
    if row.state != "running" and row.since is not None:
        state = f"{row.state} for {_span(now - row.since)}"  # type: ignore[assignment]
    if row.worker is not None or (row.step not in (None, row.state) and row.state != "running"):
        by = f" by {row.worker}" if row.worker else ""
        state = f"{state} ({row.step}{by})"  # type: ignore[assignment]
    texts = (row.user or "unknown", sizes or "unknown", "unknown" if row.busy is None else f"{row.busy}%")
    budget = row.budget or ("unknown" if row.budget is None else "yes")
    return (str(row.pid), *(visible(text, keep="") for text in (*texts, budget, state, row.command or "unknown")))


def _span(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"

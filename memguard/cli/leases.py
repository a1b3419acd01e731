"""`memguard leases`: who has claimed what of each GPU, and who waits for it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import click

from memguard.cli.support import exit_codes, options

if TYPE_CHECKING:
    from memguard._node.leases.listing import Gpu, Listing, Row

_HEAD = ("GPU", "PID", "COMMAND", "BUDGET", "LEASE", "USED", "STATE")


@click.command("leases")
@options.as_json
@click.pass_context
def leases(context: click.Context, as_json: bool) -> None:
    """List the leases of your processes: what each has claimed of a GPU with `device: {lease: true}`, and who waits.

    USED is what NVML says that the process has on the GPU. Below the table stands what is free of leases, and who uses
    more of these GPUs than it has claimed, or uses them without a lease. Leases of simulated GPUs are apart from those
    of real ones. Of a process in another container the PID is "unknown".

    Exit code 0: the list was printed; 3: it was, but there is no driver or GPU, so that USED is unknown; 4: the
    leases cannot be read.
    """
    from memguard._node.leases.listing import read
    from memguard.errors import MemguardError

    try:
        found = read()
    except MemguardError as error:
        error.exit_code = exit_codes.UNKNOWN
        raise
    click.echo(json.dumps(found.as_dict(), indent=2) if as_json else table(found, time.time()))
    simulated = any(gpu.part.simulated for gpu in found.gpus)
    context.exit(exit_codes.YES if simulated or exit_codes.gpu_here() else exit_codes.NO_GPU)


def table(found: Listing, now: float) -> str:
    """One line for each claim, one for each GPU. Pure."""
    rows = [_HEAD, *(_cells(row, now) for gpu in found.gpus for row in gpu.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if not found.gpus:
        lines = [f"nobody has a lease in {found.folder}"]
    lines += [_sum(gpu) for gpu in found.gpus]
    if found.database != "ok":
        lines.append(f"note: the database is damaged: {found.database}")
    return "\n".join([*lines, *(f"note: {note}" for note in found.notes)])


def _cells(row: Row, now: float) -> tuple[str, ...]:
    from memguard._base.text import visible
    from memguard._base.units import format_size
    from memguard._node.leases.said import when

    claim = row.claim
    if claim.state == "off":
        state = "suspended, and does not count" + (f", since {when(claim.since, now)}" if claim.since else "")
    elif claim.since is not None:
        state = f"held since {when(claim.since, now)}"
    else:
        state = f"waiting since {when(claim.asked, now)}" + (f", {row.ahead} before it" if row.ahead else "")
    gpu = f"{row.part.number}{' (simulated)' if row.part.simulated else ''}"
    used = "unknown" if row.used is None else format_size(row.used)
    texts = (claim.command or "unknown", claim.budget, format_size(row.part.bytes), used, state)
    return (gpu, "unknown" if row.pid is None else str(row.pid), *(visible(text, keep="") for text in texts))


def _sum(gpu: Gpu) -> str:
    from memguard._base.units import format_size

    leased = f"{format_size(gpu.leased)} of {format_size(gpu.total)} leased"
    return f"{gpu.part}: {leased}, {format_size(gpu.free)} free of leases"

"""Who holds what, since when, in sentences. Pure, but for the local time zone."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from memguard._base.advice import Advice
from memguard._base.text import visible
from memguard._base.units import format_size
from memguard._node.leases.types import Claim, Part

_DAY = 86_400
_MOST = 5
"""Holders that are named: an error is read by people, and `memguard leases` lists all."""


def who(claim: Claim, here: str) -> str:
    """`process 1234 (python train.py, budget.yaml)`; a PID of another container is not named."""
    names = ", ".join(visible(name, keep="") for name in (claim.command, claim.budget) if name)
    process = f"process {claim.pid}" if claim.machine == here else "a process of another container"
    return f"{process} ({names})" if names else process


def when(then: float, now: float) -> str:
    """`12:03`, or `28 Nov 12:03` if that is not within a day."""
    return time.strftime("%H:%M" if abs(now - then) < _DAY else "%d %b %H:%M", time.localtime(then))


def wants(parts: Iterable[Part]) -> str:
    """`34.00 GiB of GPU 0 (NVIDIA H200)`."""
    return " and ".join(f"{format_size(part.bytes)} of {part}" for part in parts)


def holding(claim: Claim, gpu: str, here: str) -> str:
    """`34.00 GiB  process 1234 (…)`, of one GPU."""
    return f"{format_size(claim.parts[gpu].bytes)}  {who(claim, here)}"


def holders(held: Sequence[Claim], gpus: Iterable[str], here: str, now: float) -> str:
    """`process 1234 (…) holds 34.00 GiB since 12:03`."""
    wanted = set(gpus)
    said = []
    for claim in held[:_MOST]:
        parts = [part for gpu, part in claim.parts.items() if gpu in wanted]
        sizes = format_size(parts[0].bytes) if len(wanted) == 1 and len(parts) == 1 else wants(parts)
        since = "" if claim.since is None else f" since {when(claim.since, now)}"
        said.append(f"{who(claim, here)} holds {sizes}{since}")
    said += [f"{len(held) - _MOST} more hold some"] if len(held) > _MOST else []
    return "; ".join(said)


def waiting(parts: Sequence[Part], held: Sequence[Claim], ahead: int, here: str, now: float) -> str:
    text = f"waiting for {wants(parts)}"
    said = [holders(held, [part.gpu for part in parts], here, now)] if held else []
    said += [f"{ahead} {'waits' if ahead == 1 else 'wait'} before this one"] if ahead else []
    return f"{text}: {'; '.join(said)}" if said else text


def refused(
    parts: Sequence[Part], held: Sequence[Claim], ahead: int, here: str, now: float, waited: float | None
) -> Advice:
    after = "" if waited is None else f" after {_seconds(waited)}"
    said = [holders(held, [part.gpu for part in parts], here, now)] if held else []
    said += [f"{ahead} {'waits' if ahead == 1 else 'wait'} before this one"] if ahead else []
    fix = (
        "wait for them with 'wait: 10min' beside 'lease: true'"
        if waited is None
        else "write a longer 'wait' in the budget"
    )
    why = f": {'; '.join(said)}" if said else ""
    return Advice(
        f"there is no room for {wants(parts)}{after}{why}",
        f"{fix}, end one of them, or lower device.limit; `memguard leases` lists them",
    )


def too_large(part: Part) -> Advice:
    return Advice(
        f"a lease of {format_size(part.bytes)} can never be had: {part} has {format_size(part.total)}",
        f"lower device.limit to at most {format_size(part.total)}",
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"

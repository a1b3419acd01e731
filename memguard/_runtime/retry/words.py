"""Formats the log line of a retry and the note on an error that is not retried. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from memguard._base.units import format_size
from memguard._runtime.retry.types import Done, Failure

CAPTURING = "this thread captures a CUDA graph, which another run would spoil\n  fix: put the retry around the capture"


def several(why: str) -> str:
    return (
        f"{why}: the healthy ones wait in a collective, and a rank that repeats one misaligns the others\n"
        "  fix: let all ranks stop or skip the step together; of a function that holds no collective say so: "
        "memguard.retry(ranks='independent')"
    )


def not_again(why: str) -> str:
    """The note on an error without any retry."""
    return f"memguard did not run it again: {why}"


def done(what: Done, who: str | None) -> str:
    """The room made, as a sentence without a full stop. `who`: the requester, which can return only its own cache."""
    parts = []
    if what.freed:
        parts.append(f"the failed run let go of {format_size(what.freed)}")
    for name, size in what.returned.items():
        idle = "its own cache, " if name == who else ""
        parts.append(f"{name} gave back {idle}{format_size(size)} by NVML")
    if what.cap is not None:
        before, after = what.cap
        parts.append(f"{who}'s cap went from {format_size(before)} to {format_size(after)}")
    if what.freed is None:
        parts.append("the failed run was let go of; no budget is active, so no framework was asked for its cache")
    elif not parts:
        parts.append("nothing idle came back")
    parts += [f"{name} holds {format_size(size)} more in live arrays than its min" for name, size in what.live.items()]
    return "; ".join(parts)


def line(failure: Failure, what: Done, number: int, most: int, size: str) -> str:
    """The log line of retry `number` of at most `most`. `size`: for example `batch_size=32`, or empty."""
    smaller = f" with {size}" if size else ""
    return f"{failure.title}: {done(what, failure.who)}; running again{smaller} ({number} of {most})"


def history(runs: Sequence[str], end: str) -> str:
    """The note on the final error, with a line for each run. `end`: the reason why there is no further run."""
    lines = [f"memguard ran it {len(runs) + 1} times. {end}"]
    lines += [f"  run {number}: {text}" for number, text in enumerate(runs, 1)]
    return "\n".join([*lines, f"  run {len(runs) + 1}: this error"])

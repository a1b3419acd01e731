"""NVML's figure for one process at a fixed rate, in a process of its own: no other program's GIL can slow it.

    python -m bench.sampler 0.05

It prints `ready` once NVML is there, reads the PID from stdin, looks until stdin ends, and prints one line of JSON.
`bench.child.Sampler` starts it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.programs.six import Card


def summary(samples: list[tuple[float, int]], interval: float, failed: int = 0) -> dict[str, Any]:
    """What was seen: how often, for how long, the longest time between two looks, and the most bytes.

    samples   seconds and bytes of each look that found the process
    failed    looks at which NVML gave no answer: they leave a gap
    """
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(samples)]
    return {
        "samples": len(samples), "interval_ms": interval * 1e3, "longest_gap_ms": round(max(gaps, default=0) * 1e3, 1),
        "seconds": round(samples[-1][0] - samples[0][0], 1) if samples else 0.0, "failed": failed,
        "max_bytes": max((size for _, size in samples), default=0),
    }  # fmt: skip


def looking() -> Callable[[int], int | None] | None:
    """What finds the bytes of a PID on the first GPU, or None if there is no NVML."""
    try:
        card = Card()
    except Exception:
        return None
    return lambda pid: card.listed().get(pid)


def first_of_all() -> None:
    """Ask the kernel to run this process before others, if it allows that: it sleeps nearly all the time."""
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def main() -> None:
    interval = float(sys.argv[1])
    first_of_all()
    look = looking()
    print("ready", flush=True)
    pid = int(sys.stdin.readline() or 0)
    samples: list[tuple[float, int]] = []
    failed = 0
    following = time.monotonic()
    while look is not None and pid:
        size = None
        try:
            size = look(pid)
        except Exception:
            failed += 1
        now = time.monotonic()
        if size is not None:
            samples.append((now, size))
        following = max(following + interval, now)
        if select.select([sys.stdin], [], [], max(following - time.monotonic(), 0))[0]:
            break
    with contextlib.suppress(BrokenPipeError):
        print(json.dumps(summary(samples, interval, failed)), flush=True)


if __name__ == "__main__":
    main()

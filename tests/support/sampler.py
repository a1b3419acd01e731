"""NVML's figure for one process at a fixed rate, in a process of its own: no other program's GIL can slow it.

    python tests/support/sampler.py 0.05

It prints `ready` once NVML is there, reads the PID from stdin, looks until stdin ends, and prints one line of JSON.
`Sampler` starts it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any


class Sampler:
    """NVML's figure for one PID. `interval`: seconds between two looks."""

    def __init__(self, interval: float = 0.05) -> None:
        self.interval = interval
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(interval)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it looks from the process's first moment on

    def start(self, pid: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: `stop` says that it saw nothing
            self._process.stdin.write(f"{pid}\n")
            self._process.stdin.flush()

    def stop(self) -> dict[str, Any]:
        """What it saw; `summary` names the figures."""
        try:
            out, _ = self._process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            out, _ = self._process.communicate()
        try:
            found: dict[str, Any] = json.loads(out)
        except ValueError:
            return summary([], self.interval)
        return found


def summary(samples: list[tuple[float, int]], interval: float, failed: int = 0) -> dict[str, Any]:
    """What was seen: how often, for how long, the longest time between two looks, and the most bytes.

    samples   seconds and bytes of each look that found the process
    failed    looks at which NVML gave no answer: they leave a gap
    """
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(samples)]
    return {
        "samples": len(samples),
        "interval_ms": interval * 1e3,
        "longest_gap_ms": round(max(gaps, default=0) * 1e3, 1),
        "seconds": round(samples[-1][0] - samples[0][0], 1) if samples else 0.0,
        "failed": failed,
        "max_bytes": max((size for _, size in samples), default=0),
    }


def looking() -> Callable[[int], int | None] | None:
    """What finds the bytes of a PID on the first GPU, or None if there is no NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        by_uuid = shown.startswith("GPU-") and "," not in shown
        handle = pynvml.nvmlDeviceGetHandleByUUID(shown) if by_uuid else pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:
        return None

    def look(pid: int) -> int | None:
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == pid:
                return int(process.usedGpuMemory or 0)
        return None

    return look


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

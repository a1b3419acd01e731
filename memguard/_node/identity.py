"""Whether a PID is still the same process: read from `/proc`."""

from __future__ import annotations

import os
from typing import NamedTuple

from memguard._devices.processes import proc


class Process(NamedTuple):
    """One process, as long as it lives: a PID alone is given again to another.

    `start` is field 22 of `/proc/PID/stat`, in clock ticks since the machine started.
    """

    pid: int
    start: int


def start_of(pid: int) -> int | None:
    """When it started, in clock ticks since the machine did; None if there is no such process, or it has ended."""
    found = proc.stat("/", pid)
    return None if found is None or found.state in "ZX" else found.start


def process_of(pid: int) -> Process | None:
    """The process that has this PID now; None if there is none."""
    start = start_of(pid)
    return None if start is None else Process(pid, start)


def this_process() -> Process:
    return process_of(os.getpid()) or Process(os.getpid(), 0)


def lives(process: Process) -> bool:
    return start_of(process.pid) == process.start


def stopped(process: Process) -> bool:
    """Whether somebody has stopped it (SIGSTOP, Ctrl-Z, a debugger): then the driver's calls wait for ever."""
    found = proc.stat("/", process.pid)
    return found is not None and found.state in "Tt"


def anonymous_bytes(process: Process) -> int | None:
    """Its host memory that no file holds, swapped or not, in bytes; None if that cannot be read."""
    try:
        with open(f"/proc/{process.pid}/status", encoding="utf-8", errors="replace") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        return sum(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "VmSwap"))
    except (OSError, KeyError, ValueError, IndexError):
        return None


def machine() -> str:
    """Which numbering of processes this is."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except (OSError, ValueError):
        return ""

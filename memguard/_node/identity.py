"""Processes of one user on this machine: whether a PID is still the same process, and the folder where they meet."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from typing import NamedTuple

from memguard._devices import proc
from memguard.errors import MemguardError


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
            lines = {name: rest for name, colon, rest in [line.partition(":") for line in file] if colon}
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


def folder(make: bool = True) -> str:
    """The user's own folder, made if need be: processes of that user find there what others have left for them.

    MemguardError if it is another user's. Without `make` it may not be there.

    `XDG_RUNTIME_DIR/memguard`, or `memguard-UID` in the folder for temporary files. Processes that are to see each
    other need the same one.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    user = os.geteuid()
    own = os.path.isabs(runtime) and os.path.isdir(runtime) and os.stat(runtime).st_uid == user
    path = os.path.join(runtime, "memguard") if own else os.path.join(tempfile.gettempdir(), f"memguard-{user}")
    if not make and not os.path.lexists(path):
        return path
    return private(path, "remove it, or set XDG_RUNTIME_DIR to a folder of your own")


def private(path: str, fix: str, make: bool = True) -> str:
    """The folder, made if need be: no other user can enter it. MemguardError with that fix if one could."""
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise MemguardError(f"{path} is not a folder that only this user can enter, so it cannot be trusted", fix=fix)
    return path

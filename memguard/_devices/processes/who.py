"""The holders of a GPU's memory, as lines of text, from NVML's process list and `/proc`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from memguard._base.text import visible
from memguard._base.units import GIB, format_size
from memguard._devices.processes import proc

_LONGEST = 60
"""Characters of a command line: its beginning identifies the program."""


UNLISTED = "processes that are not listed here (another container, the driver)"
_DRIVER = GIB
"""Bytes. The driver itself uses some hundred MiB of each GPU: unlisted bytes below this belong to no process."""


def holders(processes: Mapping[int, int | None], used: int | None) -> tuple[str, ...]:
    """One line for each process, the largest first; `used` are the GPU's used bytes.

    Bytes of no listed process get their own line: NVML omits the processes of other containers.
    """
    sizes = sorted(processes.items(), key=lambda entry: (-(entry[1] or 0), entry[0]))
    lines = [f"{format_size(size)}  {name(pid)}" for pid, size in sizes]
    rest = unlisted(processes, used)
    return (*lines, f"{format_size(rest)}  {UNLISTED}") if rest else tuple(lines)


def unlisted(processes: Mapping[int, int | None], used: int | None) -> int:
    """Bytes of no listed process; 0 if the driver itself may use them, or NVML gives no bytes by process."""
    if used is None or None in processes.values():
        return 0
    rest = used - sum(size or 0 for size in processes.values())
    return rest if rest >= _DRIVER else 0


def name(pid: int) -> str:
    """`python train.py (PID 41, alice)`; parts that cannot be read are omitted."""
    user = owner(pid)
    return f"{command(pid) or 'a process'} (PID {pid}{', ' + user if user else ''})"


def command(pid: int) -> str:
    """The process's command line, shortened and printable; empty if it cannot be read."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = [os.fsdecode(word) for word in file.read(4096).split(b"\0") if word]
    except OSError:
        return ""
    if not words:
        return ""
    line = visible(" ".join([os.path.basename(words[0]), *words[1:]])).replace("\n", " ")
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def user_of(pid: int, root: str = "/") -> int | None:
    """The ID of the process's effective user; None if there is no such process, or it cannot be read."""
    status = proc.status(root, pid)
    return None if status is None else status.user


def owner(pid: int) -> str:
    """The name of the process's user, or the user's ID without a name; empty if there is no such process."""
    user = user_of(pid)
    if user is None:
        try:
            user = os.stat(f"/proc/{pid}").st_uid
        except OSError:
            return ""
    import pwd

    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)

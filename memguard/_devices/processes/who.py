"""Who holds a GPU's memory, in lines for people: from NVML's list and `/proc`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from memguard._base.text import visible
from memguard._base.units import GIB, format_size
from memguard._devices.processes import proc

_LONGEST = 60
"""Characters of a command line: its beginning says which program it is."""


UNLISTED = "processes that are not listed here (another container, the driver)"
_DRIVER = GIB
"""The driver itself holds some hundred MiB of each GPU: less than this is nobody's."""


def holders(processes: Mapping[int, int | None], used: int | None) -> tuple[str, ...]:
    """One line for each process, most first; `used` are the GPU's used bytes.

    What no process is listed for gets a line of its own: other containers' processes are not in the list.
    """
    sizes = sorted(processes.items(), key=lambda entry: (-(entry[1] or 0), entry[0]))
    lines = [f"{format_size(size)}  {name(pid)}" for pid, size in sizes]
    rest = unlisted(processes, used)
    return (*lines, f"{format_size(rest)}  {UNLISTED}") if rest else tuple(lines)


def unlisted(processes: Mapping[int, int | None], used: int | None) -> int:
    """Bytes that no process is listed for; 0 if they are nobody's, or NVML does not say what each has."""
    if used is None or None in processes.values():
        return 0
    rest = used - sum(size or 0 for size in processes.values())
    return rest if rest >= _DRIVER else 0


def name(pid: int) -> str:
    """`python train.py (PID 41, alice)`; what cannot be read is left out."""
    user = owner(pid)
    return f"{command(pid) or 'a process'} (PID {pid}{', ' + user if user else ''})"


def command(pid: int) -> str:
    """Its command line, shortened and printable; empty if it cannot be read."""
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
    """Its effective user's number; None if there is no such process, or it cannot be read."""
    status = proc.status(root, pid)
    return None if status is None else status.user


def owner(pid: int) -> str:
    """The name of the user who runs it, or the number where it has none; empty if there is no such process."""
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

"""Who holds a GPU's memory, in lines for people: from NVML's list and `/proc`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from memguard._text import shown
from memguard._units import format_size

_LONGEST = 60
"""Characters of a command line: its beginning says which program it is."""


def holders(processes: Mapping[int, int | None], used: int | None, without: int = 0) -> tuple[str, ...]:
    """One line for each process, most first; `used` are the GPU's used bytes.

    What no process is listed for gets a line of its own: other containers' processes are not in the list. `without` is
    a PID to leave out: the helper's own placeholder is nobody's memory.
    """
    sizes = sorted(processes.items(), key=lambda entry: (-(entry[1] or 0), entry[0]))
    lines = [f"{format_size(size)}  {name(pid)}" for pid, size in sizes if pid != without]
    rest = None if used is None else used - sum(size or 0 for size in processes.values())
    if rest is not None and rest >= _NOTHING and None not in processes.values():
        lines.append(f"{format_size(rest)}  processes that are not listed here (another container, the driver)")
    return tuple(lines)


_NOTHING = 1 << 30
"""The driver itself holds some hundred MiB of each GPU."""


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
    line = shown(" ".join([os.path.basename(words[0]), *words[1:]])).replace("\n", " ")
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"


def owner(pid: int) -> str:
    """The user's name, or the number where it has none; empty if there is no such process."""
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return ""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)

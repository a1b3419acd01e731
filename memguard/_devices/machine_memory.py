"""The machine's memory, from which a GPU with unified memory allocates, and the detection of WSL. Linux."""

from __future__ import annotations

import os

_AVAILABLE = "MemAvailable:"


def available(root: str = "/") -> int | None:
    """Bytes that the kernel can allocate without swapping, its reclaimable file cache included; None if unknown.

    `MemAvailable` of /proc/meminfo. It is host-wide, in a container too.
    """
    try:
        with open(os.path.join(root, "proc/meminfo"), encoding="ascii", errors="replace") as file:
            return parse(file.read())
    except OSError:
        return None


def grantable(root: str = "/") -> int | None:
    """Bytes that the kernel still commits to processes where it forbids overcommit (`vm.overcommit_memory` is 2).

    None where it allows overcommit (0 or 1, as usual), and if unknown.
    """
    try:
        with open(os.path.join(root, "proc/sys/vm/overcommit_memory"), encoding="ascii", errors="replace") as file:
            if file.read().strip() != "2":
                return None
        with open(os.path.join(root, "proc/meminfo"), encoding="ascii", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    limit, granted = parse(text, "CommitLimit:"), parse(text, "Committed_AS:")
    return None if limit is None or granted is None else max(limit - granted, 0)


def parse(text: str, field: str = _AVAILABLE) -> int | None:
    """A field in bytes from the text of /proc/meminfo; None if it is missing or no number."""
    for line in text.splitlines():
        name, *rest = line.split()[:3] or [""]
        if name == field and len(rest) == 2 and rest[0].isascii() and rest[0].isdecimal() and rest[1] == "kB":
            return int(rest[0]) << 10
    return None


def wsl(kernel: str, root: str = "/") -> bool:
    """Whether this Linux runs in WSL, judged by the kernel's release or version, or by the device of its GPU driver."""
    return "microsoft" in kernel.lower() or os.path.exists(os.path.join(root, "dev/dxg"))

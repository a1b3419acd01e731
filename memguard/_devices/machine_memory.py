"""The machine's own memory, which a GPU with unified memory allocates from, and what WSL makes of a GPU's. Linux."""

from __future__ import annotations

import os

_AVAILABLE = "MemAvailable:"


def available(root: str = "/") -> int | None:
    """Bytes that the kernel can give out without swapping, its reclaimable file cache included; None if unknown.

    `MemAvailable` of /proc/meminfo. It is host-wide, in a container too.
    """
    try:
        with open(os.path.join(root, "proc/meminfo"), encoding="ascii", errors="replace") as file:
            return parse(file.read())
    except OSError:
        return None


def grantable(root: str = "/") -> int | None:
    """Bytes that the kernel still grants to processes, used or not, where it grants no more than there are; None where
    it does (`vm.overcommit_memory` is 0 or 1, as usual), and if that is unknown.
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
    """A field in bytes from the text of /proc/meminfo; None if it is not there or no number."""
    for line in text.splitlines():
        name, *rest = line.split()[:3] or [""]
        if name == field and len(rest) == 2 and rest[0].isascii() and rest[0].isdecimal() and rest[1] == "kB":
            return int(rest[0]) << 10
    return None


def wsl(kernel: str, root: str = "/") -> bool:
    """Whether this Linux runs in WSL: by the kernel's release or version, or by the device of its GPU driver."""
    return "microsoft" in kernel.lower() or os.path.exists(os.path.join(root, "dev/dxg"))

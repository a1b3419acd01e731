"""How much memory the kernel lets one process take: the limits of its cgroup and of each one above it.

Version 1 and 2, and machines with both; a container's view too, where the mount begins in the middle of the tree. Swap
is not counted: what leaves a GPU is to lie in memory. File pages that the kernel can drop count as free, those that
have to be written first do not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

from memguard._base.units import MAX_SIZE
from memguard._devices import proc

_OCTAL = re.compile(r"\\([0-7]{3})")


class Limit(NamedTuple):
    """One limit in bytes: `file` sets it, `used` cannot be dropped. `kills`: whether the kernel kills above it."""

    file: str
    limit: int
    used: int
    kills: bool = True

    @property
    def left(self) -> int:
        return max(self.limit - self.used, 0)


class _Version(NamedTuple):
    limits: tuple[tuple[str, bool], ...]
    usage: str
    cached: tuple[str, ...]
    unwritten: tuple[str, ...]


_V2 = _Version(
    (("memory.max", True), ("memory.high", False)),
    "memory.current",
    ("inactive_file", "active_file"),
    ("file_dirty", "file_writeback"),
)
_V1 = _Version(
    (("memory.limit_in_bytes", True),),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    ("total_dirty", "total_writeback"),
)


def limits(root: str, pid: int) -> tuple[Limit, ...] | None:
    """Each limit on the memory of a process, the tightest first; empty if there is none, None if unknown."""
    if proc.text(proc.path_of(root, pid, "cgroup")) is None:
        return None
    found: list[Limit] = []
    for controller, folder in _folders(root, pid):
        version = {"": _V2, "memory": _V1}.get(controller)
        if version is not None and folder is None:
            return None
        if version is not None and folder is not None:
            found += _of(root, version, folder)
    return tuple(sorted(found, key=lambda one: one.left))


def frozen(root: str, pid: int) -> bool | None:
    """Whether the process's cgroup is frozen (`docker pause`): it runs no instruction, and is not stopped either."""
    said: bool | None = None
    for controller, folder in _folders(root, pid):
        if folder is None:
            continue
        if controller == "":
            events = proc.text(os.path.join(folder, "cgroup.events"))
            said = said or (None if events is None else re.search(r"^frozen 1$", events, re.MULTILINE) is not None)
        elif controller == "freezer":
            state = proc.text(os.path.join(folder, "freezer.state"))
            said = said or (None if state is None else state.strip() in ("FROZEN", "FREEZING"))
    return said


def _of(root: str, version: _Version, folder: str) -> Iterator[Limit]:
    usage = _bytes(proc.text(os.path.join(folder, version.usage)))
    if usage is None:
        return
    said = proc.text(os.path.join(folder, "memory.stat")) or ""
    fields = {pair[0]: pair[1] for line in said.splitlines() if len(pair := line.split()) == 2}
    dropped = sum(_bytes(fields.get(name)) or 0 for name in version.cached)
    dropped -= sum(_bytes(fields.get(name)) or 0 for name in version.unwritten)
    for name, kills in version.limits:
        path = os.path.join(folder, name)
        limit = _bytes(proc.text(path))
        if limit is not None and limit <= MAX_SIZE:  # version 1 says 2⁶³ less a page for none
            shown = "/" + os.path.relpath(path, root)
            yield Limit(shown, limit, min(max(usage - max(dropped, 0), 0), usage), kills)


def _folders(root: str, pid: int) -> Iterator[tuple[str, str | None]]:
    """The folders of a process's cgroup and of those above it, each with its controller (none for version 2).

    None for a folder: the process lies outside what is mounted here, so that its limits cannot be seen.
    """
    mounts = list(_mounts(root))
    for line in (proc.text(proc.path_of(root, pid, "cgroup")) or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        for controller, begin, point in mounts:
            if (controller in names.split(",")) if controller else not names:
                yield from ((controller, folder) for folder in _upwards(root, begin, point, path))


def _upwards(root: str, begin: str, point: str, path: str) -> Iterator[str | None]:
    """The folders from a cgroup's up to the mount's. `begin` is the cgroup that the mount shows at `point`."""
    begin = begin.rstrip("/")
    if ".." in f"{path}/{begin}".split("/") or not f"{path}/".startswith(f"{begin}/"):
        yield None
        return
    parts = [part for part in path[len(begin) :].split("/") if part]
    base = os.path.join(root, point.lstrip("/"))
    for count in range(len(parts), -1, -1):
        folder = os.path.join(base, *parts[:count])
        if os.path.isdir(folder):
            yield folder


def _mounts(root: str) -> Iterator[tuple[str, str, str]]:
    """Each mounted tree of cgroups: its controller (none for version 2), where it begins, and where it is mounted."""
    for line in (proc.text(os.path.join(root, "proc", "self", "mountinfo")) or "").splitlines():
        front, _, back = line.partition(" - ")
        fields, kind = front.split(), back.split()
        if len(fields) < 5 or not kind or kind[0] not in ("cgroup", "cgroup2"):
            continue
        begin, point = _plain(fields[3]), _plain(fields[4])
        if kind[0] == "cgroup2":
            yield "", begin, point
            continue
        options = (kind[2] if len(kind) > 2 else "").split(",")
        yield from ((name, begin, point) for name in ("memory", "freezer") if name in options)


def _plain(path: str) -> str:
    """mountinfo writes a space as \\040."""
    return _OCTAL.sub(lambda found: chr(int(found[1], 8)), path)


def _bytes(said: str | None) -> int | None:
    """A number; None for none, and for `max`."""
    word = (said or "").strip()
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 21 else None

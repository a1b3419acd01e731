"""File access for timelines: changes only timeline files of this user, and never through symbolic links.

A timeline is split into numbered files (parts). The newest part has the timeline's name, an older part also its number.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import deque
from typing import BinaryIO

from memguard._timeline.format import MAGIC
from memguard.errors import TimelineError

_CLOEXEC, _NOFOLLOW = getattr(os, "O_CLOEXEC", 0), getattr(os, "O_NOFOLLOW", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
"""With O_NONBLOCK, `open` of a FIFO without a writer does not block. `open_regular` then rejects the FIFO."""

_NUMBERED = re.compile(r"(.*[^/])\.\d{1,9}((?:\.[^./]*)?)", re.ASCII | re.DOTALL)
"""Matches the path of an older part, as `rotated` returns. The two groups, joined, are the path of the newest part."""


def expand(pattern: str | os.PathLike[str], pid: int, rank: int | None) -> str:
    """The absolute path, with `{pid}` and `{rank}` replaced. If `pattern` has neither, both are inserted before its
    suffix."""
    text = os.fspath(pattern)
    folder, name = os.path.split(text)
    if not name or "\0" in text:
        raise TimelineError(f"{text!r} does not name a file", fix="write for example timeline: memguard.jsonl")
    if "{pid}" not in text and "{rank}" not in text:
        stem, suffix = os.path.splitext(name)
        text = os.path.join(folder, f"{stem}-{{pid}}-{{rank}}{suffix}")
    try:
        return os.path.abspath(text.replace("{pid}", str(pid)).replace("{rank}", str(rank or 0)))
    except OSError:
        raise TimelineError(f"{text}: the working directory is gone", fix="write an absolute path") from None


def rotated(path: str, number: int | str) -> str:
    base, suffix = os.path.splitext(path)
    return f"{base}.{number}{suffix}"


def numbered(path: str) -> list[tuple[int, str]]:
    """Return number and path of each file that is named like an older part of the timeline `path`, sorted by number.

    If `path` is a symbolic link, the folders of the link and of its target are both searched.
    """
    found = _beside(path)
    if os.path.islink(path):
        known = {os.path.realpath(name) for _, name in found}
        found += [part for part in _beside(os.path.realpath(path)) if os.path.realpath(part[1]) not in known]
    return sorted(found)


def parts_of_run(path: str) -> set[str]:
    """The resolved paths of all files that, by their names, may be parts of the timeline at `path`. No command may
    overwrite these files.

    `path` is the path of the newest or an older part, or a link to it.
    """
    named = {path, os.path.realpath(path)}
    named |= {match[1] + match[2] for match in map(_NUMBERED.fullmatch, named) if match}
    found = [path, *filter(os.path.lexists, named), *(part for name in named for _, part in numbered(name))]
    return set(map(os.path.realpath, found))


def _beside(path: str) -> list[tuple[int, str]]:
    base, suffix = os.path.splitext(path)
    folder, stem = os.path.split(base)
    pattern = re.compile(re.escape(stem) + r"\.(\d{1,9})" + re.escape(suffix), re.ASCII)
    try:
        names = os.listdir(folder or os.curdir)
    except OSError:  # the caller opens the file later, which raises the error
        return []
    found = ((pattern.fullmatch(name), name) for name in names)
    return [(int(match[1]), os.path.join(folder, name)) for match, name in found if match]


def written_as(path: str) -> list[str]:
    """The timelines that a budget with `timeline: PATH` has created by adding PID and rank to PATH, newest first."""
    base, suffix = os.path.splitext(path)
    folder, stem = os.path.split(base)
    pattern = re.compile(re.escape(stem) + r"-\d{1,10}-\d{1,10}" + re.escape(suffix), re.ASCII)
    found: list[tuple[float, str]] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder or os.curdir):
            if pattern.fullmatch(entry.name):
                found.append((entry.stat().st_mtime, os.path.join(folder, entry.name)))
    return [name for _, name in sorted(found, reverse=True)]


def open_regular(path: str, flags: int = 0) -> BinaryIO:
    opened: list[int] = []
    try:
        try:
            handle = _open(path, os.O_RDONLY | _NONBLOCK | _CLOEXEC | flags, opened)
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(0, "not a regular file")
            # One C call, as in `_open`: the descriptor is always in `opened`, or in the file object, which closes it.
            return next(map(open, map(list.pop, (opened,)), ("rb",)))  # type: ignore[return-value]
        finally:
            if opened:
                close(opened)
    finally:
        if opened:  # a Ctrl-C interrupted the `close` above
            close(opened)


def why_not_ours(path: str) -> str | None:
    """The reason why the file must not be changed; None if the file is empty or a timeline of this user.

    Raises OSError if the file cannot be read.
    """
    about = os.lstat(path)
    if stat.S_ISLNK(about.st_mode):
        return "is a symbolic link, which is not followed"
    if not stat.S_ISREG(about.st_mode):
        return "is a folder" if stat.S_ISDIR(about.st_mode) else "is not a regular file"
    if about.st_uid != os.geteuid():
        return "belongs to another user"
    with open_regular(path, _NOFOLLOW) as file:
        begin = file.read(len(MAGIC))
    return None if begin == MAGIC[: len(begin)] else "exists already and is not a timeline"


def is_ours(path: str) -> bool:
    try:
        return why_not_ours(path) is None
    except OSError:
        return False


def remove(path: str) -> None:
    """Remove the file if it is empty or a timeline of this user."""
    if is_ours(path):
        os.unlink(path)


def create(path: str, opened: list[int]) -> int:
    """Create a file with mode 0600, open it for appending and lock it. `in_use` tests the lock.

    Also appends the descriptor to `opened`, so that the caller can close it if a Ctrl-C prevents the return.
    """
    handle = _open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | _NOFOLLOW | _CLOEXEC, opened)
    _lock(handle)
    return handle


def close(opened: list[int]) -> None:
    """Close the descriptors and empty the list. Never raises OSError."""
    while opened:
        with contextlib.suppress(OSError):
            # One C call, as in `_open`: a Ctrl-C cannot come between removing a descriptor and closing it.
            deque(map(os.close, map(list.pop, (opened,))), 0)


def in_use(path: str) -> bool:
    """True if a process has the file open for writing and holds its lock."""
    opened: list[int] = []
    try:
        try:
            return not _lock(_open(path, os.O_RDONLY | _NONBLOCK | _NOFOLLOW | _CLOEXEC, opened))
        finally:
            close(opened)
    finally:
        close(opened)


def _open(path: str, flags: int, opened: list[int]) -> int:
    """Open the file and append the descriptor to `opened`, in one C call that no Ctrl-C can interrupt."""
    opened.extend(map(os.open, (path,), (flags,), (0o600,)))
    return opened[-1]


def _lock(handle: int) -> bool:
    """Lock the file. Returns False if the file is locked already, else True, also if locks are not supported."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True

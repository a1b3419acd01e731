"""Copies of the records of suspended processes, for when the database cannot be used: one file of slots.

On a full disk SQLite can neither write nor read, so the room is reserved with the first record. A slot is one page: a
JSON object, filled up with spaces. It is written in place and in one call, so it needs no more room, and a process that
is killed meanwhile leaves the old record or the new one. One process writes at a time: it holds the byte SPARE in the
file of locks.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from memguard._base.logs import log as _log
from memguard._node.leases import locks
from memguard._node.leases.store import LOCKS, made
from memguard.errors import MemguardError

NAME = "suspended.spare"
LIMIT = 1 << 20
"""Bytes of the file that are read at most."""
SPARE = 1 << 42
"""The byte of the file of locks whose holder may write. Claims, processes and suspensions have other bytes."""
_SLOT, _SLOTS = 4096, 16
"""Bytes of a slot, and how many of them are reserved. More are added while the disk has room."""
_WAIT = 0.25
"""Seconds for which the byte is waited for. It is held for microseconds, unless its holder was stopped."""
_OPEN = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
Match = Callable[[Mapping[str, Any]], bool]


def read(folder: str) -> list[dict[str, Any]]:
    """The messages in the file, unchecked. Empty if there is no file, or if others can write it."""
    try:
        with _opened(folder, os.O_RDONLY) as fd:
            return [message for _, message in _slots(fd) if message is not None]
    except OSError as error:
        if error.errno != errno.ENOENT:
            _log.debug("%s is not read: %s", os.path.join(folder, NAME), error)
        return []


def write(folder: str, message: Mapping[str, Any], same: Match, free: Match) -> None:
    """Write the message into the slot of the `same` process, else into an empty or `free` one, else into a new one.

    Raises OSError.
    """
    data = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")
    if len(data) >= _SLOT:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), os.path.join(folder, NAME))
    with _exclusive(folder), _opened(folder, os.O_RDWR | os.O_CREAT) as fd:
        if os.fstat(fd).st_size == 0:
            with contextlib.suppress(OSError):  # the disk is full: one slot may have room yet
                os.posix_fallocate(fd, 0, _SLOT * _SLOTS)
        slots = list(_slots(fd))
        own = [place for place, found in slots if found is not None and same(found)]
        others = [place for place, found in slots if found is None or free(found)]
        place = (own or others or [len(slots)])[0]
        if place >= LIMIT // _SLOT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.path.join(folder, NAME))
        _put(fd, place, data)


def clear(folder: str, same: Match) -> None:
    """Empty the slots of the `same` process. Writes nothing if there are none. Raises OSError."""
    if not any(map(same, read(folder))):
        return
    with _exclusive(folder), _opened(folder, os.O_RDWR) as fd:
        for place, found in _slots(fd):
            if found is not None and same(found):
                _put(fd, place, b"")


@contextlib.contextmanager
def _opened(folder: str, flags: int) -> Iterator[int]:
    path = os.path.join(folder, NAME)
    fd = os.open(path, flags | _OPEN, 0o600)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise OSError(errno.EPERM, "it is not a file that only this user can write", path)
        yield fd
    finally:
        os.close(fd)


def _slots(fd: int) -> Iterator[tuple[int, dict[str, Any] | None]]:
    for place in range(LIMIT // _SLOT):
        data = os.pread(fd, _SLOT, place * _SLOT)
        if not data:
            return
        try:
            found = json.loads(data) if data.strip(b" \0\n") else None
        except (ValueError, RecursionError):
            found = None
        yield place, found if isinstance(found, dict) else None


def _put(fd: int, place: int, data: bytes) -> None:
    if os.pwrite(fd, data.ljust(_SLOT - 1) + b"\n", place * _SLOT) != _SLOT:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextlib.contextmanager
def _exclusive(folder: str) -> Iterator[None]:
    path, until = os.path.join(folder, LOCKS), time.monotonic() + _WAIT
    try:
        made(path)
    except MemguardError as error:
        raise OSError(errno.EACCES, error.advice.reason) from None
    held: list[locks.File] = []
    try:
        while locks.hold(path, (SPARE,), held) is None:
            if time.monotonic() > until:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), os.path.join(folder, NAME))
            time.sleep(_WAIT / 50)
        yield
    finally:
        try:
            locks.undo(held, (SPARE,))
        finally:  # again: a Ctrl-C may have come into the one before
            locks.undo(held, (SPARE,))

"""Which claims live: one byte of a file for each, locked by its process (`fcntl`), at the offset of its number.

Linux keeps such a lock for the process that took it, and for nobody else: a forked child has none of it, kill -9 frees
it, and whoever asks (F_GETLK) need not know its PID. But any `close` of that file in a process frees all its locks of
it (fcntl(2)). So a process opens it once, looks through that same descriptor, and closes it once it holds nothing.

A process's own locks do not show in F_GETLK: `File.held` has them.

All of this, and the database beside it, is used by one thread at a time (`locked`). A fork waits for that: a child has
no handle of the database, and what SQLite knows of locks is true there (sqlite.org/howtocorrupt.html, 2.2 and 2.6).
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import struct
import threading
from collections.abc import Iterator

from memguard._base import life
from memguard._base.locks import LockedRunner

_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock`: l_type, l_whence, l_start, l_len, l_pid."""
_FORK = 60.0
"""Seconds for which a fork waits at most."""
_lock = threading.RLock()
locked = LockedRunner(_lock)
_files: dict[tuple[int, int], File] = {}
"""By device and inode: two paths may lead to one file."""
torn = False
"""Whether this process was forked in the midst of a change, by a signal handler: it must not touch the database."""
_of_parent: list[object] = []
in_use: object = None
"""What a child must neither use nor let go of: the database's connection, while there is one."""


class File:
    """The file with the bytes, open in this process."""

    def __init__(self, fd: int, identity: tuple[int, int]) -> None:
        self.fd, self.identity = fd, identity
        self.held: set[int] = set()
        self.looks = 0
        """How many have it open just now: a signal handler may come within another's look."""

    def take(self, number: int) -> bool:
        """Hold that byte. False if another process does."""
        self.held.add(number)
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except OSError as error:
            self.held.discard(number)
            if isinstance(error, (BlockingIOError, PermissionError)):  # EAGAIN or EACCES, by fcntl(2)
                return False
            raise
        return True

    def drop(self, number: int) -> None:
        """Hold it no more; nothing happens if it is not held."""
        if number in self.held:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, number)
            self.held.discard(number)

    def alive(self, number: int) -> bool:
        """Whether a living process holds it, this one or another. Nothing is taken for the look."""
        if number in self.held:
            return True
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0)
        kind = _FLOCK.unpack(fcntl.fcntl(self.fd, fcntl.F_GETLK, asked))[0]
        return bool(kind != fcntl.F_UNLCK)


@contextlib.contextmanager
def opened(path: str) -> Iterator[File]:
    """The file, which must be there. Only within `locked`. Raises OSError."""
    watch_forks()
    found = os.stat(path, follow_symlinks=False)
    identity = found.st_dev, found.st_ino
    file = _files.get(identity)
    if file is None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        found = os.fstat(fd)  # another one may have got that name meanwhile
        identity = found.st_dev, found.st_ino
        file = _files[identity] = File(fd, identity)
    try:
        file.looks += 1
        yield file
    finally:
        file.looks -= 1
        _close_idle()


def let_go(number: int) -> None:
    """The lock of a claim, in whatever file it is. Nothing happens if this process does not hold it."""
    for file in [*_files.values()]:
        file.drop(number)
    _close_idle()


def _close_idle() -> None:
    for identity, file in [*_files.items()]:
        if not file.held and not file.looks:
            _files.pop(identity, None)
            os.close(file.fd)


def _before_fork() -> None:
    _lock.acquire(timeout=_FORK)


def _in_parent() -> None:
    if _lock._is_owned():  # type: ignore[attr-defined]  # not if it took too long
        _lock.release()


def _in_child() -> None:
    global _lock, locked, torn, in_use
    _lock = threading.RLock()
    locked = LockedRunner(_lock)
    for file in [*_files.values()]:
        with contextlib.suppress(OSError):
            os.close(file.fd)  # frees nothing: the locks are the parent's
    _files.clear()
    if in_use is not None:
        _of_parent.append(in_use)
        torn, in_use = True, None


@functools.cache
def watch_forks() -> None:
    life.at_fork(life.HookOrder.LEASES, before=_before_fork, parent=_in_parent, child=_in_child)

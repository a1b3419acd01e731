"""Which claims live: one byte of a file for each, locked by its process (`fcntl`), at the offset of its number.

Linux keeps such a lock for the process that took it, and for nobody else: a forked child has none of it, kill -9 frees
it, and whoever asks (F_GETLK) need not know its PID. But any `close` of that file in a process frees all its locks of
it (fcntl(2)). So a process opens it once, looks through that same descriptor, and closes it once it holds nothing.

A process's own locks do not show in F_GETLK: `File.held` has them.

The same file has a byte for each process that is being suspended or resumed, and for each place in the queue of a
restore (`_node.suspend.store`). A lock needs no room on the disk, and does not wait for the database.

The database beside it is used by one thread at a time (`locked`), for the milliseconds of one transaction; nobody waits
for another process while it is open. A fork gives it as long to be closed, so that the child has no handle of it, and
what SQLite knows of locks is true there (sqlite.org/howtocorrupt.html, 2.2 and 2.6). A child that was forked all the
same, on a disk that hangs or in a signal handler, uses no database (`torn`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import struct
import threading
from collections.abc import Collection, Iterator

from memguard._base import life
from memguard._base.locks import LockedRunner

_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock`: l_type, l_whence, l_start, l_len, l_pid."""
_WAIT = 10.0
"""Seconds for which a thread waits for `_opening`."""
_FORK = 0.1
"""Seconds within which a fork lets a transaction of another thread end."""
_MOST = 64
"""Bytes that `holders` lists of one lock: another program may have locked the whole file."""
_lock = threading.RLock()
locked = LockedRunner(_lock)
_opening = LockedRunner()
"""Guards `_files` and `File.looks`. Held only for system calls that do not block."""
_files: dict[tuple[int, int], File] = {}
"""By device and inode: two paths may lead to one file."""
torn = False
"""Whether this process was forked while its parent had the database open: it must not touch the database."""
_of_parent: list[object] = []
in_use: object = None
"""What a child must neither use nor let go of: the database's connection, while there is one."""


class File:
    """The file with the bytes, open in this process."""

    def __init__(self, fd: int, identity: tuple[int, int]) -> None:
        self.fd, self.identity = fd, identity
        self.held: set[int] = set()
        self.looks: set[object] = set()
        """Who has it open just now: several threads, or a signal handler within another's look."""

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

    def holders(self, first: int, last: int) -> list[tuple[int, int]]:
        """The bytes from `first` to `last` that a living process holds, each with its PID, in their order.

        The PID is 0 if the process is of another PID namespace.
        """
        found = [(number, os.getpid()) for number in [*self.held] if first <= number <= last]
        ranges = [(first, last)]
        while ranges:
            low, high = ranges.pop()
            if low > high:
                continue
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, low, high - low + 1, 0)
            kind, _, start, length, pid = _FLOCK.unpack(fcntl.fcntl(self.fd, fcntl.F_GETLK, asked))
            if kind == fcntl.F_UNLCK:
                continue
            begin, end = max(start, low), min(start + length - 1, high) if length else high
            found += [(number, max(pid, 0)) for number in range(begin, min(end, begin + _MOST) + 1)]
            ranges += [(low, begin - 1), (end + 1, high)]
        return sorted(found)


def create(path: str) -> None:
    """Create the file, for this user only. Raises OSError; FileExistsError if it is there.

    It stays open for the next `opened`: another thread may hold a byte already, which a close here would free.
    """
    watch_forks()
    if _opening.run(_create, _WAIT, path) is None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)


def _create(path: str) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    found = os.fstat(fd)
    identity = found.st_dev, found.st_ino
    _files[identity] = File(fd, identity)


@contextlib.contextmanager
def opened(path: str) -> Iterator[File]:
    """The file, which must be there. Raises OSError."""
    watch_forks()
    look = object()
    try:
        done = _opening.run(_open_for, _WAIT, path, look)
        if done is None:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        yield done[0]
    finally:
        try:
            _opening.run(_close_for, _WAIT, look)
        finally:  # again: a Ctrl-C may have come into the one before
            _opening.run(_close_for, _WAIT, look)


def _open_for(path: str, look: object) -> File:
    found = os.stat(path, follow_symlinks=False)
    identity = found.st_dev, found.st_ino
    file = _files.get(identity)
    if file is None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        found = os.fstat(fd)  # another one may have got that name meanwhile
        identity = found.st_dev, found.st_ino
        file = _files[identity] = File(fd, identity)
    file.looks.add(look)
    return file


def _close_for(look: object) -> None:
    for file in [*_files.values()]:
        file.looks.discard(look)
    _close_idle()


def hold(path: str, numbers: Collection[int], into: list[File] | None = None) -> File | None:
    """Hold all these bytes of the file, which must be there, or none: None if one of them is held, also by this
    process. Raises OSError.

    The file is appended to `into` before a byte is taken: a caller that a Ctrl-C interrupts can `undo` it.
    """
    with opened(path) as file:
        done = _opening.run(_held, _WAIT, file, numbers, [] if into is None else into)
        return file if done is not None and done[0] else None


def _held(file: File, numbers: Collection[int], into: list[File]) -> bool:
    if not file.held.isdisjoint(numbers):
        return False
    taken = False
    try:
        into.append(file)
        taken = all(map(file.take, numbers))
        return taken
    finally:
        if not taken:
            undo(into, numbers)


def release(file: File, numbers: Collection[int]) -> None:
    """Hold them no more. Nothing happens in a forked child, whose parent holds them."""
    for number in numbers:
        file.drop(number)
    _opening.run(_close_idle, _WAIT)


def undo(into: list[File], numbers: Collection[int]) -> None:
    """Release what `hold` took, and empty its list. To be called again if a Ctrl-C interrupts it."""
    for file in into:
        release(file, numbers)
    into.clear()


def let_go(first: int, last: int | None = None) -> None:
    """The byte of a claim, or all from `first` to `last`, in whatever file. Nothing happens to what is not held."""
    for file in [*_files.values()]:
        for number in [*file.held]:
            if first <= number <= (first if last is None else last):
                file.drop(number)
    _opening.run(_close_idle, _WAIT)


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
    global _lock, locked, _opening, torn, in_use
    torn = torn or in_use is not None or not _lock._is_owned()  # type: ignore[attr-defined]
    _lock = threading.RLock()
    locked, _opening = LockedRunner(_lock), LockedRunner()
    for file in [*_files.values()]:
        file.held.clear()
        with contextlib.suppress(OSError):
            os.close(file.fd)  # frees nothing: the locks are the parent's
    _files.clear()
    if in_use is not None:
        _of_parent.append(in_use)
        in_use = None


@functools.cache
def watch_forks() -> None:
    life.at_fork(life.HookOrder.LEASES, before=_before_fork, parent=_in_parent, child=_in_child)

"""Files that are held by a living process: by a lock (`flock`), which the kernel takes away when their owner dies.

A file without a lock is nobody's, and whoever sees it removes it. A forked child has copies of its parent's
descriptors, which would keep the locks after the parent's death: it closes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os

from memguard._base import life

_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_mine: set[int] = set()
"""Descriptors of what this process holds."""


def take(path: str, flags: int = 0) -> int:
    """Hold that file of this user's only, made if need be: its descriptor. It holds the PID.

    BlockingIOError if another holds it; FileExistsError if there is one and `flags` is O_EXCL.
    """
    _watch_forks()
    while True:
        fd = os.open(path, _OPEN | os.O_CREAT | flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same(fd, path):
                os.ftruncate(fd, 0)
                os.write(fd, str(os.getpid()).encode())
                _mine.add(fd)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its owner has just ended, and removed it


def _same(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def drop(fd: int, path: str) -> None:
    """Remove what this process holds; nothing in a forked child, whose parent holds it."""
    if fd in _mine:
        _mine.discard(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)
        os.close(fd)


def holder(path: str) -> int | None:
    """The PID of who holds it; 0 if that is not known, None if nobody does."""
    try:
        fd = os.open(path, _OPEN)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        by = os.pread(fd, 20, 0)
        return int(by) if by.isdigit() else 0
    finally:
        os.close(fd)


def held(path: str) -> bool:
    """Whether a living process holds it. What nobody holds is removed."""
    try:
        fd = os.open(path, _OPEN)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return False
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(fd)


def _forked() -> None:
    for fd in tuple(_mine):
        with contextlib.suppress(OSError):
            os.close(fd)
    _mine.clear()


@functools.cache
def _watch_forks() -> None:
    life.at_fork(life.HookOrder.LOCK_FILES, child=_forked)

"""Wakes a process that waits for a lease: a FIFO in the folder, named by the number of its claim.

Whoever changes the database rings for the claims that it has granted, and for those that are the first to wait for a
GPU now. A ring that is lost costs time only: who waits looks again by itself, the later the more come before it.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import time
from collections.abc import Iterable

from memguard._base.logs import log as _log

_PREFIX = "leases.wake-"
_SLICE = 0.5
"""Seconds for which one waits at a time: a signal handler or another thread may have ended the wait meanwhile."""
_OPEN = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW


def path_of(folder: str, number: int) -> str:
    return os.path.join(folder, f"{_PREFIX}{number}")


def ring(folder: str, numbers: Iterable[int]) -> None:
    """Nothing happens where nobody waits."""
    for number in numbers:
        with contextlib.suppress(OSError):
            fd = os.open(path_of(folder, number), os.O_WRONLY | _OPEN)
            try:
                if stat.S_ISFIFO(os.fstat(fd).st_mode):
                    os.write(fd, b"!")
            finally:
                os.close(fd)


def remove(folder: str, numbers: Iterable[int]) -> None:
    """The bells of claims that are gone."""
    for number in numbers:
        with contextlib.suppress(OSError):
            os.unlink(path_of(folder, number))


class Bell:
    """The bell of one claim at a time, for one thread that waits. Other threads may have the same claim's."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._fd = -1
        self._path = ""

    def hang(self, number: int) -> bool:
        """Let it hang for this claim. Whether it is new: what came before was not heard."""
        path = path_of(self._folder, number)
        if path != self._path:
            self.close()
        with contextlib.suppress(OSError):  # else another thread took it down
            if self._fd >= 0 and os.path.samestat(os.fstat(self._fd), os.lstat(path)):
                return False
        self._drop()
        try:
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
            self._fd, self._path = os.open(path, os.O_RDWR | _OPEN), path
        except OSError as error:
            _log.debug("whoever waits for a lease looks by itself: %s", error)
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait until it rings, at most so long, and not longer than a slice of it. Whether it rang."""
        seconds = max(min(seconds, _SLICE), 0.0)
        if self._fd < 0:
            time.sleep(seconds)
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        rang = bool(poll.poll(1000 * seconds))
        if rang:
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, 4096)
        return rang

    @property
    def hangs(self) -> bool:
        return self._fd >= 0

    def close(self) -> None:
        """Take it down."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._drop()

    def _drop(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

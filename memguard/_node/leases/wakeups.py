"""Wake-ups of processes that wait for a lease: one FIFO for each waiting claim, in the folder of the database.

Whoever changes the database writes to the FIFOs of the claims that the change granted, and of those that are now the
first to wait for a GPU. A lost wake-up costs time only: a waiting process also polls, the more seldom the more claims
are before its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import time
from collections.abc import Iterable

from memguard._base.logs import log as _log

_PREFIX = "leases.wake-"
_SLICE = 0.5
"""Seconds that `wait` blocks at most: a signal handler or another thread may have ended the wait meanwhile."""
_OPEN = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW


def path_of(folder: str, number: int) -> str:
    return os.path.join(folder, f"{_PREFIX}{number}")


def wake(folder: str, numbers: Iterable[int]) -> None:
    """Wake the processes that wait with these claims. Claims without a waiting process are skipped."""
    for number in numbers:
        with contextlib.suppress(OSError):
            fd = os.open(path_of(folder, number), os.O_WRONLY | _OPEN)
            try:
                if stat.S_ISFIFO(os.fstat(fd).st_mode):
                    os.write(fd, b"!")
            finally:
                os.close(fd)


def remove(folder: str, numbers: Iterable[int]) -> None:
    """Remove the FIFOs of claims whose processes died."""
    for number in numbers:
        with contextlib.suppress(OSError):
            os.unlink(path_of(folder, number))


class WakeupFifo:
    """The FIFO of one claim at a time, for one waiting thread. Other threads may open the same claim's."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._fd = -1
        self._path = ""

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    def open_for(self, number: int) -> bool:
        """Create and open the claim's FIFO. Returns True if it was not open before: earlier wake-ups are lost."""
        path = path_of(self._folder, number)
        if path != self._path:
            self.close()
        with contextlib.suppress(OSError):  # raised if another thread removed it
            if self._fd >= 0 and os.path.samestat(os.fstat(self._fd), os.lstat(path)):
                return False
        self._close_fd()
        try:
            with contextlib.suppress(FileExistsError):
                os.mkfifo(path, 0o600)
            self._fd, self._path = os.open(path, os.O_RDWR | _OPEN), path
            if not stat.S_ISFIFO(os.fstat(self._fd).st_mode):  # a plain file would always be ready to be read
                raise OSError(errno.EEXIST, "it is no FIFO", path)
        except OSError as error:
            _log.debug("no wake-up while this process waits for its lease, so it polls: %s", error)
            self._close_fd()
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Block until a wake-up, for at most `seconds` and at most _SLICE. Returns whether one came."""
        seconds = max(min(seconds, _SLICE), 0.0)
        if self._fd < 0:
            time.sleep(seconds)
            return False
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        woken = bool(poll.poll(1000 * seconds))
        if woken:
            with contextlib.suppress(BlockingIOError):
                os.read(self._fd, 4096)
        return woken

    def close(self) -> None:
        """Remove and close it."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._close_fd()

    def _close_fd(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

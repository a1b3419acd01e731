"""Who works on a process: takes it off its GPUs, or brings it back. One at a time, by any process of this user.

A lock (`flock`) on a file in the user's own folder, which the kernel takes away with its owner. What is recorded
without a living owner was left by one that was killed, and anybody may finish it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from memguard._suspend import records, who
from memguard._suspend.records import Record
from memguard._suspend.turn import folder
from memguard._suspend.types import Process, Why
from memguard.errors import MemguardError


class BusyError(MemguardError):
    """Somebody else is taking the process off its GPUs, or bringing it back. `by` is that process's PID, or None."""

    def __init__(self, process: Process, by: int | None) -> None:
        self.by = by
        does = f"process {by}" if by else "another process"
        super().__init__(
            f"process {process.pid}: {does} is suspending or resuming it just now\n    fix: wait for it, or end it"
        )


class Work:
    """Taking a process off its GPUs, or bringing it back: one at a time, by any process of this user.

    Within the block it is an `OnStep` of the flows that keeps the record. `ended` says how it came out. If nothing was
    done, another's record stays as it was. Entering raises BusyError after `patience` seconds.
    """

    def __init__(
        self,
        process: Process,
        why: Why,
        *,
        sizes: Callable[[], Mapping[str, int] | None] | None = None,
        budget: str | None = None,
        patience: float = 0.0,
        where: str | None = None,
    ) -> None:
        self._process, self._why, self._sizes, self._budget = process, why, sizes, budget
        self._patience, self._where = patience, where
        self._fd = -1
        self._path = ""
        self.found: Record | None = None
        """What was known before, once the block is entered."""
        self._now: Record | None = None

    def __enter__(self) -> Work:
        self._where = self._where or folder()
        self._path = os.path.join(self._where, f"work-{self._process.pid}-{self._process.start}")
        self._fd = _locked(self._path, self._process, max(self._patience, _LOOKED_AT))
        _mine.add(self._fd)
        self.found = self._now = records.of(self._process, self._where)
        return self

    def __exit__(self, *_: object) -> None:
        fd, self._fd = self._fd, -1
        if fd in _mine:  # not in a forked child
            _mine.discard(fd)
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            os.close(fd)

    def __call__(self, step: str) -> None:
        """It is about to take that step. `state` changes nothing, and is not recorded."""
        if step not in records.STEPS:
            return
        if step == "lock":  # it runs: what was recorded before is of somebody who was killed before that
            self.found = self._now = None
        if self._now is None:
            sizes = (self._sizes() or None) if self._sizes is not None else None
            command = who.command(self._process.pid)
            self._now = Record(self._process, step, sizes, time.time(), self._why, command, self._budget)
        self._keep(replace(self._now, step=step))

    def ended(self, end: str, sizes: Mapping[str, int] | None = None) -> None:
        """`end` is the value of a `steps.End`; `sizes`, the bytes by GPU that it needs to come back, if known."""
        if end in ("running", "ended"):
            self._now = None
            records.remove(self._process, where=self._where)
        elif end == "untouched":
            if self._now is not None and self.found is None:
                records.remove(self._process, where=self._where)
            elif self.found is not None:
                self._keep(self.found)
        elif end in ("suspended", "lost") and self._now is not None:
            since = self.found.since if self.found is not None else time.time()
            self._now = replace(self._now, step=end, since=since)
            # No byte at all cannot be: a context has some hundred MiB.
            self._keep(replace(self._now, bytes=sizes, measured=True) if sizes else self._now)

    def _keep(self, record: Record) -> None:
        self._now = record
        records.write(record, self._where)


_LOOKED_AT = 0.2
"""Seconds after which a lock is taken for one: who only looks has it for microseconds."""
_mine: set[int] = set()
"""Locks that this process holds. A forked child has copies, which would keep them."""


def _forked() -> None:
    for fd in tuple(_mine):
        with contextlib.suppress(OSError):
            os.close(fd)
    _mine.clear()


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_forked)


def _locked(path: str, process: Process, patience: float) -> int:
    _watch_forks()
    until = time.monotonic() + patience
    while True:
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same(fd, path):
                os.ftruncate(fd, 0)
                os.write(fd, str(os.getpid()).encode())
                return fd
        except BlockingIOError:
            if time.monotonic() > until:
                by = os.pread(fd, 20, 0)
                os.close(fd)
                raise BusyError(process, int(by) if by.isdigit() else None) from None
            time.sleep(_LOOKED_AT / 10)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its owner has just ended, and removed it


def _same(fd: int, path: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError:
        return False


def worked_on(process: Process, where: str | None = None) -> int | None:
    """The PID of who takes the process off its GPUs just now, or brings it back. None: nobody, 0: unknown who."""
    path = os.path.join(where or folder(), f"work-{process.pid}-{process.start}")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        by = os.pread(fd, 20, 0)
        return int(by) if by.isdigit() else 0
    else:
        return None
    finally:
        os.close(fd)


def tidy(where: str | None = None) -> None:
    """Remove the locks of those that were killed."""
    where = where or folder()
    for name in os.listdir(where):
        path = os.path.join(where, name)
        if name.startswith("work-"):
            with contextlib.suppress(OSError):
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
                finally:
                    os.close(fd)

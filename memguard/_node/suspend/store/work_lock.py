"""Who works on a process: takes it off its GPUs, or brings it back. One at a time, by any process of this user.

That one holds a byte of the file of locks (`_node.leases.locks`). What is recorded without a living owner was left by
one that was killed, and anybody may finish it.
"""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from memguard._base.advice import Advice
from memguard._base.logs import log as _log
from memguard._devices import proc
from memguard._node.identity import Process, machine
from memguard._node.leases import locks
from memguard._node.leases.store import LOCKS, made
from memguard._node.suspend.store import records
from memguard._node.suspend.store.records import Record
from memguard._node.suspend.types import Why
from memguard.errors import MemguardError


class BusyError(MemguardError):
    """Somebody else is taking the process off its GPUs, or bringing it back: `by` is that one's PID, or None.

    Or nobody can know, as nothing can be written there (`why`).
    """

    def __init__(self, process: Process, by: int | None = None, why: Advice | None = None) -> None:
        self.by = by
        does = f"process {by}" if by else "another process"
        # Not "end it", which could be taken for the process itself.
        end = f", or end that command (`kill {by}`)" if by and by != process.pid else ""
        if by == process.pid:  # nobody else can do it then: see docs/suspend.md, a thread that waits in the driver
            end = f"; if it stands still (`py-spy dump --pid {by}`), only ending the process is left"
        why = why or Advice(f"{does} is suspending or resuming it just now", f"wait until that is done{end}")
        super().__init__(why.within(f"process {process.pid}"))


class Work:
    """Taking a process off its GPUs, or bringing it back: one at a time, by any process of this user.

    Within the block it is an `OnStep` of the flows that keeps the record. `ended` says how it came out. If nothing was
    done, another's record stays as it was. Entering raises BusyError after `patience` seconds; OSError, or another
    MemguardError if the user's folder is not safe. The step `lock` raises OSError if it cannot be recorded.
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
        self._byte, self._files = _byte_of(process), list[locks.File]()
        self.found: Record | None = None
        """What was known before, once the block is entered."""
        self._now: Record | None = None

    def __enter__(self) -> Work:
        places = [self._where] if self._where is not None else records.places(self._process)
        held = [one for one in places if records.of(self._process, one) is not None]
        where = self._where = held[0] if held else self._where or records.own()
        for other in places:  # whoever works on it may have another folder of its own
            if other != where and (by := worked_on(self._process, other)) is not None:
                raise BusyError(self._process, by)
        try:
            self._lock(where)
            self.found = self._now = records.of(self._process, where)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            locks.undo(self._files, (self._byte,))
        finally:  # again: a Ctrl-C may have come into the one before
            locks.undo(self._files, (self._byte,))

    def _lock(self, where: str) -> None:
        path, until = os.path.join(where, LOCKS), time.monotonic() + max(self._patience, _LOOKED_AT)
        made(path)
        while locks.hold(path, (self._byte,), self._files) is None:
            if time.monotonic() > until:
                raise BusyError(self._process, worked_on(self._process, where))
            time.sleep(_LOOKED_AT / 10)

    def __call__(self, step: str) -> None:
        """It is about to take that step. `state` changes nothing, and is not recorded."""
        if step not in records.STEPS:
            return
        if step == "lock":  # it runs: what was recorded before is of somebody who was killed before that
            self.found = self._now = None
        if self._now is None:
            sizes = (self._sizes() or None) if self._sizes is not None else None
            command = proc.command(self._process.pid)
            self._now = Record(self._process, step, sizes, time.time(), self._why, command, self._budget)
        self._keep(replace(self._now, step=step), must=step == "lock")

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

    def _keep(self, record: Record, must: bool = False) -> None:
        """Before the lock it must be written down. After it nothing is left undone because of a full disk."""
        self._now = record
        try:
            records.write(record, self._where)
        except OSError as error:
            if must:
                raise
            _log.warning("that process %d is at `%s` cannot be recorded: %s", self._process.pid, record.step, error)


_LOOKED_AT = 0.2
"""Seconds for which the byte is waited for: its holder may be about to end."""
_WORK = 1 << 41
"""Where the bytes of suspensions begin in the file of locks."""


def _byte_of(process: Process) -> int:
    """One byte for each process, also of several PID namespaces: two share one in one case in four thousand million."""
    return _WORK + zlib.crc32(f"{machine()} {process.pid} {process.start}".encode())


def worked_on(process: Process, where: str | None = None) -> int | None:
    """The PID of who takes the process off its GPUs just now, or brings it back. None: nobody, 0: unknown who."""
    number = _byte_of(process)
    for place in [where] if where is not None else records.places(process):
        with contextlib.suppress(OSError), locks.opened(os.path.join(place, LOCKS)) as file:
            for _, pid in file.holders(number, number):
                return pid
    return None

"""Whose turn it is to restore on a GPU: first come, first served, among the processes of one user.

A ticket is a file in the user's own folder, named by when its owner came, who holds it (`lockfile`). No process has to
be alive for another's turn.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from memguard._node.identity import folder
from memguard._node.suspend.store import lockfile

_NEW = ".new"


@dataclass(frozen=True)
class Ticket:
    """A place in the queue of one GPU, held through the open file `fd`."""

    path: str
    fd: int

    def close(self) -> None:
        lockfile.drop(self.fd, self.path)


class Turn:
    """A place in the queues of some GPUs (UUIDs), from `__enter__` to `__exit__`.

    All places of one have the same time, so that two that wait for the same GPUs never wait for each other.
    """

    def __init__(self, uuids: Iterable[str], where: str | None = None) -> None:
        self._uuids, self._where = sorted(uuids), where
        self._tickets: list[Ticket] = []

    def __enter__(self) -> Turn:
        where = self._where or folder()
        # The same clock for every process since the machine started; the PID tells two of one instant apart.
        label = f"{time.monotonic_ns():020d}-{os.getpid()}"
        try:
            for uuid in self._uuids:
                self._tickets.append(_taken(os.path.join(where, f"turn-{uuid}"), label))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        while self._tickets:
            self._tickets.pop().close()

    def ahead(self) -> dict[str, tuple[int, ...]]:
        """The PIDs of those who came before, by GPU, first come first; empty where it is this one's turn."""
        found = {uuid: _before(ticket) for uuid, ticket in zip(self._uuids, self._tickets, strict=True)}
        return {uuid: pids for uuid, pids in found.items() if pids}


def _taken(queue: str, label: str) -> Ticket:
    with contextlib.suppress(FileExistsError):
        os.mkdir(queue, 0o700)
    path = os.path.join(queue, label)
    # Held before it has its name: nobody sees a ticket of a living process that is not held.
    fd = lockfile.take(path + _NEW, os.O_EXCL)
    try:
        os.rename(path + _NEW, path)
    except BaseException:
        lockfile.drop(fd, path + _NEW)
        raise
    return Ticket(path, fd)


def _before(ticket: Ticket) -> tuple[int, ...]:
    queue, own = os.path.split(ticket.path)
    found = []
    for name in sorted(os.listdir(queue)):
        if name.endswith(_NEW) or name >= own:
            continue
        if lockfile.held(os.path.join(queue, name)):
            found.append(int(name.rpartition("-")[2]))
    return tuple(found)

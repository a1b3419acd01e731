"""Whose turn it is to restore on a GPU: first come, first served, among the processes of one user.

A ticket is a byte of the file of locks (`_node.leases.locks`), in the range of its GPU, at the time at which its owner
came. The kernel frees it when its owner dies, and it needs neither the database nor room on the disk: so nobody waits
for either, and no process has to be alive for another's turn.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterable

from memguard._node.identity import folder
from memguard._node.leases import locks
from memguard._node.leases.store import LOCKS, made

_TURNS, _TIME = 1 << 62, 46
"""Where the GPUs' ranges begin, and the bits of a time within one: of microseconds, for two years."""


class Turn:
    """A place in the queues of some GPUs (UUIDs), from `__enter__` to `__exit__`.

    All places of one have the same time, so that two that wait for the same GPUs never wait for each other.
    """

    def __init__(self, uuids: Iterable[str], where: str | None = None) -> None:
        self._uuids, self._where = sorted(uuids), where
        self._path = ""
        self._files: list[locks.File] = []
        self._tickets: tuple[int, ...] = ()

    def __enter__(self) -> Turn:
        """Raises OSError, or MemguardError if the folder is not this user's."""
        self._path = os.path.join(self._where or folder(), LOCKS)
        made(self._path)
        # The same clock for every process since the machine started. Of two that come at once, one comes later.
        when = time.monotonic_ns() // 1000 % (1 << _TIME - 1)
        try:
            while not self._files:
                self._tickets = tuple(_range(uuid) + when for uuid in self._uuids)
                locks.hold(self._path, self._tickets, self._files)
                when += 1
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            locks.undo(self._files, self._tickets)
        finally:  # again: a Ctrl-C may have come into the one before
            locks.undo(self._files, self._tickets)

    def ahead(self) -> dict[str, tuple[int, ...]]:
        """The PIDs of those who came before, by GPU, first come first; empty where it is this one's turn.

        The PID of a process in another container is 0.
        """
        if not self._files:
            return {}
        with locks.opened(self._path) as file:
            found = {
                uuid: tuple(pid for _, pid in file.holders(_range(uuid), ticket - 1))
                for uuid, ticket in zip(self._uuids, self._tickets, strict=True)
            }
        return {uuid: pids for uuid, pids in found.items() if pids}


def _range(uuid: str) -> int:
    """Two GPUs of one range, one case in sixty thousand, share a queue."""
    return _TURNS + ((zlib.crc32(uuid.encode("utf-8", "replace")) & 0xFFFF) << _TIME)

"""Waits between the lock and the copy until every thread of the process has passed what it was about to do.

A thread that synchronizes while its process is only locked passes; one that does it after the copy crashes the process
(measured, H200, driver 580.159). Frameworks have threads of their own, in C++, which nothing in Python can hold up:
TensorFlow's asks for its events. On a machine with more work than processors such a thread may get no processor for
long, so it is not the time that counts but whether it ran.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

from memguard._devices import proc

LONGEST = 2.0
"""Seconds that are waited at most: a thread that computes may never sleep, and gets no processor here."""
_RAN = 2
"""Clock ticks of processor time (10 ms each on Linux) in which a thread comes from a copy to its synchronize."""
_LOOK = 0.01


class Thread(NamedTuple):
    """`ran`: clock ticks on a processor since it began."""

    asleep: bool
    ran: int


def left(before: Mapping[int, Thread], now: Mapping[int, Thread]) -> dict[int, Thread]:
    """Those of `before` that have neither slept since nor run for long enough. What has ended is not left."""
    return {one: thread for one, thread in before.items() if one in now and not _passed(thread, now[one])}


def _passed(before: Thread, now: Thread) -> bool:
    return now.asleep or now.ran - before.ran >= _RAN


def wait(pid: int, least: float, cancel: threading.Event | None = None, longest: float = LONGEST) -> bool:
    """Wait `least` seconds, and for those threads until `longest`. False: some have not been seen to pass, or `cancel`.

    The thread that waits is left out: it may be one of that process.
    """
    cancel = cancel or threading.Event()
    end = time.monotonic() + max(least, longest)
    remaining = threads(pid)
    pause = least
    while not cancel.wait(pause):
        remaining = left(remaining, threads(pid))
        if not remaining:
            return True
        if time.monotonic() >= end:
            return False
        pause = _LOOK
    return False


def threads(pid: int, root: str = "/") -> dict[int, Thread]:
    """A process's threads by TID, without the caller; none if there is no such process."""
    folder, found = proc.path_of(root, pid, "task"), {}
    with contextlib.suppress(OSError, ValueError):
        for tid in map(int, os.listdir(folder)):
            said = proc.text(os.path.join(folder, str(tid), "stat")) or ""
            stat = proc.parse_stat(said)
            if stat is not None and tid != threading.get_native_id():
                found[tid] = Thread(stat.state != "R", stat.ran)
    return found

"""While somebody waits for room: another may bring the process back, and then the room would never come."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from memguard._devices.checkpoint import State
from memguard._node.identity import Process
from memguard._node.suspend.driver.channel import CheckpointChannel

EVERY = 1.0
"""Seconds between two questions for the state."""
_TICK = 0.05


@contextlib.contextmanager
def end_of_wait(
    process: Process, client: CheckpointChannel, cancel: threading.Event | None, limit: float
) -> Iterator[threading.Event]:
    """An event that is set when `cancel` is, or when the process is no longer off its GPUs.

    `limit`: seconds for the state to answer: as long as another's restore takes.
    """
    stop, over = threading.Event(), threading.Event()
    if cancel is not None and cancel.is_set():
        stop.set()

    def look() -> None:
        asked = time.monotonic()
        while not over.wait(_TICK) and not stop.is_set():
            if cancel is not None and cancel.is_set():
                stop.set()
            elif time.monotonic() - asked >= EVERY:
                answer = client.state(process, limit)
                asked = time.monotonic()
                if answer.trouble == "ended" or (answer.code == 0 and answer.state is not State.CHECKPOINTED):
                    stop.set()

    try:
        threading.Thread(target=look, daemon=True).start()
    except RuntimeError:  # Python is ending
        stop = cancel or stop
    try:
        yield stop
    finally:
        over.set()

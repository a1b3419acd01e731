"""The phases of a process's suspension and resume, and the table of their transitions: pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class Phase(Enum):
    RUNNING = "running"
    """The process uses its GPUs."""
    LEAVING = "leaving"
    """memguard blocks the frameworks' CUDA calls (closes its gates), and the driver moves GPU memory to the host."""
    OFF = "off"
    """The contents of all GPU memory are in host memory, or the driver did not report whether they are. The gates stay
    closed."""
    RETURNING = "returning"
    """The process waits until enough GPU memory is free, and the driver copies its contents back."""
    LOST = "lost"
    """The driver has destroyed the process's GPU state. Its other memory is freed only when the process ends."""


TRANSITIONS: Mapping[tuple[Phase, Phase], str] = {
    (Phase.RUNNING, Phase.LEAVING): "suspend, once every check has passed",
    (Phase.LEAVING, Phase.OFF): "moved to the host, or its state is unknown",
    (Phase.LEAVING, Phase.RUNNING): "refused, failed or interrupted, and taken back",
    (Phase.LEAVING, Phase.LOST): "taking it back failed",
    (Phase.OFF, Phase.RETURNING): "resume, once it has its lease",
    (Phase.OFF, Phase.RUNNING): "another process has resumed it",
    (Phase.RETURNING, Phase.RUNNING): "restored",
    (Phase.RETURNING, Phase.OFF): "no room, or interrupted",
    (Phase.RETURNING, Phase.LOST): "the restore failed",
}
"""Every transition, with its cause. A forked child begins in RUNNING, without CUDA."""
SETTLED = frozenset({Phase.RUNNING, Phase.OFF, Phase.LOST})
"""The phases in which a call of memguard may end, even if interrupted. The other phases last only during a call."""


class IllegalTransition(RuntimeError):
    """A transition that is not in the table."""

    def __init__(self, before: Phase, after: Phase) -> None:
        super().__init__(f"a process cannot change from {before.name} to {after.name}")

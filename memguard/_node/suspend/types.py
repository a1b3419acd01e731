"""What the parts of a suspension say to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from memguard._base.text import shown
from memguard._base.units import format_size
from memguard._node.identity import Process

Why = Literal["asked", "idle", "by_others", "lease", "unsafe"]
"""Who wanted it: the program, its own idle time, another process that it allows, one that waits for its lease, or one
that it does not allow."""

HostMemory = Literal["check", "ignore"]
TIMEOUT = 60.0
"""Seconds that the GPUs' work may take to end before the process leaves them."""


@dataclass(frozen=True)
class Reason:
    """Why a process cannot be suspended, and what to do: one line each. `code` is the finding's name."""

    code: str
    reason: str
    remedy: str


@dataclass(frozen=True)
class Wait:
    """One look at the room that a restore waits for; bytes.

    `holders` are lines for people: who holds the GPU's memory, most first. `ahead` counts who waits before this one.
    """

    uuid: str
    needs: int
    free: int
    ahead: int
    holders: tuple[str, ...]
    seconds: float


Progress = Callable[[Wait], None]


@dataclass(frozen=True)
class Suspension:
    """A process that is off its GPUs.

    `bytes` counts by GPU (UUID) what left it, as NVML said; `host` is what its resident host memory grew by, None if
    nobody measured. `since` is Unix time, `seconds` what taking it off took. `parts` are the seconds of each step.
    """

    process: Process
    bytes: Mapping[str, int]
    host: int | None
    since: float
    seconds: float
    why: Why
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """All bytes that left the GPUs."""
        return sum(self.bytes.values())

    def __str__(self) -> str:
        """`suspended in 4.1 s: 12.3 GiB left GPU-…; host memory grew by 12.4 GiB`."""
        each = ", ".join(f"{format_size(size)} left {uuid}" for uuid, size in self.bytes.items())
        host = "" if self.host is None else f"; host memory grew by {format_size(self.host)}"
        return shown(f"suspended in {self.seconds:.1f} s: {each or 'what was on its GPUs is unknown'}{host}")

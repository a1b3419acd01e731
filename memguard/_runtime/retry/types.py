"""Plain data of a failed run and of the room made after it, without exceptions, tracebacks or arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from memguard._base.types import RefusedRequest
from memguard._base.units import format_size
from memguard._oom.classify import ErrorFacts, Verdict


class Failure(NamedTuple):
    """One failed run. Sizes are bytes; None if unknown.

    who      the framework or library that requested memory
    request  the record of the refused request, if the allocator reported it
    words    type and text of the error, in one line
    in_use   the live arrays of each framework when the error was caught, by UUID and name
    held     the memory that each framework had taken from the driver then, by UUID and name
    """

    who: str | None
    asked: int | None
    certain: bool
    request: RefusedRequest | None
    facts: ErrorFacts
    verdict: Verdict
    words: str
    in_use: Mapping[str, Mapping[str, int]] = {}
    held: Mapping[str, Mapping[str, int]] = {}

    @property
    def title(self) -> str:
        size = "" if self.asked is None else f" ({format_size(self.asked)} asked for)"
        possibly = "" if self.certain else "possibly "
        return f"{self.who or 'an unknown requester'} {possibly}ran out of GPU memory{size}"


class Done(NamedTuple):
    """The room made before a retry, in bytes.

    freed     the decrease of memory in use since the failed run's frames were cleared; None without a budget
    returned  the bytes that each framework gave back, by NVML
    cap       the requester's cap before and after; None if it did not move
    live      the bytes that siblings hold in live arrays above their min, or above a fixed cap
    uuid      the GPU; None if unknown
    """

    freed: int | None = None
    returned: Mapping[str, int] = {}
    cap: tuple[int, int] | None = None
    live: Mapping[str, int] = {}
    uuid: str | None = None

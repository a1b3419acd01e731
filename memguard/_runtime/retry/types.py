"""One failed run, and what was done after it: figures and text, never an exception, a traceback or an array."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from memguard._base.types import RefusedRequest
from memguard._base.units import format_size
from memguard._oom.classify import ErrorFacts, Verdict


class Failure(NamedTuple):
    """One failed run as plain data. Sizes are bytes; None if not known.

    who     the framework or library that asked
    request  the record of its refusal, if the allocator told of one
    words   type and text of the error, in one line
    in_use  what each framework had in live arrays when the error was caught, by UUID and name
    held    the same of what it had taken from the driver
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
    """What was done before a run is repeated, in bytes, by NVML.

    freed     what the frameworks have less in use since the failed run was let go of; None without a budget
    returned  what each framework gave back
    cap       the requester's before and after; None if it did not move
    live      what siblings hold in live arrays above what is theirs for good
    uuid      the GPU; None if it is not known
    """

    freed: int | None = None
    returned: Mapping[str, int] = {}
    cap: tuple[int, int] | None = None
    live: Mapping[str, int] = {}
    uuid: str | None = None

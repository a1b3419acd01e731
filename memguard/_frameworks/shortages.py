"""What an error of an allocator says about the shortage behind it, for those whose allocator memguard owns."""

from __future__ import annotations

from typing import Any

from memguard._base.types import Shortage
from memguard._frameworks.base import with_size

TRIES = 2
"""So many times a request is tried again after room was made for it: another thread may be faster."""


def within(lock: Any) -> bool:
    """Whether this thread has the lock: a signal handler or a finalizer came into a call that counts on its blocks."""
    return bool(lock._is_owned())


def short_of(error: BaseException, asked: int, needed: int, *, full: bool) -> BaseException:
    """The error, marked with what it was short of. A call, so that no frame keeps the error alive."""
    error.memguard_short = needed, full  # type: ignore[attr-defined]
    return with_size(error, asked)


def shortage_of(error: BaseException, framework: str, uuid: str, asked: int) -> Shortage | None:
    """The shortage that an error was marked with; None for any other error."""
    needed, full = getattr(error, "memguard_short", (None, False))
    return None if needed is None else Shortage(framework, uuid, asked, needed, full)

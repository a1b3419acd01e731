"""Attaches the shortage behind an allocator's error to the error, for memguard's own allocators."""

from __future__ import annotations

from typing import Any

from memguard._base.types import Shortage
from memguard._frameworks.base import with_size

TRIES = 2
"""Tries for a request after room was made: another thread may take the room first."""


def within(lock: Any) -> bool:
    """Whether this thread holds the lock: a signal handler or a finalizer interrupted a call that relies on its
    blocks."""
    return bool(lock._is_owned())


def short_of(error: BaseException, asked: int, needed: int, *, full: bool) -> BaseException:
    """Attach a shortage to the error. A function, so that no frame keeps the error alive."""
    error.memguard_short = needed, full  # type: ignore[attr-defined]
    return with_size(error, asked)


def shortage_of(error: BaseException, framework: str, uuid: str, asked: int) -> Shortage | None:
    """The shortage attached to an error; None for any other error."""
    needed, full = getattr(error, "memguard_short", (None, False))
    return None if needed is None else Shortage(framework, uuid, asked, needed, full)

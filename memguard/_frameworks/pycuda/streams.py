"""Whether PyCUDA may have work on streams for which the legacy default stream does not wait.

PyCUDA creates its streams with `Stream(flags)`, and its pools ignore streams: they reuse a block while a kernel still
uses it. A consumer on another framework's stream must therefore know which earlier work may still run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from memguard._frameworks.replacements import Replacements

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_watched: Replacements | None = None
_aside = True


def watch(drv: Any, replaced: Replacements, *, used: bool) -> None:
    """Detect, until `replaced` is undone, the creation of a non-blocking stream. `used`: one may exist already."""
    global _watched, _aside

    def init(original: Callable[..., None]) -> Callable[..., None]:
        def call(stream: Any, flags: int = 0) -> None:
            global _aside
            original(stream, flags)
            if flags & _NON_BLOCKING:
                _aside = True

        return call

    _watched, _aside = None, used
    if hasattr(drv, "Stream") and replaced.put(drv.Stream, "__init__", init):
        _watched = replaced


def may_be_aside() -> bool:
    """Whether PyCUDA may have work on a non-blocking stream. True if unknown."""
    return _aside or _watched is None or not _watched.active

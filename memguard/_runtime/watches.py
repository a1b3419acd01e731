"""What `memguard.on_event` and `memguard.on_sample` return. Loaded when the first function is registered."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._runtime import session


class Watch:
    """A function that is given each event, or each sample, until `remove`; in a `with` block, until its end."""

    def __init__(self, callback: Callable[[Any], object], registered: list[Watch]) -> None:
        self.callback = callback
        self._registered = registered
        self._failed = False

    def remove(self) -> None:
        """Give it nothing any more. May be called again, and on any thread, also by the function itself."""
        for position, one in enumerate(self._registered):
            if one is self:
                del self._registered[position]
                return

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def failed(self, by: str, error: BaseException) -> None:
        """Log what the function raised, once for each registration. The error is kept nowhere."""
        if not self._failed:
            self._failed = True
            _log.warning("%s: %s failed (logged once): %s", by, session.name_of(self.callback), text_of(error))

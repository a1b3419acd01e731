"""What `memguard.on_event` and `memguard.on_sample` return, and the calls of the latter's functions.

Loaded when the first function is registered.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.types import Sample
from memguard._devices import suspension


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
            _log.warning("%s: %s failed (logged once): %s", by, name_of(self.callback), text_of(error))


def give(watches: list[Watch], sample: Sample, active: Callable[[], bool]) -> None:
    """Give the sample to every watch, on the monitor's thread: see `Session`.

    None follows if one of them ends the budget, suspends the process, or forks: here is the child then.
    """
    pid = os.getpid()
    for watch in [*watches]:
        if suspension.now is not None or os.getpid() != pid or not active():
            return
        try:
            watch.callback(sample)
        except BaseException as error:  # SystemExit would end the monitor's thread without a word
            watch.failed("memguard.on_sample", error)


def name_of(callback: object) -> str:
    """The callback's name and place, which it may not tell."""
    try:
        code = getattr(callback, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        return f"{getattr(callback, '__qualname__', None) or repr(callback)}{where}"
    except Exception:
        return "a function"

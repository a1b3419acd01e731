"""Callback registrations of `memguard.on_event` and `memguard.on_sample`, and the delivery of samples.

Imported when the first callback is registered.
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
    """The registration of a callback for events or samples, until `remove` or the end of its `with` block."""

    def __init__(self, callback: Callable[[Any], object], registered: list[Watch]) -> None:
        self.callback = callback
        self._registered = registered
        self._failed = False

    def remove(self) -> None:
        """Unregister the callback. May be called again, on any thread, and by the callback itself."""
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
        """Log the callback's error, once for each registration. Keeps no reference to the error."""
        if not self._failed:
            self._failed = True
            _log.warning("%s: %s failed (logged once): %s", by, name_of(self.callback), text_of(error))


def give(watches: list[Watch], sample: Sample, active: Callable[[], bool]) -> None:
    """Call every registered callback with the sample, on the monitor's thread.

    Stops after a callback that ends the budget, suspends the process, or forks (in the child).
    """
    pid = os.getpid()
    for watch in [*watches]:
        if suspension.now is not None or os.getpid() != pid or not active():
            return
        try:
            watch.callback(sample)
        except BaseException as error:  # SystemExit would end the monitor's thread silently
            watch.failed("memguard.on_sample", error)


def name_of(callback: object) -> str:
    """The callback's name, and its file and line if known."""
    try:
        code = getattr(callback, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        return f"{getattr(callback, '__qualname__', None) or repr(callback)}{where}"
    except Exception:
        return "a function"

"""Callback registrations of `memguard.on_event` and `memguard.on_sample`, and the calls of `on_sample` callbacks.

memguard imports this module when the first callback is registered.
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
    """A registered callback for events or samples. `remove` or the end of a `with` block unregisters it."""

    def __init__(self, callback: Callable[[Any], object], registered: list[Watch]) -> None:
        self.callback = callback
        self._registered = registered
        self._failed = False

    def remove(self) -> None:
        """Unregister the callback. Any thread, and the callback itself, may call this method, also repeatedly."""
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
        """Log the callback's error, once for each registration. `by` names the public function for the log message."""
        if not self._failed:
            self._failed = True
            _log.warning("%s: %s failed (logged once): %s", by, name_of(self.callback), text_of(error))


def give(watches: list[Watch], sample: Sample, active: Callable[[], bool]) -> None:
    """Call the callbacks in `watches` with the sample, on the monitor's thread.

    `active` returns True while the budget is in effect. Skips the remaining callbacks if one of them ended the
    budget or suspended the process, and in a child process that a callback forked.
    """
    pid = os.getpid()
    for watch in [*watches]:
        if suspension.now is not None or os.getpid() != pid or not active():
            return
        try:
            watch.callback(sample)
        except BaseException as error:  # SystemExit would end the monitor's thread without a message
            watch.failed("memguard.on_sample", error)


def name_of(callback: object) -> str:
    """The callback's qualified name, followed by file and line if known."""
    try:
        code = getattr(callback, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        return f"{getattr(callback, '__qualname__', None) or repr(callback)}{where}"
    except Exception:
        return "a function"

"""`memguard.on_sample`: a function of the program that is given each sample of the monitor.

Loaded when the first one is registered. The monitor's thread calls it: see `Session`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType

from memguard._devices import suspension
from memguard._logs import log as _log
from memguard._logs import text_of
from memguard._monitor import session
from memguard._types import Sample


class Watch:
    """A function that is given each sample, until `remove`; in a `with` block, until its end."""

    def __init__(self, callback: Callable[[Sample], object]) -> None:
        self._callback = callback
        self._failed = False

    def remove(self) -> None:
        """Give it no sample any more. May be called again, and on any thread, also by the function itself."""
        for position, one in enumerate(session.watches):
            if one is self:
                del session.watches[position]
                return

    def __call__(self) -> None:
        """As `remove`: what `memguard.on_pressure` returns is called, too."""
        self.remove()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def give(self, sample: Sample) -> None:
        """Call the function. What it raises is logged once for each registration, and kept nowhere."""
        try:
            self._callback(sample)
        except BaseException as error:  # SystemExit would end the monitor's thread without a word
            if not self._failed:
                self._failed = True
                name = session.name_of(self._callback)
                _log.warning("memguard.on_sample: %s failed (logged once): %s", name, text_of(error))


def give(sample: Sample, active: Callable[[], bool]) -> None:
    """Give it to every watch. None follows if one of them ends the budget, suspends the process, or forks: here is the
    child then."""
    pid = os.getpid()
    for watch in [*session.watches]:
        if suspension.now is not None or os.getpid() != pid or not active():
            return
        watch.give(sample)

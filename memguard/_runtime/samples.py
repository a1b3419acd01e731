"""Give each sample of the monitor to the functions of `memguard.on_sample`, on the monitor's thread: see `Session`."""

from __future__ import annotations

import os
from collections.abc import Callable

from memguard._base.types import Sample
from memguard._devices import suspension
from memguard._runtime import session


def give(sample: Sample, active: Callable[[], bool]) -> None:
    """Give it to every watch. None follows if one of them ends the budget, suspends the process, or forks: here is the
    child then."""
    pid = os.getpid()
    for watch in [*session.watches]:
        if suspension.now is not None or os.getpid() != pid or not active():
            return
        try:
            watch.callback(sample)
        except BaseException as error:  # SystemExit would end the monitor's thread without a word
            watch.failed("memguard.on_sample", error)

"""Runs functions at the end of the main thread, before frameworks shut down.

`atexit` functions run in reverse order. So the exit function of a framework that was imported after `memguard.init`
runs before memguard's, and shuts down the framework's backend. Functions registered here run before all `atexit`
functions. They also run in `multiprocessing` workers, which run no `atexit` functions. Other threads may still run.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable

from memguard._base.logs import log as _log
from memguard._base.logs import text_of

_calls: list[Callable[[], None]] = []


def call_before(call: Callable[[], None]) -> None:
    """Register `call` for the end of the main thread. It must be harmless in a forked child."""
    _calls.append(call)
    _register(os.getpid())


def forget(call: Callable[[], None]) -> None:
    """Unregister `call`."""
    while call in _calls:
        _calls.remove(call)


@functools.cache
def _register(pid: int) -> None:
    """Register `_end` once per process. Python's hook is private; if it is missing, only `atexit` functions run."""
    register: Callable[[Callable[[], None]], None] | None = getattr(threading, "_register_atexit", None)
    if register is None:
        return
    try:
        register(_end)
    except RuntimeError:  # the main thread has already ended
        return


def _end() -> None:
    for call in list(_calls):
        try:
            call()
        except Exception as error:
            _log.debug("at the program's end: %s", text_of(error))

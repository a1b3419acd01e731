"""The end of a program, while its frameworks are still whole.

Exit functions of `atexit` run last first: those of a framework that was imported after `memguard.init` come before
memguard's, and end its backend. What is called here runs before all of them, when the main thread ends; also in
processes of `multiprocessing`, which run no exit functions. Other threads may still be at work.
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
    """From now on `call` is made when the main thread ends. It must be harmless in a forked child."""
    _calls.append(call)
    _register(os.getpid())


def forget(call: Callable[[], None]) -> None:
    """It is not made any more."""
    while call in _calls:
        _calls.remove(call)


@functools.cache
def _register(pid: int) -> None:
    """Once in a process. Python's own name for it is private: without it, exit functions alone do what they can."""
    register: Callable[[Callable[[], None]], None] | None = getattr(threading, "_register_atexit", None)
    if register is None:
        return
    try:
        register(_end)
    except RuntimeError:  # the main thread has ended already
        return


def _end() -> None:
    for call in list(_calls):
        try:
            call()
        except Exception as error:
            _log.debug("at the program's end: %s", text_of(error))

"""The program ends while it is suspended: it comes back if there is room, else it leaves without its libraries' ends.

What frameworks do at exit (streams, modules, contexts) would end the process with a SIGSEGV or wait for ever. Threads
that wait at a gate would be waited for.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from memguard._base import life
from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._devices import suspension
from memguard._devices.phase import Phase
from memguard.errors import MemguardError

PATIENCE = 60.0
"""Seconds that an exit waits for room on the GPUs."""
_asked: list[object] = []
"""What `sys.exit` was called with last: Python does not tell its exit functions. Of `raise SystemExit` nobody knows."""


class _Exit:
    """In the place of `sys.exit` while the process is suspended: Python tells no exit function the status.

    It would only be known from C: the status is a local variable of `Py_Exit` while the exit functions run.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, status: object = None, /) -> Any:
        _asked[:] = [status]
        return self.original(status)


def arrange(bring_back: Callable[[float], None]) -> None:
    """From now on an exit calls `bring_back` first, with the seconds that it may take. It raises if it fails."""
    _register(os.getpid(), bring_back)
    _asked.clear()
    if not isinstance(sys.exit, _Exit):
        sys.exit = _Exit(sys.exit)


def dismiss() -> None:
    """It is back: an exit is an exit."""
    if isinstance(sys.exit, _Exit):
        sys.exit = sys.exit.original


@functools.cache
def _register(pid: int, bring_back: Callable[[float], None]) -> None:
    """Once in a process. Before Python waits for threads, and before the exit functions of earlier modules."""
    at_exit = functools.partial(_at_exit, bring_back)
    first: Callable[[Any], None] | None = getattr(threading, "_register_atexit", None)
    if first is not None:
        first(at_exit)
    life.at_exit(life.HookOrder.SUSPENSION, at_exit)


def _at_exit(bring_back: Callable[[float], None]) -> None:
    if suspension.phase() is Phase.RUNNING:
        return
    try:
        bring_back(PATIENCE)
        return
    except BaseException as error:
        why = text_of(error)
        if isinstance(error, MemguardError):  # without its fix: nobody can resume a process that has ended
            why = f"{type(error).__name__}: {error.advice.reason}"
    _log.warning("the program ends suspended: %s", why)
    say = f"memguard: this process ends while it is off its GPUs, without its exit functions: {why}"
    _leave(say, _status())


def _status() -> int:
    """The exit status, as far as anybody knows it: that of an uncaught error, or of `sys.exit`."""
    if getattr(sys, "last_value", None) is not None:
        return 1
    asked = _asked[0] if _asked else None
    return 0 if asked is None else asked & 0xFF if isinstance(asked, int) else 1


def _leave(say: str, status: int) -> None:
    steps: list[Callable[[], object]] = [lambda: print(say, file=sys.stderr), logging.shutdown, _flush]
    for step in steps:
        try:
            step()
        except BaseException:  # a closed stream: it ends all the same
            continue
    os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()

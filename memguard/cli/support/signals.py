"""Signals that end a command which has started processes: the processes end with it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


@contextmanager
def unwinding() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise, as Ctrl-C does, so that started processes are ended on the way out.

    After the first signal the others are ignored: a second Ctrl-C would interrupt the clean-up. Signals that were
    ignored before stay so, as SIGHUP under nohup.
    """
    before: dict[int, signal.Handlers | object] = {}

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    try:
        for name in _NAMES:
            number = getattr(signal, name, None)
            # None: not set by Python, which could not restore it.
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.getsignal(number)
                signal.signal(number, leave)
    except ValueError:  # only the main thread can set handlers
        before.clear()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

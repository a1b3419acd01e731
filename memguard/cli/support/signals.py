"""What ends a command that has started processes: they end with it, whoever asks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


@contextmanager
def unwinding() -> Iterator[None]:
    """SIGTERM and SIGHUP leave by an exception, as Ctrl-C does, so that what was started is ended on the way out.

    The first of them makes the rest ignored: a second Ctrl-C would break off just that. SIGINT and SIGHUP stay ignored
    where they are, as under nohup.
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
            # None: set by no Python, which could not set it again.
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.getsignal(number)
                signal.signal(number, leave)
    except ValueError:  # not the main thread: there is nothing to handle here
        before.clear()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

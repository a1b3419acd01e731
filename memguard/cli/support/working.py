"""Shows on a terminal that a command still works, once that takes longer than a second: for long recordings."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
_AFTER = 1.0
"""Seconds without a word."""
_AGAIN = 0.25
_NAME = "memguard-working"


class Work:
    """What it is, and how many records it has done. How many there are is not known before the end of a file."""

    def __init__(self, what: str) -> None:
        self.what, self.done = what, 0

    def counted(self, records: Iterable[T]) -> Iterator[T]:
        """The same records, counted as they are taken."""
        for record in records:
            yield record
            self.done += 1

    def line(self, seconds: float) -> str:
        count = f": {self.done:,} records" if self.done else ""
        return f"{self.what}{count}, {seconds:,.0f} s"


@contextlib.contextmanager
def on(what: str) -> Iterator[Work]:
    """A line on standard error that is gone at the end; none where that is no terminal.

    It is drawn by a thread: what takes its time is somebody else's loop, and may be a single call.
    """
    work, over = Work(what), threading.Event()
    if sys.stderr is None or not sys.stderr.isatty():
        yield work
        return
    drawing = threading.Thread(target=_draw, args=(work, over), name=_NAME, daemon=True)
    drawing.start()
    try:
        yield work
    finally:
        over.set()
        drawing.join()  # what is printed next begins on a clean line


def _draw(work: Work, over: threading.Event) -> None:
    begin = time.monotonic()
    if over.wait(_AFTER):
        return
    from rich.live import Live
    from rich.text import Text

    from memguard._text import shown
    from memguard.cli.support import printing

    with Live(
        console=printing.console(err=True),
        get_renderable=lambda: Text(shown(work.line(time.monotonic() - begin))),
        transient=True,
        refresh_per_second=1 / _AGAIN,
        redirect_stdout=False,  # the command's own, which another thread writes to
        redirect_stderr=False,
    ):
        over.wait()

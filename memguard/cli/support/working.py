"""Shows on a terminal that a command still works, once that takes longer than a second."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from memguard._base.text import visible
from memguard.cli.support import printing

T = TypeVar("T")
_AFTER = 1.0
"""Seconds without a word."""
_AGAIN = 0.25
_ERASE = "\r\x1b[K"
_NAME = "memguard-working"
_WIDTH = 20
"""Characters of the bar."""


class Work:
    """What it is, and how many records it has done: of `files` files, one after the other, with a bar if they tell how
    much of them was read (`part`). How many records there are is not known before the end of a file.
    """

    def __init__(self, what: str, files: int = 1) -> None:
        self.what, self.done = what, 0
        self._files, self._over = files, 0
        self._records: object = None
        self._stream: Any = None
        self.turn = threading.Lock()
        """For whoever writes: the line is drawn by a thread."""

    def drawn_on(self, stream: Any) -> None:
        """The stream on which the line is drawn."""
        self._stream = stream

    def say(self, line: str) -> None:
        """Write a line that stays, in the place of the one that is drawn, which comes again below it."""
        with self.turn:
            stream = sys.stderr if self._stream is None else self._stream
            if stream is not None:
                stream.write(f"{'' if self._stream is None else _ERASE}{visible(line, keep='')}\n")
                stream.flush()

    def counted(self, records: Iterable[T]) -> Iterator[T]:
        """The same records, counted as they are taken: those of the next file."""
        self._records = records
        for record in records:
            yield record
            self.done += 1
        self._records = None
        self._over += 1

    @property
    def part(self) -> float | None:
        """How much of all files was read, from 0 to 1; None if they do not tell."""
        of_this = getattr(self._records, "part", None)
        return None if of_this is None else min((self._over + of_this) / self._files, 1.0)

    def line(self, seconds: float) -> str:
        part = self.part
        full = 0 if part is None else int(part * _WIDTH)
        bar = "" if part is None else f" [{'#' * full}{'-' * (_WIDTH - full)}] {part:4.0%}"
        count = f": {self.done:,} record{'' if self.done == 1 else 's'}" if self.done else ""
        return f"{self.what}{bar}{count}, {seconds:,.0f} s"


@contextlib.contextmanager
def on(what: str, files: int = 1) -> Iterator[Work]:
    """A line on standard error that is gone at the end; none where that is no terminal. `files`: see `Work`.

    It is drawn by a thread: what takes its time is somebody else's loop, and may be a single call.
    """
    work, over = Work(what, files), threading.Event()
    if sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield work
        return
    stream: Any = sys.stderr
    styled = stream.styled() if isinstance(stream, printing.Stream) else stream
    work.drawn_on(styled)
    drawing = threading.Thread(target=_draw, args=(work, over, styled), name=_NAME, daemon=True)
    drawing.start()
    try:
        yield work
    finally:
        over.set()
        drawing.join()  # what is printed next begins on a clean line


def _draw(work: Work, over: threading.Event, stream: Any) -> None:
    """By hand: beside a busy thread, whoever imports rich waits for its turn at each file, which takes seconds."""
    begin, after = time.monotonic(), _AFTER
    while not over.wait(after):
        after = _AGAIN
        line = visible(work.line(time.monotonic() - begin), keep="")
        with work.turn:
            stream.write(f"{_ERASE}{line[: _columns() - 1]}")
            stream.flush()
    if after == _AGAIN:
        stream.write(_ERASE)
        stream.flush()


def _columns() -> int:
    """Those of standard error: standard output may be a file. 80 if the terminal does not know."""
    found = 0
    with contextlib.suppress(OSError):
        found = os.get_terminal_size(2).columns
    return found or shutil.get_terminal_size().columns

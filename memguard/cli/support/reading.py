"""Shows that a long file is being read: on a terminal, after a second."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from memguard._text import shown

_PATIENCE = 1.0
"""Seconds."""


@contextlib.contextmanager
def progress(doing: str) -> Iterator[Callable[[int], None]]:
    """To be called with the number of records so far. Nothing is shown where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield lambda records: None
        return
    begun = time.monotonic()
    status: Any = None

    def show(records: int) -> None:
        nonlocal status
        if status is None and time.monotonic() - begun >= _PATIENCE:
            from memguard.cli.support import printing

            status = printing.console(err=True).status("")
            status.start()
        if status is not None:
            status.update(shown(f"{doing}: {records:,} records"))

    try:
        yield show
    finally:
        if status is not None:
            status.stop()


def counted(parts: Iterable[str], show: Callable[[int], None]) -> Iterator[str]:
    """The parts as they are; every thousandth is shown."""
    for number, part in enumerate(parts, 1):
        if number % 1000 == 0:
            show(number)
        yield part

"""A command that takes longer says so on a terminal, and nowhere else."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from memguard.cli.support import printing, working


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working, "_AFTER", 0.02)
    monkeypatch.setattr(working, "_AGAIN", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


def shown(stream: io.StringIO, seconds: float, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command that reads 3 records in so many seconds writes there, through the stream of every command."""

    def command() -> None:
        def records() -> Iterator[int]:
            for number in range(3):
                yield number
                time.sleep(seconds / 3)

        with working.on("reads \x1b[31mrun.jsonl") as work:
            assert list(work.counted(records())) == [0, 1, 2]

    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        assert printing.safely(command) == 0
    return stream.getvalue()


def test_a_line_on_a_terminal_that_is_gone_at_the_end(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    said = shown(Terminal(), 0.6, monkeypatch)
    assert ": 1 records, 0 s" in said or ": 2 records, 0 s" in said
    assert "\x1b[31m" not in said, "a name cannot colour the terminal"
    last = said.rpartition("records")[2]
    assert "\x1b[2K" in last and "\x1b[?25h" in last, "erased, and the cursor is back"


def test_nothing_where_it_is_quick_or_no_terminal(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(io.StringIO(), 0.1, monkeypatch) == ""
    monkeypatch.setattr(working, "_AFTER", 5.0)
    begin = time.monotonic()
    assert shown(Terminal(), 0.0, monkeypatch) == ""
    assert time.monotonic() - begin < 2, "its thread does not wait"


def test_the_line_ends_with_what_fails(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with contextlib.suppress(KeyboardInterrupt), working.on("reads"):
        time.sleep(0.1)
        raise KeyboardInterrupt
    assert working._NAME not in [thread.name for thread in threading.enumerate()]


def test_without_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with working.on("reads") as work:
        assert list(work.counted([os.sep])) == [os.sep]

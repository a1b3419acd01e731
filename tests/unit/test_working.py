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
    monkeypatch.setenv("COLUMNS", "50")


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
    lines = said.split("\r\x1b[K")
    assert "reads \\u001b[31mrun.jsonl: 1 record, 0 s" in lines, "a name cannot colour the terminal"
    assert lines[0] == lines[-1] == "", "it is erased before the command goes on"
    assert max(map(len, lines)) < 50
    monkeypatch.setenv("COLUMNS", "10")
    assert shown(Terminal(), 0.1, monkeypatch).split("\r\x1b[K")[1] == "reads \\u0"


def test_nothing_where_it_is_quick_or_no_terminal(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(io.StringIO(), 0.1, monkeypatch) == ""
    monkeypatch.setenv("TERM", "dumb")
    assert shown(Terminal(), 0.1, monkeypatch) == ""
    monkeypatch.setenv("TERM", "xterm")
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

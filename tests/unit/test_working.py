"""A command that takes longer says so on a terminal, and nowhere else."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from timelines import START, Clock, plan_of, sample_of
from waiting import until

import memguard
from memguard import api
from memguard._timeline.writer import Writer
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


def shown(stream: io.StringIO, pause: Callable[[int], object], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command that reads 3 records writes there, through every command's stream. `pause(n)` after the n-th."""

    def command() -> None:
        def records() -> Iterator[int]:
            for number in range(3):
                yield number
                pause(number + 1)

        with working.on("reads \x1b[31mrun.jsonl") as work:
            assert list(work.counted(records())) == [0, 1, 2]

    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        assert printing.safely(command) == 0
    return stream.getvalue()


def test_a_line_on_a_terminal_that_is_gone_at_the_end(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    said = shown(stream, lambda done: until(lambda: f": {done} record" in stream.getvalue()), monkeypatch)
    lines = said.split("\r\x1b[K")
    line = re.compile(r"reads \\u001b\[31mrun.jsonl: 1 record, \d s")
    assert any(map(line.fullmatch, lines)), "a name cannot colour the terminal"
    assert lines[0] == lines[-1] == "", "it is erased before the command goes on"
    assert max(map(len, lines)) < 50
    monkeypatch.setenv("COLUMNS", "10")
    stream = Terminal()
    assert shown(stream, lambda _: until(stream.getvalue), monkeypatch).split("\r\x1b[K")[1] == "reads \\u0"


def test_nothing_where_it_is_quick_or_no_terminal(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(io.StringIO(), lambda _: time.sleep(0.03), monkeypatch) == ""
    monkeypatch.setenv("TERM", "dumb")
    assert shown(Terminal(), lambda _: time.sleep(0.03), monkeypatch) == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(working, "_AFTER", 60.0)
    begin = time.monotonic()
    assert shown(Terminal(), lambda _: None, monkeypatch) == ""
    assert time.monotonic() - begin < 30, "its thread does not wait"


def test_the_line_ends_with_what_fails(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with contextlib.suppress(KeyboardInterrupt), working.on("reads"):
        time.sleep(0.1)
        raise KeyboardInterrupt
    assert working._NAME not in [thread.name for thread in threading.enumerate()]


def test_a_line_that_stays_is_put_before_the_one_that_is_drawn(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with working.on("examines") as work:
        until(stream.getvalue)
        work.say("  torch: \x1b[31m4.2 s")
        until(lambda: "examines" in stream.getvalue().partition("4.2 s")[2])
    screen = ""
    for part in stream.getvalue().split("\r\x1b[K"):  # each erases what its line has
        screen = f"{screen.rpartition(chr(10))[0]}{chr(10) if chr(10) in screen else ''}{part}"
    assert screen == "  torch: \\u001b[31m4.2 s\n"
    drawn = stream.getvalue().split("  torch")
    assert re.search(r"examines, \d s", drawn[0]) and re.search(r"examines, \d s", drawn[1])


def command_on_a_terminal(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, slowly: tuple[object, str]
) -> tuple[int, str]:
    """A command in which one function takes longer, with standard error on a terminal."""
    from memguard.cli import main

    where, name = slowly
    original = getattr(where, name)

    def slow(*given: object, **named: object) -> object:
        until(stream.getvalue)
        return original(*given, **named)

    stream = Terminal()
    with monkeypatch.context() as patched:
        patched.setattr(where, name, slow)
        patched.setattr(sys, "stderr", stream)
        code = printing.safely(lambda: main.main(arguments, standalone_mode=False))
    return code, stream.getvalue()


def test_suggest_and_report_say_what_they_read_and_write(
    quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from memguard._tools.report import page
    from memguard._tools.suggest import recorded

    with memguard.guard(
        {
            "version": 1,
            "frameworks": {"torch": {"limit": "4GiB"}},
            "monitor": {"interval": "50ms", "timeline": str(tmp_path / "run.jsonl")},
        },
        simulate="h200",
    ) as guard:
        torch = guard.frameworks["torch"]
        torch.allocate(1 << 30)  # type: ignore[attr-defined]
        monitor = api.current_session().monitor
        assert monitor is not None
        until(lambda: len(monitor.last(60)) > 1)
    (timeline,) = map(str, tmp_path.glob("run*.jsonl"))
    monkeypatch.setenv("COLUMNS", "200")
    code, said = command_on_a_terminal(["suggest", timeline], monkeypatch, (recorded, "read"))
    assert code == 0 and f"reads {timeline}" in said and said.endswith("\r\x1b[K")
    code, said = command_on_a_terminal(["suggest", timeline, timeline], monkeypatch, (recorded, "read"))
    assert code == 0 and "reads 2 timelines" in said
    html = str(tmp_path / "report.html")
    code, said = command_on_a_terminal(["report", timeline, "-o", html], monkeypatch, (page, "page"))
    assert code == 0 and f"writes {html}" in said and said.endswith("\r\x1b[K")
    counted: list[object] = []
    recorded.runs([timeline], lambda records: (counted.append(one) or one for one in records))  # type: ignore[func-returns-value]
    assert len(counted) > 1, "each record is counted"


def test_a_bar_says_how_much_of_the_files_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeline tells it, of several one after the other; what does not tell it has no bar."""
    plan = plan_of(torch="4GiB")
    for name in ("a.jsonl", "b.jsonl"):
        with Writer(tmp_path / name, plan, simulated=True, clock=Clock()) as writer:
            for at in range(200):
                writer.sample(sample_of(plan, START + at))
    paths = sorted(map(str, tmp_path.iterdir()))
    work = working.Work("reads 2 timelines", len(paths))
    assert work.part is None and work.line(2) == "reads 2 timelines, 2 s"
    parts: list[float] = []
    for path in paths:
        for _ in work.counted(memguard.load_timeline(path).records()):
            assert work.part is not None
            parts.append(work.part)
    assert len(parts) == work.done == 400 and parts == sorted(parts)
    assert parts[0] < 0.1 and 0.45 < parts[199] <= 0.5 < parts[201] and parts[-1] == pytest.approx(1, abs=0.05)
    half = working.Work("reads a.jsonl")
    records = half.counted(memguard.load_timeline(paths[0]).records())
    for _ in range(100):
        next(records)
    assert re.fullmatch(r"reads a.jsonl \[#{9,10}-{10,11}\]  (4|5)\d%: 99 records, 3 s", half.line(3)), half.line(3)
    listed = working.Work("reads").counted([1, 2])
    assert list(listed) == [1, 2]


def test_without_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with working.on("reads") as work:
        assert list(work.counted([os.sep])) == [os.sep]

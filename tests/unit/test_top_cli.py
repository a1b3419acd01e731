"""The command `memguard top`: once, as JSON, and what it says where there is no screen."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_cli import call, environment
from timelines import Clock
from top_screens import run

from memguard._devices.nvml import Nvml
from memguard.errors import DeviceError


@pytest.fixture
def timeline(tmp_path: Path) -> str:
    writer = run(tmp_path / "run.{pid}.jsonl", Clock())
    writer.close()
    return writer.path


def test_once_prints_the_view(
    timeline: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert call("top", "--once", timeline) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("memguard top  run.") and max(map(len, lines)) <= 100
    assert any(line.startswith("  torch") and "│" in line for line in lines)
    assert any("nobody writes it any more" in line for line in lines)
    assert "torch reaches its cap" in lines[-1]


def test_json_is_one_object(timeline: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("top", "--json", timeline, timeline) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memguard_top"] == 1 and found["machine"] is False
    (target,) = found["targets"]  # named twice, shown once
    assert target["state"] == "ended" and len(target["shares"][0]["frameworks"]) == 6


def test_ascii_alone_is_printed_where_the_encoding_has_no_more(timeline: str) -> None:
    environ = {**environment(), "PYTHONIOENCODING": "ascii", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run(
        [sys.executable, "-m", "memguard", "top", "--once", timeline], env=environ, capture_output=True, timeout=60
    )
    text = done.stdout.decode("ascii")
    assert done.returncode == 0 and "#" in text and "=" in text and "|" in text and "\\u" not in text


def test_an_empty_file_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").touch()
    assert call("top", "--once", str(tmp_path / "empty.jsonl")) == 2
    said = capsys.readouterr().err
    assert "has no complete line yet" in said and "not there" not in said


@pytest.mark.parametrize("command", ["suspend", "resume"])
@pytest.mark.parametrize("pid", ["abc", "0", "4294967296"])
def test_what_is_no_pid_is_said_to_be_none(command: str, pid: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(command, pid) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"'{pid}' is not the number of a process" in said and "memguard ps" in said


def test_a_file_that_is_not_there_is_an_error_of_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "no.jsonl").write_text("no timeline\n")
    for name in ("missing.jsonl", "no.jsonl"):
        assert call("top", "--once", str(tmp_path / name)) == 2
        assert name in capsys.readouterr().err


@pytest.mark.parametrize("interval", ["0", "1ms", "2h", "often"])
def test_a_wrong_interval_is_a_usage_error(interval: str, timeline: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("top", "--once", "--interval", interval, timeline) == 2
    assert "--interval" in capsys.readouterr().err


def test_without_a_gpu_the_message_has_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(self: Nvml) -> object:
        raise DeviceError("no usable NVIDIA driver here", fix="install the NVIDIA driver", missing=True)

    monkeypatch.setattr(Nvml, "devices", missing)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for options in (["--once"], ["--json"], []):
        assert call("top", *options) == 3
        error = capsys.readouterr().err
        assert "fix: install the NVIDIA driver" in error and "memguard top TIMELINE" in error


def test_a_screen_needs_a_terminal(timeline: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "memguard", "top", timeline], env={**environment(), "TERM": "xterm"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and "memguard top --once" in done.stderr and done.stdout == ""


WITHOUT = """
import os, pty, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "textual":
            raise ModuleNotFoundError("No module named 'textual'", name="textual")
sys.meta_path.insert(0, Missing())
from memguard.cli import main, top
if sys.argv[1] == "screen":
    top._terminal = lambda: True
    sys.argv.pop(1)
main(sys.argv[1:], prog_name="memguard")
"""


def test_without_textual_the_screen_says_what_to_install_and_the_rest_works(timeline: str) -> None:
    def memguard(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", WITHOUT, *words], env={**environment(), "TERM": "xterm"},
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    shown = memguard("screen", "top", timeline)
    assert shown.returncode == 2 and "pip install 'textual>=" in shown.stderr and "--once" in shown.stderr
    assert "Traceback" not in shown.stderr
    assert memguard("top", "--once", timeline).returncode == 0
    assert json.loads(memguard("top", "--json", timeline).stdout)["memguard_top"] == 1


HUNG_UP = """
import fcntl, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from memguard.cli import main
main(["top", sys.argv[1]], prog_name="memguard")
"""


def test_the_screen_ends_with_its_terminal_where_hangups_are_ignored(timeline: str) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", HUNG_UP, timeline], env={**environment(), "TERM": "xterm"},
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    ) as screen:  # fmt: skip
        os.close(theirs)
        try:
            said = b""
            while b"torch" not in said:
                said += os.read(ours, 65536)
            os.close(ours)
            assert screen.wait(60) == -signal.SIGHUP
        finally:
            screen.kill()


def test_the_version_of_the_message_is_that_of_the_extra() -> None:
    from memguard.cli.top import missing

    project = Path(__file__).parents[2] / "pyproject.toml"
    (line,) = [line for line in project.read_text(encoding="utf-8").splitlines() if line.startswith("top = ")]
    assert line.partition('"')[2].partition('"')[0] in str(missing())


def test_the_screen_in_the_documents_is_that_of_the_timeline_in_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memguard._tools.top.sources import Timelines
    from memguard._tools.top.view import plain, view

    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        docs = Path(__file__).parents[2] / "docs"
        recorded = re.findall(r"^\{.*\}$", (docs / "timeline.md").read_text(encoding="utf-8"), re.MULTILINE)
        path = tmp_path / "run-4711-0.jsonl"
        path.write_text("\n".join(recorded) + "\n")
        source = Timelines([str(path)], lambda: json.loads(recorded[-1])["t"])
        lines = plain(view(source.read(), 80))
        source.close()
    finally:
        monkeypatch.undo()
        time.tzset()
    (shown,) = re.findall(r"```\n(memguard top.*?)\n```", (docs / "top.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown == "\n".join(lines)

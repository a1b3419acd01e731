"""`memguard check`: one file, several, standard input; as text and as JSON."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_cli import call, environment

RIGHT = "version: 1\nframeworks:\n  torch: {share: 50%}\n"
WRONG = "version: 1\nframeworks:\n  torch: {shar: 50%}\n  tensorflw: {share: 20%}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(RIGHT)
    Path("wrong.yaml").write_text(WRONG)
    Path("z.yaml").write_text(RIGHT.replace("torch", "jax"))
    return tmp_path


def piped(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    said = capsys.readouterr()
    assert said.err == ""
    found = json.loads(said.out)
    assert isinstance(found, dict) and found["memguard_check"] == 1
    return found


def test_all_files_are_checked_and_every_problem_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("check", "absent.yaml", "a.yaml", "wrong.yaml", "z.yaml") == 2
    said = capsys.readouterr()
    assert [line for line in said.out.splitlines() if not line.startswith(" ")] == ["a.yaml: ok", "z.yaml: ok"]
    assert [line.partition(": ")[0] for line in said.err.splitlines() if not line.startswith(" ")] == [
        "absent.yaml", "wrong.yaml:3:11", "wrong.yaml:4:3",
    ]  # fmt: skip
    assert call("check", "a.yaml", "z.yaml") == 0


def test_one_file_is_told_as_among_several(capsys: pytest.CaptureFixture[str]) -> None:
    alone = []
    for name in ("a.yaml", "z.yaml"):
        assert call("check", name) == 0
        alone.append(capsys.readouterr().out)
    assert call("check", "a.yaml", "z.yaml") == 0
    assert capsys.readouterr().out == "".join(alone)


def test_json_has_the_same_shape_for_one_and_several(capsys: pytest.CaptureFixture[str]) -> None:
    right = {"file": "a.yaml", "ok": True, "problems": [], "warnings": []}
    assert call("check", "a.yaml", "--json") == 0
    assert printed(capsys) == {"memguard_check": 1, "ok": True, "files": [right]}
    assert call("check", "a.yaml", "wrong.yaml", "absent.yaml", "--json") == 2
    found = printed(capsys)
    first, wrong, absent = found["files"]
    assert (found["ok"], first) == (False, right)
    assert (wrong["file"], wrong["ok"], len(wrong["problems"])) == ("wrong.yaml", False, 2)
    typo = wrong["problems"][0]
    assert (typo["line"], typo["column"]) == (3, 11) and "share" in typo["fix"] and "torch" in typo["path"]
    (problem,) = absent["problems"]
    assert (problem["line"], problem["column"], problem["path"]) == (None, None, None) and problem["fix"]


def test_a_warning_is_in_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.yaml").write_text(RIGHT + "monitor: {timeline: absent/run.jsonl}\n")
    assert call("check", "a.yaml", "--json") == 0
    (file,) = printed(capsys)["files"]
    (warning,) = file["warnings"]
    assert file["ok"] and "absent does not exist" in warning


def test_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    piped(monkeypatch, RIGHT + "monitor: {timeline: run.jsonl}\n")
    assert call("check", "-") == 0
    said = capsys.readouterr().out
    assert said.startswith("<stdin>: ok\n") and "warning" not in said, "its timeline begins in this folder"
    piped(monkeypatch, WRONG)
    assert call("check", "a.yaml", "-") == 2
    said = capsys.readouterr()
    assert said.err.startswith("<stdin>:3:11: ") and said.out.startswith("a.yaml: ok\n")
    piped(monkeypatch, WRONG)
    assert call("check", "-", "--json") == 2
    assert printed(capsys)["files"][0]["file"] == "<stdin>"
    piped(monkeypatch, RIGHT)
    assert call("check", "-", "-") == 2
    assert "give - once" in capsys.readouterr().err


def test_standard_input_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert call("check", "-", "a.yaml") == 2
    said = capsys.readouterr()
    assert said.err == "<stdin>: cannot be read: it is closed\n    fix: pipe a budget into it, or name its file\n"
    assert said.out.startswith("a.yaml: ok\n")
    piped(monkeypatch, "")
    sys.stdin.close()
    assert call("check", "-") == 2
    assert "<stdin>: cannot be read: " in capsys.readouterr().err


def test_a_real_pipe_and_one_that_is_only_written() -> None:
    command = [sys.executable, "-m", "memguard", "check", "-"]
    done = subprocess.run(command, input=b"\xff\xfe\x00", env=environment(), capture_output=True)
    assert done.returncode == 2 and done.stderr.startswith(b"<stdin>:") and b"Traceback" not in done.stderr
    place = os.open(os.devnull, os.O_WRONLY)
    done = subprocess.run(command, stdin=place, env=environment(), capture_output=True)
    os.close(place)
    assert done.returncode == 2 and done.stderr.startswith(b"<stdin>: cannot be read: ")


def test_without_a_file_it_takes_the_nearest_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert call("check") == 2
    assert "there is none in " in capsys.readouterr().err
    (tmp_path / "budget.yaml").write_text("version: 1\nframeworks:\n  torch: {share: 50%}\n")
    assert call("check") == 0
    assert f"{tmp_path / 'budget.yaml'}: ok" in capsys.readouterr().out

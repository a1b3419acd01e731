"""benchmarks/top.py: its screens are drawn and counted here too, each check can fail, and a missing textual is said."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long  # no version of what is installed changes what the benchmarks' own code does

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
top: Any = importlib.import_module("top")
table: Any = importlib.import_module("table")


def test_the_screens_are_drawn_and_counted(tmp_path: Path) -> None:
    """The whole of it, for a moment: what it takes of this machine is not judged here."""
    found = top.measure(tmp_path, 2.0, False)
    assert set(found) == {"follows", "attached", "control"}
    for one in found.values():
        assert one["returncode"] == 0, one
        assert one["drawn"] > 0 and len(one["shares"]) == 2 and all(0 <= part < 2 for part in one["shares"])
    assert found["attached"]["target"] == "simulated" and len(found["attached"]["watched"]) == 2
    assert not list((tmp_path / "run").glob("memguard/*.json"))


def test_what_a_process_has_started_is_counted_whether_it_has_ended_or_not() -> None:
    child = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\n"
    code = (
        f"import subprocess, sys, time\ncode = {child!r}\nsubprocess.run([sys.executable, '-c', code])\n"
        "other = subprocess.Popen([sys.executable, '-c', code + 'time.sleep(60)'])\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        try:
            end = time.monotonic() + 20
            while top.cpu(process.pid) < 0.38 and time.monotonic() < end:
                time.sleep(0.05)
            assert top.cpu(process.pid) >= 0.38
        finally:
            os.killpg(process.pid, 9)
    assert top.cpu(process.pid) == 0.0


def test_each_bar_is_the_worse_half_s(tmp_path: Path) -> None:
    one = {"returncode": 0, "shares": [0.012, 0.0201], "drawn": 2.0}
    good = {**one, "shares": [0.02, 0.012]}
    attached = {**good, "target": "real", "watched": [0.01, 0.01], "beside": [0.0, 0.0]}
    result = {"follows": one, "attached": attached, "control": {**good, "drawn": 1.4}}
    assert [passed for passed, _ in top.top_checks(result).values()] == [False, True, True, True, False]
    assert "1.2 and 2.0 % of a core; an almost empty screen 2.0 and 1.2 %" in str(top.top_checks(result))
    about = {"command": "python benchmarks/top.py", "date": "2026-01-01T", "memguard_hash": "x", "gpu": None}
    whole = {"about": {**about, "versions": {}}, **result, "checks": top.top_checks(result)}
    (tmp_path / "h200-top.json").write_text(json.dumps(whole))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(table, "RESULTS", tmp_path)
        text = "\n".join(table.live_screen())
    assert "| following a timeline of six frameworks | 2.0% |" in text and "with real GPUs | 2.0% |" in text


def test_a_python_without_textual_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top.importlib.util, "find_spec", lambda name: None)
    found = top.top_checks(top.measured(1.0, False))
    assert [passed for passed, _ in found.values()] == [False] * 5
    assert all("textual is not installed in this Python: pip install" in figure for _, figure in found.values())


def test_what_breaks_off_fails_every_check() -> None:
    found = top.top_checks(top.measured(1.0, False, lambda *_: 1 / 0))
    assert len(found) == 5 and all("ZeroDivisionError" in figure for _, figure in found.values())

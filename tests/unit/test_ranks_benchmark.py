"""benchmarks/ranks.py: the ranks wait while NVML is read, none is waited for without end, and each bar can fail."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_results

pytestmark = pytest.mark.long  # no version of what is installed changes what the benchmarks' own code does

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
ranks: Any = importlib.import_module("ranks")
table: Any = importlib.import_module("table")

LAUNCHER = """
import json, sys, time
from pathlib import Path
folder, count = Path(sys.argv[1]), int(sys.argv[2])
for rank in range(count):
    (folder / f"{rank}.part").write_text(json.dumps({"rank": rank}))
    (folder / f"{rank}.part").rename(folder / f"{rank}.json")
while not (folder / "read").exists():
    time.sleep(0.01)
print("let go")
sys.exit(int(sys.argv[3]))
"""


def launched(folder: Path, count: int, code: int, **more: Any) -> Any:
    command = [sys.executable, "-c", LAUNCHER, str(folder), str(count), str(code)]
    return ranks.scenario(command, 2, folder, read=lambda: {"GPU-a": {}}, **more)


def test_nvml_is_read_while_all_ranks_wait(tmp_path: Path) -> None:
    found = launched(tmp_path, 2, 0)
    assert found == {"returncode": 0, "ranks": [{"rank": 0}, {"rank": 1}], "nvml": {"GPU-a": {}}}


def test_a_launcher_that_fails_says_why(tmp_path: Path) -> None:
    found = launched(tmp_path, 2, 3)
    assert found["returncode"] == 3 and "let go" in found["stderr_tail"]


def test_a_rank_that_never_comes_is_not_waited_for_without_end(tmp_path: Path) -> None:
    found = launched(tmp_path, 1, 0, patience=1.0)
    assert found["returncode"] == -15 and found["nvml"] is None


def test_one_that_does_not_end_when_it_is_told_to_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PARTING", 0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    found = ranks.scenario([sys.executable, "-c", deaf], 2, tmp_path, read=dict, patience=1.0)
    assert found["returncode"] == -9


@pytest.mark.parametrize(
    ("name", "rank", "path", "value", "bars"),
    [
        ("two", 1, ("limit",), 8 << 30, ["its own GPU", "below its limit"]),
        ("two", 1, ("uuid",), "GPU-a", None),
        ("two", 0, ("held",), 1 << 30, ["own error"]),
        ("two", 0, ("refused",), None, ["own error"]),
        ("two", 0, ("overhead",), 2 << 30 | 1 << 28, ["in the reserve"]),
        ("two", 0, ("overhead",), 600 << 20, ["in the reserve"]),
        ("four", 0, ("limit",), 16 << 30, ["half of the budget"]),
        ("four", 0, ("nvml", "GPU-a", "102"), 9 << 30, ["by NVML", "agrees"]),
        ("four", 3, ("table", "2", "devices", 0, "process"), 1 << 30, ["agrees"]),
        ("four", 3, ("table", "2", "devices", 0, "process"), None, ["agrees", "control"]),
        ("four", 3, ("control", "refused"), "OutOfMemoryError", ["control"]),
    ],
)
def test_each_bar_can_fail(name: str, rank: int, path: tuple[Any, ...], value: Any, bars: list[str] | None) -> None:
    made = rank_results.whole()
    place: Any = made[name] if path[0] == "nvml" else made[name]["ranks"][rank]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    failed = [bar for bar, (passed, _) in ranks.ranks_checks(made).items() if not passed]
    if bars is None:  # two ranks on one GPU: nothing that NVML says can be looked up
        assert "its own GPU" in failed[0] and len(failed) > 1
        return
    assert len(failed) == len(bars) and all(bar in one for bar, one in zip(bars, failed, strict=True)), failed


def test_the_table_has_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = rank_results.whole()
    about = {"command": "python benchmarks/ranks.py", "date": "2026-01-01T", "memguard_hash": "x", "gpu": "G"}
    whole = {"about": {**about, "versions": {}}, **result, "checks": ranks.ranks_checks(result)}
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    assert table.ranks() == [], "nobody has measured it"
    (tmp_path / "h200-x2-ranks.json").write_text(json.dumps(whole))
    lines = table.ranks()
    assert "| two ranks over NCCL, each on a GPU of its own | 14,184 of 14,184 MiB | 16,084 of 16,384 MiB |" in lines
    assert "| four ranks over gloo, two on each GPU | 6,892 of 6,892 MiB | 15,784 of 16,384 MiB |" in lines

"""`benchmarks/suggest.py` without a GPU: a rehearsal over stand-ins, its bars, its table."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import suggest_results

import memguard
from memguard import _config

pytestmark = pytest.mark.long  # no version of what is installed changes what the benchmarks' own code does

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
_checks, _listed, _table, benchmark = (
    importlib.import_module(name) for name in ("_suggest_checks", "_listed", "_suggest_table", "suggest")
)
MIB = 1 << 20


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The chain of one program and the recording, on simulated GPUs."""
    folder = tmp_path_factory.mktemp("rehearsal")
    environment = {**os.environ, "MEMGUARD_SUGGEST_REHEARSAL": "1"}
    words = ["--only", "jax_cupy;recording", "-o", str(folder / "out.json"), "--recording", str(folder / "run.jsonl")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "suggest.py"), *words],
        env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1, f"a part of the list: {done.stderr[-3000:]}"
    return json.loads((folder / "out.json").read_text()), folder / "run.jsonl"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_it_at_once_with_its_result_written(tmp_path: Path, number: signal.Signals) -> None:
    """As `timeout -s INT` and `timeout` do, also where SIGINT was ignored. No program that it started is left."""
    words = [str(ROOT / "benchmarks" / "suggest.py"), "--only", "jax_cupy", "-o", str(tmp_path / "out.json")]
    environment = {**os.environ, "MEMGUARD_SUGGEST_REHEARSAL": "1"}
    child = subprocess.Popen([sys.executable, *words], env=environment, stdout=subprocess.DEVNULL)
    task = Path(f"/proc/{child.pid}/task")
    begun, until = [], time.monotonic() + 30
    while not begun and time.monotonic() < until:
        begun = [one for path in task.glob("*/children") for one in path.read_text().split()]
        time.sleep(0.05)
    for _ in range(2):
        child.send_signal(number)
        time.sleep(0.02)
    asked = time.monotonic()
    child.communicate(timeout=30)
    assert begun and child.returncode == 1 and time.monotonic() - asked < 10
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["stopped"] is True and result["scenarios"]["jax_cupy"]["returncode"] == 1
    assert not any(Path(f"/proc/{one}").exists() for one in begun)


def test_what_ended_is_written_and_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program is written as it ends; `--merge` runs what is not there, or has failed."""
    output, before = tmp_path / "out.json", tmp_path / "before.json"
    ran: list[str] = []

    def chain(name: str) -> dict[str, Any]:
        ran.append(name)
        return {**suggest_results.chain(*benchmark.FRAMEWORKS[name]), "returncode": int(name == failing)}

    def begin(*words: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["suggest.py", "-o", str(output), *words])
        with pytest.raises(SystemExit):
            benchmark.main()
        return json.loads(output.read_text())

    def recorded(keep: Path | None) -> dict[str, Any]:
        until = time.monotonic() + 10
        while not seen and time.monotonic() < until:
            found = json.loads(output.read_text())["scenarios"] if output.exists() else {}
            seen.extend([found] if len(found) == 3 else [])
            time.sleep(0.01)
        return {"returncode": 1, "stderr_tail": "no GPU"}

    seen: list[dict[str, Any]] = []  # what was written while the last one ran
    failing = "jax_cupy"
    monkeypatch.setattr(benchmark, "chain", chain)
    monkeypatch.setattr(benchmark, "recording", recorded)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    dates = iter("12")
    made = benchmark.header
    monkeypatch.setattr(benchmark, "header", lambda *words: {**made(*words), "date": next(dates)})
    monkeypatch.setattr(benchmark, "ThreadPoolExecutor", lambda threads: ThreadPoolExecutor(1))
    first = begin()
    assert [list(one) for one in seen] == [list(benchmark.FRAMEWORKS)]
    assert ran == list(benchmark.FRAMEWORKS) and not first["earlier_runs"]
    output.rename(before)
    ran.clear()
    failing = ""
    second = begin("--merge", str(before))
    assert ran == ["jax_cupy"] and list(second["scenarios"]) == [*benchmark.FRAMEWORKS, "recording"]
    assert [sorted(run["failed"]) for run in second["earlier_runs"]] == [
        sorted([*_listed.SUGGEST["jax_cupy"], *_listed.SUGGEST["recording"]])
    ]


def test_a_program_is_run_and_run_again_under_what_is_suggested(rehearsed: tuple[dict[str, Any], Path]) -> None:
    result, _ = rehearsed
    one, checks = result["scenarios"]["jax_cupy"], result["checks"]
    assert [name for name in _listed.SUGGEST["jax_cupy"] if not checks[name][0]] == [], checks
    assert [row["headroom"] for row in one["tried"]] == [-10, -5, 0, 5, 10]
    assert [len(row["runs"]) for row in one["tried"]] == [2] * 5 and len(one["default"]["runs"]) == 10
    failed = one["tried"][0]["runs"][0]
    assert not failed["passed"] and failed["returncode"] and "out of memory" in failed["said"]
    assert _config.Budget.from_text(one["default"]["yaml"]).frameworks.keys() == {"jax", "cupy"}
    assert checks["torch_training: the smallest headroom that passes is measured"] == [
        False, "not started: torch_training",
    ]  # fmt: skip


def test_the_recording_is_kept_and_names_no_folder(rehearsed: tuple[dict[str, Any], Path]) -> None:
    result, path = rehearsed
    found = result["scenarios"]["recording"]
    assert result["checks"]["recording: caught out-of-memory errors of PyTorch and CuPy, workloads, peaks"][0], found
    assert str(ROOT) not in path.read_text()
    timeline = memguard.load_timeline(path)
    assert len(list(timeline.samples())) == found["samples"] and len(list(timeline.ooms())) == 2


def test_the_smallest_that_passes_has_no_larger_one_that_fails() -> None:
    one = suggest_results.chain("torch")
    least = _checks.smallest(one)
    assert least["headroom"] == 5 and round(_checks.waste(one), 4) == round(4480 / 4160 - 1, 4)
    one["tried"][-1]["runs"][1]["passed"] = False
    assert _checks.smallest(one)["headroom"] == 15 and _checks.waste(one) == 0
    one["default"]["runs"][9]["passed"] = False
    assert _checks.smallest(one) is None and _checks.waste(one) is None
    found = _checks.suggest_checks({**suggest_results.whole(), "torch_training": one})
    assert [name for name, (passed, _) in found.items() if not passed] == list(_listed.SUGGEST["torch_training"][:3])


def test_a_waste_of_more_than_a_fifth_fails() -> None:
    one = suggest_results.chain("torch")
    for row in one["tried"]:
        row["runs"] = [{"passed": True}] * 2
    found = _checks.suggest_checks({**suggest_results.whole(), "torch_training": one})
    assert [name for name, (passed, _) in found.items() if not passed] == [_listed.SUGGEST["torch_training"][2]]


def test_below_zero_each_cap_is_smaller_and_the_rest_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "# torch: {limit: 9MiB}\nversion: 1\ndevice:\n  reserve: 100MiB\n  limit: 3100MiB\nframeworks:\n"
        "  torch: {limit: 2000MiB}\n  pycuda: {limit: 1000MiB, context: own}\n"
    )
    offer = {
        "yaml": text, "limit": 3100 * MIB, "reserve": {"bytes": 100 * MIB},
        "frameworks": [{"framework": "torch", "limit": 2000 * MIB}, {"framework": "pycuda", "limit": 1000 * MIB}],
    }  # fmt: skip
    monkeypatch.setattr(benchmark, "suggested", lambda *_: offer)
    less = benchmark.offered(tmp_path, -5)
    assert less["limit"] == 2950 * MIB and "torch: {limit: 9MiB}" in less["yaml"]
    budget = _config.Budget.from_text(less["yaml"])
    assert [budget.frameworks[name].limit for name in ("torch", "pycuda")] == [1900 * MIB, 950 * MIB]
    assert "context: own" in less["yaml"] and "limit: 2950MiB" in less["yaml"]
    assert benchmark.offered(tmp_path, 5) == {"yaml": text, "limit": 3100 * MIB}


def test_the_table_says_what_was_found() -> None:
    lines = "\n".join(_table.whole({**suggest_results.whole(), "jax_cupy": {"returncode": 1, "stderr_tail": "no GPU"}}))
    assert "| `torch_training` | 5 % (4,160 MiB), of -10, -5, 0, 5, 10 and 15 | 10 of 10 | 7.7 % | passes |" in lines
    assert "| `jax_cupy` | did not run: rc 1: no GPU |" in lines


def test_programs_parse_and_name_what_they_are_listed_with() -> None:
    import ast

    modules = {"tensorflow": "tensorflow", "pycuda": "pycuda.driver", "jax": "jax", "cupy": "cupy", "torch": "torch"}
    for name, frameworks in benchmark.FRAMEWORKS.items():
        tree = ast.parse((benchmark.PROGRAMS / f"{name}.py").read_text())
        imported = {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
        assert {modules[one] for one in frameworks} <= imported and sorted(frameworks) == sorted(
            _listed.SUGGEST_PROGRAMS[name]
        )
    assert _config.Budget.from_text(benchmark.RECORDED % '"run.jsonl"').frameworks.keys() == {"torch", "jax", "cupy"}

"""The hash that dates results measured on a GPU: of every module that a program under a budget may load."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import memguard

ROOT = Path(__file__).parents[2]
PACKAGE = Path(memguard.__file__).parent
APART = (
    "memguard._doctor",
    "memguard._leases",
    "memguard._metrics",
    "memguard._processes",
    "memguard._report",
    "memguard._suggest",
    "memguard._suspend",
    "memguard._testing",
    "memguard._top",
    "memguard.cli",
)

RUN = """
import glob, sys, time
import memguard
from memguard.errors import BudgetExceeded, UnderPressure

guard = memguard.init(
    {
        "version": 1,
        "frameworks": {"torch": {"limit": "4GiB"}, "cupy": {"limit": "1GiB"}},
        "monitor": {"interval": "50ms", "timeline": "run.jsonl"},
        "on_pressure": ["trim", "raise"],
        "doctor": {"ignore": ["mig"]},
    },
    simulate="h200",
)
memguard.on_event(lambda event: None)
with memguard.workload("train", framework="torch", needs="1GiB"):
    str(memguard.ledger()), memguard.ledger().as_dict()
try:
    with memguard.workload("too much", framework="torch"):
        memguard.require("torch", "400GiB")
except BudgetExceeded as error:
    print(error)
try:
    with memguard.workload("train", framework="torch"):
        raise MemoryError("out of memory")
except MemoryError:
    str(memguard.last_oom())
time.sleep(0.3)
memguard.checkpoint()
memguard.resize("torch", "2GiB")
memguard.trim()
memguard.shutdown()
(timeline,) = glob.glob("run*.jsonl")
list(memguard.load_timeline(timeline).records())
print("LOADED", *[name for name in sys.modules if name.startswith("memguard")])
"""


def test_a_run_under_a_budget_loads_no_command_and_nothing_of_the_doctor(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MEMGUARD_")}
    if PACKAGE.parent.name != "site-packages":
        environ["PYTHONPATH"] = str(PACKAGE.parent)
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.rpartition("LOADED ")[2].split()
    assert {
        "memguard._config",
        "memguard._guard",
        "memguard._monitor.sampler",
        "memguard._oom.report",
        "memguard._findings",
    } <= set(loaded)
    assert [name for name in loaded if name.startswith(APART)] == []


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmarks' own module, over a tree of one file in each place."""
    for name in (
        "_types.py",
        "_findings.py",
        "_config/__init__.py",
        "cli/run.py",
        "_doctor/facts.py",
        "_doctor/a/b.py",
        "_suspend/gate.py",
    ):
        (tmp_path / "memguard" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "memguard" / name).write_text("before\n")
    spec = importlib.util.spec_from_file_location("_measured_run", ROOT / "benchmarks" / "_run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert tuple(f"memguard.{name}" for name in module.APART) == APART
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ("_types.py", True),
        ("_findings.py", True),
        ("_config/__init__.py", True),
        ("cli/run.py", False),
        ("_doctor/facts.py", False),
        ("_doctor/a/b.py", False),
        ("_suspend/gate.py", False),
    ],
)
def test_results_are_stale_if_what_they_measured_has_changed(
    measured: ModuleType, tmp_path: Path, changed: str, stale: bool
) -> None:
    before = measured.source_hash()
    room = changed.partition("/")[0]
    own, other = measured.source_hash([room]), measured.source_hash(["_report"])
    (tmp_path / "memguard" / changed).write_text("after\n")
    assert (measured.source_hash() != before) is stale
    assert measured.source_hash([room]) != own  # a result of that room's own, as the doctor's
    assert (measured.source_hash(["_report"]) != other) is stale


def test_without_a_checkout_the_hash_is_that_of_the_installed_package(
    measured: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = measured.source_hash()
    (tmp_path / "site").mkdir()
    (tmp_path / "memguard").rename(tmp_path / "site" / "memguard")
    monkeypatch.setattr(memguard.__spec__, "origin", str(tmp_path / "site" / "memguard" / "__init__.py"))
    assert measured.source_hash() == before

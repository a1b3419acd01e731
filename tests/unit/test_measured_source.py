"""A program under a budget loads no command, and nothing of the rooms that it does not use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import memguard

ROOT = Path(__file__).parents[2]
PACKAGE = Path(memguard.__file__).parent
APART = (
    "memguard._tools.doctor",
    "memguard._node.leases",
    "memguard._node.metrics",
    "memguard._devices.proc",
    "memguard._tools.report",
    "memguard._tools.suggest",
    "memguard._node.suspend",
    "memguard._tools.testing",
    "memguard._tools.top",
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
        "memguard._budget",
        "memguard._guard.guard",
        "memguard._runtime.sampler",
        "memguard._oom.report",
        "memguard._base.findings",
    } <= set(loaded)
    assert [name for name in loaded if name.startswith(APART)] == []

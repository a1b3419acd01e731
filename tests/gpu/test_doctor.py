"""`memguard doctor` on this GPU: what works is said to work, and a framework that dies or hangs is a finding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def doctor(*arguments: str, **environment: str) -> tuple[int, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "memguard", "doctor", *arguments],
        capture_output=True, text=True, timeout=170, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", **environment},
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("framework", ["torch", "tensorflow", "jax", "cupy", "pycuda", "numba"])
def test_each_framework_is_seen_at_work(framework: str) -> None:
    _, facts = doctor("--dump-facts", "--framework", framework)
    found = facts["frameworks"][framework]
    assert found["probe"]["exit"] == 0
    last = found["probe"]["stages"][-1]  # Numba's is its second try where NumPy is too new for it
    assert last["name"].startswith("compute") and not last.get("error"), found["probe"]["stages"]
    assert found["gpus"] >= 1 and found["version"] and found["path"]
    assert any("libcuda.so" in path for path in found["probe"]["libraries"])


def test_the_driver_is_read_from_all_its_sides() -> None:
    _, facts = doctor("--dump-facts", "--framework", "cupy")
    driver = facts["driver"]
    assert driver["module"] == driver["nvml"]["driver"]
    assert driver["cuda"]["init"] == "CUDA_SUCCESS" and driver["cuda"]["version"] == driver["nvml"]["cuda"]
    assert {gpu["uuid"] for gpu in driver["cuda"]["devices"]} <= {gpu["uuid"] for gpu in driver["nvml"]["devices"]}
    assert facts["driver"]["files"]["/dev/nvidiactl"] == "ok"


def test_a_framework_that_hangs_is_a_finding_and_the_others_are_told_of(tmp_path: Path) -> None:
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("import time\ntime.sleep(600)\n")
    path = f"{ROOT}{os.pathsep}{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    rc, found = doctor("--json", "--framework", "cupy", "--framework", "torch", "--timeout", "20", PYTHONPATH=path)
    named = {(finding["name"], finding["subject"]) for finding in found["findings"]}
    assert rc == 1 and ("probe-hung", "cupy") in named
    assert not [name for name, subject in named if subject == "torch" and name.startswith(("probe", "framework"))]


def test_a_framework_that_dies_is_a_finding_and_the_others_are_told_of() -> None:
    """XLA ends the process over a flag that it does not know."""
    rc, found = doctor("--json", "--framework", "jax", "--framework", "torch", XLA_FLAGS="--no_such_flag=1")
    named = {(finding["name"], finding["subject"]) for finding in found["findings"]}
    assert rc == 1 and ("probe-crashed", "jax") in named
    assert not [name for name, subject in named if subject == "torch" and name.startswith(("probe", "framework"))]

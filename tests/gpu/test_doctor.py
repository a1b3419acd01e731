"""`memguard doctor` on this GPU: what works is said to work, and a framework that dies or hangs is a finding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
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
    assert [stage["name"] for stage in found["probe"]["stages"]][-1] == "compute"
    assert not [stage for stage in found["probe"]["stages"] if stage.get("error")], found["probe"]["stages"]
    assert found["gpus"] >= 1 and found["version"] and found["path"]
    assert any("libcuda.so" in path for path in found["probe"]["libraries"])


def test_the_driver_is_read_from_all_its_sides() -> None:
    _, facts = doctor("--dump-facts", "--framework", "cupy")
    driver = facts["driver"]
    assert driver["module"] == driver["nvml"]["driver"]
    assert driver["cuda"]["init"] == "CUDA_SUCCESS" and driver["cuda"]["version"] == driver["nvml"]["cuda"]
    assert {gpu["uuid"] for gpu in driver["cuda"]["devices"]} <= {gpu["uuid"] for gpu in driver["nvml"]["devices"]}
    assert facts["driver"]["files"]["/dev/nvidiactl"] == "ok"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "probe-crashed"),
        ("import time; time.sleep(600)", "probe-hung"),
    ],
)
def test_a_framework_that_dies_or_hangs_is_a_finding_and_the_others_are_told_of(
    tmp_path: Path, code: str, name: str
) -> None:
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text(textwrap.dedent(code))
    path = f"{ROOT}{os.pathsep}{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    rc, found = doctor("--json", "--framework", "cupy", "--framework", "torch", "--timeout", "20", PYTHONPATH=path)
    assert rc == 1
    named = {(finding["name"], finding["subject"]) for finding in found["findings"]}
    assert (name, "cupy") in named
    assert not [finding for finding in named if finding[1] == "torch" and finding[0].startswith(("probe", "framework"))]

"""`benchmarks/peers.py` whole, with the real PyCUDA and Numba over the stubs of the driver and of NVML."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stub_driver

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "peers.py"


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return stub_driver.one_gpu(tmp_path_factory.mktemp("gpu"))


def test_what_is_here_is_measured_and_what_is_not_is_said(env: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "peers.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--cap", str(1 << 30), "--generations", "1", "--rounds", "1", "--at-most", "600",
         "--seconds", "0.001", "--only", "cupy;pycuda;numba", "-o", str(output)],
        env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(output.read_text())
    checks = result["checks"]
    assert result["failed"] == {name: {} for name in ("cupy", "pycuda", "numba")}
    assert result["missing"]["cupy"].keys() == result["ways"]["cupy"].keys()
    assert checks["pycuda: every way measured"] == [True, "54 of 54"] and not result["missing"]["pycuda"]
    assert checks["pycuda: filled to its part of the cap"][0], checks
    assert not checks["a whole run on a GPU"][0] and not checks["torch: every way measured"][0]
    assert result["rounds_of"] == {name: [1] for name in ("cupy", "pycuda", "numba")} and not result["taken_over"]
    numba = set(result["missing"]["numba"])
    assert numba <= {"rmm", "rmm, again"}, "Numba itself is here, RMM may be"
    for cell in result["cells"]["numba"].values():
        assert {"plain", "plain, again", "memguard"} <= cell["ways"].keys()
        assert cell["ways"]["plain"]["asks"] == 1, "Numba asks the driver for each array"
    for library in ("pycuda", "numba"):
        for cell in result["cells"][library].values():
            for way, one in cell["ways"].items():
                assert one["allocate_us"] > 0 and 0 < one["both_us"] < 1e5, (library, way, one)

"""Under CUDA's Multi-Process Service the driver itself refuses what goes beyond the budget, raw allocations included.

A control daemon of the tests' own is started for them, with sockets in a folder of its own: nothing else meets it, and
the GPU's settings stay. Where none can be started, these tests are skipped, with the reason.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONTROL = "nvidia-cuda-mps-control"
MIB, GIB = 1 << 20, 1 << 30
PIECE = 2 * MIB
BUDGET = "version: 1\ndevice: {limit: 4GiB, reserve: 1GiB}\nframeworks: {torch: {share: 50%}}\n"
# Raw driver calls, of which memguard knows nothing, in the context that torch made.
PROGRAM = """
import ctypes, json, os, sys
import torch
kept = torch.zeros(1 << 20, device="cuda")
cuda = ctypes.CDLL("libcuda.so.1")
def free():
    left, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert cuda.cuMemGetInfo_v2(ctypes.byref(left), ctypes.byref(total)) == 0
    return left.value, total.value
left, total = free()
taken, error = 0, 0
while not error and taken < int(sys.argv[1]):
    pointer = ctypes.c_void_p()
    error = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(2 << 20))
    taken += (2 << 20) * (not error)
own = "fits"
try:
    # Within torch's cap, which is 1.5 GiB, and more than the segment that its first tensor is in has idle.
    torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    own = "refused"
print(json.dumps({"left": left, "total": total, "taken": taken, "error": error, "torch": own,
                  "value": os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")}))
"""
MOST = 8 * GIB
"""At which a program stops that nobody refuses."""


@pytest.fixture(scope="module")
def service() -> Iterator[dict[str, str]]:
    """The environment of a control daemon's clients."""
    if shutil.which(CONTROL) is None:
        pytest.skip(f"there is no {CONTROL} on the PATH")
    folder = tempfile.mkdtemp(prefix="mps")  # short: a socket's path has at most 107 bytes
    pipes, logs = os.path.join(folder, "pipe"), os.path.join(folder, "log")
    os.mkdir(pipes)
    os.mkdir(logs)
    environ = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_LOG_DIRECTORY": logs}
    try:
        begun = subprocess.run([CONTROL, "-d"], env=environ, capture_output=True, text=True, timeout=60)
        if begun.returncode or not os.path.exists(os.path.join(pipes, "control")):
            pytest.skip(f"{CONTROL} -d did not start: {begun.stdout}{begun.stderr}".strip())
        yield environ
    finally:
        subprocess.run([CONTROL], env=environ, input="quit -t 5\n", capture_output=True, text=True, timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def started(folder: Path, environ: dict[str, str], *options: str) -> tuple[dict[str, Any], str]:
    (folder / "budget.yaml").write_text(BUDGET)
    (folder / "program.py").write_text(PROGRAM)
    path = f"{ROOT}{os.pathsep}{environ.get('PYTHONPATH', '')}"
    # One GPU, by UUID: the service and the program then agree on which.
    environ = {**environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": one_gpu()}
    words = [sys.executable, "-m", "memguard", "run", *options, "-c", "budget.yaml", "--", sys.executable, "program.py"]
    done = subprocess.run(
        [*words, str(MOST)], cwd=folder, env=environ, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, done.stderr


def one_gpu() -> str:
    from gpus_here import GPUS

    return GPUS[0]


def test_the_driver_refuses_raw_allocations_beyond_the_budget(service: dict[str, str], tmp_path: Path) -> None:
    found, said = started(tmp_path, service, "--mps")
    assert found["value"] == f"{one_gpu()}=4096M" and f"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={one_gpu()}=4096M" in said
    assert found["error"] == 2, "CUDA_ERROR_OUT_OF_MEMORY"
    assert 0 < found["left"] < 4 * GIB, "context and torch's tensor count"
    assert -PIECE <= found["left"] - found["taken"] <= 64 * MIB, "refused where cuMemGetInfo says that nothing is left"
    assert found["taken"] >= 3 * GIB, "and no earlier: a context takes less than 1 GiB"
    assert found["torch"] == "refused"
    assert found["total"] > 2 * MOST, "as documented: the whole GPU, of which the budget's percentages are"


def test_without_mps_nobody_refuses_them(service: dict[str, str], tmp_path: Path) -> None:
    """The control: the same program under the same budget, beside the same daemon."""
    found, _ = started(tmp_path, service)
    assert found["value"] is None
    assert found["error"] == 0 and found["taken"] == MOST and found["torch"] == "fits"


def test_a_lower_limit_in_the_environment_stays(service: dict[str, str], tmp_path: Path) -> None:
    found, said = started(tmp_path, {**service, "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=2G"}, "--mps")
    assert found["value"] == f"{one_gpu()}=2048M"
    assert found["error"] == 2 and GIB <= found["taken"] < 2 * GIB
    assert "under MPS this process may have 2.00 GiB" in said

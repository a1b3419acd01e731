"""The pytest plugin on a GPU: budgets for single tests, and leaks of PyTorch and CuPy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import memguard

HEAD = """
import os
import pytest
import memguard

MIB, GIB = 1 << 20, 1 << 30
kept = []
"""
TORCH = """
import torch

def take(size): return torch.empty(size, dtype=torch.uint8, device="cuda")

def test_first_use():  # the context, the modules of matmul, the workspace of cuBLAS
    square = torch.ones(2048, 2048, device="cuda")
    assert float((square @ square)[0, 0]) == 2048
def test_keeps(): kept.append(take(256 * MIB))
def test_caches():
    before = torch.cuda.memory_reserved()
    take(GIB)
    assert torch.cuda.memory_reserved() >= before + GIB
def test_cycles():
    cycle = [take(256 * MIB)]
    cycle.append(cycle)
@pytest.fixture
def given(): return take(256 * MIB)
def test_of_a_fixture(given): assert given.numel() == 256 * MIB
@pytest.fixture(scope="class")
def wide(): return take(256 * MIB)
class TestWide:
    def test_a(self, wide): pass
    def test_b(self, wide): pass

BUDGET = {"frameworks": {"torch": {"limit": "2GiB"}}}
@pytest.mark.memguard_budget(BUDGET)
def test_budget(memguard_budget):
    take(GIB)
    with pytest.raises(torch.OutOfMemoryError):
        take(3 * GIB)
    with pytest.raises(memguard.BudgetExceeded):
        memguard_budget.require("torch", "3GiB")
@pytest.mark.memguard_budget(BUDGET)
def test_keeps_under_a_budget(): kept.append(take(128 * MIB))
def test_program(): memguard.init({"version": 1, **BUDGET})
def test_no_budget_is_left():
    with pytest.raises(memguard.NotActive):
        memguard.ledger()
    take(3 * GIB)
"""
CUPY = """
import cupy

def take(size): return cupy.zeros(size, "u1")

def test_first_use():
    square = cupy.ones((2048, 2048), "f4")
    assert float((square @ square)[0, 0]) == 2048
def test_keeps(): kept.append(take(256 * MIB))
def test_caches():
    pool = cupy.get_default_memory_pool()
    before = pool.total_bytes()
    take(GIB)
    assert pool.total_bytes() >= before + GIB - 256 * MIB
def test_cycles():
    cycle = [take(256 * MIB)]
    cycle.append(cycle)

BUDGET = {"frameworks": {"cupy": {"limit": "2GiB"}}}
@pytest.mark.memguard_budget(BUDGET)
def test_budget(memguard_budget):
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        take(3 * GIB)
@pytest.mark.memguard_budget(BUDGET)
def test_keeps_under_a_budget(): kept.append(take(128 * MIB))
def test_no_budget_is_left():
    with pytest.raises(memguard.NotActive):
        memguard.ledger()
    take(3 * GIB)
def test_past_every_framework(): kept.append(cupy.cuda.runtime.malloc(512 * MIB))
def test_nvml_lists_this_process():
    import pynvml
    pynvml.nvmlInit()
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    found = [one.usedGpuMemory for gpu in gpus for one in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
             if one.pid == os.getpid()]
    print("LISTED" if any(found) else "NOT LISTED")
"""


def run(folder: Path, body: str) -> tuple[str, list[tuple[str, str, str]]]:
    """The output of a run with the check for leaks, and what it found: test, framework (or `process`), and size."""
    (folder / "test_it.py").write_text(HEAD + textwrap.dedent(body))
    home = str(Path(memguard.__file__).parents[1])
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MEMGUARD_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "memguard.pytest_plugin", "-p", "no:cacheprovider", "-s", "-q",
         "--rootdir", str(folder), "--memguard-leaks", "test_it.py"],
        env={**environ, "PYTHONPATH": home, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    found = []
    for part in done.stdout.split("ERROR at teardown of ")[1:]:
        name = part.split()[0]
        found += [(name, *line) for line in re.findall(r": (?:this )?(\w+) has (\S+ \SiB) more", part)]
    return done.stdout + done.stderr, found


def test_of_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text, found = run(tmp_path, TORCH)
    assert found == [("test_keeps", "torch", "256.0 MiB"), ("test_keeps_under_a_budget", "torch", "128.0 MiB")], text
    assert "11 passed, 2 errors" in text and " failed" not in text, text


def test_of_cupy(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    text, found = run(tmp_path, CUPY)
    expected = [("test_keeps", "cupy", "256.0 MiB"), ("test_keeps_under_a_budget", "cupy", "128.0 MiB")]
    if "NOT LISTED" not in text:  # NVML says what this process holds
        assert [one[:2] for one in found[2:]] == [("test_past_every_framework", "process")], text
        assert found[2][2].endswith("MiB") and 510 <= float(found[2][2].split()[0]) <= 520, text
    assert found[:2] == expected, text
    assert "9 passed" in text and " failed" not in text, text

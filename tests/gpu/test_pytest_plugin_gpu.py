"""The pytest plugin on a GPU: budgets for single tests, and leaks of PyTorch and CuPy.

Each test here has pytest run a file of tests with the check for leaks. Those that keep arrays are expected to have an
error at their teardown, of the size that they keep, with and without a budget. All others are expected to pass: what
they leave is cache, context, modules or workspaces. `tests/unit/test_pytest_gpu_harness.py` has `run` without a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

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

def test_first_use():  # the context, and modules of PyTorch
    assert float(torch.ones(1, device="cuda")) == 1
def test_matmul():  # modules of cuBLAS, and PyTorch's workspace for it
    square = torch.ones(2048, 2048, device="cuda")
    assert float((square @ square)[0, 0]) == 2048
def test_svd(): torch.linalg.svd(torch.rand((64, 64), device="cuda"))
def test_fft(): torch.fft.fft(torch.rand((2048, 2048), device="cuda"))
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

def test_first_use(): assert float(cupy.ones(1).sum()) == 1
def test_matmul():
    square = cupy.ones((2048, 2048), "f4")
    assert float((square @ square)[0, 0]) == 2048
def test_svd(): cupy.linalg.svd(cupy.eye(64))
def test_fft(): cupy.fft.fft(cupy.ones((1021, 4093)))  # its plan stays in a cache, with a work area of the pool
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


class Found(NamedTuple):
    """What a run came to."""

    leaks: list[tuple[str, str, float]]
    """Test, framework (`process`: what no framework says, by NVML), and MiB."""
    others: list[str]
    """Lines of the summary on tests that failed, or had an error that is no leak."""
    passed: int
    text: str


def run(folder: Path, body: str) -> Found:
    """A run of these tests with the check for leaks. The packages are those of this process, by whatever path."""
    (folder / "test_it.py").write_text(HEAD + textwrap.dedent(body))
    (folder / "pytest.ini").write_text("[pytest]\n")  # otherwise pytest would use one above the temporary folder
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("MEMGUARD_", "PYTEST_"))}
    home = str(Path(memguard.__file__).parents[1])
    environ["PYTHONPATH"] = os.pathsep.join([home, *filter(None, [environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "memguard.pytest_plugin", "-p", "no:cacheprovider", "-s", "-q", "-rfE",
         "--rootdir", str(folder), "--memguard-leaks", "test_it.py"],
        env={**environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    leaks = []
    for part in done.stdout.split("ERROR at teardown of ")[1:]:
        this = re.split(r"\n(?:_{3,}|={3,}) ", part)[0]
        for name, size, unit in re.findall(r": (?:this )?(\w+) has (\S+) (\SiB) more", this):
            leaks.append((part.split()[0], name, float(size) * {"MiB": 1, "GiB": 1024}[unit]))
    names = {f"ERROR test_it.py::{name}" for name, _, _ in leaks}
    summary = re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE)
    others = [line for line in summary if line.split(" - ")[0] not in names]
    passed = re.search(r"(\d+) passed", done.stdout)
    return Found(leaks, others, int(passed[1]) if passed else 0, done.stdout + done.stderr)


def test_of_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = run(tmp_path, TORCH)
    assert found.others == [], found.text
    assert found.leaks == [("test_keeps", "torch", 256), ("test_keeps_under_a_budget", "torch", 128)], found.text
    assert found.passed == 14, found.text


def test_of_cupy(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    found = run(tmp_path, CUPY)
    assert found.others == [], found.text
    counted = [one for one in found.leaks if one[1] != "process"]
    assert counted == [("test_keeps", "cupy", 256), ("test_keeps_under_a_budget", "cupy", 128)], found.text
    # No framework counts a raw allocation. It shows where NVML says what this process holds, and nowhere else.
    past = [(test, 510 <= size <= 520) for test, name, size in found.leaks if name == "process"]
    assert past == ([] if "NOT LISTED" in found.text else [("test_past_every_framework", True)]), found.text
    assert found.passed == 12, found.text

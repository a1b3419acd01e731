"""`--memguard-leaks` and the budget's marker with the real PyCUDA and Numba, over a stub driver."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import stub_driver

import memguard

TESTS = """
import gc
import pytest
import memguard
import pycuda.driver as driver
from numba import cuda

MIB = 1 << 20
BUDGET = {"frameworks": {"pycuda": {"limit": "1GiB"}, "numba": {"limit": "1GiB"}}}
kept = []

@pytest.fixture(scope="session")
def context():
    driver.init()
    context = driver.Device(0).retain_primary_context()
    context.push()
    yield
    kept.clear()
    context.pop()

pytestmark = pytest.mark.usefixtures("context")

def test_nothing_is_active(context):
    with pytest.raises(memguard.NotActive):
        memguard.ledger()
@pytest.mark.memguard_budget(BUDGET)
def test_pycuda_keeps():
    kept.append(driver.mem_alloc(256 * MIB))
@pytest.mark.memguard_budget(BUDGET)
def test_numba_keeps():
    kept.append(cuda.device_array(64 * MIB, "u1"))
@pytest.mark.memguard_budget(BUDGET)
def test_both_free(memguard_budget):
    arrays = [driver.mem_alloc(256 * MIB), cuda.device_array(64 * MIB, "u1")]
    usage = memguard_budget.sample().devices[0].frameworks
    assert usage["pycuda"].in_use >= 256 * MIB and usage["numba"].in_use >= 64 * MIB
@pytest.mark.memguard_budget(BUDGET)
def test_cycles():
    cycle = [driver.mem_alloc(256 * MIB), cuda.device_array(64 * MIB, "u1")]
    cycle.append(cycle)
def test_without_a_budget():
    array = cuda.device_array(64 * MIB, "u1")
"""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    home = str(Path(memguard.__file__).parents[1])
    environ = stub_driver.one_gpu(tmp_path_factory.mktemp("stubs"))
    return {**{k: v for k, v in environ.items() if not k.startswith("MEMGUARD_")}, "PYTHONPATH": home}


def test_leaks_are_found_by_framework_and_what_is_pooled_is_none(stubs: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # else one above the temporary folder would count
    command = [sys.executable, "-m", "pytest", "-p", "memguard.pytest_plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-W", "ignore", "--rootdir", str(tmp_path), "--memguard-leaks", "test_it.py"],
        env={**stubs, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    text = done.stdout
    found = re.findall(r"ERROR at teardown of (\w+) ___.*?: (\w+) has (\S+) MiB more in use", text, re.DOTALL)
    assert found == [("test_pycuda_keeps", "pycuda", "256.0"), ("test_numba_keeps", "numba", "64.0")], (
        text + done.stderr
    )
    assert "6 passed, 2 errors" in text, text[-3000:] + done.stderr[-2000:]

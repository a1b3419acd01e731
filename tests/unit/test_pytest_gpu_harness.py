"""The harness of `tests/gpu/test_pytest_plugin_gpu.py`, whose tests need a GPU: what it runs and what it reads."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.long  # no version of what is installed changes what only developers run

GPU_TEST = Path(__file__).parents[1] / "gpu" / "test_pytest_plugin_gpu.py"
BODY = """
import only_there  # a package that PYTHONPATH alone brings, as on a machine whose packages lie in a folder

BUDGET = {"frameworks": {"torch": {"limit": "4GiB"}}}
budget = pytest.mark.memguard_budget(BUDGET, simulate="h100")
@budget
def test_keeps(memguard_budget): memguard_budget.frameworks["torch"].allocate(256 * MIB)
@budget
def test_keeps_more(memguard_budget): memguard_budget.frameworks["torch"].allocate(2 * GIB)
@budget
def test_fits(memguard_budget): memguard_budget.require("torch", "1GiB")
@pytest.fixture
def broken(): raise ModuleNotFoundError("no module: this process has 1.0 MiB more")
def test_setup(broken): pass
def test_fails(): assert 0
"""


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_plugin_tests", GPU_TEST)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_leaks_are_told_from_all_else(harness: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "only_there.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])]))
    found = harness.run(tmp_path, BODY)
    assert found.leaks == [("test_keeps", "torch", 256), ("test_keeps_more", "torch", 2048)], found.text
    assert [line.split(" - ")[0] for line in found.others] == [
        "FAILED test_it.py::test_fails",
        "ERROR test_it.py::test_setup",
    ], found.text
    assert found.passed == 3, found.text


@pytest.mark.parametrize("body", ["TORCH", "CUPY"])
def test_the_figures_are_those_of_the_file(harness: ModuleType, body: str) -> None:
    """So that a test which is added there is expected to pass, or to leak, by somebody."""
    code = getattr(harness, body)
    compile(harness.HEAD + code, body, "exec")
    assert code.count("def test_") == {"TORCH": 14, "CUPY": 12}[body]

"""The benchmark's trial of refusals with the real PyCUDA, over the stub of its driver: right ones, and a control."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stub_driver

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import ctypes, json, sys
root, early, beside = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "beside"
sys.path += [f"{root}/tests/native", f"{root}/benchmarks"]
driver = ctypes.CDLL("libcuda.so.1")
driver.stub_taken.restype = ctypes.c_size_t
import memguard
from memguard import _api
from stand_ins import Host
_api._host = lambda simulate: Host()
init, resize = memguard.init, memguard.resize
def init_early(budget):
    budget["frameworks"]["pycuda"]["limit"] -= early
    return init(budget)
memguard.init, memguard.resize = init_early, lambda name, size: resize(name, size - early)
import _independent
_independent.bytes_now = lambda: int(driver.stub_taken())
found = _independent.refusals("pycuda", cap=128 << 20, beside=beside)
print(json.dumps([*_independent.refused_rightly(found), len(found["tried"])]))
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return stub_driver.build(tmp_path_factory.mktemp("cuda"))


def tried(stub: dict[str, str], early: int, how: str) -> tuple[bool, str, int]:
    environment = {**os.environ, **stub, "CUDA_STUB_MIB": "2048"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE, str(ROOT), str(early), how],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: Any = json.loads(done.stdout.splitlines()[-1])
    return found[0], found[1], found[2]


@pytest.mark.parametrize("how", ["alone", "beside"])
def test_pycuda_refuses_only_what_would_pass_its_cap(stub: dict[str, str], how: str) -> None:
    good, figure, count = tried(stub, 0, how)
    assert good and count == 40, figure


@pytest.mark.parametrize("how", ["alone", "beside"])
def test_a_cap_that_holds_two_pages_early_is_found(stub: dict[str, str], how: str) -> None:
    good, figure, count = tried(stub, 4 << 20, how)
    assert not good and "when granted" in figure and count == 40, figure

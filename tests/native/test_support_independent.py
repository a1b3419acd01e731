"""What tests/gpu holds memguard to, with the real PyCUDA over a stub of its driver: refusals, rows, raw memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stub_driver
from support import independent

ROOT = Path(__file__).resolve().parents[2]
BEGIN = """
import ctypes, json, sys
root, early, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sys.path += [root, f"{root}/tests/native", f"{root}/tests"]
driver = ctypes.CDLL("libcuda.so.1")
driver.stub_taken.restype = ctypes.c_size_t
import memguard
from memguard import api
from memguard._runtime import runtime
from stand_ins import Host
runtime.open_host = lambda simulate: Host()
init, resize = memguard.init, memguard.resize
def init_early(budget):
    budget["frameworks"]["pycuda"]["limit"] -= early
    return init(budget)
memguard.init, memguard.resize = init_early, lambda name, size: resize(name, size - early)
from support import independent
independent.bytes_now = lambda: int(driver.stub_taken())
"""
REFUSALS = """
found = independent.refusals("pycuda", cap=128 << 20, beside=how == "beside")
print(json.dumps([*independent.refused_rightly(found), len(found["tried"])]))
"""
ROWS = """
memguard.init({"version": 1, "device": {"limit": "3GiB"}, "frameworks": {"pycuda": {"limit": 2 << 30}}})
from support.driving import allocator, load, row_of
load("pycuda")
found = independent.counted(allocator("pycuda")[0], lambda: row_of("pycuda"), lambda: memguard.trim("pycuda"))
raw = independent.raw_memory(lambda: 0)
print(json.dumps([found, raw]))
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return stub_driver.build(tmp_path_factory.mktemp("cuda"))


def said(stub: dict[str, str], code: str, early: int = 0, how: str = "") -> Any:
    environment = {**os.environ, **stub, "CUDA_STUB_MIB": "2048"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BEGIN + code, str(ROOT), str(early), how],
        env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("how", ["alone", "beside"])
def test_pycuda_refuses_only_what_would_pass_its_cap(stub: dict[str, str], how: str) -> None:
    good, figure, count = said(stub, REFUSALS, 0, how)
    assert good and count == 40, figure


@pytest.mark.parametrize("how", ["alone", "beside"])
def test_a_cap_that_holds_two_pages_early_is_found(stub: dict[str, str], how: str) -> None:
    good, figure, count = said(stub, REFUSALS, 4 << 20, how)
    assert not good and "when granted" in figure and count == 40, figure


def test_pycudas_row_grows_and_shrinks_as_the_driver_says(stub: dict[str, str]) -> None:
    """The ledger's row of 424 arrays against the stub's own count of pages; and memory that no framework took."""
    found, raw = said(stub, ROWS)
    for step, least in (("large", 600 << 20), ("small", 600 << 20), ("emptied", 1 << 30)):
        good, figure = independent.agrees(found[step], 2 << 20, least)
        assert good, (step, figure)
    good, figure = independent.in_use_is_live(found["small"])
    assert good, figure
    assert [[a - one["nvml"][0] for a in one["nvml"]] for one in raw] == [[0, one["bytes"], 0] for one in raw]
    assert not independent.raw_is_unaccounted(raw)[0], "nobody told of it here"

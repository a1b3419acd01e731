"""`strategy: pool` under the guard: the real torch that is not imported yet, and the real PyCUDA over a stub driver."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import stub_driver
from served import environment

Run = Callable[..., dict[str, Any]]

TORCH = """
from memguard import _budget
from memguard._frameworks.torch import settings
from memguard._guard.guard import Guard
settings.cuda_version = lambda: "13.0"  # this torch is built without CUDA, and is not imported
NAME = "PYTORCH_ALLOC_CONF"
def start(**frameworks):
    text = {"version": 1, "strategy": "pool", "frameworks": frameworks or {"torch": {"limit": "1GiB"}}}
    guard = Guard(_budget.from_mapping(text), Host())
    guard.start()
    return guard
"""


def test_the_backend_is_asked_for_before_torch_is_imported_and_taken_back(alone: Run) -> None:
    found = alone(
        TORCH
        + """
guard = start()
result["during"], result["imported"] = os.environ.get(NAME), "torch" in sys.modules
result["shown"] = str(guard)
result["stays"], result["after"] = guard.stop(), os.environ.get(NAME)
"""
    )
    assert found["during"] == "backend:cudaMallocAsync" and not found["imported"]
    assert "pending" in found["shown"] and found["stays"] == [] and found["after"] is None


def test_a_start_that_fails_later_takes_it_back_too(alone: Run) -> None:
    """And so does a `stop` after one that was interrupted."""
    found = alone(
        TORCH
        + """
from memguard._frameworks import registry
client = registry.client
def broken(name, host, pool):
    framework = client(name, host, pool)
    if name == "cupy":
        framework.prepare = lambda undo: 1 / 0
    return framework
registry.client = broken
try:
    start(torch={"limit": "1GiB"}, cupy={"limit": "1GiB"})
except ZeroDivisionError:
    result["failed"] = os.environ.get(NAME)
registry.client = client
guard, real = start(), os.environ.pop
times = []
def interrupted(*args):
    times.append(1)
    if len(times) == 1:
        raise KeyboardInterrupt
    return real(*args)
os.environ.pop = interrupted
try:
    guard.stop()
except KeyboardInterrupt:
    result["first"] = [os.environ.get(NAME), guard.undone]
guard.stop()
result["second"] = [os.environ.get(NAME), guard.undone]
"""
    )
    assert found["failed"] is None
    assert found["first"] == ["backend:cudaMallocAsync", False] and found["second"] == [None, True]


def test_a_backend_of_the_users_own_refuses_the_budget(alone: Run) -> None:
    found = alone(
        TORCH
        + """
os.environ[NAME] = "backend:native"
result["setting"], result["stays"] = setting(start), os.environ[NAME]
"""
    )
    assert found == {"setting": "PYTORCH_ALLOC_CONF=backend:native", "stays": "backend:native"}


PYCUDA = """
import ctypes, json, os, sys
from stand_ins import Host, GIB, MIB
from memguard import _budget
from memguard._guard.guard import Guard
from memguard._base.types import POOL
host = Host()
os.environ["CUDA_STUB_UUIDS"] = host.uuids[0]
text = {"version": 1, "strategy": "pool", "frameworks": {"pycuda": {"limit": "48MiB"}, "cupy": {"limit": "16MiB"}}}
guard, result = Guard(_budget.from_mapping(text), host), {}
guard.start()
import pycuda.driver as drv
drv.init()
context = drv.Device(0).make_context()
stub = ctypes.CDLL("libcuda.so.1")
def rows():
    device = guard.ledger().devices[0]
    assert device.sum == device.device.total
    return {row.name: [row.bytes, row.cap, row.enforcement] for row in device.rows if row.kind == "framework"}
"""


@pytest.fixture(scope="module")
def stubbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {**environment(), **stub_driver.build(tmp_path_factory.mktemp("cuda"))}


def test_pycuda_under_the_guard_from_init_to_shutdown(stubbed: dict[str, str]) -> None:
    code = textwrap.dedent(
        """
        result["before"] = rows()
        live = [drv.mem_alloc(40 * MIB), drv.mem_alloc(MIB)]
        del live[0]
        result["rows"] = rows()
        guard.require("pycuda", 63 * MIB)
        try:
            guard.require("pycuda", 64 * MIB)
        except Exception as error:
            result["refused"] = str(error)
        result["pool"] = [stub.stub_current_pool(), stub.stub_pools()]
        result["stays"] = guard.stop()
        result["after"] = [stub.stub_current_pool(), stub.stub_pools()]
        live.clear()
        result["blocks"] = stub.stub_blocks()
        context.pop()
        print("RESULT", json.dumps(result))
        """
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PYCUDA + code], env=stubbed, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.split("RESULT ", 1)[1])
    mib = 1 << 20
    assert found["before"]["pycuda"] == [0, 64 * mib, "enforced"] and "shared pool" not in found["before"]
    assert found["rows"]["pycuda"] == [mib, 64 * mib, "enforced"]
    assert found["rows"]["shared pool"] == [63 * mib, None, ""]
    assert "pycuda and cupy share one pool of 64.0 MiB" in found["refused"]
    assert found["pool"] == [1, 1] and found["stays"] == [] and found["after"] == [0, 0] and found["blocks"] == 0

"""The capped memory pool over a stub of libcuda: made, put in place, read and restored; each call fails once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stub_gpus import Run

PREAMBLE = """
import ctypes
stub = ctypes.CDLL("libcuda.so.1")  # in this stub CUDA is initialised as soon as it is loaded
stub.stub_pool_max.restype = stub.stub_pool_threshold.restype = ctypes.c_ulonglong
from memguard._devices.pools import CappedPool
def state():
    return [stub.stub_current_pool(), stub.stub_pools()]
def raises(call):
    try:
        call()
    except DeviceError as error:
        return str(error)
"""


@pytest.fixture
def pooled(run: Run, cuda: Path) -> Run:
    def call(code: str, **env: str) -> dict[str, Any]:
        return run(PREAMBLE + code, env={"LD_LIBRARY_PATH": str(cuda), **env})

    return call


def test_a_pool_is_capped_made_current_and_restored(pooled: Run) -> None:
    found = pooled("""
result["before"] = state()
pool = CappedPool(0, 4 * GIB + 2 * MIB)
result["made"] = state()
result["max"], result["threshold"] = stub.stub_pool_max(1), stub.stub_pool_threshold(1)
stub.stub_pool_use(1, ctypes.c_ulonglong(6 * GIB), ctypes.c_ulonglong(5 * GIB))
result["figures"] = [pool.reserved(), pool.peak(), pool.used()]
pool.trim(7 * GIB)
result["parts"] = [pool.reserved()]
pool.trim(6 * GIB - 512 * MIB)
result["parts"].append(pool.reserved())
pool.trim()
result["trimmed"] = [pool.reserved(), pool.peak(), pool.used()]
pool.restore()
result["restored"] = state()
""")
    gib = 1 << 30
    assert found["before"] == [0, 0] and found["made"] == [1, 1] and found["restored"] == [0, 0]
    assert (found["max"], found["threshold"]) == (4 * gib + (2 << 20), 2**64 - 1)
    assert found["parts"] == [6 * gib, 6 * gib - (512 << 20)]
    assert found["figures"] == [6 * gib, 6 * gib, 5 * gib] and found["trimmed"] == [5 * gib, 6 * gib, 5 * gib]


def test_a_pool_that_somebody_put_in_its_place_stays(pooled: Run) -> None:
    found = pooled("""
first = CappedPool(0, GIB)
second = CappedPool(0, 2 * GIB)
first.restore()
result["after"] = state()
second.restore()
result["end"] = stub.stub_pools()
""")
    assert found["after"] == [2, 1] and found["end"] == 0


@pytest.mark.parametrize(
    "call", ["cuDeviceGetMemPool", "cuMemPoolCreate", "cuMemPoolSetAttribute", "cuDeviceSetMemPool"]
)
def test_a_call_that_fails_leaves_the_former_pool_and_no_other(pooled: Run, call: str) -> None:
    found = pooled(f"""
stub.stub_fail(b"{call}", 803, 1)
result["text"] = raises(lambda: CappedPool(0, GIB))
result["state"] = state()
CappedPool(0, GIB).restore()
result["again"] = state()
""")
    assert f"CUDA: {call}: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (error 803)\n    fix: " in found["text"]
    assert found["state"] == found["again"] == [0, 0]


def test_a_figure_that_cannot_be_read_is_an_error(pooled: Run) -> None:
    found = pooled("""
pool = CappedPool(0, GIB)
stub.stub_fail(b"cuMemPoolGetAttribute", 719, 1)
result["text"] = raises(pool.reserved)
""")
    assert "CUDA: cuMemPoolGetAttribute: error 719" in found["text"]


def test_a_driver_before_cuda_12_2_is_refused_with_the_version_that_can(pooled: Run) -> None:
    found = pooled(
        "result['text'], result['state'] = raises(lambda: CappedPool(0, GIB)), state()", CUDA_STUB_VERSION="12010"
    )
    assert "CUDA 12.1 cannot limit a memory pool" in found["text"] and "fix: " in found["text"]
    assert "535" in found["text"] and found["state"] == [0, 0]


def test_a_process_without_cuda_is_refused(run: Run, without_cuda: dict[str, str]) -> None:
    found = run(
        """
        from memguard._devices.pools import CappedPool
        result["text"] = refused(lambda: CappedPool(0, GIB))
        """,
        env=without_cuda,
    )
    assert "nothing has initialised CUDA in this process\n    fix: " in found["text"]

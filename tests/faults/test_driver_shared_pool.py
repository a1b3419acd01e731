"""The pool that frameworks share, over a stub of libcuda: made once, kept, counted, and taken back when interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stub_gpus import Run

PREAMBLE = """
import ctypes
stub = ctypes.CDLL("libcuda.so.1")  # in this stub CUDA is initialised as soon as it is loaded
stub.stub_pool_max.restype = stub.stub_pool_threshold.restype = ctypes.c_ulonglong
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.shared_pool import SharedPool
from memguard.errors import CapNotApplied
gpu = SimulatedHost(["h200"]).devices()[0]
warned = []
joint = SharedPool({gpu.uuid: 4 * GIB}, warned.append)
def use(reserved, used):
    stub.stub_pool_use(1, ctypes.c_ulonglong(reserved), ctypes.c_ulonglong(used))
def state():
    return [stub.stub_current_pool(), stub.stub_pools()]
NEVER = 2**64 - 1
"""


@pytest.fixture
def shared(run: Run, cuda: Path) -> Run:
    def call(code: str, **env: str) -> dict[str, Any]:
        return run(PREAMBLE + code, env={"LD_LIBRARY_PATH": str(cuda), **env})

    return call


def test_the_first_framework_makes_it_and_the_others_find_it(shared: Run) -> None:
    found = shared("""
result["before"] = [joint.figures(gpu.uuid), joint.cache(gpu, 0, False), joint.remainder(gpu.uuid), state()]
first = joint.use("torch", gpu.uuid, 0)
result["same"] = joint.use("cupy", gpu.uuid, 0) is first
result["made"], result["max"] = state(), stub.stub_pool_max(1)
result["threshold"] = stub.stub_pool_threshold(1) == NEVER
result["elsewhere"] = joint.use("cupy", "GPU-another", 0)
joint.restore()
joint.restore()
result["after"], result["over"] = state(), joint.use("cupy", gpu.uuid, 0)
""")
    assert found["before"] == [None, None, 0, [0, 0]]
    assert found["same"] and found["made"] == [1, 1] and found["max"] == 4 << 30 and found["threshold"]
    assert found["elsewhere"] is None and found["after"] == [0, 0] and found["over"] is None


def test_rows_of_one_reading_add_up_to_what_the_pool_holds(shared: Run) -> None:
    found = shared("""
joint.use("torch", gpu.uuid, 0)
joint.count("cupy", lambda uuid: 100 * MIB)
joint.count("numba", lambda uuid: 30 * MIB)
use(512 * MIB, 300 * MIB)
torch = joint.remainder(gpu.uuid)
result["torch"] = torch
result["with"] = joint.cache(gpu, 130 * MIB + torch, True)[:3]
result["without"] = joint.cache(gpu, 130 * MIB, False)[:3]
joint.forget("numba")
result["fewer"] = joint.remainder(gpu.uuid)
use(64 * MIB, 0)
result["idle"] = joint.cache(gpu, 0, True)[:3]
""")
    mib = 1 << 20
    assert found["torch"] == 170 * mib and found["with"] == [212 * mib, 0, None]
    assert found["without"] == [382 * mib, 170 * mib, None], "what nobody counts is in use, not cached"
    assert found["fewer"] == 200 * mib and found["idle"] == [64 * mib, 0, 64 * mib]


def test_a_threshold_that_another_library_sets_is_set_again(shared: Run) -> None:
    found = shared("""
pool = joint.use("torch", gpu.uuid, 0)
for threshold in (0, 7 * MIB):
    stub.cuMemPoolSetAttribute(ctypes.c_void_p(pool._pool), 4, ctypes.byref(ctypes.c_ulonglong(threshold)))
    joint.cache(gpu, 0, False)
    result.setdefault("again", []).append(stub.stub_pool_threshold(1) == NEVER)
joint.cache(gpu, 0, False)
result["warned"] = warned
""")
    assert found["again"] == [True, True]
    assert len(found["warned"]) == 2 and "was set to 7.0 MiB by somebody else" in found["warned"][1]


def test_another_current_pool_is_a_drift_and_stays(shared: Run) -> None:
    found = shared("""
joint.use("torch", gpu.uuid, 0)
result["holds"] = list(map(str, joint.drift()))
from memguard._devices.pools import CappedPool
other = CappedPool(0, GIB)
result["drift"] = list(map(str, joint.drift()))
joint.restore()
result["after"] = state()
""")
    (said,) = found["drift"]
    assert found["holds"] == [] and said.startswith("another memory pool was made current on cuda:0")
    assert found["after"] == [2, 1], "what somebody put in its place is theirs"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"CUDA_STUB_POOLS": "0"}, "has no memory pools"),
        ({"CUDA_STUB_VERSION": "12010"}, "a driver for CUDA 12.1 cannot limit a memory pool"),
    ],
)
def test_a_driver_that_cannot_is_refused_with_the_remedy(shared: Run, env: dict[str, str], words: str) -> None:
    found = shared(
        """
for _ in range(2):
    try:
        joint.use("cupy", gpu.uuid, 0)
    except CapNotApplied as error:
        result["text"], result["framework"] = str(error), error.framework
result["state"] = state()
""",
        **env,
    )
    assert words in found["text"] and "fix: write 'strategy: caps'" in found["text"] and found["framework"] == "cupy"
    assert found["state"] == [0, 0]


@pytest.mark.parametrize("call", ["cuMemPoolCreate", "cuMemPoolSetAttribute", "cuDeviceSetMemPool"])
def test_a_call_that_fails_while_it_is_made_leaves_nothing_and_may_be_tried_again(shared: Run, call: str) -> None:
    found = shared(f"""
stub.stub_fail(b"{call}", 803, 1)
try:
    joint.use("cupy", gpu.uuid, 0)
except CapNotApplied:
    result["failed"] = state()
joint.use("cupy", gpu.uuid, 0)
result["again"] = state()
""")
    assert found["failed"] == [0, 0] and found["again"][1] == 1


def test_an_interrupted_restore_is_finished_by_the_next(shared: Run) -> None:
    found = shared("""
pool = joint.use("torch", gpu.uuid, 0)
restore, times = pool.restore, []
def interrupted():
    times.append(1)
    if len(times) == 1:
        raise KeyboardInterrupt
    restore()
pool.restore = interrupted
try:
    joint.restore()
except KeyboardInterrupt:
    result["first"] = state()
joint.restore()
result["second"] = state()
""")
    assert found["first"] == [1, 1] and found["second"] == [0, 0]


def test_a_handler_that_allocates_while_the_pool_is_made_makes_no_second_one(shared: Run) -> None:
    found = shared("""
from memguard._devices import pools
made, real = [], pools.CappedPool
def interrupted(*args):
    made.append(joint.use("cupy", gpu.uuid, 0))
    return real(*args)
pools.CappedPool = interrupted
joint.use("torch", gpu.uuid, 0)
result["within"], result["state"] = made, state()
""")
    assert found["within"] == [None] and found["state"] == [1, 1]


def test_a_forked_child_touches_no_pool(shared: Run) -> None:
    found = shared("""
joint.use("torch", gpu.uuid, 0)
joint.forked()
joint.restore()
result["state"], result["use"] = state(), joint.use("torch", gpu.uuid, 0)
""")
    assert found["state"] == [1, 1] and found["use"] is None


def test_the_default_pool_keeps_what_is_freed_and_gets_its_threshold_back(shared: Run) -> None:
    """As the last of the others has set it: JAX sets 0, TensorFlow its limit."""
    found = shared("""
def threshold(value):
    stub.cuMemPoolSetAttribute(ctypes.c_void_p(0x7f0000b00000), 4, ctypes.byref(ctypes.c_ulonglong(value)))
threshold(3 * MIB)
joint = SharedPool({gpu.uuid: 100 * MIB}, warned.append, clients=["jax"])
joint.use("jax", gpu.uuid, 0)
result["made"], result["kept"] = state(), stub.stub_pool_threshold(0) == NEVER
stub.stub_pool_use(0, ctypes.c_ulonglong(96 * MIB), ctypes.c_ulonglong(60 * MIB))
result["fits"] = [joint.limit(gpu.uuid).take(size) is not None for size in (40 * MIB, 40 * MIB + 1)]
result["row"] = joint.cache(gpu, 60 * MIB, True)[:3]
joint.restore()
result["first"] = stub.stub_pool_threshold(0)
joint = SharedPool({gpu.uuid: 100 * MIB}, warned.append, clients=["jax"])
joint.use("jax", gpu.uuid, 0)
threshold(0)
joint.cache(gpu, 0, True)
result["again"], result["warned"] = stub.stub_pool_threshold(0) == NEVER, len(warned)
joint.restore()
joint.restore()
result["second"] = stub.stub_pool_threshold(0)
""")
    mib = 1 << 20
    assert found["made"] == [0, 0] and found["kept"], "no pool is made, and none is made current"
    assert found["fits"] == [True, False] and found["row"] == [36 * mib, 0, None]
    assert found["first"] == 3 * mib and found["again"] and found["warned"] == 1 and found["second"] == 0


def test_another_current_pool_gives_way_to_the_default_one_and_comes_back(shared: Run) -> None:
    found = shared("""
from memguard._devices.pools import CappedPool
theirs = CappedPool(0, GIB)
joint = SharedPool({gpu.uuid: GIB}, warned.append, clients=["jax"])
joint.use("jax", gpu.uuid, 0)
result["now"] = state()
joint.restore()
result["back"] = state()
""")
    assert found == {**found, "now": [0, 1], "back": [1, 1]}

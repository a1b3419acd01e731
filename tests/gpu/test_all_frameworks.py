"""All frameworks under one budget: together at their caps, in every import order, and each one in special situations.

`support.driving` does the work in a new process, another process samples NVML, and the assertions use NVML, CUPTI, each
allocator's own figures and the memory that the process could still allocate.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.at_caps import AT_CAP, at_the_caps, explained, within_limit
from support.driving import COUNTED, GIB, MIB, NAMES, SIX
from support.independent import agrees, in_use_is_live, seen_by_cupti

Run = Callable[..., dict[str, Any]]
LOGS = {"TF_CPP_MIN_LOG_LEVEL": "0"}


def test_six_frameworks_stop_at_their_caps_while_the_others_are_full(run: Run) -> None:
    code = "from support import driving\nresult.update(driving.together(driving.SIX, again=True))\n"
    found = run(code, env=LOGS, timeout=300, sampled=True)
    assert sum(found["caps"].values()) >= 36 * GIB and set(found["driven"]) == set(SIX)
    assert set(found["emptied"]) == set(COUNTED)
    assert [r["would_have_fitted"] for r in found["driven"]["jax"]["refusals"]] == [False] * 4
    at_the_caps(found, 4)


def test_six_frameworks_at_their_caps_do_not_drift(run: Run, thorough: bool) -> None:
    limit, seconds = ("40GiB", 300) if thorough else ("20GiB", 40)
    code = f"from support import driving\nresult.update(driving.loop({limit!r}, {seconds}))\n"
    found = run(code, timeout=seconds + 240, sampled=True)
    assert found["seconds"] >= seconds and found["readings"] >= seconds / 3
    assert found["unaccounted_drift"] <= 64 * MIB and found["outside_drift"] <= 64 * MIB, found
    assert set(found["refused"]) == set(SIX) and all(found["refused"].values()), found["refused"]
    assert not found["not_native"] and not found["fitted"], (found["not_native"][:3], found["fitted"][:3])
    assert len(found["held"]) == 6 and all(most <= cap for most, cap in found["held"].values()), found["held"]
    assert found["sum_minus_total"] == 0
    within_limit(found, int(limit.removesuffix("GiB")) * GIB)


COUNTS = """
from support import driving, independent
guard, _ = driving.all_live(driving.budget_of_six(growth=False))
for name in driving.COUNTED:
    result[name] = independent.counted(
        driving.allocator(name)[0], lambda: driving.row_of(name), lambda: memguard.trim(name)
    )
"""


def test_rows_of_six_grow_and_shrink_as_the_driver_says(run: Run) -> None:
    found = run(COUNTS)
    for name in COUNTED:
        one = found[name]
        slack = abs(one["small"]["nvml"][0] - one["small"]["nvml"][1]) // 20 + 2 * MIB
        for step, bound, least in (("large", 2 * MIB, 256 * MIB), ("small", slack, 0), ("emptied", AT_CAP, 256 * MIB)):
            good, figure = agrees(one[step], bound, least)
            assert good, (name, step, figure)
        good, figure = in_use_is_live(one["small"])
        assert good, (name, figure)


@pytest.mark.skipif(importlib.util.find_spec("cupti") is None, reason="needs cupti-python")
def test_rows_of_six_match_cuptis_allocations_by_library(run: Run) -> None:
    """CUPTI sees only a part of JAX's pool: compare that row with the driver's figure."""
    found = run(
        "from bench.programs import cupti\nfrom support import driving\n"
        "result.update(cupti.by_cupti(driving.budget_of_six(growth=False)))\n"
    )
    for name in NAMES:
        good, figure = agrees(found["pool"], 2 * MIB, 256 * MIB) if name == "jax" else seen_by_cupti(found, name)
        assert good, (name, figure)


# --- import orders

QUICK = ("cupy", "numba", "pycuda", "torch")
"""TensorFlow and JAX take ten seconds for each refusal."""
ORDERS = list(itertools.permutations(sorted(SIX), 2))
SLOW = [order for order in ORDERS if not set(order) <= set(QUICK)]


def in_orders(run: Run, orders: list[tuple[str, ...]], at_once: int) -> None:
    """Each framework must work, have its declared cap, and be accounted for."""

    def one(order: tuple[str, ...]) -> dict[str, Any]:
        return run(f"from support import driving\nresult.update(driving.in_order({order!r}))\n", timeout=180)

    with ThreadPoolExecutor(at_once) as pool:
        every = dict(zip(orders, pool.map(one, orders), strict=True))
    for order, found in every.items():
        assert set(found["found"]) == set(order) and set(found["enforcement"].values()) == {"enforced"}, order
        for name, one_of in found["found"].items():
            assert 0.75 * one_of["cap"] <= one_of["allocated"] <= one_of["most_held"] <= one_of["cap"], (order, name)
            assert one_of["refusals"][0]["native"], (order, name, one_of)
        explained([found], found["reserve"])


def test_pairs_in_each_order(run: Run) -> None:
    in_orders(run, [order for order in ORDERS if order not in SLOW], 4)


@pytest.mark.parametrize("order", [NAMES, NAMES[::-1]], ids=["TensorFlow first", "TensorFlow last"])
def test_all_six_in_an_order_and_its_reverse(run: Run, order: tuple[str, ...]) -> None:
    """So each of the 30 pairs is imported in both orders, with other frameworks in between."""
    in_orders(run, [order], 1)


@pytest.mark.thorough
@pytest.mark.parametrize("order", SLOW, ids="-".join)
def test_each_pair_with_tensorflow_or_jax_by_itself(run: Run, order: tuple[str, ...]) -> None:
    in_orders(run, [order], 1)


CONTROL = """
import tensorflow
import torch
a = torch.randn(512, 512, device="cuda")
(a @ a).isfinite().all()
"""
CURED = """
from support import driving
if FIRST:
    import tensorflow
memguard.init(driving.budget(driving.MAIN))
import tensorflow as tf
import torch
a = torch.randn(512, 512, device="cuda")
result["finite"] = bool((a @ a).isfinite().all())
with tf.device("GPU:0"):
    result["product"] = float(tf.reduce_sum(tf.matmul(tf.ones((8, 8)), tf.ones((8, 8)))))
result["multiprocessors"] = torch.cuda.get_device_properties(0).multi_processor_count
"""


def test_control_tensorflow_before_torch_ends_the_process_by_a_signal(run: Run) -> None:
    run(CONTROL, rc=-8)


@pytest.mark.parametrize("first", [False, True], ids=["after init", "before init"])
def test_tensorflow_before_torch_under_a_budget(run: Run, first: bool) -> None:
    """PyTorch must see the real GPU: an H200 has 132 multiprocessors."""
    found = run(f"FIRST = {first}\n{CURED}")
    assert found["finite"] and found["product"] == 512 and found["multiprocessors"] == 132, found


@pytest.mark.whole_card
def test_control_without_memguard_tensorflow_takes_the_card(run: Run) -> None:
    found = run(
        """
import pynvml
from support.independent import bytes_now
pynvml.nvmlInit()
import tensorflow as tf
tf.zeros((4,)).numpy()
result["took"] = bytes_now()
result["left"] = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).free
def tried(work):
    try:
        work()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:400]
def of_torch():
    import torch
    torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
def of_pycuda():
    import pycuda.autoinit, pycuda.driver as drv
    drv.mem_alloc(4 * GIB)
result["torch"], result["pycuda"] = tried(of_torch), tried(of_pycuda)
"""
    )
    assert found["torch"] and found["pycuda"] and 0 <= found["left"] < 4 * GIB < found["took"], found


# --- one framework in special situations

LIVE = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Initialised before `init`, they would reserve the GPU, which other tests use at the same time."""


@pytest.mark.parametrize("when", ["later", "imported", "live"])
@pytest.mark.parametrize("name", NAMES)
def test_the_cap_is_reached_and_not_exceeded(run: Run, name: str, when: str) -> None:
    code = f"from support import driving\nresult.update(driving.circumstance({name!r}, {when!r}))\n"
    found = run(code, env=LIVE if when == "live" else None)
    if when == "live" and name in ("tensorflow", "jax", "numba"):
        assert "it was live before" in found["too_late"]
        return
    cap, taken, before, most = found["cap"], found["taken"], found["before"], found["most_held"]
    if not before:
        assert 0.75 * cap <= taken <= cap, found
    elif name in ("torch", "cupy"):  # their own allocators include memory allocated earlier
        assert taken == 0 if before > cap else taken + before <= cap, found
    else:
        assert 0.75 * cap <= taken <= cap and any("is not counted" in note for note in found["notes"]), found
    assert taken <= most <= max(cap, before), found
    assert len(found["refusals"]) == 1 and found["refusals"][0]["native"], found
    assert found["undone"] or any(sentence.startswith(name) for sentence in found["stays"]), found
    assert found["enforcement"] == "enforced"


def test_tensorflow_is_undone_before_its_first_operation(run: Run) -> None:
    """The undo must leave no trace."""
    found = run(
        """
from support import driving
before = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
memguard.init(driving.capped("2GiB", "tensorflow"))
import tensorflow as tf
gpu = tf.config.list_physical_devices("GPU")[0]
result["limited_mib"] = tf.config.get_logical_device_configuration(gpu)[0].memory_limit
memguard.shutdown()
result["after"] = bool(tf.config.get_logical_device_configuration(gpu))
result["restored"] = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") == before
os.environ["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"  # or it would take the card
with tf.device("GPU:0"):
    result["beyond"] = int(tf.zeros((3 * GIB // 4,), tf.float32).shape[0]) * 4
"""
    )
    assert found["limited_mib"] == 2048 and not found["after"] and found["restored"]
    assert found["beyond"] > 2 * GIB


ALONE = """
from support import driving
from support.independent import bytes_now
guard = memguard.init(driving.capped("4GiB", "torch"))
import torch
torch.zeros(1, device="cuda")
torch.cuda.empty_cache()
empty = bytes_now()
one = driving.Driven("torch", guard.plan.devices[0].caps["torch"])
FITS
one.fill()
result.update(one.summary(), held=one.held(), grown=bytes_now() - empty)
one.free(len(one.live) // 2)
one.until_refused(MIB, 300 * MIB)
result["grown_again"] = bytes_now() - empty
"""
ALLOCATORS = {
    "expandable_segments:True": "one.slack = 20 * MIB",
    "backend:cudaMallocAsync": "one.would_fit = lambda size: one.held() + -(-size // (32 * MIB)) * 32 * MIB <= one.cap",
}


@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_another_allocator_of_torchs_by_the_drivers_figure(run: Run, allocator: str) -> None:
    found = run(ALONE.replace("FITS", ALLOCATORS[allocator]), env={"PYTORCH_ALLOC_CONF": allocator})
    cap, most = found["cap"], max(found["grown"], found["grown_again"])
    assert 0.9 * cap <= most <= cap, (most, cap)
    # The driver's pool has an initial block before the first request, and keeps it.
    assert abs(found["held"] - found["grown"]) <= 32 * MIB, found
    assert all(r["native"] for r in found["refusals"]) and len(found["refusals"]) >= 2
    assert [r["would_have_fitted"] for r in found["refusals"][:2]] == [False, False], found


def test_torch_and_pycuda_leave_nothing_unaccounted(run: Run) -> None:
    found = run(
        """
from support import driving
guard, readings = driving.all_live(driving.budget({"torch": "60%", "pycuda": "40%"}), ["pycuda", "torch"])
import random, torch
for work in (
    lambda: torch.randn(2048, 2048, device="cuda") @ torch.randn(2048, 2048, device="cuda"),
    lambda: torch.linalg.svd(torch.randn(256, 256, device="cuda")),
):
    work()
    torch.cuda.synchronize()
    readings.append(driving.reading())
caps, rng = guard.plan.devices[0].caps, random.Random(driving.SEED)
driven = [driving.Driven(name, caps[name]) for name in ("torch", "pycuda")]
for one in driven:
    one.fill()
    readings.append(driving.reading())
for one in driven:
    one.free(len(one.live) // 2)
readings.append(driving.reading())
memguard.trim()
readings.append(driving.reading())
for one in driven:
    one.free()
memguard.trim()
readings.append(driving.reading())
result["readings"] = readings
""",
        timeout=180,
    )
    for one in found["readings"]:
        assert abs(one["unaccounted"]) <= 64 * MIB and one["sum_minus_total"] == 0, one

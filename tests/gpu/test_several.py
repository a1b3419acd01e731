"""Two GPUs of one host: caps by UUID whatever CUDA's order, and no context where nobody asked for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gpus_here import GPUS, TWO_GPUS

pytestmark = [TWO_GPUS, pytest.mark.two_gpus]
Run = Callable[..., dict[str, Any]]
BUDGET = """
BUDGET = {"version": 1, "device": {"limit": "20GiB"},
          "devices": {FIRST: {"limit": "8GiB"}},
          "frameworks": {"tensorflow": {"share": "30%"}, "torch": {"share": "50%"}, "pycuda": {"share": "20%"}}}
"""


@pytest.mark.parametrize("order", ["0,1", "1,0"])
def test_every_framework_stops_at_the_cap_of_the_gpu_it_is_on(run: Run, order: str) -> None:
    found = run(
        f"FIRST = {GPUS[0]!r}\n"
        + BUDGET
        + """
guard = memguard.init(BUDGET)
import tensorflow as tf, torch, pycuda.driver as drv
caps = {part.device.uuid: dict(part.caps) for part in guard.plan.devices}
result["caps"] = caps
def fill(take, native):
    live = []
    try:
        while True: live.append(take())
    except native:
        return live
ordinals = {}
keep = []
for i in range(2):
    uuid = "GPU-" + str(torch.cuda.get_device_properties(i).uuid)
    ordinals[uuid] = i
    keep.append(fill(lambda: torch.empty(64 * MIB, dtype=torch.uint8, device=f"cuda:{i}"), torch.OutOfMemoryError))
    result[f"torch {uuid}"] = torch.cuda.memory_reserved(i)
drv.init()
for uuid, i in ordinals.items():
    context = drv.Device(i).make_context()
    keep.append(fill(lambda: drv.mem_alloc(64 * MIB), drv.MemoryError))
    device = next(p.device for p in guard.plan.devices if p.device.uuid == uuid)
    result[f"pycuda {uuid}"] = guard.frameworks["pycuda"].usage(device).held
    context.pop()
for uuid, i in ordinals.items():
    with tf.device(f"GPU:{i}"):
        keep.append(fill(lambda: tf.zeros((64 * MIB // 4,), tf.float32), tf.errors.ResourceExhaustedError))
    result[f"tensorflow {uuid}"] = tf.config.experimental.get_memory_info(f"GPU:{i}")["peak"]
reading = memguard.ledger()
result["sums"] = [sum(r.bytes for r in part.rows) - part.device.total for part in reading.devices]
result["process"] = {part.device.uuid: part.process for part in reading.devices}
result["limits"] = {part.device.uuid: part.limit for part in reading.devices}
""",
        env={"CUDA_VISIBLE_DEVICES": order},
        timeout=240,
    )
    assert found["limits"][GPUS[0]] == 8 << 30
    assert found["limits"][GPUS[1]] == 20 << 30
    for uuid in GPUS[:2]:
        for framework in ("torch", "pycuda", "tensorflow"):
            held, cap = found[f"{framework} {uuid}"], found["caps"][uuid][framework]
            assert cap - (80 << 20) <= held <= cap, (framework, uuid, held, cap)
        assert found["process"][uuid] <= found["limits"][uuid]
    assert found["sums"] == [0, 0]


def test_a_budget_makes_no_context_on_a_gpu_that_nobody_uses(run: Run) -> None:
    found = run(
        f"FIRST = {GPUS[0]!r}\n"
        + BUDGET
        + """
memguard.init(BUDGET)
import torch
x = torch.zeros(1, device="cuda:0")
result["process"] = [part.process for part in memguard.ledger().devices]
"""
    )
    assert found["process"][0] > 0 and found["process"][1] == 0


def test_hiding_one_gpu_leaves_it_out_of_the_plan(run: Run) -> None:
    found = run(
        """
guard = memguard.init({"version": 1, "frameworks": {"torch": {"share": "10%"}}})
result["uuids"] = [part.device.uuid for part in guard.plan.devices]
result["ordinals"] = [part.device.ordinal for part in guard.plan.devices]
""",
        env={"CUDA_VISIBLE_DEVICES": "1"},
    )
    assert found["uuids"] == [GPUS[1]] and found["ordinals"] == [0]


def test_a_gpu_named_by_ordinal_is_cudas(run: Run) -> None:
    found = run(
        """
guard = memguard.init({"version": 1, "device": {"limit": "20GiB"}, "devices": {"0": {"limit": "8GiB"}},
                       "frameworks": {"torch": {"share": "10%"}}})
result["limits"] = {part.device.uuid: part.limit for part in guard.plan.devices}
""",
        env={"CUDA_VISIBLE_DEVICES": "1,0"},
    )
    assert found["limits"] == {GPUS[1]: 8 << 30, GPUS[0]: 20 << 30}


@pytest.mark.parametrize("order", ["0,1", "1,0"])
def test_cupy_jax_and_numba_stop_at_the_cap_of_the_gpu_they_are_on(run: Run, order: str) -> None:
    found = run(
        f"FIRST = {GPUS[0]!r}\n"
        + """
guard = memguard.init({"version": 1, "device": {"limit": "20GiB"}, "devices": {FIRST: {"limit": "8GiB"}},
                       "frameworks": {"cupy": {"share": "40%"}, "jax": {"share": "30%"}, "numba": {"share": "20%"}}})
import cupy, jax, numpy as np
from numba import cuda
caps = {part.device.uuid: dict(part.caps) for part in guard.plan.devices}
def fill(take, native):
    live = []
    try:
        while True: live.append(take())
    except native:
        return live
keep = []
for part in guard.plan.devices:
    i, uuid = part.device.ordinal, part.device.uuid
    with cupy.cuda.Device(i):
        keep.append(fill(lambda: cupy.empty(64 * MIB, cupy.uint8), cupy.cuda.memory.OutOfMemoryError))
    with cuda.gpus[i]:
        keep.append(fill(lambda: cuda.device_array(64 * MIB, np.uint8), cuda.cudadrv.driver.CudaAPIError))
    block = np.zeros(64 * MIB, np.uint8)
    gpu = next(d for d in jax.local_devices() if d.local_hardware_id == i)
    keep.append(fill(lambda: jax.device_put(block, gpu).block_until_ready(), jax.errors.JaxRuntimeError))
for part in memguard.ledger().devices:
    known = [row.bytes for row in part.rows if row.bytes is not None]
    result[part.device.uuid] = {
        "held": {name: part.row(name).bytes for name in ("cupy", "jax", "numba")},
        "caps": caps[part.device.uuid], "sum": sum(known) - part.device.total,
        "unaccounted": part.row("unaccounted").bytes, "process": part.process, "limit": part.limit,
    }
""",
        env={"CUDA_VISIBLE_DEVICES": order},
        timeout=240,
    )
    assert set(GPUS) <= set(found)
    for uuid in GPUS:
        one = found[uuid]
        # JAX takes one fraction for all GPUs: that of its smallest cap.
        least = min(found[other]["caps"]["jax"] for other in GPUS)
        wanted = {"cupy": one["caps"]["cupy"], "numba": one["caps"]["numba"], "jax": least}
        for name, cap in wanted.items():
            assert cap - (128 << 20) <= one["held"][name] <= cap, (uuid, name, one)
        assert one["sum"] == 0 and abs(one["unaccounted"]) <= 64 << 20 and one["process"] <= one["limit"]

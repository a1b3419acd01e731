"""On a real GPU: no second context unless asked for, one that is there explained, shared memory counted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
MIB, GIB = 1 << 20, 1 << 30
CONTEXT = 518 * MIB
ROOM = 64 * MIB
BUDGET = """
def budget(**pycuda):
    return {"version": 1, "device": {"limit": "24GiB"}, "frameworks": {
        "torch": {"limit": "6GiB"}, "tensorflow": {"limit": "6GiB"}, "pycuda": {"limit": "2GiB", **pycuda}}}
def rows(ledger=None):
    part = (ledger or memguard.ledger()).devices[0]
    result.setdefault("sums", []).append(sum(row.bytes or 0 for row in part.rows) - part.device.total)
    return {row.name: [row.bytes, row.note, row.lent] for row in part.rows} | {"process": part.process}
KERNEL = "__global__ void add(float *a) { a[threadIdx.x] += 1.0f; }"
"""


def exact(found: dict[str, Any]) -> None:
    assert not any(found["sums"]), "rows add up to NVML's total to the byte"


@pytest.mark.parametrize("options", ["", "context='primary'"])
def test_autoinit_under_a_budget_adds_no_context(run: Run, options: str) -> None:
    found = run(
        BUDGET
        + f"""
guard = memguard.init(budget({options}))
import torch
torch.zeros(1, device="cuda")
before = rows()
import pycuda.autoinit, pycuda.driver as drv
array = drv.mem_alloc(MIB)
result.update(before=before, after=rows(), held=guard.frameworks["pycuda"].usage(guard.plan.devices[0].device).held)
"""
    )
    exact(found)
    assert found["after"]["process"] - found["before"]["process"] <= found["held"] + 4 * MIB
    assert "second context" not in found["after"] and abs(found["after"]["unaccounted"][0]) <= ROOM


def test_the_opt_out_adds_a_context_and_the_ledger_says_so(run: Run) -> None:
    found = run(
        BUDGET
        + """
guard = memguard.init(budget(context="own"))
import torch
torch.zeros(1, device="cuda")
result["before"] = rows()
import pycuda.autoinit, pycuda.driver as drv
result["after"] = rows()
array = drv.mem_alloc(256 * MIB)
result["used"] = rows()
try:
    drv.mem_alloc(2 * GIB)
except drv.MemoryError:
    result["refused"] = True
result["reserve"] = guard.plan.devices[0].reserve
"""
    )
    exact(found)
    before, after, used = (found[name] for name in ("before", "after", "used"))
    assert abs(after["process"] - before["process"] - CONTEXT) <= 32 * MIB and "second context" not in before
    size, note, _ = after["second context"]
    assert abs(size - CONTEXT) <= 32 * MIB and "made by pycuda.autoinit" in note and "measured on an H200" in note
    for rows in (before, after, used):
        assert abs(rows["unaccounted"][0]) <= ROOM, rows
    assert used["second context"][0] == size and used["pycuda"][0] >= 256 * MIB and found["refused"]
    assert after["overhead"][0] + size <= found["reserve"], "reserve: auto has room for it"


def test_a_context_made_before_init_is_found(run: Run) -> None:
    found = run(
        BUDGET
        + """
import torch
torch.zeros(1, device="cuda")
import pycuda.autoinit
guard = memguard.init(budget())
result["rows"] = rows()
result["again"] = rows()
"""
    )
    exact(found)
    for rows in (found["rows"], found["again"]):
        size, note, _ = rows["second context"]
        assert abs(size - CONTEXT) <= 32 * MIB and "made by pycuda.autoinit" in note
        assert abs(rows["unaccounted"][0]) <= ROOM, rows


def test_a_context_made_through_the_driver_is_found_and_leaves_with_its_memory(run: Run) -> None:
    found = run(
        BUDGET
        + """
import ctypes
guard = memguard.init(budget())
import torch
torch.zeros(1, device="cuda")
result["before"] = rows()
cuda, context, popped = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
result["made"] = cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0)
result["with"] = rows()
cuda.cuCtxPopCurrent_v2(ctypes.byref(popped))
result["unseen"] = rows()
cuda.cuCtxDestroy_v2(context)
result["after"] = rows()
torch.zeros(1, device="cuda")
"""
    )
    exact(found)
    assert found["made"] == 0 and "second context" not in found["before"]
    for name in ("with", "unseen"):
        size, note, _ = found[name]["second context"]
        assert abs(size - CONTEXT) <= 32 * MIB and "made by something unknown" in note
        assert abs(found[name]["unaccounted"][0]) <= ROOM, found[name]
    assert "second context" not in found["after"] and abs(found["after"]["unaccounted"][0]) <= ROOM


def test_a_destroyed_contexts_pool_is_not_used_for_the_next(run: Run) -> None:
    """The next context may get the handle of the last."""
    found = run(
        BUDGET
        + """
guard = memguard.init(budget(context="own"))
import numpy as np, pycuda.driver as drv
drv.init()
handles, sums = [], []
for n in range(4):
    context = drv.Device(0).make_context()
    handles.append(context.handle)
    array = drv.mem_alloc(4000)
    drv.memcpy_htod(array, np.full(1000, n, np.float32))
    back = np.empty(1000, np.float32)
    drv.memcpy_dtoh(back, array)
    sums.append(float(back.sum()))
    del array
    context.pop(); context.detach()
result.update(sums=sums, handles=len(set(handles)))
"""
    )
    assert found["sums"] == [0.0, 1000.0, 2000.0, 3000.0]


@pytest.mark.parametrize("budget", [False, True])
def test_a_block_on_four_threads_beside_torch_and_tensorflow(run: Run, budget: bool) -> None:
    found = run(
        BUDGET
        + ("guard = memguard.init(budget())\n" if budget else "")
        + """
import threading
import torch, tensorflow as tf, numpy as np
with tf.device("/GPU:0"):
    result["tf"] = float(tf.reduce_sum(tf.ones(1000)))
torch.ones(1000, device="cuda").sum().item()
import pycuda.driver as drv
errors, sums, together = [], [], threading.Barrier(4)
def work(number):
    try:
        for turn in range(50):
            with memguard.exchange.pycuda_context() as context:
                if not turn: together.wait(60)
                array = drv.mem_alloc(MIB << (turn % 4))
                drv.memcpy_htod(array, np.full(1000, number + turn, np.float32))
                back = np.empty(1000, np.float32)
                drv.memcpy_dtoh(back, array)
                if not np.all(back == number + turn): errors.append("wrong values")
                with memguard.exchange.pycuda_context() as again:
                    if again.handle != context.handle: errors.append("another context")
            sums.append(float((torch.ones(1000, device="cuda") * 2).sum()))
            del array                       # after the block, on its own thread
    except BaseException as error:
        errors.append(repr(error))
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
result.update(errors=errors, added=len(sums), right=set(sums) == {2000.0})
if "guard" in globals():
    memguard.trim()
    result["rows"] = rows()
""",
        timeout=300,
        env={"TF_FORCE_GPU_ALLOW_GROWTH": "true"},
    )
    assert found["errors"] == [] and found["added"] == 200 and found["right"]
    assert "out-of-thread" not in found["stderr"] and "PyCUDA" not in found["stderr"], found["stderr"]
    if budget:
        exact(found)
        assert "second context" not in found["rows"] and abs(found["rows"]["unaccounted"][0]) <= ROOM


@pytest.mark.parametrize(
    "code",
    [
        "memguard.exchange.pycuda_context().__enter__()",
        "import pycuda.autoinit\nmemguard.exchange.pycuda_context().__enter__()",
        "memguard.exchange.pycuda_context().__enter__()\nimport pycuda.autoinit",
        "import torch\ntorch.ones(1, device='cuda')\nblock = memguard.exchange.pycuda_context()\nblock.__enter__()\n"
        "import pycuda.driver as drv\nkeep = drv.mem_alloc(1 << 20)",
        "import threading\nthread = threading.Thread(target=memguard.exchange.pycuda_context().__enter__)\n"
        "thread.start(); thread.join()",
    ],
)
def test_a_block_left_open_at_exit_aborts_nothing(run: Run, code: str) -> None:
    found = run(code)  # exit code 0
    assert "not empty upon module cleanup" not in found["stderr"]


def test_a_context_left_on_the_stack_does_abort(run: Run) -> None:
    """The control: without it the test above proves nothing."""
    run("import pycuda.driver as drv\ndrv.init()\ndrv.Device(0).retain_primary_context().push()", rc=-6)


def test_what_torch_lends_is_in_its_row_and_charged_once(run: Run) -> None:
    found = run(
        BUDGET
        + """
guard = memguard.init(budget())
import gc, torch, tensorflow as tf
x = torch.ones(GIB // 4, device="cuda")
with tf.device("/GPU:0"):
    tf.reduce_sum(tf.ones(10)).numpy()
result["before"] = rows()
y = memguard.exchange.to(x, "tensorflow")
z = memguard.exchange.to(x, "tensorflow")
result["lent"] = rows()
result["text"] = str(memguard.ledger())
del y, z
gc.collect()
result["after"] = rows()
"""
    )
    exact(found)
    assert [found[name]["torch"][2] for name in ("before", "lent", "after")] == [None, GIB, None]
    assert found["lent"]["torch"][1] == "lends 1.00 GiB: to tensorflow 1.00 GiB"
    assert "* torch: lends 1.00 GiB: to tensorflow 1.00 GiB" in found["text"]
    assert found["lent"]["torch"][0] == found["before"]["torch"][0], "charged once, to the producer"
    for name in ("before", "lent", "after"):
        assert abs(found[name]["process"] - found["before"]["process"]) <= 4 * MIB
        assert abs(found[name]["unaccounted"][0]) <= ROOM


@pytest.mark.parametrize("way", ["block", "own"])
def test_the_example_of_the_contexts_runs(run: Run, way: str) -> None:
    """Its other ways are in test_guard.py."""
    found = run(
        f"""
import os, subprocess, sys
path = os.path.join(os.environ["MEMGUARD_ROOT"], "examples", "tensorflow_pycuda_contexts.py")
done = subprocess.run([sys.executable, path, {way!r}], capture_output=True, text=True, timeout=200)
result.update(rc=done.returncode, out=done.stdout[-3000:], err=done.stderr[-2000:])
""",
        timeout=240,
    )
    assert found["rc"] == 0, found
    assert ("second context" in found["out"]) == (way == "own"), found["out"]

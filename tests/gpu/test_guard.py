"""The guard on a real GPU: admission, resizing, trimming, forks, and what the ledger says about memory of others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., dict[str, Any]]
BUDGET = """
BUDGET = {"version": 1, "device": {"limit": "16GiB"},
          "frameworks": {"torch": {"share": "50%"}, "pycuda": {"limit": "2GiB"}}}
"""


def test_require_refuses_before_the_allocation_fails_and_allows_what_fits(run: Run) -> None:
    found = run(
        BUDGET
        + """
guard = memguard.init(BUDGET)
import torch
cap = guard.plan.devices[0].caps["torch"]
x = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
memguard.require("torch", "2GiB")
room = cap - torch.cuda.memory_reserved()
memguard.require("torch", room)
try:
    memguard.require("torch", room + 1)
    result["refused"] = False
except memguard.BudgetExceeded as error:
    result["refused"], result["text"] = True, str(error)
y = torch.empty(room // (2 * MIB) * 2 * MIB, dtype=torch.uint8, device="cuda")
try:
    z = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    result["allocator_agrees"] = False
except torch.OutOfMemoryError:
    result["allocator_agrees"] = True
"""
    )
    assert found["refused"] and found["allocator_agrees"]
    assert "torch needs" in found["text"] and "fix:" in found["text"]


def test_resize_raises_and_lowers_a_live_torch(run: Run) -> None:
    found = run(
        BUDGET
        + """
guard = memguard.init(BUDGET)
import torch
x = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
def fill():
    more = []
    try:
        while True: more.append(torch.empty(256 * MIB, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        return torch.cuda.memory_reserved()
memguard.resize("torch", "5GiB"); result["at_5"] = fill()
memguard.resize("torch", "6GiB"); result["at_6"] = fill()
memguard.resize("torch", "3GiB"); result["held_after_lowering"] = torch.cuda.memory_reserved()
result["notes"] = memguard.ledger().notes
del x
memguard.trim(); result["at_3"] = fill()
"""
    )
    assert found["at_5"] == 5 << 30 and found["at_6"] == 6 << 30 and found["at_3"] == 3 << 30
    assert found["held_after_lowering"] == 4 << 30  # the cache went, the live arrays stay
    assert any("above its cap" in note for note in found["notes"])


def test_pycuda_cap_holds_for_every_way_to_allocate(run: Run) -> None:
    found = run(
        BUDGET
        + """
import pycuda.driver as drv, pycuda.gpuarray as ga, pycuda.tools, numpy as np
raw = drv.mem_alloc
guard = memguard.init(BUDGET)
import pycuda.autoinit
ways = {
    "mem_alloc": lambda n: drv.mem_alloc(n),
    "pitch": lambda n: drv.mem_alloc_pitch(1 << 20, n >> 20, 4),
    "gpuarray": lambda n: ga.empty(n, np.uint8),
    "zeros": lambda n: ga.zeros(n, np.uint8),
    "own pool": pycuda.tools.DeviceMemoryPool().allocate,
}
device = guard.plan.devices[0].device
for name, way in ways.items():
    live = []
    try:
        for _ in range(100): live.append(way(100 * MIB))
        result[name] = "not refused"
    except drv.MemoryError:
        usage = guard.frameworks["pycuda"].usage(device)
        result[name] = [len(live), usage.held]
    del live
    memguard.trim()
result["after"] = guard.frameworks["pycuda"].usage(device).held
memguard.shutdown()
result["restored"] = drv.mem_alloc is raw and ga.zeros.__defaults__[1] is raw
"""
    )
    for way in ("mem_alloc", "pitch", "gpuarray", "zeros", "own pool"):
        count, held = found[way]
        assert count >= 17 and held <= 2 << 30, (way, found[way])
    assert found["restored"]


def test_autoinit_and_make_context_add_no_second_context(run: Run) -> None:
    found = run(
        BUDGET
        + """
guard = memguard.init(BUDGET)
import torch
x = torch.zeros(1, device="cuda")
before = memguard.ledger().devices[0].process
import pycuda.autoinit, pycuda.driver as drv
context = drv.Device(0).make_context(); context.pop()
result["added"] = memguard.ledger().devices[0].process - before
"""
    )
    assert found["added"] <= 4 << 20


def test_a_raw_allocation_shows_as_unaccounted_and_the_rows_still_add_up(run: Run) -> None:
    found = run(
        BUDGET
        + """
guard = memguard.init(BUDGET)
import torch, ctypes
x = torch.zeros(512, 512, device="cuda"); (x @ x).sum().item()
first = memguard.ledger().devices[0]
cuda, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64()
assert cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(512 * MIB)) == 0
second = memguard.ledger().devices[0]
result["grown"] = second.row("unaccounted").bytes - first.row("unaccounted").bytes
result["sums"] = [sum(r.bytes for r in part.rows) - part.device.total for part in (first, second)]
cuda.cuMemFree_v2(pointer)
result["back"] = memguard.ledger().devices[0].row("unaccounted").bytes - first.row("unaccounted").bytes
"""
    )
    assert found["grown"] == 512 << 20 and found["back"] == 0 and found["sums"] == [0, 0]


@pytest.mark.whole_card
def test_a_siblings_cache_is_trimmed_for_a_request_that_the_card_cannot_serve_otherwise(run: Run) -> None:
    found = run(
        """
import ctypes, torch
guard = memguard.init({"version": 1, "device": {"limit": "100%"},
                       "frameworks": {"torch": {"share": "60%"}, "pycuda": {"share": "40%"}}})
import pycuda.autoinit, pycuda.driver as drv
x = torch.empty(20 * GIB, dtype=torch.uint8, device="cuda"); del x     # 20 GiB of cache
device = guard.plan.devices[0].device
free = guard.host.memory(device).free
other, size = ctypes.c_uint64(), ctypes.c_size_t(free - 4 * GIB)    # the card is nearly full
assert ctypes.CDLL("libcuda.so.1").cuMemAlloc_v2(ctypes.byref(other), size) == 0
memguard.require("pycuda", "8GiB")
result["torch_held"] = torch.cuda.memory_reserved()
y = drv.mem_alloc(8 * GIB)
try:
    memguard.require("pycuda", "20GiB")                                # within its cap on a card of 80 GB too
    result["text"] = ""
except memguard.BudgetExceeded as error:
    result["text"] = str(error)
"""
    )
    assert found["torch_held"] < 1 << 30
    assert "card has only" in found["text"]


def test_a_forked_child_is_inert_and_the_parent_goes_on(run: Run) -> None:
    found = run(
        BUDGET
        + """
guard = memguard.init(BUDGET)
read, write = os.pipe()
pid = os.fork()
if pid == 0:
    try:
        memguard.ledger()
        answer = b"active"
    except memguard.NotActive:
        answer = b"inert"
    import sys
    hooks = [f for f in sys.meta_path if type(f).__module__.startswith("memguard")]
    os.write(write, answer + (b" hooked" if hooks else b""))
    os._exit(0)
os.waitpid(pid, 0)
result["child"] = os.read(read, 100).decode()
import torch
try:
    torch.empty(10 * GIB, dtype=torch.uint8, device="cuda")
    result["parent"] = "not capped"
except torch.OutOfMemoryError:
    result["parent"] = "capped"
"""
    )
    assert found["child"] == "inert" and found["parent"] == "capped"


def test_tensorflow_with_the_async_allocator_is_refused(run: Run) -> None:
    found = run(
        """
memguard.init({"version": 1, "frameworks": {"tensorflow": {"limit": "2GiB"}}})
try:
    import tensorflow
    result["text"] = ""
except memguard.CapNotApplied as error:
    result["text"] = str(error)
""",
        env={"TF_GPU_ALLOCATOR": "cuda_malloc_async"},
    )
    assert "cuda_malloc_async ignores memory_limit" in found["text"]


def test_tensorflow_without_growth_takes_its_cap_at_once_and_its_row_is_exact(run: Run) -> None:
    found = run(
        """
memguard.init({"version": 1, "device": {"limit": "8GiB"},
               "frameworks": {"tensorflow": {"limit": "3GiB", "growth": False}}})
import tensorflow as tf
tf.zeros((4,)).numpy()
part = memguard.ledger().devices[0]
row = part.row("tensorflow")
result.update(held=row.bytes, at_least=row.at_least, process=part.process, unaccounted=part.row("unaccounted").bytes)
"""
    )
    assert found["held"] == 3 << 30 and found["at_least"] is None
    assert found["process"] >= 3 << 30 and abs(found["unaccounted"]) <= 64 << 20


def test_a_failing_init_leaves_nothing_applied(run: Run) -> None:
    found = run(
        """
import torch, sys
import tensorflow as tf
x = torch.zeros(1, device="cuda")
with tf.device("GPU:0"): tf.zeros((4,)).numpy()                       # live: its cap must fail
before = torch._C._cuda_getMemoryFraction(0)
try:
    memguard.init({"version": 1, "frameworks": {"torch": {"share": "10%"}, "tensorflow": {"share": "10%"}}})
except memguard.CapNotApplied as error:
    result["text"] = str(error)
result["same"] = torch._C._cuda_getMemoryFraction(0) == before
result["hooks"] = [type(f).__module__ for f in sys.meta_path if type(f).__module__.startswith("memguard")]
try:
    memguard.ledger()
    result["active"] = True
except memguard.NotActive:
    result["active"] = False
""",
        env={"TF_FORCE_GPU_ALLOW_GROWTH": "true"},
    )
    assert "it was live before" in found["text"]
    assert found["same"] and not found["hooks"] and not found["active"]


def test_visible_devices_that_hide_every_gpu_are_named(run: Run) -> None:
    found = run(
        """
try:
    memguard.init({"version": 1, "frameworks": {"torch": {"share": "10%"}}})
except memguard.DeviceError as error:
    result["text"] = str(error)
""",
        env={"CUDA_VISIBLE_DEVICES": ""},
    )
    assert "CUDA shows this process no GPU" in found["text"]


def test_run_activates_in_the_child(tmp_path: Path) -> None:
    (tmp_path / "budget.yaml").write_text("version: 1\nframeworks:\n  torch: {limit: 1GiB}\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "try:\n    torch.empty(2 << 30, dtype=torch.uint8, device='cuda')\n"
        "except torch.OutOfMemoryError:\n    raise SystemExit(7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "memguard", "run", "-c", "budget.yaml", "--", sys.executable, str(script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**__import__("os").environ, "PYTHONPATH": f"{ROOT}:{__import__('os').environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert done.returncode == 7, done.stderr[-2000:]


@pytest.mark.parametrize("way", ["autoinit", "make-context", "limited"])
def test_the_tensorflow_pycuda_examples_run_in_one_context(way: str) -> None:
    done = _example("tensorflow_pycuda_contexts.py", way)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "kernel result: 32" in done.stdout


def test_the_mixed_workload_runs_and_ends_with_the_ledger() -> None:
    done = _example("mixed_workload.py")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "ledger before the work" in done.stdout and "ledger after the work" in done.stdout


def _example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    import os

    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True, text=True, timeout=180, env=environment,
    )  # fmt: skip


def test_pycuda_allocations_may_die_at_exit_or_on_another_thread(run: Run) -> None:
    found = run(
        BUDGET
        + """
import threading
guard = memguard.init(BUDGET)
import pycuda.autoinit, pycuda.driver as drv, pycuda.gpuarray as ga, numpy as np
at_exit = [drv.mem_alloc(64 * MIB), ga.zeros(1000, np.float32)]
box = [drv.mem_alloc(32 * MIB)]
memguard.trim()                                  # no idle block is left but the one that memguard keeps
thread = threading.Thread(target=box.clear)      # frees without a context
thread.start(); thread.join()
memguard.trim()
again = drv.mem_alloc(32 * MIB)
result["in_use"] = guard.frameworks["pycuda"].usage(guard.plan.devices[0].device).in_use
memguard.shutdown()
"""
    )
    assert 96 << 20 <= found["in_use"] <= 98 << 20  # and the process ended with exit code 0

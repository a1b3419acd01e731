"""Running again on a real GPU: what idles elsewhere serves the second run, and nothing of the first is alive in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
START = """
import logging
lines = []
class Lines(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("memguard").addHandler(Lines(logging.WARNING))
for name in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "TF_CONFIG"):
    os.environ.pop(name, None)
def own():
    import pynvml
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    return sum(p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid())
def retried():
    return [line for line in lines if "running again" in line]
"""
TORCH = "import torch\ndef of_torch(n): return torch.empty(n, dtype=torch.uint8, device='cuda')\n"
CUPY = "import cupy\ndef of_cupy(n): return cupy.empty(n, dtype=cupy.uint8)\n"


def test_a_cap_that_rises_serves_the_second_run(run: Run) -> None:
    """Elastic caps within 12 GiB: CuPy has borrowed 8 and only caches them. Plain, then in a retry."""
    found = run(
        START + TORCH + CUPY
        + """
shares = {"min": "1GiB", "max": "9GiB"}
memguard.init({"version": 1, "device": {"limit": "12GiB"}, "frameworks": {"torch": shares, "cupy": shares}})
of_torch(MIB), of_cupy(MIB)
def step():
    return len([of_torch(512 * MIB) for _ in range(16)])
def idle():
    pieces = [of_cupy(512 * MIB) for _ in range(15)]
idle()
try:
    result["plain"] = step()
except torch.OutOfMemoryError:
    result["plain"] = "refused"
memguard.trim("torch")
idle()
result["cached"] = cupy.get_default_memory_pool().total_bytes()
result["again"] = memguard.retry.call(step)
result["lines"] = retried()
"""
    )  # fmt: skip
    assert found["plain"] == "refused" and found["cached"] >= 7 << 30
    assert found["again"] == 16
    (line,) = found["lines"]
    assert "cupy gave back" in line and "torch's cap went from" in line and line.endswith("running again (1 of 1)")


FULL = """
cap = {"limit": "10GiB"}
memguard.init({"version": 1, "device": {"limit": "40GiB"}, "frameworks": {%r: cap, "cupy": cap}})
%s
of_cupy(MIB), take(MIB)
pieces = [of_cupy(GIB) for _ in range(8)]
del pieces
free = cupy.cuda.runtime.memGetInfo()[0]
rest = cupy.cuda.runtime.malloc(free - 2 * GIB)  # past every framework: only CuPy's cache can make room
ran = []
def step():
    ran.append(own())
    return take(4 * GIB)
try:
    step()
    result["plain"] = "served"
except Exception as error:
    result["plain"] = type(error).__name__
held = memguard.retry.call(step)
result["ran"], result["lines"] = len(ran), retried()
result["cached"] = cupy.get_default_memory_pool().free_bytes()
del held
"""
TAKERS = {
    "torch": TORCH + "take = of_torch",
    "jax": "import jax\n"
    "def take(n): return jax.numpy.zeros(n, dtype=jax.numpy.uint8).block_until_ready()",
    "tensorflow": "import tensorflow as tf\n"
    "def take(n):\n    with tf.device('GPU:0'): return tf.zeros([n], dtype=tf.uint8)",
}  # fmt: skip


@pytest.mark.whole_card
@pytest.mark.parametrize("name", TAKERS)
def test_a_full_card_serves_the_second_run(run: Run, name: str) -> None:
    """CuPy caches 8 GiB, 2 GiB are free, 4 are asked for. TensorFlow and JAX wait 10 s before each error."""
    found = run(START + CUPY + FULL % (name, TAKERS[name]), timeout=300)
    assert found["plain"] != "served"
    assert found["ran"] == 3, "once plain, twice in the retry"
    assert found["cached"] < 1 << 30
    assert "cupy gave back" in found["lines"][0], found["lines"]


def test_the_tensors_of_the_failed_run_are_gone_in_the_second(run: Run) -> None:
    found = run(
        START + TORCH
        + """
memguard.init({"version": 1, "device": {"limit": "12GiB"}, "frameworks": {"torch": {"limit": "6GiB"}}})
of_torch(MIB)
begun, nvml, caught = [], [], []
def forward(depth):
    kept = of_torch(GIB)
    return kept if depth == 0 else forward(depth - 1)
def step():
    begun.append(torch.cuda.memory_allocated())
    nvml.append(own())
    try:
        kept = [forward(2), of_torch(GIB)]
        of_torch((20 if len(begun) == 1 else 1) * GIB)
    except torch.OutOfMemoryError as error:
        local = kept
        caught.append(error)  # the program keeps it, as a logger may
        raise RuntimeError("the batch failed") from error
    return len(kept)
result["kept"] = memguard.retry.call(step)
result["begun"], result["nvml"] = begun, nvml
"""
    )  # fmt: skip
    assert found["kept"] == 2
    assert found["begun"][1] <= found["begun"][0] + (1 << 20), "to the byte, but for what libraries keep"
    assert found["nvml"][1] - found["nvml"][0] < 256 << 20, "and the driver has it"


def test_without_a_budget_too(run: Run) -> None:
    found = run(
        START + TORCH
        + """
begun = []
def step():
    begun.append(torch.cuda.memory_allocated())
    kept = of_torch(GIB)
    return len(of_torch((1 << 50) if len(begun) == 1 else GIB))
result["length"], result["begun"] = memguard.retry.call(step), begun
"""
    )  # fmt: skip
    assert found["length"] == 1 << 30 and found["begun"] == [0, 0]


def test_a_batch_that_fits_is_found_and_remembered(run: Run) -> None:
    found = run(
        START + TORCH
        + """
memguard.init({"version": 1, "device": {"limit": "12GiB"}, "frameworks": {"torch": {"limit": "6GiB"}}})
model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(8)]).cuda()
given = []
@memguard.retry(shrink="batch", floor=256, multiple=256)
def step(batch):
    given.append(batch)
    model.zero_grad()
    x = torch.randn(batch, 4096, device="cuda")
    model(x).square().mean().backward()
    return batch
result["fitted"] = step(1 << 17)
first = len(given)
step(1 << 17)
result["given"], result["second"] = given[:first], given[first:]
"""
    )  # fmt: skip
    assert found["given"][0] == 1 << 17 and len(found["given"]) > 1
    assert found["fitted"] == found["given"][-1] and found["second"] == [found["fitted"]]


def test_a_capture_is_not_run_again(run: Run) -> None:
    found = run(
        START + TORCH
        + """
memguard.init({"version": 1, "device": {"limit": "12GiB"}, "frameworks": {"torch": {"limit": "2GiB"}}})
x, ran = of_torch(MIB), []
def step():
    ran.append(1)
    return of_torch(8 * GIB)
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        memguard.retry.call(step)
except Exception as error:
    result["notes"] = getattr(error, "__notes__", []) + getattr(error.__context__, "__notes__", [])
result["ran"] = len(ran)
"""
    )  # fmt: skip
    assert found["ran"] == 1
    assert any("captures a CUDA graph" in note for note in found["notes"]), found["notes"]

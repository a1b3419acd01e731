"""Does CuPy's cap refuse only what would not have fitted, by the driver's pages as NVML counts them for this process?

At each refusal idle blocks are given back, and the same size is taken past CuPy's pool: what this process holds then,
less what it held before CuPy's first array, is what serving it would have come to. The control judges by twice the cap,
and must find such refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
CODE = """
import random, pynvml
CAP = 64 * MIB
JUDGED = {judged}
guard = memguard.init({{"version": 1, "device": {{"limit": "8GiB"}}, "frameworks": {{"cupy": {{"limit": CAP}}}}}})
import cupy
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByUUID(guard.plan.devices[0].device.uuid)
def own():
    return next(p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid())
pool, runtime = cupy.get_default_memory_pool(), cupy.cuda.runtime
first = cupy.empty(1, cupy.uint8)
del first
pool.free_all_blocks()
base, rng = own(), random.Random({seed})
live, wrong, refused, most = [], [], 0, 0
for _ in range(1500):
    size = round(2 ** rng.uniform({low}, {high}))
    try:
        live.append(cupy.cuda.alloc(size))
    except cupy.cuda.memory.OutOfMemoryError:
        refused += 1
        pool.free_all_blocks()
        before = own()
        address = runtime.malloc(size)
        needed = own() - base
        runtime.free(address)
        if needed <= JUDGED: wrong.append([size, pool.total_bytes(), (before - base), needed])
        rng.shuffle(live)
        del live[: rng.randint(1, len(live) or 1)]
    if rng.random() < 0.25 and live: live.pop(rng.randrange(len(live)))
    most = max(most, pool.total_bytes())
result.update(refused=refused, wrong=wrong, most=most, cap=CAP)
"""


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("low", "high"), [(17, 20), (20, 23.2), (9, 22.5)])
def test_nothing_is_refused_that_would_have_fitted(run: Run, seed: int, low: float, high: float) -> None:
    found = run(CODE.format(judged="CAP", seed=seed, low=low, high=high))
    assert found["refused"] >= 5 and found["most"] <= found["cap"]
    assert found["wrong"] == [], f"{len(found['wrong'])} of {found['refused']}: size, counted, held, needed"


def test_the_judge_finds_a_refusal_that_would_have_fitted(run: Run) -> None:
    """The control: against twice the cap each refusal is one."""
    found = run(CODE.format(judged="2 * CAP", seed=1, low=20, high=23.2))
    assert len(found["wrong"]) == found["refused"] >= 5

"""Every framework on a real GPU: six under one budget, in every order, and for five minutes at their caps.

    python benchmarks/all_frameworks.py -o benchmarks/results/h200-all-frameworks.json

Every scenario runs in a process of its own, several at once; for each another one samples NVML, every 50 ms or as often
as it can. `--only` takes names of scenarios, separated by semicolons, and `--merge` the others from another run's JSON.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _independent import by_cupti, counted, emptied, raw_memory, refusals
from _listed import COUNTED
from _run import (
    GIB,
    MIB,
    SIX,
    SIX_LIMIT,
    budget_of_six,
    conclude,
    emit,
    header,
    merged,
    put_row_stack_back,
    run_scenario,
)
from main_job import SEED, bfc_refusals, held_of, reading, row_of, work_pycuda, work_tensorflow, work_torch

NAMES = tuple(SIX)
PAIRS = tuple(itertools.permutations(sorted(NAMES), 2))
LOOP_SECONDS = float(os.environ.get("MEMGUARD_LOOP_SECONDS", "300"))
WHEN = ("later", "imported", "live")
AT_ONCE = 6
INTERVAL = 0.02
"""Seconds between two samples of a process: with 0.05 they were up to 109 ms apart on a busy machine."""


def load(name: str) -> None:
    """Import the framework as a program does."""
    if name == "pycuda":
        import pycuda.autoinit  # noqa: F401
    elif name == "numba":
        import numba.cuda  # noqa: F401
    else:
        __import__(name)


def work_cupy() -> None:
    import cupy

    a = cupy.ones((1024, 1024), dtype=cupy.float32)
    assert float((a @ a)[0, 0]) == 1024.0
    cupy.linalg.svd(a[:256, :256] + cupy.eye(256, dtype=cupy.float32))


def work_jax() -> None:
    import jax
    import jax.numpy as jnp

    a = jnp.ones((1024, 1024))
    assert float((a @ a)[0, 0]) == 1024.0
    kernel = jnp.ones((8, 3, 3, 3))
    jax.lax.conv(jnp.ones((1, 3, 64, 64)), kernel, (1, 1), "SAME").block_until_ready()
    jnp.linalg.svd(a[:256, :256] + jnp.eye(256))[1].block_until_ready()


def work_numba() -> None:
    import numpy as np
    from numba import cuda

    put_row_stack_back()

    @cuda.jit
    def double(values):  # type: ignore[no-untyped-def]
        i = cuda.grid(1)
        if i < values.size:
            values[i] *= 2

    values = cuda.to_device(np.ones(1000, dtype=np.float32))
    double[8, 128](values)
    assert values.copy_to_host().sum() == 2000.0


WORK: dict[str, Callable[[], None]] = {
    "tensorflow": work_tensorflow,
    "torch": work_torch,
    "jax": work_jax,
    "cupy": work_cupy,
    "pycuda": work_pycuda,
    "numba": work_numba,
}


def allocator(name: str) -> tuple[Callable[[int], Any], type[BaseException]]:
    """How to take n bytes, and the framework's own out-of-memory error."""
    if name == "torch":
        import torch

        return (lambda n: torch.empty(n, dtype=torch.uint8, device="cuda")), torch.OutOfMemoryError
    if name == "tensorflow":
        import tensorflow as tf

        def allocate(n: int) -> Any:
            with tf.device("GPU:0"):
                return tf.zeros((max(n // 4, 1),), tf.float32)

        return allocate, tf.errors.ResourceExhaustedError
    if name == "jax":
        import jax
        import numpy as np

        source = np.zeros(300 * MIB, np.uint8)
        return (lambda n: jax.device_put(source[:n]).block_until_ready()), jax.errors.JaxRuntimeError
    if name == "cupy":
        import cupy

        return (lambda n: cupy.empty(n, cupy.uint8)), cupy.cuda.memory.OutOfMemoryError
    if name == "pycuda":
        import pycuda.driver as drv

        return (lambda n: drv.mem_alloc(n)), drv.MemoryError
    import numpy as np
    from numba import cuda
    from numba.cuda.cudadrv.driver import CudaAPIError

    return (lambda n: cuda.device_array(n, np.uint8)), CudaAPIError


class Driven:
    """One framework at its cap: requests until it refuses, and what it holds by its own count."""

    def __init__(self, name: str, cap: int, seed: int) -> None:
        import memguard._api

        guard = memguard._api.current()
        self.name, self.cap, self.rng = name, cap, random.Random(seed)
        self.take, self.native = allocator(name)
        self.framework, self.device = guard.frameworks[name], guard.plan.devices[0].device
        self.live: list[Any] = []
        self.most = 0
        self.refusals: list[dict[str, Any]] = []

    def held(self) -> int:
        usage = self.framework.usage(self.device)
        if usage is None:
            return 0
        size = usage.held if usage.held is not None else usage.held_at_least
        return size or 0

    def would_fit(self, size: int) -> bool | None:
        """By JAX's own figures, at its refusal. TensorFlow's log says it, and `refusals` tries the others."""
        if self.name != "jax":
            return None
        import jax

        stats = jax.local_devices()[0].memory_stats()
        rounded = -(-size // 256) * 256
        return bool(rounded <= max(stats["bytes_limit"] - stats["pool_bytes"], stats["largest_free_block_bytes"]))

    def until_refused(self, low: int, high: int) -> None:
        count = 0
        while True:
            size = self.rng.randint(low, high)
            try:
                self.live.append(self.take(size))
            except Exception as error:
                self.refusals.append(
                    {
                        "allocations": count,
                        "refused_bytes": size,
                        "exception": f"{type(error).__module__}.{type(error).__qualname__}",
                        "native": isinstance(error, self.native),
                        "held": self.held(),
                        "would_have_fitted": self.would_fit(size),
                        "text": str(error)[:160],
                    }
                )
                return
            count += 1
            self.most = max(self.most, self.held())
            if count > 100_000:
                raise AssertionError(f"{self.name}: {count} allocations and no refusal")

    def fill(self) -> None:
        self.until_refused(1 * MIB, 300 * MIB)
        self.until_refused(1, 1 * MIB)

    def free(self, count: int | None = None) -> None:
        if count is None:
            self.live.clear()
        else:
            self.rng.shuffle(self.live)
            del self.live[:count]

    def swap(self) -> None:
        """Free one array and take as much again, which fits where it was."""
        one = self.live.pop(self.rng.randrange(len(self.live)))
        size = one.nbytes if hasattr(one, "nbytes") else int(one.shape[0]) * 4  # JAX, TensorFlow
        del one
        self.live.append(self.take(size))

    def summary(self) -> dict[str, Any]:
        return {"cap": self.cap, "most_held": max(self.most, self.held()), "refusals": self.refusals}


def all_live(config: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    """All six imported, TensorFlow first, and each used; the guard and a reading after each step."""
    import memguard

    guard = memguard.init(config)
    readings = [reading("init")]
    for name in NAMES:
        load(name)
    readings.append(reading("imported"))
    for name, work in WORK.items():
        work()
        readings.append(reading(f"{name} live"))
    return guard, readings


def together() -> dict[str, Any]:
    """All six: each filled in turn, then each emptied and driven to its refusal again while the other five are full."""
    import memguard

    guard, readings = all_live(budget_of_six())
    caps = dict(guard.plan.devices[0].caps)
    driven = {name: Driven(name, caps[name], SEED + i) for i, name in enumerate(NAMES)}
    for name, one in driven.items():
        one.fill()
        readings.append(reading(f"{name} full"))
    time.sleep(1)
    for name, one in driven.items():
        one.free()
        one.fill()
        readings.append(reading(f"{name} full again, the other five full"))
    time.sleep(1)
    in_turn = {}
    for name in COUNTED:
        in_turn[name] = emptied(name, lambda name=name: held_of(name), lambda name=name: (
            driven[name].free(), memguard.trim(name)
        ), lambda: reading("emptied")["overhead"])  # fmt: skip
    for one in driven.values():
        one.free()
    returned = memguard.trim()
    readings.append(reading("freed and trimmed"))
    raw = raw_memory(lambda: reading("raw memory")["unaccounted"])
    for work in WORK.values():
        work()
    readings.append(reading("works on"))
    notes = [*guard.notes, *memguard.ledger().notes]
    outcome = {name: one.summary() for name, one in driven.items()}
    return {
        "caps": caps,
        "sum_of_caps": sum(caps.values()),
        "reserve": guard.plan.devices[0].reserve,
        "driven": outcome,
        "readings": readings,
        "emptied": in_turn,
        "raw": raw,
        "trim_returned": returned,
        "notes": list(dict.fromkeys(notes)),
        "stays": memguard.shutdown(),
    }


def grown() -> dict[str, Any]:
    """All six live: large and small arrays of those that give back what is freed, by the ledger and by the driver."""
    import memguard

    all_live(budget_of_six(growth=False))
    return {
        name: counted(allocator(name)[0], lambda name=name: row_of(name), lambda name=name: memguard.trim(name))
        for name in COUNTED
    }


def pair(first: str, second: str) -> dict[str, Any]:
    """Two frameworks imported in this order: each works, and each stops at its cap of 1 GiB."""
    import memguard

    cap = GIB
    config = {
        "version": 1,
        "device": {"limit": "4GiB"},
        "frameworks": {name: {"limit": cap} for name in (first, second)},
    }
    guard = memguard.init(config)
    load(first)
    load(second)
    WORK[first]()
    WORK[second]()
    found: dict[str, Any] = {}
    for name in (first, second):
        one = Driven(name, cap, SEED)
        one.until_refused(64 * MIB, 64 * MIB)
        found[name] = {**one.summary(), "allocated": 64 * MIB * len(one.live)}
        one.free()
    WORK[second]()
    WORK[first]()
    part = memguard.ledger().devices[0]
    enforcement = {name: part.row(name).enforcement for name in (first, second)}
    known = [row.bytes for row in part.rows if row.bytes is not None]
    return {
        "found": found,
        "enforcement": enforcement,
        "sum_minus_total": sum(known) - part.device.total,
        "unaccounted": part.row("unaccounted").bytes,
        "overhead": part.row("overhead").bytes,
        "reserve": guard.plan.devices[0].reserve,
        "notes": guard.notes,
    }


def loop() -> dict[str, Any]:
    """All six at their caps for five minutes, freeing and asking in turn, refusals included; a ledger each second.

    TensorFlow without growth: then it says what it holds, and nothing of its pool is in `unaccounted`.
    """
    import memguard

    guard, readings = all_live(budget_of_six(growth=False))
    caps = guard.plan.devices[0].caps
    driven = {name: Driven(name, caps[name], SEED + 100 + i) for i, name in enumerate(NAMES)}
    for one in driven.values():
        one.fill()
    series = [reading("all full")]
    started = time.monotonic()
    refused = dict.fromkeys(NAMES, 0)
    slow_after = dict.fromkeys(("tensorflow", "jax"), 0.0)  # a refusal takes each of them ten seconds
    following = 0.0
    allocated = 0

    def look() -> None:
        """A reading, if the last one is a second old: asked after each refusal, as ten of them take seconds."""
        nonlocal following
        elapsed = time.monotonic() - started
        if elapsed >= following:
            series.append(reading(f"{elapsed:.0f} s"))
            following = elapsed + 1.0

    while time.monotonic() - started < LOOP_SECONDS:
        for name, one in driven.items():
            look()
            elapsed = time.monotonic() - started
            slow = name in slow_after
            if slow and elapsed < slow_after[name]:
                for _ in range(20):
                    one.swap()
                allocated += 20
                continue
            for _ in range(1 if slow else 10):
                one.free(one.rng.randint(1, 8))
                before = len(one.live)
                one.until_refused(1 * MIB, 200 * MIB)
                allocated += len(one.live) - before
                refused[name] += 1
                look()
            if slow:
                slow_after[name] = elapsed + 60.0
    wrong = {n: [r for r in one.refusals if not r["native"]][:3] for n, one in driven.items()}
    fitted = {n: sum(r["would_have_fitted"] is True for r in one.refusals) for n, one in driven.items()}
    outcome = {n: {**one.summary(), "refusals": len(one.refusals)} for n, one in driven.items()}
    unaccounted = [r["unaccounted"] for r in series]
    outside = [r["unaccounted"] + r["overhead"] for r in series]  # a leak may hide in either
    return {
        "seconds_run": round(time.monotonic() - started, 1),
        "allocated": allocated,
        "refused": refused,
        "not_native": wrong,
        "would_have_fitted": fitted,
        "driven": outcome,
        "readings": len(series),
        "sum_minus_total": max(abs(r["sum_minus_total"]) for r in series),
        "unaccounted_first": unaccounted[0],
        "unaccounted_drift": max(abs(value - unaccounted[0]) for value in unaccounted),
        "unaccounted_worst": max(unaccounted, key=abs),
        "outside_drift": max(abs(value - outside[0]) for value in outside),
        "first": series[0],
        "last": series[-1],
        "live_readings": readings,
        "notes": list(memguard.ledger().notes),
    }


def hour() -> dict[str, Any]:
    """One hour of simulated time of the same kind of loop, on a simulated H200."""
    from simulated_hour import simulated_hour

    return simulated_hour(SEED)


def circumstance(name: str, when: str) -> dict[str, Any]:
    """Imported after `init`, before it, or live before it: does the cap hold, and is it undone by shutdown?"""
    import memguard

    if when != "later":
        load(name)
    take = allocator(name)[0] if when == "live" else None
    before = [take(64 * MIB) for _ in range(40)] if take is not None else []  # 2.5 GiB: above the cap
    try:
        guard = memguard.init({"version": 1, "device": {"limit": "8GiB"}, "frameworks": {name: {"limit": "2GiB"}}})
    except memguard.CapNotApplied as error:
        return {"too_late": str(error)}
    load(name)
    one = Driven(name, guard.plan.devices[0].caps[name], SEED)
    one.until_refused(64 * MIB, 64 * MIB)
    enforcement = memguard.ledger().devices[0].row(name).enforcement
    summary = one.summary()
    stays = memguard.shutdown()
    beyond = []
    try:
        while len(beyond) < 40:
            beyond.append(one.take(64 * MIB))
    except one.native:
        pass
    return {
        "enforcement": enforcement,
        **summary,
        "allocated": len(one.live),
        "allocated_before_init": len(before),
        "notes": guard.notes,
        "stays": stays,
        "allocated_after_shutdown": len(beyond),
    }


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "together": together,
    "loop": loop,
    "counted": grown,
    "counted by CUPTI": lambda: by_cupti(budget_of_six(growth=False)),
    **{f"refusals of {n}": (lambda n=n: refusals(n)) for n in COUNTED},
    **{f"refusals of {n} beside others": (lambda n=n: refusals(n, beside=True)) for n in COUNTED},
    "simulated_hour": hour,
    **{f"{n}, {w}": (lambda n=n, w=w: circumstance(n, w)) for n in ("cupy", "jax", "numba") for w in WHEN},
    **{f"{a}-{b}": (lambda a=a, b=b: pair(a, b)) for a, b in PAIRS},
}


def run(name: str) -> tuple[str, dict[str, Any]]:
    outcome = run_scenario(__file__, name, timeout=LOOP_SECONDS + 240, interval=INTERVAL)
    log = outcome.pop("_stderr")
    if name == "together":
        outcome["tensorflow_log"] = bfc_refusals(log)
    print(f"{name}: rc {outcome['returncode']}, {outcome['seconds']} s", file=sys.stderr, flush=True)
    if outcome["returncode"] != 0:
        print(outcome.get("stderr_tail", "")[-1200:], file=sys.stderr, flush=True)
    return name, outcome


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--scenario", choices=sorted(SCENARIOS))
    parser.add_argument("--only", help="names of scenarios, separated by semicolons; else all")
    parser.add_argument("--merge", type=Path, action="append", default=[], help="scenarios from another run's JSON")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.scenario:
        emit(SCENARIOS[arguments.scenario]())
        return
    from checks import all_frameworks_checks

    before = merged(arguments.merge, "scenarios")["scenarios"]
    names = [n for n in (arguments.only.split(";") if arguments.only else SCENARIOS) if n not in before]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        scenarios = {**dict(pool.map(run, names)), **before}
    result: dict[str, Any] = {"about": header("python benchmarks/all_frameworks.py"), "seed": SEED, "limit": SIX_LIMIT}
    result["scenarios"] = scenarios
    result["checks"] = all_frameworks_checks(scenarios)
    conclude(result, arguments.output)


if __name__ == "__main__":
    main()

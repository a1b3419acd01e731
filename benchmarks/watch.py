"""Watching on a real GPU: what an out-of-memory report says, forecasts and false alarms, and what the monitor costs.

    python benchmarks/watch.py -o benchmarks/results/h200-watch.json

`--only` takes names of scenarios, separated by semicolons; `sawtooth` runs for ten minutes and can be run beside others
(`--only sawtooth -o sawtooth.json`, then `--merge sawtooth.json`). Every scenario is a process of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _independent import bytes_now
from _run import GIB, MIB, conclude, emit, header, merged, run_scenario
from all_frameworks import allocator, load

SAWTOOTH_SECONDS = float(os.environ.get("MEMGUARD_SAWTOOTH_SECONDS", "600"))
PAIRS = int(os.environ.get("MEMGUARD_PAIRS", "60"))
BLOCK_SECONDS = 0.4
KINDS = ("torch", "torch async", "tensorflow", "jax", "cupy", "cupy async", "pycuda", "numba")
STEP = 777 * MIB + 4096
"""Asked for again and again: no size that any allocator rounds to by itself. From 1 GiB on PyTorch and JAX say the size
in hundredths of a GiB, which is no better than 5 MiB."""


# Reports


def prepare(kind: str) -> str:
    """Before any import: the allocator of the kind. Returns the framework's name."""
    name, _, variant = kind.partition(" ")
    if kind == "torch async":
        os.environ["PYTORCH_ALLOC_CONF"] = "backend:cudaMallocAsync"
    return name if variant in ("", "async") else kind


def allocating_call(kind: str, name: str) -> Callable[[int], Any]:
    load(name)
    if kind == "cupy async":
        import cupy

        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    take = allocator(name)[0]
    if name == "jax":  # device_put copies from an array of 300 MiB: this makes the bytes on the GPU
        import jax
        import jax.numpy as jnp

        make = jax.jit(lambda n: jnp.zeros((n,), jnp.uint8), static_argnums=0)
        return lambda n: make(n).block_until_ready()
    return take


def outcome_of(error: BaseException, asked: int, started: float) -> dict[str, Any]:
    """What memguard made of the error that a block let through."""
    import memguard

    report = memguard.last_oom()
    outcome: dict[str, Any] = {
        "exception": f"{type(error).__module__}.{type(error).__qualname__}",
        "text": str(error)[:300],
        "asked": asked,
        "report": None if report is None else report.as_dict(),
        "printed": None if report is None else str(report),
        "notes": [note[:400] for note in getattr(error, "__notes__", [])],
        "seconds_to_refusal": round(time.monotonic() - started, 2),
    }
    return outcome


def own_cap(kind: str) -> dict[str, Any]:
    """One framework driven into its own cap of 8 GiB, while a sibling sits idle beside it with a cache."""
    if kind == "cupy async":  # its limit would be that of a pool that all share: memguard only watches it
        return {"no_cap": True}
    return beside_sibling(kind, "24GiB", "8GiB", "10GiB", 2 * GIB, 1 * GIB)


def card_full(kind: str) -> dict[str, Any]:
    """One framework under its cap, on a card that its sibling and another process hold."""
    stranger = hold_elsewhere(40 * GIB)
    try:
        outcome = beside_sibling(kind, "100%", "40GiB", "90GiB", 70 * GIB, 50 * GIB)
        return {**outcome, "stranger_pid": stranger.pid}
    finally:
        stranger.kill()


def beside_sibling(kind: str, limit: str, cap: str, siblings_cap: str, held: int, idle: int) -> dict[str, Any]:
    """One framework driven to its refusal, with a sibling that holds memory, part of it idle, beside it."""
    import memguard

    name = prepare(kind)
    sibling = "pycuda" if name == "torch" else "torch"
    frameworks = {name: {"limit": cap}, sibling: {"limit": siblings_cap}}
    guard = memguard.init({"version": 1, "device": {"limit": limit}, "frameworks": frameworks})
    beside = idle_sibling(sibling, held, idle)
    outcome = drive(guard, kind, name, allocating_call(kind, name))
    return {**outcome, "sibling": sibling, "idle": idle, "beside": len(beside)}


def drive(guard: Any, kind: str, name: str, take: Callable[[int], Any]) -> dict[str, Any]:
    """Ask until it refuses, inside a workload; then what the report said, and what a trim really returns."""
    import memguard

    live: list[Any] = []
    started = time.monotonic()
    outcome: dict[str, Any] = {"kind": kind, "requester": name}
    take(MIB)  # live, with its context and modules
    try:
        with memguard.workload("drive", framework=name):
            while len(live) < 200:
                started = time.monotonic()
                live.append(take(STEP))
    except Exception as error:
        outcome.update(outcome_of(error, STEP, started))
    ledger = memguard.ledger().devices[0]
    outcome["rows"] = {
        row.name: {"bytes": row.bytes, "in_use": row.in_use, "reclaimable": row.reclaimable}
        for row in ledger.rows
        if row.kind == "framework"
    }
    outcome["allocations"] = len(live)
    returned, by_driver = {}, {}
    for other in guard.frameworks:
        before = bytes_now()
        returned[other] = memguard.trim(other)
        by_driver[other] = before - bytes_now()
    outcome["returned"], outcome["by_driver"] = returned, by_driver
    return outcome


def idle_sibling(name: str, held: int, idle: int) -> list[Any]:
    """The sibling holds `held`, of which `idle` lies in its cache, in blocks of a GiB."""
    load(name)
    take = allocator(name)[0]
    blocks = [take(GIB) for _ in range(held // GIB)]
    del blocks[: idle // GIB]
    return blocks


def hold_elsewhere(size: int) -> subprocess.Popen[str]:
    """Another process that holds so much of the card, through CuPy."""
    code = (
        "import sys, time, cupy\n"
        f"blocks = [cupy.empty(1 << 30, cupy.uint8) for _ in range({size // GIB})]\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline().strip() == "held"
    return child


# Forecasts and false alarms


def watched(config: dict[str, Any]) -> tuple[Any, list[dict[str, Any]]]:
    """A budget with a monitor, and every event as it comes."""
    import memguard

    events: list[dict[str, Any]] = []
    guard = memguard.init(config)

    def said(event: Any) -> None:
        level = None if event.level is None else event.level.value
        seen = {"at": time.monotonic(), "kind": event.kind, "level": level, "framework": event.framework}
        events.append({**seen, "seconds": event.seconds, "text": event.text})

    memguard.on_pressure(said)
    return guard, events


def leak() -> dict[str, Any]:
    """1 GiB a second from 20 GiB below the cap, in steps of 64 MiB, until torch refuses."""
    cap, below, rate, step = 40 * GIB, 20 * GIB, GIB, 64 * MIB
    config = {
        "version": 1,
        "device": {"limit": "48GiB"},
        "frameworks": {"torch": {"limit": cap}},
        "monitor": {"interval": "100ms"},
    }
    _, events = watched(config)
    import torch

    live = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range((cap - below) // GIB)]
    time.sleep(3)
    started = time.monotonic()
    count = 0
    while True:
        try:
            live.append(torch.empty(step, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            refused = time.monotonic()
            break
        count += 1
        time.sleep(max(started + count * step / rate - time.monotonic(), 0))
    forecasts = [event for event in events if event["kind"] == "forecast"]
    return {
        "rate": rate,
        "leaked": count * step,
        "seconds": round(refused - started, 2),
        "announced_before_oom_s": round(refused - forecasts[0]["at"], 2) if forecasts else None,
        "forecast_said_s": forecasts[0]["seconds"] if forecasts else None,
        "events": [{**event, "at": round(event["at"] - refused, 2)} for event in events],
    }


def sawtooth() -> dict[str, Any]:
    """Ten minutes of work that rises and falls: several periods and shapes, up to 82 % of each cap; no alarm is right.

    torch and CuPy under a monitor at 10 Hz. Each period is kept for a minute and then the next one begins.
    """
    cap = 4 * GIB
    config = {
        "version": 1,
        "device": {"limit": "12GiB"},
        "frameworks": {"torch": {"limit": cap}, "cupy": {"limit": cap}},
        "monitor": {"interval": "100ms"},
    }
    _, events = watched(config)
    import cupy
    import torch

    import memguard

    rng = random.Random(7)
    unit = 32 * MIB
    takes: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch.empty(unit, dtype=torch.uint8, device="cuda"),
        "cupy": lambda: cupy.empty(unit, cupy.uint8),
    }
    live: dict[str, list[Any]] = {"torch": [], "cupy": []}
    ended = threading.Event()
    most = dict.fromkeys(takes, 0)

    def work(name: str, shapes: list[tuple[str, float]]) -> None:
        started = time.monotonic()
        while not ended.is_set():
            elapsed = time.monotonic() - started
            if elapsed >= SAWTOOTH_SECONDS:
                return
            shape, period = shapes[int(elapsed // 60) % len(shapes)]
            phase = elapsed % period / period
            high, low = 0.82, 0.2
            if shape == "saw":
                level = low + (high - low) * phase
            elif shape == "triangle":
                level = low + (high - low) * (2 * phase if phase < 0.5 else 2 - 2 * phase)
            elif shape == "square":
                level = high if phase < 0.5 else low
            else:  # batches of any size
                level = rng.uniform(low, high) if phase < 0.1 else len(live[name]) * unit / cap
            wanted = int(level * cap / unit)
            while len(live[name]) < wanted:
                live[name].append(takes[name]())
            del live[name][wanted:]
            most[name] = max(most[name], len(live[name]) * unit)
            with memguard.workload(f"step of {name}", framework=name):
                time.sleep(0.02)

    shapes = [("saw", 1.0), ("saw", 5.0), ("triangle", 10.0), ("square", 2.0), ("random", 0.5), ("saw", 30.0)]
    first = threading.Thread(target=work, args=("torch", shapes))
    second = threading.Thread(target=work, args=("cupy", shapes[3:] + shapes[:3]))
    started = time.monotonic()
    for thread in (first, second):
        thread.start()
    for thread in (first, second):
        thread.join()
    alarms = [event for event in events if event["kind"] in ("forecast", "leak", "pressure")]
    return {
        "seconds_run": round(time.monotonic() - started, 1),
        "most": {name: size / cap for name, size in most.items()},
        "shapes": shapes,
        "events": events,
        "alarms": alarms,
    }


# Cost


def tick() -> dict[str, Any]:
    """The ticks of the monitor while all six are live and the program allocates: see `readings.py`."""
    from readings import at_work

    return {"at_work": at_work()}


def small_ops() -> dict[str, Any]:
    """Small torch operations with the monitor at 10 Hz and without: interleaved pairs, and as many without in both."""
    import memguard
    from memguard import _api

    config = {
        "version": 1,
        "device": {"limit": "24GiB"},
        "frameworks": {"torch": {"limit": "8GiB"}, "cupy": {"limit": "4GiB"}},
        "monitor": {"interval": "100ms"},
    }
    memguard.init(config)
    import cupy
    import torch

    kept = cupy.ones(1000)
    a = torch.ones(64, device="cuda")
    monitor = _api.current_session().monitor

    def block() -> float:
        """Operations in a second."""
        torch.cuda.synchronize()
        count, begun = 0, time.perf_counter()
        while time.perf_counter() - begun < BLOCK_SECONDS:
            for _ in range(200):
                a.add_(1)
            count += 200
        torch.cuda.synchronize()
        return count / (time.perf_counter() - begun)

    def pair(first_watched: bool, watched: bool) -> float:
        rates = {}
        for on in (first_watched, not first_watched):
            if on and watched:
                monitor.start()
            rates[on] = block()
            if on and watched:
                monitor.stop()
        return rates[False] / rates[True]

    monitor.stop()
    for _ in range(4):
        block()
    with_monitor, control = [], []
    for number in range(PAIRS):
        with_monitor.append(pair(number % 2 == 0, True))
        control.append(pair(number % 2 == 0, False))
    del kept
    return {"pairs": PAIRS, "ratio": spread(with_monitor), "control": spread(control)}


def spread(ratios: list[float]) -> dict[str, float]:
    """Median of the ratios, and a 95 % interval of it from 4,000 resamples."""
    rng = random.Random(11)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(4000))
    return {
        "median": statistics.median(ratios),
        "low": medians[100],
        "high": medians[3899],
        "min": min(ratios),
        "max": max(ratios),
    }


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"{kind}, own cap": (lambda kind=kind: own_cap(kind)) for kind in KINDS},
    **{f"{kind}, card full": (lambda kind=kind: card_full(kind)) for kind in KINDS},
    "leak": leak,
    "tick": tick,
    "small ops": small_ops,
    "sawtooth": sawtooth,
}


def run(name: str) -> dict[str, Any]:
    outcome = run_scenario(__file__, name, timeout=SAWTOOTH_SECONDS + 120)
    outcome["stderr_tail"] = outcome.pop("_stderr")[-3000:] if outcome["returncode"] else ""
    print(f"{name}: rc {outcome['returncode']}, {outcome['seconds']} s", file=sys.stderr, flush=True)
    if outcome["returncode"]:
        print(outcome["stderr_tail"][-1500:], file=sys.stderr, flush=True)
    return outcome


def main() -> None:
    from concurrent.futures import ThreadPoolExecutor

    parser = argparse.ArgumentParser()
    parser.add_argument("--scenario", choices=sorted(SCENARIOS))
    parser.add_argument("--only", help="names of scenarios, separated by semicolons; else all")
    parser.add_argument("--merge", type=Path, action="append", default=[], help="scenarios from another run's JSON")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.scenario:
        emit(SCENARIOS[arguments.scenario]())
        return
    from checks import watch_checks

    before = merged(arguments.merge, "scenarios")["scenarios"]
    names = [n for n in (arguments.only.split(";") if arguments.only else SCENARIOS) if n not in before]
    scenarios: dict[str, Any] = {}
    with ThreadPoolExecutor(5) as pool:  # in their own caps they do not see each other; the other ones need the card
        together = [name for name in names if name.endswith("own cap") or name in ("leak", "sawtooth")]
        scenarios.update(zip(together, pool.map(run, together)))
    for name in names:
        if name not in scenarios:
            scenarios[name] = run(name)
    scenarios.update(before)
    result: dict[str, Any] = {"about": header("python benchmarks/watch.py"), "scenarios": scenarios}
    result["checks"] = watch_checks(scenarios)
    conclude(result, arguments.output)


if __name__ == "__main__":
    main()

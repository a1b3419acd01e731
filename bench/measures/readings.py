"""What a reading costs above its own bare probes, and what a monitor tick costs a program at work.

All six frameworks are live and hold arrays. Each reading takes turns with its bare probes, in an order drawn anew each
round; its row is the difference within a round, and its control the difference of the probes to themselves. A bare
probe is what must be asked whatever memguard does. What memguard counts itself, as for Numba, has no probe."""

from __future__ import annotations

import ctypes
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bench.child import main
from bench.measure import Failed, Run, Values, measure
from bench.programs import six

MIB = 1 << 20
LIMIT = 40 << 30
REQUESTER: Final = "torch"  # What `require` and `workload` are asked for.
READINGS = ("ledger", "sample", "require", "workload")
TICKS = ("tick", "tick_p90")


@measure(
    "readings",
    unit={
        **{f"{name}{what}": "µs" for name in READINGS for what in ("", ".whole", ".probes", ".control")},
        **dict.fromkeys(TICKS, "µs"),
    },
    bar={
        "ledger": "<= 40", "sample": "<= 15", "require": "<= 10", "workload": "<= 20",
        "tick": "<= 120", "tick_p90": "<= 180",
    },
    by={**dict.fromkeys(READINGS, "high"), "tick_p90": "p90"},
    seconds=85,
)  # fmt: skip
def readings(run: Run) -> dict[str, Values | Failed]:
    """Readings above their bare probes, and monitor ticks of a program at work (CPU)."""
    found: dict[str, Values | Failed] = {}
    parts: list[tuple[str, tuple[Any, ...], tuple[str, ...]]] = [
        ("readings", (run.rounds(1000, 20),), READINGS),
        ("ticking", (run.rounds(25, 3),), TICKS),
    ]
    for program, words, names in parts:  # one after another: nothing else may take time meanwhile
        try:
            found |= run.program(program, *words, timeout=110)
        except Failed as error:
            found |= dict.fromkeys(names, error)
    return found


class Bare:
    """The probes, each called as a program would call it."""

    def __init__(self) -> None:
        pynvml, handle = six.first_gpu()
        memory, version = pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2
        listed = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetComputeRunningProcesses_v3")
        count, room = ctypes.c_uint(), (pynvml.c_nvmlProcessInfo_t * 32)()

        def processes() -> None:  # with one call of NVML; nvidia-ml-py makes two
            count.value = 32
            assert listed(handle, ctypes.byref(count), room) == 0

        self.memory: Callable[[], Any] = lambda: memory(handle, version=version)
        self.processes: Callable[[], Any] = processes
        self.counters = _counters()
        self.requester = self.counters[REQUESTER]

    def ledger(self) -> None:
        self.memory()
        self.processes()
        for counter in self.counters.values():
            counter()
        self.processes()
        self.memory()

    def sample(self) -> None:
        self.memory()
        for counter in self.counters.values():
            counter()

    def require(self) -> None:
        self.memory()
        self.requester()

    def workload(self) -> None:
        self.requester()
        self.requester()


def _counters() -> dict[str, Callable[[], Any]]:
    """What each framework tells of its memory."""
    import cupy
    import pycuda.driver as drv
    import tensorflow as tf
    import torch

    statistics_of = torch._C._cuda_memoryStats
    info = tf.config.experimental.get_memory_info
    (local, *_) = sys.modules["jax._src.xla_bridge"]._backends["cuda"].local_devices()
    pool, theirs = cupy.get_default_memory_pool(), drv.DeviceMemoryPool()
    total, used, current = pool.total_bytes, pool.used_bytes, drv.Context.get_current

    def of_cupy() -> None:
        total()
        used()

    def of_pycuda() -> None:
        current()
        getattr(theirs, "managed_bytes", None)
        getattr(theirs, "active_bytes", None)

    return {
        "tensorflow": lambda: info("GPU:0"), "torch": lambda: statistics_of(0), "jax": local.memory_stats,
        "cupy": of_cupy, "pycuda": of_pycuda,
    }  # fmt: skip


def live(config: dict[str, Any]) -> tuple[Any, dict[str, Callable[[int], Any]], list[Any]]:
    """A budget under which all six are live and hold arrays: the guard, how each allocates, and the arrays."""
    guard, _ = six.all_live(config)
    takes = {name: six.allocator(name)[0] for name in guard.frameworks}
    time.sleep(5)  # what compiles in the background has to be over
    return guard, takes, [take(64 * MIB) for take in takes.values()]


def timed(call: Callable[[], Any]) -> float:
    """Microseconds of one call."""
    begun = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begun) / 1e3


def program_readings(rounds: str) -> dict[str, list[float]]:
    """Every reading against its bare probes, one call of each by turns."""
    import memguard

    guard, takes, kept = live(six.budget(LIMIT, growth=False))
    bare = Bare()

    def workload() -> None:
        with memguard.workload("empty", framework=REQUESTER):
            pass

    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "ledger": (memguard.ledger, bare.ledger), "sample": (guard.sample, bare.sample),
        "require": (lambda: memguard.require(REQUESTER, MIB), bare.require), "workload": (workload, bare.workload),
    }  # fmt: skip
    steps: list[tuple[str, str, Callable[[], Any]]] = []
    for name, (reading, probes) in calls.items():
        steps += [(name, "whole", reading), (name, "probes", probes), (name, "again", probes)]
    rng, taken = random.Random(7), {(name, what): list[float]() for name, what, _ in steps}
    live_blocks: list[Any] = []
    for number in range(int(rounds) + 50):
        live_blocks[number % 8 :] = [takes[REQUESTER](MIB)]  # the program does something: no figure stays as it was
        rng.shuffle(steps)
        for name, what, call in steps:
            spent = timed(call)
            if number >= 50:
                taken[name, what].append(spent)
    found: dict[str, list[float]] = {}
    for name in calls:
        whole, bare_us, again = (taken[name, what] for what in ("whole", "probes", "again"))
        found[name] = [a - b for a, b in zip(whole, bare_us, strict=True)]
        found[f"{name}.whole"], found[f"{name}.probes"] = whole, bare_us
        found[f"{name}.control"] = [a - b for a, b in zip(again, bare_us, strict=True)]
    del kept
    return found


def program_ticking(seconds: str) -> dict[str, list[float]]:
    """What the monitor's thread spends on a tick while all six are live and three of them allocate, in microseconds. A
    tick is the whole of it: sample, decision, ring, timeline and actions; counted is the thread's own CPU time. The
    sawtooth of torch passes the thresholds of its cap, so that some ticks have something to say and to do."""
    import memguard
    from memguard import api

    with tempfile.TemporaryDirectory() as folder:
        timeline = Path(folder) / "tick.jsonl"
        config = six.budget(LIMIT, growth=False)
        config["monitor"] = {"interval": "100ms", "warn": "50%", "critical": "70%", "timeline": str(timeline)}
        config["on_pressure"] = ["trim"]
        guard, takes, kept = live(config)
        events: Counter[str] = Counter()
        memguard.on_event(lambda event: events.update([event.kind]))
        monitor: Any = api.current_session().monitor
        cpu = list[float]()
        tick = monitor._tick

        def measured(over: Callable[[], bool]) -> None:
            begun = time.thread_time_ns()
            tick(over)
            cpu.append((time.thread_time_ns() - begun) / 1e3)

        monitor._tick = measured
        work(guard, takes, float(seconds))
        enough = time.monotonic() + 30
        while len(cpu) <= 5 and time.monotonic() < enough:  # on a busy machine
            work(guard, takes, 1)
        busy = cpu[5:]
        memguard.shutdown()
        lines = [line for path in Path(folder).glob("*.jsonl") for line in path.read_text().splitlines()]
    del kept
    samples = sum('"sample":' in line[:60] for line in lines)
    assert samples >= len(busy), f"{samples} samples were written in {len(busy)} ticks"
    assert events["pressure"] or float(seconds) < 5, f"no event of pressure came: {events}"
    return {"tick": busy, "tick_p90": busy}


def work(guard: Any, takes: dict[str, Callable[[int], Any]], seconds: float) -> None:
    """torch rises to 80 % of its cap and falls again, in five seconds; CuPy and PyCUDA allocate beside it."""
    import memguard

    cap, unit = guard.plan.devices[0].caps["torch"], 64 * MIB
    beside: list[Any] = []
    tooth: list[Any] = []
    count, begun = 0, time.monotonic()
    while (now := time.monotonic() - begun) < seconds:
        wanted = int(0.8 * cap / unit * (now % 5 / 5))
        while len(tooth) < wanted:
            tooth.append(takes["torch"](unit))
            count += 1
        del tooth[wanted:]
        beside[count % 16 :] = [takes[name](random.randrange(2, 9) * MIB) for name in ("cupy", "pycuda")]
        count += 2
        with memguard.workload("step", framework="torch"):
            time.sleep(0.002)


if __name__ == "__main__":
    main({"readings": program_readings, "ticking": program_ticking})

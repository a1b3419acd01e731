"""What a reading costs above its own bare probes, and what a tick of the monitor costs a program at work.

    python benchmarks/readings.py -o benchmarks/results/h200-readings.json

All six frameworks are live and hold arrays. Each reading takes turns with its bare probes, in an order drawn anew each
round: `above` is the median of the differences within a round, with its 95 % interval. The control is the difference of
the probes to themselves. A bare probe is what must be asked whatever memguard does: NVML's figures (twice for a
ledger), the counters of each framework, and whether there is a context; `Bare` calls them with nothing around them.
What memguard counts itself, as for Numba, has no probe.

Without a GPU the frameworks and the driver are stand-ins (`tests/faults/six_live.py`), which shows memguard's own part
on this machine, and nothing about a GPU: the result says so.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _listed
from _run import MIB, ROOT, budget_of_six, conclude, emit, header, judged, run_scenario

ROUNDS = int(os.environ.get("MEMGUARD_ROUNDS", "2000"))
TICKING_SECONDS = float(os.environ.get("MEMGUARD_TICKING_SECONDS", "40"))
PATIENCE = 60.0
"""Seconds for the first ticks of a monitor whose first one took more than its share: on a busy machine."""
STUB = "MEMGUARD_STUB_UUID"
"""In the environment of a scenario: it has no GPU, and its stand-in has this UUID."""
REQUESTER = "torch"
"""What `require` and `workload` are asked for."""
BARS = {"ledger": 40, "sample": 15, "require": 10, "workload": 20}
"""Microseconds above the bare probes, on an H100 or H200 host with CPython 3.12."""
TICK = {"median": 120, "p90": 180}
"""Microseconds of the monitor thread's CPU that a tick of a program at work takes."""


class Bare:
    """The probes, each called as a program would call it."""

    def __init__(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        by_uuid = shown.startswith("GPU-") and "," not in shown
        handle = pynvml.nvmlDeviceGetHandleByUUID(shown) if by_uuid else pynvml.nvmlDeviceGetHandleByIndex(0)
        memory, version = pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2
        running = pynvml.nvmlDeviceGetComputeRunningProcesses
        listed = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetComputeRunningProcesses_v3")
        count, room = ctypes.c_uint(), (pynvml.c_nvmlProcessInfo_t * 32)()
        cuda = ctypes.CDLL("libcuda.so.1")
        flags, active = ctypes.c_uint(), ctypes.c_int()
        state, flags_at, active_at = cuda.cuDevicePrimaryCtxGetState, ctypes.byref(flags), ctypes.byref(active)

        def processes() -> None:  # with one call of NVML; nvidia-ml-py makes two
            count.value = 32
            assert listed(handle, ctypes.byref(count), room) == 0

        self.memory: Callable[[], Any] = lambda: memory(handle, version=version)
        self.processes: Callable[[], Any] = processes
        self.processes_by_nvidia_ml_py: Callable[[], Any] = lambda: running(handle)
        self.context: Callable[[], Any] = lambda: state(0, flags_at, active_at)
        self.counters = _counters()
        self.requester = self.counters[REQUESTER]

    def ledger(self) -> None:
        self.memory()
        self.processes()
        for counter in self.counters.values():
            counter()
        self.processes()
        self.memory()
        self.context()

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

    def alone(self) -> dict[str, Callable[[], Any]]:
        """Each probe by itself."""
        nvml = {
            "nvml memory": self.memory,
            "nvml processes": self.processes,
            "nvml processes, by nvidia-ml-py": self.processes_by_nvidia_ml_py,
        }
        return {**nvml, "context": self.context, **self.counters}


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
        "tensorflow": lambda: info("GPU:0"),
        "torch": lambda: statistics_of(0),
        "jax": local.memory_stats,
        "cupy": of_cupy,
        "pycuda": of_pycuda,
    }


def live(config: dict[str, Any]) -> tuple[Any, dict[str, Callable[[int], Any]], list[Any]]:
    """A budget under which all six are live and hold arrays: the guard, how each allocates, and the arrays."""
    import memguard

    uuid = os.environ.get(STUB)
    if uuid is None:
        from all_frameworks import all_live, allocator

        guard, _ = all_live(config)
        takes = {name: allocator(name)[0] for name in guard.frameworks}
        time.sleep(5)  # what compiles in the background has to be over
        kept = [take(64 * MIB) for take in takes.values()]
        return guard, takes, kept
    sys.path.insert(0, str(ROOT / "tests" / "faults"))
    import six_live

    six_live.this_process()
    makers = six_live.bring(uuid)
    guard = memguard.init(config)
    kept = [make() for make in makers]
    return guard, six_live.allocators(), kept


def spread(values: list[float]) -> dict[str, float]:
    """Median of the values, a 95 % interval of it from 1,000 resamples, and the middle 80 % of the values."""
    rng = random.Random(11)
    chosen = values if len(values) <= 1000 else rng.sample(values, 1000)
    medians = sorted(statistics.median(rng.choices(chosen, k=len(chosen))) for _ in range(1000))
    ranked = sorted(values)
    return {
        "median": round(statistics.median(values), 3),
        "low": round(medians[25], 3),
        "high": round(medians[974], 3),
        "p10": round(ranked[len(ranked) // 10], 3),
        "p90": round(ranked[len(ranked) * 9 // 10], 3),
        "n": len(values),
    }


def timed(call: Callable[[], Any]) -> float:
    """Microseconds of one call."""
    begun = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begun) / 1e3


def readings() -> dict[str, Any]:
    """Every reading against its bare probes, one call of each by turns."""
    import memguard

    guard, takes, kept = live(budget_of_six(growth=False))
    bare = Bare()

    def workload() -> None:
        with memguard.workload("empty", framework=REQUESTER):
            pass

    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "ledger": (memguard.ledger, bare.ledger),
        "sample": (guard.sample, bare.sample),
        "require": (lambda: memguard.require(REQUESTER, MIB), bare.require),
        "workload": (workload, bare.workload),
    }
    steps: list[tuple[str, str, Callable[[], Any]]] = []
    for name, (reading, probes) in calls.items():
        steps += [(name, "us", reading), (name, "bare_us", probes), (name, "again", probes)]
    rng, taken = random.Random(7), {(name, what): list[float]() for name, what, _ in steps}
    live_blocks: list[Any] = []
    for number in range(ROUNDS + 50):
        live_blocks[number % 8 :] = [takes[REQUESTER](MIB)]  # the program does something: no figure stays as it was
        rng.shuffle(steps)
        for name, what, call in steps:
            spent = timed(call)
            if number >= 50:
                taken[name, what].append(spent)
    found: dict[str, Any] = {}
    for name in calls:
        timings, without, again = (taken[name, what] for what in ("us", "bare_us", "again"))
        found[name] = {
            "us": spread(timings),
            "bare_us": spread(without),
            "above_us": spread([a - b for a, b in zip(timings, without)]),
            "control_us": spread([a - b for a, b in zip(again, without)]),
        }
    alone = {name: spread([timed(probe) for _ in range(500)]) for name, probe in bare.alone().items()}
    return {"readings": found, "probes_us": alone, "fresh": fresh(guard, takes), "arrays": len(kept)}


def fresh(guard: Any, takes: dict[str, Callable[[int], Any]], times: int = 50) -> dict[str, Any]:
    """Whether the very next reading shows each array that was made: a figure that comes fast must be new."""
    import memguard

    uuid = guard.plan.devices[0].device.uuid
    missed: Counter[str] = Counter()

    def in_use(name: str, number: int) -> int:
        if number % 2:
            return int(memguard.ledger().devices[0].row(name).in_use or 0)
        (device,) = [one for one in guard.sample().devices if one.uuid == uuid]
        return int(device.frameworks[name].in_use or 0)

    for name, take in takes.items():
        kept = []  # to the end: when a framework gives back is its own affair
        for number in range(times):
            before = in_use(name, number)
            kept.append(take(4 * MIB))
            missed[name] += in_use(name, number) - before < 4 * MIB
    return {"arrays": times * len(takes), "missed": dict(missed)}


def ticking() -> dict[str, Any]:
    """The monitor at 10 Hz while the program allocates."""
    return {"at_work": at_work()}


def at_work() -> dict[str, Any]:
    """What the monitor's thread spends on a tick while all six are live and three of them allocate, in microseconds.

    A tick is the whole of it: sample, decision, ring, timeline and actions. `cpu_us` is the thread's own CPU time,
    `wall_us` also what it waited for the GIL. The sawtooth of torch passes the thresholds of its cap, so that some
    ticks have something to say and to do. `idle`: the same ticks of a program that sleeps. `back_to_back_us`: a
    thousand ticks without a pause, which find the caches of the CPU as they left them.
    """
    import memguard
    from memguard import _api

    with tempfile.TemporaryDirectory() as folder:
        timeline = Path(folder) / "tick.jsonl"
        config = budget_of_six(growth=False)
        config["monitor"] = {"interval": "100ms", "warn": "50%", "critical": "70%", "timeline": str(timeline)}
        config["on_pressure"] = ["trim"]
        guard, takes, kept = live(config)
        events: Counter[str] = Counter()
        forget = memguard.on_pressure(lambda event: events.update([event.kind]))
        monitor, cpu, wall = _api.current_session().monitor, list[float](), list[float]()
        tick = monitor._tick

        def measured(over: Callable[[], bool]) -> None:
            cpu_begun, begun = time.thread_time_ns(), time.perf_counter_ns()
            tick(over)
            cpu.append((time.thread_time_ns() - cpu_begun) / 1e3)
            wall.append((time.perf_counter_ns() - begun) / 1e3)

        monitor._tick = measured
        allocated = _work(guard, takes, TICKING_SECONDS)
        enough = time.monotonic() + PATIENCE
        while len(cpu) <= 5 and time.monotonic() < enough:
            allocated += _work(guard, takes, 1)
        busy = {"cpu_us": spread(cpu[5:]), "wall_us": spread(wall[5:])}
        cpu.clear()
        wall.clear()
        time.sleep(min(10, TICKING_SECONDS))
        while not cpu and time.monotonic() < enough + PATIENCE:
            time.sleep(1)
        idle = {"cpu_us": spread(cpu), "wall_us": spread(wall)}
        monitor._tick = tick
        monitor.stop()
        at_once, blocks = [], list[Any]()
        for number in range(1050):
            blocks[number % 8 :] = [takes["torch"](MIB)]
            at_once.append(timed(lambda: tick(lambda: False)))
        forget()
        memguard.shutdown()
        lines = [line for path in Path(folder).glob("*.jsonl") for line in path.read_text().splitlines()]
    samples = sum('"sample":' in line[:60] for line in lines)
    about = {"samples_written": samples, "allocations": allocated, "interval_ms": 100, "arrays": len(kept)}
    return {**busy, "idle": idle, "back_to_back_us": spread(at_once[50:]), "events": dict(events), **about}


def _work(guard: Any, takes: dict[str, Callable[[int], Any]], seconds: float) -> int:
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
    return count


def readings_checks(scenarios: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """Every bar of this benchmark, by name. What was not measured has failed, and so has what a death came after."""

    def of_readings(check: Callable[[str, bool, str], None]) -> None:
        measured = scenarios["readings"]
        for name, bar in BARS.items():
            one = measured["readings"][name]
            above, control = one["above_us"], one["control_us"]
            check(
                f"{name}: at most {bar} us above its bare probes",
                above["high"] <= bar and above["n"] >= 1000,
                f"{above['median']:.1f} us (95 %: {above['low']:.1f} to {above['high']:.1f}), "
                f"{one['us']['median']:.1f} in all, probes {one['bare_us']['median']:.1f}, control "
                f"{control['median']:+.1f} ({control['low']:+.1f} to {control['high']:+.1f}), {above['n']} rounds",
            )
        shown = measured["fresh"]
        late = sum(shown["missed"].values())
        check(
            "the next reading shows every array",
            late == 0 and shown["arrays"] >= 300,
            f"{late} of {shown['arrays']} missed",
        )

    def of_ticks(check: Callable[[str, bool, str], None]) -> None:
        for name, told in tick_checks(scenarios["ticking"].get("at_work")).items():
            check(name, *told)

    return judged(_listed.READINGS, {"readings": of_readings, "ticking": of_ticks}, scenarios)


def tick_checks(tick: dict[str, Any] | None) -> dict[str, tuple[bool, str]]:
    """The bars of `at_work`; None if it was not measured."""
    found: dict[str, tuple[bool, str]] = {}
    for part, bar in TICK.items():
        found[f"tick at work: at most {bar} us of CPU ({part}), all six live"] = (
            tick is not None and tick["cpu_us"][part] <= bar and tick["cpu_us"]["n"] >= 300,
            "not measured" if tick is None else tick_in_words(tick),
        )
    whole = tick is not None and tick["events"].get("pressure") and tick["samples_written"] >= tick["cpu_us"]["n"]
    found["tick at work: samples were written, and events called back"] = (
        bool(whole),
        "not measured" if tick is None else f"{tick['samples_written']} samples, events {tick['events']}",
    )
    return found


def tick_in_words(tick: dict[str, Any]) -> str:
    cpu, wall = tick["cpu_us"], tick["wall_us"]
    return (
        f"{cpu['median']:.0f} us median (90 %: {cpu['p90']:.0f}) of {cpu['n']} ticks; {wall['median']:.0f} us "
        f"({wall['p90']:.0f}) with what it waits for the GIL; of a program that sleeps "
        f"{tick['idle']['cpu_us']['median']:.0f}; back to back {tick['back_to_back_us']['median']:.0f}"
    )


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {"readings": readings, "ticking": ticking}


@contextlib.contextmanager
def without_gpu() -> Iterator[dict[str, str]]:
    """The environment of a scenario on a machine that has no GPU: libraries that stand in for the driver's."""
    faults = ROOT / "tests" / "faults"
    sys.path.insert(0, str(faults))
    from six_live import scenario

    uuid = "GPU-11111111-1111-1111-1111-111111111111"
    with tempfile.TemporaryDirectory() as folder:
        for library, sources, more in (
            ("libnvidia-ml.so.1", ["nvml_stub.c"], ["-DONCE"]),
            ("libcuda.so.1", ["cuda_stub.c", "../native/memory_stub.c"], []),
        ):
            paths = [str(faults / source) for source in sources]
            subprocess.run(["gcc", "-O2", "-shared", "-fPIC", *more, "-o", f"{folder}/{library}", *paths], check=True)
        gpu = Path(folder) / "scenario"
        gpu.write_text("".join(f"{key}={value}\n" for key, value in scenario(uuid).items()))
        path = os.pathsep.join([folder, os.environ.get("LD_LIBRARY_PATH", "")])
        yield {"LD_LIBRARY_PATH": path, "NVML_STUB": str(gpu), "CUDA_STUB_UUIDS": uuid, STUB: uuid}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scenario", choices=sorted(SCENARIOS))
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.scenario:
        emit(SCENARIOS[arguments.scenario]())
        return
    about = header("python benchmarks/readings.py")
    about["stand_ins"] = about["gpu"] is None
    scenarios = {}
    for name in SCENARIOS:
        with contextlib.ExitStack() as stand_ins:
            env = stand_ins.enter_context(without_gpu()) if about["stand_ins"] else {}
            outcome = run_scenario(__file__, name, env=env, timeout=TICKING_SECONDS + 240)
        error = outcome.pop("_stderr")
        if outcome["returncode"]:
            print(error[-2000:], file=sys.stderr, flush=True)
        scenarios[name] = outcome
    result: dict[str, Any] = {"about": about, "scenarios": scenarios, "checks": readings_checks(scenarios)}
    conclude(result, arguments.output)
    if about["stand_ins"]:
        print("no GPU: the driver and the frameworks were stand-ins, and these figures say nothing about a GPU")


if __name__ == "__main__":
    main()

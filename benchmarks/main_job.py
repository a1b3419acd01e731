"""The main job on a real GPU: one budget caps TensorFlow, PyTorch and PyCUDA in one process.

    python benchmarks/main_job.py -o benchmarks/results/h200-main-job.json

Every scenario runs in a process of its own; another one samples NVML, every 50 ms or as often as it can.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _independent import emptied, raw_memory, refusals
from _run import GIB, MIB, attempt, conclude, header, main, run_scenario

SEED = 20261121
LIMIT = 40 * GIB
TOGETHER = {
    "version": 1,
    "device": {"limit": "40GiB"},
    "frameworks": {"tensorflow": {"share": "30%"}, "torch": {"share": "50%"}, "pycuda": {"share": "20%"}},
}


def single(framework: str, cap: str) -> dict[str, Any]:
    return {"version": 1, "device": {"limit": "40GiB"}, "frameworks": {framework: {"limit": cap}}}


def reading(label: str) -> dict[str, Any]:
    """One ledger reading. Its rows add up to the total whatever they say: `unaccounted` is the remainder."""
    import memguard

    part = memguard.ledger().devices[0]
    known = [row.bytes for row in part.rows if row.bytes is not None]
    return {
        "label": label,
        "sum_minus_total": sum(known) - part.device.total,
        "process": part.process,
        "unaccounted": part.row("unaccounted").bytes,
        "overhead": part.row("overhead").bytes,
        "moved": part.moved,
        "frameworks": {
            row.name: {"held": row.bytes, "in_use": row.in_use, "at_least": row.at_least, "at_most": row.at_most}
            for row in part.rows
            if row.kind == "framework"
        },
    }


def drive(
    allocate: Callable[[int], Any],
    native: type[BaseException],
    held: Callable[[], int | None],
    would_fit: Callable[[int], bool | None],  # by rules that are not memguard's; None where others judge it
    cap: int,
    seed: int = SEED,
) -> dict[str, Any]:
    """Random requests of 1-300 MiB until one is refused, then of at most 1 MiB until one is refused."""
    rng = random.Random(seed)
    live: list[Any] = []
    phases = []
    most = 0
    for low, high in ((1 * MIB, 300 * MIB), (1, 1 * MIB)):
        count = 0
        while True:
            size = rng.randint(low, high)
            try:
                live.append(allocate(size))
            except Exception as error:
                fitting = would_fit(size)
                phases.append(
                    {
                        "allocations": count,
                        "refused_bytes": size,
                        "exception": f"{type(error).__module__}.{type(error).__qualname__}",
                        "native": isinstance(error, native),
                        "held_at_refusal": held(),
                        "would_have_fitted": fitting,
                        "text": str(error)[:160],
                    }
                )
                break
            count += 1
            most = max(most, held() or 0)
            if count > 200_000:
                phases.append({"allocations": count, "exception": None, "native": False})
                break
    return {"cap": cap, "most_held": most, "held_within_cap": most <= cap, "phases": phases, "live": live}


def drive_torch(cap: int, usable_cap: int | None = None) -> dict[str, Any]:
    import torch

    def held() -> int:
        return int(torch.cuda.memory_stats()["reserved_bytes.all.current"])

    def would_fit(size: int) -> bool:
        rounded = -(-size // 512) * 512
        segment = 2 * MIB if rounded <= MIB else 20 * MIB if rounded < 10 * MIB else -(-rounded // (2 * MIB)) * 2 * MIB
        return held() + segment <= (usable_cap or cap)

    return drive(
        lambda n: torch.empty(n, dtype=torch.uint8, device="cuda"), torch.OutOfMemoryError, held, would_fit, cap
    )


def drive_tensorflow(cap: int) -> dict[str, Any]:
    import tensorflow as tf

    def allocate(size: int) -> Any:
        with tf.device("GPU:0"):
            return tf.zeros((max(size // 4, 1),), tf.float32)

    def held() -> int:
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])

    # What its pool holds stands in TensorFlow's own log of the refusal; the parent reads it from there.
    return drive(allocate, tf.errors.ResourceExhaustedError, held, lambda size: None, cap)


def drive_pycuda(cap: int) -> dict[str, Any]:
    import pycuda.driver as drv

    import memguard._api

    framework = memguard._api.current().frameworks["pycuda"]
    device = memguard._api.current().plan.devices[0].device

    def held() -> int:
        usage = framework.usage(device)
        return usage.held if usage is not None else 0

    # Whether a refused request would have fitted is tried by `refusals`: only the driver knows the holes of its slabs.
    return drive(lambda n: drv.mem_alloc(n), drv.MemoryError, held, lambda size: None, cap)


def work_torch() -> None:
    import torch

    a = torch.randn(1024, 1024, device="cuda")
    conv = torch.nn.Conv2d(3, 8, 3, device="cuda")
    (conv(torch.randn(4, 3, 64, 64, device="cuda")).sum() + (a @ a).sum()).backward()
    torch.cuda.synchronize()


def work_tensorflow() -> None:
    import tensorflow as tf

    with tf.device("GPU:0"):
        a = tf.random.normal((1024, 1024))
        kernel = tf.random.normal((3, 3, 3, 8))
        float(tf.reduce_sum(tf.matmul(a, a))) + float(
            tf.reduce_sum(tf.nn.conv2d(tf.random.normal((4, 64, 64, 3)), kernel, 1, "SAME"))
        )


def work_pycuda() -> None:
    import numpy as np
    import pycuda.gpuarray as gpuarray

    a = gpuarray.to_gpu(np.ones(100_000, dtype=np.float32))
    (a + a).get()


def churn(driven: dict[str, Any], seconds: float) -> dict[str, int]:
    """Free a few and ask again, torch and PyCUDA in turn at their caps, refusals included. TensorFlow stays full:
    each refusal of its own takes it ten seconds of retries."""
    import pycuda.driver as drv
    import torch

    rng = random.Random(SEED + 2)
    allocate: dict[str, Callable[[int], Any]] = {
        "torch": lambda n: torch.empty(n, dtype=torch.uint8, device="cuda"),
        "pycuda": lambda n: drv.mem_alloc(n),
    }
    counts = {"allocated": 0, "refused": 0}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for name, take in allocate.items():
            live = driven[name]["live"]
            rng.shuffle(live)
            del live[: rng.randint(1, 4)]
            try:
                while True:
                    live.append(take(rng.randint(1, 300 * MIB)))
                    counts["allocated"] += 1
            except (torch.OutOfMemoryError, drv.MemoryError):
                counts["refused"] += 1
    return counts


def together() -> dict[str, Any]:
    """All three under 40 GiB, each driven to its refusal while the others stay full."""
    import memguard

    guard = memguard.init(TOGETHER)
    caps = dict(guard.plan.devices[0].caps)
    readings = [reading("init")]
    import tensorflow  # noqa: F401 (before torch, on purpose)
    import torch

    readings.append(reading("imported"))
    import pycuda.autoinit  # noqa: F401

    for work in (work_tensorflow, work_torch, work_pycuda):
        work()
        readings.append(reading(work.__name__))
    driven = {}
    for name, drive_one in (("tensorflow", drive_tensorflow), ("torch", drive_torch), ("pycuda", drive_pycuda)):
        driven[name] = drive_one(caps[name])
        readings.append(reading(f"{name} full"))
    time.sleep(1.0)  # all three full: at least twenty samples of 50 ms see it
    churned = churn(driven, seconds=6.0)
    readings.append(reading("churned"))
    time.sleep(0.5)
    in_turn = {name: emptied(name, lambda name=name: held_of(name), lambda name=name: give_up(driven[name], name))
               for name in ("torch", "pycuda")}  # fmt: skip
    driven["tensorflow"].pop("live")
    returned = memguard.trim()
    readings.append(reading("freed and trimmed"))
    raw = raw_memory(lambda: reading("raw memory")["unaccounted"])
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    stays = memguard.shutdown()
    return {
        "caps": caps,
        "sum_of_caps": sum(caps.values()),
        "reserve": guard.plan.devices[0].reserve,
        "driven": driven,
        "churn": churned,
        "readings": readings,
        "emptied": in_turn,
        "raw": raw,
        "trim_returned": returned,
        "multiprocessors": multiprocessors,
        "notes": guard.notes,
        "stays": stays,
    }


def row_of(name: str) -> dict[str, Any]:
    """What the ledger says of a framework."""
    row: dict[str, Any] = reading(name)["frameworks"][name]
    return row


def held_of(name: str) -> int | None:
    held: int | None = row_of(name)["held"]
    return held


def give_up(driven: dict[str, Any], name: str) -> None:
    """Free all that a framework was driven to, and what it keeps of it."""
    import memguard

    driven.pop("live").clear()
    memguard.trim(name)


def torch_and_pycuda() -> dict[str, Any]:
    """Ledger readings with exact frameworks only: what is unaccounted?"""
    import memguard

    guard = memguard.init(
        {
            "version": 1,
            "device": {"limit": "40GiB"},
            "frameworks": {"torch": {"share": "60%"}, "pycuda": {"share": "40%"}},
        }
    )
    readings = [reading("init")]
    import pycuda.autoinit  # noqa: F401
    import torch

    steps: list[tuple[str, Callable[[], Any]]] = [
        ("torch: first tensor", lambda: torch.zeros(1, device="cuda")),
        (
            "torch: matrix product",
            lambda: torch.randn(2048, 2048, device="cuda") @ torch.randn(2048, 2048, device="cuda"),
        ),
        ("torch: convolution, backward", work_torch),
        ("torch: svd", lambda: torch.linalg.svd(torch.randn(256, 256, device="cuda"))),
        ("pycuda: gpuarray", work_pycuda),
    ]
    for label, step in steps:
        step()
        torch.cuda.synchronize()
        readings.append(reading(label))
    caps = guard.plan.devices[0].caps
    a = drive_torch(caps["torch"])
    readings.append(reading("torch full"))
    b = drive_pycuda(caps["pycuda"])
    readings.append(reading("pycuda full"))
    rng = random.Random(SEED)
    for outcome in (a, b):
        rng.shuffle(outcome["live"])
        del outcome["live"][::2]
    readings.append(reading("half freed"))
    memguard.trim()
    readings.append(reading("trimmed"))
    a.pop("live")
    b.pop("live")
    memguard.trim()
    readings.append(reading("all freed, trimmed"))
    return {"readings": readings}


def alone(framework: str, drive_one: Callable[[int], dict[str, Any]], cap: str = "4GiB") -> dict[str, Any]:
    import memguard

    guard = memguard.init(single(framework, cap))
    device = guard.plan.devices[0].device
    caps = guard.plan.devices[0].caps
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()
    before = guard.host.processes(device).get(os.getpid()) or 0
    outcome = drive_one(caps[framework])
    after = guard.host.processes(device).get(os.getpid()) or 0
    usage = guard.frameworks[framework].usage(device)
    outcome["nvml_growth"] = after - before
    outcome["held_by_ledger"] = usage.held if usage is not None else None
    rng = random.Random(SEED + 1)
    rng.shuffle(outcome["live"])
    del outcome["live"][::2]
    try:
        while True:
            outcome["live"].append(torch.empty(rng.randint(MIB, 300 * MIB), dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        pass
    outcome["nvml_growth_after_churn"] = (guard.host.processes(device).get(os.getpid()) or 0) - before
    outcome.pop("live")
    return outcome


def torch_expandable() -> dict[str, Any]:
    return alone("torch", lambda cap: drive_torch(cap, usable_cap=cap - 20 * MIB))


def torch_async() -> dict[str, Any]:
    import torch

    def held() -> int:
        import memguard._api

        guard = memguard._api.current()
        usage = guard.frameworks["torch"].usage(guard.plan.devices[0].device)
        return (usage.held or 0) if usage is not None else 0

    def drive_one(cap: int) -> dict[str, Any]:
        return drive(
            lambda n: torch.empty(n, dtype=torch.uint8, device="cuda"),
            torch.OutOfMemoryError,
            held,
            lambda size: held() + -(-size // (32 * MIB)) * 32 * MIB <= cap,
            cap,
        )

    return alone("torch", drive_one)


def without_memguard() -> dict[str, Any]:
    """The same script without memguard: what TensorFlow takes, and who dies how."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def own() -> int:
        found = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return next((p.usedGpuMemory for p in found if p.pid == os.getpid()), 0)

    result: dict[str, Any] = {}
    import tensorflow as tf

    tf.zeros((4,)).numpy()
    result["tensorflow_took"] = own()
    result["left_free"] = pynvml.nvmlDeviceGetMemoryInfo(handle).free

    def attempt(name: str, work: Callable[[], Any]) -> None:
        try:
            work()
            result[name] = {"exception": None}
        except BaseException as error:
            result[name] = {
                "exception": f"{type(error).__module__}.{type(error).__qualname__}",
                "text": str(error)[:400],
            }

    def torch_work() -> None:
        import torch

        torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")

    def pycuda_work() -> None:
        import pycuda.autoinit  # noqa: F401
        import pycuda.driver as drv

        drv.mem_alloc(4 * GIB)

    attempt("torch", torch_work)
    attempt("pycuda", pycuda_work)
    result["names_tensorflow"] = any(
        "tensorflow" in str(v.get("text", "")).lower() for v in (result["torch"], result["pycuda"])
    )
    return result


def order_cured(tensorflow_first: bool) -> dict[str, Any]:
    """TensorFlow imported before torch, with the cure: before `init`, or after it."""
    import memguard

    if tensorflow_first:
        import tensorflow  # noqa: F401
    guard = memguard.init(TOGETHER)
    import tensorflow as tf
    import torch

    a = torch.randn(512, 512, device="cuda")
    finite = bool((a @ a).isfinite().all())
    with tf.device("GPU:0"):
        tf_right = float(tf.reduce_sum(tf.matmul(tf.ones((8, 8)), tf.ones((8, 8)))))
    return {
        "matmul_finite": finite,
        "tensorflow_matmul": tf_right,
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "notes": guard.notes,
    }


def order_control() -> dict[str, Any]:
    import tensorflow  # noqa: F401
    import torch

    a = torch.randn(512, 512, device="cuda")
    print("multiprocessors", torch.cuda.get_device_properties(0).multi_processor_count, flush=True)
    return {"matmul_finite": bool((a @ a).isfinite().all())}


def circumstance(framework: str, when: str) -> dict[str, Any]:
    """Cap of 2 GiB: does it hold, and is it undone by shutdown?"""
    import memguard

    cap = 2 * GIB
    piece = 64 * MIB
    budget = single(framework, "2GiB")

    def load() -> tuple[Callable[[int], Any], type[BaseException]]:
        if framework == "torch":
            import torch

            return (lambda n: torch.empty(n, dtype=torch.uint8, device="cuda")), torch.OutOfMemoryError
        if framework == "pycuda":
            import pycuda.autoinit  # noqa: F401
            import pycuda.driver as drv

            return (lambda n: drv.mem_alloc(n)), drv.MemoryError
        import tensorflow as tf

        def allocate(n: int) -> Any:
            with tf.device("GPU:0"):
                return tf.zeros((n // 4,), tf.float32)

        return allocate, tf.errors.ResourceExhaustedError

    before: list[Any] = []
    if when == "imported":
        if framework == "pycuda":
            import pycuda.driver
            import pycuda.gpuarray  # noqa: F401  (its defaults hold mem_alloc already)
        else:
            __import__(framework)
    elif when == "live":
        allocate, native = load()
        before = [allocate(piece) for _ in range(40)]  # 2.5 GiB: above the cap
    try:
        guard = memguard.init(budget)
    except memguard.CapNotApplied as error:
        return {"refused": str(error), "expected": framework == "tensorflow" and when == "live"}
    allocate, native = load()
    device = guard.plan.devices[0].device
    live: list[Any] = []
    raised = None
    try:
        while len(live) < 100:
            live.append(allocate(piece))
    except native as error:
        raised = f"{type(error).__module__}.{type(error).__qualname__}"
    usage = guard.frameworks[framework].usage(device)
    held = (usage.held if usage.held is not None else usage.held_at_least) if usage is not None else None
    enforcement = memguard.ledger().devices[0].row(framework).enforcement
    if framework == "pycuda":
        import numpy as np
        import pycuda.gpuarray as gpuarray

        try:
            gpuarray.zeros(cap, np.uint8)
            through_gpuarray = "not refused"
        except native:
            through_gpuarray = "refused"
    else:
        through_gpuarray = None
    stays = memguard.shutdown()
    beyond = None
    try:
        more = [allocate(piece) for _ in range(40)]
        beyond = len(more) * piece
    except native:
        beyond = 0
    return {
        "enforcement": enforcement,
        "raised": raised,
        "allocated_under_cap": len(live) * piece,
        "allocated_before_init": len(before) * piece,
        "held": held,
        "cap": cap,
        "through_gpuarray": through_gpuarray,
        "notes": guard.notes,
        "stays": stays,
        "allocated_after_shutdown": beyond,
    }


def tensorflow_undone() -> dict[str, Any]:
    """Capped, and shut down before TensorFlow's first operation: then it is as if nothing had been."""
    import memguard

    environment = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
    memguard.init(single("tensorflow", "2GiB"))
    import tensorflow as tf

    gpu = tf.config.list_physical_devices("GPU")[0]
    limited = tf.config.get_logical_device_configuration(gpu)[0].memory_limit
    stays = memguard.shutdown()
    after = tf.config.get_logical_device_configuration(gpu)
    with tf.device("GPU:0"):
        beyond = tf.zeros((3 * GIB // 4,), tf.float32)
    return {
        "limited_mib": limited,
        "configuration_after": after,
        "environment_restored": os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") == environment,
        "stays": stays,
        "allocated_after_shutdown": int(beyond.shape[0]) * 4,
    }


FRAMEWORKS = ("torch", "tensorflow", "pycuda")
SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "together": together,
    "torch_and_pycuda": torch_and_pycuda,
    "torch_expandable": torch_expandable,
    "torch_async": torch_async,
    "refusals of pycuda": lambda: refusals("pycuda"),
    "without_memguard": without_memguard,
    "order_cured": lambda: order_cured(False),
    "order_cured_tensorflow_first": lambda: order_cured(True),
    "order_control": order_control,
    "tensorflow-undone": tensorflow_undone,
    **{
        f"{framework}-{when}": (lambda f=framework, w=when: circumstance(f, w))
        for framework in FRAMEWORKS
        for when in ("later", "imported", "live")
    },
}
ENVIRONMENTS = {
    "torch_expandable": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    "torch_async": {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"},
}


def bfc_refusals(log: str) -> list[dict[str, Any]]:
    """What TensorFlow's allocator logs about itself at each refusal, as it prints it (two decimals)."""
    size = r"([\d.]+)([KMGT]i)?B"
    pattern = rf"Total size in pool: {size} memory_limit_: {size} available size: {size}"
    scale = {"": 1, "Ki": 1 << 10, "Mi": MIB, "Gi": GIB, "Ti": 1 << 40}
    found = []
    for match in re.finditer(pattern, log):
        pool, limit, available = (float(match[i]) * scale[match[i + 1] or ""] for i in (1, 3, 5))
        found.append({"text": match[0], "pool": int(pool), "memory_limit": int(limit), "available": int(available)})
    return found


def mixed_workload(output: Path | None) -> dict[str, Any]:
    """The example as a user runs it; its ledger goes into the README, its trace beside the output."""
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, str(root / "examples" / "mixed_workload.py")]
    if output:
        command += ["--record", str(output.parent / "mixed-h200.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180)
    ledger = done.stdout.partition("ledger after the work")[2].strip("\n")
    return {"returncode": done.returncode, "ledger": ledger, "stdout": done.stdout, "stderr_tail": done.stderr[-500:]}


def parent(output: Path | None) -> None:
    result: dict[str, Any] = {"about": header("python benchmarks/main_job.py"), "seed": SEED, "limit": LIMIT}
    scenarios: dict[str, Any] = {}
    for name in SCENARIOS:
        outcome = run_scenario(__file__, name, env=ENVIRONMENTS.get(name))
        log = outcome.pop("_stderr")
        if name == "together":
            outcome["tensorflow_log"] = bfc_refusals(log)
            if os.environ.get("MEMGUARD_BENCH_LOG"):
                Path(os.environ["MEMGUARD_BENCH_LOG"]).write_text(log[-200_000:])
        scenarios[name] = outcome
        print(f"{name}: rc {outcome['returncode']}, {outcome['seconds']} s", file=sys.stderr, flush=True)
        if outcome["returncode"] != 0 and "stderr_tail" in outcome and name != "order_control":
            print(outcome["stderr_tail"][-500:], file=sys.stderr, flush=True)
    result["scenarios"] = scenarios
    result["mixed_workload"] = attempt(lambda: mixed_workload(output))
    result["checks"] = checks({**scenarios, "mixed_workload": result["mixed_workload"]})
    conclude(result, output)


def checks(s: dict[str, Any]) -> dict[str, tuple[bool, str]]:
    """What the main job must show, each with its figure."""
    from checks import main_job_checks

    return main_job_checks(s)


if __name__ == "__main__":
    main(__file__, SCENARIOS, parent)

"""Arrays handed between frameworks on a real GPU: the same memory, in the right order, alive, quick, and nothing lost.

    python benchmarks/exchange.py -o benchmarks/results/h200-exchange.json
    python benchmarks/exchange.py --only peers -o benchmarks/results/h200-x2-exchange.json     # two GPUs

`--only` takes names of scenarios or how they begin, separated by semicolons. Every scenario is a process of its own;
those that are timed run alone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _arrays
import _order
from _arrays import BUFFERS, DTYPES, NAMES, ON_CPU, PAIRS, by_hand, facts, make, nvml_bytes, quiet, raw, read, start
from _edges import cases, expected
from _run import GIB, budget_of_six, conclude, emit, header, merged, run_scenario

ROUNDS = int(os.environ.get("MEMGUARD_EXCHANGE_ROUNDS", "1000"))
HAND_OVERS = int(os.environ.get("MEMGUARD_EXCHANGE_HAND_OVERS", "10000"))
TIMED = int(os.environ.get("MEMGUARD_EXCHANGE_TIMED", "200"))
SETTLING = float(os.environ.get("MEMGUARD_EXCHANGE_SETTLING", "8"))
"""Seconds before anything is timed: what JAX and TensorFlow compile in the background takes the first pairs 1.5 times
as long (measured), and those by hand too."""
WHOLE = int(os.environ.get("MEMGUARD_EXCHANGE_BYTES", str(GIB)))
"""Bytes of the timed array."""


def exchange() -> Any:
    import memguard.exchange

    return memguard.exchange


def refusal(error: BaseException) -> str:
    text = str(error).split("\n    fix:")[0]
    return f"{type(error).__name__}: {text}"[:300]


def still_open() -> int:
    """Hand-overs that have not ended a moment after the last view was freed."""
    from memguard.exchange import lifetimes

    gc.collect()
    for _ in range(200):
        lifetimes.sweep()
        if not lifetimes._open and not lifetimes._parked:
            return 0
        time.sleep(0.005)
    return len(lifetimes._open) + len(lifetimes._parked)


# The same memory


def pairs() -> dict[str, Any]:
    """Every ordered pair: the pointer, the values, a copy, and the array alive when its maker has let go of it."""
    import numpy as np

    from memguard.exchange.adapters import registry

    missing = {}
    start(*NAMES)
    for name in BUFFERS:
        try:
            make(name, np.arange(16, dtype=np.float32))
        except Exception as error:
            missing[name] = refusal(error)
    values = np.arange(4096, dtype=np.float32)
    found: dict[str, Any] = {}
    sources = [*NAMES, *(name for name in BUFFERS if name not in missing)]
    for source in sources:
        for target in NAMES:
            if source == target:
                continue
            one: dict[str, Any] = {"call": registry.by_name(target).call, "waits": registry.by_name(target).waits}
            found[f"{source} > {target}"] = one
            try:
                x = make(source, values)
                address = facts(x).address
                y = exchange().to(x, target)
                one["same_pointer"] = facts(y).address == address
                one["route"] = str(exchange().last_route())
                one["right"] = read(y).tobytes() == values.tobytes()
                copied = exchange().to(x, target, copy=True)
                one["copy"] = facts(copied).address != address and read(copied).tobytes() == values.tobytes()
                one["copy_route"] = str(exchange().last_route())
                del x, copied
                gc.collect()
                more = make(source, values * 0 - 1)  # memory that had been let go of would be taken for this
                one["outlives"] = read(y).tobytes() == values.tobytes()
                del y, more
            except Exception as error:
                one["error"] = refusal(error)
    return {"pairs": found, "not_installed": missing, "open": still_open()}


def dtypes() -> dict[str, Any]:
    """Every dtype that a source can make, into every target: the same bytes under the same name, or a refusal."""
    start(*NAMES)
    found: dict[str, dict[str, str]] = {f"{source} > {target}": {} for source, target in PAIRS}
    for source in NAMES:
        for dtype in DTYPES:
            try:
                values = _arrays.host(dtype)
                x = make(source, values)
                before = facts(x)
                assert before.dtype == dtype, before.dtype
            except Exception as error:
                for target in NAMES:
                    if target != source:
                        found[f"{source} > {target}"][dtype] = f"not made: {refusal(error)}"[:160]
                continue
            for target in NAMES:
                if target != source:
                    found[f"{source} > {target}"][dtype] = _dtype_into(x, target, before, values)
    return {"dtypes": found, "open": still_open()}


def _dtype_into(x: Any, target: str, before: Any, values: Any) -> str:
    try:
        y = exchange().to(x, target)
        after = facts(y)
        if after.dtype != before.dtype:
            return f"wrong: it arrives as {after.dtype}"
        if after.address != before.address:
            return "wrong: another pointer"
        return "shared" if raw(after.address, values.nbytes) == values.tobytes() else "wrong: other values"
    except exchange().CannotShare as error:
        return refusal(error)
    except Exception as error:
        return f"wrong: {refusal(error)}"


def lent() -> dict[str, Any]:
    """Under a budget of all six: the ledger's figure of what is lent, and the process's bytes by NVML, pair by pair."""
    import numpy as np

    import memguard
    from memguard.exchange import lifetimes

    if not ON_CPU:
        memguard.init(budget_of_six())
    start(*NAMES, settings=False)
    values = np.ones(8 << 20, np.float32)  # 32 MiB
    found = {}

    def said(source: str) -> int | None:
        if ON_CPU:
            return sum(sum(rows.get(source, {}).values()) for rows in lifetimes.lent().values())
        row = memguard.ledger().devices[0].row(source)
        return getattr(row, "lent", None)

    for source, target in PAIRS:
        x = make(source, values)
        for _ in range(8):  # what is taken once: JAX takes a stream after the other
            exchange().to(x, target)
        still_open()
        held, before = nvml_bytes(), said(source)
        y = exchange().to(x, target)
        one = {"nbytes": values.nbytes, "nvml": held, "before": before or 0, "lent": said(source)}
        one["nvml_growth"] = nvml_bytes() - held
        reading = None if ON_CPU else memguard.ledger().devices[0]
        if reading is not None:
            one["sum_minus_total"] = sum(row.bytes or 0 for row in reading.rows) - reading.device.total
        del y
        still_open()
        one["after"] = said(source) or 0
        found[f"{source} > {target}"] = one
        del x
    return {"lent": found}


# What cannot be shared as it lies there


def edges(source: str) -> dict[str, Any]:
    """Every odd array of a source into every target, in children: one that dies is counted, and the rest still run."""
    rows: list[dict[str, Any]] = []
    deaths: list[dict[str, Any]] = []
    skip: list[str] = []
    not_made: dict[str, str] = {}
    for _ in range(12):
        try:
            child = subprocess.run(
                [sys.executable, __file__, "--edges", source, "--skip", json.dumps(skip)],
                capture_output=True, text=True, timeout=150,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            said = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            deaths.append({"case": said.splitlines()[-1:], "returncode": "it hung"})
            break
        under_way = None
        for line in child.stdout.splitlines():
            kind, _, text = line.partition(" ")
            if kind == "CASE":
                under_way = text
            elif kind == "DONE":
                rows.append(json.loads(text))
                skip.append(f"{rows[-1]['case']} > {rows[-1]['target']}")
                under_way = None
            elif kind == "NOT_MADE":
                not_made.update(json.loads(text))
            elif kind == "END":
                return {"cases": rows, "deaths": deaths, "not_made": not_made, "open": int(text)}
        deaths.append({"case": under_way, "returncode": child.returncode, "stderr": child.stderr[-800:]})
        if under_way is None:
            break
        skip.append(under_way)
    return {"cases": rows, "deaths": deaths, "not_made": not_made, "open": -1}


def edges_of(source: str, skip: list[str]) -> None:
    """The child."""

    def tell(kind: str, text: str) -> None:
        print(kind, text, flush=True)

    start(*NAMES)
    for name, (x, values) in cases(source, lambda name, error: tell("NOT_MADE", json.dumps({name: refusal(error)}))):
        for target in NAMES:
            if f"{name} > {target}" in skip or (target == source and name != "read-only"):
                continue
            tell("CASE", f"{name} > {target}")
            tell("DONE", json.dumps({"case": name, "target": target, **_edge(name, x, values, target)}))
    x = values = None
    tell("END", str(still_open()))


def _edge(name: str, x: Any, values: Any, target: str) -> dict[str, Any]:
    import numpy as np

    about = None
    if values is not None:
        about = facts(x) if values.size else _arrays.Facts(0, values.shape, None, str(values.dtype))
    share, copy = expected(name, about, target)
    found = {"expected": share, "expected_copy": copy}

    def hand(**settings: Any) -> str:
        try:
            y = exchange().to(x, target, **settings)
        except exchange().CannotShare as error:
            found.setdefault("text", refusal(error))
            return "refused" if "fix:" in str(error) else "refused without a remedy"
        except Exception as error:
            return f"wrong: {refusal(error)}"
        if values is None:
            return "wrong: handed over"
        try:
            return looked_at(y, settings)
        except Exception as error:
            return f"wrong: when it is used: {refusal(error)}"

    def looked_at(y: Any, settings: dict[str, Any]) -> str:
        if settings.get("copy") is None and values.size and facts(y).address != facts(x).address:
            return "wrong: another pointer"
        if settings.get("copy") and values.size and facts(y).address == facts(x).address:
            return "wrong: no copy"
        got = read(y)
        if tuple(got.shape) != values.shape or not np.array_equal(got, values):
            return "wrong: other values"
        if values.dtype == np.float32:
            _arrays.use(y)
        return "shared"

    found["outcome"] = hand()
    copied = hand(copy=True)
    found["copy"] = "equal" if copied == "shared" else copied
    return found


# That it is memguard which prevents it


def control_misaligned() -> dict[str, Any]:
    """TensorFlow with an address that is 4 bytes past a multiple of 64, imported by hand."""
    start("torch", "tensorflow")
    import tensorflow as tf
    import torch

    x = torch.arange(1025, dtype=torch.float32, device=_arrays.device())[1:]
    with _arrays.on_gpu():
        y = tf.experimental.dlpack.from_dlpack(x.__dlpack__())
        return {"survived": float(tf.reduce_sum(tf.linalg.matmul(tf.reshape(y, (32, 32)), tf.ones((32, 32)))))}


def control_reversed() -> dict[str, Any]:
    """PyTorch with an array of CuPy's that runs backwards, imported by hand."""
    start("torch", *(() if ON_CPU else ("cupy",)))
    import numpy
    import torch

    if ON_CPU:
        return {"survived": str(torch.from_dlpack(numpy.arange(8.0)[::-1]))}
    import cupy

    return {"survived": str(torch.from_dlpack(cupy.arange(8.0)[::-1]))}


# Order


def order(source: str) -> dict[str, Any]:
    start(*NAMES)
    producer = _order.PRODUCERS[source]()
    found = {}
    for target in NAMES:
        if target == source:
            continue
        consumer = _order.Consumer(target)

        def hand(x: Any, target: str = target) -> Any:
            return exchange().to(x, target)

        _order.rounds(producer, consumer, hand, 3)
        found[f"{source} > {target}"] = _order.rounds(producer, consumer, hand, ROUNDS, within=35)
    return {"order": found, "producer_s": getattr(producer, "seconds", _order.SECONDS), "open": still_open()}


def dropped() -> dict[str, Any]:
    """The view goes while the consumer still reads, and the producer's memory is taken and overwritten at once."""
    names = ("torch", "tensorflow") if ON_CPU else ("torch", "tensorflow", "cupy", "jax")
    start(*names)
    import tensorflow as tf
    import torch

    count = min(ROUNDS, 100)
    found, without = {}, {}
    take = tf.experimental.dlpack.from_dlpack
    pairs = ("torch", "tensorflow"), ("cupy", "tensorflow"), ("jax", "tensorflow"), ("cupy", "torch"), ("jax", "torch")
    for producer, consumer in pairs:
        if producer in names:

            def hand(x: Any, consumer: str = consumer) -> Any:
                return exchange().to(x, consumer)

            _order.dropped(producer, consumer, hand, 3)
            found[f"{producer} > {consumer}"] = _order.dropped(producer, consumer, hand, count)
    ways: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
        "torch > tensorflow: tf.experimental.dlpack.from_dlpack(x.__dlpack__())": (
            "torch", "tensorflow", lambda x: take(x.__dlpack__())
        ),
    }  # fmt: skip
    if not ON_CPU:
        ways["cupy > torch: torch.from_dlpack(x)"] = ("cupy", "torch", torch.from_dlpack)
        # JAX keeps what it has lent by DLPack. Its memory is taken again only if nothing keeps it.
        bare = "jax > torch: torch.as_tensor of the address alone"
        ways[bare] = ("jax", "torch", lambda x: torch.as_tensor(_order.Bare(x), device="cuda"))
    for name, (producer, consumer, call) in ways.items():
        without[name] = _order.dropped(producer, consumer, call, count)
    return {"dropped": found, "without": without, "open": still_open()}


# Speed


def speed() -> dict[str, Any]:
    """A GiB on idle streams: memguard's hand-over and each one by hand in turn, the view's end included."""
    start(*NAMES)
    import numpy as np

    values = np.ones(WHOLE // 4, np.float32)
    sources = {name: make(name, values) for name in NAMES}
    for source, target in PAIRS:  # what is compiled and started once
        for call in (lambda x, target=target: exchange().to(x, target), *by_hand(source, target).values()):
            with contextlib.suppress(Exception):  # told of below
                call(sources[source])
    _arrays.wait()
    time.sleep(SETTLING)
    found: dict[str, Any] = {}
    for source, target in PAIRS:
        x = sources[source]
        calls: dict[str, Callable[[Any], Any]] = {"memguard": lambda x, target=target: exchange().to(x, target)}
        failed = {}
        for way, call in by_hand(source, target).items():
            try:
                assert facts(call(x)).address == facts(x).address, "it copies"
                calls[way] = call
            except Exception as error:
                failed[way] = refusal(error)
        times: dict[str, list[float]] = {way: [] for way in calls}
        for call in calls.values():
            for _ in range(10):
                _once(call, x)
        _arrays.wait()
        with quiet():
            for _ in range(TIMED):
                for way, call in calls.items():
                    times[way].append(_once(call, x))
        spreads = {way: _spread(taken) for way, taken in times.items()}
        ours = spreads.pop("memguard")
        best = min(spreads, key=lambda way: spreads[way]["median_us"], default=None)
        found[f"{source} > {target}"] = {
            "memguard": ours,
            "by_hand": spreads,
            "by_hand_failed": failed,
            "best": best,
            "extra_us": None if best is None else round(ours["median_us"] - spreads[best]["median_us"], 2),
        }
    calls = _driver_calls()
    del sources, x
    return {"bytes": values.nbytes, "rounds": TIMED, "speed": found, "calls_us": calls, "host": _host_route(values)}


def _driver_calls() -> dict[str, float]:
    """Median microseconds of what a hand-over asks of the driver, beside all streams of the six frameworks, idle."""
    import ctypes

    if ON_CPU:
        return {}

    cuda, handle = _arrays.driver(), ctypes.c_void_p
    context, side, event, mode = handle(), handle(), handle(), ctypes.c_int(2)
    assert cuda.cuCtxGetCurrent(ctypes.byref(context)) == 0 and context.value
    assert cuda.cuStreamCreate(ctypes.byref(side), 1) == 0  # non-blocking
    assert cuda.cuEventCreate(ctypes.byref(event), 2) == 0  # without timing
    legacy = handle(1)
    calls: dict[str, Callable[[], int]] = {
        "cuStreamQuery, a stream": lambda: cuda.cuStreamQuery(side),
        "cuStreamQuery, the legacy stream": lambda: cuda.cuStreamQuery(legacy),
        "cuEventRecord, a stream": lambda: cuda.cuEventRecord(event, side),
        "cuEventRecord, the legacy stream": lambda: cuda.cuEventRecord(event, legacy),
        "cuCtxRecordEvent": lambda: cuda.cuCtxRecordEvent(context, event),
        "cuEventQuery": lambda: cuda.cuEventQuery(event),
        "cuStreamWaitEvent, a stream": lambda: cuda.cuStreamWaitEvent(side, event, 0),
        "cuStreamWaitEvent, the legacy stream": lambda: cuda.cuStreamWaitEvent(legacy, event, 0),
        "cuStreamIsCapturing": lambda: cuda.cuStreamIsCapturing(side, ctypes.byref(ctypes.c_int())),
        "cuThreadExchangeStreamCaptureMode": lambda: cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)),
        "cuCtxGetCurrent": lambda: cuda.cuCtxGetCurrent(ctypes.byref(handle())),
    }
    found = {}
    for name, call in calls.items():
        taken = []
        for _ in range(TIMED):
            _arrays.wait()
            begun = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begun)
        found[name] = round(statistics.median(taken) * 1e6, 2)
    cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(0)))
    cuda.cuEventDestroy_v2(event)
    cuda.cuStreamDestroy_v2(side)
    return found


def _once(call: Callable[[Any], Any], x: Any) -> float:
    begun = time.perf_counter()
    y = call(x)
    del y
    return time.perf_counter() - begun


def _spread(taken: list[float]) -> dict[str, float]:
    taken = sorted(taken)
    count = len(taken)
    figures = {"median_us": taken[count // 2], "p5_us": taken[count // 20], "p95_us": taken[count * 19 // 20]}
    return {name: round(figure * 1e6, 2) for name, figure in figures.items()}


def _host_route(values: Any, rounds: int = 3) -> dict[str, Any]:
    """Milliseconds from each framework to host memory, and from there to each: any pair's route is one of each."""
    downs: dict[str, list[float]] = {name: [] for name in NAMES}
    ups: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(rounds):
        for name in NAMES:
            _arrays.wait()
            begun = time.perf_counter()
            x = make(name, values)
            _arrays.wait()
            ups[name].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            fetched = read(x)
            downs[name].append(time.perf_counter() - begun)
            assert fetched[0] == values[0]
            del x, fetched
    return {
        "to_host_ms": {name: round(statistics.median(taken) * 1e3, 2) for name, taken in downs.items()},
        "from_host_ms": {name: round(statistics.median(taken) * 1e3, 2) for name, taken in ups.items()},
        "rounds": rounds,
    }


# Nothing is lost


def leak() -> dict[str, Any]:
    """Hand-overs over all pairs: what the process holds, on the GPU and the host, before and after."""
    start(*NAMES)
    import numpy as np

    values = np.ones(1 << 20, np.float32)
    sources = {name: make(name, values) for name in NAMES}
    to = exchange().to
    for _ in range(20):
        for source, target in PAIRS:
            to(sources[source], target)
    first = still_open()
    _arrays.wait()
    bytes_before, rss_before = nvml_bytes(), _rss()
    each = -(-HAND_OVERS // len(PAIRS))
    for _ in range(each):
        for source, target in PAIRS:
            to(sources[source], target)
    after = still_open()
    _arrays.wait()
    return {
        "hand_overs": each * len(PAIRS),
        "nvml_before": bytes_before,
        "nvml_after": nvml_bytes(),
        "rss_growth_kib": _rss() - rss_before,
        "open_before": first,
        "open": after,
    }


def _rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


_CHILD = """
import json, os, sys, time
sys.path.insert(0, {benchmarks!r})
from _arrays import facts, raw, read, start
start("torch", *{names!r})
import memguard.exchange as exchange
print("READY", flush=True)
for line in sys.stdin:
    command, _, text = line.strip().partition(" ")
    if command == "attach":
        handle = exchange.Handle.parse(text)
        begun = time.perf_counter()
        y = exchange.attach(handle, {target!r})
        took = time.perf_counter() - begun
        told = {{"ms": took * 1e3, "first": float(read(y[:4])[0]), "last": float(read(y[-4:])[-1])}}
        print(json.dumps(told), flush=True)
    elif command == "drop":
        del y
        print("{{}}", flush=True)
"""


class Child:
    """Another process that attaches what its stdin names."""

    def __init__(self, target: str) -> None:
        code = _CHILD.format(benchmarks=str(Path(__file__).resolve().parent), names=(target,), target=target)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (a pipe that nobody reads fills up)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._said("READY")

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self._said("{"))
        return found

    def _said(self, beginning: str) -> str:
        """The next line that begins so: libraries print what they like."""
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            if not line:
                self._errors.seek(0)
                raise RuntimeError(f"the other process ended: {self._errors.read()[-1500:]}")
            if line.startswith(beginning):
                return line

    def kill(self) -> int:
        self.process.send_signal(signal.SIGKILL)
        return self.process.wait(30)


def killed() -> dict[str, Any]:
    """A process that has attached an array is killed with -9: what was exported goes back, to the byte."""
    start("torch", "cupy")
    import torch

    child = Child("cupy")
    x = torch.arange(WHOLE // 4, dtype=torch.int32, device="cuda").to(torch.float32)
    with exchange().export(x[: 1 << 20]):  # what is taken once
        pass
    torch.cuda.synchronize()
    before = nvml_bytes()
    handle = exchange().export(x)
    exported = nvml_bytes()
    told = child.ask(f"attach {handle}")
    attached = [handle.attached]
    returncode = child.kill()
    for _ in range(200):
        if not handle.attached:
            break
        time.sleep(0.01)
    attached.append(handle.attached)
    handle.close()
    after = nvml_bytes()
    for _ in range(100):
        if after == before:
            break
        time.sleep(0.02)
        after = nvml_bytes()
    del handle
    return {
        "bytes": WHOLE,
        "nvml_before": before,
        "nvml_exported": exported,
        "nvml_after": after,
        "attached": attached,
        "child": told,
        "last": float(x[-1]),
        "child_returncode": returncode,
        "open": still_open(),
    }


# The routes that are talked about


def routes() -> dict[str, Any]:
    """A GiB from PyTorch to TensorFlow, by each way: milliseconds, median of three (hand-over by DLPack: of 200)."""
    start("torch", "tensorflow")
    import numpy as np
    import tensorflow as tf
    import torch

    x = torch.arange(WHOLE // 4, dtype=torch.int32, device=_arrays.device()).to(torch.float32)
    _arrays.wait()
    last = float(x[-1])
    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=not ON_CPU)
    found: dict[str, Any] = {}

    def upload(values: Any) -> Any:
        with _arrays.on_gpu():
            y = tf.identity(tf.constant(values))
        assert float(y[-1]) == last
        _arrays.wait()
        return y

    def through_pinned() -> Any:
        pinned.copy_(x, non_blocking=True)
        _arrays.wait()
        return upload(pinned.numpy())

    def through_file(folder: str) -> Any:
        path = os.path.join(folder, "x.npy")
        try:
            np.save(path, x.cpu().numpy())
            return upload(np.load(path))
        finally:
            os.unlink(path)

    exchange().to(x, "tensorflow")
    found["DLPack, memguard.exchange.to"] = {"ms": _ms(lambda: exchange().to(x, "tensorflow"), TIMED)}
    found["pinned host memory"] = {"ms": _ms(through_pinned)}
    found["pageable host memory"] = {"ms": _ms(lambda: upload(x.cpu().numpy()))}
    for place in dict.fromkeys(("/dev/shm", tempfile.gettempdir())):
        kind = _filesystem(place)
        try:
            with tempfile.TemporaryDirectory(dir=place) as folder:
                ms = _ms(lambda folder=folder: through_file(folder), 1 if kind != "tmpfs" else 3)
            found[f".npy file on {kind}"] = {"ms": ms}
        except OSError as error:
            found[f".npy file on {kind}"] = {"error": str(error)}
    try:
        found["another process"] = _to_another(x, last)
    except Exception as error:
        found["another process"] = {"error": refusal(error)}
    return {"bytes": WHOLE, "routes": found}


def _to_another(x: Any, last: float) -> dict[str, Any]:
    child = Child("tensorflow")
    exports, attaches = [], []
    for _ in range(4):
        begun = time.perf_counter()
        handle = exchange().export(x)
        exports.append((time.perf_counter() - begun) * 1e3)
        told = child.ask(f"attach {handle}")
        assert told["last"] == last, told
        attaches.append(told["ms"])
        child.ask("drop")
        handle.close()
    child.kill()
    first = {"export_ms": round(exports[0], 2), "attach_ms": round(attaches[0], 2)}
    export, attach = statistics.median(exports[1:]), statistics.median(attaches[1:])
    return {
        "export_ms": round(export, 2),
        "attach_ms": round(attach, 2),
        "ms": round(export + attach, 2),
        "first": first,
    }


def _ms(call: Callable[[], Any], count: int = 3) -> float:
    taken = []
    for _ in range(count):
        _arrays.wait()
        begun = time.perf_counter()
        y = call()
        taken.append(time.perf_counter() - begun)
        del y
    return round(statistics.median(taken) * 1e3, 4)


def _filesystem(folder: str) -> str:
    """The kind of file system that a folder lies on."""
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind = line.split()[:3]
        inside = os.path.realpath(folder).startswith(mount.rstrip("/") + "/") or os.path.realpath(folder) == mount
        if inside and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


# Two GPUs


def peers() -> dict[str, Any]:
    """A GiB of PyTorch's on cuda:0 as an array of each framework on cuda:1."""
    import torch

    if torch.cuda.device_count() < 2:
        return {"gpus": torch.cuda.device_count()}
    start(*NAMES)
    x = torch.arange(WHOLE // 4, dtype=torch.int32, device="cuda:0").to(torch.float32)
    torch.cuda.synchronize()
    found: dict[str, Any] = {}
    for target in ("torch", "cupy", "tensorflow", "jax", "pycuda", "numba"):
        one: dict[str, Any] = {}
        found[target] = one
        before = _arrays.nvml_bytes_of(1)
        try:
            exchange().to(x, target, device=1)
            one["without_copy"] = "shared"
        except exchange().CannotShare as error:
            one["without_copy"] = refusal(error)
        except Exception as error:
            one["without_copy"] = f"wrong: {refusal(error)}"
        try:
            with _second_current(target):
                y = exchange().to(x, target, copy=True, device=1)
                one["route"] = str(exchange().last_route())
                one["right"] = bool(read(y).tobytes() == x.cpu().numpy().tobytes())
                one["context_and_array_mib"] = (_arrays.nvml_bytes_of(1) - before) >> 20
                del y
                times = []
                for _ in range(3):
                    _wait_both()
                    begun = time.perf_counter()
                    y = exchange().to(x, target, copy=True, device=1)
                    _wait_both()
                    times.append(time.perf_counter() - begun)
                    del y
                one["gb_per_s"] = round(WHOLE / statistics.median(times) / 1e9, 1)
        except Exception as error:
            one["error"] = refusal(error)
        one["second_gpu_mib_before"] = before >> 20
    can = torch.cuda.can_device_access_peer(0, 1)
    return {
        "gpus": torch.cuda.device_count(), "peer_access": can, "bytes": WHOLE, "peers": found, "open": still_open(),
        "by_route_gb_per_s": _rates_by_route(WHOLE),
    }  # fmt: skip


def _rates_by_route(nbytes: int) -> dict[str, float]:
    """GB/s of the driver's own copy between the GPUs, in contexts of our own: without peer access, and with it."""
    import ctypes

    cuda, handle = _arrays.driver(), ctypes.c_void_p
    contexts, blocks, before = [handle(), handle()], [ctypes.c_uint64(), ctypes.c_uint64()], handle()
    assert cuda.cuCtxGetCurrent(ctypes.byref(before)) == 0
    found: dict[str, float] = {}

    def rate() -> float:
        taken = []
        for _ in range(4):
            begun = time.perf_counter()
            assert cuda.cuMemcpyPeer(blocks[1], contexts[1], blocks[0], contexts[0], ctypes.c_size_t(nbytes)) == 0
            for context in contexts:
                assert cuda.cuCtxSetCurrent(context) == 0 and cuda.cuCtxSynchronize() == 0
            taken.append(time.perf_counter() - begun)
        return round(nbytes / statistics.median(taken[1:]) / 1e9, 1)

    for number, (context, block) in enumerate(zip(contexts, blocks)):
        assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, number) == 0
        assert cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(nbytes)) == 0
        cuda.cuCtxPopCurrent_v2(ctypes.byref(handle()))
    try:
        found["through the host"] = rate()
        codes = []
        for here, other in (contexts, contexts[::-1]):
            assert cuda.cuCtxSetCurrent(here) == 0
            codes.append(cuda.cuCtxEnablePeerAccess(other, 0))
        if codes == [0, 0]:
            found["peer to peer"] = rate()
    finally:
        cuda.cuCtxSetCurrent(before)
        for context in contexts:
            cuda.cuCtxDestroy_v2(context)
    return found


def _wait_both() -> None:
    import torch

    for number in range(2):
        torch.cuda.synchronize(number)


def _second_current(target: str) -> Any:
    """PyCUDA's and Numba's arrays are of the context that is current: the second GPU's has to be."""
    if target == "numba":
        from numba import cuda

        return cuda.gpus[1]
    return exchange().pycuda_context(1) if target == "pycuda" else contextlib.nullcontext()


X64 = {"JAX_ENABLE_X64": "1"}
SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"order from {name}": (lambda name=name: order(name)) for name in NAMES},
    "dropped": dropped,
    "pairs": pairs,
    "dtypes": dtypes,
    **{f"edges from {name}": (lambda name=name: edges(name)) for name in (*NAMES, *BUFFERS)},
    "lent": lent,
    "leak": leak,
    "order without memguard": lambda: _order.controls(min(ROUNDS, 50)),
    "control: misaligned into TensorFlow": control_misaligned,
    "control: reversed into PyTorch": control_reversed,
    "killed": killed,
    "speed": speed,
    "routes": routes,
    "peers": peers,
}
ALONE = ("speed", "routes", "peers")
"""What is timed."""
AT_ONCE = int(os.environ.get("MEMGUARD_AT_ONCE", "11"))


def run(name: str) -> dict[str, Any]:
    outcome = run_scenario(__file__, name, env=X64 if name == "dtypes" else None, timeout=220)
    outcome["stderr_tail"] = outcome.pop("_stderr")[-3000:] if outcome["returncode"] else ""
    print(f"{name}: rc {outcome['returncode']}, {outcome['seconds']} s", file=sys.stderr, flush=True)
    if outcome["returncode"] and not name.startswith("control"):
        print(outcome["stderr_tail"][-1500:], file=sys.stderr, flush=True)
    return outcome


def chosen(only: str | None) -> list[str]:
    if only is None:
        return [name for name in SCENARIOS if name != "peers"]
    parts = only.split(";")
    return [
        name for name in SCENARIOS if any(name == part or name.startswith((f"{part} ", f"{part}:")) for part in parts)
    ]


def main() -> None:
    from concurrent.futures import ThreadPoolExecutor

    parser = argparse.ArgumentParser()
    parser.add_argument("--scenario", choices=sorted(SCENARIOS))
    parser.add_argument("--edges")
    parser.add_argument("--skip", type=json.loads, default=[])
    parser.add_argument("--only", help="names of scenarios or their beginnings, separated by semicolons; else all")
    parser.add_argument("--merge", type=Path, action="append", default=[], help="scenarios from another run's JSON")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.edges:
        edges_of(arguments.edges, arguments.skip)
        return
    if arguments.scenario:
        emit(SCENARIOS[arguments.scenario]())
        return
    from checks import exchange_checks

    if ON_CPU and arguments.output:
        parser.error("arrays on the host are for trying only, and make no result")
    before = merged(arguments.merge, "scenarios")["scenarios"]
    names = [name for name in chosen(arguments.only) if name not in before]
    together = [name for name in names if name not in ALONE]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        scenarios = dict(zip(together, pool.map(run, together)))
    for name in names:
        if name in ALONE:
            scenarios[name] = run(name)
    scenarios.update(before)
    only = "" if arguments.only is None else f' --only "{arguments.only}"'
    result: dict[str, Any] = {"about": header(f"python benchmarks/exchange.py{only}"), "scenarios": scenarios}
    result["checks"] = exchange_checks(scenarios)
    conclude(result, arguments.output)


if __name__ == "__main__":
    main()

"""Exchanges between frameworks on a GPU, pair by pair, for the tests of `memguard.exchange`.

python tests/support/exchanged.py edges SOURCE SKIPPED     one framework's unusual arrays: a child process of `edges`
python tests/support/exchanged.py misaligned|reversed      by hand, an exchange that memguard refuses: it crashes
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support import arrays
from support import order as ordered
from support.arrays import BUFFERS, DTYPES, NAMES, ON_CPU, PAIRS, facts, make, nvml_bytes, raw, read, start
from support.driving import budget_of_six
from support.edges import cases, expected

GIB = 1 << 30


def exchange() -> Any:
    import memguard.exchange

    return memguard.exchange


def refusal(error: BaseException) -> str:
    text = str(error).split("\n    fix:")[0]
    return f"{type(error).__name__}: {text}"[:300]


def still_open() -> int:
    """Exchanges still open shortly after the last view was freed."""
    from memguard._frameworks.arrays import lifetimes

    gc.collect()
    for _ in range(200):
        lifetimes.sweep()
        if not lifetimes._open and not lifetimes._parked:
            return 0
        time.sleep(0.005)
    return len(lifetimes._open) + len(lifetimes._parked)


def pairs() -> dict[str, Any]:
    """For each ordered pair, check the pointer, the values, a copy, and that the view keeps the array's memory
    alive."""
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
                more = make(source, values * 0 - 1)  # freed memory would be reused for this
                one["outlives"] = read(y).tobytes() == values.tobytes()
                del y, more
            except Exception as error:
                one["error"] = refusal(error)
    return {"pairs": found, "not_installed": missing, "open": still_open()}


def dtypes() -> dict[str, Any]:
    """Pass every dtype of a source into every target: expect the same bytes under the same name, or a refusal."""
    start(*NAMES)
    found: dict[str, dict[str, str]] = {f"{source} > {target}": {} for source, target in PAIRS}
    for source in NAMES:
        for dtype in DTYPES:
            try:
                values = arrays.host(dtype)
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
    """Under a budget for all six, record the ledger's lent bytes and the process's bytes by NVML, pair by pair."""
    import numpy as np

    import memguard
    from memguard._frameworks.arrays import lifetimes

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
        for _ in range(8):  # one-time allocations: JAX creates its streams one by one
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


def edges(source: str) -> dict[str, Any]:
    """Pass each source's unusual arrays to every target, in child processes: count a crash and run the remaining
    ones."""
    rows: list[dict[str, Any]] = []
    deaths: list[dict[str, Any]] = []
    skip: list[str] = []
    not_made: dict[str, str] = {}
    for _ in range(12):
        try:
            child = subprocess.run(
                [sys.executable, __file__, "edges", source, json.dumps(skip)],
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
    """The child process of `edges`."""

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
        about = facts(x) if values.size else arrays.Facts(0, values.shape, None, str(values.dtype))
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
            arrays.use(y)
        return "shared"

    found["outcome"] = hand()
    copied = hand(copy=True)
    found["copy"] = "equal" if copied == "shared" else copied
    return found


def control_misaligned() -> dict[str, Any]:
    """Import an address 4 bytes past a multiple of 64 into TensorFlow, by hand."""
    start("torch", "tensorflow")
    import tensorflow as tf
    import torch

    x = torch.arange(1025, dtype=torch.float32, device=arrays.device())[1:]
    with arrays.on_gpu():
        y = tf.experimental.dlpack.from_dlpack(x.__dlpack__())
        return {"survived": float(tf.reduce_sum(tf.linalg.matmul(tf.reshape(y, (32, 32)), tf.ones((32, 32)))))}


def control_reversed() -> dict[str, Any]:
    """Import a CuPy array with a negative stride into PyTorch, by hand."""
    start("torch", *(() if ON_CPU else ("cupy",)))
    import numpy
    import torch

    if ON_CPU:
        return {"survived": str(torch.from_dlpack(numpy.arange(8.0)[::-1]))}
    import cupy

    return {"survived": str(torch.from_dlpack(cupy.arange(8.0)[::-1]))}


def order(source: str, rounds: int) -> dict[str, Any]:
    start(*NAMES)
    producer = ordered.PRODUCERS[source]()
    found = {}
    for target in NAMES:
        if target == source:
            continue
        consumer = ordered.Consumer(target)

        def hand(x: Any, target: str = target) -> Any:
            return exchange().to(x, target)

        ordered.rounds(producer, consumer, hand, 3)
        found[f"{source} > {target}"] = ordered.rounds(producer, consumer, hand, rounds, within=35)
    return {"order": found, "producer_s": getattr(producer, "seconds", ordered.SECONDS), "open": still_open()}


def dropped(count: int) -> dict[str, Any]:
    """Drop the view while the consumer still reads, then reallocate and overwrite the producer's memory at once."""
    names = ("torch", "tensorflow") if ON_CPU else ("torch", "tensorflow", "cupy", "jax")
    start(*names)
    import tensorflow as tf
    import torch

    found, without = {}, {}
    take = tf.experimental.dlpack.from_dlpack
    pairs = ("torch", "tensorflow"), ("cupy", "tensorflow"), ("jax", "tensorflow"), ("cupy", "torch"), ("jax", "torch")
    for producer, consumer in pairs:
        if producer in names:

            def hand(x: Any, consumer: str = consumer) -> Any:
                return exchange().to(x, consumer)

            ordered.dropped(producer, consumer, hand, 3)
            found[f"{producer} > {consumer}"] = ordered.dropped(producer, consumer, hand, count)
    ways: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
        "torch > tensorflow: tf.experimental.dlpack.from_dlpack(x.__dlpack__())": (
            "torch", "tensorflow", lambda x: take(x.__dlpack__())
        ),
    }  # fmt: skip
    if not ON_CPU:
        ways["cupy > torch: torch.from_dlpack(x)"] = ("cupy", "torch", torch.from_dlpack)
        # JAX retains memory that it exported by DLPack. It is reused only if no reference remains.
        bare = "jax > torch: torch.as_tensor of the address alone"
        ways[bare] = ("jax", "torch", lambda x: torch.as_tensor(ordered.Bare(x), device="cuda"))
    for name, (producer, consumer, call) in ways.items():
        without[name] = ordered.dropped(producer, consumer, call, count)
    return {"dropped": found, "without": without, "open": still_open()}


def leak(hand_overs: int) -> dict[str, Any]:
    """Exchange over all pairs, and compare the process's GPU and host memory before and after."""
    start(*NAMES)
    import numpy as np

    values = np.ones(1 << 20, np.float32)
    sources = {name: make(name, values) for name in NAMES}
    to = exchange().to
    for _ in range(20):
        for source, target in PAIRS:
            to(sources[source], target)
    first = still_open()
    arrays.wait()
    bytes_before, rss_before = nvml_bytes(), _rss()
    each = -(-hand_overs // len(PAIRS))
    for _ in range(each):
        for source, target in PAIRS:
            to(sources[source], target)
    after = still_open()
    arrays.wait()
    return {
        "hand_overs": each * len(PAIRS), "nvml_before": bytes_before, "nvml_after": nvml_bytes(),
        "rss_growth_kib": _rss() - rss_before, "open_before": first, "open": after,
    }  # fmt: skip


def _rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def peers(whole: int = GIB) -> dict[str, Any]:
    """Pass 1 GiB of PyTorch's on cuda:0 to each framework on cuda:1."""
    import torch

    if torch.cuda.device_count() < 2:
        return {"gpus": torch.cuda.device_count()}
    start(*NAMES)
    x = torch.arange(whole // 4, dtype=torch.int32, device="cuda:0").to(torch.float32)
    torch.cuda.synchronize()
    found: dict[str, Any] = {}
    for target in ("torch", "cupy", "tensorflow", "jax", "pycuda", "numba"):
        one: dict[str, Any] = {}
        found[target] = one
        before = arrays.nvml_bytes_of(1)
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
                one["context_and_array_mib"] = (arrays.nvml_bytes_of(1) - before) >> 20
                del y
                times = []
                for _ in range(3):
                    _wait_both()
                    begun = time.perf_counter()
                    y = exchange().to(x, target, copy=True, device=1)
                    _wait_both()
                    times.append(time.perf_counter() - begun)
                    del y
                one["gb_per_s"] = round(whole / statistics.median(times) / 1e9, 1)
        except Exception as error:
            one["error"] = refusal(error)
        one["second_gpu_mib_before"] = before >> 20
    can = torch.cuda.can_device_access_peer(0, 1)
    return {
        "gpus": torch.cuda.device_count(), "peer_access": can, "bytes": whole, "peers": found, "open": still_open(),
        "by_route_gb_per_s": _rates_by_route(whole),
    }  # fmt: skip


def _rates_by_route(nbytes: int) -> dict[str, float]:
    """GB/s of the driver's own copy between the GPUs, in separate contexts, without and with peer access."""
    import ctypes

    cuda, handle = arrays.driver(), ctypes.c_void_p
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

    for number, (context, block) in enumerate(zip(contexts, blocks, strict=False)):
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
    """PyCUDA's and Numba's arrays belong to the current context: select the second GPU's."""
    if target == "numba":
        from numba import cuda

        return cuda.gpus[1]
    return exchange().pycuda_context(1) if target == "pycuda" else contextlib.nullcontext()


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "edges":
        edges_of(arguments[0], json.loads(arguments[1]))
    else:
        print({"misaligned": control_misaligned, "reversed": control_reversed}[what]())


if __name__ == "__main__":
    main()

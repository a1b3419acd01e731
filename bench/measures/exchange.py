"""Hand-overs of 1 GiB between six frameworks: against the best way by hand, against the host, and what they leave."""

from __future__ import annotations

import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.child import emit, main
from bench.measure import Failed, Run, measure
from bench.programs.arrays import NAMES, PAIRS
from bench.programs.six import GIB, MIB

if TYPE_CHECKING:
    from memguard.types import FrameworkName

TIMED, ENOUGH = 200, 10_000
"""Hand-overs of each pair that are timed, and hand-overs in all after which nothing may be left."""
SETTLING = 8
"""Seconds before anything is timed: what JAX and TensorFlow compile in the background takes the first pairs 1.5 times
as long (measured), and those by hand too."""
ROUTES = ("dlpack", "pinned", "pageable")
EXTRA = [f"{source}-{target}" for source, target in PAIRS]


@measure(
    "exchange",
    unit={
        **dict.fromkeys(EXTRA, "µs over by hand"), **{f"to.{name}": "µs" for name in NAMES},
        "host": "ms", "over_host": "times as quick", **{f"route.{name}": "ms" for name in ROUTES},
        "process.export": "ms", "process.attach": "ms", "leak.gpu": "MiB", "leak.host": "MiB", "leak.open": "views",
    },
    bar={**dict.fromkeys(EXTRA, "<= 50"), "over_host": ">= 1", "leak.gpu": "<= 0", "leak.host": "<= 16",
         "leak.open": "<= 0"},
    seconds=50,
)  # fmt: skip
def exchange(run: Run) -> dict[str, Any]:
    """A hand-over of 1 GiB on idle streams, beyond the best way by hand in the same run, for each pair."""
    out = run.program("hand_overs", *(["quick"] if run.quick else []), timeout=140)
    found: dict[str, Any] = {}
    for pair, one in out["pairs"].items():
        found[pair] = one["extra"] or Failed(f"no way by hand worked: {one['failed']}")
    for target in NAMES:
        found[f"to.{target}"] = [one["ours"] for pair, one in out["pairs"].items() if pair.endswith(f"-{target}")]
    down, up = out["host"]["down"], out["host"]["up"]
    host = {f"{source}-{target}": down[source] + up[target] for source, target in PAIRS}
    found["host"] = list(host.values())
    found["over_host"] = [min(ms * 1e3 / statistics.median(out["pairs"][pair]["ours"]) for pair, ms in host.items())]
    for name in ROUTES:
        found[f"route.{name}"] = out["routes"][name]
    for name, value in out["leak"].items():
        found[f"leak.{name}"] = [value]
    try:
        return {**found, **_between_processes(run)}
    except Failed as error:
        return {**found, "process.export": error, "process.attach": error}


def _between_processes(run: Run) -> dict[str, list[float]]:
    """Milliseconds of an export with its copy, and of an attach in another process, after the first of each."""
    size = 16 * MIB if run.quick else GIB
    giver, taker = run.start("giver", size), run.start("taker")
    giver.read(), taker.read()
    exports, attaches = [], []
    for _ in range(run.rounds(8)):
        told = giver.ask("export")
        seen = taker.ask(f"attach {told['handle']}")
        if seen["last"] != told["last"]:
            raise Failed(f"the other process reads {seen['last']} instead of {told['last']}")
        exports.append(told["ms"])
        attaches.append(seen["ms"])
        taker.ask("drop")
        giver.ask("close")
    taker.end(), giver.end()
    return {"process.export": exports[1:], "process.attach": attaches[1:]}


# Within a process


def program_hand_overs(quick: str = "") -> dict[str, Any]:
    """Every figure of hand-overs within one process. Microseconds, but milliseconds where a copy is made."""
    import numpy as np

    from bench.programs import arrays

    arrays.start(*NAMES)
    values: Any = np.ones((16 * MIB if quick else GIB) // 4, np.float32)
    sources = {name: arrays.make(name, values) for name in NAMES}
    for source, target in PAIRS:  # what is compiled and started once
        for call in (_ours(target), *arrays.by_hand(source, target).values()):
            with contextlib.suppress(Exception):  # told of below
                call(sources[source])
    arrays.wait()
    time.sleep(0 if quick else SETTLING)
    timed = 5 if quick else TIMED
    pairs = {f"{source}-{target}": _pair(sources[source], source, target, timed) for source, target in PAIRS}
    leak = _leak(sources, 2 if quick else -(-ENOUGH // len(PAIRS)))
    routes = _routes(sources["torch"], 1 if quick else 3)
    del sources
    return {"pairs": pairs, "leak": leak, "routes": routes, "host": _host(values, 1 if quick else 2)}


def _ours(target: FrameworkName) -> Callable[[Any], Any]:
    import memguard.exchange

    to = memguard.exchange.to
    return lambda x: to(x, target)


def _pair(x: Any, source: str, target: FrameworkName, rounds: int) -> dict[str, Any]:
    """memguard's hand-over and each one by hand in turn, the view's end included.

    ours, extra   microseconds of each round: memguard's, and beyond the way by hand with the smallest median
    """
    from bench.programs import arrays

    calls, failed = {"ours": _ours(target)}, {}
    for way, call in arrays.by_hand(source, target).items():
        try:
            assert arrays.address(call(x)) == arrays.address(x), "it copies"
            calls[way] = call
        except Exception as error:
            failed[way] = f"{type(error).__name__}: {error}"[:200]
    assert arrays.address(calls["ours"](x)) == arrays.address(x), f"{source} to {target} copies"
    for call in calls.values():
        for _ in range(10):
            _once(call, x)
    arrays.wait()
    times: dict[str, list[float]] = {way: [] for way in calls}
    with _no_collection():
        for _ in range(rounds):
            for way, call in calls.items():
                times[way].append(_once(call, x))
    ours = times.pop("ours")
    best = min(times.values(), key=statistics.median, default=[])
    return {
        "ours": [round(one, 3) for one in ours],
        "extra": [round(one - other, 3) for one, other in zip(ours, best, strict=bool(best))],
        "failed": failed,
    }


def _once(call: Callable[[Any], Any], x: Any) -> float:
    begun = time.perf_counter()
    y = call(x)
    del y
    return (time.perf_counter() - begun) * 1e6


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _leak(sources: dict[FrameworkName, Any], each: int) -> dict[str, float]:
    """What so many hand-overs of each pair leave: MiB of the GPU and of the host, and views that have not ended."""
    from bench.programs import arrays, six
    from memguard.exchange import to

    def hand_over(times: int) -> tuple[int, int, int]:
        for _ in range(times):
            for source, target in PAIRS:
                to(sources[source], target)
        left = _still_open()
        arrays.wait()
        status = Path("/proc/self/status").read_text()
        return six.bytes_now(), int(status.partition("VmRSS:")[2].split()[0]) << 10, left

    before, after = hand_over(min(each, 20)), hand_over(each)
    return {"gpu": abs(after[0] - before[0]) / MIB, "host": (after[1] - before[1]) / MIB, "open": after[2]}


def _still_open() -> int:
    """Hand-overs that have not ended a moment after the last view was freed."""
    from memguard.exchange import lifetimes

    gc.collect()
    for _ in range(200):
        lifetimes.sweep()
        if not lifetimes._open and not lifetimes._parked:
            return 0
        time.sleep(0.005)
    return len(lifetimes._open) + len(lifetimes._parked)


def _routes(x: Any, rounds: int) -> dict[str, list[float]]:
    """Milliseconds from PyTorch to TensorFlow: shared, through page-locked memory, and through pageable memory."""
    import tensorflow as tf
    import torch

    from bench.programs import arrays

    pinned = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)

    def upload(values: Any) -> Any:
        with tf.device("/GPU:0"):
            y = tf.identity(tf.constant(values))
        assert float(y[-1]) == 1.0
        arrays.wait()
        return y

    def through_pinned(x: Any) -> Any:
        pinned.copy_(x, non_blocking=True)
        arrays.wait()
        return upload(pinned.numpy())

    calls: dict[str, Callable[[Any], Any]] = {
        "dlpack": _ours("tensorflow"), "pinned": through_pinned, "pageable": lambda x: upload(x.cpu().numpy()),
    }  # fmt: skip
    found: dict[str, list[float]] = {}
    for name, call in calls.items():
        found[name] = []
        for _ in range(TIMED // 10 if name == "dlpack" else rounds):
            arrays.wait()
            found[name].append(_once(call, x) / 1e3)
    return found


def _host(values: Any, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds from each framework to host memory, and from there to each: any pair's route is one of each."""
    from bench.programs import arrays

    downs: dict[str, list[float]] = {name: [] for name in NAMES}
    ups: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(rounds):
        for name in NAMES:
            arrays.wait()
            begun = time.perf_counter()
            x = arrays.make(name, values)
            arrays.wait()
            ups[name].append((time.perf_counter() - begun) * 1e3)
            begun = time.perf_counter()
            fetched = arrays.read(x)
            downs[name].append((time.perf_counter() - begun) * 1e3)
            assert fetched[0] == values[0]
            del x, fetched
    return {
        way: {name: statistics.median(one) for name, one in taken.items()}
        for way, taken in (("down", downs), ("up", ups))
    }


# Between processes


def program_giver(size: str) -> None:
    """Exports an array of so many bytes whenever a line of stdin asks for it."""
    import torch

    from bench.programs import arrays
    from memguard import exchange

    arrays.start("torch")
    x = torch.arange(int(size) // 4, dtype=torch.int32, device="cuda").to(torch.float32)
    with exchange.export(x[:1024]):  # what is started once
        arrays.wait()
    emit({})
    handle: Any = None
    for line in sys.stdin:
        if line.strip() == "export":
            arrays.wait()
            begun = time.perf_counter()
            handle = exchange.export(x)
            emit({"ms": (time.perf_counter() - begun) * 1e3, "handle": str(handle), "last": float(x[-1])})
        else:
            handle.close()
            emit({})


def program_taker() -> None:
    """Attaches the export that a line of stdin names, and drops it at the next."""
    from bench.programs import arrays
    from memguard import exchange

    arrays.start("torch")
    emit({})
    y: Any = None
    for line in sys.stdin:
        command, _, text = line.strip().partition(" ")
        if command == "attach":
            handle = exchange.Handle.parse(text)
            begun = time.perf_counter()
            y = exchange.attach(handle, "torch")
            emit({"ms": (time.perf_counter() - begun) * 1e3, "last": float(y[-1])})
        else:
            y = None
            emit({})


if __name__ == "__main__":
    main({"hand_overs": program_hand_overs, "giver": program_giver, "taker": program_taker})

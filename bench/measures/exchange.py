"""Hand-overs of 1 GiB between six frameworks, against the best way by hand."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.child import main
from bench.measure import Failed, Run, measure
from bench.programs import arrays
from bench.programs.arrays import NAMES, PAIRS
from bench.programs.six import GIB, MIB

if TYPE_CHECKING:
    from memguard.types import FrameworkName

TIMED = 200  # Hand-overs of each pair.
SETTLING = 8
"""Seconds before anything is timed: what JAX and TensorFlow compile in the background takes the first pairs 1.5 times
as long (measured), and those by hand too."""
EXTRA = [f"{source}-{target}" for source, target in PAIRS]


@measure(
    "exchange", unit={**dict.fromkeys(EXTRA, "µs over by hand"), **{f"to.{name}": "µs" for name in NAMES}},
    bar=dict.fromkeys(EXTRA, "<= 50"), seconds=25,
)  # fmt: skip
def exchange(run: Run) -> dict[str, Any]:
    """A hand-over of 1 GiB on idle streams, beyond the best way by hand in the same run, for each pair."""
    out = run.program("hand_overs", *(["quick"] if run.quick else []), timeout=140)
    found: dict[str, Any] = {}
    for pair, one in out["pairs"].items():
        found[pair] = one["extra"] or Failed(f"no way by hand worked: {one['failed']}")
    for target in NAMES:
        found[f"to.{target}"] = [one["ours"] for pair, one in out["pairs"].items() if pair.endswith(f"-{target}")]
    return found


def program_hand_overs(quick: str = "") -> dict[str, Any]:
    """Microseconds of each pair."""
    import numpy as np

    arrays.start(*NAMES)
    values: Any = np.ones((16 * MIB if quick else GIB) // 4, np.float32)
    sources = {name: arrays.make(name, values) for name in NAMES}
    for source, target in PAIRS:  # what is compiled and started once
        for call in (_ours(target), *arrays.by_hand(source, target)):
            with contextlib.suppress(Exception):  # told of below
                call(sources[source])
    arrays.wait()
    time.sleep(0 if quick else SETTLING)
    timed = 5 if quick else TIMED
    pairs = {f"{source}-{target}": _pair(sources[source], source, target, timed) for source, target in PAIRS}
    return {"pairs": pairs}


def _ours(target: FrameworkName) -> Callable[[Any], Any]:
    import memguard.exchange

    to = memguard.exchange.to
    return lambda x: to(x, target)


def _pair(x: Any, source: str, target: FrameworkName, rounds: int) -> dict[str, Any]:
    """memguard's hand-over and each one by hand in turn, the view's end included.

    ours, extra   microseconds of each round: memguard's, and beyond the way by hand with the smallest median
    """
    calls, failed = [_ours(target)], []
    for way, call in enumerate(arrays.by_hand(source, target)):
        try:
            assert arrays.address(call(x)) == arrays.address(x), "it copies"
            calls.append(call)
        except Exception as error:
            failed.append(f"{way}: {type(error).__name__}: {error}"[:200])
    assert arrays.address(calls[0](x)) == arrays.address(x), f"{source} to {target} copies"
    for call in calls:
        for _ in range(10):
            _once(call, x)
    arrays.wait()
    times: list[list[float]] = [[] for _ in calls]
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for taken, call in zip(times, calls, strict=True):
            taken.append(_once(call, x))
    gc.enable()
    ours = times.pop(0)
    best = min(times, key=statistics.median, default=[])
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


if __name__ == "__main__":
    main({"hand_overs": program_hand_overs})

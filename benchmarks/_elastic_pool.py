"""Part d of `elastic.py`: five frameworks peak in turn, in one pool or with caches apart; what allocations cost."""

from __future__ import annotations

import gc
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import _spread
from _elastic_arrays import Arrays, Card
from _quiet import quietest
from _run import GIB, MIB
from _ways import AGAIN, WAYS, Allocator, Way, under_memguard

PEAK = 8 * GIB
BLOCK = 256 * MIB
IN_TURN = ("torch", "cupy", "pycuda", "numba", "jax")
HELD = 0.3
"""Seconds that each peak stays, so that the sampler sees it."""
SEED = 43


def budget(strategy: str) -> dict[str, Any]:
    frameworks = {name: {"limit": "9GiB"} for name in IN_TURN}
    return {"version": 1, "strategy": strategy, "device": {"limit": "52GiB"}, "frameworks": frameworks}


def peaks(strategy: str) -> dict[str, Any]:
    """Each framework takes 8 GiB, writes them, reads them and frees them, one after the other."""
    import memguard

    guard = memguard.init(budget(strategy))
    frameworks = [Arrays(name) for name in IN_TURN]
    for one in frameworks:
        one.load()
    for one in frameworks:
        one.begin()
    found = in_turn(frameworks, memguard.trim, Card().own, _finished)
    enforcement = {row.name: row.enforcement for row in memguard.ledger().devices[0].rows if row.kind == "framework"}
    return {"strategy": strategy, **found, "enforcement": enforcement, "notes": list(guard.notes)}


def in_turn(
    frameworks: Sequence[Any],
    trim: Callable[[], Any],
    own: Callable[[], int],
    finished: Callable[[], None],
    peak: int = PEAK,
    block: int = BLOCK,
    held: float = HELD,
) -> dict[str, Any]:
    """`finished` waits for the GPU. `overhead` is what the process holds once all are live and their caches are back:
    no array is there then, so that it is what lies outside every pool, or never goes back.
    """
    gc.collect()
    trim()
    overhead, each = own(), {}
    for number, one in enumerate(frameworks):
        live: list[Any] = []
        for place in range(peak // block):
            live.append(one.take(block, SEED + 100 * number + place))
            one.write(live[place], block, SEED + 100 * number + place)
        finished()
        at_peak = own()
        time.sleep(held)
        wrong = sum(not one.right(live[n], block, SEED + 100 * number + n) for n in range(len(live)))
        bytes_ = len(live) * block
        live.clear()
        gc.collect()
        finished()
        each[one.name] = {"bytes": bytes_, "at_peak": at_peak, "freed": own(), "wrong": wrong}
    trim()
    return {"peak": peak, "overhead": overhead, "in_turn": each, "trimmed": own()}


def _finished() -> None:
    import torch

    torch.cuda.synchronize()


# What an allocation costs


CAP = 6 * GIB
LIVE = 32
"""Blocks that are alive at a time."""
SIZES = (1 << 10, 64 * MIB)
STEPS = 400
"""Allocations in one piece of work, each of which ends another's block."""
ROUNDS = 25
MIX = ("torch", "cupy", "pycuda", "numba")
COMPARED = {"torch": "plain", "cupy": "plain", "pycuda": "own pool", "numba": "plain"}
"""With what each way of a library is compared."""


def pooled(library: str) -> Callable[[int], Allocator]:
    """The library's way under `strategy: pool`: its plain one, with a budget of that kind before."""

    def begin(cap: int) -> Allocator:
        import memguard

        device = {"limit": cap + 6 * GIB}
        memguard.init({"version": 1, "strategy": "pool", "device": device, "frameworks": {library: {"limit": cap}}})
        return under_memguard(library, WAYS[library]["plain"].begin(cap))

    return begin


def ways(library: str) -> dict[str, Way]:
    """Plain, plain again as the control, under both strategies, on RMM's pool, or on PyCUDA's own."""
    there = WAYS[library]
    names = [COMPARED[library], COMPARED[library] + AGAIN, "plain", "memguard", "rmm"]
    found = {name: there[name] for name in dict.fromkeys(names) if name in there}
    found["caps"] = found.pop("memguard")
    found["pool"] = Way("under strategy: pool", pooled(library))
    return found


def sizes(seed: int, steps: int = STEPS) -> list[int]:
    """From 1 KiB to 64 MiB, equally often in each doubling."""
    draw, (low, high) = random.Random(seed), SIZES
    return [int(low * (high / low) ** draw.random()) for _ in range(steps)]


def mixed(take: Callable[[int], Any], wanted: Sequence[int], places: Sequence[int]) -> float:
    """Seconds for one allocation, with the end of the block whose place it gets."""
    live: list[Any] = [None] * LIVE
    begun = time.perf_counter()
    for size, place in zip(wanted, places):
        live[place] = None
        live[place] = take(size)
    live.clear()
    return (time.perf_counter() - begun) / len(wanted)


def child(library: str, way: str, cap: int, lines: Any) -> None:
    """Answers each line with one: the seconds of one allocation of the mix whose seed it names."""

    def tell(answer: dict[str, Any]) -> None:
        print("ANSWER " + json.dumps(answer), flush=True)

    try:
        take = ways(library)[way].begin(cap).take
        mixed(take, sizes(0), _places(0))
    except Exception as error:  # a library that is not here, or a GPU
        tell({"missing": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]})
        return
    gc.collect()
    gc.freeze()
    tell({})
    for line in lines:
        wanted = json.loads(line)
        if not wanted:
            break
        try:
            os.sched_setaffinity(0, {wanted["core"]})
            tell({"us": mixed(take, sizes(wanted["seed"]), _places(wanted["seed"])) * 1e6})
        except Exception as error:
            tell({"failed": f"{type(error).__name__}: {error}"[:300]})


def _places(seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(LIVE) for _ in range(STEPS)]


def throughput(start: Callable[[str, str, int], Any], at_most: float = 60.0, rounds: int = ROUNDS) -> dict[str, Any]:
    """All ways of all libraries in turn, in an order that changes. `start` begins a process of a way."""
    children = {(library, way): start(library, way, CAP) for library in MIX for way in ways(library)}
    with ThreadPoolExecutor(len(children)) as threads:
        first = dict(zip(children, threads.map(lambda one: one.answer(), children.values())))
    missing = {f"{library}, {way}": told["missing"] for (library, way), told in first.items() if "missing" in told}
    there = [key for key, told in first.items() if "missing" not in told]
    values: dict[str, dict[str, list[float]]] = {library: {} for library in MIX}
    failed: dict[str, str] = {}
    begun, cores = time.monotonic(), os.sched_getaffinity(0)
    for turn in range(rounds):
        if turn and (time.monotonic() - begun) * (turn + 1) / turn > at_most:
            break
        core = quietest(cores, 2)
        for library, way in random.Random(turn).sample(there, len(there)):
            told = children[library, way].ask(seed=turn, core=core)
            if "us" in told:
                values[library].setdefault(way, []).append(round(told["us"], 4))
            else:
                failed.setdefault(f"{library}, {way}", str(told.get("failed") or told.get("missing")))
    for one in children.values():
        one.end()
    return {
        "cap": CAP, "live": LIVE, "sizes": list(SIZES), "steps": STEPS, "missing": missing, "failed": failed,
        "us": values, "figures": figures(values), "seconds": round(time.monotonic() - begun, 1),
        "says": {library: {way: one.says for way, one in ways(library).items()} for library in MIX},
    }  # fmt: skip


def figures(values: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Of each library's ways: the median µs, and the ratio to what it is compared with, where the rounds are alike."""
    found: dict[str, Any] = {}
    for library, of in values.items():
        found[library] = {}
        other = of.get(COMPARED[library], [])
        for way, us in of.items():
            one: dict[str, Any] = {"us": round(_spread.median([us]), 3), "rounds": len(us)}
            if way != COMPARED[library] and len(us) == len(other):
                spread = _spread.interval(_spread.ratios([us], [other]))
                one["ratio"] = {key: round(value, 4) for key, value in spread.items()}
            found[library][way] = one
    return found

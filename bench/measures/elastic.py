"""Memory moves between frameworks of one process: from an idle cache to another framework's array, or in one pool."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

from bench.child import main
from bench.measure import Failed, Run, measure
from bench.programs.patterned import GIB, MIB, Arrays, Card

GIVERS: tuple[Any, ...] = ("torch", "cupy", "numba", "pycuda")
TAKERS = ("cupy", "pycuda", "numba")
"""Those whose allocators are memguard's: they ask within the allocation that would fail."""
PAIRS = [(giver, taker) for giver in GIVERS for taker in TAKERS if giver != taker]
BLOCK = 64 * MIB  # Of the giver's cache.
MOVES = 40  # Of each pair.
LEAST = 16 * MIB  # The min of each framework.
SPARE = 64 * MIB  # For the pages that a giver's allocator keeps beside its blocks.
GROWN = 256 * MIB
"""What a process may grow by in a move: what the giver keeps, and what the taker's allocator rounds up."""
IN_TURN = ("torch", "cupy", "pycuda", "numba", "jax")
PIECE = 256 * MIB
HELD = 0.3  # Seconds that each peak stays, so that the sampler sees it.


@measure(
    "elastic", unit={"move": "ms", "p99": "ms", "pool": "GiB"}, bar={"p99": "<= 100", "pool": "<= 8.4"},
    by={"pool": "high"}, seconds=50, needs=("torch", "cupy", "numba", "pycuda", "jax"),
)  # fmt: skip
def elastic(run: Run) -> dict[str, list[float] | list[list[float]]]:
    """8 GiB from one framework's idle cache to another's array, and five peaks of 8 GiB in one pool.

    move   of nine pairs of frameworks, grouped by pair
    p99    of the slowest pair
    pool   the most that the process had by NVML, beyond what it has when all caches are empty
    """
    size = GIB if run.quick else 8 * GIB
    moved = run.program("moves", size, run.rounds(MOVES, 1), timeout=120)["pairs"]
    pool = run.program("pool", size, timeout=60, sampled=0.05)
    most, beside = pool["nvml"]["max_bytes"], pool["overhead"]
    if most < size:
        raise Failed(f"NVML saw {most} bytes of the pool at most")
    return {
        "move": moved,
        "p99": [max(sorted(one)[len(one) * 99 // 100] for one in moved)],
        "pool": [(most - beside) / GIB],
    }


def program_moves(size: str, rounds: str) -> dict[str, Any]:
    """Moves of all pairs, in an order of its own in each round, with their values read back."""
    import memguard

    moved = int(size)
    room = moved + len(GIVERS) * LEAST + 2 * SPARE
    part = {"min": LEAST, "max": room - (len(GIVERS) - 1) * LEAST}
    device = {"limit": room + 4 * GIB, "reserve": 4 * GIB}
    guard = memguard.init({"version": 1, "device": device, "frameworks": dict.fromkeys(GIVERS, part)})
    frameworks = {name: Arrays(name) for name in GIVERS}
    for one in frameworks.values():
        one.load()
    for one in frameworks.values():
        one.begin()
    gc.collect()
    gc.freeze()
    card, draw, number = Card(), random.Random(37), 0
    found: dict[tuple[str, str], list[float]] = {pair: [] for pair in PAIRS}
    for _ in range(int(rounds)):
        for giver, taker in draw.sample(PAIRS, len(PAIRS)):
            for name in GIVERS:
                memguard.trim(name)
            guard.make_room(giver, moved + SPARE)
            blocks = [frameworks[giver].take(asked(giver, BLOCK)) for _ in range(moved // BLOCK)]
            blocks.clear()
            before, wanted, to = card.own(), asked(taker, moved), frameworks[taker]
            begun = time.perf_counter()
            array = to.take(wanted)
            seconds = time.perf_counter() - begun
            grown = card.own() - before
            number += 1
            to.write(array, wanted, number)
            assert to.right(array, wanted, number), f"{giver} > {taker}: other values were read back"
            assert grown <= GROWN, f"{giver} > {taker}: the process grew by {grown} bytes"
            del array
            found[giver, taker].append(seconds * 1e3)
    return {"pairs": list(found.values())}


def asked(name: str, size: int) -> int:
    """What a framework is asked for, to take `size` from the driver. A power of two is the first size of one of
    PyCUDA's bins, which takes a sixteenth more; 512 bytes below it is the last of the bin before."""
    return size - 512 if name == "pycuda" else size


def program_pool(size: str) -> dict[str, Any]:
    """Each framework takes so many bytes, writes them, reads them and frees them, one after the other."""
    import memguard

    peak = int(size)
    limits = {name: {"limit": "9GiB"} for name in IN_TURN}
    memguard.init({"version": 1, "strategy": "pool", "device": {"limit": "52GiB"}, "frameworks": limits})
    frameworks = [Arrays(name) for name in IN_TURN]
    for one in frameworks:
        one.load()
    for one in frameworks:
        one.begin()
    import torch

    card = Card()
    gc.collect()
    memguard.trim()
    overhead = card.own()
    for number, one in enumerate(frameworks):
        live: list[Any] = []
        for place in range(peak // PIECE):
            live.append(one.take(PIECE, 100 * number + place))
            one.write(live[place], PIECE, 100 * number + place)
        torch.cuda.synchronize()
        time.sleep(HELD)
        wrong = sum(not one.right(array, PIECE, 100 * number + place) for place, array in enumerate(live))
        assert not wrong, f"{one.name}: {wrong} arrays have other values"
        live.clear()
        gc.collect()
        torch.cuda.synchronize()
    return {"overhead": overhead}


if __name__ == "__main__":
    main({"moves": program_moves, "pool": program_pool})

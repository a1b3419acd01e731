"""Part b of `elastic.py`: how long 8 GiB take from one framework's idle cache to another framework's array."""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from _elastic_arrays import Arrays, Card
from _run import GIB, MIB

MOVED = 8 * GIB
GIVERS = ("torch", "cupy", "numba", "pycuda")
TAKERS = ("cupy", "pycuda", "numba")
"""Those whose allocators are memguard's: they ask within the allocation that would fail."""
PAIRS = tuple((giver, taker) for giver in GIVERS for taker in TAKERS if giver != taker)
BLOCK, PIECE = 64 * MIB, 2 * MIB
MOVES = 100
"""Of each pair, from blocks."""
BY_HAND = 10
"""One round in so many is done once more with the giver trimmed by hand before: what the driver itself takes."""
AT_MOST = {"blocks": 140.0, "pieces": 25.0}
"""Seconds for all pairs. No round begins too late to end in them, but for the first."""
LEAST = 16 * MIB
"""The min of each framework."""
SPARE = 64 * MIB
"""For the pages that a giver's allocator keeps beside its blocks."""
ROOM = MOVED + len(GIVERS) * LEAST + 2 * SPARE
LIMIT = 12 * GIB
SEED = 37


def budget() -> dict[str, Any]:
    """Room for 8 GiB of one framework and little else: a move is one of all that the giver has."""
    part = {"min": LEAST, "max": ROOM - (len(GIVERS) - 1) * LEAST}
    device = {"limit": LIMIT, "reserve": LIMIT - ROOM}
    return {"version": 1, "device": device, "frameworks": dict.fromkeys(GIVERS, part)}


def moves() -> dict[str, Any]:
    import memguard

    guard = memguard.init(budget())
    frameworks = {name: Arrays(name) for name in GIVERS}
    for one in frameworks.values():
        one.load()
    for one in frameworks.values():
        one.begin()
    gc.collect()
    gc.freeze()
    mover = Mover(frameworks, memguard.trim, lambda name: guard.make_room(name, MOVED + SPARE), Card().own)
    found = {}
    for kind, piece in (("blocks", BLOCK), ("pieces", PIECE)):
        found[kind] = mover.rounds(piece, MOVES, AT_MOST[kind], hands=BY_HAND)
    return {"bytes": MOVED, "limit": LIMIT, **found}


def asked(name: str, size: int) -> int:
    """What a framework is asked for, to take `size` from the driver. A power of two is the first size of one of
    PyCUDA's bins, which takes a sixteenth more; 512 bytes below it is the last of the bin before.
    """
    return size - 512 if name == "pycuda" else size


class Mover:
    """Moves between frameworks. `trim` gives a framework's cache back, `room` makes room for it, `own` is NVML's figure
    of this process.
    """

    def __init__(
        self,
        frameworks: Mapping[str, Any],
        trim: Callable[[str], Any],
        room: Callable[[str], Any],
        own: Callable[[], int],
        moved: int = MOVED,
    ) -> None:
        self.frameworks, self.trim, self.room, self.own, self.moved = frameworks, trim, room, own, moved
        self._number = SEED

    def rounds(
        self, piece: int, times: int, seconds: float, hands: int, pairs: Sequence[tuple[str, str]] = PAIRS
    ) -> dict[str, Any]:
        """Rounds of all pairs, each in an order of its own, until there are so many or the time is over."""
        found: dict[str, Any] = {
            f"{giver} > {taker}": {"ms": [], "by_hand_ms": [], "wrong": 0, "error": None, "grown": []}
            for giver, taker in pairs
        }
        begun, longest = time.monotonic(), 0.0
        draw = random.Random(piece)
        for turn in range(times):
            started = time.monotonic()
            if turn and started + longest > begun + seconds:
                break
            for giver, taker in draw.sample(list(pairs), len(pairs)):
                one = found[f"{giver} > {taker}"]
                for by_hand in (False, True) if turn % hands == 0 else (False,):
                    self._note(one, giver, taker, piece, by_hand)
            longest = max(longest, time.monotonic() - started)
        for one in found.values():
            one.update(summary(one["ms"], one["by_hand_ms"], one.pop("grown")))
        return {"piece": piece, "seconds": round(time.monotonic() - begun, 1), "pairs": found}

    def _note(self, one: dict[str, Any], giver: str, taker: str, piece: int, by_hand: bool) -> None:
        try:
            seconds, right, grown = self.move(giver, taker, piece, by_hand)
        except Exception as error:
            one["error"] = one["error"] or f"{type(error).__name__}: {error}"[:300]
            return
        one["by_hand_ms" if by_hand else "ms"].append(round(seconds * 1e3, 3))
        one["wrong"] += not right
        one["grown"].append(grown)

    def move(self, giver: str, taker: str, piece: int, by_hand: bool = False) -> tuple[float, bool, int]:
        """Seconds, whether the values are right, and what the process's bytes by NVML grew by meanwhile."""
        for name in self.frameworks:
            self.trim(name)
        self.room(giver)
        from_, to = self.frameworks[giver], self.frameworks[taker]
        blocks = [from_.take(asked(giver, piece)) for _ in range(self.moved // piece)]
        blocks.clear()
        before, size = self.own(), asked(taker, self.moved)
        begun = time.perf_counter()
        if by_hand:
            self.trim(giver)
        array = to.take(size)
        seconds = time.perf_counter() - begun
        grown = self.own() - before
        self._number += 1
        to.write(array, size, self._number)
        return seconds, to.right(array, size, self._number), grown


def summary(ms: Sequence[float], by_hand: Sequence[float], grown: Sequence[int]) -> dict[str, Any]:
    """Percentiles in ms, and the most that the process's bytes grew by in a move."""
    return {
        "n": len(ms),
        **{name: percentile(ms, part) for name, part in (("p50_ms", 0.50), ("p99_ms", 0.99))},
        "max_ms": max(ms, default=None),
        "by_hand_p50_ms": round(statistics.median(by_hand), 3) if by_hand else None,
        "most_grown": max(grown, default=None),
    }


def percentile(values: Sequence[float], part: float) -> float | None:
    """The smallest value that so great a part of all do not exceed. None of nothing."""
    return sorted(values)[max(math.ceil(part * len(values)), 1) - 1] if values else None

"""What an allocation costs in torch, CuPy, PyCUDA and Numba: plain, under memguard, on RMM's pool and on its own pool.

Each way of each library (`bench/programs/ways.py`) is a process of its own. The parent asks one after the other, in an
order that changes, for a few milliseconds of work on one core while it is quiet (`bench/programs/quiet.py`). After some
rounds new processes replace them all, because a process has its luck: where its memory lies. The way that memguard's is
compared with runs in two processes: what differs between those is chance. Before it is timed, live blocks fill the
library's memory so far that, with the block that is timed, it stands at a part of the cap, or has as many bytes."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.child import Child, emit, main
from bench.measure import Failed, Run, measure
from bench.programs.quiet import Quiet, quietest, siblings
from bench.programs.six import GIB, MIB
from bench.programs.ways import AGAIN, CONTROL, WAYS, Allocator
from bench.results import interval

SIZES = {"1 KiB": 1 << 10, "1 MiB": MIB, "64 MiB": 64 * MIB}
SHARES = {"10%": 0.10, "90%": 0.90, "99.9%": 0.999}
"""The parts of the cap that the library's memory stands at meanwhile."""
GENERATIONS, ROUNDS = 3, 4
AT_MOST = 92.0
"""Seconds, for the whole: no round begins that would end later, but each library has one in each generation."""
FEW = 1  # A cell has no figure with fewer rounds than this in each generation, on average.
SLACK = 8 * MIB  # So far below its part of the cap a library's memory may stay: blocks do not fill every gap.
SERVED = 0.1  # A pool serves if no more of its allocations ask the driver. Near the cap nothing may be kept idle.
JUDGED = {
    "torch": ("torch", "memguard", "x the control"),
    "cupy": ("cupy", "memguard", "x plain"),
    "pycuda": ("pycuda", "memguard", "of 2.5 x its own pool or 2 µs"),
    "pycuda_pool": ("pycuda", "memguard, pool", "of 2.5 x its own pool or 2 µs"),
    "numba": ("numba", "memguard", "x RMM's pool"),
}  # Row: library, way, unit. `torch`: at most 1 is within what two plain processes differ by.
BARS = {**dict.fromkeys(JUDGED, "<= 1"), "cupy": "<= 1.1"}
COSTS = {f"{library}.{way.replace(', ', ' ')}": (library, way) for library, ways in WAYS.items() for way in ways
         if not way.endswith(AGAIN)}  # fmt: skip

Values = dict[tuple[int, int], float]  # By generation and round.


@measure(
    "allocation",
    unit={
        **{f"{row}.{share}": unit for row, (_, _, unit) in JUDGED.items() for share in SHARES},
        **{f"control.{library}": "x" for library in WAYS}, **dict.fromkeys(COSTS, "µs"), "deaths": "processes",
    },
    bar={
        **{f"{row}.{share}": BARS[row] for row in JUDGED for share in SHARES},
        **{f"control.{library}": "<= 1.1" for library in WAYS}, "deaths": "<= 0",
    },
    seconds=100,
)  # fmt: skip
def allocation(run: Run) -> dict[str, Any]:
    """An allocation and its free under a cap, against the plain library, RMM's pool and its own pool."""
    found = Found()
    began, generations, rounds = time.monotonic(), run.rounds(GENERATIONS, 1), run.rounds(ROUNDS, 1)
    for number in range(generations):
        until = began + AT_MOST * (number + 1) / generations
        _generation(run, number, rounds, until, found)
    found.least = 1 if run.quick else FEW * generations
    rows: dict[str, Any] = {}
    for row in JUDGED:
        for share in SHARES:
            rows[f"{row}.{share}"] = _or_why(found.worst, row, share)
    for library in WAYS:
        rows[f"control.{library}"] = _or_why(found.control, library)
    for cost, (library, way) in COSTS.items():
        rows[cost] = _or_why(found.costs, library, way)
    if all(isinstance(one, Failed) for one in rows.values()):
        raise Failed("; ".join(f"{where}: {why}" for where, why in list(found.failed.items())[:2]))
    return {**rows, "deaths": [found.deaths]}


def _or_why(figures: Callable[..., Any], *arguments: str) -> Any:
    """A row's values, or why there are none."""
    try:
        return figures(*arguments)
    except Failed as error:
        return error


def _grouped(values: dict[Any, float]) -> list[list[float]]:
    """By process: what begins with the same number was measured in the same processes."""
    groups: dict[int, list[float]] = {}
    for (number, *_), value in values.items():
        groups.setdefault(number, []).append(value)
    return list(groups.values())


def chance(ratios: Values) -> float:
    """Up to this ratio a difference may be chance, by the ratios of two processes that do the same. The farther bound
    of the 95 % interval of their median: which of the two is the divisor is arbitrary."""
    _, low, high = interval(_grouped(ratios))
    return max(high, 1 / low)


class Found:
    """What all processes told: microseconds by library, way, size and share, and what failed."""

    def __init__(self) -> None:
        self.us: dict[tuple[str, str, str, str], Values] = {}
        self.asks: dict[tuple[str, str, str, str], list[float]] = {}
        self.failed: dict[str, str] = {}
        self.deaths = self.least = 0

    def keep(self, where: tuple[str, str, str, str], when: tuple[int, int], told: dict[str, Any]) -> None:
        if "us" in told and 0 <= (gap := told["below"]) <= SLACK:
            self.us.setdefault(where, {})[when] = told["us"]
            self.asks.setdefault(where, []).append(told.get("asks", 0.0))
        else:
            self.failed.setdefault(
                ", ".join(where), str(told.get("failed") or f"its memory stands {gap} bytes below its part of the cap")
            )

    def of(self, library: str, way: str, size: str, share: str) -> Values:
        """Microseconds of an allocation and its free. Failed if there are too few rounds."""
        where = library, way, size, share
        values = self.us.get(where, {})
        if len(values) < self.least or not values:
            why = self.failed.get(", ".join(where)) or self.failed.get(f"{library}, {way}") or "the time ran out"
            raise Failed(f"{', '.join(where)}: {len(values)} rounds: {why}")
        return values

    def ratio(self, library: str, way: str, other: str, size: str, share: str) -> Values:
        """Round by round."""
        ours, theirs = self.of(library, way, size, share), self.of(library, other, size, share)
        both = {when: us / theirs[when] for when, us in ours.items() if when in theirs}
        if len(both) < self.least:
            raise Failed(f"{library}, {size} at {share}: {len(both)} rounds of {way} and {other} together")
        return both

    def worst(self, row: str, share: str) -> list[list[float]]:
        """What is held against the row's bar: the values of the size with the largest median, of those that count."""
        cells = [one for size in SIZES if (one := self._judged(row, size, share))]
        if not cells:
            raise Failed("its pool serves no size")
        return _grouped(max(cells, key=lambda one: statistics.median(one.values())))

    def control(self, library: str) -> list[float]:
        """The largest ratio of two processes of one way, in any cell."""
        way = CONTROL[library]
        cells = [self.ratio(library, way + AGAIN, way, size, share) for size in SIZES for share in SHARES]
        return [max(map(chance, cells))]

    def costs(self, library: str, way: str) -> list[list[float]]:
        """Microseconds at 90 % of the cap, of all sizes."""
        return _grouped({(*when, size): us for size in SIZES
                         for when, us in self.of(library, way, size, "90%").items()})  # fmt: skip

    def _judged(self, row: str, size: str, share: str) -> Values | None:
        """The values of one size; None if it does not count."""
        library, way, _ = JUDGED[row]
        if row == "numba" and SHARES[share] > 0.9:
            asks = self.asks.get((library, way, size, share), [0.0])
            if statistics.median(asks) > SERVED:
                return None
        control = CONTROL[library]
        ratio = self.ratio(library, way, control, size, share)
        if row == "torch":
            known = chance(self.ratio(library, control + AGAIN, control, size, share))
            return {when: one / known for when, one in ratio.items()}
        if library == "pycuda":
            us = self.of(library, way, size, share)
            either = ({when: one / 2.5 for when, one in ratio.items()}, {when: us[when] / 2 for when in ratio})
            return min(either, key=lambda one: statistics.median(one.values()))
        return ratio


def _generation(run: Run, number: int, rounds: int, until: float, found: Found) -> None:
    """New processes for all ways, and their rounds. None but each library's first begins too late to end by `until`."""
    cap, seconds = (GIB, 0.002) if run.quick else (4 * GIB, 0.006)
    children = {
        (library, way): run.start("way", library, way, cap, timeout=max(until - time.monotonic(), 0) + 60)
        for library, ways in WAYS.items() for way in ways
    }  # fmt: skip
    with ThreadPoolExecutor(len(children)) as threads:
        begun = dict(zip(children, threads.map(_answer, children.values()), strict=True))
    for (library, way), told in begun.items():
        if "failed" in told:
            found.failed.setdefault(f"{library}, {way}", told["failed"])
    best = min((told["best"] for told in begun.values() if "best" in told), default=math.inf)
    cores = os.sched_getaffinity(0)
    for place, (library, names) in enumerate(WAYS.items()):
        ways = [way for way in names if "best" in begun[library, way]]
        here = time.monotonic()
        end, longest = here + (until - here) / (len(WAYS) - place), 0.0
        for turn in range(rounds if ways else 0):
            started = time.monotonic()
            if turn and started + longest > end:
                break
            core = quietest(cores)
            os.sched_setaffinity(0, (cores - siblings(core)) or cores)  # this process wakes up while a child works
            order = random.Random(f"{number} {library} {turn}")
            for share, part in SHARES.items():
                for size in order.sample(list(SIZES), len(SIZES)):
                    for way in order.sample(ways, len(ways)):
                        what = {"size": SIZES[size], "share": part, "seconds": seconds, "core": core}
                        told = _answer(children[library, way], {**what, "best": None if best == math.inf else best})
                        best = min(best, told.get("best", math.inf))
                        found.keep((library, way, size, share), (number, turn), told)
            os.sched_setaffinity(0, cores)
            longest = max(longest, time.monotonic() - started)
        ending = [children[library, way] for way in names]
        with ThreadPoolExecutor(len(ending)) as threads:  # their memory is the next library's
            codes = dict(zip(names, threads.map(Child.close, ending), strict=True))
        found.deaths += sum(1 for way in ways if way.startswith("memguard") and codes[way])


def _answer(child: Child, what: dict[str, Any] | None = None) -> dict[str, Any]:
    """A child's answer; `failed` if it ended instead."""
    try:
        return child.read(60) if what is None else child.ask(json.dumps(what), 60)
    except Failed as error:
        return {"failed": str(error)[-300:]}


PIECES = (64 * MIB, 10 * MIB, MIB)  # What fills: torch takes its segments of such sizes from the driver without rest.
PARTS = 5  # In which a block of work is divided. The median of them counts, so that one interruption does not.
NEARLY_FULL = 0.95
"""Of the cap. Beyond it memory is filled anew for each size: between blocks that stay, the room that is left is in
holes, and RMM's pool has none of 64 MiB in one piece (seen at 99.9 % on an H200)."""
LONGEST, ASKED = 4000, 100
"""Allocations in one part, at most; and those of which it is counted how many ask the driver."""


class Filled:
    """A library's memory, filled to a part of the cap with live blocks."""

    def __init__(self, allocator: Allocator, cap: int) -> None:
        self.allocator, self.cap = allocator, cap
        self.live: list[tuple[Any, int]] = []
        self.bytes = 0
        self._size, self._share = 0, 0.0

    def held(self) -> int:
        return self.bytes if self.allocator.held is None else self.allocator.held()

    def to(self, size: int, share: float) -> int:
        """Fill so far that with one block of `size` the share is reached. Returns what is held then."""
        if share < self._share or (size != self._size and share > NEARLY_FULL):
            self._drop_all()
        elif size != self._size:  # room for the larger of two sizes, and what is left over of the smaller
            room = self.bytes - 2 * max(SIZES.values())
            while self.live and self.bytes > room:
                self.bytes -= self.live.pop()[1]
        gc.collect()
        self.allocator.trim()  # what the last blocks left idle counts as held
        self._size, self._share = size, share
        target, block = int(share * self.cap), self.allocator.take(size)
        self.bytes += size
        for piece in PIECES:
            while self.held() + self.allocator.adds(piece) <= target:
                try:
                    self.live.append((self.allocator.take(piece), piece))
                except (MemoryError, RuntimeError):  # RMM's pool has no room of this size in one piece: smaller ones
                    break
                self.bytes += piece
        reached = self.held()
        del block
        self.bytes -= size
        return reached

    def _drop_all(self) -> None:
        self.live.clear()
        self.bytes = 0

    def empty(self) -> None:
        self._drop_all()
        gc.collect()
        self.allocator.trim()


def both(take: Callable[[int], Any], size: int, count: int) -> float:
    """Seconds for one allocation and its end."""
    times = range(count)
    begun = time.perf_counter()
    for _ in times:
        block = take(size)
        del block
    return (time.perf_counter() - begun) / count


def timed(filled: Filled, size: int, share: float, seconds: float, quiet: Quiet, best: float) -> dict[str, Any]:
    """Microseconds of an allocation and its free, and the bytes by which the filled memory stays below the share."""
    if share * filled.cap < size:
        return {"failed": f"{size} bytes do not fit into {share:.1%} of a cap of {filled.cap}"}
    reached, take = filled.to(size, share), filled.allocator.take
    for _ in range(3):
        each = both(take, size, 20)
    count = min(max(int(seconds / PARTS / each), 20), LONGEST)
    gc.collect()
    gc.disable()
    try:
        quiet.warm(lambda: both(take, size, count), best)
        found = quiet.median(lambda: both(take, size, count), best, PARTS)
    finally:
        gc.enable()
    told = {"us": found * 1e6, "below": int(share * filled.cap) - reached, "best": quiet.best}
    if filled.allocator.asks is not None:  # afterwards: counting takes time
        told["asks"] = filled.allocator.asks(lambda: both(take, size, ASKED)) / ASKED
    return told


def program_way(library: str, way: str, cap: str) -> None:
    """Answers each line of stdin."""
    try:
        filled = Filled(WAYS[library][way](int(cap)), int(cap))
    except Exception as error:  # a library that is not here, or a GPU
        emit({"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]})
        return
    gc.collect()
    gc.freeze()  # the library's own objects: a collection before each block of work would take longer than the work
    quiet = Quiet()
    emit({"best": quiet.best})
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            os.sched_setaffinity(0, {asked.pop("core")})  # of this thread alone
            best = asked.pop("best")
            emit(timed(filled, **asked, quiet=quiet, best=math.inf if best is None else best))
        except Exception as error:
            emit({"failed": f"{type(error).__name__}: {error}"[:300]})
    filled.empty()


if __name__ == "__main__":
    main({"way": program_way})

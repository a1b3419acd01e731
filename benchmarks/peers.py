"""What an allocation costs in torch, CuPy, PyCUDA and Numba: plain, under memguard, on RMM's pool, on its own pool.

    python benchmarks/peers.py -o benchmarks/results/h200-peers.json

Each way of each library (`_ways.py`) is a process of its own. All start together. Then the parent asks one after the
other, in an order that changes, for a few milliseconds of work: so the ways that are compared run within a fraction of
a second, on one core, which nothing else of this benchmark uses, and while it is quiet (`_quiet.py`). After some rounds
new processes replace them all, because a process has its luck: where its memory lies. A way that others are compared
with runs in two processes: what differs between those two is chance.

It begins no round of a library after that library's part of the time (`--at-most`), so the whole ends in time. What
`--only` leaves out is taken over from the output, if that was measured with the same code on the same kind of GPU.

Before it is timed, live blocks fill the library's memory so far that, with the block that is timed, it stands at a part
of the cap. A way without a cap is filled with as many bytes. Then 1 KiB, 1 MiB or 64 MiB are allocated and freed again
and again: microseconds for both, and for the allocation alone.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import _spread
from _quiet import Quiet, quietest, siblings
from _run import GIB, MIB, ROOT, conclude, header
from _ways import AT_ITS_END, NOT_THERE, SHARES, SIZES, WAYS, Allocator, cell, pairs
from checks import peers_checks

CAP = 4 * GIB
GENERATIONS, ROUNDS = 3, 5
AT_MOST = 160.0
"""Seconds."""
PIECES = (64 * MIB, 10 * MIB, MIB)
"""What fills: torch takes its segments of such sizes from the driver without rest."""
PARTS = 5
"""In which a block of work is divided. The median of them counts, so that one interruption does not."""
NEARLY_FULL = 0.95
"""Of the cap. Beyond it memory is filled anew for each size: between blocks that stay, the room that is left is in
holes, and RMM's pool has none of 64 MiB in one piece (seen at 99.9 % on an H200)."""
LONGEST = 4000
"""Allocations in one part, at most."""
ASKED = 100
"""Allocations of which it is counted how many ask the driver."""


# The child


class Filled:
    """A library's memory, filled to a part of the cap with live blocks."""

    def __init__(self, allocator: Allocator, cap: int) -> None:
        self.allocator, self.cap = allocator, cap
        self.live: list[Any] = []
        self._sizes: list[int] = []
        self.bytes = 0
        self._size, self._share = 0, 0.0

    def held(self) -> int:
        return self.bytes if self.allocator.held is None else self.allocator.held()

    def to(self, size: int, share: float) -> int:
        """Fill so far that with one block of `size` the share is reached. Returns what is held then."""
        if share < self._share or (size != self._size and share > NEARLY_FULL):
            self._drop_all()
        elif size != self._size:  # room for the larger of two sizes, and what is left over of the smaller
            room = self.bytes - 2 * max(SIZES)
            while self.live and self.bytes > room:
                self.live.pop()
                self.bytes -= self._sizes.pop()
        gc.collect()
        self.allocator.trim()  # what the last blocks left idle counts as held
        self._size, self._share = size, share
        target, block = int(share * self.cap), self.allocator.take(size)
        self.bytes += size
        for piece in PIECES:
            while self.held() + self.allocator.adds(piece) <= target:
                try:
                    self.live.append(self.allocator.take(piece))
                except (MemoryError, RuntimeError):  # RMM's pool has no room of this size in one piece: smaller ones
                    break
                self._sizes.append(piece)
                self.bytes += piece
        reached = self.held()
        del block
        self.bytes -= size
        return reached

    def _drop_all(self) -> None:
        self.live.clear()
        self._sizes.clear()
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


def alone(take: Callable[[int], Any], size: int, count: int) -> float:
    """Seconds for one allocation: the median of many, each with two readings of the clock in it."""
    taken = []
    for _ in range(count):
        begun = time.perf_counter_ns()
        block = take(size)
        taken.append(time.perf_counter_ns() - begun)
        del block
    return statistics.median(taken) / 1e9


def measure(
    filled: Filled, size: int, share: float, seconds: float, quiet: Quiet, best: float = math.inf
) -> dict[str, Any]:
    if share * filled.cap < size:
        return {"skipped": f"{size} bytes do not fit into {share:.1%} of a cap of {filled.cap}"}
    reached, take = filled.to(size, share), filled.allocator.take
    for _ in range(3):
        each = both(take, size, 20)
    count = min(max(int(seconds / 2 / PARTS / each), 20), LONGEST)
    gc.collect()
    gc.disable()
    try:
        quiet.parts = quiet.disturbed = 0
        quiet.warm(lambda: both(take, size, count), best)
        found = quiet.median(lambda: both(take, size, count), best, PARTS)
        first = quiet.median(lambda: alone(take, size, count), best, PARTS)
    finally:
        gc.enable()
    told = {
        "both_us": found * 1e6, "allocate_us": first * 1e6, "reached": reached / filled.cap, "count": count,
        "disturbed": quiet.disturbed / quiet.parts, "best": quiet.best,
    }  # fmt: skip
    if filled.allocator.asks is not None:  # afterwards: counting takes time
        told["asks"] = filled.allocator.asks(lambda: both(take, size, ASKED)) / ASKED
    return told


def child(library: str, way: str, cap: int) -> None:
    """Answers each line of stdin with a line."""

    def tell(answer: dict[str, Any]) -> None:
        print("ANSWER " + json.dumps(answer), flush=True)

    try:
        filled = Filled(WAYS[library][way].begin(cap), cap)
    except Exception as error:  # a library that is not here, or a GPU
        tell({"missing": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]})
        return
    gc.collect()
    gc.freeze()  # the library's own objects: a collection before each block of work would take longer than the work
    quiet = Quiet()
    tell({"best": quiet.best})
    for line in sys.stdin:
        asked = json.loads(line)
        if not asked:
            break
        try:
            os.sched_setaffinity(0, {asked.pop("core")})  # of this thread alone
            tell(measure(filled, **asked, quiet=quiet))
        except Exception as error:
            tell({"failed": f"{type(error).__name__}: {error}"[:300]})
    filled.empty()


# The parent


class Child:
    """One way of one library, in a process of its own."""

    def __init__(self, library: str, way: str, cap: int, script: str = __file__) -> None:
        self.library, self.way = library, way
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (a pipe that nobody reads fills up)
        self.process = subprocess.Popen(
            [sys.executable, script, "--child", library, way, "--cap", str(cap)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment,
        )  # fmt: skip

    def answer(self) -> dict[str, Any]:
        """Its next answer; `missing` if it ended instead."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("ANSWER "):  # libraries print what they like
                found: dict[str, Any] = json.loads(line[7:])
                return found
        self._errors.seek(0)
        return {"missing": f"it ended: rc {self.process.wait()}, {self._errors.read()[-300:]}"}

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
        except OSError:  # it ended
            pass
        return self.answer()

    def end(self) -> int:
        """Let it end. Returns its exit code."""
        assert self.process.stdin is not None
        try:
            self.process.communicate("{}\n", timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        except OSError:
            self.process.wait(30)
            for pipe in (self.process.stdin, self.process.stdout):
                with contextlib.suppress(OSError):  # what was not written to it is lost with the process
                    if pipe is not None:
                        pipe.close()
        self._errors.close()
        return self.process.returncode


def generation(
    number: int, libraries: list[str], cap: int, rounds: int, seconds: float, found: dict[str, Any], until: float
) -> None:
    """New processes for all ways, and their rounds, of which none but each library's first begins too late to end by
    `until`, by this process's clock. The values go into `found`.
    """
    children = {(library, way): Child(library, way, cap) for library in libraries for way in WAYS[library]}
    with ThreadPoolExecutor(len(children)) as threads:
        begun = dict(zip(children, threads.map(Child.answer, children.values())))
    best = min((one["best"] for one in begun.values() if "best" in one), default=math.inf)
    cores = os.sched_getaffinity(0)
    for place, library in enumerate(libraries):
        ways = [way for way in WAYS[library] if "missing" not in begun[library, way]]
        for way in set(WAYS[library]) - set(ways):
            found["missing"][library][way] = begun[library, way]["missing"]
        here = time.monotonic()
        end, longest = here + (until - here) / (len(libraries) - place), 0.0
        counts = found["rounds"].setdefault(library, [])
        counts.append(0)
        for turn in range(rounds):
            started = time.monotonic()
            if turn and started + longest > end:
                break
            core = quietest(cores)
            os.sched_setaffinity(0, (cores - siblings(core)) or cores)  # this process wakes up while a child works
            order = random.Random(f"{number} {library} {turn}")
            for share in SHARES:
                for size in order.sample(SIZES, len(SIZES)):
                    for way in order.sample(ways, len(ways)):
                        told = children[library, way].ask(size=size, share=share, seconds=seconds, core=core, best=best)
                        best = min(best, told.get("best", math.inf))
                        _keep(found, library, cell(size, share), way, number, told)
            os.sched_setaffinity(0, cores)
            longest = max(longest, time.monotonic() - started)
            counts[number] = turn + 1
        ending = [children[library, way] for way in WAYS[library]]
        with ThreadPoolExecutor(len(ending)) as threads:  # their memory is the next library's
            for one, code in zip(ending, threads.map(Child.end, ending)):
                if code:
                    found["failed"][library].setdefault(f"{one.way}{AT_ITS_END}", f"rc {code}")


def _keep(found: dict[str, Any], library: str, where: str, way: str, number: int, told: dict[str, Any]) -> None:
    if "both_us" not in told:
        said = told.get("missing") or told.get("failed") or told.get("skipped")
        found["failed"][library].setdefault(f"{way}, {where}", said)
        return
    values = found["values"][library].setdefault(where, {}).setdefault(way, {})
    for name in {"both_us", "allocate_us", "reached", "asks", "disturbed"} & told.keys():
        groups = values.setdefault(name, [])
        while len(groups) <= number:
            groups.append([])
        groups[number].append(round(told[name], 4))


def summary(values: dict[str, Any]) -> dict[str, Any]:
    """Of each library and cell: every way's figures, and its ratio to what it is compared with."""
    found: dict[str, Any] = {}
    for library, cells in values.items():
        for where, ways in cells.items():
            one = found.setdefault(library, {})[where] = {"ways": {}, "ratios": {}}
            for way, kept in ways.items():
                one["ways"][way] = {name: round(_spread.median(kept[name]), 4) for name in ("both_us", "allocate_us")}
                reached = [value for group in kept["reached"] for value in group]
                one["ways"][way]["reached"] = [min(reached), max(reached)]
                if "disturbed" in kept:
                    one["ways"][way]["disturbed"] = round(_spread.median(kept["disturbed"]), 4)
                if "asks" in kept:
                    one["ways"][way]["asks"] = _spread.median(kept["asks"])
            for way, other in pairs(library).items():
                if way in ways and other in ways and _alike(ways[way]["both_us"], ways[other]["both_us"]):
                    for name in ("both_us", "allocate_us"):
                        spread = _spread.interval(_spread.ratios(ways[way][name], ways[other][name]))
                        rounded = {key: round(value, 4) for key, value in spread.items()}
                        one["ratios"].setdefault(way, {"to": other})[name] = rounded
    return found


KEPT = ("values", "missing", "failed", "rounds")
"""What is kept of each library."""


def takes_over(
    before: dict[str, Any] | None, about: dict[str, Any], cap: int, generations: int, found: dict[str, Any]
) -> dict[str, str]:
    """Put what an earlier run of the same code, on the same kind of GPU, measured of the other libraries into `found`.

    Returns when each of them was measured. Nothing is taken over from a run that differs.
    """
    if before is None or (before.get("cap"), before.get("generations")) != (cap, generations):
        return {}
    same = ("memguard_hash", "versions", "gpu", "driver")
    if any(before.get("about", {}).get(name) != about.get(name) for name in same):
        return {}
    taken = {}
    for library in before.get("rounds_of", {}):
        if library in WAYS and library not in found["values"]:
            for name in KEPT:
                found[name][library] = before["rounds_of" if name == "rounds" else name][library]
            taken[library] = before.get("taken_over", {}).get(library) or before["about"]["date"]
    return taken


def _before(output: Path | None) -> dict[str, Any] | None:
    if output is None or not output.exists():
        return None
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def _alike(one: list[list[float]], other: list[list[float]]) -> bool:
    return [len(group) for group in one] == [len(group) for group in other]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", nargs=2, metavar=("LIBRARY", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument("--cap", type=int, default=CAP, help="bytes")
    parser.add_argument("--generations", type=int, default=GENERATIONS, help="of processes")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="in each generation")
    parser.add_argument("--seconds", type=float, default=0.006, help="that each block of work takes")
    parser.add_argument("--at-most", type=float, default=AT_MOST, help="seconds, for the whole")
    parser.add_argument(
        "--only", default=";".join(WAYS),
        help="names of libraries, separated by semicolons; the others are taken over from the output",
    )  # fmt: skip
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        library, way = arguments.child
        child(library, way, arguments.cap)
        return
    libraries = arguments.only.split(";")
    started = time.monotonic()
    found: dict[str, Any] = {name: {library: {} for library in libraries} for name in KEPT}
    found["rounds"] = {}
    for number in range(arguments.generations):
        until = started + arguments.at_most * (number + 1) / arguments.generations
        generation(number, libraries, arguments.cap, arguments.rounds, arguments.seconds, found, until)
        print(f"generation {number + 1}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    about = header("python benchmarks/peers.py")
    taken = takes_over(_before(arguments.output), about, arguments.cap, arguments.generations, found)
    result: dict[str, Any] = {
        "about": about,
        "cap": arguments.cap,
        "generations": arguments.generations,
        "rounds": min(number for counts in found["rounds"].values() for number in counts),
        "rounds_of": found["rounds"],
        "taken_over": taken,
        "seconds": round(time.monotonic() - started, 1),
        "cpus": os.cpu_count(),
        "ways": {library: {way: one.says for way, one in WAYS[library].items()} for library in libraries},
        "not_there": NOT_THERE,
        "missing": found["missing"],
        "failed": found["failed"],
        "cells": summary(found["values"]),
        "values": found["values"],
    }
    result["checks"] = peers_checks(result)
    conclude(result, arguments.output)


if __name__ == "__main__":
    main()

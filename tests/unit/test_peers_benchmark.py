"""`benchmarks/peers.py` without a GPU: its bars and its table from made-up results, its intervals, and how it fills."""

from __future__ import annotations

import copy
import importlib
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long  # no version of what is installed changes what the benchmarks' own code does

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
_listed, _quiet, _spread, _ways, benchmark, checks, table = (
    importlib.import_module(name) for name in ("_listed", "_quiet", "_spread", "_ways", "peers", "checks", "table")
)
MIB, GIB = 1 << 20, 1 << 30
US = {"plain": 2.3, "memguard": 2.3, "rmm": 8.6, "own pool": 0.69, "memguard, pool": 1.2}
"""Microseconds that pass every bar."""
CELLS = {_ways.cell(size, share): share for size in _ways.SIZES for share in _ways.SHARES}


def good() -> dict[str, Any]:
    """A whole run in which every way takes what US says."""
    values: dict[str, Any] = {}
    for library, ways in _ways.WAYS.items():
        for cell, share in CELLS.items():
            for way in ways:
                time = US[way.removesuffix(_ways.AGAIN)]
                if (library, way) == ("pycuda", "memguard"):
                    time = 1.5
                groups = [[time * (1 + 0.001 * turn) for turn in range(4)] for _ in range(5)]
                reached = [[share - 0.0005] * 4 for _ in range(5)]
                kept = {"both_us": groups, "allocate_us": groups, "reached": reached}
                values.setdefault(library, {}).setdefault(cell, {})[way] = kept
    return {
        "about": {"gpu": "NVIDIA H200", "gpus": 1, "command": "c", "date": "2026-11-22", "memguard_hash": "0"},
        "cap": 4 * GIB, "generations": 5, "rounds": 4,
        "ways": {library: {way: one.says for way, one in ways.items()} for library, ways in _ways.WAYS.items()},
        "missing": {library: {} for library in _ways.WAYS}, "failed": {library: {} for library in _ways.WAYS},
        "not_there": _ways.NOT_THERE, "values": values, "cells": benchmark.summary(values),
    }  # fmt: skip


def failed(result: dict[str, Any]) -> list[str]:
    return [name for name, (passed, _) in checks.peers_checks(result).items() if not passed]


def changed(result: dict[str, Any], library: str, way: str, factor: float) -> dict[str, Any]:
    """The result with all times of one way multiplied."""
    made = copy.deepcopy(result)
    for ways in made["values"][library].values():
        for name in ("both_us", "allocate_us"):
            ways[way][name] = [[value * factor for value in group] for group in ways[way][name]]
    made["cells"] |= benchmark.summary({library: made["values"][library]})
    return made


@pytest.fixture(scope="module")
def passing() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_spread, "RESAMPLES", 80)
        yield good()


def test_a_good_run_passes_all_and_an_empty_one_none(passing: dict[str, Any]) -> None:
    assert failed(passing) == []
    assert list(checks.peers_checks(passing)) == _listed.names(_listed.PEERS)
    for library in _ways.WAYS:
        empty = copy.deepcopy(passing)
        empty["cells"].pop(library)
        lost = [name for name in checks.peers_checks(passing) if name.lower().startswith(library)]
        assert failed(empty) == lost and len(lost) == 4 + 3 * (2 if library == "pycuda" else 1)
    nothing = {**passing, "cells": {}, "about": {**passing["about"], "gpu": None}}
    assert failed(nothing) == list(checks.peers_checks(passing)), "a check that did not run has failed"


@pytest.mark.parametrize(
    ("library", "way", "factor", "bar"),
    [
        ("pycuda", "memguard", 0.69 * 2.4 / 1.5, None),
        ("pycuda", "memguard", 1.96 / 1.5, None),
        ("pycuda", "memguard", 2.1 / 1.5, "PyCUDA's mem_alloc"),
        ("pycuda", "memguard, pool", 1.9 / 1.2, None),
        ("pycuda", "memguard, pool", 2.1 / 1.2, "PyCUDA's DeviceMemoryPool"),
        ("numba", "memguard", 8.5 / 2.3, None),
        ("numba", "memguard", 8.7 / 2.3, "Numba"),
        ("cupy", "memguard", 1.09, None),
        ("cupy", "memguard", 1.11, "CuPy"),
        ("torch", "memguard", 0.9999, None),
        ("torch", "memguard", 1.02, "torch"),
    ],
)
def test_each_bar_can_fail(passing: dict[str, Any], library: str, way: str, factor: float, bar: str | None) -> None:
    wrong = failed(changed(passing, library, way, factor))
    assert wrong == [name for name in checks.peers_checks(passing) if bar and name.startswith(f"{bar} at ")]
    assert len(wrong) == (3 if bar else 0)


def test_near_the_cap_numbas_pool_need_not_serve_and_elsewhere_it_must(passing: dict[str, Any]) -> None:
    slow = changed(passing, "numba", "memguard", 10)
    bars = [f"Numba at {share:.1%}: <= RMM's pool where its pool serves" for share in _ways.SHARES]
    assert failed(slow) == bars
    for cell in CELLS:
        slow["cells"]["numba"][cell]["ways"]["memguard"]["asks"] = 0.5
    assert failed(slow) == bars[:2]
    assert "1 KiB at 99.9%: asks the driver 0.50 times" in checks.peers_checks(slow)[bars[2]][1]
    slow["cells"]["numba"][_ways.cell(MIB, 0.999)]["ways"]["memguard"]["asks"] = 0.05
    assert failed(slow) == bars, "where it serves the bar holds"


def test_a_control_that_differs_shows_that_the_run_resolves_nothing(passing: dict[str, Any]) -> None:
    for library, ways in _ways.CONTROLLED.items():
        for way, factor in itertools.product(ways, (0.85, 1.15)):
            wrong = failed(changed(passing, library, way + _ways.AGAIN, factor))
            assert wrong == [f"{library}: two processes of one way are alike within 10%"], (library, way, factor)


def test_a_way_that_is_missing_or_not_filled_fails(passing: dict[str, Any]) -> None:
    for library, cell in itertools.product(_ways.WAYS, CELLS):
        made = copy.deepcopy(passing)
        del made["cells"][library][cell]["ways"]["memguard"]
        assert len(failed(made)) > 2 and f"{library}: every way measured" in failed(made)
        for part in (CELLS[cell] - 0.01, CELLS[cell] + 0.001):
            made = copy.deepcopy(passing)
            made["cells"][library][cell]["ways"]["memguard"]["reached"][1 if part > CELLS[cell] else 0] = part
            assert failed(made) == [f"{library}: filled to its part of the cap"]


def test_a_process_that_does_not_end_as_it_should_is_told_and_under_memguard_fails(passing: dict[str, Any]) -> None:
    for library, ways in _ways.WAYS.items():
        for way in ways:
            made = copy.deepcopy(passing)
            made["failed"][library][f"{way}{_ways.AT_ITS_END}"] = "rc -6"
            name = f"{library}: no process under memguard dies at its end"
            assert failed(made) == ([name] if way.startswith("memguard") else [])
            assert checks.peers_checks(made)[name][1] == f"{way}, at its end: rc -6"


def test_the_code_of_each_process_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that answer everything, of which one aborts when it ends and one ends before it was asked."""
    program = """
import json, os, sys
library, way = sys.argv[1:3]
print("ANSWER " + json.dumps({"best": 1.0}), flush=True)
if way == "early":
    os._exit(3)
for line in sys.stdin:
    if not json.loads(line):
        break
    print("ANSWER " + json.dumps({"both_us": 1.0, "allocate_us": 1.0, "reached": 0.1}), flush=True)
if way == "memguard":
    os.abort()
"""
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **more: real([sys.executable, "-c", program, *command[3:5]], **more)
    )
    monkeypatch.setattr(benchmark, "WAYS", {"torch": dict.fromkeys(("plain", "memguard", "early"))})
    found: dict[str, Any] = {name: {"torch": {}} for name in benchmark.KEPT} | {"rounds": {}}
    benchmark.generation(0, ["torch"], GIB, 1, 0.001, found, time.monotonic() + 5)
    ends = {name: code for name, code in found["failed"]["torch"].items() if name.endswith(_ways.AT_ITS_END)}
    assert ends == {"memguard, at its end": "rc -6", "early, at its end": "rc 3"}


@pytest.mark.parametrize("short", [{"cap": GIB}, {"generations": 2, "rounds": 10}, {"generations": 3, "rounds": 3}])
def test_a_short_run_says_so(passing: dict[str, Any], short: dict[str, int]) -> None:
    assert "a whole run on a GPU" in failed({**passing, **short})


def test_the_table_has_every_way(passing: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    passing = copy.deepcopy(passing)
    passing["missing"]["torch"]["rmm"] = "ModuleNotFoundError: No module named 'rmm'"
    passing["checks"] = checks.peers_checks(passing)
    monkeypatch.setattr(table, "measured", lambda name: False)
    assert table.peers() == []
    monkeypatch.setattr(table, "measured", lambda name: True)
    monkeypatch.setattr(table, "load", lambda name: passing)
    lines = table.peers()
    for library, ways in _ways.WAYS.items():
        for way in ways:
            rows = [line for line in lines if line.startswith(f"| {table.LABELS[library]}, {way}: ")]
            assert len(rows) == (0 if way.endswith(_ways.AGAIN) or (library, way) == ("torch", "rmm") else 1)
        assert all(f"- {table.LABELS[library]}, {way}: {why}" in lines for way, why in _ways.NOT_THERE[library].items())
    assert any("No module named 'rmm'" in line for line in lines)
    (row,) = [line for line in lines if line.startswith("| PyCUDA, memguard, pool: ")]
    assert row.count("1.20 / 1.20 / 1.20") == 3 and "1.74 (1.74–1.74) of own pool" in row and "control" in row


def test_the_rounds_of_the_library_with_the_fewest_count(passing: dict[str, Any]) -> None:
    """Rounds that would have begun too late are left out."""
    counts = {library: [4, 4, 4] for library in _ways.WAYS}
    assert failed({**passing, "generations": 3, "rounds_of": counts}) == []
    short = {**passing, "generations": 3, "rounds_of": {**counts, "numba": [4, 4, 3]}}
    assert failed(short) == ["a whole run on a GPU"]


def test_what_a_part_leaves_out_is_taken_over_from_the_same_code_and_gpu_alone() -> None:
    about = {"memguard_hash": "1", "versions": {}, "gpu": "H200", "driver": "580", "date": "yesterday"}
    before = {"about": about, "cap": 4, "generations": 3, "rounds_of": {"torch": [4], "cupy": [5]}}
    before |= {name: {"torch": name, "cupy": name} for name in ("values", "missing", "failed")}
    before["taken_over"] = {"torch": "the day before"}
    now = {**about, "date": "today"}

    def part() -> dict[str, Any]:
        return {"values": {"cupy": "new"}, "missing": {"cupy": "new"}, "failed": {"cupy": "new"}, "rounds": {"cupy": 1}}

    found = part()
    assert benchmark.takes_over(before, now, 4, 3, found) == {"torch": "the day before"}
    assert found["values"] == {"cupy": "new", "torch": "values"} and found["rounds"] == {"cupy": 1, "torch": [4]}
    assert found["missing"]["torch"] == "missing" and found["failed"]["torch"] == "failed"
    del before["taken_over"]
    assert benchmark.takes_over(before, now, 4, 3, part()) == {"torch": "yesterday"}
    others = [{"memguard_hash": "2"}, {"versions": {"numpy": "2"}}, {"gpu": "H100"}, {"driver": "575"}]
    for found, arguments in (
        [(part(), ({**before, "about": {**about, **other}}, now, 4, 3)) for other in others]
        + [(part(), (before, now, 5, 3)), (part(), (before, now, 4, 2)), (part(), (None, now, 4, 3))]
    ):  # fmt: skip
        assert benchmark.takes_over(*arguments, found) == {} and found == part()


# a quiet core


class Core:
    """Everything takes `slow` times as long in some stretches of its clock."""

    def __init__(self, seed: int, slow: float, share: float) -> None:
        self.draw, self.slow, self.share = random.Random(seed), slow, share
        self.left, self.factor = 0, 1.0

    def takes(self, seconds: float) -> float:
        if not self.left:
            self.left = self.draw.randint(1, 12)
            self.factor = self.slow if self.draw.random() < self.share else 1.0
        self.left -= 1
        return seconds * self.factor * self.draw.uniform(1, 1.02)


def test_times_are_those_of_a_quiet_core() -> None:
    """At 1.8 times as slow in half of the time, as it was measured, over 300 medians. Without the yardstick they differ
    by as much.
    """
    core = Core(7, 1.8, 0.5)
    quiet = _quiet.Quiet(lambda: core.takes(50e-6))
    found, bare = [], []
    for _ in range(300):
        quiet.warm(lambda: core.takes(2e-6), 50e-6)
        found.append(quiet.median(lambda: core.takes(2e-6), 50e-6, 5) * 1e6)
        bare.append(sorted(core.takes(2e-6) for _ in range(5))[2] * 1e6)
    assert sum(2 <= one <= 2.05 for one in found) >= 0.95 * len(found)
    assert sum(2 <= one <= 2.05 for one in bare) < 0.8 * len(bare)
    assert quiet.disturbed > 0 and quiet.parts >= 5 * len(found)


def test_a_core_that_is_never_quiet_gives_a_time_and_says_so() -> None:
    core = Core(8, 1.8, 1)
    quiet = _quiet.Quiet(lambda: core.takes(50e-6))
    quiet.warm(lambda: core.takes(2e-6), 50e-6)
    quiet.parts = quiet.disturbed = 0
    assert 3.6 <= quiet.median(lambda: core.takes(2e-6), 50e-6, 5) * 1e6 <= 3.7
    assert quiet.parts == quiet.disturbed == 5 * _quiet.TIMES
    assert quiet.limit(50e-6) < quiet.best, "another process has seen a core that was quicker than this"
    assert quiet.limit(quiet.best / 1.1) > quiet.best, "which may be by where their memory lies"


def test_looking_for_a_core_leaves_this_process_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = _quiet.os.sched_getaffinity(0)
    assert _quiet.quietest(cores, 2) in cores and _quiet.os.sched_getaffinity(0) == cores
    monkeypatch.setattr(_quiet, "yardstick", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        _quiet.quietest(cores)
    assert _quiet.os.sched_getaffinity(0) == cores
    assert all(core in _quiet.siblings(core) for core in {*cores, 99999})


# intervals


def test_an_interval_holds_the_true_median_19_times_in_20(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of values that vary from process to process as well as from round to round."""
    monkeypatch.setattr(_spread, "RESAMPLES", 400)
    draw, inside, runs = random.Random(3), 0, 200
    for number in range(runs):
        groups = []
        for _ in range(12):
            luck = draw.gauss(0, 0.02)
            groups.append([1 + luck + draw.gauss(0, 0.02) for _ in range(4)])
        found = _spread.interval(groups, seed=number)
        assert found["min"] <= found["low"] <= found["median"] <= found["high"] <= found["max"]
        inside += found["low"] <= 1 <= found["high"]
    assert 0.9 * runs <= inside <= runs


def test_an_interval_that_ignores_the_processes_would_be_too_narrow() -> None:
    draw = random.Random(5)
    groups = [[1 + luck + draw.gauss(0, 0.001) for _ in range(20)] for luck in (-0.03, -0.01, 0.0, 0.01, 0.03)]
    apart, together = _spread.interval(groups), _spread.interval([[value for group in groups for value in group]])
    assert apart["high"] - apart["low"] > 2 * (together["high"] - together["low"])


def test_which_of_two_equals_is_the_divisor_makes_no_difference() -> None:
    assert _spread.resolved({"low": 0.8, "high": 1.01}) == 1.25 == _spread.resolved({"low": 0.99, "high": 1.25})


# how memory is filled


class Pool:
    """An allocator that keeps what it freed, and takes whole units for what is larger than a piece of one."""

    def __init__(self, unit: int) -> None:
        self.unit, self.taken, self.idle, self.most = unit, 0, [], 0

    def rounded(self, size: int) -> int:
        return -(-size // self.unit) * self.unit

    def take(self, size: int) -> Any:
        size, pool = self.rounded(size), self
        if size in self.idle:
            self.idle.remove(size)
        else:
            self.taken += size
        self.most = max(self.most, self.taken)

        class Block:
            def __del__(self) -> None:
                pool.idle.append(size)

        return Block()

    def trim(self) -> None:
        self.taken -= sum(self.idle)
        self.idle.clear()


@pytest.mark.parametrize("unit", [1, 2 * MIB, *(pytest.param(unit, marks=pytest.mark.long) for unit in (512, 3 * MIB))])
def test_memory_is_filled_to_its_part_and_never_beyond(unit: int) -> None:
    draw, cap = random.Random(unit), 4 * GIB
    pool = Pool(unit)
    filled = benchmark.Filled(_ways.Allocator(pool.take, lambda: pool.taken, pool.rounded, pool.trim), cap)
    wanted = [(size, share) for size in _ways.SIZES for share in _ways.SHARES]
    for size, share in draw.choices(wanted, k=60):
        reached = filled.to(size, share)
        for _ in range(3):  # the work that is timed leaves more blocks idle than there were
            blocks = [pool.take(size) for _ in range(draw.randrange(4))]
            blocks.clear()
        assert 0 <= share * cap - reached <= checks.PEERS_SLACK, (size, share)
        assert pool.rounded(size) in pool.idle, "a block of the size is idle"
    filled.empty()
    assert pool.taken == 0


def test_what_does_not_fit_is_said_and_what_fails_too() -> None:
    filled, quiet = benchmark.Filled(_ways.Allocator(bytearray), 100 * MIB), _quiet.Quiet()
    assert "do not fit" in benchmark.measure(filled, 64 * MIB, 0.1, 0.001, quiet)["skipped"]
    found = benchmark.measure(filled, 1 << 10, 0.1, 0.001, quiet)
    assert found["both_us"] > 0 and found["allocate_us"] > 0 and found["count"] >= 20
    assert 0 <= found["disturbed"] <= 1 and found["best"] == quiet.best > 0
    kept: dict[str, Any] = {"values": {"torch": {}}, "failed": {"torch": {}}}
    for told in ({"skipped": "no room"}, {"failed": "MemoryError"}, {"missing": "it ended"}):
        benchmark._keep(kept, "torch", "1 KiB at 10.0%", "plain", 0, told)
    assert kept == {"values": {"torch": {}}, "failed": {"torch": {"plain, 1 KiB at 10.0%": "no room"}}}

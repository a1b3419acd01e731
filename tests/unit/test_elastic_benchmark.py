"""`benchmarks/elastic.py` without a GPU: its parts over a made-up card and its frameworks, its bars, its tables."""

from __future__ import annotations

import copy
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import elastic_results
import pytest

pytestmark = pytest.mark.long  # no version of what is installed changes what the benchmarks' own code does

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
_arrays, _burst, _checks, _listed, _moves, _pool, _reclaim, _table, benchmark, table = (
    importlib.import_module(name)
    for name in (
        "_elastic_arrays", "_elastic_burst", "_elastic_checks", "_listed", "_elastic_moves", "_elastic_pool",
        "_elastic_reclaim", "_elastic_table", "elastic", "table",
    )
)  # fmt: skip
_elastic_schedules, _oracle, _schedules = (
    importlib.import_module(name) for name in ("_elastic_schedules", "_oracle", "_schedules")
)
MIB, GIB = 1 << 20, 1 << 30


class Card:
    """A card whose frameworks keep what they free, until they are trimmed. `helps`: a request that would not fit has
    the others give back theirs.
    """

    def __init__(self, total: int, helps: bool = True) -> None:
        self.all, self.helps = total, helps
        self.of: dict[str, Framework] = {}
        self.most = 0

    def own(self) -> int:
        return sum(one.held for one in self.of.values())

    def free(self) -> int:
        return self.all - self.own()

    def trim(self, name: str | None = None) -> None:
        for one in [self.of[name]] if name is not None else self.of.values():
            one.idle.clear()


class Framework:
    def __init__(self, card: Card, name: str) -> None:
        self.card, self.name = card, name
        self.live, self.idle = dict[int, int](), list[int]()
        self.spoils = False
        self.numbers = 0
        card.of[name] = self

    @property
    def held(self) -> int:
        return sum(self.live.values()) + sum(self.idle)

    def take(self, size: int, seed: int = 1) -> Array:
        if size in self.idle:
            self.idle.remove(size)
        else:
            if self.card.free() < size and self.card.helps:
                self.card.trim()
            if self.card.free() < size:
                self.idle.clear()
            if self.card.free() < size:
                raise MemoryError(f"{self.name}: no {size}")
        self.numbers += 1
        self.live[self.numbers] = size
        self.card.most = max(self.card.most, self.card.own())
        return Array(self, self.numbers, seed)

    def write(self, array: Array, size: int, seed: int) -> None:
        array.seed = seed

    def right(self, array: Array, size: int, seed: int) -> bool:
        return array.seed == seed and not self.spoils and self.live[array.number] == size


class Array:
    def __init__(self, framework: Framework, number: int, seed: int) -> None:
        self.framework, self.number, self.seed = framework, number, seed

    def __del__(self) -> None:
        self.framework.idle.append(self.framework.live.pop(self.number))


# Reclaim


def asked(helps: bool) -> tuple[dict[str, Any], Card]:
    card = Card(140 * GIB, helps)
    sibling, taker = Framework(card, "torch"), Framework(card, "cupy")
    return _reclaim.asked(sibling, taker, card, taker.take), card


def test_a_siblings_cache_fills_the_card_and_goes_to_whom_asks() -> None:
    found, card = asked(helps=True)
    assert found["cache"] == 138 * GIB and found["free"] == 2 * GIB and found["another"] == 0
    assert found["error"] is None and found["right"] and card.of["torch"].held == 0
    assert found["given_back"] == 138 * GIB, "NVML's figure before, what was taken, and its figure after"


def test_without_help_the_request_fails_and_the_cache_stays() -> None:
    found, card = asked(helps=False)
    assert found["error"]["exception"] == "builtins.MemoryError" and "right" not in found
    assert card.of["torch"].held == 138 * GIB


def test_what_a_limit_keeps_from_the_sibling_another_process_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sibling that may not have it all: a process takes the rest, while the framework asks."""
    card = Card(140 * GIB)
    sibling, taker = Framework(card, "torch"), Framework(card, "jax")
    capped, take = 128 * GIB, sibling.take

    def under_a_cap(size: int, seed: int = 1) -> Array:
        if sibling.held + size > capped:
            raise MemoryError("its cap")
        return take(size, seed)

    class Other:
        def __enter__(self) -> int:
            self.size = card.free() - _reclaim.LEFT
            card.all -= self.size
            return self.size

        def __exit__(self, *_: object) -> None:
            card.all += self.size

    monkeypatch.setattr(sibling, "take", under_a_cap)
    monkeypatch.setattr(_reclaim, "another_process", lambda leave: Other())
    found = _reclaim.asked(sibling, taker, card, taker.take)
    assert found["cache"] == capped and found["sibling_refused"] == "its cap" and found["another"] == 10 * GIB
    assert found["free"] == 2 * GIB and found["error"] is None and card.all == 140 * GIB


def test_each_framework_asks_as_a_program_would(monkeypatch: pytest.MonkeyPatch) -> None:
    import memguard

    used = []

    def retry(times: int) -> Callable[[Any], Any]:
        used.append(times)
        return lambda function: function

    monkeypatch.setattr(memguard, "retry", retry, raising=False)
    card = Card(GIB)
    for name in _listed.SIX:
        one = Framework(card, name)
        before, ask = len(used), _reclaim.retried(one)
        assert ask(MIB, 3).seed == 3
        assert (len(used) > before) == (name in ("torch", "tensorflow", "jax")) == (ask != one.take)
    assert set(used) == {1}


def test_the_budgets_of_the_card_leave_no_room_unused() -> None:
    for name in _listed.SIX:
        made = _reclaim.budget(name)["frameworks"]
        assert len(made) == 2 and made[_reclaim.sibling_of(name)] == {"min": "1%", "max": "99%"}
        assert ("limit" in made[name]) == (name in ("tensorflow", "jax"))


# Moves


def mover(card: Card) -> Any:
    frameworks = {name: Framework(card, name) for name in _moves.GIVERS}
    return _moves.Mover(frameworks, card.trim, lambda name: None, card.own, moved=64 * MIB)


def test_every_pair_is_moved_as_often_and_by_hand_now_and_then() -> None:
    card = Card(100 * MIB)
    found = mover(card).rounds(piece=8 * MIB, times=8, seconds=60, hands=4)
    assert set(found["pairs"]) == set(_listed.ELASTIC_PAIRS) and len(_listed.ELASTIC_PAIRS) == 9
    for one in found["pairs"].values():
        assert one["n"] == 8 and len(one["by_hand_ms"]) == 2 and one["wrong"] == 0 and one["error"] is None
        assert one["most_grown"] <= 8 * 512 and one["p50_ms"] <= one["p99_ms"] <= one["max_ms"]
    assert card.most <= 100 * MIB, "never two frameworks' 64 at once"


def test_a_move_that_fails_is_told_and_not_counted() -> None:
    found = mover(Card(100 * MIB, helps=False)).rounds(piece=8 * MIB, times=3, seconds=60, hands=4)
    for one in found["pairs"].values():
        assert one["n"] == 0 and one["p99_ms"] is None and ": no 67108" in one["error"]
        assert len(one["by_hand_ms"]) == 1, "trimmed by hand, it fits"


def test_wrong_values_and_growth_are_counted() -> None:
    card = Card(200 * MIB)
    of = mover(card)
    of.frameworks["cupy"].spoils = True
    found = of.rounds(piece=8 * MIB, times=2, seconds=60, hands=1)["pairs"]
    assert {pair: one["wrong"] for pair, one in found.items()} == {
        pair: 4 if pair.endswith("> cupy") else 0 for pair in found
    }
    assert all(one["most_grown"] >= 63 * MIB for one in found.values()), "there is room for both: nothing is given back"


def test_rounds_end_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def tick() -> float:
        clock[0] += 1.0
        return clock[0]

    monkeypatch.setattr(_moves.time, "monotonic", tick)
    found = mover(Card(100 * MIB)).rounds(piece=8 * MIB, times=100, seconds=9, hands=4)
    counts = {one["n"] for one in found["pairs"].values()}
    assert len(counts) == 1 and 1 <= counts.pop() < 6


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert _moves.percentile(values, 0.5) == 50 and _moves.percentile(values, 0.99) == 99
    assert _moves.percentile([7.0], 0.99) == 7 and _moves.percentile([], 0.5) is None


def test_a_budget_of_moves_has_no_room_for_two() -> None:
    """Whatever the giver's allocator keeps beside its blocks, and torch's segments of 20 MiB for pieces of 2."""
    most = _moves.budget()["frameworks"]["torch"]["max"]
    segments = -(-_moves.MOVED // (20 * MIB)) * 20 * MIB
    assert max(_moves.MOVED + _moves.SPARE, segments) <= most
    assert most + 3 * _moves.LEAST == _moves.ROOM < _moves.MOVED + _checks.GROWN
    assert [_moves.asked(name, 64 * MIB) for name in ("cupy", "pycuda")] == [64 * MIB, 64 * MIB - 512]


# Burst


def burst(room: int, helps: bool = True) -> dict[str, Any]:
    card = Card(room, helps)
    torch, cupy = Framework(card, "torch"), Framework(card, "cupy")
    found: dict[str, Any] = _burst.alternations(
        5, torch, cupy, lambda: None, card.trim, card.own, least=4, most=12, block=1, patience=0.01
    )
    return found


def test_a_burst_has_its_min_while_bytes_are_live_and_its_max_when_they_are_idle() -> None:
    found = burst(16)
    assert found["live"] == [12] * 5 and found["most_own"] <= 16
    for kind in ("asked_min", "asked_max"):
        assert (found[kind]["n"], found[kind]["served"], found[kind]["at_once"], found[kind]["wrong"]) == (5, 5, 5, 0)


def test_a_burst_that_is_refused_tries_until_its_time_is_over() -> None:
    found = burst(16, helps=False)
    assert found["asked_min"]["served"] == 5 and found["asked_max"]["served"] == 0
    assert found["asked_max"]["p50_ms"] is None and "no 12" in found["asked_max"]["text"]
    short = burst(14)
    assert short["asked_min"]["served"] == 0 and short["asked_max"]["served"] == 5


def test_the_budgets_of_a_burst_fit_the_room_that_they_name() -> None:
    for elastic in (True, False):
        made = _burst.budget(elastic)
        assert made["device"]["limit"] - made["device"]["reserve"] == _burst.ROOM
        parts = made["frameworks"].values()
        assert sum(part.get("limit", part.get("min")) for part in parts) <= _burst.ROOM
        assert made["frameworks"]["torch"].get("max", _burst.MAX) + _burst.MIN == _burst.ROOM


# The pool


def test_peaks_apart_add_up_and_in_one_pool_they_do_not() -> None:
    names = _pool.IN_TURN
    apart, one = Card(1000), Card(1000)
    of_each = [Framework(apart, name) for name in names]
    whole = _pool.in_turn(of_each, apart.trim, apart.own, lambda: None, peak=64, block=8, held=0)
    assert [each["at_peak"] for each in whole["in_turn"].values()] == [64, 128, 192, 256, 320]
    assert whole["trimmed"] == 0 == whole["overhead"]
    shared = Framework(one, "pool")
    views = []
    for name in names:
        view = copy.copy(shared)
        view.name = name
        views.append(view)
    joint = _pool.in_turn(views, one.trim, one.own, lambda: None, peak=64, block=8, held=0)
    assert all(each["at_peak"] == 64 and each["wrong"] == 0 for each in joint["in_turn"].values())


def test_a_mix_keeps_as_many_blocks_as_it_says() -> None:
    card = Card(1 << 60)
    one = Framework(card, "x")
    assert _pool.mixed(one.take, _pool.sizes(3), _pool._places(3)) > 0
    assert not one.live and min(_pool.sizes(3)) >= 1 << 10 and max(_pool.sizes(3)) <= 64 * MIB
    assert len(set(_pool._places(3))) == _pool.LIVE and _pool.sizes(3) == _pool.sizes(3) != _pool.sizes(4)
    assert card.most <= _pool.LIVE * 64 * MIB * 30, "what ends is idle then"


def test_every_library_is_measured_plain_under_both_strategies_and_on_another_pool() -> None:
    for library in _pool.MIX:
        found = _pool.ways(library)
        assert {"plain", "caps", "pool"} < set(found) and "memguard" not in found
        assert "rmm" in found or "own pool" in found
        assert sum(name.endswith(", again") for name in found) == 1 and next(iter(found)) == _pool.COMPARED[library]
        assert set(elastic_results.MIX[library]) == set(found)


US = {"plain": 4.0, "own pool": 1.0, "caps": 5.0, "pool": 2.0, "rmm": 8.0}


class Child:
    """A way that takes what its name says, in microseconds. PyCUDA's pool is not there, and Numba's fails."""

    def __init__(self, library: str, way: str, cap: int) -> None:
        self.library, self.way, self.asked = library, way, list[int]()

    def answer(self) -> dict[str, Any]:
        return {"missing": "no such pool"} if (self.library, self.way) == ("pycuda", "pool") else {}

    def ask(self, seed: int, core: int) -> dict[str, Any]:
        if (self.library, self.way) == ("numba", "pool"):
            return {"failed": "it broke"}
        return {"us": US[self.way.partition(",")[0]] * (1 + seed / 1000)}

    def end(self) -> int:
        return 0


def test_the_ways_of_a_mix_are_compared_round_by_round() -> None:
    found = _pool.throughput(Child, rounds=6)
    cupy = found["figures"]["cupy"]
    assert cupy["caps"]["rounds"] == 6 and cupy["caps"]["ratio"]["median"] == 1.25 == cupy["caps"]["ratio"]["low"]
    assert cupy["rmm"]["ratio"]["median"] == 2 and "ratio" not in cupy["plain"]
    assert found["figures"]["pycuda"]["caps"]["ratio"]["median"] == 5
    assert found["missing"] == {"pycuda, pool": "no such pool"} and found["failed"] == {"numba, pool": "it broke"}
    told = _checks.elastic_checks({"mix": {**found, "returncode": 0}})
    assert not told[_listed.of_mix("numba")][0] and "it broke" in told[_listed.of_mix("numba")][1]
    assert told[_listed.of_mix_alike("cupy")][0] and not told[_listed.of_mix("cupy")][0], "six rounds are too few"
    json.dumps(found)


# Bars


def failed(scenarios: dict[str, Any]) -> list[str]:
    return [name for name, (passed, _) in benchmark.elastic_checks(scenarios).items() if not passed]


BROKEN: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "a card that was not full": (("reclaim cupy", "free"), 9 * GIB, _listed.of_reclaim("cupy")[0]),
    "a card full of others": (("reclaim jax", "cache"), 50 * GIB, _listed.of_reclaim("jax")[0]),
    "nothing came back": (("reclaim numba", "given_back"), 0, _listed.of_reclaim("numba")[1]),
    "values of another": (("reclaim torch", "right"), False, _listed.of_reclaim("torch")[2]),
    "a control that is served": (("reclaim pycuda, plain", "error"), None, _listed.of_reclaim_plain("pycuda")[0]),
    "slow moves": (("moves", "blocks", "pairs", "cupy > numba", "p99_ms"), 100.1, _listed.of_move("cupy > numba")),
    "few moves": (("moves", "blocks", "pairs", "torch > cupy", "n"), 99, _listed.of_move("torch > cupy")),
    "a wrong value": (("moves", "pieces", "pairs", "torch > cupy", "wrong"), 1, _listed.MOVES_RIGHT),
    "twice the bytes": (("moves", "blocks", "pairs", "torch > numba", "most_grown"), 8 * GIB, _listed.MOVES_STAY),
    "above the limit": (("moves", "nvml", "max_bytes"), 15 * GIB, _listed.MOVES_STAY),
    "no pieces": (("moves", "pieces", "pairs", "torch > cupy", "n"), 1, _listed.MOVES_BESIDE),
    "not at once": (("burst", "asked_min", "at_once"), 199, _listed.BURST[0]),
    "nothing live": (("burst", "live", 7), 0, _listed.BURST[0]),
    "after the tick": (("burst", "asked_max", "max_ms"), 101.0, _listed.BURST[1]),
    "overdrawn": (("burst", "most_own"), 20 * GIB, _listed.BURST[3]),
    "fixed shares that lend": (("burst, fixed shares", "asked_max", "served"), 1, _listed.BURST_FIXED),
    "a fifth beside the pool": (("pool", "in_turn", "jax", "at_peak"), 17 * GIB, _listed.POOL_PEAKS[0]),
    "pools apart": (("pool", "in_turn", "numba", "at_peak"), 17 * GIB, "both"),
    "a peak between looks": (("pool", "nvml", "max_bytes"), 10 * GIB, _listed.POOL_PEAKS[0]),
    "a peak that was none": (("pool", "in_turn", "jax", "bytes"), 4 * GIB, _listed.POOL_PEAKS[0]),
    "a control that shares": (("pool, caps", "in_turn", "jax", "at_peak"), 9 * GIB, ""),
    "an avoidable one": (("schedule 7", "avoidable"), 1, _listed.SCHEDULES[0]),
    "schedules of nothing": (("schedule 7", "requests"), -1300, _listed.SCHEDULES[0]),
    "a min that is not there": (("schedule 20", "minima"), 1, _listed.SCHEDULES[1]),
    "beyond the limit between steps": (("schedule 1", "nvml", "max_bytes"), 12 * GIB + 1, _listed.SCHEDULES[2]),
    "beyond the limit at a step": (("schedule 1", "above_limit"), 1, _listed.SCHEDULES[2]),
    "a wrong value in a schedule": (("schedule 3", "wrong"), 1, _listed.SCHEDULES[3]),
    "a control that lends": (("fixed shares, schedule 2", "avoidable"), 0, _listed.SCHEDULES_FIXED),
    "luck": (("mix", "figures", "cupy", "plain, again", "ratio", "median"), 0.8, _listed.of_mix_alike("cupy")),
    "a way that is not there": (("mix", "figures", "torch", "pool", "rounds"), 0, _listed.of_mix("torch")),
}


@pytest.mark.parametrize("what", BROKEN)
def test_each_bar_can_be_missed(what: str) -> None:
    path, value, bar = BROKEN[what]
    whole = elastic_results.whole()
    place: Any = whole
    for key in path[:-1]:
        place = place[key]
    assert path[-1] in place or isinstance(path[-1], int)
    place[path[-1]] = value
    if not bar:  # the sampler has seen it anyway
        whole["pool, caps"]["nvml"]["max_bytes"] = 33 * GIB
        bar = _listed.POOL_APART
    also = {"a peak that was none": _listed.POOL_PEAKS, "pools apart": _listed.POOL_PEAKS[:2]}
    assert failed(whole) == list(also.get(what, (bar,)))


# Tables


def test_the_tables_have_every_figure_and_none_of_what_was_not_measured() -> None:
    whole = elastic_results.whole()
    text = "\n".join(_table.whole(whole))
    for said in (
        "| TensorFlow | `OutOfMemoryError` after 0.1 s | 0.120 s | 6.0 GiB |",
        "| PyTorch to CuPy | 21.5 / 24.5 (100 moves) | 20.5 | 260.0 / 263.0 (12 moves) |",
        "| elastic shares | 200 of 200, 200 at the first try; p50 3.0, p99 9.0 ms |",
        "| fixed shares |", "0 of 10, 0 at the first try |", "| `strategy: caps` | 9.2, 17.2, 25.2, 33.2, 41.2 | 41.20",
        "| CuPy, rmm: as it says | 2.50 | 1.05 (1.01–1.08) |",
        "| elastic shares, 20 | 1400 | 240 | 180 | 60 | 0 | 0 |", "| fixed shares, 2 | 140 | 38 | 18 | 6 | 14 | 0 |",
    ):  # fmt: skip
        assert said in text, said
    for key in whole:
        without = "\n".join(_table.whole({name: one for name, one in whole.items() if name != key}))
        assert without != text
    died = {key: {"returncode": -9, "nvml": elastic_results.nvml(0)} for key in whole}
    assert _table.whole(died) == _table.whole({}) == ["## No avoidable out-of-memory error"]


def test_a_refusal_and_a_control_that_is_served_are_shown() -> None:
    whole = elastic_results.whole()
    whole["reclaim jax"]["error"] = {"exception": "E", "text": "no"}
    whole["reclaim jax, plain"]["error"] = None
    (row,) = [line for line in _table.whole(whole) if line.startswith("| JAX | ")]
    assert row == "| JAX | served after 0.1 s | **refused** after 0.1 s | – |"
    assert "5 of 6 fail without memguard; 5 of 6 are served with it; 8 GiB go" in _table.row(whole)[1]


def test_what_was_not_measured_is_said_and_readme_has_no_row_of_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = table.measured
    monkeypatch.setattr(table, "measured", lambda name: name != "h200-elastic.json" and known(name))
    assert "not measured yet" in "\n".join(table.elastic())
    assert _table.BEGINS not in table.readme_table()
    about = {"memguard_hash": "0", "date": "2026-11-23T", "gpus": 1, "gpu": "NVIDIA H200", "versions": {},
             "command": "python benchmarks/elastic.py"}  # fmt: skip
    scenarios = elastic_results.whole()
    result = {"about": about, "scenarios": scenarios, "checks": benchmark.elastic_checks(scenarios)}
    load = table.load
    monkeypatch.setattr(table, "measured", lambda name: name == "h200-elastic.json" or (table.RESULTS / name).exists())
    monkeypatch.setattr(table, "load", lambda name: result if name == "h200-elastic.json" else load(name))
    lines = table.elastic()
    assert f"{len(result['checks'])} of {len(result['checks'])} checks passed" in lines[-1] or "STALE" in lines[-1]
    rows = [line for line in table.readme_table().splitlines()[2:] if line.startswith("|")]
    (row,) = [line for line in rows if line.startswith(f"| {_table.BEGINS}")]
    assert "6 of 6 fail without memguard; 6 of 6 are served with it" in row and "24 ms (p99)" in row and len(rows) <= 12


# The program


def test_parts_and_names_choose_scenarios_and_another_name_is_refused() -> None:
    every = [name for of in benchmark.PARTS.values() for name in of]
    assert benchmark.chosen(None, None) == every and set(every) - {"mix"} == set(benchmark.SCENARIOS)
    assert benchmark.chosen("c", "mix") == ["burst", "burst, fixed shares", "mix"]
    assert len(benchmark.chosen("a", None)) == 12
    for parts, only in (("x", None), (None, "reclaim nothing")):
        with pytest.raises(SystemExit, match="no such scenario"):
            benchmark.chosen(parts, only)


def test_a_run_without_a_gpu_fails_its_checks_and_says_why(tmp_path: Path) -> None:
    out = tmp_path / "elastic.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "elastic.py"), "--only", "reclaim cupy, plain", "-o", str(out)],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert list(result["scenarios"]) == ["reclaim cupy, plain"] and result["about"]["gpu"] is None
    passed, said = result["checks"][_listed.of_reclaim_plain("cupy")[0]]
    assert not passed and said.startswith("did not run: reclaim cupy, plain: rc 1: ")
    assert list(result["checks"]) == _listed.names(_listed.ELASTIC) and not any(
        ok for ok, _ in result["checks"].values()
    )


@pytest.mark.parametrize("size", [1, 3, 4, 5, 1023, 1024, 8193, 64 * MIB + 4])
@pytest.mark.parametrize("name", ["torch", "cupy", "pycuda", "numba"])
def test_an_array_is_read_back_where_it_was_written(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = bytearray(size)

    class Host:
        def fill(self, at: int, count: int, word: int) -> None:
            pattern = word.to_bytes(4, "little")
            memory[:] = (pattern * (count // 4 + 1))[: count // 4 * 4] + pattern[:1] * (count % 4)

        def read(self, at: int, count: int) -> bytes:
            assert at >= 0 and at + count <= size
            return bytes(memory[at : at + count])

    monkeypatch.setattr(_arrays, "address", lambda name, array: 0)
    one = _arrays.Arrays(name)
    one._memory = Host()
    one.write(None, size, 7)
    assert one.right(None, size, 7) and not one.right(None, size, 8)
    memory[0] ^= 1
    assert not one.right(None, size, 7)


# Schedules


LIMIT, RESERVE = 17 * GIB, GIB


class Simulated:
    """`Arrays` of a simulated framework. They have no values; `wrong` of them are told to have others."""

    def __init__(self, framework: Any) -> None:
        self.framework, self.name, self.wrong = framework, framework.name, 0

    def take(self, size: int, seed: int = 1) -> Any:
        framework, number = self.framework, self.framework.allocate(size)

        class Held:
            def __del__(self) -> None:
                framework.free(number)

        return Held()

    def write(self, array: Any, size: int, seed: int) -> None: ...

    def right(self, array: Any, size: int, seed: int) -> bool:
        self.wrong -= 1
        return self.wrong < 0


def schedule(seed: int, monkeypatch: pytest.MonkeyPatch, lends: bool = True, wrong: int = 0) -> Any:
    """One schedule over the simulated frameworks of an elastic budget, through the runner of the real ones."""
    import memguard
    from memguard._config import from_mapping
    from memguard._devices.simulated import Model, SimulatedHost
    from memguard._guard import Guard

    def call(take: Any, *arguments: Any) -> Any:
        try:
            return take(*arguments)
        except Exception:
            guard.make_room(take.__self__.name, take.__self__.framework.footprint(arguments[0]))
            return take(*arguments)

    terms = _schedules.terms(seed, LIMIT, RESERVE)
    steps = _elastic_schedules.eased(_schedules.schedule(seed, terms), terms)
    budget = _schedules.budget(terms) if lends else _elastic_schedules.fixed(terms)
    guard = Guard(from_mapping(budget), SimulatedHost([Model("card", "hopper", 20 * GIB)]))
    monkeypatch.setattr(memguard, "call", call, raising=False)
    monkeypatch.setattr(_elastic_schedules, "TICK", 0)
    guard.start()
    try:
        frameworks = {name: Simulated(one) for name, one in guard.frameworks.items()}
        frameworks["cupy"].wrong = wrong
        device = guard.plan.devices[0].device
        own = SimpleNamespace(own=lambda: guard.host.processes(device).get(guard.host.pid) or 0)
        log = _schedules.play(steps, _elastic_schedules.Runner(guard, frameworks, own, lends), terms)
        return _oracle.judge(log, terms)
    finally:
        guard.stop()


@pytest.mark.parametrize("seed", _listed.ELASTIC_CONTROLS)
def test_a_schedule_is_played_and_judged_and_its_control_finds_what_could_have_been_served(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = schedule(seed, monkeypatch)
    assert found.faults == [] and found.requests >= _checks.REQUESTS / len(_listed.ELASTIC_SEEDS)
    assert schedule(seed, monkeypatch, lends=False).avoidable
    assert len(schedule(seed, monkeypatch, wrong=3).wrong) == 3


def test_requests_that_wait_for_nothing_are_left_out_but_for_a_few() -> None:
    """Each would take ten seconds. Everything else of a schedule stays, in its order."""
    dropped = 0
    for seed in _listed.ELASTIC_SEEDS:
        terms = _schedules.terms(seed, LIMIT, RESERVE)
        steps = _schedules.schedule(seed, terms)
        kept = _elastic_schedules.eased(steps, terms)
        dropped += sum(len(step.sizes) for step in steps) - sum(len(step.sizes) for step in kept)
        others = [[step for step in of if step.framework not in _oracle.FIXED] for of in (steps, kept)]
        assert others[0] == others[1]
        books, refused = _oracle.Books(terms), 0
        arrays: dict[int, Any] = {}
        for step in kept:
            if step.op == "free" and step.block in arrays:
                books.remove(*arrays.pop(step.block))
            inner = []
            for size in step.sizes:
                if books.fits(step.framework, size):
                    books.add(step.framework, size)
                    inner.append((step.framework, size))
                else:
                    refused += step.framework in _oracle.FIXED
            if step.op == "allocate" and inner:
                arrays[step.block] = inner[0]
            elif step.op == "peak":
                for one in inner:
                    books.remove(*one)
        assert refused <= 2 * _elastic_schedules.WAITS
    assert dropped > 0

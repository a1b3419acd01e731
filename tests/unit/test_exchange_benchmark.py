"""The exchange's benchmark without a GPU: bars and tables from made-up results, and what it expects of odd arrays."""

from __future__ import annotations

import copy
import importlib
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from memguard.exchange import compatibility
from memguard.exchange.adapters import registry
from memguard.exchange.view import DTYPES, View

pytestmark = pytest.mark.long  # no version of what is installed changes what the benchmarks' own code does

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
_arrays, _edges, _exchange_tables, _listed, _order, benchmark, table, checks = (
    importlib.import_module(name)
    for name in ("_arrays", "_edges", "_exchange_tables", "_listed", "_order", "exchange", "table", "checks")
)
exchange_checks = checks.exchange_checks

SIX = ("torch", "tensorflow", "cupy", "jax", "pycuda", "numba")
PAIRS = [f"{source} > {target}" for source in SIX for target in SIX if source != target]


def _made(pair: str, dtype: str) -> str:
    source, _, target = pair.partition(" > ")
    if dtype not in _arrays.TAKES[source]:
        return "not made: TypeError"
    return "shared" if dtype in _arrays.TAKES[target] else "CannotShare: no such dtype"


def _good() -> dict[str, Any]:
    """Scenarios as they are when everything is right."""
    pair = {"call": "f", "waits": "stream", "same_pointer": True, "right": True, "copy": True, "outlives": True}
    hand = {"rounds": 1000, "stale": 0, "running_before": 1000, "running_after": 1000, "hand_over_us": 20.0}
    case = {"case": "stepped", "outcome": "refused", "expected": "refused", "copy": "equal", "expected_copy": "equal"}
    spread = {"median_us": 20.0, "p5_us": 18.0, "p95_us": 30.0}
    buffers = [f"{name} > {target}" for name in ("rmm", "cuda.core") for target in SIX]
    timed = {"memguard": spread, "by_hand": {"g": {**spread, "median_us": 12.0}}, "best": "g", "extra_us": 8.0}
    ms = dict.fromkeys(SIX, 300.0)
    scenarios: dict[str, Any] = {
        "pairs": {"pairs": {name: dict(pair) for name in [*PAIRS, *buffers]}, "open": 0},
        "dtypes": {"dtypes": {name: {dtype: _made(name, dtype) for dtype in _arrays.DTYPES} for name in PAIRS}},
        "control: misaligned into TensorFlow": {"returncode": -6},
        "control: reversed into PyTorch": {"returncode": -6},
        "order without memguard": {"ways": {"by hand": {"rounds": 50, "stale": 40}}},
        "dropped": {
            "dropped": {f"{name} > torch": {"rounds": 100, "wrong": 0} for name in ("a", "b", "c", "d", "jax")},
            "without": {f"{name} > torch: how": {"rounds": 100, "wrong": 3} for name in ("a", "b", "c", "d", "jax")},
        },
        "speed": {
            "bytes": 1 << 30, "rounds": 200, "speed": {name: dict(timed) for name in PAIRS},
            "host": {"to_host_ms": ms, "from_host_ms": ms, "rounds": 3},
        },
        "lent": {
            "lent": {
                name: {
                    "nbytes": 32, "nvml": 9, "before": 0, "lent": 32, "after": 0, "nvml_growth": 0,
                    "sum_minus_total": 0,
                }
                for name in PAIRS
            }
        },
        "leak": {"hand_overs": 10_020, "nvml_before": 9, "nvml_after": 9, "rss_growth_kib": 0, "open": 0},
        "killed": {
            "bytes": 1 << 30, "nvml_before": 5, "nvml_exported": 5 + (1 << 30), "nvml_after": 5, "attached": [1, 0],
            "child_returncode": -9, "child": {"last": 3.0}, "last": 3.0,
        },
        "routes": {"routes": {name: {"ms": 2.0} for name in ("a", "b", "c", "d", "e")}},
        "peers": {
            "peers": {
                name: {
                    "right": True, "route": "copied from cuda:0 to cuda:1, peer to peer", "gb_per_s": 280.0,
                    "without_copy": "CannotShare: no",
                }
                for name in SIX
            },
            "by_route_gb_per_s": {"through the host": 50.0, "peer to peer": 380.0},
        },
    }  # fmt: skip
    for source in SIX:
        scenarios[f"order from {source}"] = {"order": {name: dict(hand) for name in PAIRS if name.startswith(source)}}
    for source in (*SIX, "rmm", "cuda.core"):
        cases = [{**case, "target": target} for target in SIX for _ in range(8)]
        scenarios[f"edges from {source}"] = {"cases": cases, "deaths": [], "open": 0}
    return scenarios


GOOD = _good()
GOOD_CHECKS = _listed.names(_listed.of_exchange(_listed.EXCHANGE))


def test_what_is_right_passes_every_bar() -> None:
    failed = {name: figure for name, (passed, figure) in exchange_checks(GOOD).items() if not passed}
    assert not failed
    assert len(exchange_checks(GOOD)) == 24


@pytest.mark.parametrize(
    ("path", "value", "bar"),
    [
        (("pairs", "pairs", "torch > jax", "same_pointer"), False, "30 pairs: the same pointer"),
        (("pairs", "pairs", "torch > jax", "copy"), False, "30 pairs: the right values, a copy's too"),
        (("pairs", "pairs", "torch > jax", "outlives"), False, "30 pairs: alive after its maker has let go of it"),
        (("pairs", "pairs", "rmm > jax", "right"), False, "buffers of RMM and cuda.core into all six"),
        (("dtypes", "dtypes", "torch > jax", "int8"), "CannotShare: why", "dtypes: shared or refused"),
        (("dtypes", "dtypes", "torch > numba", "bfloat16"), "shared", "dtypes: shared or refused"),
        (("dtypes", "dtypes", "torch > jax", "int8"), "wrong: other values", "dtypes: shared or refused"),
        (("edges from rmm", "deaths"), [{"case": "0-d > jax"}], "odd arrays: no process dies"),
        (("edges from rmm", "open"), -1, "odd arrays: no process dies"),
        (("edges from jax", "cases", 0, "outcome"), "shared", "odd arrays: the documented answer"),
        (("edges from jax", "cases", 0, "copy"), "wrong: other values", "odd arrays: equal values with copy=True"),
        (("control: misaligned into TensorFlow", "returncode"), 0, "by hand, misaligned into TensorFlow"),
        (("control: reversed into PyTorch", "returncode"), 1, "by hand, reversed into PyTorch"),
        (("order from torch", "order", "torch > jax", "stale"), 1, "30 pairs: none stale"),
        (("order from torch", "order", "torch > jax", "running_before"), 999, "30 pairs: none stale"),
        (("order from tensorflow", "order", "tensorflow > jax", "running_before"), 0, "30 pairs: none stale"),
        (("order without memguard", "ways", "by hand", "stale"), 0, "by hand without order"),
        (("dropped", "dropped", "jax > torch", "wrong"), 1, "a view dropped while it is still read"),
        (("dropped", "without", "jax > torch: how", "wrong"), 0, "by hand, dropped"),
        (("speed", "speed", "torch > jax", "extra_us"), 50.1, "1 GiB, idle: at most 50 us"),
        (("speed", "speed", "torch > jax", "extra_us"), None, "1 GiB, idle: at most 50 us"),
        (("speed", "host", "to_host_ms", "torch"), -1e6, "against the host route"),
        (("lent", "lent", "torch > jax", "lent"), None, "lent: in the ledger"),
        (("lent", "lent", "torch > jax", "after"), 32, "lent: in the ledger"),
        (("lent", "lent", "torch > jax", "nvml_growth"), 4096, "lent: in the ledger"),
        (("lent", "lent", "torch > jax", "nvml"), -1, "lent: in the ledger"),
        (("leak", "nvml_after"), 10, "10,000 hand-overs"),
        (("leak", "rss_growth_kib"), 20_000, "10,000 hand-overs"),
        (("leak", "nvml_before"), -1, "10,000 hand-overs"),
        (("leak", "hand_overs"), 9_999, "10,000 hand-overs"),
        (("killed", "nvml_after"), 6, "a process that attached is killed"),
        (("killed", "attached"), [1, 1], "a process that attached is killed"),
        (("killed", "nvml_exported"), 5, "a process that attached is killed"),
        (("routes", "routes", "a"), {"error": "no"}, "routes: each timed"),
        (("peers", "peers", "jax", "right"), False, "two GPUs: copied"),
        (("peers", "peers", "jax", "without_copy"), "shared", "two GPUs: not shared"),
        (("peers", "peers", "jax", "gb_per_s"), 57.0, "two GPUs: the route that is said"),
        (("peers", "peers", "jax", "gb_per_s"), None, "two GPUs: the route that is said"),
        (("peers", "peers", "torch", "route"), "copied from cuda:0 to cuda:1", "two GPUs: the route that is said"),
        (("peers", "peers", "jax", "route"), "cuda:0 to cuda:1, through the host", "two GPUs: the route that is said"),
        (("peers", "by_route_gb_per_s"), {"through the host": 50.0}, "two GPUs: the route that is said"),
        (("peers", "by_route_gb_per_s"), {}, "two GPUs: the route that is said"),
        (("peers", "by_route_gb_per_s", "through the host"), 300.0, "two GPUs: the route that is said"),
        (("pairs", "open"), 2, "nothing stays lent"),
    ],
)
def test_what_is_wrong_fails_its_bar_and_no_other(path: tuple[Any, ...], value: Any, bar: str) -> None:
    broken = copy.deepcopy(GOOD)
    place = broken
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    failed = [name for name, (passed, _) in exchange_checks(broken).items() if not passed]
    also = {"leak", "edges from rmm"} & {path[0]}  # what is open is told of them too
    assert failed and all(name.startswith(bar) or (also and name == "nothing stays lent") for name in failed), failed


@pytest.mark.parametrize("rate", [64.4, 278.2])
def test_jax_alone_may_leave_its_route_out(rate: float) -> None:
    """As the results have it: its copies went at either rate."""
    found = copy.deepcopy(GOOD["peers"])
    found["peers"]["jax"].update(route="torch to jax: 1.00 GiB copied from cuda:0 to cuda:1", gb_per_s=rate)
    (check,) = [one for name, one in exchange_checks({"peers": found}).items() if "the route that is said" in name]
    assert check[0], check


@pytest.mark.parametrize(("gpu", "lacking"), [("NVIDIA H100 80GB HBM3", 0), ("NVIDIA H200", len(GOOD_CHECKS) - 2)])
def test_only_another_kind_of_card_may_have_a_run_of_speed_alone(gpu: str, lacking: int) -> None:
    found = exchange_checks({"speed": copy.deepcopy(GOOD["speed"])})
    assert [passed for passed, _ in found.values()] == [True, True]
    about = {"command": 'python benchmarks/exchange.py --only "speed"', "gpu": gpu, "gpus": 1}
    assert len(_listed.lacking({"about": about, "scenarios": {"speed": {}}, "checks": found})) == lacking


def test_the_documented_dtypes_are_those_that_memguard_takes() -> None:
    assert set(_arrays.DTYPES) == set(DTYPES)
    assert set(_arrays.TAKES) == set(SIX)
    for name, dtypes in _arrays.TAKES.items():
        assert registry.by_name(name).traits.dtypes == dtypes, name


ODD = {
    "compact": (0x1000, (64, 64), None),
    "rows": (0x1000 + 8 * 256, (16, 64), (256, 4)),
    "stepped": (0x1000, (32,), (8,)),
    "reversed": (0x10FC, (64,), (-4,)),
    "transposed": (0x1000, (64, 32), (4, 256)),
    "broadcast": (0x1000, (8, 64), (0, 4)),
    "4 past": (0x1004, (32,), (4,)),
    "16 past": (0x1010, (32,), (4,)),
    "32 past": (0x1020, (32,), (4,)),
    "a dimension of one": (0x1000, (1, 64), (9999 * 4, 4)),
    "nothing in it": (0x1004, (0, 3), (12, 4)),
    "0-d": (0x1000, (), ()),
    "three dimensions": (0x1000, (2, 3, 4), (48, 16, 4)),
    "three, permuted": (0x1000, (4, 2, 3), (4, 48, 16)),
    "three, with gaps": (0x1000, (2, 3, 4), (64, 16, 4)),
}


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("target", SIX)
@pytest.mark.parametrize("name", ODD)
def test_the_benchmark_expects_what_compatibility_says(name: str, target: str, readonly: bool) -> None:
    """Two accounts of the same: the benchmark's is written from docs/exchange.md."""
    address, shape, strides = ODD[name]
    facts = _arrays.Facts(address, shape, strides, "float32", readonly)
    wanted, copied = _edges.expected(name, facts, target)
    counted = tuple(stride // 4 for stride in strides) if strides is not None else (64, 1)
    view = View(address, shape, counted, "float32", 0, readonly)
    obstacle = compatibility.obstacle(view, registry.by_name(target).traits, 0)
    assert wanted == ("shared" if obstacle is None else "refused")
    assert copied == "equal" and (obstacle is None or obstacle.copied)


def test_the_benchmark_expects_refusals_of_arrays_without_memory() -> None:
    assert _edges.expected("ragged", None, "torch") == ("refused", "refused")
    plain = _arrays.Facts(0x1000, (4,), None, "float32")
    assert _edges.expected("requires a gradient", plain, "jax") == ("refused", "equal")
    assert _edges.expected("64-bit", plain._replace(dtype="float64"), "jax") == ("refused", "refused")
    assert _edges.expected("64-bit", plain._replace(dtype="float64"), "torch") == ("shared", "equal")


def test_scenarios_are_chosen_by_their_beginning() -> None:
    assert benchmark.chosen("edges") == [f"edges from {name}" for name in (*SIX, "rmm", "cuda.core")]
    assert len(benchmark.chosen("order")) == 7
    assert benchmark.chosen("pairs;peers") == ["pairs", "peers"]
    assert len(benchmark.chosen("control")) == 2
    assert "peers" not in benchmark.chosen(None)
    assert set(benchmark.chosen(None)) | {"peers"} == set(benchmark.SCENARIOS)


def test_a_refusal_is_recorded_without_its_remedy() -> None:
    assert benchmark.refusal(ValueError("no\n    fix: so")) == "ValueError: no"


def _result() -> dict[str, Any]:
    about = {
        "command": "python benchmarks/exchange.py", "date": "2026-11-21T00:00:00", "memguard_hash": "abc", "gpu": "G",
        "driver": "1", "versions": {"tensorflow": "2"}, "tensorflow_build": "t",
    }  # fmt: skip
    return {"about": about, "scenarios": GOOD, "checks": exchange_checks(GOOD)}


def test_the_tables_say_who_waits_and_what_is_shared() -> None:
    result = copy.deepcopy(_result())
    result["scenarios"]["order from torch"]["order"]["torch > tensorflow"]["running_after"] = 10
    lines = _exchange_tables.whole(result)
    torch = next(line for line in lines if line.startswith("| PyTorch |"))
    assert torch.split(" | ")[1:4] == [
        "same pointer; host waits; 15 dtypes", "–", "same pointer; stream waits; 20 dtypes"
    ]  # fmt: skip
    timed = [line for line in lines if line.startswith("| PyTorch |")][1]
    assert timed.split(" | ")[1] == "20.0 / 12.0 / 600 ms"
    float8 = next(line for line in lines if line.startswith("| float8"))
    assert float8.split(" | ")[1:] == ["PyTorch, JAX", "no", "yes", "yes", "no", "no", "no |"]
    assert "| stepped | refused | refused | refused | refused | refused | refused |" in lines
    widths = {line.count("|") for line in lines[3:12]}
    assert widths == {8}


def test_a_dtype_that_only_some_producers_have_gets_a_row_of_its_own() -> None:
    result = copy.deepcopy(_result())
    result["scenarios"]["dtypes"]["dtypes"]["torch > jax"]["int8"] = "CannotShare: why"
    row = next(line for line in _exchange_tables.whole(result) if line.startswith("| int8 |"))
    assert row.split(" | ")[1:] == ["all six", "yes", "yes", "in part", "yes", "yes", "yes |"]


def test_the_tables_name_the_producers_if_they_differ() -> None:
    result = copy.deepcopy(_result())
    for case in result["scenarios"]["edges from torch"]["cases"]:
        case["outcome"] = "shared" if case["target"] == "jax" else case["outcome"]
    row = next(line for line in _exchange_tables.whole(result) if line.startswith("| stepped"))
    assert "shared from PyTorch" in row and row.count("shared from") == 1


def test_in_short_the_worst_figure_is_named() -> None:
    result = copy.deepcopy(_result())
    result["scenarios"]["speed"]["speed"]["numba > jax"]["extra_us"] = 44.4
    result["scenarios"]["leak"]["nvml_after"] += 2
    text = "\n".join(_exchange_tables.in_short(result, None))
    assert "+44 µs to the best way by hand at worst (Numba to JAX)" in text
    assert "| +2 bytes |" in text and "30 of 30" in text and "0 of 30,000 stale" in text
    assert table.origin("h200-exchange.json", result)[0].startswith("24 of 24 checks passed")
    way = "torch to jax: 1.00 GiB copied from cuda:0 to cuda:1"
    rates = {
        "torch": {"gb_per_s": 250.0, "route": way},
        "jax": {"gb_per_s": 57.0, "route": f"{way}, through the host"},
        "cupy": {"gb_per_s": 343.0, "route": f"{way}, peer to peer"},
    }
    text = "\n".join(_exchange_tables.in_short(result, {"scenarios": {"peers": {"peers": rates}}}))
    assert "PyTorch 250 GB/s, CuPy 343 GB/s" in text.replace("JAX 57 GB/s through the host, ", "")
    assert "JAX 57 GB/s through the host" in text and "CuPy 343 GB/s peer to peer" in text


def test_the_committed_results_pass_their_own_checks_again() -> None:
    for name in ("h200-exchange.json", "h200-x2-exchange.json"):
        path = ROOT / "benchmarks" / "results" / name
        if path.exists():
            result = json.loads(path.read_text())
            again = exchange_checks(result["scenarios"])
            told = [check for check in result["checks"] if check in again]
            assert len(told) >= 3 and all(again[check][0] == result["checks"][check][0] for check in told), name


@pytest.mark.parametrize("between_us", [0, 20, 60, 300, 5000])
@pytest.mark.parametrize("launch_us", [0, 8])
@pytest.mark.parametrize("mhz", [345, 1980])
def test_work_ends_just_when_it_is_looked_at_on_any_card(between_us: float, launch_us: float, mhz: int) -> None:
    """Slow clocks and fast, a hand-over that asks soon or late after the launch: 600 rounds of each.

    Where the launch alone takes longer than the hand-over, all work is still under way, and the shortest is tried.
    """
    edge, noise = _order.Edge(7, 100_000), random.Random(between_us)
    for _ in range(600):
        works = launch_us + edge.length() / mhz
        edge.told(works <= between_us * noise.uniform(0.8, 1.3))
    assert edge.ended + edge.under_way == 600
    if between_us <= launch_us * 1.3:
        assert edge.ended <= 60 and edge.middle == edge.SHORTEST
    else:
        assert edge.ended >= 200 and edge.under_way >= 200

"""`benchmarks/training.py` without a GPU: bars and table from made-up results, segments on a simulated GPU."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import math
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memguard

pytestmark = pytest.mark.long  # no version of what is installed changes what the benchmarks' own code does

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
_spread, benchmark, checks, table = (
    importlib.import_module(name) for name in ("_spread", "training", "checks", "table")
)
NAMES = ("watched", "without", "again")


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("MEMGUARD_CONFIG", "MEMGUARD_DISABLE", "MEMGUARD_SIMULATE"):
        monkeypatch.delenv(name, raising=False)
    yield
    memguard.shutdown()


def taken(cost: float, noise: float, blocks: int = 100, seed: int = 1) -> list[dict[str, float]]:
    """Blocks of segments of which the watched one takes `cost` times as long, but for noise."""
    draw = random.Random(seed)
    return [{name: (cost if name == "watched" else 1) * draw.gauss(1, noise) for name in NAMES} for _ in range(blocks)]


def good() -> dict[str, Any]:
    one = {
        "says": "a model", "step_ms": 30.0, "steps": 4, "pairs": 100, "watched_s": 20.0, "samples": 205,
        "without_a_sample": 3, "active": {"watched": [True], "without": [False], "again": [False]},
        **benchmark.ratios(taken(1.0, 0.003)),
    }  # fmt: skip
    about = {"gpu": "NVIDIA H200", "gpus": 1, "command": "c", "date": "2026-11-22", "memguard_hash": "0"}
    return {"about": about, "scenarios": {name: copy.deepcopy(one) for name in checks.TRAINING}}


def failed(result: dict[str, Any]) -> list[str]:
    return [name for name, (passed, _) in checks.training_checks(result).items() if not passed]


def test_a_good_run_passes_and_one_that_did_not_run_has_failed() -> None:
    assert failed(good()) == [] and list(checks.training_checks(good())) == checks._listed.names(
        checks._listed.TRAINING
    )
    assert set(benchmark.SCENARIOS) == set(checks.TRAINING)
    for name in checks.TRAINING:
        whole = good()["scenarios"][name]
        for instead, said in (
            (None, "not started"),
            ({"skipped": "transformers is not here"}, "transformers is not here"),
            ({"returncode": -11}, "rc -11"),
            ({**whole, "returncode": -11}, "rc -11"),  # it died after it had told its result
        ):
            result = good()
            result["scenarios"].pop(name)
            if instead is not None:
                result["scenarios"][name] = instead
            assert len(failed(result)) == 2 and all(check.startswith(name) for check in failed(result))
            found = checks.training_checks(result)
            assert all(said in found[check][1] for check in failed(result))


@pytest.mark.parametrize(
    "wrong",
    [
        {"pairs": 99}, {"samples": 100}, {"samples": 0}, {"samples": 300}, {"watched_s": 0.0},
        {"without_a_sample": 21},
        {"beyond": {"median": 1.0, "low": 0.99, "high": 1.006}},
        {"active": {"watched": [False], "without": [False], "again": [False]}},
        {"active": {"watched": [True], "without": [False, True], "again": [False]}}, {"active": {}},
    ],
)  # fmt: skip
def test_each_bar_can_fail(wrong: dict[str, Any]) -> None:
    for name in checks.TRAINING:
        result = good()
        result["scenarios"][name] |= wrong
        assert len(failed(result)) == 1 and failed(result)[0].startswith(name)
    assert len(failed({**good(), "about": {"gpu": None}})) == 2


def test_a_cost_of_one_percent_is_found_and_none_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """With segments that vary by 0.5 %. 40 runs of each."""
    monkeypatch.setattr(_spread, "RESAMPLES", 120)
    highs: dict[float, list[float]] = {
        cost: [benchmark.ratios(taken(cost, 0.005, seed=seed))["beyond"]["high"] for seed in range(40)]
        for cost in (1.0, 1.01)
    }
    assert sum(high <= checks.TRAINING_MOST for high in highs[1.0]) >= 38
    assert not any(high <= checks.TRAINING_MOST for high in highs[1.01])


def test_drift_from_block_to_block_changes_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_spread, "RESAMPLES", 120)
    drifting = [{name: value * (1 + 0.01 * number) for name, value in block.items()}
                for number, block in enumerate(taken(1.0, 0.001))]  # fmt: skip
    assert benchmark.ratios(drifting)["beyond"]["high"] <= 1.001


class Watching(benchmark.Segments):
    """Notes for each step which part of the run it belongs to, and whether a budget is active."""

    def __init__(self) -> None:
        self.seen: dict[str, list[bool]] = {}
        self.inside = ""
        super().__init__(self.take, lambda: None, simulate="h200")

    def take(self) -> None:
        time.sleep(0.002)
        self.seen.setdefault(self.inside, []).append(benchmark.active())

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.inside = name
        with super().part(name):
            yield


def test_segments_have_a_budget_when_watched_and_none_otherwise() -> None:
    """On a simulated GPU, with steps that only wait: 6 blocks."""
    segments = Watching()
    found = benchmark.measure(segments, 6, 0.11)
    assert found["pairs"] == 6 and 1 <= found["steps"] <= 55 and found["step_ms"] >= 2
    assert found["active"] == {"watched": [True], "without": [False], "again": [False]}
    timed = segments.seen["timed"]
    assert timed.count(False) == 2 * timed.count(True) > 0, "a third of the segments"
    assert not any(segments.seen[""]) and all(segments.seen["until the second sample"])
    assert found["watched_s"] > 0.5 and 4 <= found["samples"] / found["watched_s"] <= 15, "of 10 a second"
    assert found["budgets"] == {"begun": 3, "settled": 3}, "two watched segments for each"
    assert {"init", "timed", "between", "shutdown"} < set(found["spent_s"])
    assert all(len(found["seconds"][name]) == 6 for name in NAMES)
    beyond, blocks = (
        found["beyond"],
        zip(*(found["seconds"][name] for name in ("watched", "without", "again")), strict=True),
    )
    ratios = [watched / math.sqrt(without * again) for watched, without, again in blocks]
    assert min(ratios) - 0.01 <= beyond["low"] <= beyond["median"] <= beyond["high"] <= max(ratios) + 0.01
    with pytest.raises(memguard.NotActive):
        memguard.ledger()
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("cpu", [0.002, 0.02])
def test_a_first_sample_that_costs_much_leaves_no_segment_without_samples(
    monkeypatch: pytest.MonkeyPatch, cpu: float
) -> None:
    """The monitor pays for it by waiting: 0.2 or 2 s. It is waited for too, or the result says that it was not."""
    from memguard._monitor.session import Session

    take = Session._take

    def costly(session: Session) -> Any:
        if not session.monitor.last(60):
            begun = time.thread_time()
            while time.thread_time() - begun < cpu:
                pass
        return take(session)

    monkeypatch.setattr(Session, "_take", costly)
    # On a busy machine the clock of a thread counts more than the thread did: the first may take long, the second does.
    monkeypatch.setattr(benchmark, "PATIENCE", 20.0 if cpu == 0.002 else 0.8)
    segments = Watching()
    segments.count = 250 if cpu == 0.002 else 60
    for number in range(2):
        segments.block(number)
    segments.end()
    if cpu == 0.002:
        assert segments.settled == 1 and segments.empty == 0
    else:
        assert segments.settled == 0 and segments.empty == 2
        result = good()
        result["scenarios"]["GPT"] |= {"samples": segments.samples, "watched_s": segments.watched}
        assert len(failed(result)) == 1


def test_a_budget_ends_if_a_step_fails() -> None:
    calls = iter(range(1000))

    def step() -> None:
        if next(calls) == 100:
            raise RuntimeError("a step")

    with pytest.raises(RuntimeError, match="a step"):
        benchmark.measure(benchmark.Segments(step, lambda: None, simulate="h200"), 3, 0.001)
    with pytest.raises(memguard.NotActive):
        memguard.ledger()


def test_the_order_of_the_three_changes_and_drift_cancels() -> None:
    """Watched is the last of a block and the first of the next one, and the two without change places."""
    orders, places = set(), dict.fromkeys(NAMES, 0)
    for number in range(100):
        segments = benchmark.Segments(lambda: None, lambda: None)
        order: list[str] = []
        segments.segment = lambda name, warm, order=order: order.append(name) or 1.0
        segments.block(number)
        orders.add(tuple(order))
        assert order.index("watched") == (0 if number % 2 else 2)
        for place, name in enumerate(order):
            places[name] += place
    assert len(orders) == 4 and set(places.values()) == {100}


def test_a_program_whose_library_is_not_here_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in checks.TRAINING:
        assert benchmark.SCENARIOS[name]()["skipped"].startswith("torch is not here")


def test_the_table_has_a_row_for_each_program(monkeypatch: pytest.MonkeyPatch) -> None:
    result = good()
    result["scenarios"]["GPT"] = {"skipped": "transformers is not here"}
    result["checks"] = checks.training_checks(result)
    monkeypatch.setattr(table, "measured", lambda name: False)
    assert table.training() == []
    monkeypatch.setattr(table, "measured", lambda name: True)
    monkeypatch.setattr(table, "load", lambda name: result)
    lines = table.training()
    assert sum("100 pairs of 4 steps of 30.0 ms" in line for line in lines if line.startswith("|")) == 1
    assert any("not measured: transformers is not here" in line for line in lines)

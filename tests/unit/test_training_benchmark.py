"""`benchmarks/training.py` without a GPU: bars and table from made-up results, segments on a simulated GPU."""

from __future__ import annotations

import copy
import importlib
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memguard

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
        "active": {"watched": [True], "without": [False], "again": [False]}, **benchmark.ratios(taken(1.0, 0.003)),
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
        for instead in (None, {"skipped": "transformers is not here"}, {"returncode": -11}):
            result = good()
            result["scenarios"].pop(name)
            if instead is not None:
                result["scenarios"][name] = instead
            assert len(failed(result)) == 2 and all(check.startswith(name) for check in failed(result))
            text = " ".join(figure for _, figure in checks.training_checks(result).values())
            assert "transformers is not here" in text or "rc -11" in text or "rc not run" in text


@pytest.mark.parametrize(
    "wrong",
    [
        {"pairs": 99}, {"samples": 100}, {"samples": 0}, {"watched_s": 0.0},
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


def test_segments_have_a_budget_when_watched_and_none_otherwise() -> None:
    """On a simulated GPU, with steps that only wait: 12 blocks."""
    seen: list[bool] = []

    def step() -> None:
        time.sleep(0.002)

    segments = benchmark.Segments(step, lambda: seen.append(benchmark.active()), simulate="h200")
    found = benchmark.measure(segments, 12, 0.06)
    assert found["pairs"] == 12 and 1 <= found["steps"] <= 30 and found["step_ms"] >= 2
    assert found["active"] == {"watched": [True], "without": [False], "again": [False]}
    assert seen.count(True) * 2 == len(seen) - seen.count(True) - 6, (
        "a third of the segments, and none while calibrating"
    )
    assert found["watched_s"] > 0.15 and 2 <= found["samples"] / found["watched_s"] <= 20, "of 10 a second"
    assert all(len(found["seconds"][name]) == 12 for name in NAMES)
    assert 0.5 < found["beyond"]["low"] <= found["beyond"]["median"] <= found["beyond"]["high"] < 2
    with pytest.raises(memguard.NotActive):
        memguard.ledger()


def test_the_order_of_the_three_changes() -> None:
    orders = set()
    for number in range(100):
        segments = benchmark.Segments(lambda: None, lambda: None)
        order: list[str] = []
        segments.segment = lambda name, warm, order=order: order.append(name) or 1.0
        segments.block(number)
        orders.add(tuple(order))
    assert len(orders) == 6


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

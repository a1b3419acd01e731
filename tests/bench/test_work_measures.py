"""The measurements of training, moves, leases and suggested budgets: arithmetic, and what they refuse to compare."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.measure import Failed
from bench.measures import suggest, training
from bench.measures._patterned import percentile, windows

pytestmark = pytest.mark.long  # no version of what is installed changes what these do


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentile([float(n) for n in range(100, 0, -1)], 0.99) == 99
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2


@pytest.mark.parametrize("size", [8, 1024, 8 << 20])
def test_read_back_places_lie_within_the_array(size: int) -> None:
    places = windows(size, seed=3, step=8)
    assert places[0][0] == 0
    assert places[1][0] + places[1][1] == size
    assert all(start % 8 == 0 and start >= 0 and start + length <= size for start, length in places)


def test_a_watched_segment_ends_one_block_and_begins_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMGUARD_SIMULATE", "h200")
    monkeypatch.setattr(training, "SEGMENT", 0.001)
    found = training.compared(lambda: None, lambda: None, 4)
    assert found["active"] == {"watched": [True], "without": [False], "again": [False]}
    assert len(found["ratio"]) == len(found["again"]) == 4
    order: list[str] = []
    segments = training.Segments(lambda: None, lambda: None)
    monkeypatch.setattr(segments, "segment", lambda name, warm: order.append(name))
    for number in range(4):
        segments.block(number)
    assert [at for at, name in enumerate(order) if name == "watched"] == [2, 3, 8, 9]


@pytest.mark.parametrize(
    "wrong", [{"active": {"watched": [False], "without": [False], "again": [False]}}, {"samples": 3}, {"empty": 9}]
)
def test_steps_without_a_monitor_are_not_compared(wrong: dict[str, Any]) -> None:
    good = {
        "active": {"watched": [True], "without": [False], "again": [False]},
        "samples": 10, "watched_s": 1.0, "empty": 0, "ratio": [1.0] * 10,
    }  # fmt: skip
    training.held("gpt2", good, quick=False)
    with pytest.raises(Failed, match="gpt2"):
        training.held("gpt2", {**good, **wrong}, quick=False)


def test_a_negative_headroom_cuts_each_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        "yaml": "device:\n  limit: 1500MiB\nframeworks:\n  torch: {limit: 1000MiB}\n",
        "limit": 1500 << 20, "reserve": {"bytes": 500 << 20},
        "frameworks": [{"framework": "torch", "limit": 1000 << 20}],
    }  # fmt: skip
    monkeypatch.setattr(suggest, "suggested", lambda folder, *words: told)
    text, limit = suggest.offered(Path(), -10)
    assert limit == 1400 << 20
    assert "limit: 1400MiB" in text
    assert "torch: {limit: 900MiB}" in text
    assert suggest.offered(Path(), 5) == (told["yaml"], told["limit"])

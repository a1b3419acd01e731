"""The measurements of training, moves, leases and suggested budgets: arithmetic, and what they refuse to compare."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.measures import suggest, training

pytestmark = pytest.mark.long  # no version of what is installed changes what these do


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

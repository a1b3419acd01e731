"""The measurement of training: the order of its blocks."""

from __future__ import annotations

import pytest

from bench.measures import training

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

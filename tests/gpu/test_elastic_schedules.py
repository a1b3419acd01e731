"""Elastic caps on a real GPU: bursts, and seeded schedules judged by an oracle independent of memguard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]
SEEDS, FEW = range(1, 21), (4, 11)
"""The schedules, and those that run without `--thorough`: they spend the least time on TensorFlow's and JAX's
errors."""
CONTROLS = (1, 2)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    thorough = metafunc.config.getoption("--thorough", default=False)
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", SEEDS if thorough else FEW)
    if "control" in metafunc.fixturenames:
        metafunc.parametrize("control", CONTROLS if thorough else CONTROLS[:1])


def played(run: Run, seed: int, lends: bool) -> dict[str, Any]:
    return run(f"from support import elastic_play\nresult.update(elastic_play.played({seed}, {lends}))", timeout=240)


def test_no_refusal_of_a_schedule_was_avoidable(run: Run, seed: int) -> None:
    """At each step every min is available, NVML's figure stays within the limit, and every value is right."""
    found = played(run, seed, True)
    assert found["faults"] == [] and found["requests"] >= 40, found
    assert found["avoidable"] == found["above_limit"] == found["minima"] == found["wrong"] == 0
    assert 0 < found["most_process"] <= found["limit"]
    assert found["refused"] == found["infeasible"] + found["blocked"] and (found["refused"] > 0 or seed not in FEW)


def test_with_fixed_shares_refusals_of_the_same_schedule_are_avoidable(run: Run, control: int) -> None:
    assert played(run, control, False)["avoidable"] > 0


def test_a_burst_gets_its_min_at_once_and_its_max_from_an_idle_sibling(run: Run, thorough: bool) -> None:
    times = 200 if thorough else 15
    found = run(f"from support.elastic_bursts import burst\nresult.update(burst(True, {times}))", timeout=240)
    assert found["min"] == [0] * times, f"at the first try, PyTorch's bytes live: {found['text']}"
    assert min(found["live"]) >= 0.9 * found["all"]
    assert len(found["max"]) == times and None not in found["max"], found["text"]
    assert found["wrong"] == 0 and 0 < found["most"] <= found["limit"]


def test_with_fixed_caps_a_burst_never_gets_the_max(run: Run) -> None:
    found = run("from support.elastic_bursts import burst\nresult.update(burst(False, 10))", timeout=120)
    assert found["min"] == [0] * 10 and found["max"] == [None] * 10

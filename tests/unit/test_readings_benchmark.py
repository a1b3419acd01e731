"""The bars of `benchmarks/readings.py`: what was not measured has failed, and each bar notices what breaks it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import _listed
import checks
import readings
import table

pytestmark = pytest.mark.long  # no version of what is installed changes what the benchmarks' own code does


def figure(median: float, n: int = 2000) -> dict[str, float]:
    return {"median": median, "low": median - 1, "high": median + 1, "p10": median - 2, "p90": median * 1.4, "n": n}


def reading(above: float) -> dict[str, Any]:
    return {"us": figure(90 + above), "bare_us": figure(90), "above_us": figure(above), "control_us": figure(0)}


TICK = {
    "cpu_us": figure(100, 390), "wall_us": figure(130, 390), "idle": {"cpu_us": figure(90, 90)},
    "back_to_back_us": figure(60), "events": {"pressure": 8, "trim": 2}, "samples_written": 1500,
}  # fmt: skip
GOOD: dict[str, Any] = {
    "readings": {
        "readings": {"ledger": reading(30), "sample": reading(10), "require": reading(8), "workload": reading(12)},
        "fresh": {"arrays": 300, "missed": {"torch": 0, "cupy": 0}},
    },
    "ticking": {"at_work": TICK},
}


def failed(scenarios: dict[str, Any]) -> list[str]:
    return [name.partition(":")[0] for name, (passed, _) in readings.readings_checks(scenarios).items() if not passed]


def test_what_is_good_passes_and_what_was_not_measured_has_failed() -> None:
    bars = readings.readings_checks(GOOD)
    assert len(bars) == 8 and all(passed for passed, _ in bars.values())
    assert list(bars) == _listed.names(_listed.READINGS)
    for nothing, said in (({}, "not started"), ({"readings": {"returncode": 1}, "ticking": {"returncode": 1}}, "rc 1")):
        found = readings.readings_checks(nothing)
        assert found.keys() == bars.keys()
        assert all(not passed and said in figure for passed, figure in found.values())


@pytest.mark.parametrize("scenario", GOOD)
def test_a_scenario_that_died_after_its_result_fails_its_bars_and_no_others(scenario: str) -> None:
    scenarios = copy.deepcopy(GOOD)
    scenarios[scenario] |= {"returncode": -6, "stderr_tail": "PyCUDA ERROR: The context stack was not empty"}
    found = {name: figure for name, (passed, figure) in readings.readings_checks(scenarios).items() if not passed}
    assert list(found) == list(_listed.READINGS[scenario])
    assert all("rc -6" in figure and "context stack" in figure for figure in found.values())


@pytest.mark.parametrize("name", readings.BARS)
@pytest.mark.parametrize("broken", ["too much", "not sure", "too few"])
def test_a_reading_that_is_slow_or_hardly_measured_fails(name: str, broken: str) -> None:
    scenarios = copy.deepcopy(GOOD)
    above = scenarios["readings"]["readings"][name]["above_us"]
    above.update({"too much": figure(readings.BARS[name] + 1), "not sure": {"high": 99}, "too few": {"n": 999}}[broken])
    assert failed(scenarios) == [name]


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (lambda s: s["readings"]["fresh"]["missed"].update(torch=1), "the next reading shows every array"),
        (lambda s: s["readings"]["fresh"].update(arrays=5), "the next reading shows every array"),
        (lambda s: s["ticking"]["at_work"]["cpu_us"].update(median=121), "tick at work"),
        (lambda s: s["ticking"]["at_work"]["cpu_us"].update(p90=181), "tick at work"),
        (lambda s: s["ticking"]["at_work"].update(events={}), "tick at work"),
        (lambda s: s["ticking"]["at_work"].update(samples_written=0), "tick at work"),
    ],
)
def test_each_other_bar_notices(spoil: Callable[[dict[str, Any]], None], name: str) -> None:
    scenarios = copy.deepcopy(GOOD)
    spoil(scenarios)
    assert failed(scenarios) == [name]


def test_watching_has_the_tick_at_work_and_an_idle_one_is_none() -> None:
    every = checks.watch_checks({"tick": {"at_work": TICK, "returncode": 0}})
    bars = {name: bar for name, bar in every.items() if name.startswith("tick")}
    assert len(bars) == 3 and all(passed for passed, _ in bars.values())
    every = checks.watch_checks({"tick": {"tick_us": figure(93), "probes_us": {"torch": 15.2}, "returncode": 0}})
    idle = {name: bar for name, bar in every.items() if name.startswith("tick")}
    assert idle.keys() == bars.keys() and not any(passed for passed, _ in idle.values())
    assert table.a_tick({"at_work": TICK}).startswith("100 µs of CPU (90 %: 140); 130 (182)")
    assert table.a_tick({"tick_us": figure(93)}).startswith("not measured")

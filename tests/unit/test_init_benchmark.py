"""benchmarks/init.py: its programs run, nvmlInit is taken off, and each check can fail."""

from __future__ import annotations

import copy
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long  # no version of what is installed changes what the benchmarks' own code does

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
init: Any = importlib.import_module("init")

ONE = {"seconds": 0.045, "cpu": 0.040, "nvml_init": 0.020, "again": 0.004, "caps": {"torch": "pending"}, "modules": 70}
FRESH = {**ONE, "seconds": 0.170}
THEIRS = {"seconds": 0.100, "cpu": 0.100, "nvml_init": 0.0}
ROUNDS = 21


def runs(**changes: dict[str, float]) -> dict[str, list[dict[str, Any]]]:
    """What a quiet machine would say, with these fields of some ways changed in every round."""
    said = {way: FRESH if way == "fresh" else THEIRS if way.startswith("their") else ONE for way in init.WAYS}
    return {way: [{**one, **changes.get(way, {})} for _ in range(ROUNDS)] for way, one in said.items()}


def judged(kept: dict[str, list[dict[str, Any]]]) -> list[bool]:
    result = {"about": {"gpus_are": "a stub of NVML's"}, **init.summary(kept)}
    return [passed for passed, _ in init.init_checks(result).values()]


def test_nvml_init_is_taken_off_and_the_imports_of_others_are() -> None:
    found = init.summary(runs())
    assert found["ways"]["init"]["without_nvml_init"]["median_ms"] == pytest.approx(25)
    assert found["ways"]["init"]["nvml_init"]["median_ms"] == pytest.approx(20)
    assert found["difference"]["fresh"]["median_ms"] == pytest.approx(50)
    assert judged(runs()) == [True] * 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"init": {"seconds": 0.0701}}, [False, True, True]),
        ({"init": {"seconds": 0.0699}}, [True] * 3),
        ({"init": {"seconds": 0.045, "nvml_init": -0.006}}, [False, True, True]),
        ({"fresh": {"seconds": 0.1801}}, [True, True, False]),
        ({"fresh": {"seconds": 0.1799}}, [True] * 3),
        ({"their imports": {"seconds": 0.0899}}, [True, True, False]),
        ({"imported": {"seconds": 0.0701}}, [True, False, True]),
    ],
)
def test_each_check_fails_beyond_its_bar(changes: dict[str, dict[str, float]], expected: list[bool]) -> None:
    assert judged(runs(**changes)) == expected


def test_two_slow_rounds_of_twenty_one_fail_the_check_of_95_percent() -> None:
    kept = runs()
    kept["init"][3]["seconds"] = 0.2
    assert judged(kept) == [True] * 3
    kept["init"][9]["seconds"] = 0.2
    assert judged(kept) == [False, True, True]
    few = {way: of[:5] for way, of in runs().items()}
    few["imported"][2]["seconds"] = 0.2
    assert judged(few) == [True, False, True], "of five rounds every one counts"


@pytest.mark.parametrize(
    ("left_out", "expected"),
    [
        ("init", [False, True, True]), ("init again", [False, True, True]), ("fresh", [True, True, False]),
        ("their imports", [True, True, False]), ("their imports again", [True, True, False]),
        ("imported", [True, False, True]),
    ],
)  # fmt: skip
def test_a_check_whose_way_did_not_run_has_failed(left_out: str, expected: list[bool]) -> None:
    kept = copy.deepcopy(runs())
    kept[left_out] = []
    assert judged(kept) == expected


def test_ways_alternate_and_the_first_round_is_left_out() -> None:
    asked: list[str] = []

    def run(way: str) -> dict[str, Any]:
        asked.append(way)
        return {"number": len(asked)}

    kept = init.measured(run, {"a": 6, "b": 6, "c": 2, "d": 0})
    assert [len(kept[way]) for way in "abcd"] == [6, 6, 2, 0]
    assert len(asked) == 2 * 7 + 3 and "d" not in asked
    assert sorted(asked[:3]) == ["a", "b", "c"] and min(one["number"] for one in kept["a"]) > 3
    assert len({tuple(asked[at : at + 2]) for at in range(9, len(asked), 2)}) == 2, "the order changes"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return init.Place(tmp_path_factory.mktemp("place"))


@pytest.mark.parametrize("way", ["init", "fresh", "simulated", "from source"])
def test_the_programs_run_with_and_without_a_gpu(place: Any, way: str) -> None:
    assert place.gpus_are in ("NVML's", "a stub of NVML's"), "without gcc it cannot be built"
    found = place.run(way)
    assert set(found["caps"]) == set(init.SIX)
    assert set(found["caps"].values()) <= {"pending", "absent", "enforced"}
    assert 0 < found["again"] < found["seconds"] and found["cpu"] > 0 and found["modules"] > 50
    assert (found["nvml_init"] > 0) == (way != "simulated") and found["nvml_init"] < found["seconds"]


def test_packages_that_lie_beside_are_found_but_no_other_memguard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "lies_beside.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(init.package().parent), "", str(beside)]))
    monkeypatch.setitem(init.WAYS, "init", f"import lies_beside, memguard\n{init.ALONE}")
    place = init.Place(tmp_path)
    assert place.others == [str(beside)]
    assert set(place.run("init")["caps"]) == set(init.SIX)


def test_the_control_imports_what_init_needs_of_others(place: Any) -> None:
    """Not less, or the difference would blame memguard for it, and nothing of memguard."""
    assert "memguard" not in init.THEIRS and place.run("their imports")["nvml_init"] == 0


def test_a_program_that_fails_says_why(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(init.WAYS, "init", "raise SystemExit('no budget')")
    with pytest.raises(RuntimeError, match="init: exit code 1: no budget"):
        place.run("init")

"""The comparison of `benchmarks/their_tests.py` without a GPU: outcomes read, compared and explained."""

from __future__ import annotations

import importlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.long  # no version of what is installed changes what the benchmarks' own code does

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
_their, benchmark, checks, table = (
    importlib.import_module(name) for name in ("_their_tests", "their_tests", "checks", "table")
)
Outcome = _their.Outcome
GIB = 1 << 30


def lines(*reports: tuple[str, str, str], crash: str | None = None) -> list[str]:
    found: list[dict[str, Any]] = []
    for test in dict.fromkeys(test for test, _, _ in reports):
        own = [{"id": test, "when": when, "outcome": outcome} for one, when, outcome in reports if one == test]
        found += [{"start": test}, *own, {"finish": test}]
    if crash is not None:
        found.append({"start": crash})
    return [json.dumps(line) for line in found]


@pytest.mark.parametrize(
    ("reports", "outcome"),
    [
        ([("setup", "passed"), ("call", "passed"), ("teardown", "passed")], "passed"),
        ([("setup", "passed"), ("call", "failed"), ("teardown", "passed")], "failed"),
        ([("setup", "skipped"), ("teardown", "passed")], "skipped"),
        ([("setup", "error"), ("teardown", "passed")], "error"),
        ([("setup", "passed"), ("call", "passed"), ("teardown", "error")], "error"),
        ([("setup", "passed"), ("call", "failed"), ("teardown", "error")], "error"),
        ([("setup", "passed"), ("call", "xfailed"), ("teardown", "passed")], "xfailed"),
        ([("setup", "passed"), ("call", "xpassed"), ("teardown", "passed")], "xpassed"),
    ],
)
def test_one_outcome_of_setup_call_and_teardown(reports: list[tuple[str, str]], outcome: str) -> None:
    found = _their.read(lines(*(("a.py::t", when, one) for when, one in reports)))
    assert found.outcomes["a.py::t"].outcome == outcome and found.crashed is None


def test_a_test_that_never_finished_has_crashed() -> None:
    text = [*lines(("a.py::t", "call", "passed"), crash="a.py::u"), '{"id": "a.py::u", "wh']
    found = _their.read(text)
    assert found.crashed == "a.py::u" and {name: one.outcome for name, one in found.outcomes.items()} == {
        "a.py::t": "passed", "a.py::u": "crashed",
    }  # fmt: skip


def test_parts_are_about_as_long_as_each_other_and_the_longest_comes_first() -> None:
    tests = ["a.py::1", "a.py::2", "a.py::3", "b.py::1", "a.py::4"]
    one = {"a.py": 1.0, "b.py": 1.0}
    found = _their.parts(tests, lambda test: one[_their.file_of(test)], 2)
    assert found == [["a.py::1", "a.py::2"], ["a.py::3", "a.py::4"], ["b.py::1"]]
    assert _their.parts(tests, lambda test: 1.0, 100) == [[*tests[:3], "a.py::4", "b.py::1"]]  # a file's order holds
    assert len(_their.parts(tests, lambda test: 0.0, 1)) == 1 and _their.parts([], lambda test: 1.0, 1) == []


def test_parts_of_1935_tests_lose_none_and_keep_files_apart_where_they_must_be() -> None:
    tests = [f"{'drv' if file < 34 else 'py'}/f{file}.py::t{test}" for file in range(137) for test in range(file % 28)]
    seconds = {_their.file_of(test): (int(_their.file_of(test)[-4]) + 1) / 4 for test in tests}

    def takes(part: list[str]) -> float:
        return sum(seconds[_their.file_of(test)] for test in part)

    found = _their.parts(tests, lambda test: seconds[_their.file_of(test)], 20, ["drv"])
    assert sorted(test for part in found for test in part) == sorted(tests) and len(tests) > 1800
    assert found == _their.parts(tests, lambda test: seconds[_their.file_of(test)], 20, ["drv"])
    drivers = [part for part in found if part[0].startswith("drv")]
    assert found[: len(drivers)] == drivers and all(len({_their.file_of(t) for t in part}) == 1 for part in drivers)
    rest = [takes(part) for part in found[len(drivers) :]]
    assert rest == sorted(rest, reverse=True) and max(rest) <= 20 + 2.5  # a test is not cut
    assert sum(takes_ < 10 for takes_ in rest) <= 1
    for part in found:  # the tests of a file stand in their order
        for name in {_their.file_of(test) for test in part}:
            assert [t for t in part if _their.file_of(t) == name] == [
                t for t in tests if t in set(part) and _their.file_of(t) == name
            ]


def test_how_long_the_tests_of_a_file_took() -> None:
    plain = {"a.py::1": Outcome("passed", seconds=1.0), "a.py::2": Outcome("passed", seconds=2.0)}
    plain["b.py::1"] = Outcome("passed")  # not run now
    under = {**plain, "a.py::2": Outcome("passed", seconds=4.0)}
    assert _their.times(plain, under, {"b.py": [3, 1.0, 2.0]}) == {"a.py": [2, 3.0, 5.0], "b.py": [3, 1.0, 2.0]}
    both = _their.read(['{"id": "a", "outcome": "passed", "seconds": 1.5}'] * 2)
    assert both.outcomes["a"].seconds == 3.0


def test_only_what_ran_both_ways_can_differ() -> None:
    plain = {"a": Outcome("passed"), "b": Outcome("passed"), "c": Outcome("failed"), "d": Outcome("passed")}
    under = {"a": Outcome("passed"), "b": Outcome("failed"), "c": Outcome("error")}
    assert _their.differing(plain, under) == ["b", "c"]
    found = _their.summary([*plain, "e"], plain, under)
    assert (found["collected"], found["run"], found["not_run"]) == (5, 3, ["d", "e"])
    assert found["passed"] == ["a"] and found["others"] == {"b": ["passed", "failed"], "c": ["failed", "error"]}


def refused(size: int | None) -> Any:
    return Outcome("failed", "MemoryError: out of memory", {"requested": size, "reason": "cap"})


def said(asked: str, takes: str | None, held: str, cap: str = "4.00 GiB") -> Any:
    """A test that memguard's own refusal ended."""
    more = f" (takes {takes})" if takes else ""
    text = f"out of memory: asked for {asked}{more}, holds {held} of the {cap} that the memguard budget gives pycuda"
    return Outcome("failed", f"pycuda._driver.MemoryError: {text}")


MORE, FLAKY = _their.WANTS_MORE, _their.FLAKY


PASSED, FAILED = Outcome("passed"), Outcome("failed", "AttributeError: no such thing")


@pytest.mark.parametrize(
    ("plain", "under", "reason"),
    [
        ([PASSED], [refused(5 * GIB)], MORE),
        ([PASSED] * 4, [refused(5 * GIB)] * 4, MORE),
        ([PASSED] * 4, [said("1.00 GiB", "1.06 GiB", "3.19 GiB")] * 4, MORE),
        ([PASSED] * 4, [said("4.00 GiB", "4.25 GiB", "0 B")] * 4, MORE),
        ([PASSED] * 4, [said("512.0 MiB", None, "3.75 GiB")] * 4, MORE),
        ([PASSED] * 4, [said("1.00 GiB", "1.06 GiB", "2.00 GiB")] * 4, None),  # refused without a cause
        ([PASSED] * 4, [said("1.00 GiB", None, "3.00 GiB")] * 4, None),
        ([PASSED] * 4, [said("1.00 GiB", "1.06 GiB", "1.50 GiB", "2.00 GiB")] * 4, None),  # not the budget's cap
        ([PASSED] * 4, [said("1.00 GiB", "1.06 GiB", "3.19 GiB"), PASSED, PASSED, PASSED], None),
        ([PASSED] * 4, [replace(said("1.00 GiB", "1.06 GiB", "3.19 GiB"), outcome="crashed")] * 4, None),
        ([PASSED] * 4, [refused(4 * GIB)] * 4, None),  # the cap itself fits
        ([PASSED] * 4, [refused(3 * GIB)] * 4, None),
        ([PASSED] * 4, [refused(None)] * 4, None),
        ([PASSED] * 4, [refused(5 * GIB), refused(5 * GIB), FAILED, refused(5 * GIB)], None),
        ([PASSED] * 4, [FAILED, PASSED, PASSED, PASSED], None),  # now and then, and only under memguard
        ([PASSED] * 4, [FAILED] * 4, None),
        ([PASSED] * 4, [Outcome("crashed")] * 4, None),
        ([PASSED] * 4, [Outcome("skipped")] * 4, None),
        ([FAILED] * 4, [PASSED] * 4, None),  # memguard must not mend it either, in silence
        ([PASSED, FAILED, PASSED, PASSED], [FAILED] * 4, FLAKY),
        ([FAILED, PASSED, PASSED, PASSED], [PASSED] * 4, FLAKY),
        ([PASSED], [], None),
    ],
)
def test_reasons_are_derived_from_what_was_seen(plain: list[Any], under: list[Any], reason: str | None) -> None:
    found, evidence = _their.reason(4 * GIB, plain, under)
    assert found == reason and evidence
    if reason == MORE:
        assert ("4.00 GiB" if "takes" in evidence else "5,368,709,120") in evidence


def suite(**more: Any) -> dict[str, Any]:
    tests = {"a": Outcome("passed"), "b": Outcome("skipped")}
    made = _their.summary(list(tests), tests, tests)
    return {**made, "differences": [], "not_collected": {}, "inactive": [], **more}


def difference(reason: str | None) -> dict[str, Any]:
    return {"test": "a", "plain": ["passed"], "under": ["failed"], "reason": reason, "evidence": "e"}


def test_the_bars() -> None:
    both = {"simulated": None, "suites": {"pycuda": suite(), "numba": suite(differences=[difference("cap")])}}
    found = checks.their_tests_checks(both)
    assert len(found) == 6 and all(passed for passed, _ in found.values())
    for changed, missed in (
        ({"differences": [difference(None)]}, "pycuda: no difference without a reason"),
        ({"not_run": ["c"]}, "pycuda: every test of its own run both ways"),
        ({"not_collected": {"x.py": "no module"}}, "pycuda: every test of its own run both ways"),
        ({"inactive": ["a"]}, "pycuda: under memguard a budget is active"),
    ):
        worse = {**both, "suites": {**both["suites"], "pycuda": suite(**changed)}}
        assert [name for name, (passed, _) in checks.their_tests_checks(worse).items() if not passed] == [missed]
    simulated = checks.their_tests_checks({**both, "simulated": "h200"})
    assert not simulated["numba: every test of its own run both ways"][0]
    nothing = checks.their_tests_checks({"simulated": None, "suites": {}})
    assert len(nothing) == 6 and not any(passed for passed, _ in nothing.values())


SUITE = """
import os, unittest, pytest

def test_passes(): pass

@pytest.mark.skip
def test_skipped(): pass

@pytest.mark.xfail
def test_expected(): assert False

@pytest.mark.usefixtures("initialize_from_pytest_config")
class TestTheirs(unittest.TestCase):
    def test_has_its_option(self): assert self._dump_failed_filechecks is False

def test_differs():
    import memguard
    with pytest.raises(memguard.NotActive):
        memguard.ledger()

def test_crashes(): os.abort()

def test_after_the_crash(): pass
"""


def test_a_real_suite_survives_a_crash_and_differences_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "AGAIN", 1)
    tests = tmp_path / "theirs"
    tests.mkdir()
    (tests / "test_theirs.py").write_text(SUITE)
    where = tmp_path / "runs"
    where.mkdir()
    runner = benchmark.Runner(where, time.monotonic() + 100, 60, "h200")
    with ThreadPoolExecutor(2) as pool:
        found = benchmark.run_suite(benchmark.Suite("torch", tests, ["test_theirs.py"]), runner, pool, {})
    assert found["collected"] == found["run"] == 7 and not found["not_run"] and not found["not_collected"]
    assert found["plain"] == {"passed": 4, "skipped": 1, "xfailed": 1, "crashed": 1}
    assert found["others"]["test_theirs.py::test_crashes"] == ["crashed", "crashed"]
    assert "test_theirs.py::test_after_the_crash" in found["passed"]
    (one,) = found["differences"]
    assert one["test"] == "test_theirs.py::test_differs" and one["reason"] is None
    assert one["plain"] == ["passed"] * 2 and one["under"] == ["failed"] * 2


def test_a_test_that_hangs_is_named_and_one_that_the_time_limit_ends_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text("import time\ndef test_one(): pass\ndef test_sleeps(): time.sleep(90)\n")
    both = ["test_theirs.py::test_one", "test_theirs.py::test_sleeps"]
    theirs = benchmark.Suite("torch", tmp_path, ["test_theirs.py"])
    hanging = benchmark.Runner(tmp_path, time.monotonic() + 100, 10, "h200")
    late = benchmark.Runner(tmp_path, time.monotonic(), 60, "h200")
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(runner.pytest, theirs, both, False) for runner in (hanging, late))
        hung, cut = first.result().outcomes, second.result().outcomes
    assert {test: one.outcome for test, one in hung.items()} == {both[0]: "passed", both[1]: "hung"}
    assert not hanging.inactive and not late.inactive
    assert both[1] not in cut  # nobody knows how it would have ended


def test_what_ran_before_is_not_run_again(tmp_path: Path) -> None:
    tests = tmp_path / "theirs"
    tests.mkdir()
    (tests / "test_theirs.py").write_text("def test_one(): 1 / 0\ndef test_two(): 1 / 0\ndef test_open(): pass\n")
    where = tmp_path / "runs"
    where.mkdir()
    runner = benchmark.Runner(where, time.monotonic() + 100, 60, "h200")
    before: dict[str, Any] = {
        "passed": ["test_theirs.py::test_one"],
        "others": {
            "test_theirs.py::test_two": ["skipped", "passed"],
            "test_theirs.py::test_open": ["passed", "failed"],
        },
        "differences": [difference("flaky"), {**difference(None), "test": "test_theirs.py::test_open"}],
        "files": {"test_theirs.py": [3, 3.0, 3.0]},
    }
    with ThreadPoolExecutor(1) as pool:
        found = benchmark.run_suite(benchmark.Suite("torch", tests, ["test_theirs.py"]), runner, pool, before)
    assert found["run"] == 3 and found["differences"] == [difference("flaky")]
    # A difference without a reason is tried again: what it showed may be mended.
    assert found["passed"] == ["test_theirs.py::test_one", "test_theirs.py::test_open"]
    assert found["others"] == {"test_theirs.py::test_two": ["skipped", "passed"]}
    assert found["files"]["test_theirs.py"][0] == 4


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    result: dict[str, Any] = {
        "simulated": None,
        "suites": {"pycuda": suite(), "numba": suite(differences=[difference("cap")])},
    }
    result["about"] = {"command": "c", "date": "2026-11-22", "memguard_hash": "0", "versions": {"pycuda": "2026.1"}}
    result["checks"] = checks.their_tests_checks(result)
    monkeypatch.setattr(table, "load", lambda name: result)
    monkeypatch.setattr(table, "measured", lambda name: True)
    text = "\n".join(table.their_tests())
    assert "| PyCUDA 2026.1 | 2 | 1 |" in text and "`a`: cap" in text

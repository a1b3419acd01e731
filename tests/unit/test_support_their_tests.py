"""Suites of others without a GPU: outcomes read, compared and explained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import suites, their_tests
from support.their_tests import Outcome

pytestmark = pytest.mark.long  # no version of what is installed changes what this code does

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
    found = their_tests.read(lines(*(("a.py::t", when, one) for when, one in reports)))
    assert found.outcomes["a.py::t"].outcome == outcome and found.crashed is None


def test_a_test_that_never_finished_has_crashed() -> None:
    text = [*lines(("a.py::t", "call", "passed"), crash="a.py::u"), '{"id": "a.py::u", "wh']
    found = their_tests.read(text)
    assert found.crashed == "a.py::u" and {name: one.outcome for name, one in found.outcomes.items()} == {
        "a.py::t": "passed", "a.py::u": "crashed",
    }  # fmt: skip


def test_parts_are_about_as_long_as_each_other_and_the_longest_comes_first() -> None:
    tests = ["a.py::1", "a.py::2", "a.py::3", "b.py::1", "a.py::4"]
    one = {"a.py": 1.0, "b.py": 1.0}
    found = their_tests.parts(tests, lambda test: one[their_tests.file_of(test)], 2)
    assert found == [["a.py::1", "a.py::2"], ["a.py::3", "a.py::4"], ["b.py::1"]]
    assert their_tests.parts(tests, lambda test: 1.0, 100) == [
        [*tests[:3], "a.py::4", "b.py::1"]
    ]  # a file's order holds
    assert len(their_tests.parts(tests, lambda test: 0.0, 1)) == 1 and their_tests.parts([], lambda test: 1.0, 1) == []


def test_parts_of_1935_tests_lose_none_and_keep_files_apart_where_they_must_be() -> None:
    tests = [f"{'drv' if file < 34 else 'py'}/f{file}.py::t{test}" for file in range(137) for test in range(file % 28)]
    seconds = {their_tests.file_of(test): (int(their_tests.file_of(test)[-4]) + 1) / 4 for test in tests}

    def takes(part: list[str]) -> float:
        return sum(seconds[their_tests.file_of(test)] for test in part)

    found = their_tests.parts(tests, lambda test: seconds[their_tests.file_of(test)], 20, ["drv"])
    assert sorted(test for part in found for test in part) == sorted(tests) and len(tests) > 1800
    assert found == their_tests.parts(tests, lambda test: seconds[their_tests.file_of(test)], 20, ["drv"])
    drivers = [part for part in found if part[0].startswith("drv")]
    assert found[: len(drivers)] == drivers and all(
        len({their_tests.file_of(t) for t in part}) == 1 for part in drivers
    )
    rest = [takes(part) for part in found[len(drivers) :]]
    assert rest == sorted(rest, reverse=True) and max(rest) <= 20 + 2.5  # a test is not cut
    assert sum(takes_ < 10 for takes_ in rest) <= 1
    for part in found:  # the tests of a file stand in their order
        for name in {their_tests.file_of(test) for test in part}:
            assert [t for t in part if their_tests.file_of(t) == name] == [
                t for t in tests if t in set(part) and their_tests.file_of(t) == name
            ]


def test_only_tests_that_ran_both_times_can_differ() -> None:
    plain = {"a": Outcome("passed"), "b": Outcome("passed"), "c": Outcome("failed"), "d": Outcome("passed")}
    under = {"a": Outcome("passed"), "b": Outcome("failed"), "c": Outcome("error")}
    assert their_tests.differing(plain, under) == ["b", "c"]


def refused(size: int | None) -> Any:
    return Outcome("failed", "MemoryError: out of memory", {"requested": size, "reason": "cap"})


def said(asked: str, takes: str | None, held: str, cap: str = "4.00 GiB") -> Any:
    """A test that memguard's own refusal ended."""
    more = f" (takes {takes})" if takes else ""
    text = f"out of memory: asked for {asked}{more}, holds {held} of the {cap} that the memguard budget gives pycuda"
    return Outcome("failed", f"pycuda._driver.MemoryError: {text}")


MORE, FLAKY = their_tests.WANTS_MORE, their_tests.FLAKY


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
def test_reasons_are_derived_from_the_outcomes(plain: list[Any], under: list[Any], reason: str | None) -> None:
    found, evidence = their_tests.reason(4 * GIB, plain, under)
    assert found == reason and evidence
    if reason == MORE:
        assert ("4.00 GiB" if "takes" in evidence else "5,368,709,120") in evidence


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
    monkeypatch.setattr(suites, "AGAIN", 1)
    (theirs := tmp_path / "theirs").mkdir()
    (theirs / "test_theirs.py").write_text(SUITE)
    with pytest.raises(AssertionError, match="test_differs") as caught:
        suites.Suite("torch", theirs, tmp_path, "h200").ends_alike(["test_theirs.py"], 2)
    assert "passed" in str(caught.value) and "failed" in str(caught.value), "its runs without memguard and under it"
    (theirs / "test_theirs.py").write_text(SUITE.replace("def test_differs", "def differs"))
    found = suites.Suite("torch", theirs, tmp_path / "theirs", "h200").ends_alike(["test_theirs.py"], 2)
    assert found.pop("test_theirs.py::test_crashes") == ("crashed", "crashed")
    assert sorted(found.values()) == [("passed", "passed")] * 3 + [("skipped", "skipped"), ("xfailed", "xfailed")]


def test_a_test_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "SILENT", 8)
    (tmp_path / "test_theirs.py").write_text("import time\ndef test_one(): pass\ndef test_sleeps(): time.sleep(90)\n")
    both = ["test_theirs.py::test_one", "test_theirs.py::test_sleeps"]
    found = suites.Suite("torch", tmp_path, tmp_path).process(both, False)
    assert {test: one.outcome for test, one in found.outcomes.items()} == {both[0]: "passed", both[1]: "hung"}


def test_a_process_without_a_budget_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_theirs.py").write_text("import memguard\ndef test_ends_it(): memguard.shutdown()\n")
    with pytest.raises(AssertionError, match="test_ends_it"):
        suites.Suite("torch", tmp_path, tmp_path, "h200").ends_alike(["test_theirs.py"], 2)

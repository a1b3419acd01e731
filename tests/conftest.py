"""What every test directory shares: Hypothesis's profiles, who runs which test, fewer cases of some, `--no-skips`."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

GPU = Path(__file__).parent / "gpu"

# No deadline: a busy machine must not fail a property that holds. `scripts/test` picks "ci", "edges" and "fuzz".
settings.register_profile("memguard", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
memguard = settings.get_profile("memguard")
settings.register_profile("ci", memguard, derandomize=True, max_examples=60)
# The oldest and newest versions need to be seen to work, not to meet every example again: --all has done that.
settings.register_profile("edges", memguard, derandomize=True, max_examples=10)
settings.register_profile("fuzz", memguard, max_examples=500)
settings.load_profile("memguard")
EXAMPLES: dict[str, Callable[[int], int]] = {
    "ci": lambda own: min(own, 60),
    "edges": lambda own: min(own, 10),
    "fuzz": lambda own: own * 5,
}
"""What a profile makes of the number of examples that a test asks for itself, which would else hide the profile's."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test outside tests/gpu fails the run")


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    profile = config.getoption("--hypothesis-profile", default=None) or ""
    _draw_as_many_examples_as(profile, items)
    if profile == "edges":
        few = {id(item) for item in _few_cases(items)}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in few])
        items[:] = [item for item in items if id(item) in few]


def _draw_as_many_examples_as(profile: str, items: list[pytest.Item]) -> None:
    change = EXAMPLES.get(profile)
    tests = {id(test): test for item in items if is_hypothesis_test(test := getattr(item, "function", None))}
    for test in tests.values() if change else ():
        own = getattr(test, "_hypothesis_internal_use_settings", None)
        if own is not None and own.max_examples != settings().max_examples:
            test._hypothesis_internal_use_settings = settings(own, max_examples=change(own.max_examples))
    if profile == "edges":  # under the others a state machine has the number that it asks for
        for case in {item.cls for item in items if getattr(item, "cls", None) is not None}:
            if isinstance(own := getattr(case, "settings", None), settings):
                case.settings = settings(own, max_examples=EXAMPLES[profile](own.max_examples))


def _few_cases(items: Iterable[pytest.Item]) -> Iterable[pytest.Item]:
    """Of each test cases in which each row of each `parametrize` occurs, not all products; if marked `one_case`, one.

    pytest tells the rows apart by a name of its own. A pytest without it runs all products.
    """
    tests: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        if len(cases) == 1 or cases[0].get_closest_marker("one_case"):
            yield cases[0]
            continue
        seen: set[tuple[int, str]] = set()
        for needed in (set.isdisjoint, lambda rows, seen: not rows <= seen):  # first those of which all is new
            for case in cases:
                if needed(rows := {*enumerate(getattr(case.callspec, "_idlist", [case.callspec.id]))}, seen):
                    seen |= rows
                    yield case


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each test goes to the process that is free; a file of tests/native goes to one, which imports its framework once.

    Not by `xdist_group`: pytest-xdist 3.8 loses the marks under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFramework(LoadScopeScheduling):
        def _split_scope(self, nodeid: Any) -> str:
            return str(nodeid).partition("::")[0] if str(nodeid).startswith("tests/native/") else str(nodeid)

        def _reschedule(self, node: Any) -> None:
            """Forget what is done: after each test pytest-xdist counts all that the process ever got, 7,000 tests."""
            assigned = self.assigned_work[node]
            for scope in [scope for scope, tests in assigned.items() if all(tests.values())]:
                del assigned[scope]
            super()._reschedule(node)

    return ByFramework(config, log)


def pytest_collection_finish() -> None:
    """Freeze what the collection made: else each `gc.collect()` in a test walks through all 7,000 tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def only_own_objects_are_collected() -> None:
    """For tests that collect thousands of times: freeze also what earlier tests have left, as a framework's objects.

    It stays frozen: after `gc.unfreeze()` alone each later collection would walk through all tests again.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> object:
    report = yield
    _refuse_skip(report, item)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> object:
    report = yield
    _refuse_skip(report, collector)
    return report


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport, node: pytest.Item | pytest.Collector) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or not node.config.getoption("--no-skips"):
        return
    if GPU in node.path.parents or node.path == GPU:
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"skipped, which --no-skips forbids: {reason}"

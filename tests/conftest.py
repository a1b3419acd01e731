"""Shared by all tests: Hypothesis profiles, distribution over processes, reduced sets of cases, `--no-skips`.

Also a time limit for each test, and independence of the caller's environment: ignored signals, pytest settings.
"""

from __future__ import annotations

import gc
import math
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings
from time_limits import Keeper, limit, monotonic

GPU = Path(__file__).parent / "gpu"

# No deadline: a busy machine must not fail a correct property. `scripts/test` selects "ci", "edges" and "fuzz".
settings.register_profile("memguard", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
memguard = settings.get_profile("memguard")
settings.register_profile("ci", memguard, derandomize=True, max_examples=60)
# With the oldest and newest versions a few examples suffice: --all runs all of them.
settings.register_profile("edges", memguard, derandomize=True, max_examples=10)
settings.register_profile("fuzz", memguard, max_examples=500)
settings.load_profile("memguard")
EXAMPLES: dict[str, Callable[[int], int]] = {
    "ci": lambda own: min(own, 60),
    "edges": lambda own: min(own, 10),
    "fuzz": lambda own: own * 5,
}
"""By profile: converts a test's own number of examples, which would otherwise override the profile."""


def _as_from_a_terminal() -> None:
    """Restore signals that the parent ignores, such as a shell for its background jobs.

    Otherwise Python would raise no KeyboardInterrupt, here and in the tests' subprocesses. Under nohup this process
    still survives its terminal: its SIGHUP handler does nothing, while a subprocess starts with the default.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    for number in (signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


_as_from_a_terminal()
for _name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTHONSTARTUP"):  # for this run, not for pytest runs inside tests
    os.environ.pop(_name, None)
KEEPER = pytest.StashKey[Keeper]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "time_limit(seconds): limit for this test; defaults are in tests/time_limits.py")
    if not config.getoption("usepdb") and not config.getoption("trace"):
        config.stash[KEEPER] = Keeper()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if (keeper := item.config.stash.get(KEEPER, None)) is None:
        return (yield)
    times = 5.0 if item.config.getoption("--hypothesis-profile", default=None) == "fuzz" else 1.0
    with keeper.keeping(item.nodeid, limit(item.path, item.get_closest_marker("time_limit"), times)):
        return (yield)


@pytest.fixture
def pytester(pytester: pytest.Pytester) -> pytest.Pytester:
    """Adds a settings file to its folder: otherwise pytest would use one from a parent folder."""
    pytester.makeini("[pytest]\n")
    return pytester


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test outside tests/gpu fails the run")


@pytest.hookimpl(trylast=True)  # after the selection by -m and -k
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
    if profile == "edges":  # other profiles keep a state machine's own number
        for case in {item.cls for item in items if getattr(item, "cls", None) is not None}:
            if isinstance(own := getattr(case, "settings", None), settings):
                case.settings = settings(own, max_examples=EXAMPLES[profile](own.max_examples))


def _few_cases(items: Iterable[pytest.Item]) -> Iterable[pytest.Item]:
    """Select cases of each test that cover each row of each `parametrize`, not all products; one if `one_case`.

    A private attribute of pytest identifies the rows. Without this attribute all products run.
    """
    tests: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        if len(cases) == 1 or cases[0].get_closest_marker("one_case"):
            yield cases[0]
            continue
        seen: set[tuple[int, str]] = set()
        for needed in (set.isdisjoint, lambda rows, seen: not rows <= seen):  # prefer cases whose rows are all new
            for case in cases:
                if needed(rows := {*enumerate(getattr(case.callspec, "_idlist", [case.callspec.id]))}, seen):
                    seen |= rows
                    yield case


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Send each test to the next free process, and a file of tests/native to one, which imports its framework once.

    `xdist_group` is no alternative: pytest-xdist 3.8 loses the markers under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFramework(LoadScopeScheduling):
        def _split_scope(self, nodeid: Any) -> str:
            return str(nodeid).partition("::")[0] if str(nodeid).startswith("tests/native/") else str(nodeid)

        def _reschedule(self, node: Any) -> None:
            """Drop finished tests: after each test pytest-xdist iterates over all 7,000 that the process received."""
            assigned = self.assigned_work[node]
            for scope in [scope for scope, tests in assigned.items() if all(tests.values())]:
                del assigned[scope]
            super()._reschedule(node)

        def remove_node(self, node: Any) -> str | None:
            """Do not rerun a test that crashed a process: pytest-xdist 3.8 reruns it in process after process."""
            units = [unit for unit in self.assigned_work.pop(node).values() if not all(unit.values())]
            if not units:
                return None
            crashed = next(test for test, done in units[0].items() if not done)
            units[0][crashed] = True
            for unit in units:
                if not all(unit.values()):
                    self.workqueue[self._split_scope(next(iter(unit)))] = unit
            for other in self.assigned_work:
                self._reschedule(other)
            return str(crashed)

    return ByFramework(config, log)


def pytest_collection_finish() -> None:
    """Freeze the collected items: otherwise each `gc.collect()` in a test traverses all 7,000 tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def only_own_objects_are_collected() -> None:
    """For tests that collect thousands of times: also freeze objects of earlier tests, such as a framework's.

    They stay frozen: after `gc.unfreeze()` each later collection would traverse all tests again.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    _refuse_skip(report, item)
    keeper = item.config.stash.get(KEEPER, None)
    if keeper is not None and monotonic() > keeper.ends:
        keeper.ends = math.inf
        if report.passed:  # its processes were killed without its noticing
            report.outcome, report.longrepr = (
                "failed",
                "over its time limit: the processes that it had started were killed",
            )
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

"""The pytest plugin: `docs/testing.md`. Off with `-p no:memguard`.

- A test that fails with an out-of-memory error shows memguard's report.
- `@pytest.mark.memguard_budget(...)` and the fixture `memguard_budget` give a test a budget. Every budget that begins
  during a test ends with the test.
- `--memguard-leaks` fails a test after which more GPU memory is in use than before it.

pytest loads this plugin wherever memguard is installed. The plugin imports no framework, and imports the rest of
memguard only for a test with a budget or with that option.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from memguard._guard.guard import Guard
    from memguard._tools.testing.budgets import Before
    from memguard._tools.testing.leaks import Check, Watcher


class _Run:
    """One run of pytest in this process, and the state of its current test."""

    def __init__(self, leaks: bool, tolerance: int | None) -> None:
        self.leaks, self.tolerance = leaks, tolerance
        self.watcher: Watcher | None = None
        self.before: Before | None = None
        """The budget in effect before the test; None before memguard was loaded, and between tests."""
        self.within = False
        """Whether a test is running."""
        self.check: Check | None = None


_RUN = pytest.StashKey[_Run]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--memguard-leaks` and `--memguard-leaks-tolerance`."""
    group = parser.getgroup("memguard")
    group.addoption(
        "--memguard-leaks",
        action="store_true",
        help="fail a test that leaves more GPU memory in live arrays than it found; a grown cache is no leak",
    )
    group.addoption(
        "--memguard-leaks-tolerance",
        metavar="SIZE",
        help="what a test may leave (1MiB); @pytest.mark.memguard_leaks(tolerance=SIZE) is for one test",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers. Raises pytest.UsageError if the tolerance is not a size."""
    config.addinivalue_line(
        "markers",
        "memguard_budget(budget, *, simulate=None, missing_gpu='raise', replace=False, **keys): a GPU memory budget "
        "for this test, as a path, a dict or keywords; missing_gpu='skip' skips it without a GPU",
    )
    config.addinivalue_line(
        "markers",
        "memguard_leaks(tolerance='1MiB', check=True): fail this test if it leaves more GPU memory than it found; "
        "check=False exempts it from --memguard-leaks",
    )
    given = config.getoption("memguard_leaks_tolerance", None)
    tolerance = None
    if given is not None:
        from memguard._base.units import parse_size

        try:
            tolerance = parse_size(given)
        except ValueError as error:
            raise pytest.UsageError(f"--memguard-leaks-tolerance: {error}") from None
    config.stash[_RUN] = _Run(bool(config.getoption("memguard_leaks", False)), tolerance)


@pytest.fixture
def memguard_budget(request: pytest.FixtureRequest) -> Guard:
    """The guard of the test's budget, which its marker `memguard_budget` or its indirect parameter gives."""
    from memguard._tools.testing import budgets

    run = request.config.stash[_RUN]
    guard: Guard = budgets.begin(request)  # ended after the test
    if run.check is not None:
        run.check.begun()
    return guard


@pytest.hookimpl(tryfirst=True)  # no wrapper: its error must not skip other plugins' wrappers
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Record the active budget, take the first reading, and set up the budget before the test's other fixtures."""
    run = item.config.stash[_RUN]
    run.within, run.before = True, _active()
    if item.get_closest_marker("memguard_budget") is not None:
        _put_first(item, "memguard_budget")
    marker = item.get_closest_marker("memguard_leaks")
    if run.leaks or marker is not None:
        run.check = _check_of(run, marker)


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Generator[None, Any, None]:
    """Exclude from the test the budgets and memory that a fixture of a wider scope begins or holds."""
    if fixturedef.scope == "function":
        yield
        return
    run = request.config.stash[_RUN]
    check, before = run.check, _active()
    reading = check.wider_begins() if check is not None else None
    yield
    if check is not None:
        check.wider_ends(fixturedef, reading)
    now = _active()
    if now is not None and (before is None or now.active is not before.active):
        run.before = now


def pytest_fixture_post_finalizer(fixturedef: Any, request: Any) -> None:
    """Called when such a fixture is torn down, during the teardown of the last test that used it."""
    if fixturedef.scope != "function":
        check = request.config.stash[_RUN].check
        if check is not None:
            check.torn_down(fixturedef)


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, None]:
    """After the teardown of the test: check for leaks, then end the budget that began during the test."""
    outcome = yield
    run = item.config.stash[_RUN]
    check, run.check = run.check, None
    try:
        if check is not None and outcome.excinfo is None and (found := check.leaks(item)):
            from memguard._tools.testing import leaks

            pytest.fail(leaks.failure(found), pytrace=False)
    except BaseException as error:
        outcome.force_exception(error)
    try:
        _end(run)
    except BaseException as error:
        if outcome.excinfo is None:
            outcome.force_exception(error)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the budget of a test during which the run was interrupted. pytest has torn down the fixtures by now."""
    run = session.config.stash.get(_RUN, None)
    if run is not None:
        _end(run)


@pytest.hookimpl(hookwrapper=True)  # the newer `wrapper` needs pytest 8
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, None]:
    """Add the out-of-memory report to the test's report. Memory that an error's frames hold is no leak."""
    outcome = yield
    if call.excinfo is None:
        return
    item.config.stash[_RUN].check = None
    report = outcome.get_result()
    hooks = sys.modules.get("memguard._oom.hooks")  # only if a budget has loaded it
    if hooks is None or not report.failed:
        return
    found = hooks.report_error(call.excinfo.value, show=False)
    if found is not None:
        report.sections.append(("memguard", str(found)))


def _active() -> Before | None:
    """The budget in effect; None if memguard's runtime was never imported. Imports nothing."""
    if "memguard.api" not in sys.modules:
        return None
    from memguard._tools.testing import budgets

    return budgets.active()


def _end(run: _Run) -> None:
    within, run.within = run.within, False
    before, run.before = run.before, None
    if within and "memguard.api" in sys.modules:
        from memguard._tools.testing import budgets

        budgets.end(before or budgets.Before())


def _put_first(item: pytest.Item, name: str) -> None:
    """Order the fixture before the test's other fixtures and after those of wider scopes, like an autouse fixture."""
    names: list[str] | None = getattr(item, "fixturenames", None)
    if names is None:  # the item is no Python test
        return
    known = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    others = [one for one in names if one != name]
    own = [one in known and known[one][-1].scope == "function" for one in others]
    place = own.index(True) if True in own else len(others)
    # A new list, because a function's tests with different parameters share the old one.
    item.fixturenames = [*others[:place], name, *others[place:]]  # type: ignore[attr-defined]


def _check_of(run: _Run, marker: pytest.Mark | None) -> Check | None:
    """The check of one test; None if its marker exempts it."""
    from memguard._tools.testing import leaks

    tolerance, check, wrong = run.tolerance, True, ""
    if marker is not None:
        try:
            check, own = leaks.asked(marker.args, marker.kwargs)
            tolerance = tolerance if own is None else own
        except ValueError as error:
            wrong = str(error)
    if wrong:  # outside `except`, so that the failure has no context
        how = f"{leaks.MARKER}(tolerance='8MiB'), or {leaks.MARKER}(check=False)"
        pytest.fail(f"{leaks.MARKER}: {wrong}\n    fix: {how}", pytrace=False)
    if not check:
        return None
    run.watcher = run.watcher or leaks.Watcher()
    return leaks.Check(run.watcher, leaks.TOLERANCE if tolerance is None else tolerance)

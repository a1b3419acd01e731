"""Budgets for single tests: the marker and the fixture of the pytest plugin, and no budget in the next test."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
from collections.abc import Iterator
from pathlib import Path

import inner_pytest
import pytest

import memguard
from memguard._runtime import runtime
from memguard._tools.testing import budgets

pytest_plugins = ("pytester",)

ROOT = Path(memguard.__file__).parents[1]
INSTALLED = any(e.value == "memguard.pytest_plugin" for e in importlib.metadata.entry_points(group="pytest11"))
ON = (*(() if INSTALLED else ("-p", "memguard.pytest_plugin")), "-p", "no:cacheprovider", "--strict-markers")

HEAD = """
    import sys, unittest
    import pytest
    import memguard
    from memguard import api
    from memguard._runtime import runtime

    BUDGET = {"version": 1, "device": {"limit": "20GiB"}, "frameworks": {"torch": {"limit": "4GiB"}}}

    def active():
        return runtime.this.session is not None and runtime.this.session.active

    def test_z_none_is_left():
        assert not active() and runtime.this.idle is None
"""


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    """What is first imported within an inner run is forgotten at its end."""
    for name in ("_devices.real", "_devices.contexts", "_ledger.reader", "_tools.testing.leaks"):
        importlib.import_module(f"memguard.{name}")
    with memguard.guard({"version": 1, "frameworks": {"torch": {"limit": "1GiB"}}}, simulate="h200") as guard:
        memguard.require("torch", "512MiB")
        guard.sample()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    memguard.shutdown()


def run(pytester: pytest.Pytester, body: str, *options: str) -> pytest.RunResult:
    """The tests in this process, sorted: those that look whether a budget is left come between and last."""
    pytester.makepyfile(HEAD + body)
    return pytester.runpytest_inprocess(*ON, *options)


@pytest.mark.parametrize(
    "marker",
    [
        "BUDGET, simulate='h200'",
        "'budget.yaml', simulate='h200'",
        "BUDGET, simulate='h200', missing_gpu='skip', replace=True",
        "device={'limit': '20GiB'}, frameworks={'torch': {'limit': '4GiB'}}, simulate=['h200']",
        "memguard.Budget.from_mapping(BUDGET), simulate='h200'",
    ],
    ids=["dict", "path", "options", "keywords", "Budget"],
)
def test_the_marker_takes_a_budget(pytester: pytest.Pytester, marker: str) -> None:
    pytester.makefile(".yaml", budget="version: 1\ndevice: {limit: 20GiB}\nframeworks: {torch: {limit: 4GiB}}\n")
    done = run(
        pytester,
        f"""
    @pytest.mark.memguard_budget({marker})
    def test_marked():
        memguard.require("torch", "3GiB")
        with pytest.raises(memguard.BudgetExceeded):
            memguard.require("torch", "5GiB")
        assert memguard.ledger().devices[0].limit == 20 << 30

    @pytest.mark.memguard_budget({marker})
    def test_with_the_guard(memguard_budget):
        assert memguard_budget is api.current() and memguard_budget.host.simulated
    """,
    )
    done.assert_outcomes(passed=3)


def test_the_budget_comes_before_the_tests_fixtures_and_after_those_of_wider_scopes(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
    @pytest.fixture(scope="module")
    def wide():
        assert not active()
    @pytest.fixture(autouse=True)
    def early(request):
        assert active() == ("none" not in request.node.name)
        yield
        assert active() == ("none" not in request.node.name)
    @pytest.mark.memguard_budget(BUDGET, simulate="h200")
    def test_order(tmp_path, wide): pass
    """,
    )
    done.assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("body", "outcomes"),
    [
        ("@pytest.mark.memguard_budget(BUDGET, simulate='h200')\ndef test_it(): assert 0", {"failed": 1}),
        ("def test_it(): memguard.init(BUDGET, simulate='h200')", {"passed": 1}),
        ("def test_it():\n memguard.init(BUDGET, simulate='h200')\n raise SystemExit(3)", {"failed": 1}),
        ("def test_it():\n memguard.init(BUDGET, simulate='h200')\n pytest.skip()", {"skipped": 1}),
        (
            "@pytest.mark.memguard_budget(BUDGET, simulate='h200')\n"
            "def test_it(): memguard.init({**BUDGET, 'on_busy': 'raise'}, replace=True, simulate='h200')",
            {"passed": 1},
        ),
        ("@pytest.mark.memguard_budget(BUDGET, simulate='h200')\ndef test_it(): memguard.shutdown()", {"passed": 1}),
        ("@pytest.fixture\ndef begun(): memguard.init(BUDGET, simulate='h200')\ndef test_it(begun): 0", {"passed": 1}),
        (
            "@pytest.fixture\ndef broken(): raise OSError\n"
            "@pytest.mark.memguard_budget(BUDGET, simulate='h200')\ndef test_it(broken): 0",
            {"errors": 1},
        ),
        (
            "@pytest.fixture\ndef broken():\n yield\n raise OSError\n"
            "@pytest.mark.memguard_budget(BUDGET, simulate='h200')\ndef test_it(broken): 0",
            {"passed": 1, "errors": 1},
        ),
        (
            "def test_it(monkeypatch):\n monkeypatch.setenv('MEMGUARD_DISABLE', '1')\n memguard.init(BUDGET)",
            {"passed": 1},
        ),
        (
            "@pytest.mark.memguard_budget(BUDGET, simulate='h200')\n"
            "class TestOld(unittest.TestCase):\n"
            " def setUp(self): assert active()\n"
            " def tearDown(self): assert active()\n"
            " def test_it(self): memguard.require('torch', '1GiB')",
            {"passed": 1},
        ),
        (
            "class TestLater(unittest.IsolatedAsyncioTestCase):\n"
            " @pytest.mark.memguard_budget(BUDGET, simulate='h200')\n"
            " async def test_it(self):\n"
            "  async with memguard.workload('w', framework='torch', needs='1GiB'): assert active()",
            {"passed": 1},
        ),
    ],
    ids=[
        "fails", "init", "exits", "skips", "replaces", "ends it", "in a fixture", "setup fails", "teardown fails",
        "idle", "unittest", "async",
    ],
)  # fmt: skip
def test_no_budget_is_left(pytester: pytest.Pytester, body: str, outcomes: dict[str, int]) -> None:
    text = "".join(f"    {line}\n" for line in body.splitlines())
    outcomes = {**outcomes, "passed": outcomes.get("passed", 0) + 2}
    done = run(pytester, text + "\n    test_zz_none_is_left = test_z_none_is_left\n")
    done.assert_outcomes(**outcomes)
    assert runtime.this.session is None


def test_a_run_that_is_interrupted_leaves_no_budget(pytester: pytest.Pytester) -> None:
    body = """
    {marker}
    def test_a():
        {body}
        raise KeyboardInterrupt
    """
    for marker, line in [
        ("@pytest.mark.memguard_budget(BUDGET, simulate='h200')", "assert active()"),
        ("", "memguard.init(BUDGET, simulate='h200')"),
    ]:
        pytester.makepyfile(HEAD.partition("    def test_z")[0] + body.format(marker=marker, body=line))
        done = pytester.inline_run(*ON, no_reraise_ctrlc=True)
        assert done.ret == pytest.ExitCode.INTERRUPTED
        assert runtime.this.session is None


def test_budgets_of_wider_scopes_stay_as_long_as_those(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
    @pytest.fixture(scope="module")
    def lazily():
        with memguard.guard(BUDGET, simulate="h200") as guard:
            yield guard

    class TestWide:
        @pytest.fixture(scope="class")
        def budget(self):
            with memguard.guard(BUDGET, simulate="h200") as guard:
                yield guard
        def test_one(self, budget): assert budget.active
        def test_two(self, budget): assert budget.active

    class TestSetUp(unittest.TestCase):
        @classmethod
        def setUpClass(cls): cls.guard = memguard.init(BUDGET, simulate="h200")
        @classmethod
        def tearDownClass(cls): memguard.shutdown()
        def test_one(self): assert self.guard.active
        def test_two(self): assert self.guard.active

    def test_zz_lazily(request):
        assert request.getfixturevalue("lazily").active
    def test_zzz_still(lazily, request):
        assert lazily.active
    @pytest.mark.memguard_budget(frameworks={"torch": {"limit": "1GiB"}}, simulate="h200")
    def test_zzzz_another(lazily): pass
    """,
    )
    done.assert_outcomes(passed=7, errors=1)
    assert "another budget is active in this process" in done.stdout.str()
    assert runtime.this.session is None


def test_parameters(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
    SMALL = {"frameworks": {"torch": {"limit": "1GiB"}}}
    @pytest.mark.memguard_budget(simulate="h200")
    @pytest.mark.parametrize("memguard_budget", [BUDGET, SMALL], indirect=True)
    def test_indirect(memguard_budget, request):
        assert memguard_budget.plan.devices[0].caps["torch"] == (4 << 30 if "budget0" in request.node.name else 1 << 30)

    @pytest.mark.memguard_budget(frameworks={"torch": {"limit": "1GiB"}}, simulate="h200")
    @pytest.mark.parametrize("memguard_budget", [BUDGET], indirect=True)
    @pytest.mark.xfail(raises=pytest.fail.Exception, strict=True)
    def test_two_budgets(memguard_budget): pass

    @pytest.mark.parametrize("size", [pytest.param(3, marks=pytest.mark.memguard_budget(SMALL, simulate="h200")), 1, 2])
    def test_one_of_them(size):
        assert active() == (size == 3)

    @pytest.mark.memguard_budget(BUDGET, simulate="h200")
    class TestNearest:
        def test_of_the_class(self): assert api.current().plan.devices[0].caps["torch"] == 4 << 30
        @pytest.mark.memguard_budget(SMALL, simulate="h200")
        def test_of_the_function(self): assert api.current().plan.devices[0].caps["torch"] == 1 << 30
    """,
    )
    done.assert_outcomes(passed=8, xfailed=1)


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("", "no budget is given"),
        ("simulate='h200'", "no budget is given"),
        ("BUDGET, {}", "takes one budget, found 2"),
        ("'budget.yaml', frameworks={}", "a file has its own keys, found frameworks"),
        ("memguard.Budget.from_mapping(BUDGET), device={}", "a Budget has its own keys, found device"),
        ("'nowhere.yaml', simulate='h200'", "nowhere.yaml"),
        ("BUDGET, simulate='h2000'", "h2000"),
        (
            "BUDGET, frameworks={'torch': {'limit': '1GiB'}}, simulate='h200'",
            "a dict has its own keys, found frameworks",
        ),
        (
            "BUDGET, device={'limit': '1GiB'}, simulate='h200'",
            "beside it only simulate, missing_gpu, replace are allowed",
        ),
        ("{}, frameworks={'torch': {'limit': '1GiB'}}", "a dict has its own keys, found frameworks"),
        ("BUDGET, simulat='h200'", "memguard_budget has no keyword 'simulat'; did you mean 'simulate'?"),
        ("frameworks={}, missing='skip'", "no keyword 'missing'; did you mean 'missing_gpu'?"),
        ("simulate='h200', framework={'torch': {'limit': '4GiB'}}", "did you mean 'frameworks'?"),
        ("BUDGET, missing_gpu='maybe'", "missing_gpu is 'raise', 'warn', 'simulate' or 'skip', found 'maybe'"),
        ("BUDGET, missing_gpu='maybe'", "fix: missing_gpu='skip' skips the test without a GPU"),
        ("frameworks={'torch': {'limit': '4GB'}}, simulate='h200'", "the unit 'GB' is ambiguous"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(pytester: pytest.Pytester, marker: str, said: str) -> None:
    done = run(
        pytester, f"\n    @pytest.mark.memguard_budget({marker})\n    def test_marked(): pass\n", "-k", "test_marked"
    )
    done.assert_outcomes(errors=1)
    text = done.stdout.str()
    assert said in text and "memguard_budget" in text
    assert "_tools/testing/budgets.py" not in text and "During handling" not in text


def test_no_key_of_a_budget_is_taken_for_an_option() -> None:
    keys = memguard.Budget.model_fields
    assert {"device", "frameworks"} <= set(keys)
    assert [key for key in keys if budgets.meant(key, budgets._OPTIONS)] == []


def test_the_fixture_without_a_marker(pytester: pytest.Pytester) -> None:
    done = run(pytester, "\n    def test_it(memguard_budget): pass\n", "-k", "test_it")
    done.assert_outcomes(errors=1)
    assert "fix: @pytest.mark.memguard_budget('budget.yaml', simulate='h200')" in done.stdout.str()


def test_it_skips_where_there_is_no_gpu(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    from memguard._devices import real

    def none(self: object) -> None:
        raise memguard.DeviceError("NVML sees no GPU", fix="buy one", missing=True)

    monkeypatch.setattr(real.RealHost, "__init__", none)
    body = """
    @pytest.mark.memguard_budget(BUDGET, missing_gpu="skip")
    def test_skipped(): assert 0
    @pytest.mark.memguard_budget(BUDGET, missing_gpu="simulate")
    def test_simulated(memguard_budget): assert memguard_budget.host.simulated
    @pytest.mark.memguard_budget(BUDGET, missing_gpu="warn")
    def test_idle(memguard_budget): assert not memguard_budget.active; memguard.require("torch", "900GiB")
    @pytest.mark.memguard_budget(BUDGET)
    def test_raised(): assert 0
    """
    done = run(pytester, body, "-rs")
    done.assert_outcomes(passed=3, skipped=1, errors=1)
    assert re.search(r"SKIPPED .*NVML sees no GPU", done.stdout.str())


def test_the_report_of_a_marked_test_has_its_section(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
    @pytest.mark.memguard_budget(BUDGET, simulate="h200")
    def test_it(memguard_budget): memguard_budget.frameworks["torch"].allocate(5 << 30)
    """,
    )
    done.assert_outcomes(failed=1, passed=1)
    assert "memguard: torch ran out of GPU memory: 5.00 GiB asked for (simulated)" in done.stdout.str()


def test_the_budget_of_the_environment_comes_back(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.makeconftest(
        """
        from memguard import api
        from memguard._runtime import runtime
        def pytest_configure(config):
            budget = {"version": 1, "frameworks": {"cupy": {"limit": "2GiB"}}}
            runtime.this.from_environment = api.init(budget, simulate="h200")
        """
    )
    done = run(
        pytester,
        """
    @pytest.mark.memguard_budget(BUDGET, simulate="h200")
    def test_a(): assert "torch" in api.current().frameworks
    def test_b():
        assert "cupy" in api.current().frameworks and runtime.this.from_environment is api.current()
    """,
        "--deselect", "test_the_budget_of_the_environment_comes_back.py::test_z_none_is_left",
    )  # fmt: skip
    done.assert_outcomes(passed=2, deselected=1)


def test_the_budget_of_the_environment_may_begin_within_a_test_and_stays(pytester: pytest.Pytester) -> None:
    done = run(
        pytester,
        """
    def test_a(): runtime.this.from_environment = api.init(BUDGET, simulate="h200")
    def test_b(): assert api.current() is runtime.this.from_environment
    """,
    )
    done.assert_outcomes(passed=3)


def test_with_processes_of_xdist(pytester: pytest.Pytester) -> None:
    body = """
    @pytest.mark.memguard_budget(BUDGET, simulate="h200")
    @pytest.mark.parametrize("number", range(4))
    def test_it(number, memguard_budget): assert memguard_budget.active
    """
    pytester.makepyfile(HEAD + body)
    done = pytester.runpytest_subprocess(*ON, "-n", "2", "-p", "xdist")
    done.assert_outcomes(passed=5)


def test_without_the_plugin_the_marker_is_unknown(pytester: pytest.Pytester) -> None:
    if not INSTALLED:
        pytest.skip("memguard is not installed here, so that no entry point names the plugin")
    pytester.makepyfile(HEAD + "\n    @pytest.mark.memguard_budget(BUDGET)\n    def test_it(): pass\n")
    done = pytester.runpytest_subprocess(*ON, "-p", "no:memguard")  # marks that were seen are known in this process
    assert "'memguard_budget' not found in `markers`" in done.stdout.str()


def test_nothing_is_loaded_for_tests_that_use_none_of_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys
        import pytest
        @pytest.fixture(scope="module")
        def wide(): yield
        def test_it(wide, tmp_path): pass
        def test_nothing():
            frameworks = {"torch", "tensorflow", "jax", "cupy", "numba", "pycuda", "pynvml", "pydantic", "numpy"}
            assert not frameworks & set(sys.modules)
            assert {n for n in sys.modules if n.startswith("memguard")} == {"memguard", "memguard.pytest_plugin"}
        """
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)} if ROOT.name != "site-packages" else dict(os.environ)
    done = inner_pytest.run(pytester.path, "-q", *ON, "-p", "no:hypothesispytest", "-p", "no:xdist", env=environ)
    assert done.returncode == 0, done.stdout

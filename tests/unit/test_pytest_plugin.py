"""The pytest plugin: a report where a budget is active and a test ran out of memory, and nothing anywhere else."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import memguard

pytest_plugins = ("pytester",)

ROOT = Path(memguard.__file__).parents[1]
INSTALLED = any(e.value == "memguard.pytest_plugin" for e in importlib.metadata.entry_points(group="pytest11"))
ON = () if INSTALLED else ("-p", "memguard.pytest_plugin")

BUDGET = """
    import pytest
    from memguard._oom import hooks

    @pytest.fixture
    def budget():
        undo = hooks.install(hooks.OomContext)
        yield
        undo()
"""
TESTS = """
    import pytest

    class OutOfMemoryError(RuntimeError): pass
    OutOfMemoryError.__module__ = "torch"

    def fail(): raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    def test_call(budget): fail()
    def test_wrapped(budget):
        try: fail()
        except RuntimeError: raise ValueError("the step failed")
    def test_caught(budget):
        with pytest.raises(RuntimeError): fail()
    def test_other(budget): assert 1 == 2
    def test_fails_without_a_budget(): fail()
    @pytest.mark.xfail(strict=True)
    def test_expected(budget): fail()

    @pytest.fixture
    def broken(budget): fail()
    def test_setup(broken): pass
"""


def test_a_failed_test_shows_the_report(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(BUDGET)
    pytester.makepyfile(TESTS)
    done = pytester.runpytest_inprocess(*ON, "-p", "no:cacheprovider")
    done.assert_outcomes(failed=4, passed=1, errors=1, xfailed=1)
    text = done.stdout.str()
    parts = re.split(r"\n_+ (?:ERROR at setup of )?(test_\w+) _+\n", text)
    shown = {name: "memguard: torch ran out of GPU memory: 2.00 GiB asked for" in body
             for name, body in zip(parts[1::2], parts[2::2], strict=True)}  # fmt: skip
    assert shown == {
        "test_call": True,
        "test_wrapped": True,
        "test_setup": True,
        "test_other": False,
        "test_fails_without_a_budget": False,
    }
    assert len(re.findall(r"^-+ memguard -+$", text, re.MULTILINE)) == 3


def test_it_can_be_turned_off(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(BUDGET)
    pytester.makepyfile(TESTS)
    off = ("-p", "no:memguard") if INSTALLED else ()
    done = pytester.runpytest_inprocess(*off, "-p", "no:cacheprovider")
    done.assert_outcomes(failed=4, passed=1, errors=1, xfailed=1)
    assert not re.search(r"^-+ memguard -+$", done.stdout.str(), re.MULTILINE)


def test_it_imports_nothing_and_does_nothing_if_memguard_is_not_used() -> None:
    code = (
        "import sys, pytest\nbefore = set(sys.modules)\nimport memguard.pytest_plugin\n"
        "new = {n for n in set(sys.modules) - before if '__' not in n}\n"
        "assert new == {'memguard', 'memguard.pytest_plugin'}, new\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)} if ROOT.name != "site-packages" else dict(os.environ)
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_entry_point_is_declared() -> None:
    project = Path(__file__).parents[2] / "pyproject.toml"
    assert '[project.entry-points.pytest11]\nmemguard = "memguard.pytest_plugin"\n' in project.read_text()

"""A pytest plugin that appends every outcome to a file, so that an interpreter crash loses only one test's.

    OUTCOMES=outcomes.jsonl python -m pytest -p support.outcomes ...

It works the same with and without memguard, and does not import it."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest

from bench.programs.six import put_row_stack_back

put_row_stack_back()


def write(line: dict[str, Any]) -> None:
    with open(os.environ["OUTCOMES"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line, default=str) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        write({"collected": item.nodeid})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
        write({"not_collected": report.nodeid, "text": " ".join(lines[-3:])[:600]})


def pytest_runtest_logstart(nodeid: str) -> None:
    write({"start": nodeid})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xpassed" if report.passed else "xfailed"
    elif report.failed and report.when != "call":
        outcome = "error"
    line: dict[str, Any] = {"id": report.nodeid, "when": report.when, "outcome": outcome, "seconds": report.duration}
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        line["text"] = str(crash.message if crash is not None else report.longrepr)[:600]
        line["oom"] = _report()
    write(line)


def pytest_runtest_logfinish(nodeid: str) -> None:
    write({"finish": nodeid})


def pytest_sessionfinish() -> None:
    """Whether a budget is active: under `memguard run` it must be, or the outcomes prove nothing."""
    memguard = sys.modules.get("memguard")
    if memguard is not None:
        try:
            memguard.ledger()
        except memguard.NotActive:
            write({"active": False})
        else:
            write({"active": True})


@pytest.fixture(scope="class")
def initialize_from_pytest_config(request: pytest.FixtureRequest) -> None:
    """Set the class attribute that numba-cuda's conftest.py would set: its wheel has the tests without conftest.py."""
    request.cls._dump_failed_filechecks = False


_seen: list[Any] = []


def _report() -> dict[str, Any] | None:
    """memguard's report of this test's error, if memguard is active and made a new report."""
    memguard = sys.modules.get("memguard")
    if memguard is None:
        return None
    found = memguard.last_oom()
    if found is None or any(found is one for one in _seen):
        return None
    _seen.append(found)
    plain = found.as_dict()
    return {name: plain.get(name) for name in ("memory", "requester", "requested", "reason", "why")}

"""A plugin of pytest: every outcome in a file, line by line, so that a crash of the interpreter loses one test only.

    OUTCOMES=outcomes.jsonl python -m pytest -p support.outcomes ...

It is the same with memguard and without, and imports nothing of it."""

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
    """Whether a budget is active: under `memguard run` it has to be, or the outcomes show nothing."""
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
    """What numba-cuda's own conftest.py gives its test classes; its wheel has the tests without it."""
    request.cls._dump_failed_filechecks = False


_seen: list[Any] = []


def _report() -> dict[str, Any] | None:
    """The report that memguard made of this test's error, if it is active and made a new one."""
    memguard = sys.modules.get("memguard")
    if memguard is None:
        return None
    found = memguard.last_oom()
    if found is None or any(found is one for one in _seen):
        return None
    _seen.append(found)
    plain = found.as_dict()
    return {name: plain.get(name) for name in ("memory", "requester", "requested", "reason", "why")}

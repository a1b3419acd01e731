"""A failed test with an out-of-memory error shows memguard's report. Off with `-p no:memguard`.

pytest loads this wherever memguard is installed. It imports nothing, and does nothing until a budget is active.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(hookwrapper=True)  # the newer `wrapper` needs pytest 8
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, None]:
    outcome = yield
    report = outcome.get_result()
    hooks = sys.modules.get("memguard._oom.hooks")  # loaded with the first budget
    if hooks is None or call.excinfo is None or not report.failed:
        return
    found = hooks.seen(call.excinfo.value, show=False)
    if found is not None:
        report.sections.append(("memguard", str(found)))

"""A budget for one test: what its marker means, and its end, whoever began it.

A budget that begins within a test ends with that test, however the test ends. One that was active before it, or that
a fixture of a wider scope began, stays, and so does that of MEMGUARD_CONFIG.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

MARKER = "memguard_budget"
_OPTIONS = ("simulate", "missing_gpu", "replace")
"""The keywords that go to `memguard.init`. All others are keys of the budget."""
_HOW = f"@pytest.mark.{MARKER}('budget.yaml', simulate='h200'), or with the budget as a dict or as keywords"


class Before(NamedTuple):
    """What was active before a test: a session, the guard that does nothing, or None."""

    active: Any = None
    of_environment: bool = False
    """Whether it is the budget of MEMGUARD_CONFIG."""


def active() -> Before:
    """What is active now. Loads nothing."""
    api: Any = sys.modules.get("memguard._api")
    if api is None:
        return Before()
    session = api._active
    return Before(session if session is not None else api._idle, _of_environment(api, session))


def _of_environment(api: Any, session: Any) -> bool:
    return session is not None and api.from_environment is not None and session.guard is api.from_environment


def end(before: Before) -> None:
    """End the budget that began since. That of MEMGUARD_CONFIG is applied again if a test had replaced it.

    Raises MemguardError if it cannot be ended, as in a process that a test has suspended.
    """
    now = active()
    if now.active is not None and now.active is not before.active and not now.of_environment:
        import memguard

        memguard.shutdown()
    if before.of_environment and not before.active.guard.active:
        from memguard import _api

        guard = before.active.guard
        _api.from_environment = _api.init(guard.budget, simulate=_api._simulated_names(guard.host))


def begin(request: pytest.FixtureRequest) -> Any:
    """Begin the budget of the test's marker, or of its indirect parameter, and return the guard.

    It ends when the test's own memory was looked at: `end` is called by the plugin.
    """
    import memguard

    marker = request.node.get_closest_marker(MARKER)
    given, options = _given(marker, getattr(request, "param", None), request.node)
    skips = options.get("missing_gpu") == "skip"
    if skips:
        del options["missing_gpu"]
    why, missing = "", False
    try:
        return memguard.init(given, **options)
    except (memguard.MemguardError, ValueError, TypeError) as error:
        why, missing = str(error), bool(getattr(error, "missing", False))
    # Out here, so that the failure has no traceback through memguard.
    if skips and missing:
        pytest.skip(why.partition("\n")[0])
    pytest.fail(f"{MARKER}: {why}", pytrace=False)


def _given(marker: pytest.Mark | None, parameter: Any, item: pytest.Item) -> tuple[Any, dict[str, Any]]:
    """The budget, and the options of `memguard.init`."""
    arguments, keywords = (marker.args, marker.kwargs) if marker is not None else ((), {})
    options = {name: keywords[name] for name in _OPTIONS if name in keywords}
    keys = {name: value for name, value in keywords.items() if name not in options}
    if parameter is not None:
        arguments = (parameter, *arguments[1:])
    if len(arguments) > 1:
        pytest.fail(f"{MARKER} takes one budget, found {len(arguments)}\n    fix: {_HOW}", pytrace=False)
    budget = arguments[0] if arguments else {}
    if isinstance(budget, Mapping):
        budget = {**budget, **keys}
        if not budget:
            pytest.fail(f"{MARKER}: no budget is given\n    fix: {_HOW}", pytrace=False)
        return {"version": 1, **budget}, options
    if keys:
        found = ", ".join(keys)
        pytest.fail(f"{MARKER}: a file has its own keys, found {found} beside it\n    fix: {_HOW}", pytrace=False)
    return _path(Path(budget), item) if isinstance(budget, (str, os.PathLike)) else budget, options


def _path(path: Path, item: pytest.Item) -> Path:
    """Beside the test's file, else in pytest's root folder. An absolute one as it is."""
    beside = item.path.parent / path.expanduser()
    return beside if beside.exists() else item.config.rootpath / path.expanduser()

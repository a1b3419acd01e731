"""A budget for one test: what its marker means, and its end, whoever began it.

A budget that begins within a test ends with that test, however the test ends. One that was active before it, or that
a fixture of a wider scope began, stays, and so does that of MEMGUARD_CONFIG.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

MARKER = "memguard_budget"
_OPTIONS = ("simulate", "missing_gpu", "replace")
"""The keywords that go to `memguard.init`. All others are keys of the budget."""
_WITHOUT_GPU = ("raise", "warn", "simulate", "skip")
"""What `missing_gpu` may be: what `memguard.init` takes, and `skip`, which is the plugin's."""
_HOW = f"@pytest.mark.{MARKER}('budget.yaml', simulate='h200'), or with the budget as a dict or as keywords"


class Before(NamedTuple):
    """What was active before a test: a session, the guard that does nothing, or None."""

    active: Any = None
    of_environment: bool = False
    """Whether it is the budget of MEMGUARD_CONFIG."""


def active() -> Before:
    """What is active now. Loads nothing."""
    runtime: Any = sys.modules.get("memguard._runtime.runtime")
    if runtime is None:
        return Before()
    this, session = runtime.this, runtime.this.session
    if session is None:
        return Before(this.idle)
    return Before(session, this.from_environment is not None and session.guard is this.from_environment)


def end(before: Before) -> None:
    """End the budget that began since. That of MEMGUARD_CONFIG is applied again if a test had replaced it.

    Raises MemguardError if it cannot be ended, as in a process that a test has suspended.
    """
    now = active()
    if now.active is not None and now.active is not before.active and not now.of_environment:
        import memguard

        memguard.shutdown()
    if before.of_environment and not before.active.guard.active:
        import memguard
        from memguard._runtime.runtime import simulated_names, this

        guard = before.active.guard
        this.from_environment = memguard.init(guard.budget, simulate=simulated_names(guard.host))


def meant(word: str, names: Iterable[str]) -> str:
    """`; did you mean 'simulate'?` for the name that a wrong keyword is near to or begins; empty if there is none."""
    known = tuple(names)
    near = [one for one in known if one.startswith(word)] or difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]!r}?" if near else ""


def begin(request: pytest.FixtureRequest) -> Any:
    """Begin the budget of the test's marker, or of its indirect parameter, and return the guard.

    It ends when the test's own memory was looked at: `end` is called by the plugin.
    """
    import memguard
    from memguard.errors import DeviceError

    marker = request.node.get_closest_marker(MARKER)
    given, options = _given(marker, getattr(request, "param", None), request.node)
    skips = options.get("missing_gpu") == "skip"
    if skips:
        del options["missing_gpu"]
    why, missing = "", False
    try:
        return memguard.init(given, **options)
    except DeviceError as error:
        why, missing = (error.advice.reason, True) if skips and error.missing else (str(error), False)
    except (memguard.MemguardError, ValueError, TypeError) as error:
        why = str(error)
    # Out here, so that the failure has no traceback through memguard.
    if missing:
        pytest.skip(why)
    pytest.fail(f"{MARKER}: {why}", pytrace=False)


def _given(marker: pytest.Mark | None, parameter: Any, item: pytest.Item) -> tuple[Any, dict[str, Any]]:
    """The budget, and the options of `memguard.init`."""
    arguments, keywords = (marker.args, marker.kwargs) if marker is not None else ((), {})
    options = {name: keywords[name] for name in _OPTIONS if name in keywords}
    keys = {name: value for name, value in keywords.items() if name not in options}
    for name in keys:
        if hint := meant(name, _OPTIONS):  # no key of a budget is near to one of them
            _fail(f"{MARKER} has no keyword {name!r}{hint}")
    policy = options.get("missing_gpu", "raise")
    if policy not in _WITHOUT_GPU:
        allowed = f"{', '.join(map(repr, _WITHOUT_GPU[:-1]))} or {_WITHOUT_GPU[-1]!r}"
        _fail(
            f"{MARKER}: missing_gpu is {allowed}, found {policy!r}", "missing_gpu='skip' skips the test without a GPU"
        )
    if parameter is not None:
        arguments = (parameter, *arguments[1:])
    if len(arguments) > 1:
        _fail(f"{MARKER} takes one budget, found {len(arguments)}")
    if not arguments:
        if not keys:
            _fail(f"{MARKER}: no budget is given")
        return {"version": 1, **keys}, options
    budget = arguments[0]
    if keys:
        is_file = isinstance(budget, (str, os.PathLike))
        what = "a dict" if isinstance(budget, Mapping) else "a file" if is_file else "a Budget"
        keep = f"; beside it only {', '.join(_OPTIONS)} are allowed"
        _fail(f"{MARKER}: {what} has its own keys, found {', '.join(keys)} beside it as keywords", _HOW + keep)
    if isinstance(budget, Mapping):
        if not budget:
            _fail(f"{MARKER}: no budget is given")
        return {"version": 1, **budget}, options
    return _path(Path(budget), item) if isinstance(budget, (str, os.PathLike)) else budget, options


def _fail(what: str, fix: str = _HOW) -> NoReturn:
    pytest.fail(f"{what}\n    fix: {fix}", pytrace=False)


def _path(path: Path, item: pytest.Item) -> Path:
    """Beside the test's file, else in pytest's root folder. An absolute one as it is."""
    beside = item.path.parent / path.expanduser()
    return beside if beside.exists() else item.config.rootpath / path.expanduser()

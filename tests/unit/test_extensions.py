"""The extensions of a session, and imports by name: what a budget does not ask for is neither loaded nor called."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import memguard
from memguard import _budget, api
from memguard._base.types import Sample
from memguard._runtime import extensions
from memguard._runtime.extensions import Extension, OnPoll, Say, SessionContext
from memguard._runtime.runtime import this

PACKAGE = Path(memguard.__file__).parent
BUDGET: dict[str, Any] = {"version": 1, "frameworks": {"torch": {"limit": "10GiB"}}}
MONITORED = {**BUDGET, "monitor": {"interval": "100s"}}
LEASED = {**BUDGET, "device": {"limit": "20GiB", "lease": True}}
SECTIONS: dict[str, dict[str, Any]] = {
    "device.lease": LEASED,
    "device.on_wait: suspend-idle": {
        **BUDGET,
        "device": {"limit": "20GiB", "lease": True, "wait": "1s", "on_wait": "suspend-idle"},
    },
    "metrics": {**MONITORED, "metrics": {"prometheus": 19199}},
    "monitor.timeline": {**BUDGET, "monitor": {"timeline": "run.jsonl"}},
    "monitor.top": {**BUDGET, "monitor": {"top": True}},
    "suspend.when_idle": {**BUDGET, "suspend": {"when_idle": "10min"}},
    "suspend": {**BUDGET, "suspend": {"by_others": True}},
}


@pytest.fixture(autouse=True)
def over() -> Iterator[None]:
    yield
    memguard.shutdown()


def test_each_entry_of_the_table_has_a_budget_here() -> None:
    assert [*SECTIONS] == [*api.EXTENSIONS]


@pytest.mark.parametrize("key", api.EXTENSIONS)
def test_a_budget_loads_the_extensions_that_it_asks_for(key: str) -> None:
    """Each alone, but for the sections without which it cannot be written."""
    also = {"device.on_wait: suspend-idle": {"device.lease"}, "suspend.when_idle": {"suspend"}}.get(key, set())
    loaded = extensions.load(_budget.of(SECTIONS[key]), api.EXTENSIONS)
    wanted = [place for other, place in api.EXTENSIONS.items() if other == key or other in also]
    assert [f"{type(one).__module__}:{type(one).__name__}" for one in loaded] == wanted


def test_a_budget_without_sections_imports_nothing_of_them() -> None:
    code = f"""
import json, sys, memguard
memguard.init({MONITORED!r}, simulate="h200")
print(memguard.ledger())
print(json.dumps([name for name in sys.modules if name.startswith("memguard._node")]), file=sys.stderr)
"""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MEMGUARD")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environ)
    assert json.loads(done.stderr.splitlines()[-1]) == [], done.stderr


class Noted(Extension):
    """Notes each call."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.left = 0

    def prepare(self, session: SessionContext, before: SessionContext | None) -> None:
        self.calls.append(f"prepare, {'' if session.active else 'not '}applied")

    def while_waiting(self, session: SessionContext, say: Say) -> OnPoll | None:
        return None

    def start(self, session: SessionContext) -> None:
        session.undo.add("the notes", lambda: self.calls.append(f"end, {'' if session.active else 'not '}active"))
        self.calls.append(f"start, {'' if session.active else 'not '}applied")
        self.session: Any = session

    def tick(self, reading: Sample) -> None:
        self.calls.append(f"tick of {len(reading.devices)} GPU")

    def checkpoint(self) -> None:
        self.calls.append("checkpoint")
        self.left -= 1
        if self.left > 0:
            raise KeyboardInterrupt

    @property
    def waiting(self) -> bool:
        return self.left > 0

    def forked(self) -> None:
        self.calls.append("forked")

    def at_exit(self) -> None:
        self.calls.append("exit")


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """An extension for the section `monitor`, which is started by an ordinary `init`."""
    one = Noted()
    monkeypatch.setattr(sys.modules[__name__], "made", lambda: one, raising=False)
    monkeypatch.setattr(this, "extensions", {"monitor": f"{__name__}:made"})
    memguard.init(MONITORED, simulate="h200")
    return one


def test_it_is_prepared_started_and_ended_with_the_budget(noted: Noted) -> None:
    memguard.shutdown()
    calls = [call for call in noted.calls if "tick" not in call]
    assert calls == ["prepare, not applied", "start, applied", "end, not active"]


def test_a_sample_comes_to_it_as_a_tick(noted: Noted) -> None:
    session = noted.session
    session._record(session.guard.sample(), [])
    assert "tick of 1 GPU" in noted.calls


def test_a_checkpoint_comes_to_it_once_it_asks(noted: Noted) -> None:
    memguard.checkpoint()
    assert "checkpoint" not in noted.calls
    noted.session.wake()
    memguard.checkpoint()
    memguard.checkpoint()
    assert noted.calls.count("checkpoint") == 1


def test_what_an_interruption_left_is_done_at_the_next_checkpoint(noted: Noted) -> None:
    noted.left = 2
    noted.session.wake()
    with pytest.raises(KeyboardInterrupt):
        memguard.checkpoint()
    memguard.checkpoint()
    assert noted.calls.count("checkpoint") == 2


def test_it_hears_of_a_fork_in_the_child_and_of_the_exit_in_the_parent(noted: Noted) -> None:
    pid = os.fork()
    if pid == 0:
        noted.session._at_exit()
        os._exit(0 if noted.calls[-1] == "forked" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert "forked" not in noted.calls
    noted.session._at_exit()
    assert noted.calls[-1] == "exit"


# imports by name

BY_NAME = {
    "__init__.py": "public names, bound when they are first used",
    "types.py": "public names, bound when they are first used",
    "exchange/__init__.py": "public names, bound when they are first used",
    "cli/__init__.py": "one module for each command, loaded when it is called",
    "_runtime/extensions.py": "the table in api.py, loaded by what the budget asks for",
    "exchange/adapters/registry.py": "one module for each framework, loaded by what the arrays are of",
    "_frameworks/specs.py": "one folder for each framework, found by discovery; its modules loaded when needed",
    "_tools/doctor/examine.py": "the modules of checks, found by discovery",
    "_tools/activation/_memguard_child.py": "memguard itself, which `memguard run` may not find",
    "_tools/suggest/startup/sitecustomize.py": "runs at Python's start, before memguard can be imported",
}
"""Modules that import modules of memguard by a name that is not written there, and why."""
OTHERS = {
    "_frameworks/base.py": "the framework's own module",
    "_frameworks/simulated/adapter.py": "the framework's own module",
    "_tools/doctor/probes/main.py": "the module that the doctor asks about",
    "integrations/ray/worker.py": "the user's hook",
}
"""Modules that import what is not memguard's by a name that is not written there."""


def by_name(source: str) -> Iterator[str | None]:
    """What a module imports by name; None for a name that is not written there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "run_module", "resolve_name"):
                yield str(node.args[0].value) if isinstance(node.args[0], ast.Constant) else None


def test_only_tables_import_modules_of_memguard_by_name() -> None:
    """A room above that is reached by a string is hidden from the contracts in pyproject.toml."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for name in by_name(path.read_text()):
            if name is None or name.partition(".")[0] == "memguard":
                found.add(path.relative_to(PACKAGE).as_posix())
    assert found - OTHERS.keys() == BY_NAME.keys()
    assert found >= OTHERS.keys()


def test_no_room_below_names_a_module_above() -> None:
    """Of the runtime: what the session does beyond its own room is an extension, which it does not name."""
    for path in (PACKAGE / "_runtime").rglob("*.py"):
        strings = [one.value for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.Constant)]
        above = [
            text for text in strings if isinstance(text, str) and text.startswith(("memguard._node", "memguard.api"))
        ]
        assert above == [], path

"""What each public function does in each state of the process: a result, nothing, or which error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import memguard
from memguard._base.types import Event
from memguard._runtime import runtime
from memguard._runtime.extensions import Extension, SessionContext
from memguard._runtime.runtime import Active, Empty, Forked, Idle, Starting, Suspended, this

BUDGET: dict[str, Any] = {"version": 1, "device": {"limit": "40GiB"}, "frameworks": {"torch": {"limit": "10GiB"}}}
OTHER: dict[str, Any] = {**BUDGET, "device": {"limit": "50GiB"}}
MONITORED = {**BUDGET, "monitor": {"interval": "100s", "timeline": "run.jsonl"}}
Call = Callable[[], object]


def outcome(call: Call) -> str:
    """What a program notices: the error's class, or the result as a word."""
    try:
        found = call()
    except Exception as error:
        return type(error).__name__
    if isinstance(found, memguard.Guard):
        return "active" if found.active else "inactive"
    return "done" if found is None else str(found)


def in_block(block: Any) -> object:
    with block as found:
        return outcome(lambda: found) if isinstance(found, memguard.Guard) else None


def ignored(found: object) -> None:
    pass


def removed(watch: Any) -> None:
    watch.remove()


def traced() -> None:
    with memguard.record_trace("trace.jsonl"):
        pass


def seen(event: Event) -> None:
    pass


CALLS: dict[str, Call] = {
    "init": lambda: memguard.init(BUDGET, simulate="h200"),
    "init of another budget": lambda: memguard.init(OTHER, simulate="h200"),
    "init of another budget, replace": lambda: memguard.init(OTHER, simulate="h200", replace=True),
    "guard": lambda: in_block(memguard.guard(BUDGET, simulate="h200")),
    "shutdown": memguard.shutdown,
    "ledger": lambda: f"{len(memguard.ledger().devices)} GPU",
    "require": lambda: memguard.require("torch", "1GiB"),
    "require too much": lambda: memguard.require("torch", "1TiB"),
    "workload": lambda: in_block(memguard.workload("work", framework="torch")),
    "resize": lambda: memguard.resize("torch", "9GiB"),
    "trim": lambda: f"{memguard.trim()} B",
    "reclaimable": lambda: f"{len(memguard.reclaimable().devices)} GPU",
    "checkpoint": memguard.checkpoint,
    "on_event": lambda: removed(memguard.on_event(seen)),
    "on_sample": lambda: removed(memguard.on_sample(seen)),  # type: ignore[arg-type]
    "suspend": lambda: ignored(memguard.suspend()),
    "suspended": lambda: in_block(memguard.suspended()),
    "resume": memguard.resume,
    "retry": lambda: memguard.retry(times=1)(lambda: "its result")(),
    "last_oom": memguard.last_oom,
    "record_trace": traced,
    "load_timeline": lambda: ignored(memguard.load_timeline(next(Path().glob("run*.jsonl")))),
    "doctor": lambda: ignored(memguard.doctor(frameworks="torch")),
}
REAL_GPU = {(state, call) for state in ("Empty", "Idle") for call in ("suspend", "suspended")}
"""Without a budget a suspension takes the process off its real GPUs: tests/gpu."""
ANYWHERE = {
    "on_event": "done", "on_sample": "done", "resume": "done", "retry": "its result", "last_oom": "done",
    "load_timeline": "done", "doctor": "done",
}  # fmt: skip
WORKS = {
    "ledger": "1 GPU", "require": "done", "require too much": "BudgetExceeded", "workload": "done", "resize": "done",
    "trim": "0 B", "reclaimable": "1 GPU", "checkpoint": "done", "record_trace": "done",
}  # fmt: skip
NEEDS = dict.fromkeys(WORKS, "NotActive")
"""What needs a budget."""
APPLIES = {
    "init": "active", "init of another budget": "active", "init of another budget, replace": "active",
    "guard": "active", "shutdown": "[]",
}  # fmt: skip
EXPECTED: dict[str, dict[str, str]] = {
    "Empty": {**ANYWHERE, **APPLIES, **NEEDS},
    "Idle": {
        **ANYWHERE, **APPLIES, **dict.fromkeys(NEEDS, "done"),
        "ledger": "0 GPU", "reclaimable": "0 GPU", "trim": "0 B",
    },
    "Starting": {
        **ANYWHERE, **APPLIES, **WORKS,
        "init of another budget": "AlreadyActive", "init of another budget, replace": "AlreadyActive",
        "suspend": "CannotSuspend", "suspended": "CannotSuspend",
    },
    "Active": {
        **ANYWHERE, **APPLIES, **WORKS,
        "init of another budget": "AlreadyActive", "suspend": "done", "suspended": "done",
    },
    "Suspended": {
        **ANYWHERE, **dict.fromkeys(WORKS, "Suspended"), "ledger": "1 GPU", "checkpoint": "done",
        "init": "active", "init of another budget": "AlreadyActive", "init of another budget, replace": "Suspended",
        "guard": "active", "shutdown": "Suspended", "suspend": "Suspended", "suspended": "Suspended",
    },
    "Forked": {**ANYWHERE, **APPLIES, **NEEDS, "suspend": "CannotSuspend", "suspended": "CannotSuspend"},
}  # fmt: skip


class Within(Extension):
    """Makes the call while the budget starts, once its caps are applied."""

    call: Call = memguard.shutdown
    found = ""

    def start(self, session: SessionContext) -> None:
        assert type(this.state) is Starting
        Within.found = outcome(Within.call)


made = Within


@pytest.fixture(autouse=True)
def over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    memguard.shutdown()
    memguard.init(MONITORED, simulate="h200")
    memguard.shutdown()
    this._state = Empty()
    yield
    memguard.resume()
    memguard.shutdown()
    this._state = Empty()


def in_state(state: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> str:
    if state == "Starting":
        monkeypatch.setattr(Within, "call", staticmethod(call))
        monkeypatch.setattr(this, "extensions", {"device": f"{__name__}:made"})
        memguard.init(BUDGET, simulate="h200")
        return Within.found
    if state == "Idle":
        with monkeypatch.context() as disabled:
            disabled.setenv("MEMGUARD_DISABLE", "1")
            memguard.init(BUDGET)
    elif state != "Empty":
        memguard.init(BUDGET, simulate="h200")
    if state == "Suspended":
        memguard.suspend()
    if state != "Forked":
        assert type(this.state) is getattr(runtime, state)
        return outcome(call)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        found = outcome(call) if type(this.state) is Forked else "it is not"
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        os.waitpid(child, 0)
        return str(json.load(answer))


TABLE = [(state, call) for state, row in EXPECTED.items() for call in row]


@pytest.mark.parametrize(("state", "call"), TABLE, ids=[f"{state}: {call}" for state, call in TABLE])
def test_a_call_in_a_state(state: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_state(state, CALLS[call], monkeypatch) == EXPECTED[state][call]


@cache
def functions() -> set[str]:
    """The public functions."""
    return {name for name in memguard.__all__ if callable(one := getattr(memguard, name)) and not isinstance(one, type)}


def test_every_public_function_has_a_row() -> None:
    assert {call.split(" ")[0] for call in CALLS} == functions()


def test_every_state_has_a_column() -> None:
    assert [*EXPECTED] == [one.__name__ for one in (Empty, Idle, Starting, Active, Suspended, Forked)]
    assert {(state, call) for state in EXPECTED for call in CALLS} - {*TABLE} == REAL_GPU

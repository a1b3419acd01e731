"""Forks and exits: one list of each, in one order, whoever was added first."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import memguard
from memguard._base import life
from memguard._base.life import HookOrder

PACKAGE = Path(memguard.__file__).parent
BEFORE_MEMGUARD = {"_tools/activation/_memguard_environment.py"}
"""Runs at Python's start, before memguard can be imported."""


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With lists of its own: those of this process stay as they are."""
    forks, exits = [*life.forks], [*life.exits]
    life.forks.clear()
    life.exits.clear()
    yield
    life.forks[:], life.exits[:] = forks, exits


def in_child(check: str, said: list[str]) -> None:
    """Fork, and compare what was said in the child."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if " ".join(said) == check else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_fork_goes_by_rank_from_below_and_before_it_from_above() -> None:
    said: list[str] = []
    for rank in (HookOrder.SUSPENSION, HookOrder.CUDA, HookOrder.BUDGET):
        before, parent, child = (partial(said.append, f"{when} {rank.name}") for when in ("before", "parent", "child"))
        life.at_fork(rank, before=before, parent=parent, child=child)
    first = "before SUSPENSION before BUDGET before CUDA"
    in_child(f"{first} child CUDA child BUDGET child SUSPENSION", said)
    assert " ".join(said) == f"{first} parent CUDA parent BUDGET parent SUSPENSION"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_fails_at_a_fork_keeps_no_other_from_its_turn() -> None:
    said: list[str] = []

    def fail() -> None:
        raise ValueError("of this hook")

    life.at_fork(HookOrder.CUDA, child=fail)
    life.at_fork(HookOrder.LEASES, child=fail)
    life.at_fork(HookOrder.BUDGET, child=lambda: said.append("done"))
    in_child("done", said)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    return (done.stdout + done.stderr).strip()


SAY = "import atexit\nfrom memguard._base import life\nfrom memguard._base.life import HookOrder\n"


def test_an_exit_goes_by_rank_from_above_before_the_exit_functions_of_others() -> None:
    """Of a framework that was imported between the two, too."""
    code = f"""{SAY}
life.at_exit(HookOrder.SUSPENSION, lambda: print("suspension"))
atexit.register(print, "framework")
life.at_exit(HookOrder.PYCUDA, lambda: print("contexts"))
life.at_exit(HookOrder.BUDGET, lambda: print("budget"))
"""
    assert run(code).split() == ["suspension", "budget", "contexts", "framework"]


def test_what_is_over_is_not_called_at_the_exit() -> None:
    code = f"""{SAY}
over = lambda: print("over")
life.at_exit(HookOrder.BUDGET, over)
life.at_exit(HookOrder.METRICS, lambda: print("left"))
life.not_at_exit(over)
"""
    assert run(code) == "left"


def test_what_fails_at_an_exit_is_shown_and_keeps_no_other_from_its_turn() -> None:
    code = f"""{SAY}
life.at_exit(HookOrder.BUDGET, lambda: 1 / 0)
life.at_exit(HookOrder.METRICS, lambda: [][1])
life.at_exit(HookOrder.CUDA, lambda: print("left"))
"""
    said = run(code)
    assert "left" in said and "ZeroDivisionError" in said and "IndexError" in said


def test_what_an_exit_function_adds_is_called_too() -> None:
    code = f"""{SAY}
life.at_exit(HookOrder.BUDGET, lambda: life.at_exit(HookOrder.SUSPENSION, lambda: print("added")))
"""
    assert run(code) == "added"


def test_importing_memguard_registers_nothing() -> None:
    code = """
import atexit, os
called = []
def note(*given, **hooks):
    called.extend(one for one in (*given, *hooks.values()) if str(one.__module__).startswith("memguard"))
os.register_at_fork = atexit.register = note
import memguard
print(len(called))
import memguard.api
print([one.__name__ for one in called])
"""
    assert run(code) == "0\n['_before', '_in_parent', '_in_child']"


def test_nothing_else_registers_for_forks_and_exits() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [one.name for one in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            module = node.module if isinstance(node, ast.ImportFrom) else None
            name = node.attr if isinstance(node, ast.Attribute) else ""
            if "atexit" in (*names, module) or "register_at_fork" in (*names, name):
                found.add(path.relative_to(PACKAGE).as_posix())
    assert found == {"_base/life.py"} | BEFORE_MEMGUARD

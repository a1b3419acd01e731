"""What `tests/gpu` would run on a GPU can run: it compiles, binds the names it uses, and its budgets are budgets.

mypy reads the same programs in `.ci/run`.
"""

from __future__ import annotations

import ast
import builtins
import json
import symtable
from collections.abc import Iterator
from typing import Any

import gpu_programs
import pytest

import memguard
from memguard._budget import policy
from memguard._devices.simulated import SimulatedHost

pytestmark = pytest.mark.long  # no version of what is installed changes what only developers run

CARDS = "h100", "h200"
HELD_BACK = {
    "tests/gpu/test_programs.py::test_a_busy_card": "a holder of the card says first how much is free",
    "tests/gpu/test_several.py": "they look for the second GPU first",
}
"""Tests that reach no program without a GPU."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return gpu_programs.found(tmp_path_factory.mktemp("gpu"))


def problems(code: str) -> list[str]:
    """What keeps a program from running as it is meant: its syntax, names that nothing binds, budgets that are none."""
    try:
        tree = ast.parse(code)
        compile(tree, "program", "exec")
    except SyntaxError as error:
        return [f"line {error.lineno}: {error.msg}"]
    unbound = [f"nothing binds {name!r}" for name in sorted(used_before(tree) | unknown(code))]
    return unbound + [text for budget in budgets(tree) for text in refused(budget)]


def unknown(code: str) -> set[str]:
    """Names of a program that neither it nor Python has."""
    top = symtable.symtable(gpu_programs.BEFORE + code, "program", "exec")
    if any(isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(ast.parse(code))):
        return set()
    bound = {one.get_name() for one in top.get_symbols() if one.is_assigned() or one.is_imported()}
    used: set[str] = set()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for one in table.get_symbols():
            if table is top:
                used |= {one.get_name()} if one.is_referenced() else set()
            elif one.is_global():
                (bound if one.is_assigned() else used).add(one.get_name())
    return used - bound - set(dir(builtins)) - {"__name__", "__file__"}


def used_before(tree: ast.Module) -> set[str]:
    """Names that a line of the program's top level uses for what it binds itself, as `A, B = 1, A`."""
    bound = set(dir(builtins)) | {"faulthandler", "json", "os", "memguard", "GIB", "MIB", "result", "__name__"}
    wrong: set[str] = set()
    for statement in tree.body:
        mine = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and not loads(node)}
        if isinstance(statement, ast.Assign) and not any(isinstance(n, SCOPES) for n in ast.walk(statement.value)):
            wrong |= {n.id for n in ast.walk(statement.value) if isinstance(n, ast.Name) and n.id in mine - bound}
        bound |= mine
    return wrong


SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr)


def loads(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Load)


def budgets(tree: ast.Module) -> Iterator[dict[str, Any]]:
    """Those that the program states, and those of its functions that only put one together."""
    known: dict[str, Any] = {"GIB": 1 << 30, "MIB": 1 << 20, "result": {}}
    for statement in tree.body:
        plain = (
            isinstance(statement, ast.FunctionDef)
            and isinstance(statement.body[-1], ast.Return)
            and len(statement.body) == 1
        )
        if plain or (isinstance(statement, ast.Assign) and not calls(statement.value, known)):
            try:
                exec(compile(ast.Module([statement], []), "program", "exec"), known)
            except Exception:
                continue
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr not in ("init", "guard", "from_mapping") or calls(node.args[0], known):
            continue
        if ast.unparse(node.func.value) not in ("memguard", "memguard.Budget"):
            continue
        try:
            value = eval(compile(ast.Expression(node.args[0]), "program", "eval"), dict(known))
        except Exception:  # a name of a loop's or a function's own
            continue
        if isinstance(value, dict):
            yield value


def calls(node: ast.AST, known: dict[str, Any]) -> bool:
    """Whether it calls anything but functions of the program that are known here."""
    called = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    return any(not isinstance(one, ast.Name) or one.id not in known for one in called)


def refused(budget: dict[str, Any]) -> list[str]:
    """Why a card like those that the tests run on would not have this budget."""
    wrong = []
    for card in CARDS:
        try:
            policy.plan(memguard.Budget.from_mapping(budget), SimulatedHost((card,)).devices())
        except memguard.MemguardError as error:
            wrong.append(f"a budget that {card} refuses: {json.dumps(budget)}: {error}")
    return wrong


def test_each_program_can_run(found: dict[str, list[str]]) -> None:
    without = [name for name, codes in found.items() if not codes and not name.startswith(tuple(HELD_BACK))]
    assert without == [], "no program was found of these: the test ends before"
    wrong = {name: bad for name, codes in found.items() for code in codes if (bad := problems(code))}
    assert wrong == {}, "\n".join(f"{name}: {'; '.join(bad)}" for name, bad in wrong.items())


def test_most_programs_and_budgets_are_seen(found: dict[str, list[str]]) -> None:
    """Else the test above may look at nothing."""
    codes = [code for codes in found.values() for code in codes]
    assert len(codes) >= 300
    assert sum(1 for code in codes if next(budgets(ast.parse(code)), None) is not None) >= 120


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("x = = 1", "invalid syntax"),
        ("for x in range(3):\nprint(x)", "expected an indented block"),
        ("x = {y}", "nothing binds 'y'"),
        ("A, B = 64 * MIB, A", "nothing binds 'A'"),
        ("def f():\n    return deep(lambda: [missing for _ in range(3)])\ndeep = print", "nothing binds 'missing'"),
        ("memguard.init({'version': 1, 'frameworks': {'torch': {'limit': '1GiB', 'share': '5%'}}})", "refuses"),
        ("B = {'version': 1, 'device': {'limit': '1GiB'}, 'frameworks': {'cupy': {'limit': 2 * GIB}}}\n"
         "with memguard.guard(B): pass", "refuses"),
        ("def one(n, s):\n    return {'version': 1, 'frameworks': {n: {'limit': s}}}\nmemguard.init(one('cupy', '1G'))",
         "refuses"),
        ("memguard.init({'version': 1, 'device': {'limit': '8GiB'}, 'frameworks': {'cupy': {'limit': MIB, 'x': 1}}})",
         "refuses"),
    ],
)  # fmt: skip
def test_a_program_that_cannot_run_is_found(code: str, says: str) -> None:
    assert any(says in text for text in problems(code)), problems(code)


@pytest.mark.parametrize(
    "code",
    [
        "import numpy as np\nx = [np.zeros(n) for n in (1, 2)]\nresult['x'] = [y.sum() for y in x]",
        "def f():\n    global kept\n    kept = 1\nf()\nprint(kept, __name__)",
        "try:\n    import torch\nexcept ImportError as error:\n    print(error)\nwith open('x') as file: file.read()",
        "memguard.init({'version': 1, 'device': {'limit': '8GiB'}, 'frameworks': {'cupy': {'limit': 64 * MIB}}})",
        "from os.path import *\nprint(join('a', 'b'))",
        "class A:\n    x = 1\n    def f(self):\n        return __class__\nprint(A().f())",
        "while (line := input()):\n    print(line)\ntotal = 0\ntotal = total + 1",
    ],
)
def test_one_that_can_is_not(code: str) -> None:
    assert problems(code) == []

"""What a message says is data: no code of memguard reads its own sentences back."""

from __future__ import annotations

import ast
import functools
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import memguard
from memguard import errors
from memguard._base.advice import Advice, InvalidValue
from memguard._base.units import parse_size
from memguard._budget import from_mapping

PACKAGE = Path(memguard.__file__).parent
MARKS = ("fix: ", "    or: ")
READS = {
    "partition", "rpartition", "split", "rsplit", "splitlines", "replace", "removeprefix", "removesuffix", "startswith",
    "endswith", "find", "index", "match", "search", "sub", "fullmatch", "findall",
}  # fmt: skip
FACTS = "memory.py"
"""Reads the texts of errors out of a file of facts, which an older memguard may have written."""
OWN = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.MemguardError)}


def test_the_text_has_the_reason_the_fix_and_the_alternatives() -> None:
    advice = Advice("it is full", "free some", ("wait", "use another"))
    assert str(advice) == "it is full\n    fix: free some\n    or: wait\n    or: use another"
    assert advice.line() == "it is full; fix: free some; or: wait; or: use another"
    assert str(advice.within("cupy").with_alternatives()) == "cupy: it is full\n    fix: free some"
    assert str(Advice("it is full")) == Advice("it is full").line() == "it is full"


def test_an_error_is_made_of_advice_and_gives_it_back() -> None:
    advice = Advice("it is full", "free some", ("wait",))
    for error in (errors.DeviceError(advice, missing=True), errors.LeaseRefused(advice, [{"pid": 1}])):
        again = pickle.loads(pickle.dumps(error))
        assert again.advice == error.advice == advice and str(again) == str(error) == str(advice)
    same = errors.MemguardError("it is full", fix="free some", alternatives=("wait",))
    assert same.advice == advice and str(same) == str(advice) and same.args == (str(advice),)


def test_the_errors_of_several_problems_have_the_advice_of_the_first() -> None:
    problems = [errors.Problem("is no size", "write '2GiB'", 3, 5, "device.limit"), errors.Problem("is empty")]
    assert errors.ConfigError(problems, "b.yaml").advice == Advice(
        "b.yaml:3:5: device.limit: is no size", "write '2GiB'"
    )
    reasons = [("a", "it computes", "wait"), ("b", "it is shared", "close it")]
    assert errors.CannotSuspend(reasons).advice == Advice("cannot suspend: it computes", "wait")
    assert errors.CapNotApplied("torch", "it is live", "import it later").advice.fix == "import it later"


def test_what_a_terminal_would_obey_is_escaped_in_the_parts_too() -> None:
    advice = errors.MemguardError("a \x1b[2J name", fix="say\x07 it").advice
    assert (advice.reason, advice.fix) == ("a \\u001b[2J name", "say\\u0007 it")


@pytest.mark.parametrize("value", ["1.5", "4GB", "4 fish", "x; write '1GiB' y"])
def test_a_wrong_value_brings_its_fix_along(value: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        parse_size(value)
    advice = caught.value.advice
    assert str(caught.value) == (f"{advice.reason}; {advice.fix}" if advice.fix else advice.reason)
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.advice == advice and str(again) == str(caught.value)


def _strings(node: ast.AST) -> Iterator[str]:
    yield from (one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str))


@functools.cache
def _modules() -> tuple[tuple[Path, ast.Module], ...]:
    return tuple((path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py")))


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_no_code_takes_a_text_apart_at_its_fix() -> None:
    found = []
    for path, tree in _modules():
        for node in ast.walk(tree):
            reads = isinstance(node, ast.Call) and _name(node.func) in READS
            if isinstance(node, ast.Compare) and any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops):
                reads = True
            if reads and any(mark in f"{text} " for text in _strings(node) for mark in MARKS) and path.name != FACTS:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)[:100]}")
    assert not found


def test_no_code_takes_the_text_of_memguards_own_errors_apart() -> None:
    found = []
    for path, tree in _modules():
        own = OWN | {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and _is_own(node)}
        for handler in (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)):
            if handler.type is None or not any(_name(node) in own for node in ast.walk(handler.type)):
                continue
            for call in (node for body in handler.body for node in ast.walk(body) if isinstance(node, ast.Call)):
                texts = [call.func.value] if isinstance(call.func, ast.Attribute) else []
                if _name(call.func) in READS and any(_shows(one, handler.name) for one in [*texts, *call.args]):
                    found.append(f"{path.relative_to(PACKAGE)}:{call.lineno}: {ast.unparse(call)[:100]}")
    assert not found


def _is_own(node: ast.ClassDef) -> bool:
    return any(_name(base) in OWN for base in node.bases)


def _shows(node: ast.AST, name: str | None) -> bool:
    """Whether it is `str(error)`, or an f-string with the error in it."""
    if isinstance(node, ast.Call) and _name(node.func) in ("str", "text_of", "words_of"):
        return any(_name(one) == name for one in node.args)
    return isinstance(node, ast.FormattedValue | ast.JoinedStr) and any(_name(one) == name for one in ast.walk(node))


def test_no_error_of_memguard_is_raised_with_the_fix_within_its_reason() -> None:
    found = []
    for path, tree in _modules():
        own = OWN | {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and _is_own(node)}
        for node in ast.walk(tree):
            said = list(_strings(node)) if isinstance(node, ast.Call) and _name(node.func) in own | {"Advice"} else []
            if any("\n    fix: " in text or "\n    or: " in text for text in said):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)[:100]}")
    assert not found


@pytest.mark.parametrize("written", ["4 fish; write 'a poem'", "x; remove y"])
@pytest.mark.parametrize("key", ["share", "limit"])
def test_what_a_file_says_is_not_taken_for_the_fix(key: str, written: str) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        from_mapping({"version": 1, "frameworks": {"torch": {key: written}}})
    (problem,) = caught.value.problems
    assert problem.message.startswith(repr(written)) and problem.message.endswith(
        ("is not a size", "is not a percentage")
    )
    assert problem.fix.startswith("write for example '")

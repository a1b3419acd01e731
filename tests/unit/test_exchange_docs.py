"""docs/exchange.md says what the exchange does: its signature, its refusals, its examples."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import memguard
from memguard import _budget, exchange

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "exchange.md"
TEXT = PAGE.read_text(encoding="utf-8")
PACKAGE = Path(memguard.__file__).parent
FRAMEWORKS = PACKAGE / "_frameworks"
ARRAYS = [*FRAMEWORKS.glob("arrays/*.py"), *FRAMEWORKS.glob("*/arrays.py")]
"""Their contract and what they share, and those of each framework."""
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
EXAMPLES = sorted(ROOT.glob("examples/exchange_*.py"))
ROWS = re.findall(
    r"^\| `([^`]*[^`\s])` \| (.+) \|$", TEXT.split("## What is refused")[1].split("\n## ")[0], re.MULTILINE
)


def reasons(path: Path) -> Iterator[str]:
    """What the refusals in a file say, with … for what is filled in."""
    places = {"refusal": 0, "Obstacle": 0, "Malformed": 0, "CannotShare": 2, "Captured": 0}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            place = places.get(getattr(node.func, "attr", getattr(node.func, "id", "")))
            if place is not None and len(node.args) > place:
                said = node.args[place]
                if isinstance(said, ast.Constant) and isinstance(said.value, str):
                    yield said.value
                elif isinstance(said, ast.JoinedStr):
                    yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in said.values)


def test_every_reason_in_the_table_is_one_that_is_given_and_has_a_remedy() -> None:
    files = (*PACKAGE.glob("exchange/**/*.py"), *ARRAYS, PACKAGE / "_devices" / "streams.py")
    given = {said for path in files for said in reasons(path)}
    assert len(ROWS) >= 30
    assert [reason for reason, _ in ROWS if reason not in given] == []
    assert all(remedy.strip() for _, remedy in ROWS)
    assert len({reason for reason, _ in ROWS}) == len(ROWS)


def test_every_reason_that_is_given_for_an_array_is_in_the_table() -> None:
    own = [path for path in ARRAYS if path.name not in ("dlpack.py", "lifetimes.py")]
    files = [*own, *(path for path in PACKAGE.glob("exchange/adapters/*.py") if path.name != "attached.py")]
    assert len(own) >= 11
    said = {reason for path in files for reason in reasons(path)}
    assert len(said) >= 30
    assert sorted(said - {reason for reason, _ in ROWS}) == []


def test_the_reasons_of_a_file_are_found(tmp_path: Path) -> None:
    (tmp_path / "refuses.py").write_text(
        'raise self.refusal(f"it lies on {x} " "and not here", "move it")\nObstacle("plain", y)\nother("not this")\n'
        'CannotShare(a, b, "third", "remedy")\nself.refusal(str(error), "unknown")\n'
    )
    assert list(reasons(tmp_path / "refuses.py")) == ["it lies on … and not here", "plain", "third"]


def test_the_signature_is_the_real_one() -> None:
    (shown,) = re.findall(r"^`exchange\.to\((.*)\)`$", TEXT, re.MULTILINE)
    real = [
        str(parameter.replace(annotation=inspect.Parameter.empty))
        for parameter in inspect.signature(exchange.to).parameters.values()
    ]
    assert [name.strip() for name in shown.split(",") if name.strip() != "*"] == real


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_examples_compile(number: int) -> None:
    compile(BLOCKS[number], f"docs/exchange.md, example {number}", "exec")


def test_the_budgets_are_valid() -> None:
    found = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    assert found
    for text in found:
        _budget.parse(text)


def test_every_claim_of_folklores_comes_with_an_example_of_what_is_right() -> None:
    claims = re.split(r'^\*\*"', TEXT.split("## What folklore gets wrong")[1], flags=re.MULTILINE)[1:]
    assert len(claims) >= 15
    assert [claim for claim in claims if not re.search(r"^```(python|yaml)$", claim, re.MULTILINE)] == []


def pages() -> str:
    """This page, and the one about processes."""
    return "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/exchange*.md"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_listed_and_says_how_it_is_run(example: Path) -> None:
    assert f"(../examples/{example.name})" in pages()
    about = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8")))
    assert about is not None and f"python examples/{example.name}" in about


def test_every_example_that_is_listed_exists() -> None:
    listed = set(re.findall(r"\(\.\./examples/(exchange_\w+\.py)\)", pages()))
    assert listed == {path.name for path in EXAMPLES} and len(listed) >= 5


def test_every_public_name_is_documented() -> None:
    assert [name for name in exchange.__all__ if not re.search(rf"\b{name}\b", pages())] == []


def test_the_readme_links_to_the_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "(docs/exchange.md)" in readme
    start = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    shown = [block for block in re.findall(r"```python\n(.*?)```", start, re.DOTALL) if "exchange.to(" in block]
    assert shown
    for block in shown:
        compile(block, "quickstart.md", "exec")

"""The structure of memguard/: each room has one rank, and nothing runs up, in no string either.

`lint-imports` checks the same contract for what is imported. Here are the strings too, circles within a room, names and
docstrings. `python tests/support/structure.py` prints rooms, arrows and circles.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from support import structure
from support.structure import Arrow, circles, room

import memguard

PACKAGE = Path(memguard.__file__).parent
MODULES = structure.modules(PACKAGE.parent)
ARROWS = structure.arrows(MODULES)

CIRCLES = {
    ("_tools.doctor", "_tools.doctor.render"): "a report renders itself",
}
"""Modules of one room that import each other, and why. What a table of a room names is loaded later: it closes none."""
OUTSIDE = "_tools/activation"
"""Modules here run before memguard can be imported: their names must not hide another package's."""


@cache
def contract() -> Mapping[str, Any]:
    """The contract `layers` of import-linter."""
    with (structure.HOME / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    return next(one for one in contracts if one["id"] == "layers")


def ranks() -> dict[str, int]:
    """Each room's rank, from 0 for the lowest."""
    lines = [line.split("|") for line in reversed(contract()["layers"])]
    return {name.strip(): rank for rank, line in enumerate(lines) for name in line}


def test_each_room_has_a_rank_and_each_rank_a_room() -> None:
    assert set(ranks()) == {room(name) for name in MODULES} - {""}
    assert contract()["exhaustive"], "lint-imports asks the same"
    shared = [line for line in contract()["layers"] if "|" in line]
    assert len(shared) == 1 and "cli" in shared[0], "only the public faces share one, of which none imports another"


def test_nothing_runs_up() -> None:
    """From no module to one of a room above: by an import anywhere, one for type checkers, or a string."""
    rank = ranks()
    up = [one for one in ARROWS if room(one.source) and rank[room(one.source)] < rank[room(one.target)]]
    listed = {tuple(line.split(" -> ")) for line in contract()["ignore_imports"]}
    assert [one for one in up if one[:2] not in listed] == []


def test_siblings_do_not_import_each_other() -> None:
    rank = ranks()
    beside = [one for one in ARROWS if room(one.source) and room(one.source) != room(one.target)]
    assert [one for one in beside if rank[room(one.source)] == rank[room(one.target)]] == []


def test_no_circle_within_a_room() -> None:
    known = [{f"memguard.{name}" for name in names} for names in CIRCLES]
    found = circles(one[:2] for one in ARROWS if room(one.source) == room(one.target) and not one.string)
    assert [sorted(circle) for circle in found if not any(circle <= names for names in known)] == []


def test_an_underscore_marks_the_rooms_alone() -> None:
    """At the top level it says that a name is not public. Below it no name needs one."""
    inner = [path.relative_to(PACKAGE) for path in MODULES.values()]
    named = [path for path in inner for part in path.with_suffix("").parts[1:] if part.startswith("_")]
    assert [
        path for path in named if path.name not in ("__init__.py", "__main__.py") and path.parent != Path(OUTSIDE)
    ] == []


def test_each_module_says_in_its_first_line_what_it_is() -> None:
    first = structure.first_lines(MODULES)
    assert {name: line for name, line in first.items() if not line.endswith((".", "?")) or len(line) > 120} == {}


def test_the_page_of_all_modules_is_up_to_date() -> None:
    lines = (structure.HOME / "docs" / "modules.md").read_text(encoding="utf-8").splitlines(keepends=True)
    start = f"{OUTSIDE}/_memguard_start.py"
    if not (PACKAGE / start).exists():  # a wheel installs it at the top of site-packages
        lines = [line for line in lines if f"`{start}`" not in line]
    assert "".join(lines) == structure.page(PACKAGE.parent), (
        "python tests/support/structure.py --page > docs/modules.md"
    )


def test_what_happens_when_names_what_is_there() -> None:
    """Each function of CONTRIBUTING's flows, after its file; a name alone in brackets is of the file before it."""
    text = (structure.HOME / "CONTRIBUTING.md").read_text(encoding="utf-8")
    flows = text.partition("## What happens when\n")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`(?:\s+`([\w.]+)`)?", flows)
    assert len(named) > 40 and flows.count("\n1. ") == 9
    missing = []
    for path, function in named:
        file = PACKAGE / path
        if not file.exists() or (function and function not in defined(file)):
            missing.append((path, function))
    assert missing == []


def defined(path: Path) -> set[str]:
    """The functions and classes of a file, and the methods as `Class.method`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = [one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
            found |= {f"{node.name}.{one.name}" for one in inner}
    return found


# the reader itself


def test_what_counts_as_an_arrow(tmp_path: Path) -> None:
    package = tmp_path / "memguard"
    for folder in ("_low", "_high"):
        (package / folder).mkdir(parents=True)
        (package / folder / "__init__.py").write_text('"""A room."""\n')
    (package / "__init__.py").write_text("")
    (package / "_high" / "one.py").write_text("name = 1\n")
    (package / "_low" / "module.py").write_text(
        '"""memguard._high.one"""\n'
        "from typing import TYPE_CHECKING\n"
        "import memguard\n"
        "if TYPE_CHECKING:\n"
        "    from memguard._high.one import name\n"
        "def lazy():\n"
        "    from memguard import _high\n"
        "table = {'key': 'memguard._high.one:name'}\n"
        "code = 'import sys; from memguard._high import one'\n"
        "message = 'call memguard._high.one() first', 'memguard._high.absent'\n"
    )
    known = structure.modules(tmp_path)
    low = "memguard._low.module"
    assert structure.arrows(known) == [
        Arrow(low, "memguard._high", 7, False),
        Arrow(low, "memguard._high.one", 5, False),
        Arrow(low, "memguard._high.one", 8, True),
        Arrow(low, "memguard._high.one", 9, True),
    ]


def test_what_counts_as_a_circle() -> None:
    assert circles([("a", "b"), ("b", "c"), ("c", "b"), ("d", "a")]) == [{"b", "c"}]
    assert circles([("a", "b"), ("b", "c")]) == []

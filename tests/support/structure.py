"""The structure of memguard/ as its imports show it: rooms, arrows and circles.

    python tests/support/structure.py [CHECKOUT]               prints them; the checkout is by default this one
    python tests/support/structure.py --page > docs/modules.md  every module with its first line

A room is a file or folder of memguard/ at its top level. An arrow A → B: a module of A imports one of B, anywhere in
its code, under `if TYPE_CHECKING:` too, or names it in a string from which it is imported. A circle: modules, or rooms,
that reach each other by arrows; a string within a room closes none. `import memguard` is no arrow: the package imports
nothing before a name of it is used.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

HOME = Path(__file__).parents[2]
_NAME = re.compile(r"(memguard(?:\.\w+)+)\.?(?::\w+)?")
_CODE = re.compile(r"\b(?:from (memguard[\w.]*) import (\w+)|import (memguard[\w.]+))")

_HEAD = """# Every module

The modules of `memguard/` by room, each with the first line of its docstring. `CONTRIBUTING.md` says what each room is
for, and what happens when. `python tests/support/structure.py --page > docs/modules.md` writes this page."""


class Arrow(NamedTuple):
    """`source` imports `target`: names of modules. `string`: it is named in a string."""

    source: str
    target: str
    line: int
    string: bool


def modules(home: Path = HOME) -> dict[str, Path]:
    """Every module by name; the pages that the frameworks are shown are none."""
    found = {}
    for path in sorted((home / "memguard").rglob("*.py")):
        parts = path.relative_to(home).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def first_lines(known: Mapping[str, Path]) -> dict[str, str]:
    """The first line of each module's docstring."""
    return {
        name: (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0] for name, path in known.items()
    }


def room(module: str) -> str:
    """`_devices` for `memguard._devices.nvml`."""
    return [*module.split("."), ""][1]


def arrows(known: Mapping[str, Path]) -> list[Arrow]:
    """All of them, but those of a module to itself and to the package."""
    found = {arrow for module, path in known.items() for arrow in _of(module, ast.parse(path.read_text()), known)}
    return sorted(arrow for arrow in found if arrow.target not in ("memguard", arrow.source))


def _of(module: str, tree: ast.Module, known: Mapping[str, Path]) -> Iterator[Arrow]:
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    texts |= {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Assign) and _is_home(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, False) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(f"{node.module}.{alias.name}", False) for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            names = [(name, True) for name in _named(node.value, known)]
        else:
            continue
        for name, string in names:
            if name.partition(".")[0] == "memguard":
                yield Arrow(module, _module(name, known), node.lineno, string)


def _is_home(node: ast.Assign) -> bool:
    return ast.unparse(node.targets[0]) == "__module__"


def _named(text: str, known: Mapping[str, Path]) -> Iterator[str]:
    """What a string names if it is a module's name, or that and an object's (`module:name`), or lines of code."""
    if (match := _NAME.fullmatch(text)) and match[1] in known:
        yield match[1]
    for match in _CODE.finditer(text):
        yield match[3] or f"{match[1]}.{match[2]}"


def _module(name: str, known: Mapping[str, Path]) -> str:
    while name not in known:
        name = name.rpartition(".")[0]
    return name


def circles(pairs: Iterable[tuple[str, str]]) -> list[set[str]]:
    """The sets of two names or more that reach each other, by Tarjan's algorithm."""
    after: dict[str, set[str]] = {}
    for source, target in pairs:
        after.setdefault(source, set()).add(target)
    found: list[set[str]] = []
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        stack.append(name)
        for other in sorted(after.get(name, ())):
            if other not in number:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], number[other])
        if lowest[name] == number[name]:
            circle = set(stack[stack.index(name) :])
            del stack[stack.index(name) :]
            if len(circle) > 1:
                found.append(circle)

    for name in sorted(after):
        if name not in number:
            visit(name)
    return found


def main(home: Path) -> None:
    known = modules(home)
    found = arrows(known)
    rooms = {(room(arrow.source), room(arrow.target)) for arrow in found}
    rooms = {(source, target) for source, target in rooms if source != target}
    print(f"{len({room(name) for name in known} - {''})} rooms, {len(rooms)} arrows between them")
    print(f"{len(known)} modules, {len({arrow[:2] for arrow in found})} arrows between them")
    for circle in circles(rooms):
        print("circle of rooms:", *sorted(circle))
    for circle in circles(one[:2] for one in found if not one.string or room(one.source) != room(one.target)):
        print("circle of modules:", *sorted(circle))


def page(home: Path = HOME) -> str:
    """`docs/modules.md`: the modules by room, each with its first line."""
    known = modules(home)
    lines = first_lines(known)
    rooms: dict[str, list[str]] = {}
    for name, path in known.items():
        where = path.relative_to(home / "memguard").as_posix()
        title = f"{where.partition('/')[0]}/" if "/" in where else "At the top level"
        rooms.setdefault(title, []).append(f"| `{where}` | {lines[name].replace('|', '&#124;')} |")
    parts = [
        f"## {title}\n\n| module | what it is |\n| --- | --- |\n" + "\n".join(rows) for title, rows in rooms.items()
    ]
    return "\n\n".join([_HEAD, *parts]) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--page"]:
        print(page(), end="")
    else:
        main(Path(sys.argv[1]) if sys.argv[1:] else HOME)

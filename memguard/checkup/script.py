"""Which modules a program imports, and in which order: read, never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from memguard.checkup.facts import Script

_MOST = 1 << 22


def read(path: str) -> Script:
    """The imports of a Python file: those of its top level in their order, then those inside of functions."""
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read(_MOST), path)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Script(path=path, error=f"{type(error).__name__}: {error}")
    later: list[ast.stmt] = []
    found = [*_imports(tree.body, later)]
    while later:  # what functions import, when they are called: no order can be known, so that of the text
        found += _imports(later.pop(0).body, later)  # type: ignore[attr-defined]
    first: dict[str, int] = {}
    for name, line in found:
        first.setdefault(name, line)
    return Script(path=path, imports=tuple(first.items()))


def _imports(body: list[ast.stmt], later: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and node.module:
                yield node.module, node.lineno
                yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names if alias.name != "*")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            later.append(node)
        elif not _of_types(node):
            for part in ("body", "handlers", "orelse", "finalbody", "cases"):
                for inner in getattr(node, part, ()):
                    yield from _imports(inner.body if not isinstance(inner, ast.stmt) else [inner], later)


def _of_types(node: ast.stmt) -> bool:
    """`if TYPE_CHECKING:`, which does not run."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")

"""The modules that a program imports, in order. The program is parsed, never run."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Iterator

from memguard._tools.doctor.bounds import printable
from memguard._tools.doctor.facts import Script

_LARGEST = 1 << 22
_IMPORTS = 4096


def read(path: str) -> Script:
    """The imports of a Python file: those at top level in order, then those inside functions."""
    try:
        found = _first_lines(_in_order(ast.parse(_text(path), path)))
    except (Exception, RecursionError, MemoryError) as error:  # the file may have any content
        message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return Script(path=printable(path), error=printable(f"{type(error).__name__}: {message}"))
    return Script(path=printable(path), imports=tuple((printable(name), line) for name, line in found))


def _text(path: str) -> bytes:
    # O_NONBLOCK: opening a FIFO without a writer must not wait for ever.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise OSError("it is not a regular file")
        text = file.read(_LARGEST + 1)
    if len(text) > _LARGEST:
        raise ValueError(f"larger than {_LARGEST >> 20} MiB: not read")
    return text


def _first_lines(found: Iterator[tuple[str, int]]) -> list[tuple[str, int]]:
    """Each module once, with the line of its first import."""
    first: dict[str, int] = {}
    for name, line in found:
        first.setdefault(name, line)
        if len(first) == _IMPORTS:
            break
    return list(first.items())


def _in_order(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Imports at module level, then those in functions, in the order of the text: when functions run is unknown."""
    later: list[ast.stmt] = []
    yield from _imports(tree.body, later)
    for function in later:  # `_imports` appends nested functions
        yield from _imports(function.body, later)  # type: ignore[attr-defined]


def _imports(body: list[ast.stmt], later: list[ast.stmt]) -> Iterator[tuple[str, int]]:
    waiting: list[ast.AST] = [*reversed(body)]  # no recursion: each `elif` is nested in the previous one
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and node.module:
                yield node.module, node.lineno
                yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names if alias.name != "*")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            later.append(node)
        elif not _is_type_checking(node):
            parts = ("body", "handlers", "orelse", "finalbody", "cases")
            waiting += [inner for part in parts for inner in getattr(node, part, ())][::-1]


def _is_type_checking(node: ast.AST) -> bool:
    """Whether the node is `if TYPE_CHECKING:`, which does not run."""
    test = node.test if isinstance(node, ast.If) else None
    if isinstance(test, ast.Attribute) and isinstance(test.value, ast.Name):
        return (test.value.id, test.attr) == ("typing", "TYPE_CHECKING")
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"

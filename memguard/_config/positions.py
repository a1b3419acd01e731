"""YAML text as plain values, with the line and column of every key and value.

Only PyYAML's parser is used, never a constructor: nothing in a file can make an object. The events are read in a
loop with a bound on depth and on nodes (aliases count as what they stand for), so no input can exhaust the stack or
the memory. Plain scalars mean what they look like: `true` and `false`, decimal whole numbers, nothing; everything
else is text, so YAML 1.1's `on`, `1:30`, `1_000` and `017` reach the validators as they were written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import yaml
from yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
)

from memguard._config.document import MAX_DEPTH, MAX_NODES, Document, Mark, Path, encodable
from memguard._config.syntax import explain
from memguard._units import short
from memguard.errors import Problem

MAX_BYTES = 1 << 20
Value: TypeAlias = bool | int | str | None

TOO_LARGE = Problem("larger than 1 MiB: not a budget", "check that this is the file you mean", 1, 1)

_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_WORDS: dict[str, Value] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


@dataclass
class _Node:
    kind: str
    mark: Mark
    value: Value = None
    text: str = ""
    plain: bool = False
    bad: bool = False
    open: bool = False
    items: list[tuple[_Node | None, _Node]] = field(default_factory=list)
    key: _Node | None = None
    size: int = 1
    height: int = 0

    def add(self, child: _Node) -> None:
        self.size += child.size
        self.height = max(self.height, child.height + 1)
        if self.kind == "list":
            self.items.append((None, child))
        elif self.key is None:
            self.key = child
        else:
            self.items.append((self.key, child))
            self.key = None


class Unreadable(Exception):
    """Reading cannot go on: the problem is the reason."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def decode(raw: bytes) -> str:
    """The text of a file. Raises Unreadable."""
    if not isinstance(raw, (bytes, bytearray)):
        raise Unreadable(Problem(f"a budget is text, found {short(raw)}", "give the text of the file"))
    if len(raw) > MAX_BYTES:
        raise Unreadable(TOO_LARGE)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8", "replace")
        found = "UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else f"found the byte 0x{raw[error.start]:02x}"
        raise Unreadable(_problem(f"not UTF-8 text ({found})", "save the file as UTF-8", _position(before))) from None


def read(text: str) -> Document:
    """The document in `text`, with every problem of its form. Raises nothing."""
    document = Document(values={(): (1, 1)})
    if len(text) > MAX_BYTES:
        document.problems.append(TOO_LARGE)
        document.bad.add(())
        return document
    try:
        root = _compose(text, document.problems)
    except Unreadable as stop:
        document.problems.append(stop.problem)
        document.bad.add(())
        return document
    if root is not None:
        document.data = _plain(root, (), document)
    document.problems = list(dict.fromkeys(document.problems))  # an alias repeats those of its anchor
    return document


def _events(text: str) -> Iterator[Event]:
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        line, column = _position(text[: error.position])
        message = f"the character U+{ord(text[error.position]):04X} is not allowed in YAML"
        raise Unreadable(Problem(message, "delete it", line, column)) from None
    try:
        while loader.check_event():
            yield cast("Event", loader.get_event())  # type: ignore[no-untyped-call]
    except yaml.YAMLError as error:
        raise Unreadable(explain(error)) from None
    except Exception as error:
        # PyYAML lets others out, for example ValueError from chr() for "\UFFFFFFFF".
        mark = loader.get_mark()
        name = type(error).__name__
        message = f"this is not valid YAML ({name} while reading it)"
        raise Unreadable(Problem(message, "check the escapes on this line", mark.line + 1, mark.column + 1)) from None
    finally:
        loader.dispose()


def _compose(text: str, problems: list[Problem]) -> _Node | None:
    root: _Node | None = None
    stack: list[_Node] = []
    anchors: dict[str, _Node] = {}
    documents = nodes = 0
    for event in _events(text):
        if isinstance(event, DocumentStartEvent):
            documents += 1
            if documents > 1:
                fix = "keep one document: remove this '---' and what does not belong to the budget"
                problems.append(_problem("a second YAML document starts here", fix, _mark(event)))
                break
            continue
        if isinstance(event, CollectionEndEvent):
            node = stack.pop()
            node.open = False
        elif isinstance(event, AliasEvent):
            node = _resolve(event, anchors)
            nodes += node.size
        elif isinstance(event, NodeEvent):
            node = _node(event, problems)
            nodes += 1
            if event.anchor is not None:
                anchors[event.anchor] = node
        else:
            continue
        if nodes > MAX_NODES:
            fix = "a budget needs a few dozen at most; check for aliases that repeat aliases"
            raise Unreadable(
                _problem(f"more than {MAX_NODES:,} values, aliases counted as what they repeat", fix, _mark(event))
            )
        if len(stack) + node.height > MAX_DEPTH or (node.open and len(stack) >= MAX_DEPTH):
            raise Unreadable(_problem(f"nested deeper than {MAX_DEPTH} levels", "a budget needs 3", _mark(event)))
        if node.open:
            stack.append(node)
        elif stack:
            stack[-1].add(node)
        root = root or node
    return root


def _node(event: Event, problems: list[Problem]) -> _Node:
    mark = _mark(event)
    tag = getattr(event, "tag", None)
    if tag is not None:
        shown = tag.replace("tag:yaml.org,2002:", "!!")
        problems.append(_problem(f"the YAML tag {shown[:40]!r} is not allowed", "remove the tag", mark))
    if isinstance(event, ScalarEvent):
        text, plain = event.value, event.style is None
        if not encodable(text):
            problems.append(_problem("an escape stands for half a character (a surrogate)", "correct it", mark))
            return _Node("scalar", mark, bad=True)
        return _Node("scalar", mark, _value(text) if plain else text, text, plain, bad=tag is not None)
    assert isinstance(event, CollectionStartEvent)
    return _Node("mapping" if isinstance(event, MappingStartEvent) else "list", mark, open=True)


def _value(text: str) -> Value:
    if text in _WORDS:
        return _WORDS[text]
    return int(text) if _INT.fullmatch(text) else text


def _resolve(event: AliasEvent, anchors: dict[str, _Node]) -> _Node:
    name = str(event.anchor)
    node = anchors.get(name)
    if node is None:
        message = f"'*{name[:40]}' repeats something named '&{name[:40]}', which is nowhere above"
        raise Unreadable(_problem(message, "put a name pattern that begins with * in quotes", _mark(event)))
    if node.open:
        raise Unreadable(_problem(f"'*{name[:40]}' contains itself", "write the values out", _mark(event)))
    return node


def _plain(node: _Node, path: Path, document: Document) -> object:
    document.values[path] = node.mark
    if node.bad:
        document.bad.add(path)
    if node.kind == "scalar":
        return node.value
    if node.kind == "list":
        return [_plain(child, (*path, index), document) for index, (_, child) in enumerate(node.items)]
    found: dict[str, object] = {}
    for key, child in node.items:
        assert key is not None
        at = (*path, key.text)
        problem = _wrong_key(key)
        if problem is None and key.text in found:
            first = document.keys[at] or key.mark
            where = f": in line {first[0]} and here" if first[0] != key.mark[0] else " in this line"
            problem = _problem(f"{short(key.text)} is given twice{where}", "keep one of them", key.mark)
        if problem is not None:
            document.problems.append(problem)
        elif not key.bad:
            document.keys[at] = key.mark
            found[key.text] = _plain(child, at, document)
    return found


def _wrong_key(key: _Node) -> Problem | None:
    if key.kind != "scalar":
        return _problem(f"a key must be one word, found a {key.kind}", "write 'key: value'", key.mark)
    if key.plain and key.text == "<<":
        return _problem("merge keys (<<) are not read in a budget", "write the keys out", key.mark)
    if not key.text and not key.bad:
        return _problem("a key is missing before ':'", "write 'key: value'", key.mark)
    return None


def _mark(event: Event) -> Mark:
    mark = event.start_mark
    return (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)


def _position(before: str) -> Mark:
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


def _problem(message: str, fix: str, mark: Mark) -> Problem:
    return Problem(message, fix, *mark)

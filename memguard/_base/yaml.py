"""Parse YAML text to plain values; compute the line and column of each key and value on request.

PyYAML only composes nodes and constructs no objects, so a file cannot create arbitrary Python objects. Composition
limits the depth and the number of nodes (an alias counts as the nodes that it repeats), so no input can exhaust the
stack or the memory. Only unquoted `true`, `false`, decimal whole numbers and null are converted; every other scalar
stays text, so YAML 1.1's `on`, `1:30`, `1_000` and `017` reach the validators unchanged.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from memguard._base.advice import Problem
from memguard._base.source_map import (
    MAX_DEPTH,
    MAX_NODES,
    MAX_TEXT,
    Document,
    Loc,
    Mark,
    Places,
    encodable,
    too_long,
)
from memguard._base.units import short

MAX_BYTES = 1 << 20
TOO_LARGE = Problem("larger than 1 MiB: not a budget", "check that this is the file you mean", 1, 1)
_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


class Unreadable(Exception):
    """Raised if parsing cannot continue; holds the problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


def decode(raw: bytes | str) -> str:
    """Decode the bytes of a file to text. Raises Unreadable if they are too many or not UTF-8."""
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, (bytes, bytearray)):
        raise Unreadable(Problem(f"a budget is text, found {short(raw)}", "give the text of the file"))
    if len(raw) > MAX_BYTES:
        raise Unreadable(TOO_LARGE)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8", "replace")
        found = "UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else f"found the byte 0x{raw[error.start]:02x}"
        raise Unreadable(Problem(f"not UTF-8 text ({found})", "save the file as UTF-8", *_end(before))) from None


def read(raw: bytes | str) -> Document:
    """Parse text, or bytes of UTF-8, to a document with every syntax problem. Raises nothing."""
    try:
        text = decode(raw)
        if len(text) > MAX_BYTES:
            raise Unreadable(TOO_LARGE)
        root, composer = _compose(text)
    except Unreadable as stop:
        document = Document("", [stop.problem], {()})
        document.find = partial(_places, None, set())
        return document
    document = Document(text, composer.problems)
    document.reader = read
    document.find = partial(_places, root, composer.bad)
    if root is not None:
        document.data = _plain(root, (), document, composer.bad)
    document.problems = list(dict.fromkeys(document.problems))  # each alias reports its anchor's problems again
    return document


class _Composer(yaml.SafeLoader):
    """Composes nodes, limits their depth and number, and collects in `bad` the ids of nodes with forbidden content."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.problems: list[Problem] = []
        self.bad: set[int] = set()
        self._sizes: dict[int, tuple[int, int]] = {}  # node count and depth of each anchored subtree, by `id(node)`
        self._nodes = self._depth = self._deepest = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        is_alias, is_scalar = isinstance(event, yaml.AliasEvent), isinstance(event, yaml.ScalarEvent)
        nodes, levels = self._repeated(event) if is_alias else (1, int(not is_scalar))
        self._nodes += nodes
        if self._nodes > MAX_NODES:
            fix = "a budget needs a few dozen at most; check for aliases that repeat aliases"
            message = f"more than {MAX_NODES:,} values, aliases counted as what they repeat"
            raise Unreadable(Problem(message, fix, *_mark(event.start_mark)))
        if self._depth + levels > MAX_DEPTH:
            message = f"nested deeper than {MAX_DEPTH} levels"
            raise Unreadable(Problem(message, "a budget needs 3", *_mark(event.start_mark)))
        if is_alias:
            self._deepest = max(self._deepest, self._depth + levels)
            return super().compose_node(parent, index)
        if event.anchor is not None:
            self.anchors.pop(event.anchor, None)  # YAML allows an anchor to be redefined; PyYAML does not
        before, deepest, self._deepest = self._nodes - nodes, self._deepest, self._depth + levels
        self._depth += 1
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None:
            self._sizes[id(node)] = self._nodes - before, self._deepest - self._depth
        self._deepest = max(self._deepest, deepest)
        if event.tag is not None or (is_scalar and (len(event.value) > MAX_TEXT or not event.value.isascii())):
            self._note(node, event.tag, _mark(event.start_mark))
        return node

    def _repeated(self, event: Any) -> tuple[int, int]:
        """Node count and depth of the anchored subtree that an alias repeats."""
        name = event.anchor[:40]
        node = self.anchors.get(event.anchor)
        if node is None:
            message = f"'*{name}' repeats something named '&{name}', which is nowhere above"
            fix = "put a name pattern that begins with * in quotes"
            raise Unreadable(Problem(message, fix, *_mark(event.start_mark)))
        if id(node) not in self._sizes:
            raise Unreadable(Problem(f"'*{name}' contains itself", "write the values out", *_mark(event.start_mark)))
        return self._sizes[id(node)]

    def _note(self, node: Node, tag: str | None, mark: Mark) -> None:
        if tag is not None:
            shown = tag.replace("tag:yaml.org,2002:", "!!")[:40]
            self.problems.append(Problem(f"the YAML tag {shown!r} is not allowed", "remove the tag", *mark))
        half = isinstance(node, ScalarNode) and not encodable(node.value)
        if half:
            self.problems.append(Problem("an escape stands for half a character (a surrogate)", "correct it", *mark))
        if isinstance(node, ScalarNode) and len(node.value) > MAX_TEXT:
            self.problems.append(too_long(node.value, "text", *mark))
            self.bad.add(id(node))
        if half or (tag is not None and isinstance(node, ScalarNode)):
            self.bad.add(id(node))


def _compose(text: str) -> tuple[Node | None, _Composer]:
    """Compose the first document. Returns its root node (None if empty) and the composer; raises Unreadable."""
    try:
        composer = _Composer(text)
    except yaml.reader.ReaderError as error:
        message = f"the character U+{ord(text[error.position]):04X} is not allowed in YAML"
        raise Unreadable(Problem(message, "delete it", *_end(text[: error.position]))) from None
    try:
        root = composer.get_node() if composer.check_node() else None
        if composer.check_node():
            mark = _mark(composer.peek_event().start_mark)  # type: ignore[no-untyped-call]
            fix = "keep one document: remove this '---' and what does not belong to the budget"
            composer.problems.append(Problem("a second YAML document starts here", fix, *mark))
        return root, composer
    except yaml.MarkedYAMLError as error:
        raise Unreadable(_syntax(error, text)) from None
    except Unreadable:
        raise
    except Exception as error:
        # PyYAML raises other errors too, for example ValueError from chr() for "\UFFFFFFFF".
        mark = _mark(composer.get_mark())
        message = f"this is not valid YAML ({type(error).__name__} while reading it)"
        raise Unreadable(Problem(message, "check the escapes on this line", *mark)) from None
    finally:
        composer.dispose()


_ALIGN = "align this line with the keys beside it, or remove what does not belong to it"


def _syntax(error: yaml.MarkedYAMLError, text: str) -> Problem:
    """Infer cause and fix from the characters at PyYAML's context and problem marks; else quote PyYAML's message."""
    stop = error.problem_mark or error.context_mark
    began = error.context_mark or stop
    assert stop is not None and began is not None
    first, last = text[began.index : began.index + 1], text[stop.index : stop.index + 1]
    line = re.split(r"[\r\n\x85\u2028\u2029]", text[began.index :], maxsplit=1)[0]
    said = ": ".join(part for part in (error.context, error.problem) if part)[:120]
    at, cause, fix = stop, f"this is not valid YAML: {said}", _ALIGN
    if first in ("'", '"') and not last:
        at, cause, fix = began, "this quote is never closed", "add the closing quote"
    elif first == '"':
        cause, fix = "an unknown escape after a backslash", "use single quotes, or write each backslash twice"
    elif first in ("[", "{"):
        cause = f"a ',' or the end of the '{first}' of line {began.line + 1} is missing before this"
        fix = f"separate the entries with ',' and close the '{first}' of line {began.line + 1}"
    elif last == "\t":
        cause, fix = "a tab, where YAML allows only spaces", "replace the tab by spaces"
    elif last == "%" and stop.column:
        cause, fix = "a value cannot start with '%'", "write the number first, as in 50%"
    elif began.index < stop.index and not re.search(r":(\s|$)", line):
        at, cause, fix = began, "this line is not 'key: value'", "write 'key: value' with a space after the colon"
    elif not last:
        cause, fix = "the file ends inside a bracket", "close the bracket that is still open"
    elif last == ":":
        cause = "a ':' where no key can stand"
        fix = "write 'key: value', aligned with the keys beside it, or put text with ': ' in quotes"
    elif first in ("*", "&") or last in ("@", "`"):
        cause = f"text cannot start with '{first if first in ('*', '&') else last}'"
        fix = "put text that begins with this character in quotes"
    elif stop.column and began.line < stop.line:
        cause, fix = "this line does not fit the lines above it", _ALIGN
    return Problem(cause, fix, *_mark(at))


def _plain(node: Node, path: Loc, document: Document, bad: set[int]) -> object:
    if isinstance(node, ScalarNode):
        if bad and id(node) in bad:
            document.bad.add(path)
        text: str = node.value
        if node.style is not None or (text not in _WORDS and not _INT.fullmatch(text)):
            return text
        return _WORDS[text] if text in _WORDS else int(text)
    if isinstance(node, SequenceNode):
        return [_plain(child, (*path, index), document, bad) for index, child in enumerate(node.value)]
    found: dict[str, object] = {}
    first: dict[str, Node] = {}
    for key, child in node.value:
        word = isinstance(key, ScalarNode) and key.value not in ("", "<<")
        problem = None if word else _wrong_key(key, bad)
        if problem is None and key.value in found:
            line, here = first[key.value].start_mark.line, key.start_mark.line
            where = f": in line {line + 1} and here" if line != here else " in this line"
            problem = f"{short(key.value)} is given twice{where}", "keep one of them"
        if problem is not None:
            document.problems.append(Problem(*problem, *_mark(key.start_mark)))
        elif id(key) not in bad:
            first[key.value] = key
            found[key.value] = _plain(child, (*path, key.value), document, bad)
    return found


def _places(root: Node | None, bad: set[int]) -> Places:
    """Line and column of each key and value that `_plain` puts into the document. An aliased value has the position of
    its anchor."""
    keys: dict[Loc, Mark | None] = {}
    values: dict[Loc, Mark | None] = {(): (1, 1)}

    def walk(node: Node, path: Loc) -> None:
        values[path] = _mark(node.start_mark)
        if isinstance(node, SequenceNode):
            for index, child in enumerate(node.value):
                walk(child, (*path, index))
        elif isinstance(node, MappingNode):
            for key, child in node.value:
                if _wrong_key(key, bad) is None and id(key) not in bad and (at := (*path, key.value)) not in keys:
                    keys[at] = _mark(key.start_mark)
                    walk(child, at)

    if root is not None:
        walk(root, ())
    return keys, values


def _wrong_key(key: Node, bad: set[int]) -> tuple[str, str] | None:
    if not isinstance(key, ScalarNode):
        found = "mapping" if isinstance(key, MappingNode) else "list"
        return f"a key must be one word, found a {found}", "write 'key: value'"
    if key.style is None and key.value == "<<":
        return "merge keys (<<) are not read in a budget", "write the keys out"
    if not key.value and id(key) not in bad:
        return "a key is missing before ':'", "write 'key: value'"
    return None


def _mark(mark: yaml.Mark) -> Mark:
    return mark.line + 1, mark.column + 1


def _end(before: str) -> Mark:
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1

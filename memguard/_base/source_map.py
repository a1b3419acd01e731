"""A budget document as plain values (mappings, lists, text, whole numbers, true, false, null), and their positions.

`yaml._places` computes the positions, and `problems` looks up the position of a wrong value. The positions are computed
only when an error needs them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import cached_property

from memguard._base.advice import Problem
from memguard._base.units import short

MAX_DEPTH = 16
MAX_NODES = 10_000
MAX_TEXT = 4096
"""The maximum length of a key or value: longer than any valid path, name or number."""
MAX_BITS = 1 << 17
"""The maximum number of bits of a whole number in a Python mapping: a larger number is slow to print."""

Mark = tuple[int, int]
"""Line and column, both counted from 1."""
Loc = tuple[str | int, ...]
"""The path of a value: keys and indexes."""
Places = tuple[dict[Loc, Mark | None], dict[Loc, Mark | None]]
"""Two mappings in file order: the position of each key, and of each value. A position is None without a text."""


class Document:
    """One document as plain values, and its syntax problems.

    `text` is None for a document made from Python values. `bad` holds the paths of values whose problems, and
    those of nested values, are already in `problems`.
    """

    def __init__(
        self, text: str | None = None, problems: list[Problem] | None = None, bad: set[Loc] | None = None
    ) -> None:
        self.data: object = None
        self.text = text
        self.nodes = 0
        self.problems = [] if problems is None else problems
        self.bad = set() if bad is None else bad
        self.find: Callable[[], Places] = self._without_marks
        self.reader: Callable[[str], Document] | None = None
        """Parses `text` again to compute positions."""

    @cached_property
    def _places(self) -> Places:
        return self.find()

    @property
    def keys(self) -> dict[Loc, Mark | None]:
        """Line and column of each key."""
        return self._places[0]

    @property
    def values(self) -> dict[Loc, Mark | None]:
        """Line and column of each value."""
        return self._places[1]

    def _without_marks(self) -> Places:
        keys: dict[Loc, Mark | None] = {}
        values: dict[Loc, Mark | None] = {}

        def walk(value: object, loc: Loc) -> None:
            values[loc] = None
            if isinstance(value, dict):
                keys.update(((*loc, key), None) for key in value)
            children = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
            for part, child in children:
                walk(child, (*loc, part))

        walk(self.data, ())
        return keys, values


class Opaque:
    """A placeholder for a Python object that no budget can hold; its repr is only the type."""

    def __init__(self, value: object) -> None:
        self._shown = f"<{type(value).__name__[:40]}>"

    def __repr__(self) -> str:
        return self._shown


def of_mapping(mapping: object) -> Document:
    """Convert a Python mapping to a document without positions. Never raises."""
    document = Document()
    try:
        document.data = _plain(mapping, (), document)
        if document.nodes > MAX_NODES:
            raise OverflowError
        return document
    except Exception as error:  # the methods of a foreign mapping class may raise anything
        problem = Problem(f"the mapping cannot be read ({type(error).__name__})", "give plain dicts, text and numbers")
        return Document(problems=[problem], bad={()})


def _plain(value: object, path: Loc, document: Document) -> object:
    document.nodes += 1
    if document.nodes > MAX_NODES or len(path) > MAX_DEPTH:
        raise OverflowError
    if isinstance(value, Mapping):
        found: dict[str, object] = {}
        for number, (key, child) in enumerate(value.items()):
            if number > MAX_NODES:
                raise OverflowError
            if isinstance(key, str) and len(key) > MAX_TEXT:
                document.problems.append(too_long(key, "key"))
                continue
            name = key if type(key) is str and key.isascii() else _key(key)
            if name is None or name in found:
                message = f"{short(key)} is given twice" if name else f"a key must be text, found {short(key)}"
                document.problems.append(Problem(message, "keep one of them" if name else "write the key as text"))
            elif type(child) is str and child.isascii() and len(child) <= MAX_TEXT:
                document.nodes += 1  # without a recursive call, because short ASCII text is the most frequent value
                found[name] = child
            else:
                found[name] = _plain(child, (*path, name), document)
        return found
    if isinstance(value, (list, tuple)):
        return [_plain(child, (*path, index), document) for index, child in enumerate(value)]
    if isinstance(value, str):
        text = str.__str__(value)
        if len(text) > MAX_TEXT:
            document.problems.append(too_long(text, "value"))
            document.bad.add(path)
            return Opaque(value)
        return text if text.isascii() or encodable(text) else Opaque(value)
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, (int, Fraction)):
        large = max(int.bit_length(int(value.numerator)), int.bit_length(int(value.denominator))) > MAX_BITS
        return Opaque(value) if large else value
    return Opaque(value)


def too_long(text: str, what: str, line: int | None = None, column: int | None = None) -> Problem:
    """The problem for a key or value longer than `MAX_TEXT`."""
    message = f"this {what} has {len(text):,} characters; {MAX_TEXT:,} are the most: {short(text[:60])}"
    return Problem(message, "shorten it; check that this is the file you mean", line, column)


def _key(key: object) -> str | None:
    if isinstance(key, int) and not isinstance(key, bool) and 0 <= key < MAX_NODES:
        return str(int(key))
    return str.__str__(key) if isinstance(key, str) and encodable(key) else None


def encodable(text: str) -> bool:
    """True if the text can be encoded as UTF-8. Lone surrogates cannot."""
    return text.isascii() or not re.search("[\ud800-\udfff]", text)


class Origin:
    """The positions of a budget's values, for problems found after parsing.

    All origins compare equal, so that budgets with the same values are equal even if read from different files.
    `source` names the file in messages, and is "" for a budget made from plain Python values. `device_key` normalises
    the key of a GPU: `cuda:0` to `0`.
    """

    def __init__(
        self, source: str = "", document: Document | None = None, device_key: Callable[[str], str] = str
    ) -> None:
        self.source, self._device_key = source, device_key
        # Keep the text, which is smaller than the document. Problems found after parsing are rare; to locate one,
        # memguard parses the text again.
        self._text, self._reader = (None, None) if document is None else (document.text, document.reader)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return hash(Origin)

    def problem(self, loc: Loc, message: str, fix: str) -> Problem:
        """A problem with the value at `loc`. If the file omits the value, the problem has the line of the nearest
        parent key."""
        marks = self._marks()
        line, column = marks.get(nearest(loc, marks)) or (None, None)
        return Problem(message, fix, line, column, path(loc))

    def _marks(self) -> dict[Loc, Mark]:
        """Line and column by path in the validated budget. A mapping or list has the position of its key, any other
        value its own position."""
        if self._text is None or self._reader is None:
            return {}
        document = self._reader(self._text)
        parents = {loc[:-1] for loc in document.values}
        marks = document.values | {loc: mark for loc, mark in document.keys.items() if loc in parents}
        return {self._canonical(loc): mark for loc, mark in marks.items() if loc and mark}

    def _canonical(self, loc: Loc) -> Loc:
        """Convert a path in the document to the path in the validated budget, which normalises the keys of GPUs."""
        of_device = len(loc) > 1 and loc[0] == "devices"
        return ("devices", self._device_key(str(loc[1])), *loc[2:]) if of_device else loc


def in_order(unordered: Iterable[Problem]) -> list[Problem]:
    """Sort problems by line and column; problems without a position come first, in their given order."""
    return sorted(unordered, key=lambda problem: (problem.line or 0, problem.column or 0))


def nearest(loc: Loc, marks: Mapping[Loc, object]) -> Loc:
    """Return `loc` if it is in `marks`, else the nearest parent path in `marks`, or ()."""
    while loc and loc not in marks:
        loc = loc[:-1]
    return loc


def path(loc: Loc) -> str:
    """Format a path for messages: `frameworks.torch.share`."""
    text = ""
    for part in loc:
        plain = isinstance(part, str) and re.fullmatch(r"[^\W\d]\w{0,39}", part)
        text += (f".{part}" if text else str(part)) if plain else f"[{short(part)}]"
    return text

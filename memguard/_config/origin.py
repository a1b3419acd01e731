"""Where a budget was written: the line and column of each of its keys and values, for problems that are found later."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from memguard._config.document import Document, Loc, Mark
from memguard._config.values import device_key
from memguard._units import short
from memguard.errors import Problem


class Origin:
    """Where a budget was written. All origins are equal, so that equal budgets may come from different files.

    `source` names the text in messages, and is "" if the budget was made of plain Python values.
    """

    def __init__(self, source: str = "", marks: Mapping[Loc, Mark] | None = None) -> None:
        self.source, self.marks = source, marks or {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return hash(Origin)

    def problem(self, loc: Loc, message: str, fix: str) -> Problem:
        """A problem with what is at `loc`. If nothing is written there, its line is that of the nearest key above."""
        line, column = self.marks.get(nearest(loc, self.marks)) or (None, None)
        return Problem(message, fix, line, column, path(loc))


def origin(document: Document, source: str) -> Origin:
    """Where a checked budget was written: a mapping at its key, a value where it stands itself."""
    parents = {loc[:-1] for loc in document.values}
    marks = document.values | {loc: mark for loc, mark in document.keys.items() if loc in parents}
    written = source if document.values.get(()) else ""
    return Origin(written, {_canonical(loc): mark for loc, mark in marks.items() if loc and mark})


def _canonical(loc: Loc) -> Loc:
    """As the checked budget has it: `cuda:0` is `0` there."""
    return ("devices", device_key(str(loc[1])), *loc[2:]) if len(loc) > 1 and loc[0] == "devices" else loc


def in_order(unordered: Iterable[Problem]) -> list[Problem]:
    """By line and column; in their old order if there is no file."""
    return sorted(unordered, key=lambda problem: (problem.line or 0, problem.column or 0))


def nearest(loc: Loc, marks: Mapping[Loc, object]) -> Loc:
    """The place itself, or the nearest one above it that has a mark."""
    while loc and loc not in marks:
        loc = loc[:-1]
    return loc


def path(loc: Loc) -> str:
    """A place as a message names it: `frameworks.torch.share`."""
    text = ""
    for part in loc:
        plain = isinstance(part, str) and re.fullmatch(r"[^\W\d]\w{0,39}", part)
        text += (f".{part}" if text else str(part)) if plain else f"[{short(part)}]"
    return text

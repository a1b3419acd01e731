"""The values of the database's rows, checked: SQLite enforces no types in a file that is damaged or was edited.

By hand, not by pydantic: the helper of a suspension runs without site-packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from memguard._base.units import MAX_SIZE, short

Check = Callable[[Any], bool]
_LONGEST = 1000
"""Characters of a text. What memguard writes is shorter."""


class DamageError(ValueError):
    """A row that memguard would not have written."""


def number(value: Any) -> bool:
    """A row's own number, a PID, or what a process counts; below the bytes of processes in the file of locks."""
    return type(value) is int and 0 <= value < 1 << 40


def start(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_SIZE


def text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST


def seconds(value: Any) -> bool:
    """Also a Unix time."""
    return type(value) in (int, float) and 0 <= value < 1 << 40


def state(value: Any) -> bool:
    return value in ("waiting", "held", "off")


def maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def checked(rows: Iterable[tuple[Any, ...]], *columns: Check) -> list[tuple[Any, ...]]:
    """The rows, if each value is of its column's type. Raises DamageError."""
    found = list(rows)
    for row in found:
        for value, right in zip(row, columns, strict=True):
            if not right(value):
                raise DamageError(f"a row has {short(value)}")
    return found

"""How large facts may be: those that are gathered are cut to it, those in a file that are larger are refused.

The checks look at texts with patterns, and at entries pair by pair: a file that somebody else made shall not keep
them busy.
"""

from __future__ import annotations

import math
from typing import Any, Final

TEXT: Final = 16 << 20
"""Bytes of a file of facts."""
_LONG, _MANY, _LARGE, _DEEP = 4000, 4096, 1 << 64, 16
"""Characters of a text, entries of a list or an object, a number, and how many of them may be in each other."""
_LINE = 600
"""Characters of a line that a process said."""
_FEWER = {
    "said": 400, "devices": 128, "peers": 128, "frameworks": 16, "together": 16, "stages": 64, "libraries": 256,
    "missing": 64, "modules": 64, "candidates": 128, "processes": 1024,
}  # fmt: skip
"""Entries of what the checks look at again and again, by its name in `Facts`."""


def printable(text: str) -> str:
    """As it can be written to a file: bytes of a path or a variable that are no text, as `\\udcff`."""
    return text.encode("utf-8", "backslashreplace").decode()


def clip(value: Any, name: str = "", deep: int = 0) -> Any:
    """The same plain data within the bounds; None for numbers that measure nothing, and for what is too deep."""
    if isinstance(value, str):
        value = printable(value) if not value.isascii() else value
        half = (_LONG - 3) // 2
        return value if len(value) <= _LONG else f"{value[:half]} … {value[-half:]}"
    if isinstance(value, (int, float)):
        return value if _measures(value) else None
    if deep == _DEEP:
        return None
    if isinstance(value, dict):
        entries = list(value.items())[: _FEWER.get(name, _MANY)]
        return {clip(str(key)): clip(item, str(key), deep + 1) for key, item in entries}
    if isinstance(value, (list, tuple)):
        items = [clip(item, "", deep + 1) for item in value[: _FEWER.get(name, _MANY)]]
        return [item[:_LINE] if isinstance(item, str) else item for item in items] if name == "said" else items
    return value


def outside(facts: Any) -> str | None:
    """What of plain data is out of bounds, and where; None where all is within."""
    waiting: list[tuple[str, Any]] = [("", facts)]
    while waiting:
        where, value = waiting.pop()
        wrong = _wrong(where.rpartition(".")[2], value)
        if wrong is not None:
            return f"{where}: {wrong}" if where else wrong
        if isinstance(value, dict):
            for key, item in value.items():
                if len(key) > _LONG:
                    return f"{where or 'facts'}: a name of more than {_LONG} characters"
                waiting.append((f"{where}.{key}" if where else key, item))
        elif isinstance(value, list):
            waiting += [(f"{where}.{index}", item) for index, item in enumerate(value)]
    return None


def _wrong(name: str, value: Any) -> str | None:
    if isinstance(value, str) and len(value) > _LONG:
        return f"more than {_LONG} characters"
    most = _FEWER.get(name, _MANY)
    if isinstance(value, (dict, list)) and len(value) > most:
        return f"more than {most} entries"
    if isinstance(value, (int, float)) and not _measures(value):
        return "no size, time or count: below 0, or beyond all measure"
    said = value if name == "said" and isinstance(value, list) else ()
    if any(isinstance(line, str) and len(line) > _LINE for line in said):
        return f"a line of more than {_LINE} characters"
    return None


def _measures(number: float) -> bool:
    return math.isfinite(number) and 0 <= number < _LARGE

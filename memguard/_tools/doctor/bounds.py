"""Size limits for facts. Collected facts are cut to the limits; a file beyond them is refused.

The checks search texts with patterns and compare entries in pairs, so a file without limits could occupy them for ever.
"""

from __future__ import annotations

import math
from typing import Any, Final

TEXT: Final = 16 << 20
"""The largest facts file, in bytes; a real one has about 50 thousand."""
_LONG, _MANY, _LARGE, _DEEP = 4000, 4096, 1 << 64, 16
"""Limits: characters of a text, entries of a list or object, numbers, depth of nesting."""
_LINE = 600
"""The longest line of stderr, in characters."""
_LIMITS_BY_FIELD = {
    "said": 400, "devices": 128, "peers": 128, "frameworks": 16, "together": 16, "stages": 64, "libraries": 256,
    "missing": 64, "modules": 64, "candidates": 128, "processes": 1024,
}  # fmt: skip
"""Lower limits for the lists that checks read repeatedly, by field name in `Facts`."""


def printable(text: str) -> str:
    """Write undecodable bytes of a path or variable as `\\udcff`, so that the text can be encoded as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def clip(value: Any, name: str = "", deep: int = 0) -> Any:
    """Cut plain data to the limits. Numbers out of range and values nested too deeply become None."""
    if isinstance(value, str):
        value = printable(value) if not value.isascii() else value
        half = (_LONG - 3) // 2
        return value if len(value) <= _LONG else f"{value[:half]} … {value[-half:]}"
    if isinstance(value, (int, float)):
        return value if _in_range(value) else None
    if deep == _DEEP:
        return None
    if isinstance(value, dict):
        entries = list(value.items())[: _LIMITS_BY_FIELD.get(name, _MANY)]
        return {clip(str(key)): clip(item, str(key), deep + 1) for key, item in entries}
    if isinstance(value, (list, tuple)):
        items = [clip(item, "", deep + 1) for item in value[: _LIMITS_BY_FIELD.get(name, _MANY)]]
        return [item[:_LINE] if isinstance(item, str) else item for item in items] if name == "said" else items
    return value


def first_violation(facts: Any) -> str | None:
    """The first value beyond the limits, with its path; None if there is none."""
    waiting: list[tuple[str, Any]] = [("", facts)]
    while waiting:
        where, value = waiting.pop()
        wrong = _violation(where.rpartition(".")[2], value)
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


def _violation(name: str, value: Any) -> str | None:
    if isinstance(value, str) and len(value) > _LONG:
        return f"more than {_LONG} characters"
    most = _LIMITS_BY_FIELD.get(name, _MANY)
    if isinstance(value, (dict, list)) and len(value) > most:
        return f"more than {most} entries"
    if isinstance(value, (int, float)) and not _in_range(value):
        return "no size, time or count: below 0, or beyond all measure"
    said = value if name == "said" and isinstance(value, list) else ()
    if any(isinstance(line, str) and len(line) > _LINE for line in said):
        return f"a line of more than {_LINE} characters"
    return None


def _in_range(number: float) -> bool:
    return math.isfinite(number) and 0 <= number < _LARGE

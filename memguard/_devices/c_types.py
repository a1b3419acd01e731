"""Replace methods of types written in C, which reject `setattr`, in the type's own dict.

CPython looks a method up in the dicts of the type and its bases, and caches the result by the type's version. Each
change of the dict therefore calls `PyType_Modified`. This works for methods that CPython looks up by name. CPython
calls a special method such as `__len__` through a slot of the type, which the dict does not change: `put` rejects
those.
"""

from __future__ import annotations

import gc
from typing import Any

ABSENT = object()
"""Argument of `put`: remove the type's own entry."""


def put(cls: type, name: str, value: object) -> bool:
    """Set the type's own entry `name` to `value`, or remove it (`ABSENT`). False if CPython does not allow it."""
    if name.startswith("__") and name.endswith("__"):
        return False
    entries = own(cls)
    if entries is None:
        return False
    if value is ABSENT:
        entries.pop(name, None)
    else:
        entries[name] = value
    modified(cls)
    return bool(vars(cls).get(name, ABSENT) is value)


def own(cls: type) -> dict[str, Any] | None:
    """The dict behind `cls.__dict__`, a read-only view. None if this Python exposes the dict in another way."""
    found = [one for one in gc.get_referents(cls.__dict__) if type(one) is dict]
    return found[0] if len(found) == 1 and found[0].keys() == vars(cls).keys() else None


def modified(cls: type) -> None:
    """Invalidate CPython's cached methods of the type and its subclasses."""
    import ctypes

    ctypes.pythonapi.PyType_Modified(ctypes.py_object(cls))

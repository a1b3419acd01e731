"""Methods of types that are written in C, which refuse `setattr`: they are replaced in the type's own dict.

CPython looks a method up in the dicts of the type and its bases, and caches what it found by the type's version. So
whoever changes the dict says so with `PyType_Modified`. That reaches methods that are found by name. A special method
such as `__len__` is called through a slot of the type, which is not changed: `put` refuses those.
"""

from __future__ import annotations

import gc
from typing import Any

ABSENT = object()
"""Of `put`: the type has no such entry."""


def put(cls: type, name: str, value: object) -> bool:
    """Make `value` the type's own entry of that name, or take the entry away (`ABSENT`). False if that cannot be."""
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
    """The dict behind `cls.__dict__`, which is a read-only view. None if this Python shows it in another way."""
    found = [one for one in gc.get_referents(cls.__dict__) if type(one) is dict]
    return found[0] if len(found) == 1 and found[0].keys() == vars(cls).keys() else None


def modified(cls: type) -> None:
    """Forget what was cached of the type's methods, and of those of its subclasses."""
    import ctypes

    ctypes.pythonapi.PyType_Modified(ctypes.py_object(cls))

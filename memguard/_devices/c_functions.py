"""Replace C functions: methods of types written in C, and pointers to functions in a loaded library's memory.

Types written in C reject `setattr`, so `put_method` changes the type's own dict. CPython looks a method up in the dicts
of the type and its bases, and caches the result by the type's version. Each change of the dict therefore calls
`PyType_Modified`. This works for methods that CPython looks up by name. CPython calls a special method such as
`__len__` through a slot of the type, which the dict does not change, so `put_method` rejects special methods.
"""

from __future__ import annotations

import ctypes
import gc
import re
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (....) ([0-9a-f]+) \S+ \d+ *(.*)")
ABSENT = object()
"""Argument of `put_method`: remove the type's own entry."""


def put_method(cls: type, name: str, value: object) -> bool:
    """Set the type's own entry `name` to `value`, or remove it (`ABSENT`). False if CPython does not allow the
    change."""
    if name.startswith("__") and name.endswith("__"):
        return False
    entries = _own_dict(cls)
    if entries is None:
        return False
    if value is ABSENT:
        entries.pop(name, None)
    else:
        entries[name] = value
    clear_method_cache(cls)
    return bool(vars(cls).get(name, ABSENT) is value)


def _own_dict(cls: type) -> dict[str, Any] | None:
    """The mutable dict behind the read-only view `cls.__dict__`; None if this Python has another implementation."""
    found = [one for one in gc.get_referents(cls.__dict__) if type(one) is dict]
    return found[0] if len(found) == 1 and found[0].keys() == vars(cls).keys() else None


def clear_method_cache(cls: type) -> None:
    """Invalidate CPython's cached methods of the type and its subclasses."""
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(cls))


class Region(NamedTuple):
    """One memory mapping of a library's file, from byte `offset` of the file. `path` ends in ` (deleted)` if the file
    was removed."""

    start: int
    end: int
    writable: bool
    offset: int
    path: str


def regions(maps: str, name: str) -> list[Region]:
    """The readable, non-executable mappings of a library. `maps` is the text of `/proc/PID/maps`, `name` the prefix of
    the library's file name.

    Omits zero-initialised variables (.bss): they lie in anonymous memory, which the kernel may merge with other
    libraries' heap.
    """
    found: list[Region] = []
    for line in maps.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        start, end, path = int(match[1], 16), int(match[2], 16), match[5]
        if path.rpartition("/")[2].startswith(name) and match[3][0] == "r" and match[3][2] != "x":
            found.append(Region(start, end, match[3][1] == "w", int(match[4], 16), path))
    return found


def pointers_to(found: Iterable[Region], address: int) -> list[int]:
    """The addresses in writable mappings at which `address` is stored. Reads only this process's mappings."""
    pointer, at = struct.pack("P", address), list[int]()
    for region in found:
        if not region.writable:
            continue
        memory = ctypes.string_at(region.start, region.end - region.start)
        place = memory.find(pointer)
        while place >= 0:
            if place % len(pointer) == 0:
                at.append(region.start + place)
            place = memory.find(pointer, place + 1)
    return at


def read_pointer(place: int) -> int | None:
    """The address stored at `place`; None for 0."""
    return ctypes.c_void_p.from_address(place).value


def write_pointer(place: int, address: int | None) -> None:
    """Store an address. Atomic, because `place` is an aligned word: a concurrent caller uses the old or the new
    address."""
    ctypes.c_void_p.from_address(place).value = address

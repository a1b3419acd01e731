"""Addresses of C functions that a loaded library keeps in its own memory: where they lie, and what they are set to."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterable
from typing import NamedTuple

_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (....) ([0-9a-f]+) \S+ \d+ *(.*)")


class Region(NamedTuple):
    """A part of a library in memory: `offset` is its place in the file, which may be removed since (` (deleted)`)."""

    start: int
    end: int
    writable: bool
    offset: int
    path: str


def regions(maps: str, name: str) -> list[Region]:
    """Those parts of the library, whose file's name begins so, that are read as data: by `/proc/PID/maps`.

    Without its variables that begin as 0 (.bss): those lie in memory without a name, which the kernel joins with the
    heap of others.
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


def places(found: Iterable[Region], address: int) -> list[int]:
    """Where those parts that can be written hold this address. Of this process only."""
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


def read(place: int) -> int | None:
    """The address that lies there; None for 0."""
    return ctypes.c_void_p.from_address(place).value


def write(place: int, address: int | None) -> None:
    """Whoever calls by it meanwhile takes the one address or the other: it is one aligned word."""
    ctypes.c_void_p.from_address(place).value = address

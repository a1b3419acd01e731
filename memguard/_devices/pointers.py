"""Find, read and write the pointers to C functions in a loaded library's memory."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterable
from typing import NamedTuple

_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (....) ([0-9a-f]+) \S+ \d+ *(.*)")


class Region(NamedTuple):
    """A mapped part of a library. `offset` is its place in the file. `path` ends in ` (deleted)` after a removal."""

    start: int
    end: int
    writable: bool
    offset: int
    path: str


def regions(maps: str, name: str) -> list[Region]:
    """The library's parts that are mapped as readable data, by `/proc/PID/maps`. `name`: how its file's name begins.

    Zero-initialised variables (.bss) are missing: they lie in unnamed memory, which the kernel joins with other
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


def places(found: Iterable[Region], address: int) -> list[int]:
    """The places in writable parts that hold this address. Of this process only."""
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
    """The address stored at `place`; None for 0."""
    return ctypes.c_void_p.from_address(place).value


def write(place: int, address: int | None) -> None:
    """Store an address. Atomic: an aligned word, so a concurrent caller uses the old or the new address."""
    ctypes.c_void_p.from_address(place).value = address

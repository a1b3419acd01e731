"""Answers a framework's own C++ threads, which ask the driver now and then, while the process is off its GPUs.

No gate in Python reaches them, and off the GPU their call ends the process (SIGSEGV; JAX 0.11.2, driver 580.159, H200).
Such a library does not link to libcuda: it keeps the addresses of the driver's functions in a table of its own, filled
when each is first called. `hold` puts another address there: that of a C function which does nothing and returns 0, and
that is CUDA_SUCCESS. A function of Python's would not do, as it needs Python's interpreter lock on that thread.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial

from memguard._base.logs import log as _log
from memguard._base.undo import Undo
from memguard._devices import c_functions, libcuda, proc
from memguard._devices.c_functions import Region, regions
from memguard._frameworks.optional_modules import Gates, NativeThread

_DONE = "pthread_condattr_destroy"
"""A C function that returns 0 and touches nothing, whatever it is given: in glibc and in musl this one does."""
_LOOK = 0.1
_SPARE = 2.0
"""Seconds beyond a thread's own pause: on a busy machine it may be late."""


def unheld(tables: Iterable[Gates]) -> Iterator[str]:
    """A line for each library of this process that has such a thread, and no place where its calls can be held.

    A thread that has not asked yet has no such place so far: this waits until it has, some 5 s at most after the
    framework began to use its GPU.
    """
    for hook, native, found in _loaded(tables):
        if found and native.live() and not _held(native, found):
            yield f"{hook}: {native.library}"


def seen(root: str, pid: int, tables: Iterable[Gates]) -> tuple[str, ...] | None:
    """From outside: the libraries of a process that have such a thread. None if its maps cannot be read."""
    maps = proc.text(proc.path_of(root, pid, "maps"))
    if maps is None:
        return None
    rows = [(table.hook, native) for table in tables for native in table.natives]
    inside = proc.path_of(root, pid, "root")
    return tuple(
        f"{hook}: {native.library}"
        for hook, native in rows
        if has_thread(native, [one._replace(path=inside + one.path) for one in regions(maps, native.library)])
    )


def hold(tables: Iterable[Gates], undo: Undo) -> tuple[str, ...]:
    """Answer what those threads ask; `undo` lets them ask the driver again.

    Returns a line for each library whose thread cannot be answered: a framework may have begun since `unheld`.
    """
    left = []
    for hook, native, found in _loaded(tables):
        places = slots(native, found)
        for place in places:
            _answer(place, native.polls, undo)
        if not places and native.live() and has_thread(native, found):
            left.append(f"{hook}: {native.library}")
    return tuple(left)


def slots(native: NativeThread, found: Iterable[Region]) -> list[int]:
    """Where in its memory the library keeps the address of the driver's function."""
    cuda = libcuda.opened(libcuda.NAME)
    address = None if cuda is None else libcuda.address(cuda, native.polls)
    return c_functions.pointers_to(found, address) if address else []


def has_thread(native: NativeThread, found: Iterable[Region]) -> bool:
    """Whether this version of the library has that thread: by the thread's name among its texts."""
    return any(_contains(one.path, one.offset, one.end - one.start, native.thread) for one in found)


@functools.cache
def _contains(path: str, offset: int, size: int, text: bytes) -> bool:
    """Unreadable counts as contained: then nobody knows. Takes some 0.2 s for a library of 300 MB, once."""
    if path.endswith(" (deleted)"):  # another version may lie there now
        return True
    try:
        with open(path, "rb") as file:
            size = min(size, os.fstat(file.fileno()).st_size - offset)
            if size <= 0:
                return False
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ, offset=offset) as part:
                return part.find(text) >= 0
    except OSError:
        return True


def _held(native: NativeThread, found: list[Region]) -> bool:
    """Whether its question can be answered, or is never asked; waits for the first time if there is such a thread."""
    if not has_thread(native, found):
        return True
    end = time.monotonic() + native.every + _SPARE
    while not slots(native, found):
        if time.monotonic() > end:
            return False
        time.sleep(_LOOK)
    return libcuda.of_c(_DONE) is not None


def _answer(place: int, name: str, undo: Undo) -> None:
    answer = libcuda.of_c(_DONE)
    if answer is None:  # then `unheld` has said so
        return
    undo.add(f"{name} of a framework's own thread", partial(_give_back, place, answer, c_functions.read_pointer(place)))
    c_functions.write_pointer(place, answer)
    _log.debug("suspend: %s at %#x is answered without the driver", name, place)


def _give_back(place: int, answer: int, before: int | None) -> None:
    if c_functions.read_pointer(place) == answer:
        c_functions.write_pointer(place, before)


def _loaded(tables: Iterable[Gates]) -> Iterator[tuple[str, NativeThread, list[Region]]]:
    """Each of those libraries whose framework is imported here: the framework, and what of it is in memory."""
    rows = [(table.hook, native) for table in tables if table.hook in sys.modules for native in table.natives]
    maps = (proc.text("/proc/self/maps") or "") if rows else ""
    for hook, native in rows:
        yield hook, native, regions(maps, native.library)

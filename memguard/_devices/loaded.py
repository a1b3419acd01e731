"""Which of CUDA's libraries this process has loaded, and which it has entered since: by what the kernel maps for it.

Loads, initialises and calls nothing.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections import Counter

from memguard._base.framework_spec import DOORS, KERNELS, LIBRARIES
from memguard._devices import libcuda

_MAPS, _PAGEMAP, _PAGE = "/proc/self/maps", "/proc/self/pagemap", mmap.PAGESIZE
_BEGINS = {**LIBRARIES, KERNELS: DOORS[KERNELS][0]}
_FILES = re.compile(
    "|".join(rf"/(?P<{name}>{re.escape(begin)})[^/\n]*$" for name, begin in _BEGINS.items()).encode(), re.MULTILINE
)
_PRESENT, _OF_A_FILE = 0x80, 0x20  # of an entry's last byte (the kernel's Documentation/admin-guide/mm/pagemap.rst)
_TRIES = 3


def files(path: str = _MAPS) -> frozenset[tuple[str, str]] | None:
    """Those of `LIBRARIES`, and libcuda as `KERNELS`, that are loaded, each with the path of its file; None if the
    kernel's list cannot be read.

    It takes the kernel 2 µs for each of some thousand mappings.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            text = file.readall()
    except OSError:
        return None
    found = set()
    for match in _FILES.finditer(text):
        parts = text[text.rfind(b"\n", 0, match.start()) + 1 : match.end()].split(None, 5)
        if match.lastgroup is not None and len(parts) == 6:
            found.add((match.lastgroup, os.fsdecode(parts[5])))
    return frozenset(found)


def libraries(path: str = _MAPS) -> frozenset[str]:
    """The names of those that are loaded; all of `LIBRARIES` if that cannot be read: any of them may be."""
    return _names(files(path))


def _names(found: frozenset[tuple[str, str]] | None) -> frozenset[str]:
    return frozenset(LIBRARIES if found is None else (name for name, _ in found if name in LIBRARIES))


class Doors:
    """Whether a library was entered since the last look: whether a thread ran a function that a use begins with.

    The page of such a function (`DOORS`) is unmapped (`madvise`). The kernel maps it again, from its file, when a
    thread comes to it or to a page beside it that was never used, and `/proc/self/pagemap` says so. Only a page of code
    that is as in its file is unmapped: never one that a debugger has written to, nor one that is locked in memory.
    """

    def __init__(self, pagemap: str = _PAGEMAP) -> None:
        self._pagemap = pagemap
        self._lock = threading.RLock()  # a signal handler or a finalizer may come within a call
        self._files: set[tuple[str, str]] = set()
        self._pages: dict[int, str] = {}
        self._silent: set[str] = set()
        self._found: Counter[str] = Counter()

    def libraries(self) -> frozenset[str]:
        """As the function of that name, and from now on `entries` knows those that are loaded."""
        found = files()
        with self._lock:
            for name, path in sorted((found or frozenset()) - self._files):
                self._files.add((name, path))
                begin, functions = DOORS[name]
                if path.rpartition("/")[2].startswith(begin):
                    self.add(name, path, functions)
        return _names(found)

    def add(self, name: str, path: str, functions: tuple[str, ...]) -> None:
        """Watch those functions of the library with that file. It stays loaded from now on."""
        library = libcuda.opened(path)
        if library is None:  # replaced since, or in another namespace
            self._silent.add(name)
            return
        addresses = [address for function in functions if (address := libcuda.address(library, function)) is not None]
        pages = {address - address % _PAGE for address in addresses}
        try:
            with open(self._pagemap, "rb", buffering=0) as pagemap:
                known = self._pages.keys()
                entered = [page for page in pages - known if _entry(pagemap.fileno(), page) & _PRESENT]
                works = [page in known or _shows(pagemap.fileno(), page) for page in pages]
        except OSError:
            works = []
        if not works or not all(works):
            self._silent.add(name)
            return
        self._pages.update(dict.fromkeys(pages, name))
        self._found[name] += bool(entered)

    def entries(self, mark: bool = True) -> frozenset[tuple[str, int]]:
        """How many looks have found each library entered, with its name; without those of which nothing tells.

        Not `mark`: the next look is to find what this one has found.
        """
        if not self._pages:
            return frozenset()
        found = set()
        try:
            pagemap = os.open(self._pagemap, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return frozenset()
        try:
            for page, name in tuple(self._pages.items()):
                if _entry(pagemap, page) & _PRESENT:
                    found.add(name)
                    if mark and not _unmap(pagemap, page):
                        self._silent.add(name)
        except OSError:
            return frozenset()
        finally:
            os.close(pagemap)
        known = set(self._pages.copy().values()) - self._silent
        counts = frozenset([(name, self._found[name] + (name in found)) for name in known])
        if mark:
            self._found.update(found)
        return counts


def _entry(pagemap: int, page: int) -> int:
    """What the kernel says of a page of this process: the last byte. OSError if it says nothing."""
    data = os.pread(pagemap, 8, page // _PAGE * 8)
    if len(data) != 8:
        raise OSError("the kernel does not describe this page")
    return data[7]


def _shows(pagemap: int, page: int) -> bool:
    """Whether the kernel says that the page is there when a byte of it was read, and then unmaps it."""
    libcuda.touch(page)
    return bool(_entry(pagemap, page) & _PRESENT) and _unmap(pagemap, page)


def _unmap(pagemap: int, page: int) -> bool:
    """Whether the page was unmapped, or could have been: another thread may run it again at once."""
    for _ in range(_TRIES):
        entry = _entry(pagemap, page)
        if not entry & _PRESENT:
            return True
        if not entry & _OF_A_FILE or not libcuda.advise(page, _PAGE, mmap.MADV_DONTNEED):
            return False
    return True


doors = Doors()

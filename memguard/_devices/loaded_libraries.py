"""Reads from the kernel's page tables which CUDA libraries this process has loaded, and which it has entered since.

Loads, initialises and calls nothing.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
from collections import Counter

from memguard._base.framework_spec import ENTRY_POINTS, KERNELS, LIBRARIES
from memguard._devices import libcuda

_MAPS, _PAGEMAP, _PAGE = "/proc/self/maps", "/proc/self/pagemap", mmap.PAGESIZE
_BEGINS = {**LIBRARIES, KERNELS: ENTRY_POINTS[KERNELS][0]}
_FILES = re.compile(
    "|".join(rf"/(?P<{name}>{re.escape(begin)})[^/\n]*$" for name, begin in _BEGINS.items()).encode(), re.MULTILINE
)
_PRESENT, _OF_A_FILE = 0x80, 0x20  # bits of an entry's last byte (the kernel's admin-guide/mm/pagemap.rst)
_TRIES = 3


def files(path: str = _MAPS) -> frozenset[tuple[str, str]] | None:
    """Name and file path of each loaded library of `LIBRARIES`, and of libcuda, named `KERNELS`; None if the kernel's
    list cannot be read.

    Reading takes 2 µs for each mapping of the process, which may have some thousand.
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
    """The names of the loaded `LIBRARIES`; all of them if the list cannot be read, because any may be loaded."""
    return _names(files(path))


def _names(found: frozenset[tuple[str, str]] | None) -> frozenset[str]:
    return frozenset(LIBRARIES if found is None else (name for name, _ in found if name in LIBRARIES))


class EntryDetector:
    """Detects whether a thread has run an entry function of a library since the last poll.

    memguard unmaps the page of each entry function (`ENTRY_POINTS`) with `madvise`. When a thread runs that page, or an
    adjacent page for the first time, the kernel maps the page again from its file, and `/proc/self/pagemap` shows it.
    memguard unmaps only a code page that is unchanged from its file, never a page that a debugger has written to or
    that is locked in memory.
    """

    def __init__(self, pagemap: str = _PAGEMAP) -> None:
        self._pagemap = pagemap
        self._lock = threading.RLock()  # re-entrant: a signal handler or a finalizer may interrupt a call
        self._files: set[tuple[str, str]] = set()
        self._pages: dict[int, str] = {}
        self._silent: set[str] = set()
        self._found: Counter[str] = Counter()

    def libraries(self) -> frozenset[str]:
        """Like the function `libraries`. From this call on, `entries` observes the libraries found."""
        found = files()
        with self._lock:
            for name, path in sorted((found or frozenset()) - self._files):
                self._files.add((name, path))
                begin, functions = ENTRY_POINTS[name]
                if path.rpartition("/")[2].startswith(begin):
                    self.add(name, path, functions)
        return _names(found)

    def add(self, name: str, path: str, functions: tuple[str, ...]) -> None:
        """Observe these functions of the library at `path`. The library stays loaded from now on."""
        library = libcuda.opened(path)
        if library is None:  # the file was replaced, or the library is in another namespace
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
        """Each observable library with the number of polls that found it entered since the poll before.

        With `mark=False`, the next poll counts the same entries again.
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
    """The last byte of a page's entry in pagemap. Raises OSError if the kernel has no entry."""
    data = os.pread(pagemap, 8, page // _PAGE * 8)
    if len(data) != 8:
        raise OSError("the kernel does not describe this page")
    return data[7]


def _shows(pagemap: int, page: int) -> bool:
    """Read one byte of the page. True if pagemap then shows the page, and the page can be unmapped again."""
    libcuda.touch(page)
    return bool(_entry(pagemap, page) & _PRESENT) and _unmap(pagemap, page)


def _unmap(pagemap: int, page: int) -> bool:
    """Unmap the page. True if that is possible, even if another thread runs the page again immediately."""
    for _ in range(_TRIES):
        entry = _entry(pagemap, page)
        if not entry & _PRESENT:
            return True
        if not entry & _OF_A_FILE or not libcuda.advise(page, _PAGE, mmap.MADV_DONTNEED):
            return False
    return True


entry_detector = EntryDetector()

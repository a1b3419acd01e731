"""Tests that leave more GPU memory than they found: bytes in live arrays, by framework, and what nobody accounts for.

What counts is `in_use`, as each framework says it, so that a cache which has grown is no leak. Beyond that there is
NVML's figure of this process, less what frameworks hold and what is known as overhead: it tells of allocations that no
framework counts. It is left out where it would guess: when CUDA or a framework has begun within the test, when a
framework does not say what it holds, and where NVML does not list the process.

Nothing here initialises CUDA or a framework, and none is imported.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.units import MIB, format_size, parse_size, short
from memguard._frameworks import specs
from memguard._frameworks.specs import SPECS
from memguard._tools.testing.budgets import active, meant
from memguard.errors import MemguardError

if TYPE_CHECKING:
    from memguard._base.types import DevicePlan, DeviceSample
    from memguard._ledger.reader import LedgerReader

MARKER = "memguard_leaks"
_KEYWORDS = ("tolerance", "check")
_UNCOUNTED = frozenset(row.name for row in SPECS.values() if row.uncounted)
"""They count nothing without a budget: what they take is unaccounted."""
TOLERANCE = MIB
"""Bytes that a test may leave: random states, constants of compiled functions."""
UNACCOUNTED = 64 * MIB
"""The same for what no framework accounts for: kernels and workspaces of libraries come when they are first used."""
PAUSES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.3)
"""Seconds between two looks at what seems to be left: arrays of work that is under way are freed later."""
_Key = tuple[str, str, int]
"""UUID, framework, and which simulated budget (0 for a real GPU). The framework is empty for what is unaccounted, and
the number is then that of the reader: each charges overhead by what it saw."""


class Reading(NamedTuple):
    """What is in use, in bytes. `sources` are the readers that were asked; `exact` whether all said what they hold."""

    bytes: dict[_Key, int | None]
    names: dict[str, str]
    sources: set[int]
    exact: bool = True


class Leak(NamedTuple):
    """What one test left. `framework` is empty if no framework says that it holds it."""

    gpu: str
    framework: str
    before: int
    after: int

    def __str__(self) -> str:
        more = format_size(self.after - self.before)
        if not self.framework:
            return (
                f"{self.gpu}: this process has {more} more than before, by NVML, and no framework says that it holds "
                "them (PyCUDA and Numba say it under a budget only)"
            )
        figures = f"{format_size(self.before)} before, {format_size(self.after)} now, without its cache"
        return f"{self.gpu}: {self.framework} has {more} more in use than before ({figures})"


class Watcher:
    """Takes the readings of one test run."""

    def __init__(self) -> None:
        self._reader: LedgerReader | None = None
        self._parts: tuple[DevicePlan, ...] = ()
        self._why_not: MemguardError | None = None
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._next = count(1)
        self._work: dict[tuple[str, str], int] = {}
        self.credits: dict[int, dict[_Key, int]] = {}
        """What fixtures of a wider scope took, by their `id`, until they are torn down."""

    def take(self) -> Reading | None:
        """What is in use now; None if that cannot be known."""
        from memguard._devices import suspension

        if suspension.now is not None:
            return None
        session = active().active
        guard = getattr(session, "guard", None)
        try:
            if guard is not None and guard.active:
                parts = guard.plan.devices
                return self._of(parts, guard.sample().devices, guard.host.simulated, self._number(session))
            parts, reader = self._own()
            return self._of(parts, tuple([reader.sample(part, {}) for part in parts]) if reader else (), False, 0)
        except Exception as error:  # a GPU is lost, or an adapter meets an error of CUDA: the test says that itself
            _log.debug("GPU memory is not known, and not looked at: %s", text_of(error))
            return None

    def _number(self, session: Any) -> int:
        """From 1 on, and never another's."""
        if session not in self._numbers:
            self._numbers[session] = next(self._next)
        return self._numbers[session]

    def _own(self) -> tuple[tuple[DevicePlan, ...], LedgerReader | None]:
        """A reader without a budget, once CUDA is initialised. Where it is not, nothing can be held."""
        if self._reader is None:
            from memguard._devices import contexts

            if not contexts.initialised():
                return (), None
            from memguard._base.types import DevicePlan
            from memguard._devices.real import RealHost
            from memguard._ledger.reader import LedgerReader

            if self._why_not is not None:
                raise self._why_not
            try:
                host = RealHost()
                self._parts = tuple([DevicePlan(one, one.usable, one.usable, {}, 0) for one in host.devices()])
            except MemguardError as error:  # they are asked once
                self._why_not = error.with_traceback(None)
                raise
            self._reader = LedgerReader(host, tuple(SPECS), lambda sentence: None)
        return self._parts, self._reader

    def _of(
        self, parts: tuple[DevicePlan, ...], devices: tuple[DeviceSample, ...], simulated: bool, number: int
    ) -> Reading:
        found: dict[_Key, int | None] = {}
        exact = True
        if not simulated:
            self._look_at_work_areas(parts)
        for one in devices:
            for name, figures in one.frameworks.items():
                if name in _UNCOUNTED and figures.held is None:
                    continue
                size = figures.in_use
                if size is not None and not simulated:
                    size = max(size - self._work.get((one.uuid, name), 0), 0)
                found[one.uuid, name, number if simulated else 0] = size
                exact = exact and figures.held is not None
            if not simulated:
                found[one.uuid, "", number] = one.unaccounted
        mark = " (simulated)" if simulated else ""
        names = {part.device.uuid: f"{part.device.name}{mark}" for part in parts}
        return Reading(found, names, {number if simulated else 0}, exact)

    def _look_at_work_areas(self, parts: tuple[DevicePlan, ...]) -> None:
        """What frameworks have in use that is no array of the test, such as work areas of FFT plans, in bytes.

        That of this thread for its current GPU is seen; of others, what was last seen.
        """
        from memguard._devices import contexts

        ordinal = contexts.current()
        for part in parts:
            if ordinal is None or part.device.ordinal != ordinal:
                continue
            for name, ask in _asks("work_areas"):
                with contextlib.suppress(Exception):  # another version of it: its work areas count as arrays
                    size = ask(sys.modules)
                    if size is not None:
                        self._work[part.device.uuid, name] = size

    def settle(self) -> None:
        """Have let go of what waits for it: cycles, pending frees, workspaces of libraries."""
        gc.collect()
        adapters = self._reader.unnamed() if self._reader is not None else {}
        for name, adapter in adapters.items():
            if SPECS[name].frees_late and SPECS[name].hook in sys.modules:
                for part in self._parts:
                    with contextlib.suppress(Exception):  # it looks only whether something is left
                        adapter.trim(part.device)
        for _, free_caches in _asks("free_caches"):
            with contextlib.suppress(Exception):
                free_caches(sys.modules)


def _asks(question: str) -> Iterator[tuple[str, Callable[[Mapping[str, Any]], Any]]]:
    """The frameworks that answer this question of `InProcess`, by name."""
    for module in specs.modules("in_process"):
        ask = getattr(module.IN_PROCESS, question)
        if ask is not None:
            yield module.__name__.split(".")[2], ask


class Check:
    """One test, from its setup to the end of its teardown."""

    def __init__(self, watcher: Watcher, tolerance: int) -> None:
        self._watcher, self._tolerance = watcher, tolerance
        self._before = watcher.take()
        self._wider: list[dict[_Key, int]] = []

    def begun(self) -> None:
        """The test's budget begins: what is there now was there before."""
        self._add({}, self._watcher.take())

    def wider_begins(self) -> Reading | None:
        """A fixture of a wider scope is set up within the test: what that takes is not the test's."""
        self._wider.append({})
        return self._watcher.take()

    def wider_ends(self, fixture: object, before: Reading | None) -> None:
        """That fixture is set up, or has failed."""
        within, after = self._wider.pop(), self._watcher.take()
        if before is None or after is None:
            return
        grown = {key: (size or 0) - (before.bytes.get(key) or 0) for key, size in after.bytes.items()}
        own = {key: size - within.get(key, 0) for key, size in grown.items()}
        if self._wider:
            outer = self._wider[-1]
            outer.update({key: outer.get(key, 0) + size for key, size in grown.items()})
        self._add(own, after)
        self._watcher.credits[id(fixture)] = own

    def torn_down(self, fixture: object) -> None:
        """A fixture of a wider scope was torn down after the test: what it took is back, or is left by it."""
        for key, size in self._watcher.credits.pop(id(fixture), {}).items():
            if self._before is not None and self._before.bytes.get(key) is not None:
                self._before.bytes[key] = (self._before.bytes[key] or 0) - max(size, 0)

    def _add(self, grown: dict[_Key, int], now: Reading | None) -> None:
        """What of `now` was there before the test: all of a reader that is new, of others what has `grown`."""
        if self._before is None or now is None:
            return
        found, sources = self._before.bytes, self._before.sources
        for key, size in now.bytes.items():
            known = key in found if not key[1] else key[2] in sources
            if known and key in grown:
                found[key] = (found.get(key) or 0) + grown[key]
            elif found.get(key) is None:
                found[key] = size
        sources.update(now.sources)
        self._before.names.update(now.names)

    def leaks(self, item: Any) -> list[Leak]:
        """What the test has left, after it had a second to go. Call it once everything of the test is torn down."""
        if not self._left():
            return []
        arguments = getattr(item, "funcargs", None)
        if isinstance(arguments, dict):  # pytest lets go of what fixtures returned only after this
            arguments.update(dict.fromkeys(arguments))
        left: list[Leak] = []
        for pause in PAUSES:
            time.sleep(pause)
            self._watcher.settle()
            left = self._left()
            if not left:
                return []
        return left

    def _left(self) -> list[Leak]:
        before, after = self._before, self._watcher.take()
        if before is None or after is None:
            return []
        began = {key[1] for key in after.bytes} - {key[1] for key in before.bytes}
        found: list[Leak] = []
        for key, now in after.bytes.items():
            uuid, name, source = key
            if now is None or (name and source not in before.sources):
                continue
            was = before.bytes.get(key) if key in before.bytes else 0
            if not name and (began or key not in before.bytes or not (before.exact and after.exact)):
                continue
            allowed = self._tolerance if name else max(self._tolerance, UNACCOUNTED)
            if was is not None and now - was > allowed:
                found.append(Leak(after.names.get(uuid, uuid), name, was, now))
        return found


def asked(given: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[bool, int | None]:
    """What a marker asks for: whether to check, and the tolerance in bytes. Raises ValueError for what is wrong."""
    for name in keywords:
        if name not in _KEYWORDS:
            raise ValueError(f"there is no keyword {name!r}{meant(name, _KEYWORDS)}")
    if len(given) > 1:
        raise ValueError(f"it takes one tolerance, found {len(given)}")
    if given and "tolerance" in keywords:
        raise ValueError(f"the tolerance is given twice: {short(given[0])} and {short(keywords['tolerance'])}")
    check = keywords.get("check", True)
    if not isinstance(check, bool):
        raise ValueError(f"check is True or False, found {short(check)}")
    tolerance = given[0] if given else keywords.get("tolerance")
    return check, None if tolerance is None else parse_size(tolerance)


def failure(leaks: list[Leak]) -> str:
    """What the test fails with."""
    size = max(one.after - one.before for one in leaks)
    allowed = f"{-(-size // MIB)}MiB"
    return "\n".join(
        [
            "memguard: this test leaves more GPU memory than it found",
            *(f"  {one}" for one in leaks),
            "    fix: free what outlives the test: arrays in globals, in caches of functions, in wider fixtures, in "
            f"`self` of a test class; what is meant to stay is allowed by @pytest.mark.{MARKER}(tolerance={allowed!r})",
        ]
    )

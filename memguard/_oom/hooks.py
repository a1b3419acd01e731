"""Out-of-memory errors as they come by: recognised, explained once, noted on the exception, printed, remembered.

The user's exception goes on as it came. What is kept of it is text and figures: no exception, traceback, frame or
array outlives its own time because of this module. Nothing here raises.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from memguard._specs import SPECS
from memguard._types import Plan, Sample

if TYPE_CHECKING:  # what explains an error is loaded when there is one
    from memguard._ledger.types import Ledger
    from memguard._oom.report import ErrorFacts, Report, Verdict

_log = logging.getLogger("memguard")

_MARK = "_memguard_incident"
"""What a reported exception carries: process and number. Pickled with it, it means nothing elsewhere."""
_ATTRIBUTES = (
    "errno", "status", "code", "error_code", "_error_code", "result", "value", "_limit", "framework",
    "requested", "memguard_requested", *(row.size_attribute for row in SPECS.values() if row.size_attribute),
)  # fmt: skip
"""Of exceptions of the frameworks, of memguard's simulated ones, and what memguard adds to PyCUDA's and Numba's."""
_TEXT = 4_000
"""Characters that are looked at of a text's beginning, and of its end: TensorFlow's tell the whole graph."""
_WALKED = 100
"""Exceptions of one chain that are looked at."""
_KEPT = 8
"""Reports that are remembered, for exceptions that come by again."""
_AGAIN = 60.0
"""Seconds in which the like of a report that was shown in full is one line: of a loop that tries smaller batches."""


@dataclass(frozen=True)
class Scene:
    """What a diagnosis is made of, read while the error is alive. `processes`: the others, by UUID and PID."""

    ledger: Ledger | None = None
    plan: Plan | None = None
    processes: Mapping[str, Mapping[int, int | None]] | None = None
    samples: tuple[Sample, ...] = ()


class Source(Protocol):
    """Who knows the scene: the active budget."""

    def scene(self) -> Scene:
        """Read it now, on this thread. May raise: the report then says what the error itself tells."""
        ...

    def diagnosed(self, report: Mapping[str, Any]) -> None:
        """A report was made: `Report.as_dict()`."""
        ...


shows: Callable[[Report | str], None] | None = None
"""Who shows reports, or lines, instead of standard error: in a notebook they come under the cell's traceback."""
_source: Source | None = None
_undo: Callable[[], None] | None = None
_pid: int | None = None
_numbers = itertools.count(1)
_reports: dict[int, Report] = {}
_clock: Callable[[], float] = time.monotonic
_told: dict[tuple[str | None, ...], tuple[float, int]] = {}
"""When a report was last shown in full, and how many like it came since, it included."""


def install(source: Source, *, clock: Callable[[], float] = time.monotonic) -> Callable[[], None]:
    """Look at what nobody catches, in the main thread and in others, until the returned call undoes it.

    The hooks that are there go on being called. Installed already, only the source changes; an undo of a source
    that was replaced does nothing. Hooks that came after ours stay in place when ours goes. `clock` is as
    `time.monotonic`.
    """
    global _source, _undo, _pid, _clock
    if _source is source and _undo is not None:
        return _undo
    if _undo is not None:
        _undo()
    if _pid != os.getpid():  # a forked child: what its parent was told is not its own
        _reports.clear()
    hooks = (_Hook(sys, "excepthook"), _Hook(threading, "excepthook"))

    def undo() -> None:
        global _source, _undo
        for hook in hooks:
            hook.remove()
        if _source is source:
            _source = _undo = None

    _source, _undo, _pid, _clock = source, undo, os.getpid(), clock
    in_full_again()
    return undo


def in_full_again() -> None:
    """The next report is shown in full, whatever was shown before: another budget, another cell of a notebook."""
    _told.clear()


def seen(error: BaseException, *, show: bool = True) -> Report | None:
    """The report, if an out-of-memory error is in it or in what it came from; made, noted and printed once.

    Printed in full once a minute for each of who asked, why and where: in between one line says that it came again.
    None too where no budget is active, and the error was not reported while one was.
    """
    report, fresh = _examine(error)
    if report is not None and fresh and show:
        _show(report)
    return report


def last_oom() -> Report | None:
    """The report of the last out-of-memory error of this process; None where there was none."""
    return _reports[max(_reports)] if _reports and _pid == os.getpid() else None


def facts_of(error: BaseException) -> ErrorFacts:
    """The exception as plain data: nothing of it is kept alive."""
    from memguard._oom.classify import ErrorFacts

    kind = type(error)
    try:
        text = str.__getitem__(str(error), slice(None))  # a plain one, whatever class of text it was
        if len(text) > 2 * _TEXT:
            text = f"{text[:_TEXT]}\n{text[-_TEXT:]}"
    except Exception:  # its own code
        text = ""
    attributes = {name: value for name in _ATTRIBUTES if (value := _plain(error, name)) is not None}
    return ErrorFacts(
        _named(kind), tuple(_named(base) for base in kind.__mro__ if base is not object), text, attributes
    )


def _examine(error: BaseException) -> tuple[Report | None, bool]:
    """The report, and whether it was made now."""
    try:
        for one in _chain(error):
            if (number := _marked(one)) is not None:
                return _reports.get(number), False
            if not isinstance(one, Exception):
                continue
            # Not before: an import while KeyboardInterrupt ends a program hides it.
            from memguard._oom.classify import classify

            facts = facts_of(one)
            verdict = classify(facts)
            if verdict.memory == "none":
                continue
            if (number := next((n for cause in _causes(one) if (n := _marked(cause))), None)) is not None:
                return _reports.get(number), False  # `raise ... from` an error that was reported
            if _source is None or _pid != os.getpid():
                return None, False
            return _explained(one, facts, verdict, _source), True
    except Exception as failure:
        _log.debug("an error could not be looked at: %s: %s", type(failure).__name__, str(failure))
    return None, False


def _explained(error: BaseException, facts: ErrorFacts, verdict: Verdict, source: Source) -> Report:
    from memguard._oom.report import diagnose

    number = next(_numbers)
    _own(error)[_MARK] = (os.getpid(), number)
    scene = _quietly("no reading at an out-of-memory error", source.scene) or Scene()
    report = diagnose(facts, verdict, scene.ledger, scene.plan, scene.processes or {}, scene.samples, time=time.time())
    _reports[number] = report
    for old in sorted(dict(_reports))[:-_KEPT]:
        _reports.pop(old, None)
    if hasattr(error, "add_note"):  # Python 3.11
        note, add = report.note, error.add_note
        _quietly("no note on the error", lambda: add(note))
    _quietly("an out-of-memory error was not recorded", lambda: source.diagnosed(report.as_dict()))
    return report


def _quietly(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as failure:
        _log.debug("%s: %s: %s", what, type(failure).__name__, str(failure))
        return None


def _show(report: Report) -> None:
    """To standard error: drawn on a terminal, plain elsewhere."""
    try:
        shown = _again(report) or report
        if shows is not None:
            shows(shown)
        elif sys.stderr.isatty() and not isinstance(shown, str):
            from rich.console import Console

            Console(file=sys.stderr, highlight=False).print(shown, soft_wrap=True)
        else:
            sys.stderr.write(f"{shown}\n")
    except Exception as failure:  # closed, or none at all under pythonw and services
        _log.debug("the report could not be shown: %s", str(failure))


def _again(report: Report) -> str | None:
    """The line instead of a report, where one like it was shown a short time ago; None where it is to be shown.

    Without a lock, which a signal's handler might find held: of two threads at once both may show theirs.
    """
    verdict, now = report.verdict, _clock()
    for key, (shown, _) in list(_told.items()):
        if not 0 <= now - shown < _AGAIN:
            _told.pop(key, None)
    key = verdict.memory, verdict.requester, report.requester, report.reason, report.uuid
    since, count = _told.get(key, (now, 0))
    _told[key] = since, count + 1
    if not count:
        return None
    who = "" if report.requester == "unknown" else f"{report.requester} "
    possibly = "" if verdict.certain else "possibly "
    what = {"gpu": "out of memory", "disk": "out of disk"}.get(verdict.memory, f"out of {verdict.memory} memory")
    times = f"{_ordinal(count + 1)} time in {max(round(now - since), 1)} s"
    return f"memguard: {who}{possibly}{what} again ({times}): memguard.last_oom()"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}th" if number % 100 in (11, 12, 13) else f"{number}{ending}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, those of its group, what it was raised from, and what was being handled: nearest first."""
    known: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting and len(known) < _WALKED:
        one = waiting.pop()
        if one is None or id(one) in known or isinstance(one, (GeneratorExit, KeyboardInterrupt, SystemExit)):
            continue
        known.add(id(one))
        yield one
        context = None if one.__suppress_context__ else one.__context__
        members = getattr(one, "exceptions", ())  # an ExceptionGroup, of Python 3.11 or a package's
        members = [m for m in members if isinstance(m, BaseException)] if isinstance(members, (list, tuple)) else []
        waiting += [context, one.__cause__, *reversed(members)]


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause, left = error.__cause__, _WALKED
    while cause is not None and left:
        yield cause
        cause, left = cause.__cause__, left - 1


def _marked(error: BaseException) -> int | None:
    """The number of its incident, where it was reported in this process."""
    mark = _own(error).get(_MARK)
    return mark[1] if mark is not None and mark[0] == os.getpid() else None


def _own(error: BaseException) -> dict[str, Any]:
    """The attributes that every exception has room for, of one too that lets none be set: frozen, or with slots."""
    found: dict[str, Any] = vars(BaseException)["__dict__"].__get__(error)
    return found


def _named(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _plain(error: BaseException, name: str) -> int | str | None:
    """An attribute that is a number or a short text; None for any other."""
    try:
        value = getattr(error, name, None)
    except Exception:  # a property of its own
        return None
    if type(value) is int:
        return value
    return value if type(value) is str and len(value) <= 100 else None


class _Hook:
    """One of Python's hooks for what nobody catches, with ours before it and the report after it."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self._module, self._name, self._live = module, name, True
        self._previous: Callable[..., Any] = getattr(module, name)
        setattr(module, name, self)

    def remove(self) -> None:
        self._live = False  # where somebody hooked after us it stays in their way, and does nothing
        if getattr(self._module, self._name) is self:
            setattr(self._module, self._name, self._previous)

    def __call__(self, *args: Any) -> None:
        """`sys` gives type, value and traceback; `threading` one object with them."""
        error = args[1] if len(args) > 1 else getattr(args[0], "exc_value", None)
        report, fresh = _examine(error) if self._live and isinstance(error, BaseException) else (None, False)
        del error
        try:
            self._previous(*args)
        finally:
            if report is not None and fresh:
                _show(report)

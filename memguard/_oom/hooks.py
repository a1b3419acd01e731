"""Out-of-memory errors: recognised, explained once, noted on the exception, passed to the sinks, shown, remembered.

An error comes from one of Python's hooks for uncaught exceptions, a `workload` or `guard` block, a notebook's cell or
a failed test. `seen` makes the report, gives it to the sinks that `install` was given, and shows it.

The user's exception goes on as it came. Only text and figures of it are kept: this module keeps no exception,
traceback, frame or array alive. Nothing here raises.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memguard._specs import SPECS
from memguard._types import Plan, Sample

if TYPE_CHECKING:  # what explains an error is loaded when there is one
    from memguard._ledger.types import Ledger
    from memguard._oom.report import ErrorFacts, Report, Verdict

_log = logging.getLogger("memguard")

_MARK = "_memguard_report"
"""The attribute of a reported exception: process and number. It is pickled with it, and means nothing elsewhere."""
_ATTRIBUTES = (
    "errno", "status", "code", "error_code", "_error_code", "result", "value", "_limit", "framework",
    "requested", "memguard_requested", *(row.size_attribute for row in SPECS.values() if row.size_attribute),
)  # fmt: skip
"""Of exceptions of the frameworks, of memguard's simulated ones, and what memguard adds to PyCUDA's and Numba's."""
_TEXT = 4_000
"""Characters that are read of a text's beginning, and of its end: TensorFlow's lists the whole graph."""
_WALKED = 100
"""Exceptions of one chain that are examined."""
_KEPT = 8
"""Reports that are remembered, for exceptions that are seen again."""
_AGAIN = 60.0
"""Seconds in which a report like one that was shown in full is one line: for a loop that tries smaller batches."""


@dataclass(frozen=True)
class Scene:
    """What a report is made from, read while the error is alive. `processes`: the others, by UUID and PID."""

    ledger: Ledger | None = None
    plan: Plan | None = None
    processes: Mapping[str, Mapping[int, int | None]] | None = None
    samples: tuple[Sample, ...] = ()


display: Callable[[Report | str], None] | None = None
"""Shows reports, or lines, instead of standard error: in a notebook they come under the cell's traceback."""
_installed: _Installed | None = None
_pid: int | None = None
_numbers = itertools.count(1)
_reports: dict[int, Report] = {}
_shown: dict[tuple[str | None, ...], tuple[float, int]] = {}
"""When a report was last shown in full, and how many like it came since, itself included."""


def install(
    read: Callable[[], Scene], *sinks: Callable[[Report], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[], None]:
    """Look at uncaught exceptions, of the main thread and of others, until the returned call undoes it.

    `read` reads the scene on the thread of the error; if it raises, the report says what the error itself tells. Each
    of `sinks` is given every new report. `clock` is as `time.monotonic`.

    The hooks that are there go on being called. What was installed before is replaced, and its undo then does
    nothing. Hooks that were set after ours stay when ours goes.
    """
    global _installed, _pid
    if _installed is not None:
        _installed.undo()
    if _pid != os.getpid():  # a forked child: its parent's reports are not its own
        _reports.clear()
    _installed, _pid = _Installed(read, sinks, clock), os.getpid()
    in_full_again()
    return _installed.undo


def in_full_again() -> None:
    """Show the next report in full, whatever was shown before: another budget, another cell of a notebook."""
    _shown.clear()


def seen(error: BaseException, *, show: bool = True) -> Report | None:
    """The report, if the error is or came from an out-of-memory error. It is made, noted and printed once.

    Printed in full once a minute for the same requester, reason and GPU; in between one line says that it came again.
    None also if no budget is active and the error was not reported while one was.
    """
    report, fresh = _examine(error)
    if report is not None and fresh and show:
        _show(report)
    return report


def last_oom() -> Report | None:
    """The report of the last out-of-memory error of this process; None if there was none."""
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
            if (installed := _installed) is None or _pid != os.getpid():
                return None, False
            return _report(one, facts, verdict, installed), True
    except Exception as failure:
        _log.debug("an error could not be examined: %s: %s", type(failure).__name__, str(failure))
    return None, False


def _report(error: BaseException, facts: ErrorFacts, verdict: Verdict, installed: _Installed) -> Report:
    """Make the report, note it on the error, and give it to the sinks."""
    from memguard._oom.report import diagnose

    number = next(_numbers)
    _own(error)[_MARK] = (os.getpid(), number)
    scene = _quietly("no reading at an out-of-memory error", installed.read) or Scene()
    report = diagnose(facts, verdict, scene.ledger, scene.plan, scene.processes or {}, scene.samples, time=time.time())
    _reports[number] = report
    for old in sorted(dict(_reports))[:-_KEPT]:
        _reports.pop(old, None)
    if hasattr(error, "add_note"):  # Python 3.11
        _quietly("no note on the error", error.add_note, report.note)
    for sink in installed.sinks:
        _quietly("an out-of-memory error was not recorded", sink, report)
    return report


def _quietly(what: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception as failure:
        _log.debug("%s: %s: %s", what, type(failure).__name__, str(failure))
        return None


def _show(report: Report) -> None:
    """To standard error: drawn on a terminal, plain elsewhere."""
    try:
        shown = _again(report) or report
        if display is not None:
            display(shown)
        elif sys.stderr.isatty() and not isinstance(shown, str):
            from rich.console import Console

            Console(file=sys.stderr, highlight=False).print(shown, soft_wrap=True)
        else:
            sys.stderr.write(f"{shown}\n")
    except Exception as failure:  # closed, or missing under pythonw and services
        _log.debug("the report could not be shown: %s", str(failure))


def _again(report: Report) -> str | None:
    """One line instead of the report, if one like it was shown a short time ago; else None.

    Without a lock, which a signal handler might find held: two threads at once may both show theirs in full.
    """
    verdict, now = report.verdict, (_installed.clock if _installed is not None else time.monotonic)()
    for key, (shown, _) in list(_shown.items()):
        if not 0 <= now - shown < _AGAIN:
            _shown.pop(key, None)
    key = verdict.memory, verdict.requester, report.requester, report.reason, report.uuid
    since, count = _shown.get(key, (now, 0))
    _shown[key] = since, count + 1
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
    """The error, those of its group, its cause and its context: nearest first."""
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
    """The number of its report, if it was reported in this process."""
    mark = _own(error).get(_MARK)
    return mark[1] if mark is not None and mark[0] == os.getpid() else None


def _own(error: BaseException) -> dict[str, Any]:
    """The `__dict__` that every exception has, also one that refuses attributes: frozen, or with slots."""
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
    """One of Python's hooks for uncaught exceptions: examines the error, calls the hook before, shows the report."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self._module, self._name, self._live = module, name, True
        self._previous: Callable[..., Any] = getattr(module, name)
        setattr(module, name, self)

    def remove(self) -> None:
        self._live = False  # a hook that was set after ours still calls it: it then only passes on
        if getattr(self._module, self._name) is self:
            setattr(self._module, self._name, self._previous)

    def __call__(self, *args: Any) -> None:
        """`sys` gives type, value and traceback; `threading` gives one object that has them."""
        error = args[1] if len(args) > 1 else getattr(args[0], "exc_value", None)
        report, fresh = _examine(error) if self._live and isinstance(error, BaseException) else (None, False)
        del error
        try:
            self._pass_on(args)
        finally:
            if report is not None and fresh:
                _show(report)

    def _pass_on(self, args: tuple[Any, ...]) -> None:
        """Call the hook before; or let who called ours show the error as it would without any hook.

        `code.InteractiveInterpreter` and IDLE show an error in their own window if `sys.excepthook` is Python's own.
        """
        again = None
        if self._module is sys and sys.excepthook is self and self._previous is sys.__excepthook__:
            again = _without_hook()
        if again is None:
            self._previous(*args)
            return
        sys.excepthook = self._previous
        try:
            again()
        finally:
            sys.excepthook = self


def _without_hook() -> Callable[[], object] | None:
    """What shows the error that the caller of our hook has; None if that is no interactive interpreter."""
    try:
        caller = sys._getframe(3)
    except ValueError:  # Python itself called the hook
        return None
    own = caller.f_code
    names = own.co_varnames[: own.co_argcount]
    kind = getattr(sys.modules.get("code"), "InteractiveInterpreter", None)
    if kind is not None and names and isinstance(shell := caller.f_locals.get(names[0]), kind):
        for one in type(shell).__mro__:
            method = vars(one).get(own.co_name)
            if method is not None and getattr(method, "__code__", None) is own:
                return functools.partial(method, *(caller.f_locals[name] for name in names))
    found = caller.f_globals.get("print_exception") if caller.f_globals.get("__name__") == "idlelib.run" else None
    return found if callable(found) else None


class _Installed:
    """What `install` was given, and the hooks that it set."""

    def __init__(
        self, read: Callable[[], Scene], sinks: tuple[Callable[[Report], None], ...], clock: Callable[[], float]
    ) -> None:
        self.read, self.sinks, self.clock = read, sinks, clock
        self._hooks = (_Hook(sys, "excepthook"), _Hook(threading, "excepthook"))

    def undo(self) -> None:
        global _installed
        for hook in self._hooks:
            hook.remove()
        if _installed is self:
            _installed = None

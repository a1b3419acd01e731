"""Hooks for out-of-memory errors: classify, diagnose once, add a note, call the sinks, print and store the report.

An error reaches `report_error` from a Python hook for uncaught exceptions, a `workload` or `guard` block, a notebook's
cell or a failed test. `report_error` makes the report, passes it to the sinks of `install`, and prints it. Earlier,
when the allocator refused the request, `record_refusal` may have recorded the figures. If the program catches the
error, `last_oom` makes a report from the recorded figures.

The user's exception propagates unchanged. This module stores only text and figures, so it keeps no exception,
traceback, frame or array alive. No function here raises.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.types import RECORD, Plan, RefusedRequest, Sample
from memguard._frameworks.specs import SPECS

if TYPE_CHECKING:  # the modules for diagnosis are imported at the first error
    from memguard._budget import Budget
    from memguard._ledger.types import Ledger
    from memguard._oom.report import Classification, ErrorFacts, Report


_MARK = "_memguard_report"
"""The attribute that stores PID and report number in a reported exception. The attribute is pickled with the exception,
and is valid only in the process with that PID."""
_ATTRIBUTES = (
    "errno", "status", "code", "error_code", "_error_code", "result", "value", "_limit", "framework",
    "requested", "memguard_requested", RECORD,
    *(row.size_attribute for row in SPECS.values() if row.size_attribute),
)  # fmt: skip
"""Exception attributes that are copied to `ErrorFacts`. Frameworks and memguard's simulated GPUs set them, and memguard
adds some to PyCUDA's and Numba's errors."""
_MAX_TEXT = 4_000
"""Maximum characters read from the start and from the end of an exception's text, because TensorFlow's texts list the
whole graph."""
_MAX_CHAIN = 100
"""Maximum number of exceptions of one chain that are examined."""
_CAUSE, _CONTEXT, _SUPPRESSED = (
    vars(BaseException)[name] for name in ("__cause__", "__context__", "__suppress_context__")
)
"""`BaseException`'s descriptors of these attributes, used because an exception's class may override the names."""
_MAX_REPORTS = 8
"""Maximum number of reports that are stored for exceptions that reach a hook again."""
_MAX_RECORDS = 64
"""Maximum number of stored records of refused requests whose error was not reported yet. This many threads can fail at
the same time."""
_REPEAT_SECONDS = 60.0
"""Seconds after a report during which similar reports print one line each, for example in a loop that tries smaller
batches."""


class OomContext(NamedTuple):
    """The input of a report, read while the exception exists. `processes`: the bytes of other processes, by GPU UUID
    and PID. `peaks`: each framework's peak of bytes in use, by GPU UUID and name."""

    ledger: Ledger | None = None
    plan: Plan | None = None
    processes: Mapping[str, Mapping[int, int | None]] | None = None
    samples: tuple[Sample, ...] = ()
    budget: Budget | None = None
    peaks: Mapping[str, Mapping[str, int]] | None = None


class _Record(NamedTuple):
    """A recorded refused request. `context` creates an `OomContext` from the figures at the refusal."""

    request: RefusedRequest
    context: Callable[[], OomContext]


class _Shown:
    """A report printed in full, and the lines for similar reports, which are printed after the report.

    This class uses no lock, because a signal handler may interrupt the thread that holds a lock. Instead, a thread that
    has appended a line checks whether the report is printed, and a thread that has printed the report checks for lines.
    """

    def __init__(self, since: float) -> None:
        self.since, self.out = since, False
        self.counts = itertools.count(1)
        self.lines: deque[str] = deque()


display: Callable[[Report | str], None] | None = None
"""Replaces the output to standard error. A notebook sets `display`, so that reports appear under the cell's
traceback."""
_installed: _Installed | None = None
_pid: int | None = None
_numbers = itertools.count(1)
_reports: dict[int, Report] = {}
_in_full: deque[int] = deque(maxlen=_MAX_REPORTS)
"""The numbers of the reports that were or will be printed in full."""
_records: dict[int, _Record] = {}
"""Records of refused requests whose error was not reported yet, by number."""
_caught_reports: dict[int, Report] = {}
"""The reports that `last_oom` made from `_records`, by number."""
_shown: dict[tuple[str | None, ...], _Shown] = {}


def install(
    read: Callable[[], OomContext], *sinks: Callable[[Report], None], clock: Callable[[], float] = time.monotonic
) -> Callable[[], None]:
    """Install hooks that examine uncaught exceptions of all threads. The returned function removes the hooks.

    `read` returns the `OomContext` on the thread of the error; if `read` raises, the report uses only the error's text.
    Each of `sinks` is called with every new report. `clock` returns seconds, like `time.monotonic`.

    Existing hooks are still called. A new `install` replaces the earlier `install`, whose returned function then does
    nothing. Hooks that other code has set later are not removed.
    """
    global _installed, _pid
    if _installed is not None:
        _installed.undo()
    if _pid != os.getpid():  # a forked child drops its parent's reports
        for kept in (_reports, _records, _caught_reports):
            kept.clear()
    installed = _installed = _Installed(read, sinks, clock)
    _pid = os.getpid()
    show_next_in_full()
    installed.set()  # after `_installed`, so that `uninstall` can undo an interruption
    return installed.undo


def uninstall(read: Callable[[], OomContext]) -> None:
    """Undo the `install` call that passed `read`, even if the call was interrupted. Does nothing if another `install`
    has replaced that call."""
    installed = _installed
    if installed is not None and installed.read == read:
        installed.undo()


def show_next_in_full() -> None:
    """Print the next report in full, even if a similar report was printed. Called for a new budget or a new notebook
    cell."""
    _shown.clear()


def report_error(error: BaseException, *, show: bool = True) -> Report | None:
    """Return the report if `error` is an out-of-memory error or was caused by one, else None. For each error, the
    report is made, added as a note and printed once. Of reports with the same requester, cause and GPU, one per minute
    is printed in full, and each other report as one line. If no budget is active, returns only a report that exists
    already.
    """
    report, new_number = _examine(error)
    if report is not None and new_number and show:
        _Output(report, new_number).show()
    return report


def record_refusal(request: RefusedRequest, context: Callable[[], OomContext]) -> RefusedRequest:
    """Record a refused request on the requesting thread, before its error is raised.

    `context` creates an `OomContext` from figures already read, and is called only for a report. Returns the request
    with an id, or unchanged if no budget is active. Prints nothing.
    """
    if _installed is None or _pid != os.getpid():
        return request
    number = next(_numbers)
    request = request._replace(id=f"{_pid}:{number}")
    _records[number] = _Record(request, context)
    while len(_records) > _MAX_RECORDS:
        oldest = min(list(_records), default=number)
        _records.pop(oldest, None)
        _caught_reports.pop(oldest, None)
    return request


def last_oom() -> Report | None:
    """The report of the last out-of-memory error of this process; None if there was none.

    Includes errors that the program caught, if the framework's allocator reports refused requests to memguard.
    """
    if _pid != os.getpid():
        return None
    reports, refusals = dict(_reports), dict(_records)
    last = max((*reports, *refusals), default=None)
    if last is None or last in reports:
        return None if last is None else reports[last]
    if (known := _caught_reports.get(last)) is None:
        from memguard._oom.report import report_of_refusal

        context = _attempt("no reading at a refused request", refusals[last].context) or OomContext()
        figures = refusals[last].request, context.ledger, context.plan, context.processes or {}, context.budget
        known = _attempt("no report on a refused request", report_of_refusal, *figures)
        if known is None:
            return reports[max(reports)] if reports else None
        _caught_reports[last] = known
    return known


def facts_of(error: BaseException) -> ErrorFacts:
    """The exception as plain data, without a reference to the exception."""
    from memguard._oom.classify import ErrorFacts

    kind = type(error)
    try:
        text = str.__getitem__(str(error), slice(None))  # converts a str subclass without calling its methods
        if len(text) > 2 * _MAX_TEXT:
            text = f"{text[:_MAX_TEXT]}\n{text[-_MAX_TEXT:]}"
    except KeyboardInterrupt:
        raise
    except BaseException:  # code of the exception's class may raise anything
        text = ""
    attributes = {name: value for name in _ATTRIBUTES if (value := _plain_attribute(error, name)) is not None}
    return ErrorFacts(
        _qualified_name(kind),
        tuple(_qualified_name(base) for base in kind.__mro__ if base is not object),
        text,
        attributes,
    )


def _examine(error: BaseException) -> tuple[Report | None, int | None]:
    """The report, and the report's number if this call created the report."""
    try:
        for one in _chain(error):
            if (number := _marked(one)) is not None:
                return _reports.get(number), None
            if not issubclass(type(one), Exception):  # `isinstance` may run code of the exception's class
                continue
            # Import only here, because an import while a KeyboardInterrupt ends the program would hide the interrupt.
            from memguard._oom.classify import classify

            facts = facts_of(one)
            classification = classify(facts)
            if classification.memory == "none":
                continue
            if (number := next((n for cause in _causes(one) if (n := _marked(cause))), None)) is not None:
                return _reports.get(number), None  # `one` was raised `from` an error that was reported
            if (installed := _installed) is None or _pid != os.getpid():
                return None, None
            return _make_report(one, facts, classification, installed)
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # code of the exception's class may raise anything
        _log_failure("an error could not be examined", failure)
    return None, None


def _make_report(
    error: BaseException, facts: ErrorFacts, classification: Classification, installed: _Installed
) -> tuple[Report, int]:
    """Make the report, add the note to the error, and call the sinks. Returns the report and its number."""
    from memguard._oom.report import diagnose

    number = next(_numbers)
    _attributes_of(error)[_MARK] = (os.getpid(), number)
    record = _pop_record(facts, classification)
    then = (_attempt("no reading at a refused request", record.context) if record is not None else None) or OomContext()
    context = _attempt("no reading at an out-of-memory error", installed.read) or then
    report = diagnose(
        facts, classification, context.ledger, context.plan, then.processes or context.processes or {}, context.samples,
        time=time.time() if record is None else record.request.time, budget=context.budget, peaks=context.peaks,
        recorded=None if record is None else record.request, then=then.ledger,
    )  # fmt: skip
    _reports[number] = report
    for old in sorted(dict(_reports))[:-_MAX_REPORTS]:
        _reports.pop(old, None)
    _attempt("no note on the error", add_note, error, report.note)
    for sink in installed.sinks:
        _attempt("an out-of-memory error was not recorded", sink, report)
    return report, number


def _pop_record(facts: ErrorFacts, classification: Classification) -> _Record | None:
    """Remove and return the record of the refusal that caused the error, so that no other error uses the record."""
    number = _record_number(facts, classification)
    if number is None:
        return None
    _caught_reports.pop(number, None)
    return _records.pop(number, None)


def request_of(facts: ErrorFacts, classification: Classification) -> RefusedRequest | None:
    """The recorded refused request that caused the error; None if none is recorded. Keeps the record for a later
    report."""
    number = _record_number(facts, classification) if _pid == os.getpid() else None
    record = _records.get(number) if number is not None else None
    return record.request if record is not None else None


def _record_number(facts: ErrorFacts, classification: Classification) -> int | None:
    if not _records:
        return None
    from memguard._oom.classify import family
    from memguard._oom.refusal import record_of

    requests = {number: one.request for number, one in list(_records.items())}
    name = classification.requester or family(facts)
    return record_of(requests, facts, classification, name, os.getpid(), threading.get_ident())


def _attempt(what: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception as failure:
        _log_failure(what, failure)
        return None


def _log_failure(what: str, failure: BaseException) -> None:
    """Log the failure, without the exception's text if reading the text raises. Never raises."""
    with contextlib.suppress(Exception):
        facts = facts_of(failure)
        _log.debug("%s: %s: %s", what, facts.type, facts.text)


class _Output:
    """Prints one report, in full or, shortly after a similar report, as one line.

    The choice between full report and line is made at construction, so that a traceback printed before the full report
    can omit the error's note.
    """

    def __init__(self, report: Report, number: int) -> None:
        self._report, self._similar = report, _similar(report)
        self._count = next(self._similar.counts)
        self.in_full = self._count == 1
        if self.in_full:
            _in_full.append(number)

    def show(self) -> None:
        """Print to standard error (with rich on a terminal), or call `display`."""
        shown = self._similar
        if self.in_full:
            try:
                _write(self._report)
            finally:
                shown.out = True
        else:
            shown.lines.append(_line(self._report, self._count, shown.since))
        while shown.out and shown.lines:
            try:
                line = shown.lines.popleft()
            except IndexError:  # another thread has taken the last line
                return
            _write(line)


def _write(shown: Report | str) -> None:
    try:
        if display is not None:
            display(shown)
        elif sys.stderr.isatty() and not isinstance(shown, str):
            from rich.console import Console

            Console(file=sys.stderr, highlight=False).print(shown, soft_wrap=True)
        else:
            sys.stderr.write(f"{shown}\n")
    except Exception as failure:  # standard error is closed, or missing under pythonw and in services
        _log.debug("the report could not be shown: %s", text_of(failure))


def _similar(report: Report) -> _Shown:
    """The `_Shown` of similar reports in the last minute, the same object for all threads."""
    classification, now = report.verdict, _now()
    for key, shown in list(_shown.items()):
        if not 0 <= now - shown.since < _REPEAT_SECONDS and _shown.get(key) is shown:
            _shown.pop(key, None)
    key = classification.memory, classification.requester, report.requester, report.reason, report.uuid
    return _shown.setdefault(key, _Shown(now))


def _now() -> float:
    return (_installed.clock if _installed is not None else time.monotonic)()


def _line(report: Report, count: int, since: float) -> str:
    """The line that replaces a similar report."""
    classification = report.verdict
    prefix = "" if report.requester == "unknown" else f"{report.requester} "
    possibly = "" if classification.certain else "possibly "
    what = {"gpu": "out of memory", "disk": "out of disk"}.get(
        classification.memory, f"out of {classification.memory} memory"
    )
    times = f"{_ordinal(count)} time in {max(round(_now() - since), 1)} s"
    return f"memguard: {prefix}{possibly}{what} again ({times}): memguard.last_oom()"


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}th" if number % 100 in (11, 12, 13) else f"{number}{ending}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and recursively the members of its group, its cause and its context, nearest first."""
    known: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting and len(known) < _MAX_CHAIN:
        one = waiting.pop()
        if one is None or id(one) in known or issubclass(type(one), (GeneratorExit, KeyboardInterrupt, SystemExit)):
            continue
        known.add(id(one))
        yield one
        cause, context, members = related(one)
        waiting += [None if context_suppressed(one) else context, cause, *reversed(members)]


def related(error: BaseException) -> tuple[BaseException | None, BaseException | None, tuple[BaseException, ...]]:
    """The exception's cause, its context and the members of a group, read without running code of the exception's
    class.

    The class may define properties with these names that raise or never return.
    """
    # Python 3.11's exception groups, or those of the package `exceptiongroup`.
    backport = sys.modules.get("exceptiongroup")
    group = getattr(builtins, "BaseExceptionGroup", None) or getattr(backport, "BaseExceptionGroup", None)
    # Other packages, such as older versions of trio, define groups with this attribute.
    members: Any = _attributes_of(error).get("exceptions")
    if group is not None and issubclass(type(error), group):
        members = vars(group)["exceptions"].__get__(error)
    found = tuple(m for m in members if issubclass(type(m), BaseException)) if type(members) in (list, tuple) else ()
    return _CAUSE.__get__(error), _CONTEXT.__get__(error), found


def context_suppressed(error: BaseException) -> bool:
    """True if tracebacks omit the error's context, after `raise ... from`."""
    return bool(_SUPPRESSED.__get__(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause, left = _CAUSE.__get__(error), _MAX_CHAIN
    while cause is not None and left:
        yield cause
        cause, left = _CAUSE.__get__(cause), left - 1


def add_note(error: BaseException, note: str) -> None:
    """Like `BaseException.add_note`, but without running code of the exception's class, which may refuse new
    attributes."""
    notes = _attributes_of(error).setdefault("__notes__", [])
    if type(notes) is list:
        notes.append(note)


def _marked(error: BaseException) -> int | None:
    """The number of the error's report; None if this process has not reported the error."""
    mark = _attributes_of(error).get(_MARK)
    return mark[1] if mark is not None and mark[0] == os.getpid() else None


def _attributes_of(error: BaseException) -> dict[str, Any]:
    """The `__dict__` of an exception, even if its class is frozen or slotted and refuses new attributes."""
    found: dict[str, Any] = vars(BaseException)["__dict__"].__get__(error)
    return found


def _qualified_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _plain_attribute(error: BaseException, name: str) -> int | str | None:
    """The value of an attribute if it is an int or a short str; otherwise None."""
    try:
        value = getattr(error, name, None)
    except KeyboardInterrupt:
        raise
    except BaseException:  # a property of the exception's class may raise
        return None
    if type(value) is int:
        return value
    return value if type(value) is str and len(value) <= 100 else None


def without_note(error: BaseException, prints: bool) -> Callable[[], None]:
    """Remove the notes of reports printed in full from `error` and its chain while the traceback is printed.

    `prints`: True if Python's own hook prints the traceback next to the report. Any other hook may send the traceback
    elsewhere, so the note is then shortened to one line. Returns a function that restores the notes and holds no other
    reference to the error.
    """
    taken: list[tuple[list[Any], int, str]] = []
    try:
        for one in _chain(error):
            number, notes = _marked(one), _attributes_of(one).get("__notes__")
            report = _reports.get(number) if number in _in_full and number is not None else None
            if report is None or type(notes) is not list or report.note not in notes:
                continue
            at = notes.index(report.note)
            notes[at : at + 1] = [] if prints else [report.line]
            taken.append((notes, at, report.note))
    except Exception as failure:
        _log.debug("a note stays in the traceback: %s", str(failure))

    def restore() -> None:
        for notes, at, note in taken:
            notes[at : at + (not prints)] = [note]

    return restore


class _Hook:
    """A Python hook for uncaught exceptions, which examines the error, calls the previous hook and prints the
    report."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self._module, self._name, self._live = module, name, True
        self._previous: Callable[..., Any] = getattr(module, name)

    def set(self) -> None:
        setattr(self._module, self._name, self)

    def remove(self) -> None:
        self._live = False  # a hook set later may still call this hook, which then only calls the previous hook
        if getattr(self._module, self._name) is self:
            setattr(self._module, self._name, self._previous)

    def __call__(self, *args: Any) -> None:
        """`sys` passes type, value and traceback; `threading` passes one object that contains them."""
        error = args[1] if len(args) > 1 else getattr(args[0], "exc_value", None)
        if not isinstance(error, BaseException):
            self._call_previous(args)
            return
        report, new_number = _examine(error) if self._live else (None, None)
        showing = _Output(report, new_number) if report is not None and new_number is not None else None
        restore = without_note(error, self._prints)
        del error
        try:
            self._call_previous(args)
        finally:
            restore()
            if showing is not None:
                showing.show()

    @property
    def _prints(self) -> bool:
        """True if the previous hook is Python's own, which only prints the traceback to standard error."""
        before = self._previous
        while isinstance(before, _Hook):
            before = before._previous
        return before in (sys.__excepthook__, threading.__excepthook__)

    def _call_previous(self, args: tuple[Any, ...]) -> None:
        """Call the previous hook, or let an interactive interpreter show the error in its own window.

        `code.InteractiveInterpreter` and IDLE show errors in their window only if `sys.excepthook` is Python's own.
        """
        show = None
        if self._module is sys and sys.excepthook is self and self._previous is sys.__excepthook__:
            show = _without_hook()
        if show is None:
            self._previous(*args)
            return
        sys.excepthook = self._previous
        try:
            show()
        finally:
            sys.excepthook = self


def _without_hook() -> Callable[[], object] | None:
    """The interactive interpreter's function that shows the current error; None if an interactive interpreter did not
    call the hook."""
    try:
        caller = sys._getframe(3)
    except ValueError:  # no third caller, because Python itself called the hook
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
    """The arguments of one `install` call, and the hooks that the call set."""

    def __init__(
        self, read: Callable[[], OomContext], sinks: tuple[Callable[[Report], None], ...], clock: Callable[[], float]
    ) -> None:
        self.read, self.sinks, self.clock = read, sinks, clock
        self._hooks = (_Hook(sys, "excepthook"), _Hook(threading, "excepthook"))

    def set(self) -> None:
        for hook in self._hooks:
            hook.set()

    def undo(self) -> None:
        global _installed
        for hook in self._hooks:
            hook.remove()
        if _installed is self:
            _installed = None

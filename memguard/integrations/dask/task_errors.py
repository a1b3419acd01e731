"""Add the out-of-memory report of a task's exception to the exception that the client receives.

A task's exception never reaches Python's hooks: Dask catches it in the worker, and pickles it with `error_message`.
memguard wraps that function and adds the whole report as a note to the pickled exception, because the client does not
see the worker's standard error. If Dask replaces an exception that is too long or cannot be pickled, the replacement
gets the note.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.undo import Undo
from memguard._oom import hooks

if TYPE_CHECKING:
    from memguard._oom.report import Report

_NAME = "error_message"
_report_callbacks: list[Callable[[Report], None]] = []
"""One callback for each worker in this process; they share one wrapper of the function."""


def begin(callback: Callable[[Report], None], undo: Undo) -> None:
    """Wrap `error_message` in distributed's worker module. `callback` receives each report, on the task's thread."""
    from distributed import worker as module

    undo.add("the reports on errors of tasks", functools.partial(_end, callback, module))
    _report_callbacks.append(callback)
    original = getattr(module, _NAME, None)
    if original is None:
        _log.warning("this version of distributed has no worker.%s: clients do not get the reports", _NAME)
    elif len(_report_callbacks) == 1:
        setattr(module, _NAME, _Reported(original))


def _end(callback: Callable[[Report], None], module: ModuleType) -> None:
    if callback in _report_callbacks:
        _report_callbacks.remove(callback)
    now = getattr(module, _NAME, None)
    if not _report_callbacks and isinstance(now, _Reported):  # else other code wrapped it again
        setattr(module, _NAME, now.original)


class _Reported:
    """The wrapper of `error_message`: adds the report to the exception."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, error: BaseException, *args: Any, **kwargs: Any) -> Any:
        report = hooks.report_error(error) if _report_callbacks and isinstance(error, Exception) else None
        message = self.original(error, *args, **kwargs)
        if report is not None:
            _carry(message, report)
            for callback in [*_report_callbacks]:
                callback(report)
        return message


def _carry(message: Any, report: Report) -> None:
    """Replace the short note on the pickled exception with the whole report."""
    try:
        from distributed.protocol import pickle, to_serialize

        from memguard._oom.report import full_text

        sent = pickle.loads(message["exception"].data)
        notes = getattr(sent, "__notes__", None)
        if type(notes) is list and report.note in notes:
            notes[notes.index(report.note)] = full_text(report)
        else:
            hooks.add_note(sent, full_text(report))
        message["exception"] = to_serialize(pickle.dumps(sent))
    except Exception as failure:
        _log.debug("a report was not put on a task's error: %s", text_of(failure))

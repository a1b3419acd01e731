"""The report of an out-of-memory error, on the exception that a client gets.

A task's exception never reaches Python's hooks: Dask catches it in the worker, and pickles it with `error_message`.
That is wrapped, so that the whole report is noted on what is sent: the client does not see the worker's standard error,
which has it too. Where Dask sends another exception, because this one is too long or cannot be pickled, that one gets
the note.
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
"""Of each worker in this process: the function is wrapped once."""


def begin(callback: Callable[[Report], None], undo: Undo) -> None:
    """Wrap `error_message` where distributed's worker calls it. `tell` is given each report, on the task's thread."""
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
    if not _report_callbacks and isinstance(now, _Reported):  # else somebody wrapped it again: ours then only passes on
        setattr(module, _NAME, now.original)


class _Reported:
    """Dask's function with a report on the exception that it is given."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, error: BaseException, *args: Any, **kwargs: Any) -> Any:
        report = hooks.seen(error) if _report_callbacks and isinstance(error, Exception) else None
        message = self.original(error, *args, **kwargs)
        if report is not None:
            _carry(message, report)
            for callback in [*_report_callbacks]:
                callback(report)
        return message


def _carry(message: Any, report: Report) -> None:
    """Note the report on the exception that was pickled, in the place of its short note."""
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

"""The report of an out-of-memory error, on the exception that a client gets.

A task's exception never reaches Python's hooks: Dask catches it in the worker, and pickles it with `error_message`.
That is wrapped, so that the report is noted on the exception first, and notes travel. Where Dask sends another one in
its place, because the exception is too long or cannot be pickled, that one gets the note.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memguard._logs import log as _log
from memguard._logs import text_of
from memguard._oom import hooks
from memguard._undo import Undo

if TYPE_CHECKING:
    from memguard._oom.report import Report

_NAME = "error_message"


class TaskErrors:
    """`tell` is given each report, on the thread of the task."""

    def __init__(self, tell: Callable[[Report], None]) -> None:
        self._tell = tell
        self._live = True

    def begin(self, undo: Undo) -> None:
        """Wrap `error_message` where distributed's worker calls it."""
        from distributed import worker as module

        original = getattr(module, _NAME, None)
        if original is None:
            _log.warning("this version of distributed has no worker.%s: clients do not get the reports", _NAME)
            return

        @functools.wraps(original)
        def reported(error: BaseException, *args: Any, **kwargs: Any) -> Any:
            report = self._seen(error)
            message = original(error, *args, **kwargs)
            if report is not None:
                self._carry(message, report.note, lambda one: original(one, *args, **kwargs))
            return message

        def unwrap() -> None:
            self._live = False  # whatever wrapped it again still calls it
            if getattr(module, _NAME) is reported:
                setattr(module, _NAME, original)

        undo.add("the reports on errors of tasks", unwrap)
        setattr(module, _NAME, reported)

    def _seen(self, error: BaseException) -> Report | None:
        if not self._live or not isinstance(error, Exception):
            return None
        report = hooks.seen(error)
        if report is not None:
            try:
                self._tell(report)
            except Exception as failure:
                _log.debug("a report was not sent to the scheduler: %s", text_of(failure))
        return report

    @staticmethod
    def _carry(message: Any, note: str, again: Callable[[BaseException], Any]) -> None:
        """See that what was pickled has the note. `again` makes the message of another exception."""
        try:
            sent = pickle.loads(message["exception"].data)
            if note in getattr(sent, "__notes__", ()):
                return
            hooks.add_note(sent, note)
            message["exception"] = again(sent)["exception"]
        except Exception as failure:
            _log.debug("a report was not put on a task's error: %s", text_of(failure))

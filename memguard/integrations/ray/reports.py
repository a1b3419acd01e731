"""The report of an out-of-memory error, in the error that the caller of a task or of an actor's method gets.

Ray catches a task's exception in the worker, formats its traceback, and sends both in a `RayTaskError`. There is no
hook in between. So the constructor of that public class is wrapped, in the worker alone: the text gets the whole
report. It is then also in what a dead actor's error, Ray's logs and its dashboard say. Where an exception was raised in
another process, and is only passed on, it has the report of that process.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._oom import hooks

if TYPE_CHECKING:
    from memguard._base.undo import Undo

_FIRST = ["self", "function_name", "traceback_str", "cause"]


def begin(undo: Undo) -> None:
    """Wrap the constructor of `ray.exceptions.RayTaskError`."""
    from ray import exceptions

    kind: Any = exceptions.RayTaskError
    original: Any = kind.__init__
    if [*inspect.signature(original).parameters][: len(_FIRST)] != _FIRST:
        _log.warning(
            "this version of Ray makes its RayTaskError otherwise: callers do not get the reports of out-of-memory "
            "errors, which are in the workers' logs"
        )
        return
    live = [True]

    def init(self: Any, function_name: Any, traceback_str: Any, cause: Any, *args: Any, **kwargs: Any) -> None:
        if live:
            traceback_str = _reported(traceback_str, cause)
        original(self, function_name, traceback_str, cause, *args, **kwargs)

    def unwrap() -> None:
        live.clear()  # if somebody wrapped it again, ours then only passes on
        if kind.__init__ is init:
            kind.__init__ = original

    undo.add("the reports on errors of tasks", unwrap)
    kind.__init__ = init


def _reported(text: Any, cause: Any) -> Any:
    """The text with the report, if the exception was raised here: one that came from elsewhere has no traceback."""
    if not isinstance(text, str) or not isinstance(cause, Exception) or cause.__traceback__ is None:
        return text
    report = hooks.report_error(cause)
    if report is None:
        return text
    from memguard._oom.report import full_text

    whole = full_text(report)
    try:
        notes = getattr(cause, "__notes__", None)
        if type(notes) is list and report.note in notes:
            notes.remove(report.note)  # the caller would see it below the whole report
        if whole in text:
            return text
        before, short, after = text.partition(report.note)
        return f"{before}{whole}{after}" if short else f"{text.rstrip()}\n\n{whole}\n"
    except Exception as failure:
        _log.debug("a report was not put into a task's error: %s", text_of(failure))
        return text

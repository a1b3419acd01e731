"""Add the out-of-memory report to the error that the caller of a Ray task or actor method receives.

Ray catches a task's exception in the worker, formats its traceback, and sends both in a `RayTaskError`. Ray has no hook
for this. So memguard wraps the constructor of that public class, in workers only, and inserts the whole report into the
text. The errors of dead actors, Ray's logs and its dashboard then show it too. An exception that this worker only
forwards already contains the report of the process that raised it.
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
        live.clear()  # if other code wrapped it again, `init` stays and only calls on
        if kind.__init__ is init:
            kind.__init__ = original

    undo.add("the reports on errors of tasks", unwrap)
    kind.__init__ = init


def _reported(text: Any, cause: Any) -> Any:
    """The text with the report, if this process raised the exception: a forwarded one has no traceback."""
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

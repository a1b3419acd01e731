"""An undo stack that survives an interruption."""

from __future__ import annotations

from collections.abc import Callable

from memguard._base.logs import log as _log
from memguard._base.logs import text_of


class Undo:
    """Undo steps, run last first. After an interruption the next `run` runs the remaining steps.

    Add a step before the change that it undoes: an interruption may come right after the change. So a step must also
    work in three states: the change was not made yet; an earlier run of the step completed or was interrupted; a later
    change is still in place because that change's step was interrupted. A completed step is removed.

    `on_error` is called with the name and the error of each step that raises. By default a failure is logged.
    """

    def __init__(self, on_error: Callable[[str, BaseException], object] | None = None) -> None:
        self._steps: list[_Step] = []
        self._on_error = on_error or _log_failure

    @property
    def done(self) -> bool:
        """True if no steps remain."""
        return not self._steps

    def add(self, what: str, step: Callable[[], object]) -> None:
        """Add a step. `what` names the step in the report of a failure."""
        self._steps.append(_Step(what, step))

    def clear(self) -> None:
        """Remove all steps without running them, after the caller has undone the changes itself."""
        self._steps.clear()

    def run(self) -> None:
        """Run the steps. A step that fails is reported and removed.

        A step that is interrupted (Ctrl-C, an exit) stays in the list. The other steps run, then the interruption is
        raised.
        """
        interruption: BaseException | None = None
        for step in reversed([*self._steps]):
            try:
                step.do()
            except BaseException as error:
                self._on_error(step.what, error)
                if not isinstance(error, Exception):
                    interruption = interruption or error
                    continue
            if step in self._steps:  # false if a signal handler ran the steps during `do`
                self._steps.remove(step)
        if interruption is not None:
            raise interruption


def _log_failure(what: str, error: BaseException) -> None:
    if isinstance(error, Exception):
        _log.warning("%s: could not be undone: %s", what, text_of(error))


class _Step:
    def __init__(self, what: str, do: Callable[[], object]) -> None:
        self.what, self.do = what, do

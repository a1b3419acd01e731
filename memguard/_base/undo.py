"""An undo stack that survives an interruption."""

from __future__ import annotations

from collections.abc import Callable

from memguard._base.logs import log as _log
from memguard._base.logs import text_of


class Undo:
    """Undo steps, run last first. After an interruption the next `run` runs the remaining steps.

    Add a step before the change that it undoes: an interruption may come right after the change. So a step must also
    work before the change was made, and after an earlier run of the step, complete or not. A step that returns or fails
    is removed.
    """

    def __init__(self) -> None:
        self._steps: list[_Step] = []

    @property
    def done(self) -> bool:
        """Whether no steps remain."""
        return not self._steps

    def add(self, what: str, step: Callable[[], object]) -> None:
        """Add a step. `what` names it in the warning if it fails."""
        self._steps.append(_Step(what, step))

    def clear(self) -> None:
        """Drop the steps: other code undoes the changes."""
        self._steps.clear()

    def run(self) -> None:
        """Run the steps. A step that fails is logged as a warning and removed.

        A step that is interrupted (Ctrl-C, an exit) stays in the list. The other steps run, then the interruption is
        raised.
        """
        interruption: BaseException | None = None
        for step in reversed([*self._steps]):
            try:
                step.do()
            except Exception as error:
                _log.warning("%s: could not be undone: %s", step.what, text_of(error))
            except BaseException as error:
                interruption = interruption or error
                continue
            if step in self._steps:  # else a signal handler ran the steps during `do`
                self._steps.remove(step)
        if interruption is not None:
            raise interruption


class _Step:
    def __init__(self, what: str, do: Callable[[], object]) -> None:
        self.what, self.do = what, do

"""What takes back a change: a list of steps that survives an interruption."""

from __future__ import annotations

from collections.abc import Callable

from memguard._base.logs import log as _log
from memguard._base.logs import text_of


class Undo:
    """Steps that take back what was done, last first. Whatever interrupts them, the next `run` finishes them.

    Add a step before the change that it takes back: an interruption may come right after the change. So a step must
    work too if there was no change yet, and if it ran before, wholly or in part. It is forgotten once it has ended.
    """

    def __init__(self) -> None:
        self._steps: list[_Step] = []

    @property
    def done(self) -> bool:
        """Whether nothing is left to take back."""
        return not self._steps

    def add(self, what: str, step: Callable[[], object]) -> None:
        """`what` names it in a warning, if it fails."""
        self._steps.append(_Step(what, step))

    def clear(self) -> None:
        """Forget the steps: something else takes back what they would."""
        self._steps.clear()

    def run(self) -> None:
        """Do the steps. One that fails is warned about and forgotten.

        One that is interrupted (Ctrl-C, an exit) stays in the list. The others are done, and then that is raised.
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
            if step in self._steps:  # else a signal handler ran them all meanwhile
                self._steps.remove(step)
        if interruption is not None:
            raise interruption


class _Step:
    def __init__(self, what: str, do: Callable[[], object]) -> None:
        self.what, self.do = what, do

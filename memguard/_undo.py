"""Steps to take back what was applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memguard.errors import CapNotApplied


@dataclass
class Undo:
    """Steps to take back, last first. A step that fails is reported and does not stop the others."""

    steps: list[tuple[str, Callable[[], None]]] = field(default_factory=list)

    def run(self) -> list[str]:
        failed = []
        while self.steps:
            label, step = self.steps.pop()
            try:
                step()
            except CapNotApplied as error:
                failed.append(f"{label}: stays: {error.reason}")
            except Exception as error:
                failed.append(f"{label}: could not be undone: {error}")
        return failed

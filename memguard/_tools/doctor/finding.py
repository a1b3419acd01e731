"""A finding and its severity."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memguard._base.findings import Name


class Severity(StrEnum):
    """error: something does not work. warning: it works now and will cause trouble. info: nothing to do."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


@dataclass(frozen=True)
class Finding:
    """What is wrong, why, and what to do.

    subject   the framework, GPU or file that it is about; "" for the machine
    cause     one sentence
    evidence  what was read and where, one line each
    remedy    a command, a line of the budget or one sentence; shown to the user, never run
    """

    name: Name
    severity: Severity
    cause: str
    evidence: tuple[str, ...]
    remedy: str
    subject: str = ""

    @property
    def page(self) -> str:
        """Its page in the documentation."""
        return f"docs/doctor/{self.name}.md"

"""One thing found, and the words for how bad it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from memguard._findings import Name


class Severity(str, Enum):
    """error: something does not work. warning: it works and will bite. info: worth knowing, nothing to do."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"

    def __str__(self) -> str:
        return str(self.value)

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


@dataclass(frozen=True)
class Finding:
    """What is wrong, why, and what to do.

    subject   the framework, GPU or file it is about; "" where it is the machine
    cause     one sentence
    evidence  what was read and where, a line each
    remedy    a command, a line of the budget or one sentence; quoted to the user, never run
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

"""Findings, their severities, and the decorator that makes a function a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from memguard._base import findings
from memguard._tools.doctor.facts import Facts


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
    """A problem, its cause and its remedy.

    subject   the framework, GPU or file that it is about; "" for the machine
    cause     one sentence
    evidence  what was read and where, one line each
    remedy    a command, a line of the budget or one sentence; shown to the user, never run
    """

    name: str
    severity: Severity
    cause: str
    evidence: tuple[str, ...]
    remedy: str
    subject: str = ""

    @property
    def page(self) -> str:
        """The path of its page in the documentation."""
        return f"docs/doctor/{self.name}.md"


@dataclass(frozen=True)
class Found:
    """The result of a check. Defaults: the first name of the check, and the first severity of that finding's page.

    Empty lines of evidence are left out.
    """

    cause: str
    evidence: Iterable[str]
    remedy: str
    subject: str = ""
    severity: Severity | None = None
    name: str = ""


@dataclass(frozen=True)
class Check:
    """A function from facts to findings. `names`: its possible findings; `order`: its place among the checks."""

    names: tuple[str, ...]
    order: float
    function: Callable[[Facts], Iterable[Found]]

    def __call__(self, facts: Facts) -> Iterator[Finding]:
        for found in self.function(facts):
            name = found.name or self.names[0]
            severity = found.severity or Severity(findings.page(name).severities[0])
            evidence = tuple(filter(None, found.evidence))
            yield Finding(name, severity, found.cause, evidence, found.remedy, found.subject)


def check(*names: str, order: float = float("inf")) -> Callable[[Callable[[Facts], Iterable[Found]]], Check]:
    """Make a function in a module of `checks/` a check, which `examine` discovers.

    Each name needs a page, `docs/doctor/<name>.md`, whose front matter has the finding's severities. Findings of one
    severity are shown in the order of their checks.
    """
    return lambda function: Check(names, order, function)

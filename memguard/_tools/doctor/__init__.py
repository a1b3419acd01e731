"""`memguard doctor`: why a framework does not work on this GPU, and what to do.

`collect.gather` collects facts; it imports and uses each framework in a separate short process. `examine` derives the
findings from the facts alone. `doctor` does both.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from memguard._tools.doctor.facts import Facts
from memguard._tools.doctor.finding import Finding, Severity
from memguard.errors import MemguardError

if TYPE_CHECKING:
    from memguard._base.framework_spec import FrameworkName
    from memguard._budget import Budget

__all__ = ["DoctorReport", "Facts", "Finding", "Severity", "doctor"]

_LONGEST = 86400
"""The largest time-out, in seconds: one day."""


@dataclass(frozen=True)
class DoctorReport:
    """The collected facts and the findings. `ignored`: names of the findings left out on request."""

    facts: Facts
    findings: tuple[Finding, ...]
    ignored: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """No errors or warnings, and all requested frameworks are installed (by default: at least one)."""
        return not self.found and bool(self.facts.frameworks) and not self.not_installed

    @property
    def found(self) -> tuple[Finding, ...]:
        """Errors and warnings."""
        return tuple(finding for finding in self.findings if finding.severity is not Severity.INFO)

    @property
    def not_installed(self) -> tuple[str, ...]:
        """The frameworks requested by name or by the budget that are not installed."""
        return tuple(name for name, found in self.facts.frameworks.items() if found.probe is None and not found.path)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of severity error: something does not work."""
        return tuple(finding for finding in self.findings if finding.severity is Severity.ERROR)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as `memguard doctor --json` prints it."""
        from memguard._tools.doctor import render

        return render.as_dict(self)

    def __str__(self) -> str:
        from memguard._tools.doctor import render

        return render.text(self)

    def __repr__(self) -> str:
        """One line, for an interactive prompt; `print` shows the whole report."""
        from memguard._tools.doctor import render

        return f"<DoctorReport: {render.verdict(self)}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the whole report in IPython and notebooks."""
        printer.text(str(self))


def doctor(
    budget: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    frameworks: FrameworkName | Sequence[FrameworkName] | None = None,
    ignore: str | Collection[str] = (),
    timeout: float = 60.0,
) -> DoctorReport:
    """Find out why frameworks do not work on this machine and in this process. Creates no context in this process.

    Each installed framework is imported and used in a separate process, which is stopped after `timeout` seconds. With
    `frameworks` or a budget, only the named ones are. The call takes a few seconds, and each process up to 1.5 GiB of
    GPU memory. Findings named in `ignore`, or in the budget's `doctor: {ignore: [...]}`, are left out. A
    single name may be a plain string.
    Raises ConfigError for a wrong budget and MemguardError for an unknown name or a wrong `timeout`.
    """
    from memguard import _budget
    from memguard._base.findings import known
    from memguard._tools.doctor.collect import gather

    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout <= _LONGEST:
        raise MemguardError(
            f"timeout is a number of seconds, above 0 and up to {_LONGEST}, not {timeout!r}", fix="timeout=60"
        )
    wanted, left_out = _names("frameworks", frameworks), _names("ignore", ignore)
    loaded = None if budget is None else _budget.of(budget)
    silent = known(left_out)
    facts = gather.facts(loaded, frameworks=wanted or None, timeout=timeout, this_process=True)
    return report_on(facts, loaded, silent)


def report_on(facts: Facts, budget: Budget | None, ignore: frozenset[str] = frozenset()) -> DoctorReport:
    """Examine the facts. Leaves out the findings that `ignore` or the budget names."""
    from memguard._tools.doctor.examine import examine

    silent = ignore | set(budget.doctor.ignore if budget is not None and budget.doctor is not None else ())
    return DoctorReport(facts, examine(facts, silent), tuple(sorted(silent)))


def _names(argument: str, given: Any) -> tuple[str, ...]:
    """Validate an argument that is a list of names, or one name as a plain string."""
    names = (given,) if isinstance(given, str) else () if given is None else given
    try:
        names = tuple(names)
    except TypeError:
        names = (None,)
    if not all(isinstance(name, str) for name in names):
        raise MemguardError(f"{argument} is a list of names, not {given!r}", fix=f"{argument}=['...']")
    return names

"""`memguard doctor`: why a framework does not work on this GPU, and what to do.

`gather` reads facts, each framework in a short process of its own; `examine` makes findings of them, and touches
nothing. `doctor` does both.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memguard.checkup.facts import Facts
from memguard.checkup.finding import Finding, Severity

__all__ = ["Checkup", "Facts", "Finding", "Severity", "doctor"]


@dataclass(frozen=True)
class Checkup:
    """What was read and what it amounts to. `ignored`: names of findings that were left out."""

    facts: Facts
    findings: tuple[Finding, ...]
    ignored: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        """Nothing above info."""
        return all(finding.severity is Severity.INFO for finding in self.findings)

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity is Severity.ERROR)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as `memguard doctor --json` prints it."""
        from memguard.checkup import render

        return render.as_dict(self)

    def __str__(self) -> str:
        from memguard.checkup import render

        return render.text(self)

    def __repr__(self) -> str:
        """Short, where a prompt shows what was returned; `print` shows all of it."""
        from memguard.checkup import render

        return f"<Checkup: {render.verdict(self)}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What IPython and notebooks show."""
        printer.text(str(self))


def doctor(
    budget: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    frameworks: Sequence[str] | None = None,
    ignore: Collection[str] = (),
    timeout: float = 60.0,
) -> Checkup:
    """Look for what keeps frameworks from working here, this process included. Creates no context in this process.

    Each framework that is installed (`frameworks`: only those; with a budget those that it names) is imported and used
    in a process of its own, stopped after `timeout` seconds; that takes some 600 MiB of the GPU meanwhile and some
    seconds. Findings named in `ignore`, or in the budget's `doctor: {ignore: [...]}`, are left out.
    Raises ConfigError for a wrong budget and MemguardError for an unknown name.
    """
    from memguard import config
    from memguard.checkup import gather
    from memguard.checkup.examine import examine
    from memguard.findings import known

    loaded = None if budget is None else config.of(budget)
    silent = known(ignore) | set(loaded.doctor.ignore if loaded is not None and loaded.doctor is not None else ())
    facts = gather.facts(loaded, frameworks=frameworks, timeout=timeout, here=True)
    return Checkup(facts, examine(facts, silent), tuple(sorted(silent)))

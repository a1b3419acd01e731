"""Runs every check over the facts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from memguard._tools.doctor.checks import build, devices, driver, libraries, memory, mps, noise, suspending
from memguard._tools.doctor.facts import Facts
from memguard._tools.doctor.finding import Finding

Check = Callable[[Facts], Iterable[Finding]]
CHECKS: tuple[Check, ...] = (
    *driver.CHECKS,
    *devices.CHECKS,
    *libraries.CHECKS,
    *build.CHECKS,
    *memory.CHECKS,
    *mps.CHECKS,
    *suspending.CHECKS,
    *noise.CHECKS,
)


def examine(facts: Facts, ignore: Collection[str] = ()) -> tuple[Finding, ...]:
    """The findings: errors first, otherwise in the order of the checks. Names in `ignore` are left out."""
    found = [finding for check in CHECKS for finding in check(facts) if finding.name not in ignore]
    return tuple(sorted(dict.fromkeys(found), key=lambda finding: finding.severity.rank))

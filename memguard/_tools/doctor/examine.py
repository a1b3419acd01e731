"""Discovers the checks in the modules of `checks/`, and runs them over the facts."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Collection

from memguard._tools.doctor import checks
from memguard._tools.doctor.facts import Facts
from memguard._tools.doctor.finding import Check, Finding


@functools.cache
def every() -> tuple[Check, ...]:
    """Every check, in the order in which they run."""
    names = sorted(module.name for module in pkgutil.iter_modules(checks.__path__))
    modules = [importlib.import_module(f"{checks.__name__}.{name}") for name in names]
    found = dict.fromkeys(value for module in modules for value in vars(module).values() if isinstance(value, Check))
    return tuple(sorted(found, key=lambda check: check.order))


def examine(facts: Facts, ignore: Collection[str] = ()) -> tuple[Finding, ...]:
    """The findings: errors first, otherwise in the order of the checks. Names in `ignore` are left out."""
    found = [finding for check in every() for finding in check(facts) if finding.name not in ignore]
    return tuple(sorted(dict.fromkeys(found), key=lambda finding: finding.severity.rank))

from __future__ import annotations

from collections.abc import Callable, Iterable

from memguard.checkup.facts import Facts
from memguard.checkup.finding import Finding

CHECKS: tuple[Callable[[Facts], Iterable[Finding]], ...] = ()

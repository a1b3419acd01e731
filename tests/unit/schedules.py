"""Schedules of six simulated frameworks, for the tests of what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from simulated_runner import SimulatedRunner
from support import schedules as _schedules
from support.oracle import Entry, Terms, Verdicts, judge

from memguard import Budget
from memguard._base.units import GIB
from memguard._devices.catalog import Model
from memguard._devices.simulated import SimulatedHost
from memguard._guard.guard import Guard

LIMIT, RESERVE, CARD = 17 * GIB, GIB, Model("schedule card", "hopper", 20 * GIB)
"""The reserve is what the contexts and modules of six simulated frameworks take, and what their slabs waste."""


class Played(NamedTuple):
    terms: Terms
    log: list[Entry]
    verdicts: Verdicts
    peak: int


@contextmanager
def guarded(terms: Terms, change: Callable[[Guard], None] = lambda _: None) -> Iterator[Guard]:
    """A guard of this budget on a simulated card. `change` breaks it before it starts, to see that this is noticed."""
    guard = Guard(Budget.from_mapping(_schedules.budget(terms)), SimulatedHost([CARD]))
    change(guard)
    try:
        guard.start()
        yield guard
    finally:
        guard.stop()


def played(seed: int, lends: bool = True, change: Callable[[Guard], None] = lambda _: None) -> Played:
    terms = _schedules.terms(seed, LIMIT, RESERVE)
    with guarded(terms, change) as guard:
        runner = SimulatedRunner(guard, lends)
        log = _schedules.play(_schedules.schedule(seed, terms), runner, terms)
        return Played(terms, log, judge(log, terms), runner.host.peak(runner.gpu))

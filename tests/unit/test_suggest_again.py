"""Run, suggest, run again under it: on simulated GPUs, whose allocators round, cache and fragment as real ones do."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest
from guards import simulated, start

import memguard
from memguard import _budget
from memguard._base.types import Plan
from memguard._base.units import GIB
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory
from memguard._oom.refusal import RefusalEvents
from memguard._tools.suggest import decide, text
from memguard._tools.suggest.evidence import Run, observe

pytestmark = pytest.mark.one_case  # no version of what is installed changes it: all of it is our own code

WIDE = {"torch": "24GiB", "cupy": "12GiB", "jax": "12GiB", "pycuda": "8GiB", "numba": "8GiB"}
TIGHT = {"torch": "1GiB", "cupy": "768MiB", "pycuda": "512MiB", "numba": "256MiB"}
"""Without JAX, which tells nobody what it refuses."""


def ran(budget: Any, seed: int) -> tuple[list[object], Plan, int]:
    """What a program did under a budget: its timeline, with samples while it works, and how often it was refused.

    It works in steps of one kind, as training does: weights that stay, then arrays that are freed in reverse order,
    more of them in every tenth step. It catches each refusal, and goes on without that array.
    """
    rng, refused = random.Random(seed), 0
    records: list[object] = []
    guard = start(budget, simulate="h100")
    refusals = RefusalEvents(lambda: 1e9 * len(records))
    guard.callbacks.refusal = lambda moment: records.extend(refusals.refused(moment))
    sizes = {name: [int(2 ** rng.uniform(16, 27)) for _ in range(12)] for name in WIDE}

    def take(name: str, wanted: list[int]) -> list[int]:
        nonlocal refused
        found = []
        for size in wanted:
            try:
                found.append(simulated(guard, name).allocate(size))
            except FrameworkOutOfMemory:
                refused += 1
        return found

    try:
        for name in guard.frameworks:
            take(name, sizes[name])
        for step in range(40):
            for name in guard.frameworks:
                arrays = take(name, sizes[name] * (3 if step % 10 == 9 else 2))
                records.append(guard.sample())
                for array in reversed(arrays):
                    simulated(guard, name).free(array)
            records.append(guard.sample())
        return [*records, *refusals.due(everything=True)], guard.plan, refused
    finally:
        memguard.shutdown()


def run_of(seed: int, limits: dict[str, str]) -> tuple[Run, int]:
    budget = {"version": 1, "device": {"limit": "70GiB", "reserve": "2GiB"}}
    records, plan, refused = ran({**budget, "frameworks": {n: {"limit": size} for n, size in limits.items()}}, seed)
    return observe(records, plan, file="run.jsonl", run="1", simulated=True), refused


@pytest.mark.parametrize("seed", range(6))
def test_under_the_budget_of_a_run_the_same_program_is_never_refused(seed: int) -> None:
    run, refused = run_of(seed, WIDE)
    found = decide.suggest([run], Fraction(15, 100))
    assert refused == 0 and found is not None and set(run.declared) == set(WIDE)
    assert max(figure.limit for figure in found.figures) < 8 * GIB, "much less than it had"
    assert ran(_budget.Budget.from_text(text.as_yaml(found)), seed)[2] == 0


@pytest.mark.parametrize("seed", range(6))
def test_a_program_that_caught_its_errors_gets_there_in_a_few_rounds(seed: int) -> None:
    """Each round is recorded under the budget of the one before, and shows more of what the program needs."""
    limits, counts = TIGHT, []
    for _ in range(12):
        run, refused = run_of(seed, limits)
        counts.append(refused)
        if not refused:
            break
        found = decide.suggest([run], Fraction(15, 100))
        assert found is not None and found.problem is None
        new = {figure.framework: f"{figure.limit}" for figure in found.figures}
        assert all(int(new[name]) >= run.needs[next(iter(run.devices)), name].bytes for name in limits)
        limits = new
    assert counts[0] > 0 and counts[-1] == 0, counts

"""Divide a budget among the Dask workers of a GPU. Pure."""

from __future__ import annotations

from fractions import Fraction

from memguard._budget import Budget
from memguard._budget.parts import part_of, refuse_ranks, with_part_note
from memguard.errors import PlanError


def part_of_worker(budget: Budget, workers: int) -> Budget:
    """The budget of one of `workers` workers that share each GPU. Raises PlanError if its part is too small."""
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ValueError(f"workers_per_gpu is a number from 1 on, found {workers!r}")
    same = budget.ranks if isinstance(budget.ranks, int) else 2
    refuse_ranks(budget, "Dask's", f"and write workers_per_gpu={same} for Dask")
    return part_of(budget, workers, "worker")


def explained(error: BaseException, workers: int) -> BaseException:
    """The error of a worker's part of the budget, with a note for the author of the whole budget."""
    if isinstance(error, PlanError) and workers > 1:
        return with_part_note(error, Fraction(1, workers), f"workers_per_gpu={workers}")
    return error

"""A worker's part of a budget. Pure."""

from __future__ import annotations

from memguard._config import Budget
from memguard._config.parts import part_of
from memguard.errors import ConfigError


def part_of_worker(budget: Budget, workers: int) -> Budget:
    """The budget of one of so many workers that share each GPU. Raises PlanError if it is too small."""
    if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
        raise ValueError(f"workers_per_gpu is a number from 1 on, found {workers!r}")
    if budget.ranks is not None:
        what = "ranks is for processes of torchrun, mpirun and srun: Dask's workers are none"
        fix = f"remove it, and write workers_per_gpu={budget.ranks if isinstance(budget.ranks, int) else 2} for Dask"
        raise ConfigError([budget.problem(("ranks",), what, fix)], budget.source or "budget")
    return part_of(budget, workers, "worker")

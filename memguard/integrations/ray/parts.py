"""Convert between `num_gpus` and a budget's limit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil

from memguard._base.types import Device
from memguard._base.units import MIB, format_size
from memguard._budget import Budget
from memguard._budget.parts import multiplied
from memguard._budget.policy import plan
from memguard.errors import PlanError

UNITS = "gpu_memory_mib"
"""The custom resource that counts MiB of GPU memory."""
STEP = 10_000
"""Ray's resolution of a resource: one ten-thousandth."""


def exact(amount: float | int | str) -> Fraction:
    """An amount of a Ray resource as an exact fraction of its decimal text. Raises ValueError."""
    try:
        found = None if isinstance(amount, bool) else Fraction(str(amount))
    except (ValueError, ZeroDivisionError):  # a word, infinity, "1/0"
        found = None
    if found is None or found <= 0 or (found > 1 and found.denominator != 1) or STEP % found.denominator:
        raise ValueError(
            f"num_gpus is a whole number, or a part of one GPU with four decimals at most, found {amount!r}\n"
            "    fix: num_gpus=0.25 for a quarter of a GPU"
        )
    return found


def part(budget: Budget, gpus: Fraction) -> Budget:
    """The budget of a worker to which Ray assigned `gpus`. Unchanged for one or more whole GPUs.

    Raises PlanError if a size becomes less than 2 MiB.
    """
    small = f", of which num_gpus={float(gpus):g} is less than 2 MiB"
    return multiplied(budget, min(gpus, Fraction(1)), small, "give more, or a larger num_gpus")


def gpus_of(budget: Budget, devices: Sequence[Device]) -> float:
    """The `num_gpus` of a worker with this budget: its limit as a part of a GPU, rounded up.

    A limit in bytes is a part of the smallest of `devices`. Raises PlanError if the budget does not fit them, or gives
    no single part.
    """
    limit = budget.device.limit
    if budget.devices:
        what = "gives some GPUs another limit, so that no one num_gpus follows from it"
        raise PlanError([budget.problem(("devices",), what, "give num_gpus")], budget.source or "budget")
    if devices:
        limit = max(Fraction(one.limit, one.device.usable) for one in plan(budget, devices).devices)
    elif isinstance(limit, int):
        what = f"{format_size(limit)} of a GPU whose size is not known"
        raise PlanError(
            [budget.problem(("device", "limit"), what, 'name the GPU, as gpu="h200", or give num_gpus')],
            budget.source or "budget",
        )
    return ceil(Fraction(limit) * STEP) / STEP


def units_of(budget: Budget, devices: Sequence[Device]) -> int:
    """The MiB that a worker with this budget may take, on the largest of `devices`. Raises PlanError."""
    limit = budget.device.limit
    if devices:
        limit = max(one.limit for one in plan(budget, devices).devices)
    if not isinstance(limit, int):
        raise PlanError(
            [budget.problem(("device", "limit"), "a part of a GPU whose size is not known", 'give gpu="h200"')],
            budget.source or "budget",
        )
    return ceil(Fraction(limit, MIB))

"""How `num_gpus` and a budget follow from each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from typing import Any

from memguard._config import Budget
from memguard._config.frozen import Frozen
from memguard._policy import plan
from memguard._types import Device
from memguard._units import GRANULE, MIB, format_size
from memguard.errors import PlanError

UNITS = "gpu_memory_mib"
"""The custom resource that counts MiB of GPU memory."""
STEP = 10_000
"""Ray counts a resource in ten-thousandths."""


def exact(amount: float | int | str) -> Fraction:
    """Ray's amount of a resource, as the decimal number that was written. Raises ValueError."""
    found = Fraction(str(amount)) if not isinstance(amount, bool) and isinstance(amount, (int, float, str)) else None
    if found is None or found <= 0 or (found > 1 and found.denominator != 1) or STEP % found.denominator:
        raise ValueError(
            f"num_gpus is a whole number, or a part of one GPU with four decimals at most, found {amount!r}\n"
            "    fix: num_gpus=0.25 for a quarter of a GPU"
        )
    return found


def part(budget: Budget, gpus: Fraction) -> Budget:
    """The budget of a worker to which Ray gave so much of a GPU. It is the same if that is one GPU, or several.

    Limits of GPUs, and sizes in bytes of frameworks, are multiplied; a share is of the worker's own limit, and the
    reserve is what each process needs for its own context. Raises PlanError if a size becomes less than 2 MiB.
    """
    if gpus >= 1:
        return budget

    def less(model: Any, loc: tuple[str, ...], keys: tuple[str, ...], percent: bool) -> Any:
        changed: dict[str, Fraction | int] = {}
        for key in keys:
            value = getattr(model, key)
            if isinstance(value, int):
                changed[key] = int(value * gpus)
                if changed[key] < GRANULE:
                    what = f"{format_size(value)}, of which num_gpus={float(gpus):g} is less than 2 MiB"
                    raise PlanError(
                        [budget.problem((*loc, key), what, "give more, or a larger num_gpus")],
                        budget.source or "budget",
                    )
            elif value is not None and percent:
                changed[key] = value * gpus
        return model.model_copy(update=changed)

    devices = {key: less(one, ("devices", key), ("limit",), True) for key, one in budget.devices.items()}
    sizes = ("limit", "min", "max")
    frameworks = {name: less(one, ("frameworks", name), sizes, False) for name, one in budget.frameworks.items()}
    return budget.model_copy(
        update={
            "device": less(budget.device, ("device",), ("limit",), True),
            "devices": Frozen(devices),
            "frameworks": Frozen(frameworks),
        }
    )


def gpus_of(budget: Budget, devices: Sequence[Device]) -> float:
    """The `num_gpus` of a worker whose own budget it is: its limit as a part of a GPU, rounded up.

    A limit in bytes is a part of the smallest of `devices`. Raises PlanError if the budget does not fit on them, and if
    it says no one part.
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

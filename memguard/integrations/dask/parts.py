"""A part of a budget, for processes that share a GPU. Pure."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from memguard._config import Budget
from memguard._config.frozen import Frozen
from memguard._units import GRANULE, format_size
from memguard.errors import PlanError


def part_of(budget: Budget, parts: int) -> Budget:
    """The budget of one of so many processes that share each GPU in equal parts.

    Limits of GPUs, and sizes in bytes of frameworks, are divided; a share is of the process's own limit, and the
    reserve is what each process needs for its own context. Raises PlanError if a size becomes less than 2 MiB.
    """
    if not isinstance(parts, int) or isinstance(parts, bool) or parts < 1:
        raise ValueError(f"workers_per_gpu is a number from 1 on, found {parts!r}")
    if parts == 1:
        return budget

    def less(model: Any, loc: tuple[str, ...], keys: tuple[str, ...], fractions: bool) -> Any:
        changed: dict[str, Fraction | int] = {}
        for key in keys:
            value = getattr(model, key)
            if isinstance(value, int):
                changed[key] = value // parts
                if changed[key] < GRANULE:
                    what = f"{format_size(value)} for {parts} workers is less than 2 MiB for each"
                    raise PlanError(
                        [budget.problem((*loc, key), what, "give more, or start fewer workers on a GPU")],
                        budget.source or "budget",
                    )
            elif value is not None and fractions:
                changed[key] = value / parts
        return model.model_copy(update=changed)

    return budget.model_copy(
        update={
            "device": less(budget.device, ("device",), ("limit",), True),
            "devices": Frozen(
                {key: less(one, ("devices", key), ("limit",), True) for key, one in budget.devices.items()}
            ),
            "frameworks": Frozen(
                {
                    name: less(one, ("frameworks", name), ("limit", "min", "max"), False)
                    for name, one in budget.frameworks.items()
                }
            ),
        }
    )

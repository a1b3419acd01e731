"""Divide a budget among processes that share a GPU."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from memguard._base.units import GRANULE, format_size, round_down
from memguard._budget.values import Frozen
from memguard._frameworks.specs import SPECS
from memguard.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from memguard._budget.schema import Budget


def part_of(budget: Budget, parts: int, noun: str = "rank") -> Budget:
    """The budget of one of `parts` processes that share each GPU equally. Messages call such a process `noun`.

    Raises PlanError if a size becomes less than 2 MiB.
    """
    small = f" for {parts} {noun}s is less than 2 MiB for each"
    return multiplied(budget, Fraction(1, parts), small, f"give more, or start fewer {noun}s on a GPU")


def multiplied(budget: Budget, part: Fraction, small: str, fix: str) -> Budget:
    """The budget scaled to `part` of each GPU, at most 1.

    Scales the limits of GPUs, and the frameworks' sizes in bytes. Does not scale shares, which are relative to the
    process's own limit, and the reserve, because each process has its own CUDA context. Raises PlanError if a size
    becomes less than 2 MiB: its message is that size followed by `small`, and its fix is `fix`.
    """
    if part == 1:
        return budget

    def less(model: Any, loc: tuple[str, ...], keys: tuple[str, ...], fractions: bool) -> Any:
        changed: dict[str, Fraction | int] = {}
        for key in keys:
            value = getattr(model, key)
            if isinstance(value, int):
                changed[key] = round_down(int(value * part))
                if changed[key] < GRANULE:
                    problem = budget.problem((*loc, key), f"{format_size(value)}{small}", fix)
                    raise PlanError([problem], budget.source or "budget")
            elif value is not None and fractions:
                changed[key] = value * part
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


def refuse_ranks(budget: Budget, whose: str, instead: str) -> None:
    """Raise ConfigError for a budget with `ranks`, because the caller already divides the budget among workers."""
    if budget.ranks is not None:
        what = f"ranks is for processes of torchrun, mpirun and srun: {whose} workers are none"
        raise ConfigError([budget.problem(("ranks",), what, f"remove it, {instead}")], budget.source or "budget")


def with_part_note(error: PlanError, part: Fraction, why: str) -> PlanError:
    """Add to each fix the note that the error's figures are those of one worker, with `part` of the budget's limits."""
    of = f"these are the figures of a worker, whose limits are {part} of the budget's ({why})"
    problems = [replace(one, fix=f"{one.fix}; {of}") for one in error.problems] if part < 1 else error.problems
    return PlanError(problems, error.source)


def with_nccl(budget: Budget) -> Budget:
    """Set `nccl: 1` for each framework that has the key `nccl` if the budget omits this key."""
    unsaid = without_nccl(budget)
    found: dict[str, Any] = {
        name: one.model_copy(update={"nccl": 1}) if name in unsaid else one for name, one in budget.frameworks.items()
    }
    return budget.model_copy(update={"frameworks": Frozen(found)})


def without_nccl(budget: Budget) -> list[str]:
    """The frameworks of the budget that accept the key `nccl` and for which the budget omits this key."""
    owners = [name for name in budget.frameworks if any(option.name == "nccl" for option in SPECS[name].options)]
    return [name for name in owners if budget.frameworks[name].nccl is None]

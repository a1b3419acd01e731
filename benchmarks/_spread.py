"""Medians with their 95 % intervals, by resampling. Pure."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

RESAMPLES = 1000


def median(groups: Sequence[Sequence[float]]) -> float:
    return statistics.median(value for group in groups for value in group)


def interval(groups: Sequence[Sequence[float]], seed: int = 11) -> dict[str, Any]:
    """The median of all values, with the bounds that 95 % of the medians of resamples lie between.

    `groups` are the values of each process, or pair of processes. Values of one process have its luck in common: where
    its memory lies, on which core it runs. So groups are drawn first, and then values within each.
    """
    draw = random.Random(seed)
    medians = sorted(
        median([draw.choices(group, k=len(group)) for group in draw.choices(groups, k=len(groups))])
        for _ in range(RESAMPLES)
    )
    values = sorted(value for group in groups for value in group)
    return {
        "n": len(values),
        "median": median(groups),
        "low": medians[RESAMPLES * 25 // 1000],
        "high": medians[RESAMPLES * 975 // 1000 - 1],
        "min": values[0],
        "max": values[-1],
    }


def ratios(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[list[float]]:
    """Round by round, in each group."""
    return [[a / b for a, b in zip(one, other, strict=True)] for one, other in zip(ours, theirs, strict=True)]


def resolved(control: dict[str, Any]) -> float:
    """What a control of two equals says of the measurement: ratios up to this one may be chance.

    Which of the two is the divisor is arbitrary, so the farther bound counts on either side.
    """
    return float(max(control["high"], 1 / control["low"]))

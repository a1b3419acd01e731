"""Compute a budget's limits from frameworks' needs, for `memguard replay` and `suggest`. Pure; all in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from memguard._base.units import GRANULE, MIB, round_up


def with_headroom(need: int, headroom: Fraction = Fraction(0)) -> int:
    """The limit for a need: a whole number of 2 MiB, and at least one."""
    return max(round_up(-(-need * (1 + headroom) // 1)), GRANULE)


def entry(limit: int, options: Mapping[str, Any]) -> str:
    """A framework's entry in the file: `{limit: 512MiB, growth: false}`."""
    more = "".join(f", {key}: {str(value).lower()}" for key, value in options.items())
    return f"{{limit: {limit // MIB}MiB{more}}}"


@dataclass(frozen=True)
class Smallest:
    """The smallest budget that fits, in bytes, multiples of 2 MiB. `reserve` is None if none was measured."""

    limits: Mapping[str, int]
    reserve: int | None
    problem: str | None = None
    """Why no budget can be written: its figures come from different GPUs, and a budget has one figure for all."""

    def yaml(self) -> str:
        """A budget file that `memguard check` accepts."""
        lines = ["# the smallest budget that fits what was recorded; leave room for what was not", "version: 1"]
        if self.reserve is None:
            lines.append("device: {reserve: auto} # none was measured")
        else:
            limit = self.reserve + sum(self.limits.values())
            lines.append(f"device: {{limit: {limit // MIB}MiB, reserve: {self.reserve // MIB}MiB}}")
        lines.append("frameworks:")
        lines += [f"  {name}: {entry(size, {})}" for name, size in self.limits.items()]
        return "\n".join(lines) + "\n"

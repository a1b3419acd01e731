"""Budgets as text, and what is wrong with them: shared by the tests of the budget file."""

from __future__ import annotations

import pytest

from memguard._budget import parse
from memguard.errors import ConfigError, Problem

UUID = "GPU-887439f1-ef81-1c16-9a75-0558dcbf6b53"
GOOD = "version: 1\nframeworks:\n  torch: {share: 50%}\n"
METRICS = GOOD + "metrics: {prometheus: 9477}"
WATCHED = GOOD + "monitor: {}\n"


def problems(text: str | bytes) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as raised:
        parse(text, "b.yaml")
    return raised.value.problems


def fw(lines: str) -> str:
    """A budget with these lines as its frameworks; the first is line 3, indented by 2."""
    return "version: 1\nframeworks:\n" + "".join(f"  {line}\n" for line in lines.split("\n"))

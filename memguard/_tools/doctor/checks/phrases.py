"""Phrases that several findings use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memguard._tools.doctor.checks.probe_outcomes import failed_stage, killed
from memguard._tools.doctor.facts import Facts, Probe

_ENOUGH = 4


def listing(names: Iterable[str]) -> str:
    """a, b and c."""
    *most, last = dict.fromkeys(names)
    return f"{', '.join(most)} and {last}" if most else last


def few(lines: Sequence[str]) -> tuple[str, ...]:
    """The first lines, and how many more there are."""
    rest = len(lines) - _ENOUGH
    return tuple(lines) if rest <= 0 else (*lines[:_ENOUGH], f"and {rest} more")


def last_line(text: str) -> str:
    """The last line of an error, which is what people quote."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def full_name(facts: Facts, framework: str) -> str:
    """The framework with its version."""
    found = facts.frameworks.get(framework)
    return f"{framework} {found.version}" if found is not None and found.version else framework


def error_line(facts: Facts, framework: str) -> str:
    """A line of evidence: the last line of its probe's error."""
    stage = failed_stage(facts.frameworks[framework])
    return f"{framework}: {last_line((stage.error if stage else None) or '')}"


def built_for(facts: Facts, framework: str) -> str:
    """A line of evidence: the CUDA that it was built for."""
    return f"{full_name(facts, framework)} was built for CUDA {facts.frameworks[framework].cuda}"


def how_it_ended(probe: Probe) -> str:
    if killed(probe):
        return f"was ended from outside ({'SIGKILL' if probe.signal else 'exit code 137'})"
    if probe.signal:
        return f"was ended by {probe.signal}"
    return f"ended {'' if probe.complete else 'early '}with exit code {probe.exit}"

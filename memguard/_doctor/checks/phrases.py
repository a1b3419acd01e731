"""How findings say things."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memguard._doctor.facts import Facts, Probe

_ENOUGH = 4


def listing(names: Iterable[str]) -> str:
    """a, b and c."""
    *most, last = dict.fromkeys(names)
    return f"{', '.join(most)} and {last}" if most else last


def few(lines: Sequence[str]) -> tuple[str, ...]:
    """The first of them, and how many more there are."""
    rest = len(lines) - _ENOUGH
    return tuple(lines) if rest <= 0 else (*lines[:_ENOUGH], f"and {rest} more")


def last_line(text: str) -> str:
    """Of an error: what people quote of it."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def full_name(facts: Facts, framework: str) -> str:
    """With its version."""
    found = facts.frameworks.get(framework)
    return f"{framework} {found.version}" if found is not None and found.version else framework


def built_for(facts: Facts, framework: str) -> str:
    """A line of evidence."""
    return f"{full_name(facts, framework)} was built for CUDA {facts.frameworks[framework].cuda}"


def texts(probe: Probe | None) -> tuple[str, ...]:
    """All that it said, errors of its steps first."""
    if probe is None:
        return ()
    return (*(stage.error for stage in probe.stages if stage.error is not None), *probe.said)


def broken(probe: Probe | None) -> bool:
    """It did not get through its steps."""
    return probe is not None and (probe.failed is not None or probe.hung or ended(probe))


def ended(probe: Probe) -> bool:
    """It died by itself: a signal, or an exit that no step explains."""
    early = probe.exit not in (None, 0) or not probe.complete
    return not probe.hung and (probe.signal is not None or (early and probe.failed is None))


def killed(probe: Probe) -> bool:
    """By SIGKILL, which no library does to itself: 137 is how a shell in between tells of it."""
    return not probe.hung and (probe.signal == "SIGKILL" or (probe.signal is None and probe.exit == 137))


def how_it_ended(probe: Probe) -> str:
    if killed(probe):
        return f"was ended from outside ({'SIGKILL' if probe.signal else 'exit code 137'})"
    if probe.signal:
        return f"was ended by {probe.signal}"
    return f"ended {'' if probe.complete else 'early '}with exit code {probe.exit}"

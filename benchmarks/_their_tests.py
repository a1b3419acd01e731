"""Outcomes of a test suite with memguard and without: read, compared, and each difference with its reason. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CRASHED, HUNG = "crashed", "hung"
_RANK = ("passed", "xpassed", "xfailed", "skipped", "failed", "error")
"""A test has a report for its setup, its call and its teardown: the last of these is its outcome."""


@dataclass
class Outcome:
    """How one test ended. `text` and `oom` (what memguard reported) are of its failure."""

    outcome: str
    text: str = ""
    oom: Mapping[str, Any] | None = None


@dataclass
class Read:
    """What one process of pytest left behind. `active`: whether a budget was; None if it did not say."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    collected: list[str] = field(default_factory=list)
    not_collected: dict[str, str] = field(default_factory=dict)
    crashed: str | None = None
    active: bool | None = None


def read(lines: Iterable[str]) -> Read:
    """The lines of `_outcomes.py`. A test that began and never finished has crashed its interpreter."""
    found, going = Read(), None
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:  # cut off by the crash
            continue
        if "start" in line:
            going = line["start"]
        elif "finish" in line:
            going = None
        elif "collected" in line:
            found.collected.append(line["collected"])
        elif "not_collected" in line:
            found.not_collected[line["not_collected"]] = line["text"]
        elif "active" in line:
            found.active = line["active"]
        elif "id" in line:
            before, now = found.outcomes.get(line["id"]), line["outcome"]
            if before is None or _RANK.index(now) >= _RANK.index(before.outcome):
                found.outcomes[line["id"]] = Outcome(now, line.get("text", ""), line.get("oom"))
    if going is not None:
        found.crashed = going
        found.outcomes[going] = Outcome(CRASHED)
    return found


def parts(ids: Sequence[str], most: int) -> list[list[str]]:
    """The tests of each file, in its order, at most so many in one part."""
    files: dict[str, list[str]] = {}
    for one in ids:
        files.setdefault(one.partition("::")[0], []).append(one)
    return [tests[at : at + most] for tests in files.values() for at in range(0, len(tests), most)]


def differing(plain: Mapping[str, Outcome], under: Mapping[str, Outcome]) -> list[str]:
    """The tests that ran both ways and ended differently."""
    return [one for one in plain if one in under and plain[one].outcome != under[one].outcome]


def reason(cap: int, plain: Sequence[Outcome], under: Sequence[Outcome]) -> tuple[str | None, str]:
    """Why a test differs, and the evidence; None if nothing explains it.

    plain, under   its outcomes in all runs, the first ones first
    cap            bytes that the framework may have under memguard

    `cap` if every run under memguard failed with an out-of-memory error that asked for more than the whole cap;
    `flaky` if its runs without memguard differ among themselves.
    """
    if len({one.outcome for one in plain}) > 1:
        return "flaky", f"without memguard: {_counted(plain)}"
    asked = [(one.oom or {}).get("requested") for one in under]
    if under and all(size is not None and size > cap for size in asked):
        return "cap", f"asks for {max(size for size in asked if size is not None):,} bytes, its cap is {cap:,}"
    evidence = f"without memguard: {_counted(plain)}; under memguard: {_counted(under)}"
    text = next((one.text for one in under if one.text), "")
    return None, f"{evidence}{': ' if text else ''}{text[:300]}"


def _counted(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(one.outcome for one in outcomes)
    return ", ".join(f"{number} {name}" for name, number in counts.items()) or "not run"


def summary(collected: Sequence[str], plain: Mapping[str, Outcome], under: Mapping[str, Outcome]) -> dict[str, Any]:
    """Counts of both ways, the tests that were not run both ways, and every outcome that is not `passed` twice."""
    both = [one for one in collected if one in plain and one in under]
    return {
        "collected": len(collected),
        "run": len(both),
        "plain": dict(Counter(plain[one].outcome for one in both)),
        "under": dict(Counter(under[one].outcome for one in both)),
        "not_run": [one for one in collected if one not in plain or one not in under],
        "passed": [one for one in both if plain[one].outcome == under[one].outcome == "passed"],
        "others": {
            one: [plain[one].outcome, under[one].outcome]
            for one in both
            if not plain[one].outcome == under[one].outcome == "passed"
        },
    }

"""Whatever facts say, and whatever they leave out: findings come out, complete ones, and a screen."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from doctor_facts import FILES, plain

from memguard._tools.doctor import DoctorReport, render
from memguard._tools.doctor.examine import examine
from memguard._tools.doctor.facts import Facts
from memguard.errors import FactsError

ODD: tuple[Any, ...] = (
    None, "", "?", "580", "0", "a\nb\x1b[31m", 0, 1, -1, 2**63, True, False, [], {}, [""], {"": ""}, [[]], 1.5,
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in it, with each of its keys."""
    keys: list[Any] = (
        list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    )
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


def changed(value: Any, rng: random.Random) -> Any:
    """The same with up to three things left out or replaced by something odd, or by one from another place."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        found = places(value)
        inside, key = rng.choice(found)
        kind = rng.random()
        if kind < 0.4:
            del inside[key]
        elif kind < 0.8:
            inside[key] = rng.choice(ODD)
        else:
            other, there = rng.choice(found)
            inside[key] = json.loads(json.dumps(other[there]))
    return value


@pytest.mark.parametrize("seed", range(20))
def test_any_facts(seed: int) -> None:
    rng = random.Random(seed)
    examined = 0
    while examined < 20:
        value = changed(plain(rng.choice(FILES)), rng)
        try:
            facts = Facts.from_json(json.dumps(value))
        except FactsError:
            continue
        examined += 1
        report = DoctorReport(facts, examine(facts))
        for finding in report.findings:
            assert finding.cause and finding.evidence and finding.remedy, finding
        shown = render.text(report)
        assert all(line.isprintable() for line in shown.split("\n"))
        assert render.rich(report).plain == shown
        json.dumps(report.as_dict())


def test_nothing_at_all() -> None:
    assert all(finding.cause and finding.evidence and finding.remedy for finding in examine(Facts()))

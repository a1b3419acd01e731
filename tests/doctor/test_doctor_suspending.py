"""When the doctor says that no process can be suspended, and when it keeps quiet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from doctor_facts import edited, of

from memguard._tools.doctor.checks import suspending
from memguard._tools.doctor.collect import gather
from memguard._tools.doctor.facts import Driver
from memguard._tools.doctor.finding import Finding, Severity

ASKED = {"source": "budget.yaml", "frameworks": ["torch"], "suspend": True}
GPU = "GPU-5e9d5907-fba4-86a2-0235-9eb4761e77be"
CARD: dict[str, Any] = {"index": 0, "uuid": GPU, "name": "NVIDIA H200", "total": 1, "used": 0, "free": 1}
OLD = {"module": "550.54.15"}


def found(base: str = "healthy-h200.json", **changes: Any) -> list[Finding]:
    facts = edited(base, {"budget": ASKED, **changes})
    return of(facts, suspending)


def shown(**card: Any) -> dict[str, Any]:
    return {"nvml": {"devices": [{**CARD, **card}]}}


@pytest.mark.parametrize(
    ("changes", "said", "remedy"),
    [
        ({"driver": OLD}, "the NVIDIA driver is 550.54.15", "570 or later"),
        ({"driver": {"module": None, "nvml": {"driver": "550.1"}}}, "550.1", "570 or later"),
        ({"driver": {"cuda": {"checkpoint": False}}}, "cuCheckpointProcess", "cuda-compat"),
        ({"system": {"machine": "aarch64"}}, "on ARM", "595 or later"),
        ({"system": {"wsl": True}}, "WSL", "Linux"),
        ({"driver": shown(vgpu=True)}, f"{GPU} is a virtual GPU", "whole GPU"),
        ({"driver": shown(mig=True)}, "MIG", "whole GPU"),
        ({"driver": shown(total=0)}, "no memory of its own", "end the program"),
    ],
)
def test_what_makes_it_impossible(changes: dict[str, Any], said: str, remedy: str) -> None:
    (finding,) = found(**changes)
    assert finding.severity is Severity.WARNING and finding.subject == "budget.yaml"
    assert said in finding.cause and remedy in finding.remedy
    assert "budget.yaml has a section suspend" in finding.evidence


def test_several_reasons_are_one_finding() -> None:
    (finding,) = found(driver={**OLD, **shown(vgpu=True)})
    assert "550" in finding.cause
    assert [line for line in finding.evidence if line.startswith("also: ") and "virtual GPU" in line]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"driver": {**OLD}, "budget": {"suspend": False}},
        {"driver": {**OLD}, "budget": None},
        {"driver": {**OLD, "cuda": {"devices": None}}},  # no GPU: other findings say why
        {"driver": {"module": None, "nvml": {"driver": None}}},  # nobody could look
    ],
)
def test_quiet_where_it_is_possible_not_asked_for_or_unknown(changes: dict[str, Any]) -> None:
    assert found(**changes) == []


@pytest.mark.parametrize("section", [None, object()])
def test_the_budget_asks_for_it_by_its_section(section: object) -> None:
    budget: Any = SimpleNamespace(source="budget.yaml", frameworks={}, suspend=section)
    facts = gather._budget(budget, Driver())
    assert facts is not None and facts.suspend is (section is not None)

"""What the doctor says of CUDA_MPS_PINNED_DEVICE_MEM_LIMIT."""

from __future__ import annotations

from typing import Any

import pytest
from doctor_facts import edited, findings

from memguard._tools.doctor.checks import memory
from memguard._tools.doctor.finding import Finding

LIMIT = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
H200 = "GPU-5e9d5907-fba4-86a2-0235-9eb4761e77be"
BUDGET = {"source": "budget.yaml", "frameworks": ["torch"], "limits": {H200: 34 << 30}}


def found(value: str, **changes: Any) -> list[Finding]:
    return list(memory.mps_limit(edited("healthy-h200.json", {"environment": {LIMIT: value}, **changes})))


def test_a_limit_below_the_budget_is_named_with_both_sizes() -> None:
    (finding,) = (one for one in findings("mps-limit-below-budget.json") if one.name == "mps-limit")
    assert "may have 8.00 GiB of NVIDIA H200" in finding.cause and "its limit of 34.00 GiB" in finding.cause
    assert f"{LIMIT}=0=8G (environment)" in finding.evidence and "budget.yaml has the limit" in finding.evidence
    assert "memguard run --mps" in finding.remedy


def test_a_limit_that_mps_drops_is_named_without_a_budget_too() -> None:
    (finding,) = (one for one in findings("mps-limit-dropped.json") if one.name == "mps-limit")
    assert "names 1, which this process does not see, and MPS drops every memory limit" in finding.cause
    assert f"CUDA shows {H200}" in finding.evidence
    assert finding.remedy == "name the GPUs that it sees, by UUID"


@pytest.mark.parametrize("value", ["", " ", "0=34G", "0=34816M", f"{H200}=80G", "GPU-5e9d=34G"])
def test_a_limit_that_leaves_room_is_no_finding(value: str) -> None:
    assert found(value, budget=BUDGET) == []


def test_one_that_cannot_be_read_is_a_finding_and_a_machine_without_a_gpu_has_none() -> None:
    (finding,) = found("34G", budget=BUDGET)
    assert "cannot be read" in finding.cause
    assert found("34G", driver={"cuda": {"devices": []}}) == []


def test_many_gpus_are_not_all_listed() -> None:
    gpu = {"name": "NVIDIA H200", "capability": [9, 0], "multiprocessors": 132}
    many = [{**gpu, "ordinal": i, "uuid": f"{H200[:-1]}{i}"} for i in range(8)]
    (finding,) = found("9=8G", driver={"cuda": {"devices": many}})
    assert any(line.endswith(f"{H200[:-1]}3 and others") for line in finding.evidence)

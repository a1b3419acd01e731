"""The simulated hour: what it says comes from its readings, and each thing that it checks can be wrong."""

from __future__ import annotations

import pytest
import simulated_hour as hour

import memguard
from memguard._base.types import Device, MemoryInfo
from memguard._base.units import MIB
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.driver_allocators import CuPyPool
from memguard._frameworks.specs import SPECS
from memguard.errors import NotActive

pytestmark = pytest.mark.long  # no version of what is installed changes what only developers run


def test_ten_minutes() -> None:
    outcome = hour.simulated_hour(7, 600)
    assert hour.wrong(outcome) == []
    assert set(outcome["refused"]) == set(SPECS) == set(outcome["caps"]) and outcome["readings"] == 601
    assert outcome["unaccounted_drift"] <= 64 * MIB and outcome["overhead"] <= outcome["reserve"]
    for name, cap in outcome["caps"].items():
        assert 0.9 * cap < outcome["most_held"][name] <= cap, "it was driven to its cap"
    assert sum(outcome["caps"].values()) < outcome["most_process"] + 4 << 30 and outcome["trimmed"] > 0
    with pytest.raises(NotActive):
        memguard.ledger()
    again = hour.simulated_hour(7, 600)
    assert {**again, "real_seconds": 0} == {**outcome, "real_seconds": 0}, "the seed decides"


def test_memory_that_nobody_counts_is_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that forgets to count what it takes."""
    counted = CuPyPool._count
    monkeypatch.setattr(CuPyPool, "_count", lambda pool, nbytes: counted(pool, nbytes * 15 // 16 // 512 * 512))
    monkeypatch.setattr(CuPyPool, "trim", lambda pool: 0)
    outcome = hour.simulated_hour(7, 120)
    assert outcome["unaccounted_drift"] > 64 * MIB
    assert any("unaccounted drifts by" in sentence for sentence in hour.wrong(outcome))


def test_a_cap_that_does_not_hold_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuPyPool, "_below_cap", lambda pool, nbytes: True)
    assert "a framework held more than its cap" in hour.wrong(hour.simulated_hour(7, 400))


def test_that_nobody_was_refused_is_seen() -> None:
    assert hour.wrong(hour.simulated_hour(7, 2)) == ["a framework was never refused"]


def test_a_total_that_does_not_hold_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    true = SimulatedHost.memory

    def memory(host: SimulatedHost, device: Device) -> MemoryInfo:
        found = true(host, device)
        return MemoryInfo(found.total, found.reserved, found.used, found.free - 1)

    monkeypatch.setattr(SimulatedHost, "memory", memory)
    outcome = hour.simulated_hour(7, 5)
    assert outcome["sum_minus_total"] == 1 and "the rows do not sum to the total" in hour.wrong(outcome)


def test_a_process_above_its_limit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    true = SimulatedHost.processes
    monkeypatch.setattr(SimulatedHost, "processes", lambda host, device: dict.fromkeys(true(host, device), 41 << 30))
    monkeypatch.setattr(SimulatedHost, "memory", lambda host, gpu: MemoryInfo(gpu.total, 0, 41 << 30, 0))
    outcome = hour.simulated_hour(7, 5)
    assert outcome["readings_over_limit"] == 6 and "the process held more than its limit" in hour.wrong(outcome)


def test_an_error_of_another_kind_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hour, "oom_type", lambda name: KeyError)
    assert "a refusal was not the framework's own error" in hour.wrong(hour.simulated_hour(7, 120))


def test_require_that_refuses_too_much_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(framework: str, size: int) -> None:
        raise memguard.BudgetExceeded(framework, size, 0, "no")

    monkeypatch.setattr(memguard, "require", refuse)
    assert "require refused what was served" in hour.wrong(hour.simulated_hour(7, 20))

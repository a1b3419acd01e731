"""The guard on simulated GPUs: a transaction that can be undone, one at a time, and harmless in threads and forks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import memguard
from memguard import conductor
from memguard.conductor import Guard
from memguard.config import from_mapping
from memguard.devices.simulated import SimulatedHost
from memguard.errors import (
    AlreadyActive,
    ConfigError,
    DeviceError,
    NotActive,
    PlanError,
)
from memguard.frameworks import registry
from memguard.frameworks.late import ImportHook
from memguard.frameworks.simulated import FrameworkOutOfMemory, SimulatedFramework
from memguard.model import Applied, Enforcement, State
from memguard.units import GIB

BUDGET = {
    "version": 1,
    "device": {"limit": "16GiB", "reserve": "2GiB"},
    "frameworks": {"torch": {"limit": "4GiB"}, "tensorflow": {"limit": "4GiB"}, "pycuda": {"limit": "2GiB"}},
}
TORCH = {"version": 1, "frameworks": {"torch": {"limit": "4GiB"}}}


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    finders = list(sys.meta_path)
    yield
    memguard.shutdown()
    left = [f for f in sys.meta_path if f not in finders]
    sys.meta_path[:] = finders
    assert left == []


def start(budget: Any = BUDGET, simulate: Any = "h200", **more: Any) -> Guard:
    return memguard.init(budget, simulate=simulate, **more)


def simulated(guard: Guard, name: str) -> SimulatedFramework:
    framework = guard.frameworks[name]
    assert isinstance(framework, SimulatedFramework)
    return framework


def host_of(guard: Guard) -> SimulatedHost:
    assert isinstance(guard.host, SimulatedHost)
    return guard.host


def cap_of(framework: SimulatedFramework) -> int | None:
    return framework.stats(framework.host.devices()[0]).cap


def hooks() -> list[Any]:
    return [finder for finder in sys.meta_path if isinstance(finder, ImportHook)]


def replaced(monkeypatch: pytest.MonkeyPatch, **classes: Callable[[SimulatedHost, str], SimulatedFramework]) -> None:
    """Other stand-ins for some frameworks of the budget."""
    create = registry.create

    def choose(name: str, host: Any) -> Any:
        return classes[name](host, name) if name in classes else create(name, host)

    monkeypatch.setattr(registry, "create", choose)


def imported(host: SimulatedHost, name: str) -> SimulatedFramework:
    return SimulatedFramework(host, name, imported=True)


# init


def test_caps_hold_from_the_import_on() -> None:
    guard = start()
    torch = simulated(guard, "torch")
    assert guard.active and len(hooks()) == 1 and torch.state() is State.IMPORTABLE
    assert [row.enforcement for row in memguard.ledger().devices[0].rows[:3]] == ["pending"] * 3
    torch.start_importing()
    assert cap_of(torch) == 4 * GIB
    assert memguard.ledger().devices[0].row("torch").enforcement == "enforced"
    with pytest.raises(FrameworkOutOfMemory, match="its cap is reached"):
        torch.allocate(4 * GIB + 1)
    for name in ("tensorflow", "pycuda"):
        simulated(guard, name).start_importing()
    assert hooks() == []


def test_frameworks_that_are_imported_already_are_capped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, torch=imported)
    guard = start(TORCH)
    assert cap_of(simulated(guard, "torch")) == 4 * GIB and hooks() == []


def test_a_budget_is_a_path_a_mapping_or_a_budget(tmp_path: Path) -> None:
    path = tmp_path / "budget.yaml"
    path.write_text("version: 1\nframeworks:\n  torch: {limit: 4GiB}\n")
    first = start(TORCH)
    for same in (path, str(path), from_mapping(TORCH), {**TORCH, "device": {"limit": "90%"}}):
        assert start(same) is first, "the same budget, however it is written"
    for wrong in (tmp_path / "missing.yaml", {"version": 1}, tmp_path):
        with pytest.raises(ConfigError):
            start(wrong)
    assert first.active


@pytest.mark.parametrize("simulate", ["h200", ["h200"], ("h200",)])
def test_the_same_budget_again_does_nothing(simulate: Any) -> None:
    guard = start(simulate=simulate)
    simulated(guard, "torch").allocate(GIB)
    assert start(simulate=simulate, replace=True) is guard and start(simulate=["h200"]) is guard
    assert simulated(guard, "torch").state() is State.LIVE


def test_another_budget_or_other_gpus_need_replace() -> None:
    guard = start()
    for arguments in ((TORCH, "h200"), (BUDGET, "h100"), (BUDGET, ["h200", "h200"])):
        with pytest.raises(AlreadyActive, match="replace=True"):
            start(*arguments)
    assert guard.active and conductor.current() is guard
    other = start(TORCH, replace=True)
    assert not guard.active and other.active and conductor.current() is other
    assert list(other.frameworks) == ["torch"] and len(hooks()) == 1


def test_a_budget_that_does_not_fit_leaves_nothing_applied() -> None:
    with pytest.raises(PlanError, match=r"device\.limit"):
        start({**BUDGET, "device": {"limit": "60GiB"}}, "t4")
    with pytest.raises(DeviceError, match="no simulated GPU"):
        start(BUDGET, "h2000")
    with pytest.raises(DeviceError, match="at least one GPU"):
        start(BUDGET, [])
    assert hooks() == []
    with pytest.raises(NotActive):
        memguard.ledger()


def test_a_guard_prints_its_plan_and_says_that_it_is_simulated() -> None:
    guard = start()
    simulated(guard, "torch").start_importing()
    lines = str(guard).splitlines()
    assert lines[0].startswith("NVIDIA H200 (simulated) GPU-") and "limit 16.00 GiB, reserve 2.00 GiB" in lines[0]
    assert lines[1].split() == ["torch", "4.00", "GiB", "enforced"]
    assert lines[2].split() == ["tensorflow", "4.00", "GiB", "pending"]
    memguard.shutdown()
    assert "shut down" in str(guard)


# what memguard says where nothing is active

CALLS: Mapping[str, Callable[[], object]] = {
    "ledger": memguard.ledger,
    "require": lambda: memguard.require("torch", 1),
    "resize": lambda: memguard.resize("torch", "1GiB"),
    "trim": memguard.trim,
    "workload": lambda: memguard.workload("w", framework="torch").__enter__(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_without_a_budget_say_what_to_do(call: Callable[[], object]) -> None:
    with pytest.raises(NotActive, match=r"no budget is active in this process\n    fix: call memguard\.init"):
        call()
    assert memguard.shutdown() == []


def test_a_guard_that_was_shut_down_says_so() -> None:
    guard = start()
    memguard.shutdown()
    for call in (guard.ledger, guard.trim, lambda: guard.require("torch", 1), lambda: guard.resize("torch", "1GiB")):
        with pytest.raises(NotActive, match="it was shut down"):
            call()


# shutdown


def test_shutdown_restores_what_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, torch=imported, pycuda=imported)
    guard = start()
    torch, pycuda = simulated(guard, "torch"), simulated(guard, "pycuda")
    torch.allocate(GIB)
    assert memguard.shutdown() == [] and memguard.shutdown() == []
    assert cap_of(torch) is None and cap_of(pycuda) is None and hooks() == []
    torch.allocate(20 * GIB)


def test_what_cannot_be_undone_is_listed() -> None:
    guard = start()
    simulated(guard, "tensorflow").allocate(1)
    simulated(guard, "torch").allocate(1)
    (stays,) = memguard.shutdown()
    assert stays.startswith("tensorflow: stays: ") and "permanent" in stays
    assert cap_of(simulated_again := guard.host and None) is None if False else True
    assert hooks() == [] and not guard.active


def test_permanent_changes_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Permanent(SimulatedFramework):
        def apply(self, caps: Mapping[str, int], options: Mapping[str, Any]) -> Applied:
            super().apply(caps, options)
            return Applied(Enforcement.ENFORCED, permanent="a library stays loaded")

    replaced(monkeypatch, torch=lambda h, n: Permanent(h, n, imported=True))
    start(TORCH)
    assert memguard.shutdown() == ["torch: a library stays loaded"]

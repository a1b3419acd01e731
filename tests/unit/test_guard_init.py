"""`init` and `guard`: what is applied, once, and what the errors say if nothing is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from guards import BUDGET, TORCH, cap_of, hooks, imported, replaced, simulated, start

import memguard
from memguard import api
from memguard._base.types import Device, State
from memguard._base.units import GIB
from memguard._budget import from_mapping
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory
from memguard._runtime import runtime
from memguard.errors import (
    AlreadyActive,
    ConfigError,
    DeviceError,
    NotActive,
    PlanError,
)

pytestmark = pytest.mark.usefixtures("nothing_stays")

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
    assert guard.active and api.current() is guard
    other = start(TORCH, replace=True)
    assert not guard.active and other.active and api.current() is other
    assert list(other.frameworks) == ["torch"] and len(hooks()) == 1


def test_the_active_budget_is_named_by_its_file(tmp_path: Path) -> None:
    (path := tmp_path / "mine.yaml").write_text(json.dumps(TORCH))
    start(path)
    with pytest.raises(AlreadyActive, match=f"is active in this process: that of {path}\n    fix: "):
        start(BUDGET)
    start(BUDGET, replace=True)
    with pytest.raises(AlreadyActive, match="is active in this process\n    fix: "):
        start(path)


def test_without_a_gpu_the_error_names_simulated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare(SimulatedHost):
        simulated = False

        def devices(self, *, ordinals: bool = False) -> tuple[Device, ...]:
            raise DeviceError("NVML: no driver", fix="load it")

    monkeypatch.setattr(runtime, "open_host", lambda simulate: Bare(["h200"]))
    with pytest.raises(DeviceError) as caught:
        start(TORCH)
    assert str(caught.value) == (
        "NVML: no driver\n    fix: load it\n"
        '    or: try it without a GPU: simulate="h200" (`memguard run --device h200`)'
    )


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


# guard


def test_a_budget_for_a_block() -> None:
    with memguard.guard(TORCH, simulate="h200") as guard:
        assert api.current() is guard and guard.active
    assert not guard.active and hooks() == []


def test_a_block_that_raises_is_undone_and_its_error_comes_out() -> None:
    with pytest.raises(ZeroDivisionError), memguard.guard(TORCH, simulate="h200") as guard:
        _ = 1 / 0
    assert not guard.active and hooks() == []


def test_a_block_that_shuts_down_itself_or_replaces_its_budget() -> None:
    with memguard.guard(TORCH, simulate="h200"):
        memguard.shutdown()
    with memguard.guard(TORCH, simulate="h200"):
        other = start(BUDGET, replace=True)
    assert other.active, "the block undoes what it applied, and nothing else"


def test_a_block_with_the_budget_that_is_active_already_leaves_it_active() -> None:
    guard = start()
    with memguard.guard(BUDGET, simulate="h200") as inner:
        assert inner is guard
    assert guard.active
    with pytest.raises(ZeroDivisionError), memguard.guard(BUDGET, simulate="h200"):
        _ = 1 / 0
    assert guard.active


def test_a_python_without_the_gil_is_refused_but_for_simulated_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(memguard.DeviceError, match=r"without the GIL[^\n]*\n    fix: set PYTHON_GIL=1"):
        memguard.init({"version": 1, "frameworks": {"torch": {"share": "50%"}}})
    assert memguard.init({"version": 1, "frameworks": {"torch": {"share": "50%"}}}, simulate="h200").active
    memguard.shutdown()

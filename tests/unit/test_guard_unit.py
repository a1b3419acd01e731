"""The guard on simulated GPUs: a transaction that can be undone, one at a time, and harmless in threads and forks."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import memguard
from memguard import _api
from memguard._config import from_mapping, parse
from memguard._devices import contexts
from memguard._devices.simulated import CONTEXT, SimulatedHost
from memguard._frameworks import registry
from memguard._frameworks.base import Framework
from memguard._frameworks.import_hook import ImportHook
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory, SimulatedFramework
from memguard._guard import Guard
from memguard._types import Applied, Device, Enforcement, MemoryInfo, State, Usage
from memguard._units import GIB, MIB
from memguard.errors import (
    AlreadyActive,
    BudgetExceeded,
    CapNotApplied,
    ConfigError,
    DeviceError,
    MemguardError,
    NotActive,
    PlanError,
)

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
    assert guard.active and _api.current() is guard
    other = start(TORCH, replace=True)
    assert not guard.active and other.active and _api.current() is other
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
            raise DeviceError("NVML: no driver\n    fix: load it")

    monkeypatch.setattr(_api, "_host", lambda simulate: Bare(["h200"]))
    with pytest.raises(DeviceError) as caught:
        start(TORCH)
    assert str(caught.value) == (
        "NVML: no driver\n    fix: load it\n"
        '    or: try it without one: simulate="h200" (`memguard run --simulate h200`)'
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
    torch, tensorflow = simulated(guard, "torch"), simulated(guard, "tensorflow")
    torch.allocate(1)
    tensorflow.allocate(1)
    (stays,) = memguard.shutdown()
    assert stays.startswith("tensorflow: stays: ") and "permanent" in stays
    assert cap_of(torch) is None and cap_of(tensorflow) == 4 * GIB, "the others are undone all the same"
    assert hooks() == [] and not guard.active


def test_permanent_changes_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Permanent(SimulatedFramework):
        def apply(self, caps: Mapping[str, int], options: Mapping[str, Any]) -> Applied:
            super().apply(caps, options)
            return Applied(Enforcement.ENFORCED, permanent="a library stays loaded")

    replaced(monkeypatch, torch=lambda h, n: Permanent(h, n, imported=True))
    start(TORCH)
    assert memguard.shutdown() == ["torch: a library stays loaded"]


class Steps(SimulatedFramework):
    """Writes down what is done to it; `fails` names the steps that raise."""

    done: list[str]
    fails: tuple[str, ...] = ()

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any]) -> Applied:
        self._step("apply")
        undo = super().apply(caps, options).undo

        def undone() -> None:
            self._step("undo")
            assert undo is not None
            undo()

        return Applied(Enforcement.ENFORCED, undone)

    def _step(self, step: str) -> None:
        self.done.append(f"{step} {self.name}")
        if f"{step} {self.name}" in self.fails:
            raise RuntimeError(f"{step} of {self.name} failed")


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def arrange(*fails: str, pending: tuple[str, ...] = ()) -> list[str]:
        done: list[str] = []

        def make(host: SimulatedHost, name: str) -> SimulatedFramework:
            framework = Steps(host, name, imported=name not in pending)
            framework.done, framework.fails = done, fails
            return framework

        replaced(monkeypatch, torch=make, tensorflow=make, pycuda=make)
        return done

    return arrange


def test_undone_last_first(steps: Callable[..., list[str]]) -> None:
    done = steps(pending=("tensorflow",))
    guard = start()
    simulated(guard, "tensorflow").start_importing()
    memguard.shutdown()
    assert done == ["apply torch", "apply pycuda", "apply tensorflow", "undo tensorflow", "undo pycuda", "undo torch"]


def test_a_failing_apply_takes_everything_back(steps: Callable[..., list[str]], caplog: Any) -> None:
    done = steps("apply pycuda", pending=("tensorflow",))
    with pytest.raises(RuntimeError, match="apply of pycuda failed"):
        start()
    assert done == ["apply torch", "apply pycuda", "undo torch"] and hooks() == []
    with pytest.raises(NotActive, match="no budget is active"):
        memguard.ledger()
    done.clear()
    with pytest.raises(RuntimeError):
        start()
    assert done == ["apply torch", "apply pycuda", "undo torch"], "it can be tried again"


def test_an_undo_that_fails_does_not_stop_the_others(steps: Callable[..., list[str]]) -> None:
    done = steps("undo tensorflow")
    guard = start()
    torch = simulated(guard, "torch")
    assert memguard.shutdown() == ["tensorflow: could not be undone: undo of tensorflow failed"]
    assert done[3:] == ["undo pycuda", "undo tensorflow", "undo torch"] and cap_of(torch) is None
    assert not guard.active


def test_the_first_error_comes_out_where_an_undo_fails_too(steps: Callable[..., list[str]]) -> None:
    done = steps("apply pycuda", "undo torch")
    with pytest.raises(RuntimeError, match="apply of pycuda failed"):
        start()
    assert done[-2:] == ["undo tensorflow", "undo torch"]


def test_replacing_a_budget_undoes_the_old_one_first(steps: Callable[..., list[str]]) -> None:
    done = steps()
    start()
    start(TORCH, replace=True)
    assert done[3:] == ["undo pycuda", "undo tensorflow", "undo torch", "apply torch"]


def test_an_interrupt_during_init_leaves_nothing_applied(
    steps: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = steps()
    apply = Steps.apply

    def interrupted(self: Steps, caps: Any, options: Any) -> Any:
        if self.name != "torch":
            raise KeyboardInterrupt
        return apply(self, caps, options)

    monkeypatch.setattr(Steps, "apply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start()
    assert done == ["apply torch", "undo torch"] and hooks() == []


# what is declared and cannot be


def test_a_cap_that_cannot_hold_raises_out_of_the_import(steps: Callable[..., list[str]]) -> None:
    steps("apply torch", pending=("torch",))
    guard = start(TORCH)
    torch = simulated(guard, "torch")
    with pytest.raises(RuntimeError, match="apply of torch failed"):
        torch.start_importing()
    assert torch.state() is State.IMPORTABLE and guard.active
    assert memguard.ledger().devices[0].row("torch").enforcement == "pending"


def test_tensorflow_that_is_live_already_cannot_be_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    def live(host: SimulatedHost, name: str) -> SimulatedFramework:
        framework = imported(host, name)
        framework.allocate(1)
        return framework

    replaced(monkeypatch, torch=imported, tensorflow=live)
    with pytest.raises(CapNotApplied, match="tensorflow: cap not applied: too late") as caught:
        start()
    assert caught.value.framework == "tensorflow" and caught.value.remedy in str(caught.value)
    with pytest.raises(NotActive):
        memguard.ledger()


class Absent(SimulatedFramework):
    """Not there, or found to be of no use once it is imported."""

    at_import = False

    def why_absent(self) -> str | None:
        return "torch is not installed"

    def state(self) -> State:
        return super().state() if self.at_import and not self.imported else State.ABSENT


@pytest.mark.parametrize("at_import", [False, True])
def test_what_is_not_there_is_warned_about_and_its_share_stays_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at_import: bool
) -> None:
    monkeypatch.setattr(Absent, "at_import", at_import)
    replaced(monkeypatch, torch=Absent)
    with caplog.at_level(logging.WARNING, "memguard"):
        guard = start()
        if at_import:
            assert caplog.records == []
            simulated(guard, "torch").start_importing()
    assert [r.message for r in caplog.records] == ["torch: torch is not installed; its share stays free"]
    assert guard.notes == [r.message for r in caplog.records]
    part = memguard.ledger().devices[0]
    assert part.row("torch").enforcement == "absent" and part.row("torch").bytes == 0
    assert part.row("pycuda").cap == 2 * GIB, "what another does not use is not given away"
    with pytest.raises(CapNotApplied, match="it is absent"):
        memguard.resize("torch", "1GiB")


def test_an_override_that_names_no_gpu_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "memguard"):
        guard = start({**BUDGET, "devices": {"A100*": {"limit": "16GiB"}}})
    assert len(guard.notes) == len(caplog.records) == 1 and "'A100*' names none" in guard.notes[0]
    assert guard.notes[0] in str(guard) and f"note: {guard.notes[0][:30]}" in str(memguard.ledger())


def test_a_card_that_others_fill_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    host = SimulatedHost(["t4"])
    (gpu,) = host.devices()
    host.occupy(gpu, 1, 10 * GIB)
    guard = Guard(from_mapping(TORCH), host)
    with caplog.at_level(logging.WARNING, "memguard"):
        guard.start()
    assert "other processes hold 10.00 GiB" in caplog.text and len(guard.notes) == 1
    guard.stop()


# guard


def test_a_budget_for_a_block() -> None:
    with memguard.guard(TORCH, simulate="h200") as guard:
        assert _api.current() is guard and guard.active
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


# require


def test_require_refuses_before_the_allocator_does() -> None:
    torch = simulated(start(), "torch")
    memguard.require("torch", "4GiB")
    array = torch.allocate(3 * GIB)
    memguard.require("torch", GIB)
    with pytest.raises(BudgetExceeded, match="torch needs") as caught:
        memguard.require("torch", GIB + 1)
    assert (caught.value.framework, caught.value.needed, caught.value.available) == ("torch", GIB + 1, GIB)
    torch.free(array)
    memguard.require("torch", "4GiB")


@pytest.mark.parametrize("size", ["4GB", 0, -1, "x", True, 1.5, None, 1 << 60])
def test_a_size_that_is_none(size: Any) -> None:
    start()
    for call in (lambda: memguard.require("torch", size), lambda: memguard.resize("torch", size)):
        with pytest.raises(MemguardError):
            call()


def test_a_framework_that_is_not_in_the_budget() -> None:
    start(TORCH)
    for call in (
        lambda: memguard.require("cupy", 1),
        lambda: memguard.resize("cupy", "1GiB"),
        lambda: memguard.trim("cupy"),
        lambda: memguard.workload("w", framework="cupy").__enter__(),
    ):
        with pytest.raises(MemguardError, match="'cupy' is not in the budget, which has: torch"):
            call()
    with pytest.raises(MemguardError, match="did you mean 'torch'"):
        memguard.require("pytorch", 1)


def test_require_trims_a_sibling_only_where_the_card_is_full() -> None:
    guard = start({**BUDGET, "device": {"limit": "100%", "reserve": "2GiB"}})
    torch, pycuda = simulated(guard, "torch"), simulated(guard, "pycuda")
    (gpu,) = guard.host.devices()
    torch.free(torch.allocate(3 * GIB))
    pycuda.allocate(1)
    memguard.require("pycuda", GIB)
    assert torch.stats(gpu).held == 3 * GIB
    host_of(guard).occupy(gpu, 1, guard.host.memory(gpu).free - 512 * MIB)
    memguard.require("pycuda", GIB)
    assert torch.stats(gpu).held == 0
    pycuda.allocate(GIB)
    host_of(guard).occupy(gpu, 2, guard.host.memory(gpu).free)
    with pytest.raises(BudgetExceeded, match="the card has only 0 B free") as caught:
        memguard.require("torch", "1GiB")
    assert caught.value.available == 0


def test_with_several_gpus_require_asks_about_those_the_framework_uses() -> None:
    guard = start(simulate=["h200", "t4"], budget={**BUDGET, "device": {"limit": "12GiB", "reserve": "2GiB"}})
    torch = simulated(guard, "torch")
    first, second = guard.host.devices()
    memguard.require("torch", "4GiB")
    torch.allocate(3 * GIB, device=1)
    with pytest.raises(BudgetExceeded):
        memguard.require("torch", "2GiB")
    guard.require("torch", "2GiB", device=first)
    with pytest.raises(BudgetExceeded):
        guard.require("torch", "5GiB", device=first)
    with pytest.raises(BudgetExceeded):
        guard.require("torch", "2GiB", device=second)
    host_of(guard).occupy(first, 1, guard.host.memory(first).free)
    memguard.require("torch", "1GiB")  # the card that it does not use may be full
    with pytest.raises(BudgetExceeded, match="the card has only"):
        memguard.require("pycuda", "1GiB")  # uses none yet: the first one is asked about


# workload


def test_a_workload_reports_what_it_did() -> None:
    torch = simulated(start(), "torch")
    torch.allocate(GIB)
    with memguard.workload("embed", framework="torch", needs="1GiB") as report:
        torch.free(torch.allocate(2 * GIB))
        torch.allocate(512 * MIB)
        assert report.after is None and report.delta is None
    assert (report.name, report.framework) == ("embed", "torch")
    assert report.before == GIB and report.after == GIB + 512 * MIB and report.delta == 512 * MIB
    assert report.peak == 3 * GIB


def test_a_workload_that_cannot_be_had_does_not_run() -> None:
    start()
    with pytest.raises(BudgetExceeded), memguard.workload("embed", framework="torch", needs="5GiB"):
        pytest.fail("the block ran")


def test_the_users_error_comes_out_of_a_workload_and_the_report_is_filled_in() -> None:
    torch = simulated(start(), "torch")
    with (
        pytest.raises(FrameworkOutOfMemory, match="torch"),
        memguard.workload("embed", framework="torch") as report,
    ):
        torch.allocate(GIB)
        torch.allocate(5 * GIB)
    assert report.before == 0 and report.after == report.peak == GIB


def test_nothing_of_ours_keeps_what_a_failed_block_held() -> None:
    """A kept traceback keeps the block's locals, and so its tensors, alive (measured: 4,096 MiB)."""

    class Tensor:
        pass

    start()
    kept: list[weakref.ref[Tensor]] = []

    def block() -> None:
        with memguard.workload("embed", framework="torch"), memguard.guard(BUDGET, simulate="h200"):
            tensor = Tensor()
            kept.append(weakref.ref(tensor))
            raise ValueError

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            block()
        assert kept[0]() is None
    finally:
        gc.enable()


def test_a_reading_that_fails_at_the_end_does_not_replace_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(SimulatedFramework):
        broken = False

        def usage(self, device: Device) -> Usage | None:
            if self.broken:
                raise DeviceError("NVML: GPU is lost")
            return super().usage(device)

    replaced(monkeypatch, torch=Broken)
    torch = simulated(start(), "torch")
    with pytest.raises(ZeroDivisionError), memguard.workload("w", framework="torch") as report:
        monkeypatch.setattr(Broken, "broken", True)
        _ = 1 / 0
    assert report.after is None
    assert isinstance(torch, Broken)


@pytest.mark.parametrize("usage", [Usage(GIB, None), Usage(None, None), Usage(GIB, GIB), None])
def test_figures_that_a_framework_does_not_give_stay_unknown(
    monkeypatch: pytest.MonkeyPatch, usage: Usage | None
) -> None:
    start()
    monkeypatch.setattr(SimulatedFramework, "usage", lambda self, device: usage)
    with memguard.workload("w", framework="torch") as report:
        pass
    known = 0 if usage is None else usage.in_use
    assert report.before == report.after == known and report.peak is None
    assert report.delta == (None if known is None else 0)
    report.before = None
    assert report.delta is None


@pytest.mark.parametrize("again", [False, True])
def test_a_workload_in_which_the_budget_is_shut_down(again: bool) -> None:
    start()
    with memguard.workload("w", framework="torch") as report:
        memguard.shutdown()
        if again:
            start(BUDGET)
    assert report.before == 0 and report.after is None and report.peak is None and report.delta is None


# resize and trim


def test_a_cap_is_raised_and_lowered_at_run_time() -> None:
    guard = start()
    torch = simulated(guard, "torch")
    (gpu,) = guard.host.devices()
    array = torch.allocate(3 * GIB)
    torch.free(torch.allocate(GIB))
    memguard.resize("torch", "6GiB")
    assert torch.stats(gpu).held == 4 * GIB, "nothing is trimmed where nothing is above its cap"
    torch.allocate(GIB)
    more = torch.allocate(2 * GIB)
    torch.free(more)
    assert guard.plan.devices[0].caps["torch"] == 6 * GIB
    memguard.resize("torch", "3GiB")
    assert torch.stats(gpu).held == 4 * GIB, "the cache went, the live array stays"
    assert [note for note in memguard.ledger().notes if "above its cap" in note] == [
        "torch: holds 1.00 GiB above its cap of 3.00 GiB on NVIDIA H200: it gets no more, and shrinks as arrays are "
        "freed and memguard.trim() runs"
    ]
    with pytest.raises(FrameworkOutOfMemory):
        torch.allocate(4 * MIB)
    torch.free(array)
    assert memguard.trim() == 3 * GIB
    assert not any("above its cap" in note for note in memguard.ledger().notes), "it no longer is"
    torch.allocate(2 * GIB)
    assert memguard.ledger().devices[0].row("torch").cap == 3 * GIB


def test_lowering_onto_what_is_in_use_has_nothing_to_report() -> None:
    guard = start()
    torch = simulated(guard, "torch")
    torch.allocate(3 * GIB)
    torch.free(torch.allocate(GIB))
    memguard.resize("torch", "3GiB")
    assert not any("above its cap" in note for note in memguard.ledger().notes)


def test_a_framework_capped_while_it_holds_more_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def live(host: SimulatedHost, name: str) -> SimulatedFramework:
        framework = imported(host, name)
        framework.allocate(5 * GIB)
        framework.free(framework.allocate(GIB))
        return framework

    replaced(monkeypatch, torch=live)
    with caplog.at_level(logging.WARNING, "memguard"):
        guard = start(TORCH)
    assert "torch: holds 1.00 GiB above its cap of 4.00 GiB" in caplog.text and guard.active


def test_a_cap_changed_before_the_import_is_the_one_that_is_applied() -> None:
    guard = start()
    memguard.resize("torch", "1GiB")
    torch = simulated(guard, "torch")
    torch.start_importing()
    assert cap_of(torch) == GIB


def test_tensorflow_cannot_be_resized_once_its_cap_is_set() -> None:
    guard = start()
    memguard.resize("tensorflow", "3GiB")
    tensorflow = simulated(guard, "tensorflow")
    tensorflow.start_importing()
    with pytest.raises(CapNotApplied, match="fixed"):
        memguard.resize("tensorflow", "2GiB")
    assert cap_of(tensorflow) == guard.plan.devices[0].caps["tensorflow"] == 3 * GIB


def test_a_size_that_does_not_fit_changes_nothing() -> None:
    guard = start()
    torch = simulated(guard, "torch")
    torch.start_importing()
    plan = guard.plan
    for wrong in ("9GiB", "1MiB"):
        with pytest.raises(PlanError, match="is possible beside the other caps"):
            memguard.resize("torch", wrong)
    assert guard.plan is plan and cap_of(torch) == 4 * GIB
    memguard.resize("torch", "8GiB")  # what is unallocated may be had


def test_trim_gives_back_and_says_how_much() -> None:
    guard = start()
    torch, pycuda = simulated(guard, "torch"), simulated(guard, "pycuda")
    assert memguard.trim() == 0
    torch.free(torch.allocate(2 * GIB))
    pycuda.free(pycuda.allocate(GIB))
    assert memguard.trim("torch") == 2 * GIB
    held = pycuda.stats(guard.host.devices()[0]).held
    assert held >= GIB and memguard.trim() == held and memguard.trim() == 0


def test_trim_counts_every_gpu() -> None:
    guard = start(simulate=["h200", "h100"])
    torch = simulated(guard, "torch")
    for device in (0, 1):
        torch.free(torch.allocate(GIB, device=device))
    assert memguard.trim() == 2 * GIB


# ledger


def test_the_ledger_accounts_for_everything() -> None:
    guard = start()
    (gpu,) = guard.host.devices()
    empty = memguard.ledger().devices[0]
    assert empty.process == 0 and empty.row("free").bytes == gpu.usable and empty.row("overhead").bytes == 0
    torch, tensorflow = simulated(guard, "torch"), simulated(guard, "tensorflow")
    torch.free(torch.allocate(GIB))
    torch.allocate(2 * GIB)
    host_of(guard).occupy(gpu, 7, 3 * GIB)
    part = memguard.ledger().devices[0]
    assert part.row("torch").bytes == 3 * GIB and part.row("torch").in_use == 2 * GIB
    assert part.row("overhead").bytes == CONTEXT + 94 * MIB and part.row("unaccounted").bytes == 0
    assert part.row("other processes").bytes == 3 * GIB
    host_of(guard).take(gpu, 512 * MIB)  # past every framework
    part = memguard.ledger().devices[0]
    assert part.row("unaccounted").bytes == 512 * MIB and part.row("overhead").bytes == CONTEXT + 94 * MIB
    tensorflow.allocate(GIB)
    part = memguard.ledger().devices[0]
    assert part.row("tensorflow").at_least == GIB
    assert sum(row.bytes or 0 for row in part.rows) == gpu.total
    assert memguard.ledger().simulated and "(simulated)" in str(memguard.ledger())


def test_random_work_always_adds_up_to_the_byte() -> None:
    rng = random.Random(11)
    guard = start(simulate=["h200", "l4"])
    live: list[tuple[SimulatedFramework, int]] = []
    for _ in range(150):
        framework = simulated(guard, rng.choice(["torch", "tensorflow", "pycuda"]))
        if live and rng.random() < 0.45:
            owner, array = live.pop(rng.randrange(len(live)))
            owner.free(array)
        else:
            with contextlib.suppress(FrameworkOutOfMemory):
                live.append((framework, framework.allocate(rng.randrange(1, 700 * MIB), device=rng.randrange(2))))
        if rng.random() < 0.1:
            memguard.trim()
        ledger = memguard.ledger()
        for part in ledger.devices:
            assert sum(row.bytes or 0 for row in part.rows) == part.device.total
            assert part.process == guard.host.processes(part.device).get(guard.host.pid, 0)
            for name in ("torch", "pycuda"):
                assert (part.row(name).bytes or 0) <= (part.row(name).cap or 0)


def test_overhead_above_the_reserve_is_said_once_with_the_reserve_that_fits() -> None:
    guard = start({**BUDGET, "device": {"limit": "16GiB", "reserve": "600MiB"}})
    simulated(guard, "torch").allocate(1)
    for _ in range(3):
        memguard.ledger()
    (note,) = [note for note in guard.notes if "overhead" in note]
    assert "more than the reserve of 600.0 MiB" in note and "reserve: 612MiB" in note


class Restless(SimulatedHost):
    """Another process takes a byte whenever somebody looks, `times` times."""

    times = 0

    def memory(self, device: Device) -> MemoryInfo:
        if self.times:
            self.times -= 1
            self.occupy(device, 7, (self.processes(device).get(7) or 0) + 1)
        return super().memory(device)


def test_a_card_that_rests_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    readings = []
    memory = SimulatedHost.memory
    monkeypatch.setattr(SimulatedHost, "memory", lambda self, gpu: readings.append(gpu) or memory(self, gpu))
    memguard.ledger()
    assert len(readings) == 2


@pytest.mark.parametrize(("times", "moved"), [(0, False), (2, False), (3, False), (4, False), (100, True)])
def test_a_card_that_moves_is_read_again_and_it_is_said_where_it_never_rests(times: int, moved: bool) -> None:
    host = Restless(["h200"])
    guard = Guard(from_mapping(TORCH), host)
    guard.start()
    host.times = times
    (part,) = guard.ledger().devices
    assert part.moved is moved
    assert sum(row.bytes or 0 for row in part.rows) == part.device.total
    guard.stop()


class Container(SimulatedHost):
    """NVML lists other PIDs than this process's own; whether a context exists is `active`."""

    active: bool | None = None

    def processes(self, device: Device) -> Mapping[int, int | None]:
        return {pid + 1: size for pid, size in super().processes(device).items()}

    def context_active(self, device: Device) -> bool:
        return self.active  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("live", "active", "process"),
    [
        (True, True, None),  # it is there, and NVML does not name it: unknown
        (True, None, None),  # whether there is a context cannot be asked, but a framework is live
        (False, True, None),
        (False, None, 0),  # nothing is live, nothing is listed
        (False, False, 0),
        (True, False, 0),  # live without a context on this GPU: it holds nothing there
    ],
)
def test_a_process_that_nvml_does_not_name_is_unknown(live: bool, active: bool | None, process: int | None) -> None:
    host = Container(["h200"])
    guard = Guard(from_mapping(TORCH), host)
    guard.start()
    host.active = active
    if live:
        simulated(guard, "torch").allocate(GIB)
    (part,) = guard.ledger().devices
    assert part.process is process or part.process == process
    assert sum(row.bytes or 0 for row in part.rows) == part.device.total
    guard.stop()


@pytest.mark.parametrize("active", [True, None])
def test_a_context_that_another_library_opened_is_overhead(
    active: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = start()
    (gpu,) = guard.host.devices()
    host_of(guard).open_context(gpu)
    monkeypatch.setattr(SimulatedHost, "context_active", lambda self, device: active)
    part = memguard.ledger().devices[0]
    assert part.row("overhead").bytes == CONTEXT and part.row("unaccounted").bytes == 0


class NotSimulated(SimulatedHost):
    """For what is done on real GPUs only."""

    simulated = False


@pytest.mark.parametrize(
    ("names", "version", "answer", "asked"),
    [
        (("torch", "tensorflow"), "13.0", "loaded a library first", True),
        (("tensorflow", "torch"), "13.0", None, True),
        (("tensorflow", "torch"), None, "never", False),
        (("torch", "pycuda"), "13.0", "never", False),
        (("tensorflow",), "13.0", "never", False),
    ],
)
def test_torch_and_tensorflow_together_have_their_cuda_runtimes_told_apart(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], version: str | None, answer: str | None, asked: bool
) -> None:
    versions: list[str] = []
    monkeypatch.setattr(registry, "create", lambda name, host: imported(host, name))
    monkeypatch.setattr("memguard._frameworks.torch.settings.cuda_version", lambda: version)
    monkeypatch.setattr("memguard._frameworks.cudart.cure", lambda v: versions.append(v) or answer)
    budget = {"version": 1, "frameworks": {name: {"share": "10%"} for name in names}}
    guard = Guard(from_mapping(budget), NotSimulated(["h200"]))
    guard.start()
    assert versions == (["13.0"] if asked else [])
    told = asked and answer is not None
    assert any("loaded a library first" in note for note in guard.notes) is told
    assert guard.stop() == (["torch: the CUDA runtime loaded first stays loaded"] if told else [])


def test_cuda_runtimes_are_left_alone_where_one_of_the_two_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "create", lambda name, host: (Absent if name == "torch" else imported)(host, name))
    monkeypatch.setattr("memguard._frameworks.torch.settings.cuda_version", lambda: "13.0")
    monkeypatch.setattr("memguard._frameworks.cudart.cure", lambda v: pytest.fail("it has nothing to cure"))
    budget = {"version": 1, "frameworks": {"torch": {"share": "10%"}, "tensorflow": {"share": "10%"}}}
    guard = Guard(from_mapping(budget), NotSimulated(["h200"]))
    guard.start()
    guard.stop()


def test_two_gpus_have_a_plan_and_a_table_each() -> None:
    guard = start({"version": 1, "frameworks": {"torch": {"share": "50%"}}}, ["h200", "t4"])
    torch = simulated(guard, "torch")
    torch.allocate(GIB, device=1)
    first, second = memguard.ledger().devices
    assert first.row("torch").bytes == 0 and second.row("torch").bytes == GIB
    assert (first.row("torch").cap or 0) > 60 * GIB > 7 * GIB > (second.row("torch").cap or 0)
    assert first.process == 0 and second.process == GIB + CONTEXT + 94 * MIB
    assert str(memguard.ledger()).count("total ") == 2


# threads


def patient(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.002)
    return condition()


def test_threads_may_call_everything_at_once() -> None:
    strange: list[BaseException] = []
    switch = sys.getswitchinterval()
    done = [0]

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            try:
                chance = rng.randrange(9)
                if chance == 0:
                    start(rng.choice([BUDGET, TORCH]), replace=rng.random() < 0.5)
                elif chance == 1:
                    memguard.shutdown()
                elif chance == 2:
                    memguard.require("torch", rng.choice(["1GiB", "5GiB"]))
                elif chance == 3:
                    memguard.resize("torch", rng.choice(["2GiB", "4GiB"]))
                elif chance == 4:
                    memguard.trim()
                elif chance == 5:
                    with memguard.workload("w", framework="torch", needs="1GiB"):
                        time.sleep(0)
                elif chance == 6:
                    str(_api.current())
                elif chance == 7 and seed == 0:
                    framework = _api.current().frameworks.get("pycuda")
                    if isinstance(framework, SimulatedFramework):
                        framework.allocate(1000)
                else:
                    for part in memguard.ledger().devices:
                        if sum(row.bytes or 0 for row in part.rows) != part.device.total:
                            raise AssertionError("the rows do not add up")
                done[0] += 1
            except MemguardError:
                done[0] += 1
            except BaseException as error:
                strange.append(error)
                return

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(8)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(switch)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    assert strange == []
    memguard.shutdown()
    assert hooks() == []


def test_an_import_that_waits_while_the_budget_is_shut_down() -> None:
    guard = start(TORCH)
    torch = simulated(guard, "torch")
    errors: list[BaseException] = []

    def importing() -> None:
        try:
            torch.start_importing()
        except BaseException as error:
            errors.append(error)

    with guard._lock:
        thread = threading.Thread(target=importing, daemon=True)
        thread.start()
        assert patient(lambda: hooks() == [])  # its callback is on its way, and waits for us
        time.sleep(0.02)
        memguard.shutdown()
    thread.join(5)
    assert errors == [] and not thread.is_alive()
    assert cap_of(torch) is None, "a budget that is gone applies nothing"


@pytest.mark.parametrize("call", ["trim", "ledger", "require"])
def test_a_call_while_another_thread_imports_the_framework_does_not_deadlock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str
) -> None:
    """The importing thread holds the import's lock and needs the guard's; the caller must not hold it and wait."""

    class Importable(SimulatedFramework):
        state = Framework.state  # the real frameworks' own: it waits for a running import

        def _live(self, module: Any) -> bool:
            return hasattr(module, "cuda") and bool(self._pools)

        def usage(self, device: Device) -> Usage | None:
            module = sys.modules.get(self.hook)
            return super().usage(device) if module is not None and self._live(module) else None

    (tmp_path / "memguard_simulated_torch.py").write_text(
        "import builtins\nbuiltins.mg_importing.set()\nbuiltins.mg_go_on.wait(5)\ncuda = None\n"
    )
    importing, go_on = threading.Event(), threading.Event()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("builtins.mg_importing", importing, raising=False)
    monkeypatch.setattr("builtins.mg_go_on", go_on, raising=False)
    replaced(monkeypatch, torch=Importable)
    guard = start(TORCH)
    calls: dict[str, Callable[[], object]] = {
        "trim": memguard.trim,
        "ledger": memguard.ledger,
        "require": lambda: memguard.require("torch", "1GiB"),
    }
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    def thread(work: Callable[[], object]) -> threading.Thread:
        started = threading.Thread(target=run, args=(work,), daemon=True)
        started.start()
        return started

    one = thread(lambda: importlib.import_module("memguard_simulated_torch"))
    assert importing.wait(5)
    other = thread(calls[call])
    other.join(0.1)
    go_on.set()
    one.join(5)
    other.join(5)
    stuck = one.is_alive() or other.is_alive()
    sys.modules.pop("memguard_simulated_torch", None)
    if stuck:
        monkeypatch.setattr(_api, "_active", None)  # its lock is lost
        guard._hook.clear()
    assert not stuck and errors == []


# forks


def in_child(work: Callable[[], str]) -> str:
    """What `work` returns in a forked child; a child that hangs is killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        try:
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the child hung"
    return answer


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@forks
def test_a_forked_child_is_inert_and_the_parent_goes_on() -> None:
    guard = start()

    def child() -> str:
        simulated(guard, "torch").start_importing()
        return f"{guard.active} {hooks()} {cap_of(simulated(guard, 'torch'))} {memguard.shutdown()}"

    assert in_child(child) == "False [] None []"
    assert in_child(lambda: str(memguard.ledger())).startswith("NotActive: no budget is active in this process")
    assert in_child(lambda: str(guard.ledger())).startswith("NotActive: no budget is active here: this is a forked")
    simulated(guard, "torch").start_importing()
    assert guard.active and cap_of(simulated(guard, "torch")) == 4 * GIB


@forks
def test_a_forked_child_may_have_a_budget_of_its_own() -> None:
    start()

    def child() -> str:
        own = start(TORCH)
        simulated(own, "torch").allocate(GIB)
        part = memguard.ledger().devices[0]
        return f"{own.active} {part.row('torch').bytes} {list(own.frameworks)} {memguard.shutdown()}"

    assert in_child(child) == f"True {GIB} ['torch'] []"


@forks
def test_a_fork_inside_a_block_leaves_the_child_without_errors() -> None:
    def child() -> str:
        block.__exit__(None, None, None)
        work.__exit__(None, None, None)
        return f"{report.before} {report.after}"

    block = memguard.guard(BUDGET, simulate="h200")
    guard = block.__enter__()
    work = memguard.workload("w", framework="torch")
    report = work.__enter__()
    assert in_child(child) == "0 None" and guard.active, "no framework is asked anything in the child"
    work.__exit__(None, None, None)
    block.__exit__(None, None, None)


@forks
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("lock", ["guard", "module"])
def test_locks_that_another_thread_held_at_the_fork_do_not_stop_the_child(lock: str) -> None:
    guard = start()
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with guard._lock if lock == "guard" else _api._lock:
            held.set()
            release.wait(20)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(5)
    try:

        def child() -> str:
            try:
                guard.ledger()
            except NotActive as error:
                return f"{'forked' in str(error)} {start(TORCH).active} {memguard.shutdown()}"
            return "active"

        assert in_child(child) == "True True []"
    finally:
        release.set()
        thread.join(5)


@forks
def test_what_was_forked_stays_inert_in_its_own_children() -> None:
    guard = start()
    assert in_child(lambda: in_child(lambda: str(guard.active))) == "False"


def test_a_replacement_that_does_not_fit_leaves_the_old_budget_as_it_was() -> None:
    guard = start()
    before = memguard.ledger().devices[0].row("torch").cap
    with pytest.raises(PlanError):
        memguard.init({**BUDGET, "device": {"limit": "900GiB"}}, simulate="h200", replace=True)
    assert guard.active
    assert memguard.ledger().devices[0].row("torch").cap == before


def test_a_replacement_whose_caps_cannot_hold_brings_the_old_budget_back(steps: Callable[..., list[str]]) -> None:
    steps()
    start(TORCH)
    cap = memguard.ledger().devices[0].row("torch").cap
    steps("apply pycuda")
    with pytest.raises(RuntimeError, match="apply of pycuda failed"):
        memguard.init(
            {"version": 1, "frameworks": {"torch": {"limit": "2GiB"}, "pycuda": {"limit": "1GiB"}}},
            simulate="h200",
            replace=True,
        )
    assert memguard.ledger().devices[0].row("torch").cap == cap


def test_a_guard_that_was_stopped_does_not_start_again() -> None:
    guard = start(TORCH)
    memguard.shutdown()
    with pytest.raises(MemguardError, match="started before"):
        guard.start()
    assert hooks() == []


def test_init_does_not_deadlock_with_an_import_that_imports_another_framework(tmp_path: Path) -> None:
    """Another thread is importing tensorflow, which imports torch, whose hook wants what init holds."""
    (tmp_path / "torch.py").write_text("__version__ = '2'\n")
    (tmp_path / "tensorflow.py").write_text("import time\ntime.sleep(0.5)\nimport torch\n")
    code = f"""
import faulthandler, sys, threading, time
sys.path.insert(0, {str(tmp_path)!r})
import memguard
from memguard import _api
from memguard._devices.simulated import SimulatedHost
class Host(SimulatedHost):
    simulated = False
_api._host = lambda simulate: Host(["h200"])
def importing():
    try:
        import tensorflow
    except memguard.CapNotApplied:
        pass
    except Exception as error:
        print(type(error).__name__)
thread = threading.Thread(target=importing, daemon=True)
thread.start()
time.sleep(0.2)
faulthandler.dump_traceback_later(20, exit=True)
try:
    memguard.init({{"version": 1, "device": {{"limit": "16GiB"}},
                   "frameworks": {{"torch": {{"limit": "4GiB"}}, "tensorflow": {{"limit": "4GiB"}}}}}})
except Exception:
    pass                                   # these modules are no frameworks
thread.join(10)
print("no deadlock" if not thread.is_alive() else "deadlock")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "no deadlock" in done.stdout, done.stdout + done.stderr


def test_a_log_that_keeps_its_records_keeps_nothing_of_a_block_that_raised(caplog: pytest.LogCaptureFixture) -> None:
    """Logged as an object, the error of a block's end would hold the block's own error, and with it its frames."""
    caplog.set_level("DEBUG", logger="memguard")

    class Tensor:
        pass

    kept: list[weakref.ref[Tensor]] = []

    def work() -> None:
        tensor = Tensor()
        kept.append(weakref.ref(tensor))
        memguard.shutdown()
        raise ValueError("of the user's own")

    memguard.init({"version": 1, "frameworks": {"torch": {"share": "50%"}}}, simulate="h200")
    with pytest.raises(ValueError, match="of the user's own") as caught, memguard.workload("work", framework="torch"):
        work()
    assert any("no figures at its end" in record.getMessage() for record in caplog.records)
    del caught
    gc.collect()
    assert kept[0]() is None


def test_a_replacement_that_fails_brings_the_former_budget_back_as_it_was_resized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget = {"version": 1, "device": {"limit": "40GiB"}, "frameworks": {"torch": {"limit": "4GiB"}}}
    memguard.init(budget, simulate="h200")
    memguard.resize("torch", "12GiB")
    real, calls = SimulatedFramework.state, []

    def fails_once(framework: SimulatedFramework) -> State:
        calls.append(framework)
        if len(calls) == 1:
            raise MemguardError("not today")
        return real(framework)

    monkeypatch.setattr(SimulatedFramework, "state", fails_once)
    with pytest.raises(MemguardError, match="not today"):
        memguard.init({**budget, "device": {"limit": "30GiB"}}, replace=True, simulate="h200")
    assert memguard.ledger().devices[0].row("torch").cap == 12 * GIB


BUSY = {"version": 1, "on_busy": "raise", "device": {"limit": "100GiB"}, "frameworks": {"torch": {"share": "50%"}}}


def test_what_this_process_may_hold_itself_is_no_reason_to_refuse_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container NVML knows this process by another number."""
    host = SimulatedHost(["h200"])
    gpu = host.devices()[0]
    host.open_context(gpu, CONTEXT)
    host.take(gpu, 60 * GIB)
    monkeypatch.setattr(host, "processes", lambda device: {4711: 60 * GIB + CONTEXT})
    guard = Guard(from_mapping(BUSY), host)
    guard.start()
    assert any("this process and others hold 60." in note for note in guard.notes)
    guard.stop()


def test_a_card_that_others_hold_is_refused_where_the_budget_says_so() -> None:
    host = SimulatedHost(["h200"])
    host.occupy(host.devices()[0], 1, 100 * GIB)
    for budget, where in ((from_mapping(BUSY), "init: "), (parse(json.dumps(BUSY), "b.json"), r"b\.json:1:\d+: ")):
        guard = Guard(budget, host)
        with pytest.raises(PlanError, match=f"^{where}on_busy: .*other processes hold 100.00 GiB") as caught:
            guard.start()
        assert "on_busy: warn" in str(caught.value) and not guard.active


# on_busy


def busy_budget(rule: str, **more: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "on_busy": rule,
        "device": {"limit": "14GiB"},
        "frameworks": {"torch": {"share": "50%"}},
        **more,
    }


@pytest.mark.parametrize("others", [0, 10 * GIB])
def test_a_busy_card_stops_init_before_anything_is_applied(
    steps: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    done = steps()
    monkeypatch.setattr(_api, "_host", lambda simulate: occupied)
    for rule in ("raise", "warn"):
        occupied = SimulatedHost(["t4", "t4"])
        occupied.occupy(occupied.devices()[1], 1, others)
        if not others:
            assert start(busy_budget(rule)).notes == [] and done == ["apply torch"]
            memguard.shutdown()
        elif rule == "raise":
            with pytest.raises(PlanError, match=r"other processes hold 10\.00 GiB") as caught:
                start(busy_budget(rule))
            (problem,) = caught.value.problems
            assert problem.path == "on_busy" and "on_busy: warn" in problem.fix
            assert done == [] and hooks() == []
            with pytest.raises(NotActive):
                memguard.ledger()
        else:
            guard = start(busy_budget(rule))
            (note,) = guard.notes
            assert "other processes hold 10.00 GiB" in note and done == ["apply torch"]
            assert note in memguard.ledger().notes
            memguard.shutdown()
        done.clear()


def test_a_busy_card_leaves_the_budget_that_was_active_before(monkeypatch: pytest.MonkeyPatch) -> None:
    host = SimulatedHost(["t4"])
    monkeypatch.setattr(_api, "_host", lambda simulate: host)
    start(TORCH, simulate=None)
    host.occupy(host.devices()[0], 1, 10 * GIB)
    with pytest.raises(PlanError, match="on_busy"):
        start(busy_budget("raise"), simulate=None, replace=True)
    assert _api.current().active and memguard.ledger().devices[0].row("torch").cap == 4 * GIB


# what was changed after init


class Drifting(SimulatedFramework):
    """Says what `lost` says."""

    lost: tuple[str, ...] = ()

    def drift(self) -> list[str]:
        return list(self.lost)


def drifting(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[Drifting]:
    made: list[Drifting] = []

    def make(host: SimulatedHost, name: str) -> SimulatedFramework:
        made.append(Drifting(host, name))
        return made[-1]

    replaced(monkeypatch, **dict.fromkeys(names, make))
    return made


def test_what_was_changed_after_init_is_in_the_ledger_and_warned_about_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = drifting(monkeypatch, "torch", "pycuda")
    start()
    torch, pycuda = made
    for framework in (torch, pycuda):
        framework.allocate(MIB)
    torch.lost = ("torch: its fraction was raised",)
    with caplog.at_level(logging.WARNING, "memguard"):
        for _ in range(3):
            ledger = memguard.ledger()
            rows = {row.name: row.enforcement for row in ledger.devices[0].rows if row.kind == "framework"}
            assert rows == {"torch": "watched", "tensorflow": "pending", "pycuda": "enforced"}
            assert ledger.notes.count("torch: its fraction was raised") == 1
            assert ledger.devices[0].row("torch").cap == 4 * GIB, "what the budget gives it"
    assert caplog.text.count("its fraction was raised") == 1
    pycuda.lost = ("pycuda: mem_alloc was replaced", "pycuda: and more")
    with caplog.at_level(logging.WARNING, "memguard"):
        ledger = memguard.ledger()
    assert {"torch: its fraction was raised", *pycuda.lost} <= set(ledger.notes)
    assert caplog.text.count("mem_alloc was replaced") == caplog.text.count("and more") == 1
    torch.lost = ()
    ledger = memguard.ledger()
    assert ledger.devices[0].row("torch").enforcement == "enforced", "set back: it holds again"
    assert "torch: its fraction was raised" not in ledger.notes


def test_nothing_can_drift_that_was_never_set(monkeypatch: pytest.MonkeyPatch) -> None:
    made = drifting(monkeypatch, "torch")
    start(TORCH)
    (torch,) = made
    torch.lost = ("torch: changed",)
    ledger = memguard.ledger()
    assert ledger.devices[0].row("torch").enforcement == "pending" and "torch: changed" not in ledger.notes


# captures of CUDA graphs


class Capturing(SimulatedFramework):
    """`captures`: this thread captures a graph. `trimmed`: for each trim, whether it was beside captures of others."""

    captures = False
    beside: list[str]

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.trimmed: list[bool] = []

    def capturing(self) -> bool:
        return self.captures

    def trim(self, device: Device) -> None:
        self.trimmed.append(bool(self.beside))
        super().trim(device)


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Capturing]]:
    """A budget whose frameworks may capture, and a stand-in for the door that keeps other threads' captures safe."""
    entered: list[str] = []

    @contextlib.contextmanager
    def beside() -> Iterator[None]:
        entered.append("entered")
        try:
            yield
        finally:
            entered.clear()

    def arrange(budget: Any = BUDGET) -> dict[str, Capturing]:
        made: dict[str, Capturing] = {}

        def make(host: SimulatedHost, name: str) -> SimulatedFramework:
            made[name] = Capturing(host, name)
            made[name].beside = entered
            return made[name]

        replaced(monkeypatch, torch=make, tensorflow=make, pycuda=make)
        monkeypatch.setattr(contexts, "beside_captures", beside)
        start(budget)
        return made

    return arrange


@pytest.mark.parametrize("who", ["torch", "pycuda"])
def test_nothing_is_trimmed_while_this_thread_captures_a_graph(
    capture: Callable[..., dict[str, Capturing]], who: str
) -> None:
    """Freeing a sibling's memory would spoil the capture as well."""
    made = capture()
    torch = made["torch"]
    torch.free(torch.allocate(GIB))
    made["pycuda"].allocate(MIB)
    made[who].captures = True
    assert memguard.trim() == 0 and memguard.trim("torch") == 0 and torch.trimmed == []
    made[who].captures = False
    assert memguard.trim() == GIB and torch.trimmed == [True], "beside the captures of other threads"


def test_a_capture_of_which_nobody_trims_is_not_asked_about(
    capture: Callable[..., dict[str, Capturing]], caplog: pytest.LogCaptureFixture
) -> None:
    made = capture()
    made["torch"].captures = True
    with caplog.at_level(logging.INFO, "memguard"):
        assert memguard.trim() == 0
    assert "captured" not in caplog.text, "nothing is live"
    made["torch"].allocate(1)
    with caplog.at_level(logging.INFO, "memguard"):
        memguard.trim()
    assert "a CUDA graph is being captured on this thread: nothing is trimmed" in caplog.text


def test_require_refuses_what_only_a_trim_could_give_while_a_graph_is_captured(
    capture: Callable[..., dict[str, Capturing]],
) -> None:
    made = capture({**BUDGET, "device": {"limit": "100%", "reserve": "2GiB"}})
    torch, pycuda = made["torch"], made["pycuda"]
    host = _api.current().host
    assert isinstance(host, SimulatedHost)
    (gpu,) = host.devices()
    torch.free(torch.allocate(3 * GIB))
    pycuda.allocate(1)
    host.occupy(gpu, 1, host.memory(gpu).free - 512 * MIB)
    pycuda.captures = True
    with pytest.raises(BudgetExceeded, match="or a CUDA graph is being captured") as caught:
        memguard.require("pycuda", GIB)
    assert (
        caught.value.available == 512 * MIB
        and torch.trimmed == []
        and "memguard.trim() where torch runs" in str(caught.value)
    )
    memguard.require("pycuda", 256 * MIB)
    pycuda.captures = False
    memguard.require("pycuda", GIB)
    assert torch.trimmed == [True] and torch.stats(gpu).held == 0


def test_a_cap_lowered_while_a_graph_is_captured_reports_and_trims_nothing(
    capture: Callable[..., dict[str, Capturing]], caplog: pytest.LogCaptureFixture
) -> None:
    torch = capture()["torch"]
    torch.free(torch.allocate(3 * GIB))
    torch.captures = True
    with caplog.at_level(logging.WARNING, "memguard"):
        memguard.resize("torch", GIB)
    assert torch.trimmed == [] and "torch: holds 2.00 GiB above its cap of 1.00 GiB" in caplog.text
    torch.captures = False
    memguard.resize("torch", 2 * GIB)
    assert torch.trimmed == [True] and torch.stats(torch.host.devices()[0]).held == 0


def test_an_error_in_a_trim_leaves_the_captures_of_others_as_they_were(
    capture: Callable[..., dict[str, Capturing]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = capture()["torch"]
    torch.allocate(1)
    monkeypatch.setattr(SimulatedFramework, "trim", lambda self, device: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        memguard.trim()
    assert torch.trimmed == [True] and torch.beside == []


# communicators, from the reserve to the ledger


def test_communicators_are_kept_for_charged_and_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[str] = []
    monkeypatch.setattr(SimulatedFramework, "libraries", lambda self: frozenset(beside))
    guard = start({"version": 1, "device": {"limit": "16GiB"}, "frameworks": {"torch": {"limit": "4GiB", "nccl": 2}}})
    (part,) = guard.plan.devices
    assert part.reserve == 544 * MIB + 384 * MIB + 64 * MIB + 896 * MIB + 512 * MIB
    (gpu,) = guard.host.devices()
    simulated(guard, "torch").allocate(GIB)

    def figures() -> list[int]:
        found = memguard.ledger().devices[0]
        return [(found.row(name).bytes or 0) // MIB for name in ("overhead", "unaccounted")]

    assert figures() == [612, 0] == figures(), "init_process_group takes nothing yet"
    host_of(guard).take(gpu, 838 * MIB)
    beside.append("nccl 1")
    assert figures() == [612 + 838, 0]
    host_of(guard).take(gpu, 486 * MIB)
    beside.append("nccl 2")
    assert figures() == [612 + 838 + 486, 0] and not [note for note in guard.notes if "overhead" in note]
    host_of(guard).take(gpu, 486 * MIB)
    beside.append("nccl 3")
    assert figures() == [612 + 838 + 486 + 486, 0]
    (note,) = [note for note in guard.notes if "overhead" in note]
    assert note.endswith("fix: frameworks.torch.nccl: 3 in the budget")
    host_of(guard).give(gpu, (838 + 2 * 486) * MIB)
    beside.clear()
    assert figures() == [612, 0]

"""`require` and `workload`: admission before a block, its figures after it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from guards import BUDGET, TORCH, host_of, replaced, simulated, start

import memguard
from memguard._base.types import Device, Usage
from memguard._base.units import GIB, MIB
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory, SimulatedFramework
from memguard.errors import (
    BudgetExceeded,
    DeviceError,
    MemguardError,
)

pytestmark = pytest.mark.usefixtures("nothing_stays")

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


def test_what_fits_waits_for_no_other_thread_and_what_does_not_is_judged_after_it() -> None:
    guard = start()
    torch, other = simulated(guard, "torch"), concurrent.futures.ThreadPoolExecutor(2)
    array = torch.allocate(3 * GIB)
    with guard.caps.lock:
        assert other.submit(lambda: memguard.require("torch", GIB)).result(10) is None
        refused = other.submit(lambda: memguard.require("torch", 2 * GIB))
        assert not concurrent.futures.wait([refused], 0.05).done
        torch.free(array)  # as a trim would, which another thread makes with the lock
    assert refused.result(10) is None
    other.shutdown()


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


def test_require_trims_a_sibling_only_if_the_card_is_full() -> None:
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


@pytest.mark.parametrize(
    "ask", [lambda guard, device: guard.require("torch", "999GiB", device=device),
            lambda guard, device: guard.make_room("torch", GIB, device=device)]
)  # fmt: skip
def test_a_gpu_that_is_not_in_the_plan_is_an_error_that_names_those_that_are(ask: Callable[..., object]) -> None:
    guard = start(TORCH)
    part = guard.plan.devices[0].device
    other = Device("GPU-11111111-0000-4000-8000-000000000000", "NVIDIA A100", 1, part.total, None, "ampere", 1, True)
    with pytest.raises(MemguardError) as caught:
        ask(guard, other)
    assert f"{other.name} ({other.uuid}) is not a GPU of the budget, which has: {part.name} ({part.uuid})" in str(
        caught.value
    )
    assert "\n    fix: " in str(caught.value) and not isinstance(caught.value, BudgetExceeded)


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


def test_memguard_keeps_nothing_that_a_failed_block_held() -> None:
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

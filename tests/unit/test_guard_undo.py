"""`shutdown`, and what is taken back when a cap cannot hold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from guards import BUDGET, TORCH, Absent, Steps, cap_of, hooks, imported, replaced, simulated, start
from interruptions import Points

import memguard
from memguard._base.types import Applied, Enforcement, State
from memguard._base.undo import Undo
from memguard._base.units import GIB
from memguard._budget import from_mapping
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._guard.guard import Guard
from memguard.errors import (
    CapNotApplied,
    NotActive,
)

pytestmark = pytest.mark.usefixtures("nothing_stays")

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
        def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
            super().apply(caps, options, undo)
            return Applied(Enforcement.ENFORCED, permanent="a library stays loaded")

    replaced(monkeypatch, torch=lambda h, n: Permanent(h, n, imported=True))
    start(TORCH)
    assert memguard.shutdown() == ["torch: a library stays loaded"]


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


def test_the_first_error_is_raised_if_an_undo_fails_too(steps: Callable[..., list[str]]) -> None:
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

    def interrupted(self: Steps, caps: Any, options: Any, undo: Undo) -> Any:
        if self.name != "torch":
            raise KeyboardInterrupt
        return apply(self, caps, options, undo)

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


@pytest.mark.parametrize("error", [CapNotApplied("torch", "it reads back as another", "none"), KeyboardInterrupt()])
def test_an_apply_that_fails_half_way_is_undone_at_once(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """In an import, after which the budget stays active, and so do the steps of the others."""
    done: list[str] = []

    class Fails(SimulatedFramework):
        def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
            super().apply(caps, options, undo)
            undo.add(self.name, lambda: done.append("undo"))
            raise error

    replaced(monkeypatch, torch=Fails, pycuda=imported)
    guard = start()
    torch, pycuda = simulated(guard, "torch"), simulated(guard, "pycuda")
    with pytest.raises(type(error)):
        torch.start_importing()
    assert done == ["undo"] and cap_of(torch) is None and guard.active and cap_of(pycuda) is not None
    assert memguard.shutdown() == [] and done == ["undo"]


def test_a_budget_that_ends_within_an_apply_leaves_no_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler may call `shutdown` at any point of it."""

    class Ends(SimulatedFramework):
        def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
            guard.stop()
            return super().apply(caps, options, undo)

    replaced(monkeypatch, torch=Ends)
    guard = start(TORCH)
    torch = simulated(guard, "torch")
    torch.start_importing()
    assert cap_of(torch) is None and guard.undone
    memguard.shutdown()


def test_a_shutdown_at_any_point_of_an_apply_leaves_no_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also right after a step was added, before its change is made."""
    points = Points()

    class Watched(SimulatedFramework):
        def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
            applied: Applied = points.run(lambda: super(Watched, self).apply(caps, options, undo))
            return applied

    def left() -> int | None:
        guard = start(TORCH)
        torch = simulated(guard, "torch")
        torch.start_importing()
        cap = cap_of(torch)
        assert memguard.shutdown() == [] and guard.undone
        return cap

    replaced(monkeypatch, torch=Watched)
    assert left() == 4 * GIB
    for at in range(1, points.count + 1):
        points = Points(at, memguard.shutdown)
        assert left() is None, points.place


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


def test_after_an_interrupted_shutdown_nothing_says_that_a_cap_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[None] = []

    def interrupted() -> None:
        calls.append(None)
        if len(calls) == 1:
            raise KeyboardInterrupt

    class Interrupted(SimulatedFramework):
        def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
            applied = super().apply(caps, options, undo)
            undo.add(self.name, interrupted)
            return applied

    replaced(monkeypatch, torch=lambda h, n: Interrupted(h, n, imported=True))
    guard = start(TORCH)
    torch = simulated(guard, "torch")
    with pytest.raises(KeyboardInterrupt):
        memguard.shutdown()
    assert not guard.active and cap_of(torch) is None, "the other steps ran"
    assert "torch: the undoing was interrupted" in caplog.text
    with pytest.raises(memguard.NotActive):
        memguard.ledger()
    assert len(calls) == 1
    assert start(TORCH) is not guard
    assert len(calls) == 2, "the next init has finished the step"

"""`memguard.suspend` on simulated GPUs: the whole way, with the simulated driver, interrupted at each call of it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from suspending import FakeGate, forget

import memguard
from memguard import api
from memguard._base.units import GIB
from memguard._devices import suspension
from memguard._devices.checkpoint import State
from memguard._devices.simulated_checkpoint import Fault, SimulatedCheckpoint, Target
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._guard.guard import Guard
from memguard._node.suspend import backend, self_suspend
from memguard._node.suspend.gates.gate import Gate
from memguard.errors import CannotResume, CannotSuspend

BUDGET: dict[str, Any] = {"version": 1, "device": {"limit": "40GiB"}, "frameworks": {"torch": {"limit": "10GiB"}}}


def test_simulated_frameworks_work_on_while_suspended() -> None:
    """docs/simulation.md says so: there is no gate before them."""
    guard = memguard.init(BUDGET, simulate="h200")
    (torch,) = guard.frameworks.values()
    assert isinstance(torch, SimulatedFramework)
    torch.allocate(GIB)
    try:
        with memguard.suspended():
            torch.free(torch.allocate(GIB))
    finally:
        memguard.shutdown()


class Stage:
    """The driver of the next suspension, and its gates."""

    def __init__(self) -> None:
        self.ways: list[backend.Simulated] = []
        self.gates: list[FakeGate] = []

    @property
    def driver(self) -> SimulatedCheckpoint:
        return self.ways[-1].driver

    @property
    def target(self) -> Target:
        return self.driver.targets[os.getpid()]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    found, of_this_process = Stage(), backend.of_this_process

    def way() -> backend.SuspendBackend:
        made = of_this_process()
        assert isinstance(made, backend.Simulated)
        found.ways.append(made)
        return made

    def gate(owner: int | None, undo: Any) -> FakeGate:
        found.gates.append(made := FakeGate(owner))
        undo.add("the gate", made.open)
        return made

    monkeypatch.setattr(self_suspend, "chosen_way", way)
    monkeypatch.setattr(self_suspend, "closed_gate", gate)
    memguard.init(BUDGET, simulate="h200")
    torch = memguard.guard and next(iter(memguard.init(BUDGET, simulate="h200").frameworks.values()))
    assert isinstance(torch, SimulatedFramework)
    torch.allocate(5 * GIB)
    yield found
    if self_suspend.current() is not None:
        memguard.resume(timeout=5)
    memguard.shutdown()
    assert suspension.now is None and not any(one.closed for one in found.gates)


def test_all_bytes_of_the_process_leave_and_come_back(stage: Stage) -> None:
    held = memguard.ledger().devices[0].process
    found = memguard.suspend()
    assert found.total == held == sum(found.bytes.values()) and stage.target.state is State.CHECKPOINTED
    part = memguard.ledger().devices[0]
    assert part.suspended == held and part.sum == part.device.total
    memguard.resume()
    assert stage.target.calls == ["lock", "checkpoint", "restore", "unlock"]


def test_it_waits_for_room_and_says_who_has_it(stage: Stage) -> None:
    memguard.suspend()
    (uuid,) = stage.driver.cards
    stage.driver.others[uuid] = stage.driver.cards[uuid] - GIB
    waits: list[Any] = []
    with pytest.raises(CannotResume, match="it stays suspended and whole"):
        memguard.resume(timeout=0.2, progress=waits.append)
    assert waits[0].free == GIB and waits[0].needs > 5 * GIB
    threading.Timer(0.3, lambda: stage.driver.others.update({uuid: 0})).start()
    memguard.resume(timeout=10)
    assert stage.target.state is State.RUNNING


def test_another_process_brings_it_back(stage: Stage) -> None:
    memguard.suspend()
    stage.driver.restore(os.getpid())
    stage.driver.unlock(os.getpid())
    until = time.monotonic() + 10
    while self_suspend.current() is not None and time.monotonic() < until:
        time.sleep(0.01)
    assert self_suspend.current() is None and suspension.now is None


@pytest.mark.parametrize("call", ["state", "lock", "checkpoint"])
def test_a_ctrl_c_at_a_call_of_the_driver_takes_it_back(
    stage: Stage, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(monkeypatch, call)
    with pytest.raises(KeyboardInterrupt):
        memguard.suspend()
    assert stage.target.state is State.RUNNING and self_suspend.current() is None
    assert type(memguard.init(BUDGET, simulate="h200")) is Guard


@pytest.mark.parametrize("call", ["restore", "unlock"])
def test_a_ctrl_c_within_the_restore_comes_after_it(stage: Stage, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memguard.suspend()
    interrupted(monkeypatch, call)
    with pytest.raises(KeyboardInterrupt):
        memguard.resume()
    assert stage.target.state is State.RUNNING and self_suspend.current() is None


def interrupted(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """SIGINT comes within the first of these calls."""
    original, came = getattr(SimulatedCheckpoint, call), []

    def interrupting(self: SimulatedCheckpoint, *args: Any) -> Any:
        if not came:
            came.append(True)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.15)
        return original(self, *args)

    monkeypatch.setattr(SimulatedCheckpoint, call, interrupting)


@pytest.mark.parametrize("fault", [Fault("code", 600), Fault("die", done=False), Fault("die"), Fault("hang")])
@pytest.mark.parametrize("call", ["lock", "checkpoint"])
def test_whatever_fails_on_the_way_out_it_runs_or_is_suspended(stage: Stage, call: str, fault: Fault) -> None:
    way = self_suspend.chosen_way()
    assert isinstance(way, backend.Simulated)
    way.driver.fail(call, fault)
    patched = pytest.MonkeyPatch()
    patched.setattr(self_suspend, "chosen_way", lambda: way)
    try:
        memguard.suspend()
    except CannotSuspend:
        assert stage.target.state is State.RUNNING and self_suspend.current() is None
    else:
        assert stage.target.state is State.CHECKPOINTED and self_suspend.current() is not None
    finally:
        patched.undo()


def test_a_process_that_is_lost_says_so(stage: Stage) -> None:
    memguard.suspend()
    stage.driver.fail("restore", Fault("code", 2))
    with pytest.raises(CannotResume, match="lost") as caught:
        memguard.resume()
    assert caught.value.lost and stage.gates[-1].closed
    forget()


def test_the_real_gate_closes_and_opens(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    memguard.suspend()
    real = self_suspend._now.gate if self_suspend._now is not None else None
    assert isinstance(real, Gate) and real.closed
    memguard.resume()
    assert not real.closed and self_suspend.current() is None


def test_a_ledger_that_was_being_read_when_the_process_left_answers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML refuses between its begin and its end; the guard then answers from the last reading."""
    guard = api.current()
    reading, begun, left = guard.reader.reading, threading.Event(), threading.Event()

    def read(*given: Any) -> Any:
        if threading.current_thread() is not reader:
            return reading(*given)
        begun.set()
        assert left.wait(60)
        suspension.check("NVML")
        return reading(*given)

    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(memguard.ledger()))
    monkeypatch.setattr(guard.reader, "reading", read)
    reader.start()
    assert begun.wait(60)
    with memguard.suspended():
        left.set()
        reader.join(60)
    assert found and found[0].devices[0].suspended is not None

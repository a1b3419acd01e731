"""`memguard.suspend`, `resume` and `suspended`: what this process is, at every step and after every interruption."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from suspending import FakeWay, forget, way_of

import memguard
from memguard import api
from memguard._base.types import Event, MemoryInfo
from memguard._base.units import GIB
from memguard._devices import suspension
from memguard._frameworks.optional_modules import Gates, entries
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._guard.guard import Guard
from memguard._node.suspend import self_suspend
from memguard._node.suspend.gates import gate as gates
from memguard._node.suspend.gates import native_threads
from memguard._node.suspend.triggers import at_exit, for_lease, own_lease, when_idle
from memguard._node.suspend.types import Wait
from memguard._runtime import runtime
from memguard.errors import CannotResume, CannotSuspend, MemguardError, Suspended

BUDGET: dict[str, Any] = {"version": 1, "device": {"limit": "40GiB"}, "frameworks": {"torch": {"limit": "10GiB"}}}
REAL_GATE = self_suspend.closed_gate
UUID = "GPU-00000000-0000-4000-8000-000000000000"


@pytest.fixture
def way(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeWay]:
    with way_of(monkeypatch, {UUID: 3 * GIB}) as found:
        yield found
    assert not isinstance(sys.exit, at_exit._Exit)
    assert not [thread for thread in threading.enumerate() if thread.name == "memguard-suspend"]


@pytest.fixture
def budget(way: FakeWay) -> Iterator[Guard]:
    yield memguard.init({**BUDGET, "monitor": {"interval": "50ms"}}, simulate="h200")
    self_suspend.resume(10, None)
    memguard.shutdown()


def fill(guard: Guard, size: int) -> int:
    torch = guard.frameworks["torch"]
    assert isinstance(torch, SimulatedFramework)
    return torch.allocate(size)


def test_it_leaves_and_comes_back_without_a_budget(way: FakeWay) -> None:
    found = memguard.suspend()
    assert (found.bytes, found.why, way.steps) == ({UUID: 3 * GIB}, "asked", ["checks", "lock", "checkpoint"])
    assert suspension.now is not None and suspension.now.bytes == {UUID: 3 * GIB} and not suspension.now.moving
    assert way.gates[-1].closed and way.gates[-1].owner is None
    memguard.resume()
    assert way.steps[-2:] == ["room", "restore"] and way.closed == 1


def test_a_suspension_says_what_left_in_words(way: FakeWay) -> None:
    with memguard.suspended() as found:
        assert str(found) == f"suspended in 0.1 s: 3.00 GiB left {UUID}"
        assert way.gates[-1].owner == threading.get_ident()
    assert not way.gates[-1].closed


def test_resume_of_a_process_on_its_gpus_does_nothing(way: FakeWay) -> None:
    memguard.resume()
    assert way.steps == []


def test_a_second_suspension_is_refused_and_says_so(way: FakeWay) -> None:
    with memguard.suspended():
        for again in (memguard.suspend, lambda: memguard.suspended().__enter__()):
            with pytest.raises(Suspended, match=r"already off its GPUs since .*\n    fix: memguard.resume\(\)"):
                again()
        assert self_suspend.current() is not None


def test_another_thread_may_bring_it_back(way: FakeWay) -> None:
    memguard.suspend()
    thread = threading.Thread(target=memguard.resume)
    thread.start()
    thread.join(10)
    assert self_suspend.current() is None


def test_resume_waits_for_a_suspension_that_another_thread_has_begun(way: FakeWay) -> None:
    """Of the watch for idleness: else it would come right after `resume` has found nothing to do."""
    begun, go_on = threading.Event(), threading.Event()

    def at(step: str) -> None:
        if step == "lock":
            begun.set()
            go_on.wait(10)

    way.at = at
    leaves = threading.Thread(target=memguard.suspend)
    leaves.start()
    assert begun.wait(10)
    threading.Timer(0.1, go_on.set).start()
    memguard.resume(timeout=10)
    leaves.join(10)
    assert way.running and suspension.now is None and way.steps[-2:] == ["room", "restore"]


def test_two_threads_at_once_suspend_once(way: FakeWay) -> None:
    inside, go_on, errors = threading.Event(), threading.Event(), []

    def at(step: str) -> None:
        if step == "lock":
            inside.set()
            assert go_on.wait(10)

    way.at = at
    first = threading.Thread(target=memguard.suspend)
    first.start()
    assert inside.wait(10)
    try:
        memguard.suspend()
    except MemguardError as error:
        errors.append(error)
    go_on.set()
    first.join(10)
    assert isinstance(errors[0], Suspended) and way.steps.count("lock") == 1


def test_what_speaks_against_it_changes_nothing(way: FakeWay, budget: Guard) -> None:
    def at(step: str) -> None:
        raise CannotSuspend([("ipc", "it shares memory", "close the handle")])

    way.at = at
    with pytest.raises(CannotSuspend, match="it shares memory"):
        memguard.suspend()
    assert suspension.now is None and budget.caps.suspended is None and not way.gates


def test_what_was_put_off_while_a_suspension_was_refused_at_the_gate_is_destroyed(
    way: FakeWay, budget: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's finalizer runs between the gate and the look that finds a thread which cannot be answered."""
    module: Any = ModuleType("framework_of_the_refused_gate")
    freed: list[tuple[int, bool]] = []
    module.free = lambda what: freed.append((what, threading.current_thread() is threading.main_thread()))

    def hold(*_: object) -> tuple[str, ...]:
        module.free(7)
        assert freed == [], "it is put off"
        return ("framework: native.so",)

    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(self_suspend, "closed_gate", REAL_GATE)
    monkeypatch.setattr(
        gates, "tables", lambda: [Gates(module.__name__, (), entries(module.__name__, "wait", "", "free"))]
    )
    monkeypatch.setattr(native_threads, "hold", hold)
    with pytest.raises(CannotSuspend, match=r"native\.so"):
        memguard.suspend()
    assert suspension.now is None and self_suspend.current() is None
    assert freed == [(7, True)], "once, on the thread of the call"
    module.free(8)
    assert freed[1:] == [(8, True)]


def test_a_block_that_fails_keeps_its_own_error(way: FakeWay) -> None:
    with pytest.raises(ZeroDivisionError), memguard.suspended():
        raise ZeroDivisionError
    assert self_suspend.current() is None


def test_a_block_whose_process_came_back_by_itself_ends_well(way: FakeWay) -> None:
    with memguard.suspended():
        memguard.resume()
    assert way.steps.count("restore") == 1


def test_a_function_can_be_run_off_the_gpus(way: FakeWay) -> None:
    @memguard.suspended()
    def off() -> bool:
        return self_suspend.current() is not None

    assert off() and off() and self_suspend.current() is None


def test_another_process_brings_it_back(way: FakeWay, budget: Guard) -> None:
    memguard.suspend()
    gate = way.gates[-1]
    way.running = True
    way.by_others.set()
    until = time.monotonic() + 10
    while gate.closed and time.monotonic() < until:
        time.sleep(0.01)
    while suspension.now is not None or self_suspend.current() is not None:
        time.sleep(0.01)
    assert budget.caps.suspended is None and "restore" not in way.steps
    assert memguard.ledger().devices[0].suspended is None


@pytest.fixture
def ends_late(way: FakeWay, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Another process has brought this one back, and its helper goes on until the event is set, 10 s at most."""
    ends, go_on = threading.Event(), threading.Event()

    def close() -> None:
        ends.set()
        go_on.wait(10)

    memguard.suspend()
    monkeypatch.setattr(way, "close", close)
    way.running = True
    way.by_others.set()
    assert ends.wait(10) and suspension.now is None
    way.by_others.clear()
    yield go_on
    go_on.set()
    self_suspend.resume(10, None)


def test_it_can_leave_again_while_the_helper_of_the_last_time_ends(way: FakeWay, ends_late: threading.Event) -> None:
    """What was seen on a GPU: the helper took so long that `suspend` was refused."""
    threading.Timer(0.1, ends_late.set).start()
    with memguard.suspended():
        assert suspension.now is not None
    assert way.steps.count("checkpoint") == 2


def test_what_speaks_against_it_by_the_end_of_that_wait_counts(
    way: FakeWay, ends_late: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def on_monitor() -> bool:
        asked.append(bool(asked))
        ends_late.set()
        return asked[-1]

    monkeypatch.setattr(self_suspend, "on_monitor", on_monitor)
    with pytest.raises(CannotSuspend):
        memguard.suspend()
    assert suspension.now is None and way.steps.count("checkpoint") == 1


@pytest.mark.parametrize("leave", [when_idle._leave, lambda _: for_lease.leave()], ids=["idle", "lease"])
def test_who_leaves_unasked_does_not_wait_for_that(
    leave: Callable[[Any], object], way: FakeWay, ends_late: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has seen that nothing runs, and tries again soon: what begins during a wait must not lose its GPU."""
    monkeypatch.setattr(own_lease, "current", lambda: SimpleNamespace(held=True))
    monkeypatch.setattr(for_lease, "_unneeded", lambda _: "")
    monkeypatch.setattr(for_lease, "_at_work", lambda: "")
    monkeypatch.setattr(when_idle, "has_gpu", lambda: True)
    idle = SimpleNamespace(none=lambda: contextlib.nullcontext(True), owner=None)
    threading.Timer(0.5, ends_late.set).start()
    with pytest.raises(Suspended, match="another call"):
        leave(idle)


def test_a_watcher_that_comes_late_undoes_nothing_of_the_next_suspension(way: FakeWay, budget: Guard) -> None:
    memguard.suspend()
    first = self_suspend._now
    assert first is not None
    memguard.resume()
    with memguard.suspended():
        self_suspend._locked.run(self_suspend._came_back, 1, first, ", late")
        assert suspension.now is not None and budget.caps.suspended is not None and way.gates[-1].closed


def test_without_room_it_stays_suspended_and_whole(way: FakeWay) -> None:
    memguard.suspend()
    way.room.clear()
    waits: list[Wait] = []
    with pytest.raises(CannotResume, match="stays suspended and whole"):
        memguard.resume(timeout=0.2, progress=waits.append)
    assert self_suspend.current() is not None and way.gates[-1].closed
    assert suspension.now is not None and not suspension.now.moving
    assert waits and waits[0].holders == ("python (7) 70 GiB",)
    way.room.set()
    memguard.resume()


def test_a_wrong_duration_is_refused(way: FakeWay) -> None:
    for call in (lambda: memguard.suspend(timeout="soon"), lambda: memguard.resume(timeout="soon")):
        with pytest.raises(MemguardError, match="not a duration"):
            call()


# Ctrl-C


def interrupt_at(way: FakeWay, step: str, times: int = 1) -> None:
    """SIGINT comes while that step is under way, and its flow goes on a moment later."""

    def at(now: str) -> None:
        if now == step:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.15)

    way.at = at


@pytest.mark.parametrize("step", ["checks", "lock", "checkpoint"])
def test_an_interrupted_suspension_is_taken_back(way: FakeWay, budget: Guard, step: str) -> None:
    interrupt_at(way, step)
    with pytest.raises(KeyboardInterrupt):
        memguard.suspend()
    assert way.running and suspension.now is None and self_suspend.current() is None and budget.caps.suspended is None
    assert memguard.ledger().devices[0].suspended is None


def test_a_second_interruption_without_room_leaves_it_suspended(way: FakeWay) -> None:
    way.room.clear()
    interrupt_at(way, "checkpoint", times=2)
    with pytest.raises(KeyboardInterrupt):
        memguard.suspend()
    assert self_suspend.current() is not None and not way.running
    way.room.set()
    memguard.resume()


def test_an_interrupted_wait_for_room_leaves_it_suspended(way: FakeWay) -> None:
    memguard.suspend()
    way.room.clear()
    interrupt_at(way, "room")
    with pytest.raises(KeyboardInterrupt):
        memguard.resume()
    assert self_suspend.current() is not None and way.gates[-1].closed and not way.running


def test_an_interrupted_restore_ends_first(way: FakeWay) -> None:
    memguard.suspend()
    interrupt_at(way, "restore")
    with pytest.raises(KeyboardInterrupt):
        memguard.resume()
    assert self_suspend.current() is None and way.running and not way.gates[-1].closed


def test_a_progress_that_raises_is_an_interruption(way: FakeWay) -> None:
    memguard.suspend()
    way.room.clear()

    def progress(wait: Wait) -> None:
        raise ValueError("a broken bar")

    with pytest.raises(ValueError, match="a broken bar"):
        memguard.resume(progress=progress)
    assert self_suspend.current() is not None


def test_a_flow_that_nobody_understands_keeps_the_gates_closed(way: FakeWay) -> None:
    def at(step: str) -> None:
        if step == "checkpoint":
            raise OSError("the helper is gone")

    way.at = at
    with pytest.raises(OSError, match="the helper is gone"):
        memguard.suspend()
    assert self_suspend.current() is not None and way.gates[-1].closed and suspension.now is not None
    memguard.resume()
    assert self_suspend.current() is None


# what memguard says meanwhile


def test_the_ledger_says_what_lies_in_host_memory(way: FakeWay, budget: Guard) -> None:
    fill(budget, 2 * GIB)
    before = memguard.ledger().devices[0]
    with memguard.suspended():
        ledger = memguard.ledger()
        part = ledger.devices[0]
        assert part.suspended == 3 * GIB and part.process == 0 and part.sum is None
        assert part.row("torch").bytes == before.row("torch").bytes == 2 * GIB
        assert part.row("torch").enforcement == "suspended"
        assert sum(row.bytes or 0 for row in part.own_rows) == 0
        assert part.row("free").bytes is None
        assert "this process: suspended, 3.00 GiB in host memory (its limit: 40.00 GiB)" in " ".join(
            str(ledger).split()
        )
        assert ledger.as_dict()["devices"][0]["suspended"] == 3 * GIB
        assert "3.00 GiB" in ledger._repr_html_() and "suspended, 3.00 GiB in host memory" in str(budget)
    after = memguard.ledger().devices[0]
    assert after.suspended is None and after.row("torch").enforcement == before.row("torch").enforcement
    assert after.sum == after.device.total


def test_the_ledger_of_a_lost_process_does_not_say_that_anything_brings_it_back(way: FakeWay, budget: Guard) -> None:
    def at(step: str) -> None:
        if step == "restore":
            raise CannotResume("the driver destroyed it", lost=True)

    fill(budget, 2 * GIB)
    before = memguard.ledger().devices[0].process
    assert before is not None
    memguard.suspend()
    way.at = at
    with pytest.raises(CannotResume):
        memguard.resume()
    ledger = memguard.ledger()
    part, lost = ledger.devices[0], "lost: the driver has destroyed what it had on its GPUs"
    row = next(row for row in part.rows if row.kind == "suspended")
    assert (row.name, row.note, row.bytes, part.process) == ("destroyed", lost, -before, 0)
    for text in (str(ledger), ledger._repr_html_(), str(budget)):
        words = " ".join(text.split())
        assert lost in words and "end it and start it again" in words
        assert "memguard.resume()" not in words and "in host memory" not in words
    assert f"this process: {lost} (its limit: 40.00 GiB)" in " ".join(str(ledger).split())
    forget()
    way.running = True


def test_with_figures_of_another_process_the_ledger_adds_up(way: FakeWay, budget: Guard) -> None:
    total = budget.plan.devices[0].device.total
    way.memory_of = MemoryInfo(total, GIB, 5 * GIB, total - 6 * GIB)
    with memguard.suspended():
        part = memguard.ledger().devices[0]
        assert part.sum == part.device.total and part.row("other processes").bytes == 5 * GIB


def test_the_timeline_keeps_it_and_no_sample_comes_meanwhile(way: FakeWay, tmp_path: Path) -> None:
    events: list[Event] = []
    watch = memguard.on_event(events.append)
    memguard.init(
        {**BUDGET, "monitor": {"interval": "50ms", "timeline": str(tmp_path / "run-{pid}.jsonl")}}, simulate="h200"
    )
    try:
        monitor = api.current_session().monitor
        assert monitor is not None
        with memguard.suspended():
            taken = len(monitor.last(1e9))
            time.sleep(0.2)
            assert len(monitor.last(1e9)) == taken and monitor.alive
        until = time.monotonic() + 10
        while len(monitor.last(1e9)) == taken and time.monotonic() < until:
            time.sleep(0.01)
        assert len(monitor.last(1e9)) > taken
    finally:
        memguard.shutdown()
        watch.remove()
    (path,) = tmp_path.iterdir()
    kinds = [line["event"]["kind"] for line in map(json.loads, path.read_text().splitlines()) if "event" in line]
    assert [kind for kind in kinds if kind in ("suspended", "resumed")] == ["suspended", "resumed"]
    assert [event.kind for event in events if event.kind in ("suspended", "resumed")] == ["suspended", "resumed"]
    found = [event for event in memguard.load_timeline(path).events() if event.kind == "suspended"]
    assert found[0].bytes == 3 * GIB and found[0].seconds == 0.1


def test_a_sample_that_does_not_end_refuses_it(way: FakeWay, budget: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_suspend, "QUIET", 0.2)
    hangs, go_on = threading.Event(), threading.Event()

    def sample() -> Any:
        hangs.set()
        go_on.wait(10)
        raise MemguardError("the end")

    monkeypatch.setattr(budget, "sample", sample, raising=False)
    assert hangs.wait(10)
    with pytest.raises(CannotSuspend, match="the monitor's sample has not ended"):
        memguard.suspend()
    go_on.set()
    assert suspension.now is None and budget.caps.suspended is None


def test_a_call_of_the_guard_that_does_not_end_refuses_it(
    way: FakeWay, budget: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_suspend, "QUIET", 0.2)
    with budget.caps.lock, pytest.raises(CannotSuspend, match="a call of memguard on another thread has not ended"):
        memguard.suspend()
    assert suspension.now is None and budget.caps.suspended is None and not way.gates


def test_a_forked_child_is_not_suspended(way: FakeWay, budget: Guard) -> None:
    memguard.suspend()
    child = os.fork()
    if not child:
        code = 1
        try:
            inert = suspension.now is None and self_suspend.current() is None and budget.caps.suspended is None
            try:
                memguard.suspend()
            except CannotSuspend as error:
                code = 0 if inert and "forked" in str(error) and not way.gates[-1].closed else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert self_suspend.current() is not None and way.gates[-1].closed


def test_what_waited_at_a_gate_finds_memguard_awake(way: FakeWay, budget: Guard) -> None:
    seen: list[Any] = []
    memguard.suspend()
    gate = way.gates[-1]
    gate.told = lambda: seen.append((suspension.now, type(budget)))
    memguard.resume()
    assert seen == [(None, Guard)]


def test_no_ctrl_c_reaches_the_way_back_itself(way: FakeWay, budget: Guard) -> None:
    """The gates are lifted and the guard asks the GPUs again on another thread; the return is told all the same."""
    threads: list[bool] = []
    events: list[str] = []
    watch = memguard.on_event(lambda event: events.append(event.kind))

    def told() -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)  # the main thread takes it while it waits

    memguard.suspend()
    way.gates[-1].told = told
    with pytest.raises(KeyboardInterrupt):
        memguard.resume()
    watch.remove()
    assert threads == [False] and suspension.now is None and budget.caps.suspended is None and way.closed == 1
    assert events == ["suspended", "resumed"]


def test_a_callback_on_the_monitors_thread_cannot_suspend(way: FakeWay, budget: Guard) -> None:
    found: list[BaseException] = []

    def callback(event: Event) -> None:
        try:
            memguard.suspend()
        except MemguardError as error:
            found.append(error)

    session = api.current_session()
    watch = memguard.on_event(callback)
    session.guard.elastic.reclaimer.events.append(Event(time.time(), "reclaim", "given back"))
    until = time.monotonic() + 10
    while not found and time.monotonic() < until:
        time.sleep(0.01)
    watch.remove()
    assert isinstance(found[0], CannotSuspend) and "on the monitor's thread" in str(found[0])


def test_a_trace_that_is_recorded_refuses_it(way: FakeWay, budget: Guard, tmp_path: Path) -> None:
    with memguard.record_trace(tmp_path / "trace.jsonl"), pytest.raises(CannotSuspend, match="record_trace records"):
        memguard.suspend()
    memguard.suspend()


def test_an_init_that_is_under_way_refuses_it(way: FakeWay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_suspend, "QUIET", 0.2)
    with runtime.this.lock, pytest.raises(CannotSuspend, match=r"memguard\.init or shutdown on another thread"):
        memguard.suspend()
    assert suspension.now is None and not way.gates


def test_a_signal_handler_within_a_suspension_cannot_begin_another(way: FakeWay) -> None:
    errors: list[MemguardError] = []

    def handler(*_: object) -> None:
        for call in (memguard.suspend, memguard.resume):
            try:
                call()
            except MemguardError as error:
                errors.append(error)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        way.at = lambda step: (os.kill(os.getpid(), signal.SIGUSR1), time.sleep(0.1)) if step == "checkpoint" else None
        memguard.suspend()
        assert self_suspend.current() is not None
        way.at = lambda step: (os.kill(os.getpid(), signal.SIGUSR1), time.sleep(0.1)) if step == "restore" else None
        memguard.resume()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(errors) >= 2 and all(isinstance(error, Suspended) for error in errors)


def test_a_ctrl_c_while_the_gates_open_opens_them(way: FakeWay, budget: Guard) -> None:
    """What waited for the GPUs is destroyed on the thread of the call: PyCUDA does that on no other."""
    memguard.suspend()
    gate = way.gates[-1]
    came: list[int] = []

    def destroys() -> None:
        came.append(threading.get_ident())
        if len(came) == 1:
            raise KeyboardInterrupt

    gate.destroys = destroys
    with pytest.raises(KeyboardInterrupt):
        memguard.resume()
    assert (
        came == [threading.get_ident()] * 2  # again, for what the interruption left
        and not gate.closed
        and budget.caps.suspended is None
        and self_suspend.current() is None
    )

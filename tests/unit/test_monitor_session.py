"""A budget in effect: errors explained, pressure acted on at checkpoints, timelines."""

from __future__ import annotations

import errno
import functools
import gc
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import waiting

import memguard
from memguard import api
from memguard._base.types import Event, NoHelp, Pressure
from memguard._base.units import GIB, MIB
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory, SimulatedFramework
from memguard._guard.guard import Guard
from memguard._runtime import runtime, session
from memguard._runtime.pressure import Action

BUDGET: dict[str, Any] = {
    "version": 1,
    "device": {"limit": "40GiB"},
    "frameworks": {"torch": {"limit": "10GiB"}, "cupy": {"limit": "20GiB"}},
}
MONITOR = {"interval": "50ms"}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    hooks = sys.excepthook, threading.excepthook
    yield
    memguard.shutdown()
    session.event_callbacks.clear()
    assert (sys.excepthook, threading.excepthook) == hooks
    assert not [thread for thread in threading.enumerate() if "memguard" in thread.name]


def begin(**more: Any) -> tuple[session.Session, dict[str, SimulatedFramework]]:
    guard = memguard.init({**BUDGET, **more}, simulate="h200")
    return api.current_session(), {
        name: one for name, one in guard.frameworks.items() if isinstance(one, SimulatedFramework)
    }


until = functools.partial(waiting.until, seconds=120.0, pause=0.02)


def event(kind: str = "pressure", framework: str | None = "torch", level: Pressure | None = Pressure.CRITICAL) -> Event:
    uuid = api.current().plan.devices[0].device.uuid
    return Event(time.time(), kind, f"{framework} is critical", level, uuid, framework)


class Array:
    """Stands for a tensor: weakly referable."""


# errors


@pytest.mark.parametrize("block", ["workload", "guard"])
def test_an_out_of_memory_is_explained_once_and_goes_on_as_it_was(
    block: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Exception, match="simulated torch") as caught, memguard.guard(BUDGET, simulate="h200") as guard:
        torch = guard.frameworks["torch"]
        assert isinstance(torch, SimulatedFramework)
        if block == "workload":
            with memguard.workload("train", framework="torch"):
                torch.allocate(11 * GIB)
        torch.allocate(11 * GIB)
    assert isinstance(caught.value, FrameworkOutOfMemory) and caught.value.requested == 11 * GIB
    shown = capsys.readouterr().err
    assert shown.count("ran out of GPU memory") == 1 and "torch" in shown
    report = memguard.last_oom()
    assert report is not None and report.verdict.requester == "torch" and report.verdict.requested == 11 * GIB
    assert any("memguard" in note for note in caught.value.__notes__)


def test_a_refusal_for_which_another_threads_call_left_no_time_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the log, the report and the timeline: its elastic cap would have risen."""
    monkeypatch.setattr("memguard._guard.elastic._LOCK_TIMEOUT", 0.05)
    elastic = {"torch": {"min": "10%", "max": "70%"}, "cupy": {"min": "10%", "max": "70%"}}
    path = tmp_path / "{pid}.jsonl"
    _, frameworks = begin(frameworks=elastic, monitor={"interval": "10s", "timeline": str(path)})
    guard, has, over = api.current(), threading.Event(), threading.Event()
    frameworks["cupy"].start_importing()

    def hold() -> None:
        with guard.caps.lock:
            has.set()
            over.wait(20)

    other = threading.Thread(target=hold, daemon=True)
    other.start()
    assert has.wait(20)
    asked = guard.plan.devices[0].caps["cupy"] + GIB
    try:
        with (
            caplog.at_level("WARNING", "memguard"),
            pytest.raises(FrameworkOutOfMemory),
            memguard.workload("train", framework="cupy"),
        ):
            frameworks["cupy"].allocate(asked)
    finally:
        over.set()
        other.join(20)
    why = "another thread held memguard's lock for 0.05 s"
    assert [text for text in caplog.messages if why in text and text.startswith("cupy: no room was made for")]
    report = memguard.last_oom()
    assert report is not None and report.moment is not None and report.moment.why_no_help == (NoHelp.LOCK_HELD, why)
    assert report.why.startswith(f"no room was made for it: {why}; its cap of ") and " was not raised: " in report.why
    assert (
        report.as_dict()["moment"]["why_no_help"] == {"kind": "lock held", "text": why}
        and "run it again" in report.remedies[0].text
    )
    shown = capsys.readouterr().err
    assert why in " ".join(shown.split())
    memguard.shutdown()
    events = [one for one in memguard.load_timeline(next(tmp_path.glob("*.jsonl"))).events() if one.kind == "refused"]
    assert len(events) == 1 and events[0].text.endswith(f"; no room was made for it: {why}")


def test_the_reason_of_one_refusal_is_not_that_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memguard._guard.elastic._LOCK_TIMEOUT", 0.05)
    _, frameworks = begin()
    guard, has, over = api.current(), threading.Event(), threading.Event()
    frameworks["cupy"].start_importing()

    def hold() -> None:
        with guard.caps.lock:
            has.set()
            over.wait(20)

    other = threading.Thread(target=hold, daemon=True)
    other.start()
    assert has.wait(20)
    reasons = []
    for _ in range(2):
        with pytest.raises(FrameworkOutOfMemory):
            frameworks["cupy"].allocate(21 * GIB)
        report = memguard.last_oom()
        assert report is not None and report.moment is not None
        reasons.append(report.moment.why_no_help)
        over.set()
        other.join(20)
    assert reasons == [(NoHelp.LOCK_HELD, "another thread held memguard's lock for 0.05 s"), None]


def test_a_refusal_within_another_call_on_its_thread_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """A signal handler or finalizer that allocates within, say, a trim: nobody can be asked for room then."""
    _, frameworks = begin()
    frameworks["cupy"].start_importing()
    with caplog.at_level("WARNING", "memguard"), api.current().caps.lock, pytest.raises(FrameworkOutOfMemory):
        frameworks["cupy"].allocate(21 * GIB)
    report, why = memguard.last_oom(), "the request was made within another memguard call on this thread"
    assert report is not None and report.moment is not None and report.moment.why_no_help == (NoHelp.WITHIN_CALL, why)
    assert caplog.messages == [f"cupy: no room was made for 21.00 GiB: {why}"]


def test_callbacks_hear_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    _, frameworks = begin()
    seen: list[Event] = []
    memguard.on_event(seen.append)
    with pytest.raises(Exception, match="out of memory"), memguard.workload("train", framework="torch"):
        frameworks["torch"].allocate(11 * GIB)
    assert [(e.kind, e.framework, e.bytes) for e in seen] == [("oom", "torch", 11 * GIB)]


def test_nothing_of_the_error_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    _, frameworks = begin()
    held: list[weakref.ref[Array]] = []

    def work() -> None:
        array = Array()
        held.append(weakref.ref(array))
        with memguard.workload("train", framework="torch"):
            frameworks["torch"].allocate(11 * GIB)

    with pytest.raises(Exception, match="out of memory"):
        work()
    gc.collect()
    assert held[0]() is None and memguard.last_oom() is not None


def test_other_errors_pass_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    begin()
    with pytest.raises(ZeroDivisionError), memguard.workload("train", framework="torch"):
        raise ZeroDivisionError
    assert capsys.readouterr().err == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    _, frameworks = begin()
    thread = threading.Thread(target=frameworks["torch"].allocate, args=(11 * GIB,))
    thread.start()
    thread.join()
    assert "ran out of GPU memory" in capsys.readouterr().err


# pressure


def test_without_a_monitor_there_is_no_thread() -> None:
    running, _ = begin()
    assert running.monitor is None and not [t for t in threading.enumerate() if "memguard" in t.name]
    memguard.checkpoint()


def test_the_monitor_sees_what_the_ledger_sees_and_ends_with_the_budget() -> None:
    running, frameworks = begin(monitor=MONITOR)
    monitor = running.monitor
    assert monitor is not None
    array = frameworks["torch"].allocate(3 * GIB)
    sample = until(lambda: [s for s in monitor.last(60) if s.devices[0].frameworks.get("torch")])[-1]
    assert sample.devices[0].frameworks["torch"].in_use == 3 * GIB
    frameworks["torch"].free(array)
    memguard.shutdown()
    assert not monitor.alive


def test_pressure_is_logged_and_passed_to_callbacks(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Event] = []
    broken = memguard.on_event(lambda event: 1 / 0)
    watch = memguard.on_event(seen.append)
    with caplog.at_level(logging.INFO, "memguard"):
        _, frameworks = begin(monitor=MONITOR)
        frameworks["torch"].allocate(10 * GIB - 64 * MIB)
        first = until(lambda: [e for e in seen if e.kind == "pressure" and e.framework == "torch"])[0]
    assert first.level is Pressure.CRITICAL
    assert [r for r in caplog.records if r.levelno == logging.WARNING and "torch" in r.getMessage()]
    assert (
        caplog.text.count("failed (logged once): ZeroDivisionError") == 1 and "test_monitor_session.py:" in caplog.text
    )
    assert first.level == "critical", "it can be compared with text"
    for one in (broken, watch, watch):
        one.remove()
    assert session.event_callbacks == []


@pytest.mark.parametrize(
    ("names", "end"), [("h200", " of its cap"), (["h200", "l4"], " of its cap on cuda:0 (NVIDIA H200)")]
)
def test_pressure_names_the_gpu_if_there_are_several(names: Any, end: str) -> None:
    seen: list[Event] = []
    memguard.on_event(seen.append)
    budget = {**BUDGET, "device": {"limit": "20GiB"}, "frameworks": {"torch": {"limit": "10GiB"}}, "monitor": MONITOR}
    guard = memguard.init(budget, simulate=names)
    torch = guard.frameworks["torch"]
    assert isinstance(torch, SimulatedFramework)
    torch.allocate(10 * GIB - 64 * MIB)
    first = until(lambda: [e for e in seen if e.kind == "pressure" and e.framework == "torch"])[0]
    assert first.text.endswith(end) and first.uuid == guard.plan.devices[0].device.uuid


def test_a_trim_waits_for_a_checkpoint_on_the_users_thread() -> None:
    running, frameworks = begin()
    torch = frameworks["torch"]
    torch.free(torch.allocate(4 * GIB))
    running._act(Action("trim", event()))
    assert memguard.ledger().devices[0].row("torch").cached == 4 * GIB, "not in the background"
    seen: list[Event] = []
    memguard.on_event(seen.append)
    with memguard.workload("train", framework="cupy"):
        assert memguard.ledger().devices[0].row("torch").cached == 0
    assert [(e.kind, e.framework, e.bytes) for e in seen] == [("trim", "torch", 4 * GIB)]
    memguard.checkpoint()
    assert len(seen) == 1, "once"


def test_raise_comes_at_the_next_checkpoint_while_the_pressure_lasts() -> None:
    _, frameworks = begin(monitor=MONITOR, on_pressure=["raise"])
    array = frameworks["torch"].allocate(10 * GIB - 64 * MIB)

    def raised() -> memguard.UnderPressure | None:
        try:
            memguard.checkpoint()
        except memguard.UnderPressure as error:
            return error
        return None

    error = until(raised)
    assert error.framework == "torch" and "on_pressure" in str(error)
    assert raised() is None, "once for each rise"
    frameworks["torch"].free(array)


def test_a_raise_that_is_no_longer_due_is_forgotten() -> None:
    running, _ = begin(monitor={"interval": "1h"}, on_pressure=["raise"])
    running._act(Action("raise", event()))
    memguard.checkpoint()
    memguard.checkpoint()


def test_a_workload_that_leaves_more_behind_each_time_is_suspected_once(caplog: pytest.LogCaptureFixture) -> None:
    _, frameworks = begin()
    kept = []
    with caplog.at_level(logging.WARNING, "memguard"):
        for _ in range(12):
            with memguard.workload("step", framework="torch"):
                kept.append(frameworks["torch"].allocate(64 * MIB))
            with memguard.workload("clean", framework="torch"):
                frameworks["torch"].free(frameworks["torch"].allocate(64 * MIB))
    (warning,) = [r.getMessage() for r in caplog.records if "leaves" in r.getMessage()]
    assert "'step'" in warning and "64.0 MiB" in warning


def test_memory_that_is_freed_after_the_workload_is_no_leak(caplog: pytest.LogCaptureFixture) -> None:
    _, frameworks = begin()
    for _ in range(30):
        with memguard.workload("step", framework="torch"):
            array = frameworks["torch"].allocate(GIB)
        frameworks["torch"].free(array)
    assert "leaves" not in caplog.text


def test_names_of_workloads_are_forgotten_in_the_end() -> None:
    running, _ = begin()
    for number in range(300):
        with memguard.workload(f"step {number}", framework="torch"):
            pass
    assert len(running._workloads) == 256


def test_a_trim_that_helps_is_enough() -> None:
    running, frameworks = begin(monitor={"interval": "1h"}, on_pressure=["trim", "raise"])
    torch = frameworks["torch"]
    torch.free(torch.allocate(10 * GIB - 64 * MIB))
    for kind in ("trim", "raise"):
        running._act(Action(kind, event()))
    memguard.checkpoint()
    memguard.checkpoint()


def test_of_two_that_are_critical_the_one_that_stays_so_is_raised() -> None:
    running, frameworks = begin(monitor={"interval": "1h"}, on_pressure=["raise"])
    frameworks["torch"].allocate(10 * GIB - 64 * MIB)
    for name in ("torch", "cupy"):
        running._act(Action("raise", event(framework=name)))
    with pytest.raises(memguard.UnderPressure) as caught:
        memguard.checkpoint()
    assert caught.value.framework == "torch"


@pytest.mark.parametrize("needs", [None, "64MiB"])
def test_the_guards_own_methods_are_checkpoints_and_explain_errors_too(needs: str | None) -> None:
    running, frameworks = begin(monitor={"interval": "1h"}, on_pressure=["raise"])
    guard, torch = running.guard, frameworks["torch"]
    array = torch.allocate(10 * GIB - 64 * MIB)
    running._act(Action("raise", event(framework="torch")))
    with pytest.raises(memguard.UnderPressure):
        guard.require("cupy", "64MiB")
    running._act(Action("raise", event(framework="torch")))
    with pytest.raises(memguard.UnderPressure), guard.workload("train", framework="cupy", needs=needs):
        pytest.fail("the block was entered")
    torch.free(array)
    with pytest.raises(MemoryError), guard.workload("train", framework="cupy", needs=needs):
        raise MemoryError
    report = memguard.last_oom()
    assert report is not None and "MemoryError" in report.error


def test_a_checkpoint_of_a_callback_frees_nothing_on_the_monitors_thread() -> None:
    running, frameworks = begin(monitor=MONITOR)
    threads: list[str] = []
    running._trim = lambda event: threads.append(threading.current_thread().name)  # type: ignore[method-assign]
    done = threading.Event()

    def called(event: Event) -> None:
        running._pending_trims.append(event)
        memguard.checkpoint()
        done.set()

    memguard.on_event(called)
    frameworks["torch"].allocate(10 * GIB - 64 * MIB)
    assert done.wait(60) and threads == []


@pytest.mark.parametrize("how", ["trim", "resize", "require", "workload"])
@pytest.mark.parametrize("communicators", [True, False])
def test_where_communicators_live_nothing_is_freed_on_the_monitors_thread(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str, communicators: bool
) -> None:
    """Other ranks wait for collectives, for which a free of memory waits in turn."""
    caplog.set_level("INFO", logger="memguard")
    guard = memguard.init({**BUDGET, "monitor": {"interval": "50ms"}}, simulate="h200")
    torch, cupy = guard.frameworks["torch"], guard.frameworks["cupy"]
    assert isinstance(torch, SimulatedFramework) and isinstance(cupy, SimulatedFramework)
    monkeypatch.setattr(torch, "libraries", lambda: frozenset({"nccl 1"} if communicators else ()))
    done, device = threading.Event(), guard.plan.devices[0].device

    def held() -> int:
        usage = torch.usage(device)
        assert usage is not None and usage.held is not None
        return usage.held

    torch.free(torch.allocate(8 * GIB))
    host = guard.host
    assert isinstance(host, SimulatedHost)
    host.occupy(device, 99, host.memory(device).free - GIB)
    calls: dict[str, Callable[[], Any]] = {
        "trim": memguard.trim,
        "resize": lambda: memguard.resize("torch", "1GiB"),
        "require": lambda: memguard.require("cupy", "2GiB"),
        "workload": lambda: memguard.workload("w", framework="cupy", needs="2GiB").__enter__(),
    }

    def called(sample: Any) -> None:
        if not done.is_set():
            try:
                calls[how]()
            except memguard.BudgetExceeded:
                pass
            finally:
                done.set()

    watch = memguard.on_sample(called)
    assert done.wait(60)
    watch.remove()
    assert (held() >= 8 * GIB) is communicators
    if communicators and how != "require":
        assert "torch has communicators, for which other processes wait: nothing is trimmed" in caplog.text
    calls["trim"]()
    assert held() == 0, "on a thread of the program it goes"


class Hanging:
    """A driver that does not return, on the monitor's thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hangs, self.go = threading.Event(), threading.Event()
        asked = SimulatedHost.memory

        def memory(host: Any, device: Any) -> Any:
            if "memguard" in threading.current_thread().name:
                self.hangs.set()
                self.go.wait(60)
            return asked(host, device)

        monkeypatch.setattr(SimulatedHost, "memory", memory)


def test_a_driver_that_hangs_under_the_monitor_blocks_no_other_thread(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from memguard._ledger import reader
    from memguard._runtime import sampler

    monkeypatch.setattr(reader, "_LOCK_TIMEOUT", 0.2)
    monkeypatch.setattr(sampler, "JOIN", 0.2)
    driver = Hanging(monkeypatch)
    _, frameworks = begin(monitor=MONITOR)
    try:
        assert driver.hangs.wait(60)
        with pytest.raises(memguard.MemguardError, match="another thread has waited"):
            memguard.ledger()
        with pytest.raises(Exception, match="out of memory"), memguard.workload("train", framework="torch"):
            frameworks["torch"].allocate(11 * GIB)
        assert "ran out of GPU memory" in capsys.readouterr().err
        assert memguard.shutdown() == []
    finally:
        driver.go.set()
    until(lambda: not [t for t in threading.enumerate() if "memguard" in t.name])


def test_a_guard_that_is_stopped_by_itself_ends_the_monitor_and_the_hooks() -> None:
    hook = sys.excepthook
    running, _ = begin(monitor=MONITOR)
    monitor = running.monitor
    assert monitor is not None and sys.excepthook is not hook
    running.guard.stop()
    assert not monitor.alive and sys.excepthook is hook
    with pytest.raises(memguard.NotActive):
        memguard.ledger()


def test_a_ctrl_c_while_the_monitor_ends_leaves_nothing_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from memguard._runtime.sampler import Monitor

    stop, calls = Monitor.stop, []

    def interrupted(one: Monitor) -> None:
        calls.append(one)
        stop(one)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(Monitor, "stop", interrupted)
    begin(monitor=MONITOR)
    with pytest.raises(KeyboardInterrupt):
        memguard.shutdown()
    with pytest.raises(memguard.NotActive):
        memguard.ledger()
    assert memguard.shutdown() == [] and len(calls) == 2, "the step that was interrupted is done again"
    assert memguard.shutdown() == [] and len(calls) == 2


OTHER = {**BUDGET, "device": {"limit": "34GiB"}}


@pytest.mark.parametrize("ends", ["shutdown", "init", "guard"])
def test_a_function_that_still_runs_for_an_old_budget_does_not_end_the_new_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: str
) -> None:
    from memguard._runtime import sampler

    monkeypatch.setattr(sampler, "JOIN", 0.1)
    began, go, done, returned = threading.Event(), threading.Event(), threading.Event(), list[Any]()

    def called(event: Event) -> None:
        if began.is_set():
            return
        began.set()
        go.wait(60)
        try:
            if ends == "shutdown":
                returned.append(memguard.shutdown())
            elif ends == "init":
                memguard.init(BUDGET, replace=True, simulate="h200")
            else:
                with memguard.guard(BUDGET, replace=True, simulate="h200"):
                    returned.append("ran")
        except memguard.AlreadyActive as error:
            returned.append(error.args[0].partition("\n")[0])
        finally:
            done.set()

    memguard.on_event(called)
    _, frameworks = begin(monitor=MONITOR)
    frameworks["torch"].allocate(10 * GIB - 64 * MIB)
    assert began.wait(60)
    with caplog.at_level(logging.DEBUG, "memguard"):
        new = memguard.init({**OTHER, "monitor": MONITOR}, replace=True, simulate="h200")
        go.set()
        assert done.wait(60)
    assert new.active and api.current() is new and memguard.ledger().devices[0].limit == 34 * GIB
    if ends == "shutdown":
        assert returned == [[]] and "the one that came after it stays" in caplog.text
    else:
        assert returned == ["another budget became active while this function ran for one that is over"]


def test_a_function_may_end_its_own_budget_and_what_it_begins_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    done, seen = threading.Event(), list[Any]()
    start = Guard.start

    def fails(guard: Guard) -> None:
        if guard.plan.devices[0].limit == 35 * GIB:
            raise memguard.MemguardError("not today")
        start(guard)

    def called(event: Event) -> None:
        if not done.is_set():
            second = memguard.init({**OTHER, "monitor": MONITOR}, replace=True, simulate="h200")
            with pytest.raises(memguard.MemguardError, match="not today"):
                memguard.init({**BUDGET, "device": {"limit": "35GiB"}}, replace=True, simulate="h200")
            third = api.current()  # what was active, applied again
            memguard.shutdown()
            seen.extend((second.active, third.active, runtime.this.session))
            done.set()

    monkeypatch.setattr(Guard, "start", fails)
    memguard.on_event(called)
    _, frameworks = begin(monitor=MONITOR)
    frameworks["torch"].allocate(10 * GIB - 64 * MIB)
    assert done.wait(60) and seen == [False, False, None]


def test_only_a_function_can_be_called() -> None:
    with pytest.raises(TypeError, match="takes a function"):
        memguard.on_event(None)  # type: ignore[arg-type]


# timelines


def test_a_timeline_has_samples_events_and_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budget = tmp_path / "budget.yaml"
    budget.write_text(
        "version: 1\nframeworks: {torch: {limit: 10GiB}}\nmonitor: {interval: 50ms, timeline: 'run-{pid}.jsonl'}\n"
    )
    guard = memguard.init(budget, simulate="h200")
    torch = guard.frameworks["torch"]
    assert isinstance(torch, SimulatedFramework)
    monitor = api.current_session().monitor
    assert monitor is not None
    torch.allocate(10 * GIB - 64 * MIB)
    until(lambda: [s for s in monitor.last(60) if s.devices[0].frameworks.get("torch")])
    with pytest.raises(FrameworkOutOfMemory), memguard.workload("train", framework="torch"):
        torch.allocate(4 * GIB)
    memguard.shutdown()
    (path,) = tmp_path.glob("run-*.jsonl")
    timeline = memguard.load_timeline(path)
    assert timeline.header.simulated
    assert any(s.devices[0].frameworks.get("torch") for s in timeline.samples())
    assert "pressure" in [e.kind for e in timeline.events()]  # before the refusal or after
    (oom,) = timeline.ooms()
    assert oom.report["requested"] == 4 * GIB


def test_a_timeline_that_cannot_be_begun_leaves_nothing_applied(tmp_path: Path) -> None:
    with pytest.raises(memguard.errors.TimelineError, match="fix:"):
        memguard.init({**BUDGET, "monitor": {"timeline": str(tmp_path / "no" / "run.jsonl")}}, simulate="h200")
    with pytest.raises(memguard.NotActive):
        memguard.ledger()


def no_folder(tmp_path: Path) -> Path:
    return tmp_path / "no" / "run.jsonl"


def closed_folder(tmp_path: Path) -> Path:
    (tmp_path / "closed").mkdir()
    return tmp_path / "closed" / "run.jsonl"


def somebodys(tmp_path: Path) -> Path:
    (tmp_path / f"his{os.getpid()}.jsonl").write_text("mine\n")
    return tmp_path / "his{pid}.jsonl"


@pytest.mark.parametrize("where", [no_folder, closed_folder, somebodys])
def test_a_timeline_that_cannot_be_begun_leaves_the_budget_before_active(
    tmp_path: Path, where: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from memguard._timeline import files

    create = files.create

    def not_there(path: str, opened: list[int]) -> int:  # root may write everywhere
        if "closed" in path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return create(path, opened)

    monkeypatch.setattr(files, "create", not_there)
    running, frameworks = begin(monitor={**MONITOR, "timeline": str(tmp_path / "first.jsonl")})
    guard, monitor, array = api.current(), running.monitor, frameworks["torch"].allocate(GIB)
    with pytest.raises(memguard.errors.TimelineError, match="fix:"):
        monitored = {**OTHER, "monitor": {"timeline": str(where(tmp_path))}}
        memguard.init(monitored, replace=True, simulate="h200")
    assert api.current() is guard and guard.active, "not one like it: that one was never undone"
    assert monitor is not None and running.monitor is monitor and monitor.alive
    frameworks["torch"].free(array)
    memguard.shutdown()
    (path,) = tmp_path.glob("first*")
    memguard.load_timeline(path)


@pytest.mark.parametrize("link", [False, True])
def test_a_budget_that_replaces_another_may_name_its_timeline(tmp_path: Path, link: bool) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "link").symlink_to("runs")
    begin(monitor={**MONITOR, "timeline": str(tmp_path / "runs" / "run.jsonl")})
    folder = tmp_path / ("link" if link else "runs")
    again = {**OTHER, "monitor": {**MONITOR, "timeline": str(folder / "run.jsonl")}}
    memguard.init(again, replace=True, simulate="h200")
    monitor = api.current_session().monitor
    assert monitor is not None
    until(lambda: monitor.last(60))
    memguard.shutdown()
    first, second = sorted((tmp_path / "runs").iterdir(), key=lambda path: len(path.name), reverse=True)
    assert first.name == second.name.replace(".jsonl", ".1.jsonl"), "and nothing else is there"
    limits = [memguard.load_timeline(path).header.plan.devices[0].limit // GIB for path in (first, second)]
    assert limits == [40, 34]


def test_a_timeline_that_another_writes_is_refused_before_anything_is_undone(tmp_path: Path) -> None:
    from memguard._timeline import Writer

    begin()
    guard = api.current()
    with (
        Writer(tmp_path / "run.jsonl", guard.plan, simulated=True),
        pytest.raises(memguard.errors.TimelineError, match="is writing it"),
    ):
        memguard.init({**OTHER, "monitor": {"timeline": str(tmp_path / "run.jsonl")}}, replace=True, simulate="h200")
    assert api.current() is guard and guard.active

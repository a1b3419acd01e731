"""Caps at run time: resized, trimmed, changed by others, and during the capture of a CUDA graph."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from guards import BUDGET, TORCH, cap_of, host_of, imported, replaced, simulated, start

import memguard
from memguard import api
from memguard._base.types import Device, Drift, Event
from memguard._base.units import GIB, MIB
from memguard._devices import contexts
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory, SimulatedFramework
from memguard.errors import (
    BudgetExceeded,
    CapNotApplied,
    PlanError,
)

pytestmark = pytest.mark.usefixtures("nothing_stays")

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


def elastic(**frameworks: Any) -> memguard.Guard:
    return start({"version": 1, "device": {"limit": "16GiB", "reserve": "2GiB"}, "frameworks": frameworks})


def test_the_cap_of_an_elastic_share_is_not_resized_by_hand() -> None:
    guard = elastic(torch={"min": "4GiB", "max": "8GiB"}, cupy={"limit": "2GiB"})
    with pytest.raises(CapNotApplied, match="its cap moves between min and max by itself") as caught:
        memguard.resize("torch", "5GiB")
    assert "fix: change frameworks.torch.min or .max in the budget" in str(caught.value)
    assert guard.plan.devices[0].caps["torch"] == 8 * GIB
    memguard.resize("cupy", "3GiB")


LENT = {"torch": {"min": "4GiB", "max": "100%"}, "cupy": {"limit": "4GiB"}, "numba": {"min": "1GiB", "max": "4GiB"}}


def lent(cupy: str = "1GiB") -> memguard.Guard:
    """The room is 14 GiB. CuPy's fixed cap is lowered, and all of that is lent to torch, whose arrays are in it."""
    guard = elastic(**LENT)
    for name in LENT:
        simulated(guard, name).start_importing()
    memguard.resize("cupy", cupy)
    assert not guard.make_room("torch", 12 * GIB).missing and guard.plan.devices[0].caps["torch"] >= 12 * GIB
    return guard


def test_a_fixed_cap_that_rises_again_calls_back_what_is_not_used() -> None:
    guard = lent()
    torch, cupy = simulated(guard, "torch"), simulated(guard, "cupy")
    torch.allocate(8 * GIB)
    torch.free(torch.allocate(GIB))
    memguard.resize("cupy", "4GiB")
    assert cap_of(cupy) == 4 * GIB and cap_of(torch) == guard.plan.devices[0].caps["torch"] == 9 * GIB
    assert torch.stats(host_of(guard).devices()[0]).held == 9 * GIB, "no cache goes that is not needed"
    cupy.allocate(4 * GIB)


def test_what_is_only_cached_comes_back_for_it_too() -> None:
    guard = lent()
    torch, cupy = simulated(guard, "torch"), simulated(guard, "cupy")
    torch.allocate(5 * GIB)
    torch.free(torch.allocate(7 * GIB))
    memguard.resize("cupy", "4GiB")
    assert cap_of(cupy) == 4 * GIB and torch.stats(host_of(guard).devices()[0]).held == 5 * GIB
    part = guard.plan.devices[0]
    assert part.unallocated == part.limit - part.reserve - sum(part.caps.values()) >= 0
    assert any("room for cupy: torch gave back" in event.text for event in guard.take_events())


def test_what_is_live_stays_and_the_refusal_names_who_has_it() -> None:
    guard = lent()
    torch = simulated(guard, "torch")
    torch.allocate(10 * GIB)
    torch.free(torch.allocate(GIB))
    caps = dict(guard.plan.devices[0].caps)
    with pytest.raises(PlanError) as caught:
        memguard.resize("cupy", "4GiB")
    text = str(caught.value)
    assert "between 2.0 MiB and 3.00 GiB is possible beside the other caps; lent to others, in live arrays:" in text
    assert "torch 6.00 GiB" in text and text.endswith("ask for at most 3072MiB, or free arrays of torch")
    assert guard.plan.devices[0].caps == caps and torch.stats(host_of(guard).devices()[0]).held == 11 * GIB
    memguard.resize("cupy", "3GiB")  # what it says is possible
    assert cap_of(simulated(guard, "cupy")) == 3 * GIB and cap_of(torch) == 10 * GIB


def test_it_rises_beyond_what_the_budget_gave_it_but_never_into_a_min() -> None:
    guard = lent()
    memguard.resize("cupy", "9GiB")
    assert guard.plan.devices[0].caps == {"torch": 4 * GIB, "cupy": 9 * GIB, "numba": GIB}
    with pytest.raises(PlanError, match="lower another framework's cap first"):
        memguard.resize("cupy", "10GiB")


def test_a_cap_that_cannot_change_calls_nothing_back() -> None:
    guard = elastic(torch={"min": "4GiB", "max": "100%"}, tensorflow={"limit": "2GiB"})
    simulated(guard, "tensorflow").start_importing()
    with pytest.raises(PlanError):
        memguard.resize("tensorflow", "3GiB")
    assert guard.plan.devices[0].caps["torch"] == 12 * GIB


def test_a_guard_prints_the_bounds_of_an_elastic_share() -> None:
    lines = str(elastic(torch={"min": "4GiB", "max": "8GiB"}, tensorflow={"min": "1GiB", "max": "2GiB"})).splitlines()
    assert lines[1].split() == ["torch", "8.00", "GiB", "pending,", "min", "4.00", "GiB,", "max", "8.00", "GiB"]
    assert lines[2].split() == ["tensorflow", "1.00", "GiB", "pending"]
    assert lines[3].startswith("note: tensorflow: its limit cannot change while it runs")


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


# drift: what was changed after init


class Drifting(SimulatedFramework):
    """Its cap no longer holds because of what `lost` says."""

    lost: tuple[Drift, ...] = ()

    def drift(self) -> list[Drift]:
        return list(self.lost)


RAISE = Drift("its fraction was raised")
RAISED = "torch: its fraction was raised"


@pytest.fixture
def drifting(monkeypatch: pytest.MonkeyPatch) -> dict[str, Drifting]:
    made: dict[str, Drifting] = {}

    def make(host: SimulatedHost, name: str) -> SimulatedFramework:
        made[name] = Drifting(host, name)
        return made[name]

    replaced(monkeypatch, torch=make, pycuda=make)
    return made


def enforcements() -> dict[str, str]:
    """By framework, as the ledger's rows have them, which `print(guard)` must not contradict."""
    rows = {row.name: row for row in memguard.ledger().devices[0].rows if row.kind == "framework"}
    printed = dict(line.split()[::3] for line in str(api.current()).splitlines() if line.startswith("  "))
    assert printed == {name: row.enforcement for name, row in rows.items()}
    return printed


def test_what_was_changed_after_init_is_in_the_ledger_and_logged_once(
    drifting: dict[str, Drifting], caplog: pytest.LogCaptureFixture
) -> None:
    start()
    torch, pycuda = drifting["torch"], drifting["pycuda"]
    for framework in (torch, pycuda):
        framework.allocate(MIB)
    torch.lost = (RAISE,)
    with caplog.at_level(logging.WARNING, "memguard"):
        for _ in range(3):
            assert enforcements() == {"torch": "watched", "tensorflow": "pending", "pycuda": "enforced"}
            ledger = memguard.ledger()
            assert ledger.notes.count(RAISED) == 1
            assert ledger.devices[0].row("torch").cap == 4 * GIB, "what the budget gives it"
    assert caplog.text.count("its fraction was raised") == 1
    pycuda.lost = (Drift("mem_alloc was replaced"), Drift("and more"))
    with caplog.at_level(logging.WARNING, "memguard"):
        ledger = memguard.ledger()
    assert {RAISED, "pycuda: mem_alloc was replaced", "pycuda: and more"} <= set(ledger.notes)
    assert caplog.text.count("mem_alloc was replaced") == caplog.text.count("and more") == 1
    torch.lost = ()
    assert enforcements()["torch"] == "enforced", "set back: it holds again"
    assert RAISED not in memguard.ledger().notes


def test_nothing_can_drift_that_was_never_set(drifting: dict[str, Drifting]) -> None:
    start(TORCH)
    drifting["torch"].lost = (Drift("changed"),)
    assert enforcements() == {"torch": "pending"} and "torch: changed" not in memguard.ledger().notes


def test_every_view_finds_drift_by_itself(drifting: dict[str, Drifting], caplog: pytest.LogCaptureFixture) -> None:
    def refused() -> None:
        with pytest.raises(CapNotApplied):
            memguard.resize("torch", "1GiB")

    views: list[Callable[[], Any]] = [
        memguard.ledger,
        lambda: str(api.current()),
        lambda: api.current().sample(),
        lambda: memguard.require("torch", 1),
        refused,
    ]
    for view in views:
        guard, events = start(TORCH), list[Event]()
        guard.callbacks.event = events.append
        drifting["torch"].allocate(MIB)
        drifting["torch"].lost = (RAISE,)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "memguard"):
            view()
        assert [event.text for event in events] == ["torch: its cap no longer holds: its fraction was raised"]
        assert [record.getMessage() for record in caplog.records] == [RAISED]
        memguard.shutdown()


def test_a_check_that_fails_is_logged_once_and_breaks_nothing(
    drifting: dict[str, Drifting], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start(TORCH)
    drifting["torch"].allocate(MIB)
    monkeypatch.setattr(Drifting, "drift", lambda self: {}["limit"])
    with caplog.at_level(logging.WARNING, "memguard"):
        assert enforcements() == enforcements() == {"torch": "enforced"}
    assert [record.getMessage() for record in caplog.records] == [
        "torch: whether its cap still holds cannot be checked: KeyError: 'limit'"
    ]


def test_a_check_that_hangs_on_the_monitors_thread_blocks_no_other(
    drifting: dict[str, Drifting], monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, go = threading.Event(), threading.Event()

    def drift(self: Drifting) -> list[Drift]:
        if threading.current_thread() is not threading.main_thread():
            hangs.set()
            go.wait(60)
        return []

    monkeypatch.setattr(Drifting, "drift", drift)
    guard = start(TORCH)
    drifting["torch"].allocate(MIB)
    thread = threading.Thread(target=guard.sample)
    thread.start()
    try:
        assert hangs.wait(60)
        assert enforcements() == {"torch": "enforced"}
        memguard.resize("torch", "3GiB")
    finally:
        go.set()
        thread.join()


def test_a_check_during_a_resize_is_not_taken_for_drift(
    drifting: dict[str, Drifting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cap that is being raised is above what the framework compares with, until that is raised too."""
    guard = start(TORCH)
    torch = drifting["torch"]
    torch.allocate(MIB)
    asked, resize, threads = threading.Event(), Drifting.resize, []

    def drift(self: Drifting) -> list[Drift]:
        found = list(self.lost)
        asked.set()
        return found

    def halfway(self: Drifting, caps: Any) -> None:
        self.lost = (RAISE,)
        asked.clear()
        threads.append(threading.Thread(target=guard.ledger))
        threads[0].start()
        assert asked.wait(60)
        self.lost = ()
        resize(self, caps)

    monkeypatch.setattr(Drifting, "drift", drift)
    monkeypatch.setattr(Drifting, "resize", halfway)
    events: list[Event] = []
    guard.callbacks.event = events.append
    memguard.resize("torch", "5GiB")
    threads[0].join()
    assert events == [] and enforcements() == {"torch": "enforced"}


def test_a_cap_that_no_longer_holds_cannot_be_resized(drifting: dict[str, Drifting]) -> None:
    guard = start(TORCH)
    drifting["torch"].allocate(MIB)
    drifting["torch"].lost = (RAISE,)
    with pytest.raises(CapNotApplied, match="its fraction was raised\n    fix: undo that change") as error:
        memguard.resize("torch", "2GiB")
    assert error.value.framework == "torch" and guard.plan.devices[0].caps["torch"] == 4 * GIB
    drifting["torch"].lost = ()
    memguard.resize("torch", "2GiB")
    assert cap_of(drifting["torch"]) == 2 * GIB


def test_a_note_about_a_cap_that_no_longer_holds_promises_nothing(drifting: dict[str, Drifting]) -> None:
    guard = start(TORCH)
    torch = drifting["torch"]
    torch.allocate(MIB)
    torch.lost = (RAISE,)
    torch.resize(dict.fromkeys(guard.plan.caps("torch"), 8 * GIB))  # past the guard
    torch.allocate(5 * GIB)
    (note,) = [note for note in memguard.ledger().notes if "above its cap" in note]
    assert note.endswith("above its cap of 4.00 GiB on NVIDIA H200, which is watched, not enforced")


def test_the_timeline_and_an_out_of_memory_report_agree_about_drift(
    drifting: dict[str, Drifting], tmp_path: Path
) -> None:
    start({**TORCH, "monitor": {"interval": "1h", "timeline": str(tmp_path / "run.jsonl")}})
    torch = drifting["torch"]
    torch.allocate(MIB)
    torch.lost = (RAISE,)
    with pytest.raises(FrameworkOutOfMemory), memguard.workload("train", framework="torch"):
        torch.allocate(200 * GIB)
    torch.lost = ()
    assert enforcements() == {"torch": "enforced"}
    report = memguard.last_oom()
    assert report is not None and report.ledger is not None
    assert report.ledger.devices[0].row("torch").enforcement == "watched" and RAISED in report.ledger.notes
    assert report.reason == "card" and report.why.endswith("torch's cap of 4.00 GiB is watched, not enforced")
    memguard.shutdown()
    (path,) = tmp_path.iterdir()
    notes = [event for event in memguard.load_timeline(path).events() if event.kind == "note"]
    assert [(event.framework, event.text) for event in notes] == [
        ("torch", "torch: its cap no longer holds: its fraction was raised"),
        ("torch", "torch: its cap holds again"),
    ]


def test_the_monitor_finds_drift_and_tells_the_callbacks(drifting: dict[str, Drifting]) -> None:
    found = threading.Event()
    watch = memguard.on_event(lambda event: found.set() if event.kind == "note" else None)
    try:
        guard = start({**TORCH, "monitor": {"interval": "50ms"}})
        drifting["torch"].allocate(MIB)
        drifting["torch"].lost = (RAISE,)
        assert found.wait(60) and "watched" in str(guard)
    finally:
        watch.remove()


@pytest.mark.parametrize(
    "effect",
    [
        "",
        "the cap no longer holds",
        "its cap does not hold",
        "the cap does not hold there",
        "the cap will not hold",
    ],
)
def test_the_event_says_once_that_the_cap_no_longer_holds(drifting: dict[str, Drifting], effect: str) -> None:
    events: list[str] = []
    watch = memguard.on_event(lambda event: events.append(event.text))
    try:
        start(TORCH)
        drifting["torch"].allocate(MIB)
        drifting["torch"].lost = (RAISE._replace(effect=effect),)
        assert (f"{RAISED}: {effect}" if effect else RAISED) in memguard.ledger().notes
    finally:
        watch.remove()
    assert events == ["torch: its cap no longer holds: its fraction was raised"]


def test_what_a_later_call_lifts_is_told_at_the_call(
    drifting: dict[str, Drifting], caplog: pytest.LogCaptureFixture
) -> None:
    guard, events = start(TORCH), list[Event]()
    guard.callbacks.event = events.append
    torch = drifting["torch"]
    torch.allocate(MIB)
    torch.lost = (RAISE,)
    with caplog.at_level(logging.WARNING, "memguard"):
        for _ in range(3):
            torch._check_drift_now()
    assert caplog.messages == [RAISED]
    assert [event.text for event in events] == ["torch: its cap no longer holds: its fraction was raised"]
    torch.lost = ()
    torch._check_drift_now()
    assert [event.text for event in events][1:] == ["torch: its cap holds again"]
    memguard.shutdown()
    torch.lost = (RAISE,)
    torch._check_drift_now()
    assert len(events) == 2


def test_it_is_told_at_the_call_while_another_thread_has_the_lock(
    drifting: dict[str, Drifting], caplog: pytest.LogCaptureFixture
) -> None:
    guard, held, done = start(TORCH), threading.Event(), threading.Event()
    drifting["torch"].allocate(MIB)

    def hold() -> None:
        with guard.caps.lock:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    drifting["torch"].lost = (RAISE,)
    try:
        with caplog.at_level(logging.WARNING, "memguard"):
            drifting["torch"]._check_drift_now()
        assert caplog.messages == [RAISED]
    finally:
        done.set()
        thread.join()
    assert enforcements() == {"torch": "watched"}


def test_a_later_setting_that_met_the_cap_is_a_warning_a_note_and_an_event_once(
    drifting: dict[str, Drifting], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = list[Event]()
    watch = memguard.on_event(seen.append)
    try:
        start({**TORCH, "monitor": {"interval": "1h", "timeline": str(tmp_path / "run.jsonl")}})
        sentence = "torch: it asks for more than its cap: the cap holds"
        with caplog.at_level(logging.WARNING, "memguard"):
            for _ in range(3):
                drifting["torch"]._warn(sentence)
        assert caplog.messages == [sentence] and memguard.ledger().notes.count(sentence) == 1
        assert sentence in str(api.current())
        memguard.shutdown()
    finally:
        watch.remove()
    assert [event.text for event in seen if event.kind == "note"] == [sentence]
    (path,) = tmp_path.iterdir()
    notes = [event for event in memguard.load_timeline(path).events() if event.kind == "note"]
    assert [(event.framework, event.text) for event in notes] == [("torch", sentence)]


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

    def trim_partly(self, device: Device, needed: int) -> None:
        self.trimmed.append(bool(self.beside))
        super().trim_partly(device, needed)


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
        monkeypatch.setattr(contexts, "capture_safe", beside)
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


def test_captures_are_not_looked_for_without_a_trim(
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
    host = api.current().host
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
        and "memguard.trim() on the thread that runs torch" in str(caught.value)
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

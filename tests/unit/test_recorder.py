"""Recording on simulated GPUs: the trace replays to what was recorded, and recording never hurts the program."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from interruptions import Points
from waiting import until

import memguard
from memguard._base.types import Device, TraceEvent, Usage
from memguard._base.units import GIB, MIB
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory, SimulatedFramework
from memguard._guard.guard import Guard
from memguard._tools.simulate import recorder, replay, trace
from memguard._tools.simulate.recorder import since
from memguard.errors import DeviceError, NotActive, TraceError

BUDGET = {
    "version": 1,
    "device": {"limit": "24GiB", "reserve": "2GiB"},
    "frameworks": {
        "torch": {"limit": "4GiB"},
        "tensorflow": {"limit": "4GiB", "growth": True},
        "pycuda": {"limit": "2GiB"},
    },
}
NAMES = ("torch", "tensorflow", "pycuda")


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    memguard.shutdown()
    assert not [t for t in threading.enumerate() if t.name == "memguard-trace"]


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Waits for a sample of the recording that is begun from now on."""
    taken, take = [0], recorder._Sampler._sample

    def counted(sampler: Any) -> None:
        take(sampler)
        taken[0] += 1

    def wait() -> None:
        before = taken[0]
        until(lambda: taken[0] > before + 1, pause=0.0005)  # one may be under way

    monkeypatch.setattr(recorder._Sampler, "_sample", counted)
    return wait


def start(*devices: str, imported: tuple[str, ...] = NAMES) -> Guard:
    guard = memguard.init(BUDGET, simulate=devices or ("h200",))
    for name in imported:
        of(guard, name).start_importing()
    return guard


def of(guard: Guard, name: str) -> SimulatedFramework:
    framework = guard.frameworks[name]
    assert isinstance(framework, SimulatedFramework)
    return framework


def replayed(path: Path, guard: Guard) -> replay.SimulationOutcome:
    caps = {name: guard.plan.caps(name) for name in NAMES}
    return replay.simulate(trace.read(path), caps=caps, options=guard.plan.options)


def test_a_recording_replays_to_what_was_recorded(tmp_path: Path, sampled: Callable[[], object]) -> None:
    rng = random.Random(3)
    path = tmp_path / "run.jsonl"
    guard = start()
    (gpu,) = guard.host.devices()
    live: dict[str, list[int]] = {name: [] for name in NAMES}
    peaks = dict.fromkeys(NAMES, 0)
    with memguard.record_trace(path, interval=0.0005):
        for _ in range(120):
            name = rng.choice(["torch", "torch", "pycuda", "tensorflow"])
            if live[name] and rng.random() < 0.4:
                # TensorFlow says only its level: the replay takes it down from the last array on
                at = -1 if name == "tensorflow" else rng.randrange(len(live[name]))
                of(guard, name).free(live[name].pop(at))
            else:
                try:
                    live[name].append(of(guard, name).allocate(rng.randrange(1, 300 * MIB)))
                except FrameworkOutOfMemory:
                    continue
            if name == "tensorflow":
                sampled()
            peaks[name] = max(peaks[name], of(guard, name).stats(gpu).peak_held)
    outcome = replayed(path, guard)
    assert outcome.refused == 0, outcome.render()
    rows = {row.framework: row for row in outcome.frameworks}
    assert set(rows) == set(NAMES)
    for name in ("torch", "pycuda"):
        assert rows[name].peak_held == peaks[name] and rows[name].peak_in_use == of(guard, name).stats(gpu).peak_in_use
        assert rows[name].marks == 1 and rows[name].held_deviation == rows[name].in_use_deviation == 0
    tensorflow = rows["tensorflow"]
    assert tensorflow.held_deviation is None, "TensorFlow with growth does not say what it holds"
    assert tensorflow.in_use_deviation is not None and tensorflow.in_use_deviation < 0.02
    assert abs(tensorflow.peak_in_use - of(guard, "tensorflow").stats(gpu).peak_in_use) < 0.02 * 4 * GIB


def test_the_header_says_where_and_under_which_caps(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    guard = start()
    with memguard.record_trace(path):
        array = of(guard, "torch").allocate(GIB)
        of(guard, "torch").free(array)
        of(guard, "torch").allocate(3 * MIB)
    header = trace.read(path).header
    assert header.simulated is True, "nothing simulated may look recorded"
    (device,) = header.devices
    (gpu,) = guard.host.devices()
    assert (device.name, device.total, device.reserved) == (gpu.name, gpu.total, gpu.reserved)
    assert list(header.frameworks) == list(NAMES)
    assert header.frameworks["tensorflow"]["growth"] is True
    assert header.extra["caps"] == {"torch": 4 * GIB, "tensorflow": 4 * GIB, "pycuda": 2 * GIB}
    assert header.extra["most"]["torch"]["in_use"] == GIB and header.extra["most"]["torch"]["held"] == GIB
    assert "pycuda" not in header.extra["most"], "what never was live has no figures"


def test_events_are_in_order_from_the_start_of_the_block(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    guard = start()
    torch = of(guard, "torch")
    before = torch.allocate(GIB)
    time.sleep(0.002)
    with memguard.record_trace(path):
        first = torch.allocate(5 * MIB)
        torch.free(before)  # nobody who reads the trace knows it
        torch.free(first)
    torch.allocate(7)
    events = trace.read(path).events
    assert [(e.op, e.bytes) for e in events if e.op in ("alloc", "free")] == [("alloc", 5 * MIB), ("free", None)]
    assert events[-1].op == "mark" and events[-1].in_use == 0 and (events[-1].held or 0) >= GIB
    assert all(0 <= a.time <= b.time < 60 for a, b in itertools.pairwise(events))


def test_a_framework_imported_inside_the_block_is_sampled(tmp_path: Path, sampled: Callable[[], object]) -> None:
    path = tmp_path / "run.jsonl"
    guard = start(imported=())
    with memguard.record_trace(path, interval=0.0005):
        array = of(guard, "torch").allocate(GIB)
        sampled()
        of(guard, "torch").free(array)
        sampled()
        of(guard, "torch").allocate(2 * GIB)
    events = [e for e in trace.read(path).events if e.op != "mark"]
    assert {e.op for e in events} == {"in_use"}
    assert [e.in_use for e in events] == [GIB, 0, 2 * GIB]


def test_every_gpu_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    guard = start("h200", "h100")
    with memguard.record_trace(path):
        of(guard, "torch").allocate(GIB, device=1)
        of(guard, "tensorflow").allocate(GIB, device=1)
        of(guard, "pycuda").allocate(GIB, device=0)
    recorded = trace.read(path)
    where = {e.framework: e.device for e in recorded.events if e.op != "mark"}
    assert where == {"torch": 1, "tensorflow": 1, "pycuda": 0} and len(recorded.header.devices) == 2
    outcome = replayed(path, guard)
    assert {(r.framework, r.device): r.refused for r in outcome.frameworks} == {
        ("torch", 1): 0, ("tensorflow", 1): 0, ("pycuda", 0): 0,
    }  # fmt: skip


def test_what_cannot_be_recorded_is_said_before_the_block_runs(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(NotActive), memguard.record_trace(path):
        pytest.fail("the block ran")
    start()
    path.write_text("mine")
    with pytest.raises(TraceError, match="exists already"), memguard.record_trace(path):
        pytest.fail("the block ran")
    assert path.read_text() == "mine"


def test_a_folder_that_is_not_there_is_said_before_the_block(tmp_path: Path) -> None:
    start()
    ran = []
    with pytest.raises(TraceError, match="cannot be written"), memguard.record_trace(tmp_path / "no" / "run.jsonl"):
        ran.append(1)
    assert ran == []


def test_one_recording_at_a_time(tmp_path: Path) -> None:
    torch = of(start(), "torch")
    with memguard.record_trace(tmp_path / "outer.jsonl"):
        with pytest.raises(TraceError, match="recorded already"), memguard.record_trace(tmp_path / "inner.jsonl"):
            pass
        torch.allocate(GIB)
    assert [e.bytes for e in trace.read(tmp_path / "outer.jsonl").events if e.op == "alloc"] == [GIB]
    with memguard.record_trace(tmp_path / "next.jsonl"):
        pass


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")  # of a file
def test_after_an_interruption_another_recording_begins(tmp_path: Path) -> None:
    """Ctrl-C at every point of the block's beginning and end, one after the other. The error is let go each time."""
    guard = start()
    for one in (guard.host, *guard.frameworks.values()):  # an interrupted `with` may keep a lock from the sampler
        vars(one)["_lock"] = contextlib.nullcontext()
    numbers = itertools.count()

    def record() -> None:
        with memguard.record_trace(tmp_path / f"{next(numbers)}.jsonl", interval=0.5):
            of(guard, "torch").free(of(guard, "torch").allocate(2 * MIB))

    def attempt(points: Points) -> bool:
        try:
            points.run(record)
        except KeyboardInterrupt:
            return True
        return False

    counted = Points()
    attempt(counted)
    failures = []
    tried = range(1, counted.count + 1, int(os.environ.get("MEMGUARD_TEST_STRIDE", "17")))
    for at in tried:
        points = Points(at)
        attempt(points)
        if sys.exc_info()[1] is not None:  # every later error of this thread would have it as its `__context__`
            failures.append(f"{points.place}: {sys.exc_info()[1]!r} is still being handled")
            break
        try:
            with memguard.record_trace(tmp_path / f"after-{at}.jsonl"):
                assert [one.name for one in threading.enumerate()].count("memguard-trace") == 1
            assert trace.read(tmp_path / f"after-{at}.jsonl").header is not None
        except (TraceError, AssertionError) as error:
            failures.append(f"{points.place}: {error}")
    print(f"{len(tried)} of {counted.count} points tried")
    assert failures == []


def test_a_forked_child_that_leaves_the_block_writes_nothing(tmp_path: Path) -> None:
    torch = of(start(), "torch")
    path = tmp_path / "run.jsonl"
    child = 0
    with memguard.record_trace(path):
        torch.allocate(GIB)
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert [e.bytes for e in trace.read(path).events if e.op == "alloc"] == [GIB]


def test_a_block_that_raises_is_recorded_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    guard = start()
    with pytest.raises(FrameworkOutOfMemory), memguard.record_trace(path):
        of(guard, "torch").allocate(GIB)
        of(guard, "torch").allocate(5 * GIB)
    assert [e.bytes for e in trace.read(path).events if e.op == "alloc"] == [GIB]


@pytest.mark.parametrize("trouble", ["folder", "shutdown"])
def test_the_users_error_comes_first(tmp_path: Path, trouble: str) -> None:
    guard = start()
    torch = of(guard, "torch")
    path = tmp_path / "a" / "run.jsonl"
    path.parent.mkdir()
    with pytest.raises(ZeroDivisionError), memguard.record_trace(path):
        torch.allocate(GIB)
        if trouble == "folder":
            path.parent.rmdir()
        if trouble == "shutdown":
            memguard.shutdown()
        _ = 1 / 0


def test_a_budget_that_is_shut_down_in_the_block_is_recorded_until_then(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    torch = of(start(), "torch")
    with memguard.record_trace(path):
        torch.allocate(GIB)
        memguard.shutdown()
    assert [e.bytes for e in trace.read(path).events if e.op == "alloc"] == [GIB]


def test_a_clock_that_is_set_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Back or ahead, by less than a millisecond to years, at any moments, also within a recording's first events."""
    guard, real, offset = start(), time.time, [0.0]
    torch, pycuda = of(guard, "torch"), of(guard, "pycuda")
    monkeypatch.setattr(time, "time", lambda: real() + offset[0])
    for seed in range(60):
        rng = random.Random(seed)
        path, sizes, began = tmp_path / f"{seed}.jsonl", [], time.monotonic()
        with memguard.record_trace(path, interval=0.001):
            for _ in range(40):
                if rng.random() < 0.2:
                    offset[0] += rng.choice([-1, 1]) * rng.choice([0.0004, 0.3, 5, 3600, 4e8])
                sizes.append(rng.randrange(1, 100) * MIB)
                one = rng.choice([torch, pycuda])
                one.free(one.allocate(sizes[-1]))
        took = time.monotonic() - began
        found = trace.read(path)
        assert sorted(e.bytes or 0 for e in found.events if e.op == "alloc") == sorted(sizes)
        assert sum(e.op == "free" for e in found.events) == 40
        assert all(0 <= e.time <= took + 0.001 for e in found.events)
        offset[0] = 0.0


def test_times_of_the_day_become_seconds_since_the_beginning() -> None:
    events = [trace_event(time) for time in (100.0, 100.5, 97.0, 97.25)]  # set back by 4 s after 101
    assert [e.time for e in since(events, 100.0, 96.0, 2.0)] == [0.0, 0.5, 1.0, 1.25]
    events = [trace_event(time) for time in (100.0, 100.5, 105.0, 105.25)]  # set ahead
    assert [e.time for e in since(events, 100.0, 104.0, 2.0)] == [0.0, 0.5, 1.0, 1.25]
    events = [trace_event(time) for time in (100.0, 1.0, 1e9, 103.0)]  # and by anything in between
    assert [e.time for e in since(events, 100.0, 100.0, 2.0)] == [0.0, 0.0, 2.0, 2.0]


def trace_event(time: float) -> TraceEvent:
    return TraceEvent(time, "torch", "trim")


def test_a_reading_that_fails_does_not_break_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.jsonl"
    guard = start()
    usage = SimulatedFramework.usage
    failing = [True]

    def sometimes(self: Any, device: Device) -> Usage | None:
        if failing[0] and self.name == "pycuda":
            raise DeviceError("NVML: GPU is lost")
        return usage(self, device)

    monkeypatch.setattr(SimulatedFramework, "usage", sometimes)
    with memguard.record_trace(path, interval=0.0005):
        of(guard, "torch").allocate(GIB)
        time.sleep(0.01)
    assert [e.bytes for e in trace.read(path).events if e.op == "alloc"] == [GIB]

"""What a timeline has beside samples: allocators' peaks, workloads, refusals, and what came since the last sample."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

import memguard
from memguard import api
from memguard._base import life
from memguard._base.types import Event, RefusedRequest
from memguard._base.units import GIB, MIB
from memguard._devices import suspension
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._oom.refusal import RefusalEvents
from memguard._runtime.timeline_extras import MOST, OTHERS, PEAK, PEAKS_EVERY, Peaks, Spans, Timeline, _Row

HOME = Path(memguard.__file__).parents[1]
BUDGET: dict[str, Any] = {"version": 1, "frameworks": {"torch": {"limit": "10GiB"}, "cupy": {"limit": "4GiB"}}}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    memguard.shutdown()
    assert not life.main_thread_ends


def begin(folder: Path, interval: str = "1h") -> SimulatedFramework:
    """A run whose monitor takes one sample, at its start."""
    monitor = {"interval": interval, "timeline": str(folder / "run.jsonl")}
    guard = memguard.init({**BUDGET, "monitor": monitor}, simulate="h200")
    torch = guard.frameworks["torch"]
    assert isinstance(torch, SimulatedFramework)
    running = api.current_session().monitor
    assert running is not None
    until(lambda: running.last(60))
    assert running.wait_for_sample(5)
    return torch


def held(folder: Path) -> list[int | None]:
    """What torch held, by sample."""
    (path,) = folder.glob("run-*.jsonl")
    found = [sample.devices[0].frameworks.get("torch") for sample in memguard.load_timeline(path).samples()]
    return [None if usage is None else usage.held for usage in found]


def peaks(folder: Path) -> list[tuple[str | None, int | None]]:
    (path,) = folder.glob("run-*.jsonl")
    return [(e.framework, e.bytes) for e in memguard.load_timeline(path).events() if e.kind == PEAK]


def test_the_last_allocation_is_in_the_timeline(tmp_path: Path) -> None:
    begin(tmp_path).allocate(3 * GIB)
    memguard.shutdown()
    assert held(tmp_path)[-1] == 3 * GIB and len(held(tmp_path)) == 2


def test_a_peak_that_no_sample_saw_is_there(tmp_path: Path) -> None:
    torch = begin(tmp_path)
    torch.free(torch.allocate(3 * GIB))
    memguard.shutdown()
    assert peaks(tmp_path) == [("torch", 3 * GIB)], "CuPy's allocator does not say its own"


def test_a_peak_that_has_grown_by_little_is_there_at_the_end(tmp_path: Path) -> None:
    torch = begin(tmp_path)
    torch.free(torch.allocate(3 * GIB))
    life._main_thread_end()
    torch.free(torch.allocate(3 * GIB + 2 * MIB))
    memguard.shutdown()
    assert peaks(tmp_path) == [("torch", 3 * GIB), ("torch", 3 * GIB + 2 * MIB)]


def test_the_monitor_writes_peaks_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peaks.__init__, "__defaults__", (0.0, Peaks.__init__.__defaults__[1]))  # type: ignore[index]
    torch = begin(tmp_path, "50ms")
    for size in (GIB, 2 * GIB):
        torch.free(torch.allocate(size))
        until(lambda: ("torch", size) in peaks(tmp_path))  # noqa: B023
    memguard.shutdown()
    assert peaks(tmp_path) == [("torch", GIB), ("torch", 2 * GIB)], "none is there twice"


def test_a_peak_is_written_if_it_has_grown_and_at_last_in_any_case() -> None:
    now = [0.0]
    watch = Peaks(clock=lambda: now[0])
    assert watch.due() and not watch.due()
    now[0] += PEAKS_EVERY
    assert watch.due()

    def said(size: int, last: bool = False) -> list[int | None]:
        return [event.bytes for event in watch.events(5.0, {"GPU-0": {"torch": size}}, last=last)]

    assert said(100 * MIB) == [100 * MIB]
    assert said(100 * MIB + MIB // 2) == [] and said(99 * MIB) == []
    assert said(100 * MIB + MIB // 2, last=True) == [100 * MIB + MIB // 2]
    assert said(100 * MIB + MIB // 2, last=True) == []
    assert said(0) == [], "0 is no peak"


def test_no_sample_is_taken_where_the_monitors_own_hangs(tmp_path: Path) -> None:
    torch = begin(tmp_path)
    torch.allocate(GIB)
    running = api.current_session().monitor
    assert running is not None
    running._ticking, thread = True, running._thread
    running._thread = threading_stand_in()
    try:
        life._main_thread_end()
    finally:
        running._ticking, running._thread = False, thread
    assert len(held(tmp_path)) == 1
    memguard.shutdown()
    assert len(held(tmp_path)) == 2


def threading_stand_in() -> Any:
    """A thread that lives."""

    class Alive:
        def is_alive(self) -> bool:
            return True

    return Alive()


def test_nothing_is_asked_while_the_process_is_off_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path)
    asked: list[object] = []
    memory = SimulatedHost.memory
    with monkeypatch.context() as patched:
        patched.setattr(SimulatedHost, "memory", lambda *args: asked.append(args) or memory(*args))
        patched.setattr(suspension, "now", suspension.Off({}, 0.0))
        life._main_thread_end()
        assert not asked and len(held(tmp_path)) == 1
        patched.setattr(suspension, "now", None)
        life._main_thread_end()
        assert asked and len(held(tmp_path)) == 2


def test_a_forked_child_writes_nothing_at_its_end(tmp_path: Path) -> None:
    begin(tmp_path).allocate(GIB)
    running = api.current_session()
    beside = next(one.extras for one in running.extensions if isinstance(one, Timeline))
    assert beside is not None
    beside._spans._rows["step", "torch"] = _Row(0.0)
    beside._spans._lock = held_lock()  # by a thread that the child does not have
    pid = os.fork()
    if pid == 0:
        status = 1
        signal.alarm(20)
        try:
            life._main_thread_end()
            beside.at_exit()
            running._at_exit()
            status = 0 if running.guard.last_sample() is None else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    beside._spans._lock = threading.RLock()  # type: ignore[misc]
    assert os.waitstatus_to_exitcode(status) == 0 and held(tmp_path) == [None]


def held_lock() -> Any:
    lock = threading.Lock()
    lock.acquire()
    return lock


def test_a_reading_that_fails_at_the_end_fails_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path)

    def lost(*_: object) -> None:
        raise memguard.DeviceError("the GPU is lost")

    with monkeypatch.context() as patched:
        patched.setattr(SimulatedHost, "memory", lost)
        life._main_thread_end()
        memguard.shutdown()
    assert len(held(tmp_path)) == 1


def program(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MEMGUARD_")}
    environ["PYTHONPATH"] = str(HOME)
    start = """
        import atexit, sys, threading, time
        import memguard
        budget = {"version": 1, "frameworks": {"torch": {"limit": "10GiB"}},
                  "monitor": {"interval": "1h", "timeline": "run.jsonl"}}
        guard = memguard.init(budget, simulate="h200")
        torch = guard.frameworks["torch"]
        from memguard import api
        while not api.current_session().monitor.last(1):
            time.sleep(0.01)  # the monitor's only sample
    """
    text = textwrap.dedent(start) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", text], cwd=folder, env=environ, capture_output=True, text=True, timeout=60
    )


ENDINGS = {
    "the last line": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "an error": ("raise KeyError('x')", 1),
    "an exit function of a framework": ("atexit.register(lambda: torch.free(kept))", 0),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_a_program_that_ends_without_shutdown(how: str, tmp_path: Path) -> None:
    code, status = ENDINGS[how]
    done = program(f"kept = torch.allocate(3 << 30)\n{code}", tmp_path)
    assert done.returncode == status, done.stderr
    assert 3 * GIB in held(tmp_path) and peaks(tmp_path) == [("torch", 3 * GIB)]


def test_a_process_of_multiprocessing_runs_no_exit_functions_and_has_it_too(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(
        "import memguard, time\n"
        "def work():\n"
        "    budget = {'version': 1, 'frameworks': {'torch': {'limit': '10GiB'}},\n"
        "              'monitor': {'interval': '1h', 'timeline': 'run.jsonl'}}\n"
        "    guard = memguard.init(budget, simulate='h200')\n"
        "    from memguard import api\n"
        "    while not api.current_session().monitor.last(1):\n"
        "        time.sleep(0.01)\n"
        "    guard.frameworks['torch'].allocate(3 << 30)\n"
        "if __name__ == '__main__':\n"
        "    import multiprocessing\n"
        "    one = multiprocessing.get_context('spawn').Process(target=work)\n"
        "    one.start(); one.join(); raise SystemExit(one.exitcode)\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(HOME)}
    done = subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert held(tmp_path)[-1] == 3 * GIB


def test_frameworks_are_not_asked_again_by_an_exit_function(tmp_path: Path) -> None:
    torch = begin(tmp_path)
    running = api.current_session()
    running._at_exit()
    assert len(held(tmp_path)) == 2, "where nothing was asked before, as in a Python without that"
    torch.allocate(GIB)
    life._main_thread_end()
    running._at_exit()
    assert held(tmp_path) == [None, None, GIB]


def test_what_is_called_at_the_end_does_not_stop_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def fails() -> None:
        raise ValueError("gone")

    def works() -> None:
        seen.append("works")

    for call in (fails, works):
        life.at_main_thread_end(call)
    try:
        life._main_thread_end()
    finally:
        for call in (fails, works):
            life.not_at_main_thread_end(call)
    assert seen == ["works"]


def test_replay_and_suggest_count_the_last_allocation(tmp_path: Path) -> None:
    from fractions import Fraction

    from memguard._tools.suggest import decide, recorded

    torch = begin(tmp_path)
    torch.free(torch.allocate(5 * GIB))  # in no sample
    torch.allocate(3 * GIB)  # in the last one
    memguard.shutdown()
    (path,) = tmp_path.glob("run-*.jsonl")
    (run,) = recorded.runs([str(path)])
    (need,) = run.needs.values()
    assert need.sampled >= 3 * GIB and need.peak == 5 * GIB
    found = decide.suggest([run], Fraction(0))
    assert found is not None and [figure.limit for figure in found.figures] == [5 * GIB]


def test_an_event_of_a_peak_reads_as_one(tmp_path: Path) -> None:
    begin(tmp_path).allocate(3 * GIB)
    memguard.shutdown()
    (path,) = tmp_path.glob("run-*.jsonl")
    (found,) = [event for event in memguard.load_timeline(path).events() if event.kind == PEAK]
    assert isinstance(found, Event) and str(found) == "peak: torch: at most 3.00 GiB in use so far"


# workloads


def workloads(folder: Path) -> list[tuple[str, str | None, float | None, int | None]]:
    (path,) = folder.glob("run-*.jsonl")
    found = [event for event in memguard.load_timeline(path).events() if event.kind == "workload"]
    return [(event.text, event.framework, event.seconds, event.times) for event in found]


def test_workloads_are_events_of_the_timeline(tmp_path: Path) -> None:
    torch = begin(tmp_path)
    for _ in range(3):
        with memguard.workload("step", framework="torch"):
            torch.free(torch.allocate(GIB))
    with pytest.raises(KeyError), memguard.workload("check", framework="cupy"):
        raise KeyError("x")
    memguard.shutdown()
    assert [(name, who, times) for name, who, _, times in workloads(tmp_path)] == [
        ("check: ended with KeyError", "cupy", None),
        ("step", "torch", 3),
    ]
    assert all(0 <= (seconds or -1) < 5 for _, _, seconds, _ in workloads(tmp_path))


def test_short_workloads_in_a_row_are_one_event_and_long_ones_each() -> None:
    now = [100.0]
    spans = Spans(lambda: now[0])
    report = memguard.types.WorkloadReport("step", "torch", peak=GIB)
    assert spans.ended(report, 2.0, None) == [
        Event(100.0, "workload", "step", framework="torch", seconds=2.0, bytes=GIB)
    ]
    assert spans.due(everything=True) == []
    found = []
    for at in range(25):
        now[0] = 200.0 + at * 0.1
        found += spans.ended(memguard.types.WorkloadReport("step", "torch", peak=at or None), 0.05, None)
        found += spans.ended(memguard.types.WorkloadReport("other", "jax"), 0.01, None)
    found += spans.due(everything=True)
    of_step = [event for event in found if event.text == "step"]
    assert sum(event.times or 1 for event in of_step) == 25 and 2 < len(of_step) < 5, "about one each second"
    assert [event.bytes for event in of_step][-1] == 24 and of_step[0].time - (of_step[0].seconds or 0) == 199.95
    assert sum(event.times or 1 for event in found if event.text == "other") == 25


def test_numbered_workloads_are_few_events_and_none_is_lost() -> None:
    now = [100.0]
    spans = Spans(lambda: now[0])
    found = []
    for at in range(3000):
        now[0] += 0.001
        found += spans.ended(memguard.types.WorkloadReport(f"step {at}", "torch"), 0.001, None)
    found += spans.due(everything=True)
    assert sum(event.times or 1 for event in found) == 3000 and len(found) < 4 * (MOST + 2)
    assert {event.text for event in found} >= {"step 0", OTHERS}
    assert not spans._rows and spans.due() == []


def test_an_error_ends_the_row_before_it() -> None:
    spans = Spans(lambda: 50.0)
    report = memguard.types.WorkloadReport("step", "torch")
    assert spans.ended(report, 0.1, None) == []
    assert [event.text for event in spans.ended(report, 0.1, "ValueError")] == ["step", "step: ended with ValueError"]


def test_workloads_at_work_are_in_the_timeline_while_it_is_written(tmp_path: Path) -> None:
    begin(tmp_path, "50ms")
    with memguard.workload("load", framework="torch"):
        pass
    until(lambda: workloads(tmp_path))
    assert [name for name, *_ in workloads(tmp_path)] == ["load"]


# refusals


def test_a_refused_request_has_the_figures_of_its_moment(tmp_path: Path) -> None:
    torch = begin(tmp_path)
    torch.allocate(9 * GIB)
    with pytest.raises(Exception, match="out of memory"):
        torch.allocate(3 * GIB)
    memguard.shutdown()
    (path,) = tmp_path.glob("run-*.jsonl")
    (event,) = [event for event in memguard.load_timeline(path).events() if event.kind == "refused"]
    assert (event.bytes, event.times) == (3 * GIB, 1)
    assert (event.held, event.in_use, event.cap) == (9 * GIB, 9 * GIB, 10 * GIB)
    assert event.free is not None and event.free > 100 * GIB and event.reclaimable == 0


def test_what_is_not_known_of_a_refusal_stays_unknown() -> None:
    (event,) = RefusalEvents().refused(RefusedRequest("torch", "observer", 5.0, "GPU-0", 7))
    assert (event.held, event.in_use, event.reclaimable, event.cap, event.free) == (None,) * 5
    assert event.bytes == 7

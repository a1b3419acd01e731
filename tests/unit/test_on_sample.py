"""memguard.on_sample and on_event: each sample and event, given to a function of the program."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import waiting

import memguard
from memguard import api
from memguard._base.types import DeviceSample, Sample
from memguard._base.units import GIB
from memguard._devices import suspension
from memguard._runtime import callbacks, session

BUDGET: dict[str, Any] = {"version": 1, "frameworks": {"torch": {"limit": "4GiB"}}}
WATCHED = {**BUDGET, "monitor": {"interval": "50ms"}}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    memguard.shutdown()
    session.sample_callbacks.clear()
    session.event_callbacks.clear()


until = functools.partial(waiting.until, seconds=60.0)


def another_sample(monitor: Any) -> None:
    """One that is begun from now on has been given."""
    taken = len(monitor._ring)
    until(lambda: len(monitor._ring) > taken + 2)


def of(free: int | None = 1) -> Sample:
    """A sample of one GPU; None for a reading that failed."""
    parts = () if free is None else (DeviceSample("GPU-0", 9, 8, free, None, None, 0, None, {}),)
    return Sample(0.0, parts)


def test_each_sample_is_given_on_the_monitors_thread_until_it_is_removed() -> None:
    seen: list[Sample] = []
    threads: set[str] = set()
    with memguard.guard(WATCHED, simulate="h200") as guard:
        torch: Any = guard.frameworks["torch"]
        torch.allocate(GIB)
        watch = memguard.on_sample(lambda sample: (seen.append(sample), threads.add(threading.current_thread().name)))
        until(lambda: len(seen) > 2)
        monitor = api.current_session().monitor
        assert monitor is not None and {id(one) for one in seen[:2]} <= {id(one) for one in monitor.last(60)}, "as read"
        watch.remove()
        watch.remove()
        another_sample(monitor)  # one may be under way
        count = len(seen)
        another_sample(monitor)
        assert len(seen) == count
    assert threads == {"memguard-monitor"}
    assert seen[-1].devices[0].frameworks["torch"].in_use == GIB
    assert session.sample_callbacks == []


@pytest.mark.parametrize(
    ("register", "registered"),
    [(memguard.on_sample, session.sample_callbacks), (memguard.on_event, session.event_callbacks)],
)
def test_what_is_returned_is_a_block_too(register: Any, registered: list[callbacks.Watch]) -> None:
    with register(print) as watch:
        assert type(watch) is callbacks.Watch and registered == [watch]
        again = register(print)
        assert registered == [watch, again], "registered twice, given twice"
    assert registered == [again]
    watch.remove()
    assert registered == [again], "each takes back its own registration, once"
    again.remove()
    assert registered == []
    with pytest.raises(TypeError, match=rf"memguard.{register.__name__} takes a function"):
        register(3)


def test_it_outlives_a_budget_and_is_called_under_the_next() -> None:
    seen: list[Sample] = []
    memguard.on_sample(seen.append)  # before there is a budget
    for _ in range(2):
        seen.clear()
        with memguard.guard(WATCHED, simulate="h200"):
            until(lambda: seen)
    time.sleep(0.05)
    seen.clear()
    time.sleep(0.15)
    assert seen == [], "none without a budget"


def test_a_function_that_fails_is_logged_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Sample] = []
    calls: list[None] = []

    def broken(sample: Sample) -> None:
        calls.append(None)
        raise SystemExit("no disk") if len(calls) % 2 else ValueError("no disk")

    memguard.on_sample(broken)
    memguard.on_sample(seen.append)
    with caplog.at_level(logging.WARNING, "memguard"), memguard.guard(WATCHED, simulate="h200"):
        until(lambda: len(calls) > 3 and len(seen) > 3)
        monitor = api.current_session().monitor
        assert monitor is not None and monitor.alive
    said = [record.getMessage() for record in caplog.records if "on_sample" in record.getMessage()]
    assert len(said) == 1 and "broken" in said[0] and __file__ in said[0] and "no disk" in said[0]
    assert not caplog.records[0].exc_info, "a traceback would keep arrays alive"


def test_a_function_may_end_the_budget_and_no_other_is_called_then() -> None:
    seen: list[Sample] = []
    ended = threading.Event()

    def end(sample: Sample) -> None:
        memguard.shutdown()
        ended.set()

    memguard.on_sample(end)
    memguard.on_sample(seen.append)
    guard = memguard.init(WATCHED, simulate="h200")
    assert ended.wait(60)
    until(lambda: not guard.active)
    time.sleep(0.05)
    assert seen == []


def test_nothing_while_suspended_and_nothing_of_a_reading_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sample] = []

    def suspend(sample: Sample) -> None:
        monkeypatch.setattr(suspension, "now", suspension.Off({}, 0.0))

    memguard.on_sample(seen.append)
    memguard.init(WATCHED, simulate="h200")
    running = api.current_session()
    assert running.monitor is not None
    running.monitor.stop()
    seen.clear()
    running._record(of(None), [])
    assert seen == []
    running._record(of(), [])
    assert seen == [of()]
    # What comes after it in the same turn, too.
    session.sample_callbacks.insert(0, callbacks.Watch(suspend, session.sample_callbacks))
    running._record(of(2), [])
    running._record(of(3), [])
    assert seen == [of()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_gives_no_samples() -> None:
    seen: list[Sample] = []
    memguard.on_sample(seen.append)
    memguard.init(WATCHED, simulate="h200")
    until(lambda: seen)
    pid = os.fork()
    if pid == 0:
        seen.clear()
        memguard.init(WATCHED, simulate="h200")
        time.sleep(0.2)
        os._exit(len(session.sample_callbacks) + len(seen))
    assert os.waitpid(pid, 0)[1] == 0
    seen.clear()
    until(lambda: seen)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_function_that_forks_calls_no_other_in_the_child() -> None:
    code = (
        "import os, sys, time, memguard\n"
        "from memguard._runtime import callbacks, session\n"
        "parent = os.getpid()\n"
        "memguard.on_sample(lambda sample: os.fork())\n"
        "memguard.on_sample(lambda sample: print('child' if os.getpid() != parent else 'parent'))\n"
        "callbacks.give(session.sample_callbacks, None, lambda: True)\n"
        "if os.getpid() == parent: os.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "parent\n"), done.stderr


def test_a_budget_without_a_monitor_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "memguard"):
        with memguard.guard(BUDGET, simulate="h200"):
            memguard.on_sample(print)
        assert [record.getMessage() for record in caplog.records] == [session.WITHOUT_MONITOR]
        caplog.clear()
        with memguard.guard(BUDGET, simulate="h200"):  # registered before it
            pass
        assert [record.getMessage() for record in caplog.records] == [session.WITHOUT_MONITOR]


def test_without_one_nothing_is_loaded_and_nothing_is_called() -> None:
    code = (
        "import sys, time, memguard\n"
        f"memguard.init({WATCHED!r}, simulate='h200'); time.sleep(0.2); memguard.shutdown()\n"
        "assert 'memguard._runtime.callbacks' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

"""The monitor's thread, most of it without a thread: a clock to which each step adds its time."""

from __future__ import annotations

import functools
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest
import waiting

from memguard._base.types import DeviceSample, Event, FrameworkSample, Pressure, Sample
from memguard._base.units import GIB
from memguard._runtime import sampler as module
from memguard._runtime.pressure import Action, Settings
from memguard._runtime.sampler import KEPT, SLOWEST_RETRY, Monitor, SystemClock

UUID = "GPU-1"


class FakeClock:
    """Ends the run after so many ticks. What a sample costs, the test adds to `spent`."""

    def __init__(self, ticks: int = 10) -> None:
        self.now, self.spent, self.ticks = 1_700_000_000.0, 0.0, ticks
        self.waits: list[float] = []

    def time(self) -> float:
        return self.now

    def cpu(self) -> float:
        return self.spent

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        return stop.is_set() or len(self.waits) >= self.ticks


class World:
    """A monitor on one GPU, what it reads and what came of it."""

    def __init__(self, ticks: int = 10, settings: Settings | None = None) -> None:
        self.clock = FakeClock(ticks)
        self.level, self.cost, self.fails = 0.5, 0.0, 0
        self.each: Callable[[int], None] = lambda tick: None
        self.taken = 0
        self.actions: list[Action] = []
        self.recorded: list[tuple[Sample, list[Event]]] = []
        self.monitor = Monitor(
            self.take, self.actions.append, settings or Settings(), record=self.record, clock=self.clock
        )

    def take(self) -> Sample:
        self.taken += 1
        self.clock.spent += self.cost
        self.each(self.taken)
        if self.fails:
            self.fails -= 1
            raise RuntimeError("GPU is lost")
        held = int(self.level * 40 * GIB)
        usage = FrameworkSample(held, held, 0, 40 * GIB)
        device = DeviceSample(UUID, 140 * GIB, held, 140 * GIB - held, held, 80 * GIB, 0, 0, {"torch": usage})
        return Sample(self.clock.now, (device,))

    def record(self, sample: Sample, events: list[Event]) -> None:
        self.recorded.append((sample, list(events)))

    def run(self) -> World:
        """All ticks, on this thread."""
        self.monitor._run(threading.Event(), os.getpid())
        return self

    def said(self, *kinds: str) -> list[str]:
        return [action.event.text for action in self.actions if action.kind in kinds]


def test_it_samples_at_the_declared_interval_and_records_every_sample() -> None:
    world = World(ticks=5, settings=Settings(interval=0.25)).run()
    assert world.clock.waits == [0.25] * 5
    assert [len(events) for _, events in world.recorded] == [0] * 5
    assert world.monitor.interval == 0.25
    assert world.monitor.last(1e9) == [sample for sample, _ in world.recorded]
    assert not world.actions


def test_what_is_decided_is_done_and_recorded() -> None:
    world = World(ticks=4)

    def each(tick: int) -> None:
        world.level = 0.9 if tick == 3 else 0.5

    world.each = each
    world.run()
    assert [(a.kind, a.event.level) for a in world.actions] == [
        ("warn", Pressure.WARN), ("callback", Pressure.WARN), ("log", Pressure.OK), ("callback", Pressure.OK),
    ]  # fmt: skip
    assert [[event.level for event in events] for _, events in world.recorded] == [
        [], [], [Pressure.WARN], [Pressure.OK],
    ]  # fmt: skip


def test_the_last_samples_are_kept_and_no_more() -> None:
    world = World(ticks=KEPT + 50).run()
    assert len(world.monitor.last(1e9)) == KEPT
    last = world.monitor.last(5.0)
    assert [sample.time for sample in last] == [world.recorded[-1][0].time - 0.5 * n for n in range(10, -1, -1)]
    assert World().monitor.last(5.0) == []


# Its share of CPU


@pytest.mark.parametrize("cost", [0.0001, 0.004, 0.02, 0.5])
@pytest.mark.parametrize("interval", [0.05, 0.5])
def test_it_slows_down_rather_than_exceed_its_share(cost: float, interval: float) -> None:
    world = World(ticks=2000, settings=Settings(interval=interval, cpu=0.01))
    world.cost = cost
    world.run()
    elapsed = sum(world.clock.waits)
    assert world.clock.spent <= 0.01 * elapsed * 1.001
    assert world.monitor.interval == pytest.approx(max(interval, cost / 0.01))


def test_one_expensive_sample_does_not_slow_the_others() -> None:
    """The first one imports."""
    world = World(ticks=100)

    def each(tick: int) -> None:
        world.cost = 0.0001
        world.clock.spent += 0.08 if tick == 50 else 0

    world.each = each
    world.run()
    assert set(world.clock.waits) == {0.5}


def test_what_it_saved_in_an_hour_it_may_not_spend_at_once() -> None:
    world = World(ticks=7300)

    def each(tick: int) -> None:
        world.cost = 0.0001 if tick < 7200 else 0.05

    world.each = each
    world.run()
    assert set(world.clock.waits[:7200]) == {0.5}
    assert sum(world.clock.waits[7200:7220]) > 20 * 0.05 / 0.01 - 15


# Failing samples


def test_a_failing_sample_is_logged_once_retried_less_often_and_logged_once_when_it_works_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(ticks=30)

    def each(tick: int) -> None:
        world.fails = int(5 <= tick < 20)

    world.each = each
    world.run()
    assert world.said("warn") == ["the GPUs cannot be read, trying again later: RuntimeError: GPU is lost"]
    assert world.said("log") == ["the GPUs can be read again"]
    assert [action.event.kind for action in world.actions] == ["probe"] * 4
    assert [action.kind for action in world.actions] == ["warn", "callback", "log", "callback"]
    assert world.clock.waits[:4] == [0.5] * 4
    assert world.clock.waits[4:11] == [1, 2, 4, 8, 16, SLOWEST_RETRY, SLOWEST_RETRY]
    assert world.clock.waits[19:] == [0.5] * 11
    failed, back = (entry for entry in world.recorded if entry[1])
    assert failed[0].devices == () and failed[1][0].text.startswith("the GPUs cannot")
    assert back[0].devices and back[1][0].text == "the GPUs can be read again"
    assert len(world.recorded) == 16  # fifteen good ones, and the first that failed
    assert len(world.monitor.last(1e9)) == 15
    assert not caplog.records


def test_retries_are_never_more_often_than_samples() -> None:
    world = World(ticks=40, settings=Settings(interval=600.0))
    world.fails = 1000
    assert set(world.run().clock.waits) == {600.0}
    world = World(ticks=2000)
    world.fails = 10_000
    assert max(world.run().clock.waits) == SLOWEST_RETRY


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError, ValueError])
def test_nothing_that_a_sample_raises_ends_it(error: type[BaseException]) -> None:
    world = World(ticks=3)

    def each(tick: int) -> None:
        if tick == 2:
            raise error

    world.each = each
    world.run()
    assert world.taken == 3
    assert world.said("warn") == [f"the GPUs cannot be read, trying again later: {error.__name__}"]


# Failing callbacks


@pytest.mark.parametrize("which", ["act", "record"])
def test_a_failing_callback_is_logged_once_and_stops_nothing(which: str, caplog: pytest.LogCaptureFixture) -> None:
    world = World(ticks=6)

    def fail(*args: object) -> None:
        raise SystemExit("out\nof here")

    setattr(world.monitor, f"_{which}", fail)

    def each(tick: int) -> None:
        world.level = 0.9 if tick % 2 else 0.5

    world.each = each
    world.run()
    assert world.taken == 6
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split(" (")[0] for text in said] == [
        f"the monitor could not {what}" for what in (["record"] if which == "record" else ["warn", "callback", "log"])
    ]
    assert all(text.endswith("(logged once): SystemExit: out of here") for text in said)
    assert bool(world.actions) == (which == "record")
    assert len(world.monitor.last(1e9)) == 6


def test_an_error_in_a_decision_stops_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("memguard._runtime.pressure.decide", fail)
    world = World(ticks=4).run()
    assert len(world.recorded) == 4
    assert [record.getMessage() for record in caplog.records] == [
        "the monitor could not decide (logged once): ZeroDivisionError"
    ]


class Big:
    pass


@pytest.mark.parametrize("where", ["take", "act", "record"])
def test_no_exception_and_nothing_of_its_frames_is_kept(where: str) -> None:
    gc.disable()
    try:
        refs = []

        def fail(*args: object) -> None:
            big = Big()
            refs.append(weakref.ref(big))
            raise RuntimeError(big)

        world = World(ticks=4)
        world.level = 0.99
        if where == "take":
            world.each = fail
        else:
            setattr(world.monitor, f"_{where}", fail)
        world.run()
        assert refs and not any(ref() for ref in refs)
    finally:
        gc.enable()


def test_an_error_that_cannot_be_shown() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ValueError

    world = World(ticks=1)

    def each(tick: int) -> None:
        raise Silent

    world.each = each
    assert world.run().said("warn") == ["the GPUs cannot be read, trying again later: Silent"]


# Ends


def test_nothing_follows_from_a_sample_after_the_end() -> None:
    """`stop` did not wait for a driver that hung, and the guard is gone."""
    for fails in (0, 1):
        world = World()
        stop = threading.Event()
        world.level, world.fails = 0.99, fails
        world.each = lambda tick, stop=stop: stop.set()  # type: ignore[misc]
        world.monitor._run(stop, os.getpid())
        assert world.taken == 1
        assert not world.actions and not world.recorded and not world.monitor.last(1e9)


def test_a_callback_that_stops_it_is_the_last_one() -> None:
    world = World()
    world.level = 0.99
    stop = threading.Event()

    def act(action: Action) -> None:
        world.actions.append(action)
        stop.set()

    world.monitor._act = act
    world.monitor._run(stop, os.getpid())
    assert [action.kind for action in world.actions] == ["warn"]


def test_in_a_forked_child_nothing_runs() -> None:
    """Also where a callback forks: the child is on a copy of the monitor's thread."""
    world = World()
    world.level = 0.99
    world.monitor._run(threading.Event(), os.getpid() + 1)
    assert world.taken == 1 and not world.actions and not world.recorded and not world.clock.waits
    world = World(ticks=3).run()
    world.monitor.forked()
    assert not world.monitor.alive
    assert world.monitor.last(10) == []
    world.monitor.stop()


# With a thread


until = functools.partial(waiting.until, seconds=20.0, pause=0.002)


@pytest.fixture
def running() -> Iterator[Callable[..., Monitor]]:
    started: list[Monitor] = []

    def make(take: Callable[[], Sample], act: Callable[[Action], None] = lambda action: None) -> Monitor:
        started.append(Monitor(take, act, Settings(interval=0.005, cpu=1.0)))
        started[-1].start()
        return started[-1]

    yield make
    for monitor in started:
        monitor.stop()


def empty() -> Sample:
    return Sample(time.time(), ())


def test_a_daemon_thread_that_starts_stops_and_starts_again(running: Callable[..., Monitor]) -> None:
    monitor = running(empty)
    thread = monitor._thread
    assert thread is not None and thread.daemon and thread.name == "memguard-monitor" and monitor.alive
    until(lambda: len(monitor.last(60)) > 3)
    monitor.start()
    assert monitor._thread is thread
    monitor.stop()
    assert not thread.is_alive() and not monitor.alive
    monitor.stop()
    monitor.start()
    assert monitor.alive and monitor._thread is not thread


def test_it_can_be_stopped_from_its_own_thread(
    running: Callable[..., Monitor], caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[Monitor] = []

    def act(action: Action) -> None:
        kept[0].stop()

    def take() -> Sample:
        until(lambda: bool(kept))
        raise RuntimeError

    kept.append(running(take, act))
    thread = kept[0]._thread
    assert thread is not None
    thread.join(20)
    assert not thread.is_alive() and not kept[0].alive
    assert not caplog.records


def test_a_driver_that_hangs_delays_stop_only_briefly(
    running: Callable[..., Monitor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JOIN", 0.05)
    hangs, inside = threading.Event(), threading.Event()

    def take() -> Sample:
        inside.set()
        hangs.wait(20)
        return empty()

    monitor = running(take)
    old = monitor._thread
    assert old is not None and inside.wait(20)
    monitor.stop()
    assert not monitor.alive and old.is_alive()
    monitor.start()  # a new one; the old one ends without a word
    hangs.set()
    old.join(20)
    assert not old.is_alive() and monitor.alive


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_no_thread(running: Callable[..., Monitor]) -> None:
    monitor = running(empty)
    until(lambda: len(monitor.last(60)) > 1)
    child = os.fork()
    if child == 0:
        try:
            monitor.forked()
            fine = not monitor.alive and threading.active_count() == 1 and monitor.last(60) == []
            monitor.stop()
            os._exit(0 if fine else 1)
        except BaseException:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert monitor.alive


def test_the_real_clock() -> None:
    clock = SystemClock()
    assert abs(clock.time() - time.time()) < 5
    assert clock.cpu() <= time.thread_time()
    stop = threading.Event()
    assert not clock.wait(stop, 0.0)
    stop.set()
    assert clock.wait(stop, 60.0)

"""The monitor: a daemon thread that takes samples, asks `pressure` what they mean, and has it done.

It knows no GPU and no framework: what it calls is given to it, and so is the clock. Whatever those calls raise, the
thread goes on: a sample that fails is logged once and tried again later, a callback that fails is logged once. It keeps
plain data only. Of an exception it keeps the text, as the traceback would keep the arrays of its frames alive.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.types import Event, Sample
from memguard._runtime import pressure
from memguard._runtime.pressure import Action, Settings

KEPT = 600
"""Samples that are kept: five minutes at the default interval."""
SLOWEST_RETRY = 30.0
"""Seconds between two attempts while samples fail, at most; or the interval, if that is longer."""
BURST = 10.0
"""Seconds of its CPU share that the monitor may save up for an expensive sample."""
_MOST = 60.0
"""Seconds of CPU that one sample may cost. More, or less than nothing, comes of a clock that the program replaced."""
_BEGIN = 0.2
"""Seconds that `stop` waits for a thread whose `start` was interrupted, and which may never begin."""
_LOOK = 0.005
"""Seconds between two looks of `pause` at the sample that is under way."""
JOIN = 2.0
"""Seconds that `stop` waits for a sample that hangs in the driver; the thread then ends by itself."""


class Flag:
    """As a `threading.Event`, for a signal handler too: of an Event it may find the lock taken, for ever."""

    def __init__(self) -> None:
        self._lock, self._set = threading.Lock(), False
        self._lock.acquire()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        with contextlib.suppress(RuntimeError):  # released already
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Wait at most that long until it is set. Returns whether it is. For one thread."""
        if not self._set and self._lock.acquire(timeout=max(min(seconds, threading.TIMEOUT_MAX), 0)):
            self._lock.release()
        return self._set


class Clock(Protocol):
    """Where time comes from. All in seconds."""

    def time(self) -> float:
        """The time of day, as in `Sample.time`."""

    def cpu(self) -> float:
        """The CPU time of the calling thread so far."""

    def wait(self, stop: Flag, seconds: float) -> bool:
        """Wait, but not longer than until `stop` is set. Returns whether it is."""


class SystemClock:
    """The system's clock."""

    def time(self) -> float:
        return time.time()

    def cpu(self) -> float:
        return time.thread_time()

    def wait(self, stop: Flag, seconds: float) -> bool:
        return stop.wait(seconds)


class Monitor:
    """`take` reads a sample; `act` does what `pressure.decide` decides; `record` is given each sample and its events.

    All three run on the monitor's thread. For a sample that failed `record` is given one without devices.
    """

    def __init__(
        self,
        take: Callable[[], Sample],
        act: Callable[[Action], None],
        settings: Settings,
        *,
        record: Callable[[Sample, list[Event]], None] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._take, self._act, self._record = take, act, record
        self._settings = settings
        self._clock: Clock = clock or SystemClock()
        self._state = pressure.START
        self._ring: deque[Sample] = deque(maxlen=KEPT)
        self._stop = Flag()
        self._thread: threading.Thread | None = None
        self._begun = Flag()
        self._interval = settings.interval
        self._paused = self._ticking = False
        self._failures = 0
        self._complained: set[str] = set()

    @property
    def alive(self) -> bool:
        """Whether samples are being taken."""
        thread = self._thread
        return thread is not None and thread.is_alive() and not self._stop.is_set()

    @property
    def interval(self) -> float:
        """Seconds between samples at present: longer than declared if they cost too much, or fail."""
        return self._interval

    @property
    def failing(self) -> bool:
        """Whether the GPUs could not be read the last time."""
        return self._failures > 0

    @property
    def state(self) -> pressure.PressureState:
        """What the last sample meant."""
        return self._state

    def start(self) -> None:
        """Begin, also again after `stop`. Does nothing if it runs already."""
        if self.alive:
            return
        self._stop, self._begun = Flag(), Flag()  # new: a thread that hangs must not come back
        self._thread = threading.Thread(
            target=self._run, args=(self._stop, os.getpid(), self._begun), name="memguard-monitor", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End, and wait for it at most `JOIN` seconds. Called on its own thread, by a callback, it does not wait."""
        self._stop.set()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        if thread.ident is None and not thread.is_alive():  # interrupted in `start`: if it begins, it ends at once
            self._begun.wait(_BEGIN)
        if self._begun.is_set():  # else `join` would raise
            thread.join(JOIN)

    def pause(self, seconds: float) -> bool:
        """Take no sample until `go_on`. False if the one under way has not ended within that time.

        Called on its own thread, by a callback, it does not wait.
        """
        self._paused = True
        return self.quiet(seconds)

    def quiet(self, seconds: float) -> bool:
        """Wait at most that long until no sample is under way. Returns whether that is so.

        Called on its own thread, by a callback, it does not wait.
        """
        until = time.monotonic() + seconds
        while self._ticking and self._thread is not threading.current_thread():
            if self._thread is None or not self._thread.is_alive():
                break
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK)
        return True

    def go_on(self) -> None:
        """Take samples again."""
        self._paused = False

    def forked(self) -> None:
        """In a forked child: no thread runs there."""
        self._paused = self._ticking = False
        self._stop = Flag()
        self._thread = None
        self._ring = deque(maxlen=KEPT)
        self._state = pressure.START

    def last(self, seconds: float) -> list[Sample]:
        """The samples of that time before the newest one, oldest first."""
        samples = self._ring.copy()  # one call, during which the monitor's thread cannot append
        return [sample for sample in samples if sample.time >= samples[-1].time - seconds]

    def _run(self, stop: Flag, pid: int, begun_here: Flag | None = None) -> None:
        if begun_here is not None:
            begun_here.set()
        debt = 0.0  # seconds of CPU beyond the share
        share = max(self._settings.cpu, 1e-6)
        while not stop.is_set():
            wait = self._settings.interval
            try:
                begun = self._cpu()
                self._tick_unless_paused(lambda: stop.is_set() or os.getpid() != pid)
                if os.getpid() != pid:  # a callback forked: this is the child, on a copy of this thread
                    return
                cost = self._cpu() - begun
                debt += cost if 0.0 <= cost <= _MOST else 0.0
                wait = max(self._retry() if self._failures else wait, debt / share)
                self._interval = wait
                if self._clock.wait(stop, wait):
                    return
            except BaseException as error:  # what a program puts into the place of `time` or `logging`, say
                self._complain("take a sample", error)
                if _nap(stop, wait):
                    return
            debt = max(debt - wait * share, -BURST * share)

    def _cpu(self) -> float:
        """The thread's CPU time; 0 if the clock does not tell, as in a program that has replaced `time`."""
        try:
            seconds = float(self._clock.cpu())
        except BaseException:
            return 0.0
        return seconds if math.isfinite(seconds) else 0.0

    def _retry(self) -> float:
        """Seconds until the next attempt: twice as long each time, up to a bound."""
        interval = self._settings.interval
        return min(interval * 2.0 ** min(self._failures, 30), max(SLOWEST_RETRY, interval))

    def _tick_unless_paused(self, over: Callable[[], bool]) -> None:
        self._ticking = True  # first: whoever pauses looks at it afterwards
        try:
            if not self._paused:
                self._tick(over)
        finally:
            self._ticking = False

    def _tick(self, over: Callable[[], bool]) -> None:
        """One sample, and what follows from it; nothing follows once `over` is true."""
        actions: list[Action] = []
        try:
            sample = self._take()
        except BaseException as error:  # SystemExit would end the thread without a word
            if over():
                return  # the budget ended during the sample
            sample = Sample(self._now(), ())
            self._failures += 1
            if self._failures > 1:
                return
            actions = _both("warn", sample.time, f"the GPUs cannot be read, trying again later: {text_of(error)}")
        else:
            if over():
                return
            if self._failures:
                self._failures = 0
                actions = _both("log", sample.time, "the GPUs can be read again")
            self._ring.append(sample)
            try:
                self._state, decided = pressure.decide(self._settings, sample, self._state)
                actions += decided
            except Exception as error:
                self._complain("decide", error)
        if self._record is not None:
            events = [action.event for action in actions if action.kind == "callback"]
            try:
                self._record(sample, events)
            except BaseException as error:
                self._complain("record", error)
        for action in actions:
            if over():
                return
            try:
                self._act(action)
            except BaseException as error:
                self._complain(action.kind, error)

    def _complain(self, what: str, error: BaseException) -> None:
        if what not in self._complained:
            self._complained.add(what)
            _log.warning("the monitor could not %s (logged once): %s", what, text_of(error))

    def _now(self) -> float:
        try:
            return float(self._clock.time())
        except BaseException:  # the program has replaced `time`
            return self._ring[-1].time if self._ring else 0.0


def _nap(stop: Flag, seconds: float) -> bool:
    """Wait, whatever was replaced: by a lock, which is C. Returns whether `stop` is set."""
    lock = threading.Lock()
    lock.acquire()
    while seconds > 0 and not stop.is_set():
        lock.acquire(timeout=min(seconds, 0.2))
        seconds -= 0.2
    return stop.is_set()


def _both(kind: str, when: float, text: str) -> list[Action]:
    event = Event(when, "probe", text)
    return [Action(kind, event), Action("callback", event)]

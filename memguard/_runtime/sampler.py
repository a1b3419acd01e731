"""The monitor: a daemon thread that takes samples, evaluates them with `pressure` and carries out the actions.

The module accesses no GPU and no framework. The caller passes functions that access them, and a clock. No error ends
the thread: a failed sample is logged once and retried later, a failed callback is logged once. The monitor stores the
text of an exception, never the exception, because its traceback would keep the arrays of its frames alive.
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
"""The most samples that the monitor stores: five minutes at the default interval."""
SLOWEST_RETRY = 30.0
"""The most seconds between two attempts while samples fail, unless the sampling interval is longer."""
BURST = 10.0
"""The unused CPU share of at most this many seconds is available for a later expensive sample."""
_MOST = 60.0
"""The most CPU seconds of a plausible sample. Larger or negative values, from a replaced clock, are ignored."""
_BEGIN = 0.2
"""The most seconds that `stop` waits for the thread to begin if `Monitor.start` was interrupted."""
_LOOK = 0.005
"""Seconds between two polls in `wait_for_sample`."""
JOIN = 2.0
"""The most seconds that `stop` waits for the thread to end. The thread cannot end while a driver call hangs."""


class Flag:
    """Like `threading.Event`, but safe in signal handlers, where `Event.set` could deadlock on the event's own lock."""

    def __init__(self) -> None:
        self._lock, self._set = threading.Lock(), False
        self._lock.acquire()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        with contextlib.suppress(RuntimeError):  # another call of `set` has released the lock
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds` until the flag is set. Returns True if it is set. Only one thread may wait."""
        if not self._set and self._lock.acquire(timeout=max(min(seconds, threading.TIMEOUT_MAX), 0)):
            self._lock.release()
        return self._set


class Clock(Protocol):
    """A source of time, in seconds."""

    def time(self) -> float:
        """Seconds since the epoch, as of `time.time()`."""

    def cpu(self) -> float:
        """The CPU time that the calling thread has used."""

    def wait(self, stop: Flag, seconds: float) -> bool:
        """Wait for `seconds`, or until `stop` is set. Returns True if `stop` is set."""


class SystemClock:
    """The system's clock."""

    def time(self) -> float:
        return time.time()

    def cpu(self) -> float:
        return time.thread_time()

    def wait(self, stop: Flag, seconds: float) -> bool:
        return stop.wait(seconds)


class Monitor:
    """The monitor of one budget. It calls `take` to read a sample, `record` with the sample and its events, and `act`
    with each action that `pressure.decide` returns.

    `take`, `record` and `act` are called on the monitor's thread. If `take` raises, `record` is called with a sample
    without devices.
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
        """True if the thread runs and `stop` was not called."""
        thread = self._thread
        return thread is not None and thread.is_alive() and not self._stop.is_set()

    @property
    def interval(self) -> float:
        """The current seconds between samples: more than in the budget if samples fail or use too much CPU time."""
        return self._interval

    @property
    def failing(self) -> bool:
        """True if the last attempt to take a sample failed."""
        return self._failures > 0

    @property
    def state(self) -> pressure.PressureState:
        """The pressure state after the last sample."""
        return self._state

    def start(self) -> None:
        """Start the thread, also after `stop`. Does nothing if the thread runs."""
        if self.alive:
            return
        self._stop, self._begun = Flag(), Flag()  # new flags: a hanging thread of an earlier `start` keeps its own
        self._thread = threading.Thread(
            target=self._run, args=(self._stop, os.getpid(), self._begun), name="memguard-monitor", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread, waiting for at most `JOIN` seconds. Does not wait if called on the monitor's thread."""
        self._stop.set()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        # `start` was interrupted before the thread began. If the thread begins later, it finds `_stop` set and ends.
        if thread.ident is None and not thread.is_alive():
            self._begun.wait(_BEGIN)
        if self._begun.is_set():  # `join` raises for a thread that has not begun
            thread.join(JOIN)

    def pause(self, seconds: float) -> bool:
        """Take no sample until `resume`. Returns False if the current sample takes more than `seconds` to end.

        Does not wait if a callback calls this method on the monitor's thread.
        """
        self._paused = True
        return self.wait_for_sample(seconds)

    def wait_for_sample(self, seconds: float) -> bool:
        """Wait for at most `seconds` until the current sample has ended. Returns True if it has ended.

        Does not wait if a callback calls this method on the monitor's thread.
        """
        until = time.monotonic() + seconds
        while self._ticking and self._thread is not threading.current_thread():
            if self._thread is None or not self._thread.is_alive():
                break
            if time.monotonic() >= until:
                return False
            time.sleep(_LOOK)
        return True

    def resume(self) -> None:
        """Resume sampling after `pause`."""
        self._paused = False

    def forked(self) -> None:
        """Reset in a forked child, where the monitor's thread does not exist."""
        self._paused = self._ticking = False
        self._stop = Flag()
        self._thread = None
        self._ring = deque(maxlen=KEPT)
        self._state = pressure.START

    def last(self, seconds: float) -> list[Sample]:
        """The samples of the last `seconds` before the newest one, oldest first."""
        samples = self._ring.copy()  # atomic: the monitor's thread cannot append during the copy
        return [sample for sample in samples if sample.time >= samples[-1].time - seconds]

    def _run(self, stop: Flag, pid: int, begun_here: Flag | None = None) -> None:
        if begun_here is not None:
            begun_here.set()
        debt = 0.0  # CPU seconds used in excess of the share; negative if less was used
        share = max(self._settings.cpu, 1e-6)
        while not stop.is_set():
            wait = self._settings.interval
            try:
                begun = self._cpu()
                self._tick_unless_paused(lambda: stop.is_set() or os.getpid() != pid)
                if os.getpid() != pid:  # this is a child process that a callback forked
                    return
                cost = self._cpu() - begun
                debt += cost if 0.0 <= cost <= _MOST else 0.0
                wait = max(self._retry() if self._failures else wait, debt / share)
                self._interval = wait
                if self._clock.wait(stop, wait):
                    return
            except BaseException as error:  # for example because the program replaced `time` or `logging`
                self._complain("take a sample", error)
                if _nap(stop, wait):
                    return
            debt = max(debt - wait * share, -BURST * share)

    def _cpu(self) -> float:
        """The thread's CPU seconds; 0 if the clock fails, for example because the program replaced `time`."""
        try:
            seconds = float(self._clock.cpu())
        except BaseException:
            return 0.0
        return seconds if math.isfinite(seconds) else 0.0

    def _retry(self) -> float:
        """Seconds until the next attempt, by exponential backoff, at most `SLOWEST_RETRY` or the longer interval."""
        interval = self._settings.interval
        return min(interval * 2.0 ** min(self._failures, 30), max(SLOWEST_RETRY, interval))

    def _tick_unless_paused(self, over: Callable[[], bool]) -> None:
        self._ticking = True  # set before `_paused` is read: `pause` sets `_paused`, then reads `_ticking`
        try:
            if not self._paused:
                self._tick(over)
        finally:
            self._ticking = False

    def _tick(self, over: Callable[[], bool]) -> None:
        """Take one sample, record it and carry out its actions.

        Discards the sample if `over()` is true after it is taken: the monitor was stopped, or this is a forked child.
        """
        actions: list[Action] = []
        try:
            sample = self._take()
        except BaseException as error:  # SystemExit would end the thread without a message
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
    """Wait for `seconds` by the timeout of a lock, which works even if the program has replaced `time`. Returns True if
    `stop` is set."""
    lock = threading.Lock()
    lock.acquire()
    while seconds > 0 and not stop.is_set():
        lock.acquire(timeout=min(seconds, 0.2))
        seconds -= 0.2
    return stop.is_set()


def _both(kind: str, when: float, text: str) -> list[Action]:
    event = Event(when, "probe", text)
    return [Action(kind, event), Action("callback", event)]

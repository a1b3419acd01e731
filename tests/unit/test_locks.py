"""Waits for a lock within a call that was interrupted."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from interruptions import Points

import memguard
from memguard._base import locks
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._runtime import runtime
from memguard.errors import MemguardError


class Counted(locks.InterruptSafeLock):
    """Counts the waits."""

    waits = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        Counted.waits += timeout > 0
        return super().acquire(blocking, timeout)


@pytest.fixture
def held() -> Iterator[Counted]:
    """A lock that another thread has."""
    lock, over, taken = Counted(), threading.Event(), threading.Event()

    def have() -> None:
        with lock:
            taken.set()
            over.wait()

    thread = threading.Thread(target=have)
    thread.start()
    taken.wait()
    Counted.waits = 0
    yield lock
    over.set()
    thread.join()


def test_a_storm_of_signals_waits_once(held: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait within a wait would add its seconds: what interrupts a wait is refused at once."""
    monkeypatch.setattr(locks, "interrupting", lambda: True)
    monkeypatch.setattr(locks, "_WITHIN", 0.4)
    refused = 0

    def within(*_: object) -> None:
        nonlocal refused
        before = Counted.waits
        with pytest.raises(MemguardError, match="this call could deadlock"), held:
            pass
        refused += Counted.waits == before

    before = signal.signal(signal.SIGALRM, within)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        with pytest.raises(MemguardError, match="this call could deadlock"), held:
            pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert refused >= 3
    assert Counted.waits == 8, "0.4 s in looks of 0.05 s, once"
    assert locks._patient == []


class Other:
    """A thread that takes the guard's lock when it is asked to, and keeps it until this thread's call has ended: as if
    it waited for another lock, which the interrupted call has.
    """

    def __init__(self, lock: Any) -> None:
        self.lock, self.asked, self.has, self.ended = lock, threading.Event(), threading.Event(), threading.Event()
        self.hung = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self) -> None:
        self.asked.set()
        assert self.has.wait(20)

    def end(self) -> None:
        self.ended.set()
        self.asked.set()
        self._thread.join(20)

    def _run(self) -> None:
        self.asked.wait()
        if not self.ended.is_set():
            with self.lock:
                self.has.set()
                self.hung = not self.ended.wait(5)


def by_signal(call: Callable[[], None]) -> None:
    before = signal.signal(signal.SIGUSR1, lambda *_: call())
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def by_finalizer(call: Callable[[], None]) -> None:
    class Thing:
        pass

    thing = Thing()
    weakref.finalize(thing, call)
    del thing


OWNED = 12
"""Points in a row at which the call has the lock: then it has come to its work."""
CALLS: dict[str, Callable[[], object]] = {
    "trim": memguard.trim,
    "resize": lambda: memguard.resize("torch", "2GiB"),
    "shutdown": memguard.shutdown,
}


@pytest.mark.parametrize("kind", [by_signal, by_finalizer])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_within_another_one_ends_wherever_a_second_thread_takes_the_lock(
    name: str, kind: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each point of it at which Python may run another thread, one after the other, up to its own acquisition."""
    monkeypatch.setattr(locks, "_WITHIN", 0.05)
    usage, at, owned, outcomes = SimulatedFramework.usage, 0, 0, set()
    try:
        while owned < OWNED:
            at += 1
            guard = memguard.init({"version": 1, "frameworks": {"torch": {"limit": "4GiB"}}}, simulate="h200")
            lock = runtime.this.lock if name == "shutdown" else guard.caps.lock
            other, within = Other(lock), [False]

            def take(lock: Any = lock, other: Other = other) -> None:
                nonlocal owned
                owned = owned + 1 if lock._is_owned() else 0
                if not owned:
                    other.take()

            def call(at: int = at, take: Callable[[], None] = take) -> None:
                try:
                    Points(at, take).run(CALLS[name])
                except MemguardError as error:
                    outcomes.add(str(error).partition(":")[0])

            def interrupted(
                self: SimulatedFramework, device: Any, call: Any = call, within: list[bool] = within
            ) -> Any:
                if not within[0]:
                    within[0] = True
                    kind(call)
                return usage(self, device)

            with monkeypatch.context() as patched:
                patched.setattr(SimulatedFramework, "usage", interrupted)
                try:
                    memguard.ledger()
                except MemguardError:  # shut down within it
                    assert name == "shutdown"
            other.end()
            assert not other.hung, f"point {at} of {name}"
            memguard.shutdown()
    finally:
        memguard.shutdown()
    assert "this call could deadlock" in outcomes and at > 3


def test_an_interruption_leaves_the_lock_as_it_was() -> None:
    """At each point of the acquisition, also of one within another."""
    for depth in (0, 1):
        lock = locks.InterruptSafeLock()

        def enter(lock: locks.InterruptSafeLock = lock) -> None:
            with lock:
                pass

        if depth:
            lock.acquire()
        points = Points(None)
        points.run(enter)
        assert points.count > 1
        for at in range(1, points.count + 1):
            with pytest.raises(KeyboardInterrupt):
                Points(at).run(enter)
            assert lock._is_owned() == bool(depth)
            if depth:
                lock.release()
                assert not lock._is_owned(), "it was acquired once more"
                lock.acquire()

"""Waits for a lock within a call that was interrupted."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from memguard import _locks
from memguard.errors import MemguardError


@pytest.fixture
def held() -> Iterator[threading.RLock]:
    """A lock that another thread has."""
    lock, over, taken = threading.RLock(), threading.Event(), threading.Event()

    def have() -> None:
        with lock:
            taken.set()
            over.wait()

    thread = threading.Thread(target=have)
    thread.start()
    taken.wait()
    yield lock
    over.set()
    thread.join()


def test_a_storm_of_signals_waits_once(held: threading.RLock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait within a wait would add its seconds: what interrupts a wait is refused at once."""
    monkeypatch.setattr(_locks, "interrupting", lambda: True)
    monkeypatch.setattr(_locks, "_WITHIN", 0.4)
    took: list[float] = []

    def within(*_: object) -> None:
        started = time.monotonic()
        with pytest.raises(MemguardError, match="they may wait for each other"):
            _locks.not_for_ever(held)
        took.append(time.monotonic() - started)

    before = signal.signal(signal.SIGALRM, within)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        started = time.monotonic()
        with pytest.raises(MemguardError, match="they may wait for each other"):
            _locks.not_for_ever(held)
        assert time.monotonic() - started < 2.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(took) >= 3
    assert max(took[:3]) < 0.2
    assert _locks._patient == []

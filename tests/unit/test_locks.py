"""Waits for a lock within a call that was interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

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
    free, waits, refused = _locks.free, 0, 0

    def counted(lock: Any, seconds: float) -> bool:
        nonlocal waits
        waits += seconds > 0
        return free(lock, seconds)

    def within(*_: object) -> None:
        nonlocal refused
        before = waits
        with pytest.raises(MemguardError, match="they may wait for each other"):
            _locks.not_for_ever(held)
        refused += waits == before

    monkeypatch.setattr(_locks, "free", counted)

    before = signal.signal(signal.SIGALRM, within)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        with pytest.raises(MemguardError, match="they may wait for each other"):
            _locks.not_for_ever(held)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert refused >= 3
    assert waits == 8, "0.4 s in looks of 0.05 s, once"
    assert _locks._patient == []

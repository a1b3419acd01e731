"""Between the lock and the copy every thread gets its turn."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard._node.suspend.course import settling
from memguard._node.suspend.course.settling import Thread, left

threads = st.dictionaries(st.integers(1, 6), st.builds(Thread, st.booleans(), st.integers(0, 9)))


@given(threads, threads)
def test_who_is_left_has_neither_slept_nor_run(before: dict[int, Thread], now: dict[int, Thread]) -> None:
    found = left(before, now)
    for one, thread in before.items():
        passed = one not in now or now[one].asleep or now[one].ran - thread.ran >= 2
        assert (one in found) is not passed
    assert all(found[one] == before[one] for one in found), "as it was at the lock: its time counts from there"


def test_threads_that_sleep_are_not_waited_for() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert settling.wait(process.pid, 0.05)
        finally:
            process.kill()


def test_a_thread_that_gets_no_processor_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([{7: Thread(False, 5)}] * 3 + [{7: Thread(False, 7)}])
    monkeypatch.setattr(settling, "threads", lambda pid: next(looks))
    assert settling.wait(1, 0.0, longest=60.0)
    assert next(looks, None) is None


def test_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "threads", lambda pid: {7: Thread(False, 5)})
    began = time.monotonic()
    assert not settling.wait(1, 0.0, longest=0.1)
    assert time.monotonic() - began >= 0.1


def test_whoever_cancels_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "threads", lambda pid: {7: Thread(False, 5)})
    cancel = threading.Event()
    cancel.set()
    assert not settling.wait(1, 60.0, cancel, longest=60.0)


def test_a_thread_that_computes_runs_and_is_seen_to() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as busy:
        try:
            assert busy.stdout is not None and busy.stdout.readline()
            first = settling.threads(busy.pid)[busy.pid]
            assert not first.asleep
            assert settling.wait(busy.pid, 0.0, longest=30.0)
            assert settling.threads(busy.pid)[busy.pid].ran - first.ran >= 2
        finally:
            busy.kill()


def test_who_waits_is_left_out_and_what_has_ended_has_no_threads() -> None:
    assert threading.get_native_id() not in settling.threads(os.getpid())
    assert settling.threads(1 << 22) == {}

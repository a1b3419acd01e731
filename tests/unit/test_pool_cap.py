"""The cap that memguard itself sees to in a pool that the driver cannot cap: threads that ask at the same moment."""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from memguard._devices import pool_blocks
from memguard._devices.pool_blocks import PoolCap


class Pool:
    """What is in use. `looked` runs at each look at it, after the figure was read."""

    def __init__(self) -> None:
        self.live, self.most, self.looked = 0, 0, list[Callable[[], object]]()
        self._lock = threading.Lock()

    def used(self) -> int:
        found = self.live
        if self.looked:
            self.looked.pop()()
        return found

    def add(self, size: int) -> None:
        with self._lock:
            self.live += size
            self.most = max(self.most, self.live)


def allocate(cap: PoolCap, pool: Pool, size: int) -> bool:
    claim = cap.take(size)
    if claim is None:
        return False
    pool.add(size)
    claim.end()
    return True


def together(works: list[Callable[[], bool]]) -> list[bool]:
    found: list[bool] = []
    threads = [threading.Thread(target=lambda work=work: found.append(work())) for work in works]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_of_two_that_look_before_either_allocates_one_gets_it() -> None:
    pool, both = Pool(), threading.Barrier(2, timeout=10)
    pool.looked = [both.wait, both.wait]
    cap = PoolCap(pool.used, 100)
    found = together([lambda: allocate(cap, pool, 60)] * 2)
    assert sorted(found) == [False, True] and pool.most == 60


def test_one_that_is_not_short_waits_for_nobody_and_two_that_fit_both_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_blocks, "_PATIENCE", 60.0)
    pool = Pool()
    cap = PoolCap(pool.used, 100)
    first = cap.take(40)  # another request is under way
    before = time.monotonic()
    assert allocate(cap, pool, 60) and time.monotonic() - before < 30
    assert first is not None
    pool.add(40)
    first.end()
    assert not allocate(cap, pool, 1)


def test_what_another_thread_gives_up_serves_the_one_that_waited_for_it() -> None:
    pool = Pool()
    cap = PoolCap(pool.used, 100)
    first = cap.take(60)
    assert first is not None
    found: list[bool] = []
    waiting = threading.Thread(target=lambda: found.append(allocate(cap, pool, 60)))
    waiting.start()
    time.sleep(0.02)
    assert not found
    first.end()  # the driver refused it
    waiting.join(30)
    assert found == [True]


def test_a_finalizer_within_a_request_of_its_own_thread_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_blocks, "_PATIENCE", 60.0)
    pool = Pool()
    cap = PoolCap(pool.used, 100)
    inner: list[bool] = []
    pool.looked = [lambda: inner.append(allocate(cap, pool, 60))]
    before = time.monotonic()
    assert allocate(cap, pool, 60) and inner == [False]
    assert time.monotonic() - before < 30


def test_one_that_never_ends_holds_nobody_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_blocks, "_PATIENCE", 0.05)
    pool = Pool()
    cap = PoolCap(pool.used, 100)
    hangs: list[Any] = []
    thread = threading.Thread(target=lambda: hangs.append(cap.take(60)))
    thread.start()
    thread.join()
    assert not allocate(cap, pool, 60)
    hangs.clear()
    gc.collect()
    assert allocate(cap, pool, 60), "a claim that was dropped without an end counts no more"


def test_a_ctrl_c_at_any_line_leaves_no_claim() -> None:
    pool = Pool()
    cap = PoolCap(pool.used, 100)
    times = 0
    for number in range(60):
        left = number

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename != pool_blocks.__file__:
                return None
            if event == "line" and frame.f_code.co_name != "__del__":  # Python drops what is raised there
                left -= 1
                if left == -1:
                    raise KeyboardInterrupt
            return trace

        other: list[Any] = []
        ends = threading.Timer(0.002, lambda other=other: other.pop().end() if other else None)  # type: ignore[misc]
        if number % 2:  # so that it comes to the turn
            threading.Thread(target=lambda other=other: other.append(cap.take(60))).start()
            while not other:
                time.sleep(0.001)
        ends.start()
        sys.settrace(trace)
        claim = None
        try:
            if (claim := cap.take(60)) is not None:
                claim.end()
        except KeyboardInterrupt:
            times += 1
        finally:
            sys.settrace(None)
        ends.join()
        claim = None
        gc.collect()
        assert not cap._claims and not cap._locked.held_here, number
    assert times > 20


def test_threads_at_the_edge_never_pass_it_and_somebody_gets_what_fits() -> None:
    pool, refused = Pool(), []
    cap = PoolCap(pool.used, 1000)

    def work(seed: int) -> bool:
        rng = random.Random(seed)
        for _ in range(150):
            size = rng.randrange(1, 500)
            if allocate(cap, pool, size):
                time.sleep(0.0002)  # the others run: three that hold something are enough for a refusal
                pool.add(-size)
            else:
                refused.append(size)
        return True

    together([lambda seed=seed: work(seed) for seed in range(6)])  # type: ignore[misc]
    assert pool.most <= 1000 and pool.live == 0 and refused
    assert allocate(cap, pool, 1000)

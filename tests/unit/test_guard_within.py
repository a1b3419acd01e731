"""`memguard.guard` while a signal handler, a finalizer or another thread begins and ends budgets too."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from interruptions import Points

import memguard
from memguard import api
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._runtime import runtime
from memguard.errors import MemguardError, NotActive

BUDGET: dict[str, Any] = {"version": 1, "frameworks": {"torch": {"limit": "4GiB"}}}


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    memguard.shutdown()


def block() -> Any:
    return memguard.guard(BUDGET, simulate="h200")


def entered(at: int | None, handler: Callable[[], object]) -> tuple[Points, memguard.Guard]:
    """Begin a block, with a call at that point of its begin, and end it."""
    points, one = Points(at, handler), block()
    guard = points.run(one.__enter__)
    one.__exit__(None, None, None)
    return points, guard


def test_a_block_does_not_end_a_budget_that_a_finalizer_began_within_its_begin() -> None:
    entered(None, lambda: None)  # imports what is imported late
    count, began, wrong = entered(None, lambda: None)[0].count, 0, []
    for at in [*range(1, 60), *range(60, count - 60, 499), *range(count - 60, count + 1)]:
        own: list[memguard.Guard] = []

        def handler(own: list[memguard.Guard] = own) -> None:
            with contextlib.suppress(MemguardError):  # as a finalizer, whose error goes nowhere
                memguard.shutdown()
                own.append(memguard.init(BUDGET, simulate="h200"))

        try:
            points, guard = entered(at, handler)
        except MemguardError:  # of the block's own `init`
            memguard.shutdown()
            continue
        current = runtime.this.session
        if not own or own[0] is guard:  # it asked for the one that the block was beginning
            memguard.shutdown()
            continue
        if current is None or current.guard is not own[0] or not own[0].active:
            wrong.append(f"{at} {points.place}")
        began += 1
        memguard.shutdown()
    assert wrong == [] and began > 2


def test_a_block_within_another_call_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread is in `trim` and has the guard's lock; `shutdown` of another one waits for it, and has `init`'s."""
    memguard.init(BUDGET, simulate="h200")
    guard, refused = api.current(), []
    torch = guard.frameworks["torch"]
    assert isinstance(torch, SimulatedFramework)
    torch.allocate(1 << 20)  # so that there is something to trim

    def finalizer(framework: SimulatedFramework, device: object) -> None:
        shutting = threading.Thread(target=memguard.shutdown, daemon=True)
        threads.append(shutting)
        shutting.start()
        while not guard.caps.stopped:  # until `shutdown` has its lock, and comes to the one that this thread has
            time.sleep(0.01)
        try:
            with block():
                pass
        except MemguardError as error:
            refused.append(str(error))

    threads: list[threading.Thread] = []
    monkeypatch.setattr(SimulatedFramework, "trim", finalizer)
    trimming = threading.Thread(target=memguard.trim, daemon=True)
    threads.append(trimming)
    trimming.start()
    trimming.join(15)
    for one in threads:
        one.join(15)
    assert not any(one.is_alive() for one in threads)
    assert len(refused) == 1 and "this call could deadlock" in refused[0]


def test_a_trim_whose_budget_a_finalizer_ends_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    memguard.init({**BUDGET, "frameworks": {"torch": {"limit": "4GiB"}, "cupy": {"limit": "1GiB"}}}, simulate="h200")
    asked: list[str] = []
    usage = SimulatedFramework.usage

    def ending(self: SimulatedFramework, device: Any) -> Any:
        asked.append(self.name)
        if len(asked) == 1:
            memguard.shutdown()
        return usage(self, device)

    monkeypatch.setattr(SimulatedFramework, "usage", ending)
    with pytest.raises(NotActive, match="it was shut down"):
        memguard.trim()
    assert len(asked) == 1


def test_one_that_ends_it_just_before_a_framework_is_looked_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = memguard.init({**BUDGET, "frameworks": {"torch": {"limit": "4GiB"}}}, simulate="h200")
    looked_up = guard.caps.allocator

    def ending(name: str) -> Any:
        memguard.shutdown()
        return looked_up(name)

    monkeypatch.setattr(guard.caps, "allocator", ending)
    with pytest.raises(NotActive, match="it was shut down"):
        memguard.trim()

"""Ctrl-C anywhere in memguard's part of a retry: it comes out, nothing is half done, and the next call works."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import interruptions
import pytest
from guards import simulated, start
from interruptions import Points

import memguard
from memguard._base.units import GIB
from memguard._runtime import runtime

STRIDE = int(os.environ.get("MEMGUARD_TEST_STRIDE", "61"))
"""Every so many points are tried. 1 tries all."""
BUDGET = {"version": 1, "frameworks": {"torch": {"limit": "40GiB"}, "cupy": {"limit": "80GiB"}}}


class Array:
    """Memory of a simulated framework that goes back when Python lets go of it."""

    alive: ClassVar[weakref.WeakSet[Array]] = weakref.WeakSet()

    def __init__(self, framework: Any, size: int) -> None:
        self._framework, self._id = framework, framework.allocate(size)
        self.alive.add(self)

    def __del__(self) -> None:
        if hasattr(self, "_id"):
            self._framework.free(self._id)


class Program:
    """Needs 24 GiB of torch where CuPy's idle cache leaves 16, in every way that runs it again."""

    def __init__(self, guard: memguard.Guard) -> None:
        self.guard, self.torch, self.cupy = guard, simulated(guard, "torch"), simulated(guard, "cupy")
        device = guard.host.devices()[0]
        self.idle()
        guard.host.take(device, guard.host.memory(device).free - 16 * GIB)  # type: ignore[attr-defined]

        @memguard.retry(shrink="n", floor=2)
        def shrinking(n: int) -> int:
            return len([Array(self.torch, 8 * GIB) for _ in range(n)])

        self.shrinking = shrinking

    def idle(self) -> None:
        """CuPy caches 40 GiB again, if there is room for them."""
        arrays = [Array(self.cupy, 40 * GIB)]
        del arrays

    def step(self, arrays: int = 3) -> int:
        return len([Array(self.torch, 8 * GIB) for _ in range(arrays)])

    def call(self) -> object:
        return memguard.retry.call(self.step)

    def attempts(self) -> object:
        for attempt in memguard.retry.attempts():
            with attempt:
                return self.step()
        raise AssertionError

    def shrinks(self) -> object:
        return self.shrinking(16)


WAYS: dict[str, tuple[Callable[[Program], object], int]] = {
    "call": (Program.call, 3),
    "attempts": (Program.attempts, 3),
    "shrinks": (Program.shrinks, 4),
}


def interrupted(name: str, at: int | None) -> tuple[Points, list[str]]:
    """Interrupt the call at that point. What is wrong afterwards."""
    way, expected = WAYS[name]
    program, points, wrong = Program(start(BUDGET)), Points(at), list[str]()
    try:
        found = points.run(lambda: way(program))
        if points.place:
            wrong.append("it swallowed the interruption")
        elif found != expected:
            wrong.append(f"{found} instead of {expected}")
    except KeyboardInterrupt:
        pass
    except BaseException as error:
        wrong.append(f"{type(error).__name__}: {error}")
    gc.collect()
    if len(Array.alive):
        wrong.append(f"{len(Array.alive)} arrays are alive")
    free: list[bool] = []

    def take() -> None:
        lock = program.guard.caps.lock
        free.append(lock.acquire(timeout=10))
        if free[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    if free != [True]:
        wrong.append("a lock is held for ever")
    try:
        memguard.ledger()
        if way(program) != expected:
            wrong.append("it does not work again")
    except BaseException as error:
        wrong.append(f"again: {type(error).__name__}: {error}")
    if memguard.shutdown() or runtime.this.session is not None:
        wrong.append("something stays")
    return points, wrong


@pytest.mark.usefixtures("nothing_stays", "only_own_objects_are_collected")
@pytest.mark.parametrize("name", WAYS)
def test_an_interruption_comes_out_and_the_next_call_works(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The guard has tests of its own, and the stand-ins free arrays in `__del__`, from where nothing comes out.
    monkeypatch.setattr(interruptions, "_ours", lambda code: "/memguard/_runtime/retry/" in code.co_filename)
    interrupted(name, None)  # imports what is imported late
    points, wrong = interrupted(name, None)
    assert wrong == []
    failures = {}
    tried = range(1, points.count + 1, STRIDE)
    for at in tried:
        found, wrong = interrupted(name, at)
        if wrong:
            failures[f"{at} {found.place}"] = wrong
            memguard.shutdown()
    print(f"{name}: {len(tried)} of {points.count} points tried, {len(failures)} wrong")
    assert failures == {}, f"{len(failures)} of {len(tried)}"

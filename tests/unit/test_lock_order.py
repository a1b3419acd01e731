"""The order of `memguard._base.locks.LockOrder`: a thread that holds a lock waits only for later ones."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from guards import simulated
from waiting import until

import memguard
from memguard._base import locks
from memguard._base.locks import InterruptSafeLock, LockedRunner, LockOrder, ordered
from memguard._base.units import GIB
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory
from memguard._node.suspend import self_suspend
from memguard._runtime.runtime import this

HERE = os.path.dirname(str(memguard.__file__)) + os.sep
held = threading.local()


def interrupting() -> bool:
    """As `locks.interrupting`, asked by memguard's code that takes the lock."""
    frame: FrameType | None = sys._getframe(1)
    outside = False
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    while frame is not None:
        if not frame.f_code.co_filename.startswith(HERE):
            outside = True
        elif outside:
            return True
        frame = frame.f_back
    return False


class OrderedLock:
    """A lock that notes who waits for it within a lock of the same or a later rank."""

    def __init__(self, lock: Any, rank: LockOrder, broken: list[str], nested: set[tuple[str, str]]) -> None:
        self.lock, self.rank, self.broken, self.nested = lock, rank, broken, nested

    @property
    def outer(self) -> list[OrderedLock]:
        """Those that this thread has. An interruption may have kept one from being taken off the list."""
        found: list[OrderedLock] = vars(held).setdefault("locks", [])
        found[:] = [one for one in found if one.lock._is_owned()]
        return found

    def check(self) -> None:
        if self.lock._is_owned() or interrupting():
            return
        for rank in {one.rank for one in self.outer}:
            self.nested.add((rank.name, self.rank.name))
            if rank >= self.rank:
                self.broken.append(f"{self.rank.name} is waited for within {rank.name}")

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking and timeout != 0:
            self.check()
        if taken := self.lock.acquire(blocking, timeout):
            self.outer.append(self)
        return bool(taken)

    def release(self) -> None:
        self.lock.release()

    def __enter__(self) -> bool:
        self.check()
        taken = self.lock.__enter__()
        self.outer.append(self)
        return bool(taken)

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def _is_owned(self) -> bool:
        return bool(self.lock._is_owned())


class Order:
    """What the locks that are made from now on notice."""

    def __init__(self) -> None:
        self.broken: list[str] = []
        self.nested: set[tuple[str, str]] = set()
        self.made: set[LockOrder] = set()

    def __call__(self, lock: Any, rank: LockOrder) -> OrderedLock:
        self.made.add(rank)
        return OrderedLock(lock, rank, self.broken, self.nested)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[Order]:
    found = Order()
    monkeypatch.setattr(locks, "check_order", found)
    monkeypatch.setattr(this, "lock", ordered(InterruptSafeLock(), LockOrder.RUNTIME))
    monkeypatch.setattr(self_suspend, "_locked", LockedRunner(order=LockOrder.SUSPENSION))
    yield found
    memguard.shutdown()
    until(lambda: all(thread.name != "memguard-suspended" for thread in threading.enumerate()))


def budget(folder: Path) -> dict[str, Any]:
    return {
        "version": 1,
        "device": {"limit": "40GiB"},
        "frameworks": {
            "torch": {"min": "10GiB", "max": "30GiB"},
            "cupy": {"min": "4GiB", "max": "30GiB"},
            "numba": {"limit": "2GiB"},
        },
        "monitor": {"interval": "50ms", "timeline": str(folder / "run.jsonl")},
    }


def test_a_program_keeps_the_order(order: Order, tmp_path: Path) -> None:
    """With every kind of call, beside a monitor that samples, moves caps and writes, and a thread that waits."""
    guard = memguard.init(budget(tmp_path), simulate="h200")
    cupy, torch = simulated(guard, "cupy"), simulated(guard, "torch")
    samples: list[object] = []
    watch = memguard.on_sample(samples.append)
    torch.free(torch.allocate(13 * GIB))
    block = cupy.allocate(25 * GIB)  # torch gives back, and cupy's cap rises, within this request
    cupy.free(block)
    memguard.require("torch", "1GiB")

    def second() -> None:
        with memguard.workload("second", framework="numba", needs="1536MiB", wait=60):
            samples.clear()

    waits = threading.Thread(target=second)
    with memguard.workload("first", framework="numba", needs="1GiB"):
        waits.start()
        until(lambda: guard.admission.get().queue.prune().waiting)
        with pytest.raises(memguard.BudgetExceeded):
            memguard.require("cupy", "39GiB")
    waits.join(60)
    with pytest.raises(FrameworkOutOfMemory):
        cupy.allocate(35 * GIB)
    memguard.resize("numba", "1GiB")
    memguard.trim()
    memguard.checkpoint()
    until(lambda: len(samples) > 3)
    watch.remove()
    print(memguard.ledger(), memguard.reclaimable(), guard)
    with memguard.suspended():
        memguard.ledger()
    memguard.shutdown()
    assert order.broken == []
    assert order.made == {*LockOrder}
    nested = {("RUNTIME", "GUARD"), ("GUARD", "ALLOCATOR"), ("READER", "ALLOCATOR")}
    assert nested <= order.nested, "the order was put to the test"


@pytest.mark.parametrize(
    "wait", [lambda lock: lock.__enter__(), lambda lock: lock.acquire(), lambda lock: lock.acquire(timeout=1)]
)
def test_a_wait_against_the_order_is_noticed(order: Order, wait: Callable[[Any], object]) -> None:
    outer, inner = ordered(InterruptSafeLock(), LockOrder.GUARD), ordered(InterruptSafeLock(), LockOrder.READER)
    with outer, inner, outer:
        assert order.broken == [], "in order, and one that it has already"
    with inner:
        assert outer.acquire(False), "a try waits for nobody"
        outer.release()
        assert order.broken == []
        wait(outer)
        outer.release()
    assert order.broken == ["GUARD is waited for within READER"]


def test_without_a_test_the_lock_is_as_it_was() -> None:
    lock = InterruptSafeLock()
    assert ordered(lock, LockOrder.GUARD) is lock

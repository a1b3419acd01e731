"""A lease that several threads have to do with, and one whose change is not written."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from leasing import lease

from memguard._node.leases import locks, registry, store
from memguard._node.leases.lease import Lease
from memguard._node.leases.store import Store
from memguard.errors import LeaseRefused, MemguardError, NotActive

Left = tuple[Lease, Lease]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    where = tmp_path / "leases"
    monkeypatch.setenv("MEMGUARD_LEASES", str(where))
    yield where
    assert Store(str(where)).claims() == [] and locks._files == {}


def states(folder: Path) -> list[str]:
    return [claim.state for claim in Store(str(folder)).claims()]


@pytest.fixture
def left(folder: Path) -> Left:
    """A lease whose process is off its GPUs, and another one that has the same bytes now."""
    one, blocker = lease(60), lease(60)
    one.take()
    one.leave()
    blocker.take()
    return one, blocker


class Waiter:
    """A thread that waits in `back`, and stands still after its first look until it is let go."""

    def __init__(self, one: Lease) -> None:
        self.looks, self.goes_on, self.over = threading.Event(), threading.Event(), threading.Event()
        self.ended: list[object] = []
        self._one = one
        self._thread = threading.Thread(target=self._wait)

    def __enter__(self) -> Waiter:
        self._thread.start()
        assert self.looks.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self.goes_on.set()
        self._thread.join(3)
        self.over.set()
        self._thread.join(20)

    def _wait(self) -> None:
        try:
            self._one.back(unwanted=self.over.is_set, look=self._look)
            self.ended.append("held")
        except NotActive as error:
            self.ended.append(str(error))

    def _look(self, _: object) -> None:
        self.looks.set()
        self.goes_on.wait(20)


def test_it_is_claimed_again_although_a_thread_waits_that_has_not_seen_that_it_was_left(left: Left) -> None:
    one, blocker = left
    with Waiter(one) as waiter:
        blocker.close()
        one.back(20)
        one.leave()
        one.back(2)  # nobody else claims it: the other one believes that its claim waits
        assert one.held
        waiter.end()
    assert waiter.ended == ["held"]
    one.close()


def test_who_waits_for_one_that_was_left_meanwhile_does_not_wait_for_ever(folder: Path, left: Left) -> None:
    one, blocker = left
    with Waiter(one) as waiter:
        one.leave()  # its process is off its GPUs again
        waiter.end()
    assert waiter.ended == ["its lease was given back while it waited for it"]
    assert sorted(states(folder)) == ["held", "off"]
    blocker.close()
    one.close()


def test_what_was_given_back_is_not_claimed_again_by_a_thread_that_waits(folder: Path, left: Left) -> None:
    one, blocker = left
    with Waiter(one) as waiter:
        one.close()
        waiter.end()
    assert waiter.ended == ["its lease was given back while it waited for it"]
    assert states(folder) == ["held"] and one.number is None
    one.back()  # there is nothing to claim again
    assert states(folder) == ["held"]
    blocker.close()
    one.take()
    assert one.held
    one.close()


def test_one_whose_turn_comes_with_the_end_of_its_time_has_it(
    folder: Path, left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its process would stay off its GPUs, and keep others from them."""
    one, blocker = left

    def too_late(*_: object) -> None:
        blocker.close()
        raise LeaseRefused("there is no room")

    monkeypatch.setattr(one, "_until", too_late)
    one.back(1)
    assert one.held and states(folder) == ["held"]
    one.close()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From then on no change is written."""
    change = Store.change

    def unwritten(self: Store, work: Any, *given: Any) -> Any:
        def fails(*two: Any) -> None:
            work(*two)
            raise MemguardError("disk is full")

        return change(self, fails, *given)

    return lambda: monkeypatch.setattr(Store, "change", unwritten)


def test_what_was_not_written_is_not_held(folder: Path, full: Callable[[], None], monkeypatch: Any) -> None:
    one = lease(60)
    one.take()
    one.leave()
    full()
    with pytest.raises(MemguardError, match="disk is full"):
        one.back(5)
    assert not one.held
    monkeypatch.undo()
    monkeypatch.setenv("MEMGUARD_LEASES", str(folder))
    one.back(5)
    assert one.held and states(folder) == ["held"]
    one.close()


def test_what_was_not_given_back_is_held(folder: Path, full: Callable[[], None], monkeypatch: Any) -> None:
    one = lease(60)
    one.take()
    full()
    with pytest.raises(MemguardError, match="disk is full"):
        one.leave()
    assert one.held and states(folder) == ["held"]
    monkeypatch.undo()
    one.close()


ENDS: dict[str, tuple[type[BaseException], float]] = {
    "no longer wanted": (NotActive, 60),
    "the time is over": (LeaseRefused, 0.01),
    "Ctrl-C": (KeyboardInterrupt, 60),
}


@pytest.mark.parametrize(("kind", "wait"), ENDS.values(), ids=ENDS)
def test_what_ends_the_wait_is_raised_although_the_claim_cannot_be_withdrawn(
    folder: Path,
    left: Left,
    full: Callable[[], None],
    kind: type[BaseException],
    wait: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the caller believes that the database cannot be used, and comes back without the lease."""
    one, blocker = left
    looked = threading.Event()

    def look(_: object) -> None:
        if not looked.is_set():
            full()
            looked.set()
        if kind is KeyboardInterrupt:
            raise KeyboardInterrupt

    with pytest.raises(kind):
        one.back(wait, unwanted=lambda: kind is NotActive and looked.is_set(), look=look, hurry=True)
    assert not one.held
    monkeypatch.undo()
    monkeypatch.setenv("MEMGUARD_LEASES", str(folder))
    one.close()
    blocker.close()


def test_one_in_a_hurry_does_not_wait_for_a_thread_that_waits_for_the_database(
    folder: Path, left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread brings the process back in its turn, and `memguard.resume` wants it now."""
    one, blocker = left
    blocker.close()
    waits, pause = threading.Event(), time.sleep
    clock = SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=lambda s: (waits.set(), pause(s)))
    monkeypatch.setattr(store, "time", clock)
    thread = threading.Thread(target=one.back)
    with contextlib.closing(sqlite3.connect(folder / "leases.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        thread.start()
        assert waits.wait(20)
        with pytest.raises(MemguardError, match="is in use by another process"):
            one.back(hurry=True)
        assert thread.is_alive()
    thread.join(20)
    assert one.held and states(folder) == ["held"]
    one.close()


@pytest.fixture
def moments(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """Nobody really waits for a database. What is in the list is done, once each, at the next moments of a wait."""
    clock, left = [0.0], list[Callable[[], object]]()

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        if left:
            left.pop(0)()

    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time, sleep=sleep))
    return left


@contextlib.contextmanager
def used(folder: Path) -> Iterator[Callable[[], object]]:
    """Another program has the database for itself, until it is let go."""
    with contextlib.closing(sqlite3.connect(folder / "leases.sqlite", isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        yield other.close


@pytest.mark.parametrize("how", ["damaged", "in use", "repaired"])
def test_only_who_waited_in_vain_for_the_same_database_does_not_wait_again(
    folder: Path, tmp_path: Path, moments: list[Callable[[], object]], how: str
) -> None:
    """Else one folder that cannot be used brings a process back without its lease of another one."""
    one = lease(60)
    one.take()
    one.leave()
    other = folder if how == "repaired" else tmp_path / "other"
    other.mkdir(0o700, exist_ok=True)
    Store(str(other)).change(lambda *_: None)
    path = other / "leases.sqlite"
    whole = path.read_bytes()
    if how != "in use":
        path.write_bytes(b"this is no database" * 2000)
    with used(other) if how == "in use" else contextlib.nullcontext(), pytest.raises(MemguardError):
        registry.every(str(other))
    path.write_bytes(whole)
    with used(folder) as let_go:
        moments.append(let_go)
        one.back(hurry=True)
    assert one.held and moments == []
    one.close()


def test_one_in_a_hurry_gives_up_on_a_database_that_stays_in_use(
    folder: Path, left: Left, moments: list[Callable[[], object]]
) -> None:
    """Else another program that holds the database would keep the process off its GPUs for as long."""
    one, blocker = left
    with contextlib.ExitStack() as stack:
        looks: list[object] = []

        def look(_: object) -> None:
            looks.append(None)
            if len(looks) == 1:
                stack.enter_context(used(folder))

        with pytest.raises(store.BusyDatabaseError):
            one.back(60, hurry=True, look=look)
    assert not one.held
    blocker.close()
    one.close()


def test_one_in_a_hurry_that_has_its_place_in_the_queue_waits_on_while_the_database_is_in_use(
    folder: Path, left: Left, moments: list[Callable[[], object]]
) -> None:
    one, blocker = left
    let_go: list[Callable[[], object]] = []
    looks: list[object] = []
    with contextlib.ExitStack() as stack:

        def look(_: object) -> None:
            looks.append(None)
            if len(looks) == 1:
                let_go.append(stack.enter_context(used(folder)))
            elif len(looks) == 2:
                let_go.pop()()
                blocker.close()

        one.back(60, hurry=True, look=look)
    assert one.held and let_go == []
    one.close()

"""Marks of a suspension and places in a queue are bytes of a file: they go with their owner, and with nobody else."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from interruptions import Points
from leasing import until

from memguard._node.identity import this_process
from memguard._node.leases import locks
from memguard._node.leases.store import made
from memguard._node.suspend.store import spare, work_lock
from memguard._node.suspend.store.tickets import Turn
from memguard._node.suspend.store.work_lock import Work

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
LAST = (1 << 63) - 2
CLAIMS = {
    "byte": lambda where: locks.hold(str(where / "leases.lock"), (7,)),
    "turn": lambda where: Turn(["GPU-a"], str(where)).__enter__(),
    "work": lambda where: Work(this_process(), "asked", where=str(where)).__enter__(),
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "leases.lock").touch(0o600)
    return str(tmp_path / "leases.lock")


def pids(path: str) -> list[int]:
    with locks.opened(path) as file:
        return [pid for _, pid in file.holders(0, LAST)]


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_a_forked_child_does_not_keep_it(path: str, claim: Callable[[Path], object]) -> None:
    """Its parent holds it, and is killed while the child lives on."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            kept = claim(Path(path).parent)
            child = os.fork()
            if child:
                os.write(write, str(child).encode())
            signal.pause()
            del kept
        finally:
            os._exit(1)
    child = int(os.read(read, 20))
    try:
        assert pids(path) == [pid]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert pids(path) == []
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(read)
        os.close(write)


def test_the_thread_that_creates_the_file_frees_no_byte_of_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A close of the file in a process frees all its bytes."""
    path, close = str(tmp_path / "leases.lock"), os.close
    holds = threading.Thread(target=lambda: held.append(locks.hold(path, (7,))))
    held: list[locks.File | None] = []

    def closes(fd: int) -> None:
        if os.path.realpath(f"/proc/self/fd/{fd}") == path and holds.ident is None:
            holds.start()
            holds.join()
        close(fd)

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", closes)
        made(path)
        if holds.ident is None:  # nothing was closed
            holds.start()
            holds.join()
    pid = os.fork()
    if not pid:
        os._exit(0 if pids(path) == [os.getppid()] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    (file,) = held
    assert file is not None
    locks.release(file, (7,))
    assert not any(path in one for one in descriptors())


def turn(where: Path) -> None:
    with Turn(["GPU-a", "GPU-b"], str(where)):
        pass


def work(where: Path) -> None:
    with Work(this_process(), "asked", where=str(where)):
        pass


def copy(where: Path) -> None:
    spare.write(str(where), {"pid": 1}, lambda found: True, lambda found: True)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # interrupted: just opened, and is closed
@pytest.mark.parametrize("use", [turn, work, copy])
def test_an_interruption_at_any_point_leaves_no_byte_held(
    tmp_path: Path, path: str, use: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may live for days."""
    monkeypatch.setattr(work_lock.records, "of", lambda *_: None)
    use(tmp_path)
    points = Points()
    points.run(lambda: use(tmp_path))
    left = []
    for at in range(1, points.count + 1):
        interrupted = Points(at)
        with contextlib.suppress(KeyboardInterrupt):
            interrupted.run(lambda: use(tmp_path))
        for file in [*locks._files.values()]:
            if file.held:
                left.append(interrupted.place)
                locks.release(file, [*file.held])
    assert len(left) <= 1 and all(" __exit__ " in place for place in left), "before the first statement of that"
    with locks.opened(path):
        pass
    assert locks._files == {}


def test_what_is_held_is_not_taken_again_and_all_or_none_is(path: str) -> None:
    file = locks.hold(path, (3, 4))
    assert file is not None and locks.hold(path, (4, 5)) is None and locks.hold(path, (5,)) is file
    pid = os.fork()
    if not pid:
        try:
            own = locks.hold(path, (6, 7))
            right = locks.hold(path, (2, 3)) is None and locks.hold(path, (7,)) is None and own is not None
            with locks.opened(path) as mine:
                seen = mine.holders(0, LAST)
            right = right and seen == [*((n, os.getppid()) for n in (3, 4, 5)), *((n, os.getpid()) for n in (6, 7))]
            os._exit(0 if right else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    locks.release(file, (3, 4, 5))
    locks.release(file, (3, 4, 5))
    assert pids(path) == [] and not any(str(path) in one for one in descriptors())


def descriptors() -> list[str]:
    return [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]


def test_of_a_lock_of_the_whole_file_a_few_bytes_are_listed(path: str) -> None:
    """A backup, say, may lock it."""
    pid = os.fork()
    if not pid:
        try:
            with open(path, "r+b") as file:
                locks.fcntl.lockf(file, locks.fcntl.LOCK_EX)
                os.rename(path, path + ".locked")
                signal.pause()
        finally:
            os._exit(1)
    until(lambda: os.path.exists(path + ".locked"))
    try:
        assert {*pids(path + ".locked")} == {pid} and len(pids(path + ".locked")) < 100
        assert locks.hold(path + ".locked", (7,)) is None
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_child_drops_nothing_of_its_parents(tmp_path: Path, path: str) -> None:
    work, turn = Work(this_process(), "asked", where=str(tmp_path)), Turn(["GPU-a"], str(tmp_path))
    with work, turn:
        held = pids(path)
        pid = os.fork()
        if not pid:
            try:
                with open(path, "rb"):  # gets the number of the descriptor that the child has closed
                    work.__exit__()
                    turn.__exit__()
                    os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        assert pids(path) == held == [os.getpid()] * 2
    assert pids(path) == []


def test_two_that_come_in_one_moment_have_one_order_on_all_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each would wait for the other."""
    monkeypatch.setattr("memguard._node.suspend.store.tickets.time.monotonic_ns", lambda: 5_000)
    with (
        Turn(["GPU-b"], str(tmp_path)) as first,
        Turn(["GPU-a", "GPU-b"], str(tmp_path)) as second,
        Turn(["GPU-a", "GPU-b"], str(tmp_path)) as third,
    ):
        assert first.ahead() == {}
        assert second.ahead() == {"GPU-b": (os.getpid(),)}
        assert third.ahead() == {"GPU-a": (os.getpid(),), "GPU-b": (os.getpid(),) * 2}


def test_the_bytes_of_threads_do_not_free_each_others(tmp_path: Path, path: str) -> None:
    """Every close of the file in a process would."""

    def often() -> None:
        for _ in range(50):
            with Turn(["GPU-b"], str(tmp_path)):
                pids(path)

    with Turn(["GPU-a"], str(tmp_path)):
        threads = [threading.Thread(target=often) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        pid = os.fork()
        if not pid:
            os._exit(0 if pids(path) == [os.getppid()] else 1)
        assert os.waitpid(pid, 0)[1] == 0

"""Files that are held go with their owner, and with nobody else."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from memguard._node.identity import this_process
from memguard._node.suspend.store import lockfile
from memguard._node.suspend.store.tickets import Turn
from memguard._node.suspend.store.work_lock import Work

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
CLAIMS = {
    "file": lambda where: lockfile.take(f"{where}/file"),
    "turn": lambda where: Turn(["GPU-a"], where).__enter__(),
    "work": lambda where: Work(this_process(), "asked", where=where).__enter__(),
}


def files(where: Path) -> list[Path]:
    return [path for path in where.rglob("*") if path.is_file()]


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_a_forked_child_does_not_keep_it(tmp_path: Path, claim: Callable[[str], object]) -> None:
    """Its parent holds it, and is killed while the child lives on."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            kept = claim(str(tmp_path))
            child = os.fork()
            if child:
                os.write(write, str(child).encode())
            signal.pause()
            del kept
        finally:
            os._exit(1)
    child = int(os.read(read, 20))
    try:
        (path,) = files(tmp_path)
        assert lockfile.holder(str(path)) == pid and lockfile.held(str(path)) and path.exists()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        until = time.monotonic() + 10  # the child may not have run yet
        while lockfile.holder(str(path)) is not None and time.monotonic() < until:
            time.sleep(0.01)
        assert not lockfile.held(str(path)) and not path.exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(read)
        os.close(write)


def test_what_another_holds_is_not_taken(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    fd = lockfile.take(path)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(BlockingIOError):
        lockfile.take(path)
    with pytest.raises(FileExistsError):
        lockfile.take(path, os.O_EXCL)
    assert os.listdir("/proc/self/fd") == before
    lockfile.drop(fd, path)
    lockfile.drop(fd, path)
    assert lockfile.holder(path) is None and not lockfile.held(path) and files(tmp_path) == []


def test_one_that_was_removed_while_it_was_taken_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lock = str(tmp_path / "file"), lockfile.fcntl.flock
    removed: list[str] = []

    def slow(fd: int, how: int) -> None:
        if not removed:
            removed.append(path)
            os.unlink(path)
        lock(fd, how)

    monkeypatch.setattr(lockfile.fcntl, "flock", slow)
    fd = lockfile.take(path)
    assert Path(path).read_text() == str(os.getpid())
    lockfile.drop(fd, path)


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic"):
        lockfile.take(str(tmp_path / "file"))
    assert lockfile.holder(str(tmp_path / "file")) is None and not (tmp_path / "other").exists()


def test_a_child_drops_nothing_of_its_parents(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    fd = lockfile.take(path)
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            lockfile.drop(fd, path)
        os._exit(0)
    os.waitpid(pid, 0)
    assert lockfile.held(path)
    lockfile.drop(fd, path)

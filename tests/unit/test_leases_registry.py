"""The processes that run under a budget, in one table with those that hold leases."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from leasing import heard, lease, told, until

from memguard._node.identity import Process, process_of, this_process
from memguard._node.leases import registry
from memguard._node.leases.registry import Budgeted
from memguard._node.suspend import remote_suspend
from memguard._node.suspend.store import records
from memguard.errors import MemguardError

ROOT = Path(__file__).resolve().parents[2]
ME = this_process()
OTHER = """
import sys
from memguard._node.leases import registry
from memguard._node.identity import this_process
registry.enter(registry.Budgeted(this_process(), "other.yaml", True), sys.argv[1])
print("in", flush=True)
sys.stdin.readline()
registry.leave(this_process(), sys.argv[1])
print("out", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("MEMGUARD_LEASES", str(tmp_path))
    tmp_path.chmod(0o700)
    yield str(tmp_path)
    registry.leave(ME, str(tmp_path))


@pytest.fixture
def other(folder: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", OTHER, folder], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        assert heard(child) == "in"
        yield child
    finally:
        child.kill()
        child.communicate()


def pids(folder: str) -> list[int]:
    return [one.process.pid for one in registry.every(folder)]


def test_one_that_says_so_is_known_until_it_takes_that_back(folder: str, other: Any) -> None:
    process = process_of(other.pid)
    assert process is not None
    assert registry.every(folder) == [Budgeted(process, "other.yaml", True)]
    registry.enter(Budgeted(ME, "b.yaml", False, True), folder)
    assert pids(folder) == [other.pid, ME.pid]
    told(other)
    assert heard(other) == "out"
    assert registry.every(folder) == [Budgeted(ME, "b.yaml", False, True)]
    registry.leave(ME, folder)
    registry.leave(ME, folder)
    assert registry.every(folder) == []


def test_one_that_was_killed_is_gone_at_once(folder: str, other: Any) -> None:
    os.kill(other.pid, signal.SIGKILL)
    until(lambda: pids(folder) == [])
    other.wait()
    registry.enter(Budgeted(ME, "b.yaml", False), folder)  # and its row with the next change
    assert rows(folder) == 1


def rows(folder: str) -> int:
    import sqlite3

    connection = sqlite3.connect(os.path.join(folder, "leases.sqlite"))
    try:
        return int(connection.execute("SELECT count(*) FROM processes").fetchone()[0])
    finally:
        connection.close()


def test_who_holds_a_lease_runs_under_a_budget_that_ps_knows(folder: str) -> None:
    one = lease(40)
    one.take()
    assert records.budget_of(ME) == Budgeted(ME, "budget.yaml", False)
    registry.enter(Budgeted(ME, "budget.yaml", True), folder)
    assert records.budgets() == [Budgeted(ME, "budget.yaml", True)]
    registry.leave(ME, folder)
    assert records.budgets() == [Budgeted(ME, "budget.yaml", False)] and rows(folder) == 1
    one.close()
    assert records.budgets() == [] and rows(folder) == 0


def test_a_forked_child_keeps_nobody_in_the_list(folder: str) -> None:
    registry.enter(Budgeted(ME, "b.yaml", True), folder)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if registry.every(folder) == [Budgeted(ME, "b.yaml", True)] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert pids(folder) == [ME.pid]


def test_a_pid_that_was_given_again_is_another_process(folder: str) -> None:
    registry.enter(Budgeted(Process(ME.pid, ME.start + 1), "b.yaml", True), folder)
    assert registry.every(folder) == []
    registry.leave(Process(ME.pid, ME.start + 1), folder)


def test_what_one_said_before_is_not_said_of_it_any_more(folder: str) -> None:
    one = lease(40)
    one.take()
    registry.enter(Budgeted(ME, "laptop.yaml", True, True), folder)
    registry.leave(ME, folder)  # the next budget has no `suspend`, and real GPUs
    assert registry.every(folder) == [Budgeted(ME, "laptop.yaml", False, False)]
    one.close()


def test_locks_that_were_removed_under_one_without_a_claim_keep_nobody_from_a_lease(folder: str, other: Any) -> None:
    os.unlink(os.path.join(folder, "leases.lock"))
    one = lease(40)
    one.take()
    assert one.held
    one.close()


def test_a_note_that_cannot_be_written_delays_a_start_by_seconds_only(folder: str, monkeypatch: Any) -> None:
    import sqlite3

    monkeypatch.setattr(registry, "_PATIENCE", 0.1)
    monkeypatch.setattr(registry, "_END", 0.1)
    registry.enter(Budgeted(ME, "b.yaml", False), folder)
    stopped = sqlite3.connect(os.path.join(folder, "leases.sqlite"), isolation_level=None)
    stopped.execute("BEGIN IMMEDIATE")
    try:
        for change in (
            lambda: registry.enter(Budgeted(ME, "b.yaml", True), folder),
            lambda: registry.leave(ME, folder),
        ):
            with pytest.raises(MemguardError, match=r"is in use by another process for 0 s"):
                change()
    finally:
        stopped.close()
    assert registry.every(folder) == [Budgeted(ME, "b.yaml", False)]


def test_who_cannot_open_the_locks_is_told_so(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.enter(Budgeted(ME, "b.yaml", False), folder)
    stat = os.stat

    def fails(path: Any, **more: Any) -> Any:
        if str(path).endswith("leases.lock"):
            raise OSError(errno.EMFILE, "Too many open files")
        return stat(path, **more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", fails)
        with pytest.raises(MemguardError, match=r"leases\.lock cannot be used: Too many open files\n    fix: "):
            registry.every(folder)


def test_a_registry_that_cannot_be_read_is_no_budget_that_forbids_it(folder: str) -> None:
    Path(folder, "leases.lock").touch(0o600)
    Path(folder, "leases.sqlite").write_bytes(b"this is no database" * 100)
    Path(folder, "leases.sqlite").chmod(0o600)
    assert records.budget_of(ME) is None
    text = remote_suspend._not_allowed(ME, True).text
    assert "cannot be read" in text and "is damaged" in text and "rm " in text
    for name in ("leases.sqlite", "leases.lock"):
        Path(folder, name).unlink()


def test_who_was_started_with_another_folder_is_not_brought_back_without_its_lease(
    folder: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, blocker = lease(60), lease(60)
    one.take()
    one.leave()
    blocker.take()
    assert "there is no room for it again" in remote_suspend._without_lease(ME)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    elsewhere.chmod(0o700)
    monkeypatch.setenv("MEMGUARD_LEASES", str(elsewhere))
    monkeypatch.setattr(records, "_environ", lambda pid: {"MEMGUARD_LEASES": folder})
    assert "there is no room for it again" in remote_suspend._without_lease(ME)
    blocker.close()
    assert remote_suspend._without_lease(ME) == ""
    one.close()

"""What is written down of suspended processes: whole or not at all, checked when read, and gone with the process."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from suspending import left

from memguard._base.units import GIB
from memguard._node.identity import Process, this_process
from memguard._node.leases.registry import Budgeted
from memguard._node.suspend.store import records, work_lock
from memguard._node.suspend.store.records import STEPS, Record
from memguard._node.suspend.store.work_lock import BusyError, Work

ME = this_process()
GONE = Process(ME.pid, ME.start + 1)
"""This PID, of a process that has ended."""
RECORD = Record(ME, "suspended", {"GPU-a": GIB}, 1_700_000_000.5, "asked", "python train.py", "b.yaml", True)


@pytest.fixture
def where(tmp_path: Path) -> str:
    return str(tmp_path)


def test_a_record_is_read_as_it_was_written(where: str) -> None:
    for step in STEPS:
        for sizes in (None, {}, {"GPU-a": 0, "GPU-b": 3 * GIB}):
            record = replace(RECORD, step=step, bytes=sizes, budget=None, measured=False)
            records.write(record, where)
            assert records.of(ME, where) == record
    records.write_budget(Budgeted(ME, "b.yaml", True), where)
    assert records.every(where) == [record] and records.budgets(where) == [Budgeted(ME, "b.yaml", True)]
    assert all(os.stat(os.path.join(where, name)).st_mode & 0o777 == 0o600 for name in os.listdir(where))
    for _ in range(2):
        records.remove(ME, where=where)
        records.remove_budget(ME, where)
    assert records.budgets(where) == []
    assert records.of(ME, where) is None and records.every(where) == []


def test_what_is_of_a_process_that_has_ended_is_removed(where: str) -> None:
    records.write(RECORD, where)
    records.write(replace(RECORD, process=GONE), where)
    records.write_budget(Budgeted(GONE, "b.yaml", False), where)
    (Path(where) / "turn-GPU-a").mkdir()
    (Path(where) / "notes.txt").write_text("not memguard's")
    assert records.every(where) == [RECORD] and records.budgets(where) == []
    records.remove_budget(GONE, where)
    assert left(where) == ["notes.txt", f"suspended-{ME.pid}-{ME.start}.json", "turn-GPU-a"]


def test_what_is_of_another_pid_namespace_is_left_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(records, "machine", lambda: "another")
        records.write(replace(RECORD, process=GONE), where)
        records.write(RECORD, where)
    assert records.every(where) == [] and records.of(ME, where) is None
    assert len(os.listdir(where)) == 2


def test_a_write_that_fails_leaves_what_was_there(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    records.write(RECORD, where)

    def fails(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(records.json, "dump", fails)
    with pytest.raises(OSError, match="no space"):
        records.write(replace(RECORD, step="lock"), where)
    assert records.of(ME, where) == RECORD and len(os.listdir(where)) == 1


def raw(where: str, **changes: Any) -> None:
    records.write(RECORD, where)
    path = Path(records.path_of(ME, where=where))
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"bytes": {"GPU-a": -1}},
        {"bytes": {"GPU-a": 1 << 70}},
        {"bytes": {"GPU-a": True}},
        {"bytes": {"GPU-a": 1.5}},
        {"bytes": {"../../etc": 1, "a b": 1}},
        {"bytes": [1]},
        {"step": "__import__('os')"},
        {"step": ["lock"]},
        {"since": float("nan")},
        {"since": float("inf")},
        {"since": -1},
        {"since": "now"},
        {"since": True},
        {"why": "because"},
        {"why": {}},
        {"command": 7},
        {"command": "x" * 5000},
        {"budget": ["b"]},
        {"measured": 1},
        {"pid": 1},
        {"pid": True},
        {"start": str(ME.start)},
        {"memguard_process": 2},
        {"more": 1},
    ],
)
def test_what_memguard_would_not_have_written_is_not_believed(where: str, changes: dict[str, Any]) -> None:
    raw(where, **changes)
    assert records.of(ME, where) is None and records.every(where) == []


def test_control_characters_do_not_get_out(where: str) -> None:
    raw(where, command="\x1b]0;owned\x07", budget="a\nb")
    found = records.of(ME, where)
    assert found is not None and found.command.isprintable() and str(found.budget).isprintable()


@given(st.binary(max_size=300))
def test_any_bytes_are_no_record(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as where:
        Path(records.path_of(ME, where=where)).write_bytes(data)
        assert records.of(ME, where) is None and records.every(where) == []


@pytest.mark.parametrize("data", [b"[" * 60_000, b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"\xff\xfe"])
def test_deep_long_and_broken_files(where: str, data: bytes) -> None:
    Path(records.path_of(ME, where=where)).write_bytes(data)
    assert records.of(ME, where) is None and records.every(where) == []


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "writable"])
def test_only_a_plain_file_of_this_user_is_read(where: str, kind: str) -> None:
    records.write(RECORD, where)
    path = Path(records.path_of(ME, where=where))
    if kind == "writable":
        path.chmod(0o666)
    elif kind == "link":
        path.rename(path.with_suffix(".other"))
        path.symlink_to(path.with_suffix(".other"))
    else:
        path.unlink()
        os.mkfifo(path) if kind == "fifo" else path.mkdir()
    assert records.of(ME, where) is None and records.every(where) == []


def test_another_users_file_is_not_read(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    records.write(RECORD, where)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert records.of(ME, where) is None


# Who works on a process.


def test_the_steps_off_and_back(where: str) -> None:
    with Work(ME, "asked", sizes=lambda: {"GPU-a": 5}, where=where) as work:
        work("state")
        assert records.of(ME, where) is None
        for step in ("lock", "settle", "checkpoint", "state"):
            work(step)
        found = records.of(ME, where)
        assert found is not None and (found.step, found.bytes, found.measured) == ("checkpoint", {"GPU-a": 5}, False)
        assert work_lock.worked_on(ME, where) == os.getpid()
        work.ended("suspended", {"GPU-a": 7})
    assert work_lock.worked_on(ME, where) is None
    off = records.of(ME, where)
    assert off is not None and (off.step, off.bytes, off.measured) == ("suspended", {"GPU-a": 7}, True)
    with Work(ME, "asked", where=where) as work:
        assert work.found == off
        work("state")
        work("room")
        assert records.of(ME, where) == replace(off, step="room")
        work.ended("suspended")  # no room
    assert records.of(ME, where) == off
    with Work(ME, "asked", where=where) as work:
        work("room")
        work("restore")
        work.ended("running")
    assert os.listdir(where) == []


def test_without_figures_those_before_stay(where: str) -> None:
    for none in (None, {}):
        with Work(ME, "unsafe", sizes=lambda: {"GPU-a": 5}, where=where) as work:
            work("lock")
            work.ended("suspended", none)
        found = records.of(ME, where)
        assert found is not None and (found.bytes, found.measured) == ({"GPU-a": 5}, False)


def test_untouched_leaves_anothers_record(where: str) -> None:
    records.write(RECORD, where)
    with Work(ME, "unsafe", where=where) as work:
        work("state")
        work.ended("untouched")
    assert records.of(ME, where) == RECORD
    with Work(ME, "unsafe", where=where) as work:
        work("lock")  # so it runs, and what was recorded is of one that was killed
        work.ended("untouched")
    assert records.of(ME, where) is None


def test_a_full_disk_prevents_the_lock_and_nothing_after_it(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError("no space left")

    with Work(ME, "asked", where=where) as work:
        with monkeypatch.context() as patched:
            patched.setattr(records, "_write", fails)
            with pytest.raises(OSError, match="no space"):
                work("lock")
        work("lock")
        with monkeypatch.context() as patched:
            patched.setattr(records, "_write", fails)
            for step in ("settle", "checkpoint", "state"):
                work(step)
            work.ended("suspended", {"GPU-a": 1})
            for step in ("room", "restore", "unlock"):
                work(step)
        work.ended("running")
    assert os.listdir(where) == []


def test_a_loss_stays_written_down(where: str) -> None:
    records.write(RECORD, where)
    with Work(ME, "asked", where=where) as work:
        work("restore")
        work.ended("lost")
    found = records.of(ME, where)
    assert found is not None and found.step == "lost"


def test_one_at_a_time(where: str) -> None:
    with Work(ME, "asked", where=where):
        with pytest.raises(BusyError, match=f"process {os.getpid()} is suspending or resuming it"):
            Work(ME, "asked", where=where).__enter__()
        with Work(GONE, "asked", where=where):
            pass
    with Work(ME, "asked", where=where):
        pass
    assert os.listdir(where) == []


def test_the_remedy_depends_on_who_is_at_it() -> None:
    """One that stands still within its own `resume` is brought back by nobody: to wait would be for ever."""
    own, other = (str(BusyError(ME, by)) for by in (ME.pid, 999))
    assert f"if it stands still (`py-spy dump --pid {ME.pid}`), only ending the process is left" in own
    assert "or end that command (`kill 999`)" in other and "py-spy" not in other and "kill" not in own


def test_who_waits_gets_it(where: str) -> None:
    import threading

    first = Work(ME, "asked", where=where)
    first.__enter__()
    threading.Timer(0.3, first.__exit__).start()
    with Work(ME, "asked", where=where, patience=10):
        pass


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_killed_worker_holds_nothing(where: str) -> None:
    pid = os.fork()
    if not pid:
        try:
            work = Work(ME, "asked", where=where)
            work.__enter__()
            work("lock")
            signal.pause()
        finally:
            os._exit(1)
    until = time.monotonic() + 10
    while records.of(ME, where) is None and time.monotonic() < until:
        time.sleep(0.01)
    assert work_lock.worked_on(ME, where) == pid
    work_lock.tidy(where)
    assert work_lock.worked_on(ME, where) == pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert work_lock.worked_on(ME, where) is None
    work_lock.tidy(where)
    assert len(os.listdir(where)) == 1  # the record
    with Work(ME, "asked", where=where) as work:
        assert work.found is not None and work.found.step == "lock"

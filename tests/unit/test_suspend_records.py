"""What is written down of suspended processes: whole or not at all, checked when read, and gone with the process."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from suspending import left

from memguard._base.units import GIB
from memguard._node.identity import Process, machine, this_process
from memguard._node.leases import folders, locks, store
from memguard._node.leases.registry import Budgeted
from memguard._node.leases.store import Store
from memguard._node.suspend.store import records, spare, work_lock
from memguard._node.suspend.store.records import STEPS, Record
from memguard._node.suspend.store.work_lock import BusyError, Work
from memguard.errors import MemguardError

ME = this_process()
GONE = Process(ME.pid, ME.start + 1)
"""This PID, of a process that has ended."""
RECORD = Record(ME, "suspended", {"GPU-a": GIB}, 1_700_000_000.5, "asked", "python train.py", "b.yaml", True)


@pytest.fixture
def where(tmp_path: Path) -> str:
    return str(tmp_path)


def rows(where: str) -> list[str]:
    connection = sqlite3.connect(os.path.join(where, "leases.sqlite"))
    try:
        return [text for (text,) in connection.execute("SELECT record FROM suspended")]
    finally:
        connection.close()


def nothing_is_left(where: str) -> bool:
    return left(where) == [] and rows(where) == [] and spare.read(where) == []


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
    assert left(where) == ["notes.txt", "turn-GPU-a"] and len(rows(where)) == 1


def test_what_is_of_another_pid_namespace_is_left_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(records, "machine", lambda: f"{machine().split()[0]} pid:[7]")
        records.write(replace(RECORD, process=GONE), where)
        records.write(RECORD, where)
    assert records.every(where) == [] and records.of(ME, where) is None
    assert len(rows(where)) == 2


def test_what_is_of_an_earlier_boot_is_removed_with_the_next_record(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(records, "machine", lambda: "another pid:[7]")
        records.write(replace(RECORD, process=GONE), where)
    assert records.every(where) == [] and len(rows(where)) == 1
    records.write(RECORD, where)
    assert records.every(where) == [RECORD] and len(rows(where)) == 1


@pytest.mark.parametrize(("first", "second"), [(None, ""), ("", None)], ids=["unknown here", "unknown there"])
def test_nothing_is_of_an_earlier_boot_where_the_boot_is_unknown(
    where: str, first: str | None, second: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may hide /proc/sys, and share the folder with processes that see it."""
    own = machine()

    def write(at: str | None, record: Record) -> None:
        monkeypatch.setattr(records, "machine", lambda: own if at is None else at)
        records.write(record, where)

    write(first, RECORD)
    write(second, replace(RECORD, process=Process(ME.pid + 1, 7)))
    assert len(rows(where)) == len(spare.read(where)) == 2
    monkeypatch.setattr(records, "machine", lambda: own if first is None else first)
    assert records.of(ME, where) == RECORD


def test_a_write_that_fails_leaves_what_was_there(where: str, nowhere: Callable[[], Any]) -> None:
    records.write(RECORD, where)
    with nowhere(), pytest.raises(OSError, match="No space"):
        records.write(replace(RECORD, step="lock"), where)
    assert records.of(ME, where) == RECORD and records.every(where) == [RECORD]


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Within it neither the database nor the file beside it can be written."""

    @contextlib.contextmanager
    def full() -> Iterator[None]:
        def fails(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def no_change(*_: object, **__: object) -> None:
            raise MemguardError("the database is full")

        with monkeypatch.context() as patched:
            patched.setattr(spare.os, "pwrite", fails)
            patched.setattr(Store, "change", no_change)
            yield

    return full


def message(**changes: Any) -> dict[str, Any]:
    """What memguard 0.1.0 wrote into a file of its own."""
    fields = {
        "memguard_process": 1, "pid": ME.pid, "start": ME.start, "machine": machine(), "step": RECORD.step,
        "bytes": dict(RECORD.bytes or {}), "since": RECORD.since, "why": RECORD.why, "command": RECORD.command,
        "budget": RECORD.budget, "measured": RECORD.measured,
    }  # fmt: skip
    return {**fields, **changes}


def file_of(where: str, data: bytes) -> Path:
    path = Path(records.path_of(ME, where=where))
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def row_of(where: str, text: Any) -> None:
    records.write(RECORD, where)
    Path(where, spare.NAME).unlink()
    connection = sqlite3.connect(os.path.join(where, "leases.sqlite"))
    connection.execute("UPDATE suspended SET record = ?", (text,))
    connection.commit()
    connection.close()


def slot_of(where: str, data: bytes) -> None:
    Path(where, spare.NAME).write_bytes(data.ljust(4096))
    Path(where, spare.NAME).chmod(0o600)


PLACES: dict[str, Callable[[str, bytes], object]] = {"file of 0.1.0": file_of, "table": row_of, "spare": slot_of}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_record_is_found_wherever_it_was_written(where: str, place: Callable[[str, bytes], object]) -> None:
    place(where, json.dumps(message()).encode())
    if place is row_of:
        row_of(where, json.dumps(message()))
    assert records.of(ME, where) == RECORD and records.every(where) == [RECORD]
    with Work(ME, "asked", where=where) as work:
        assert work.found == RECORD
        work("restore")
        assert records.every(where) == [replace(RECORD, step="restore")], "the newest counts"
        work.ended("running")
    assert nothing_is_left(where)


# A database that cannot be used.


@contextlib.contextmanager
def held(where: str) -> Iterator[None]:
    """Another program has the database for itself: nobody can read it."""
    connection = sqlite3.connect(os.path.join(where, "leases.sqlite"), isolation_level=None)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("BEGIN EXCLUSIVE")
        yield
    finally:
        connection.close()


@contextlib.contextmanager
def damaged(where: str) -> Iterator[None]:
    path = Path(where, "leases.sqlite")
    whole = path.read_bytes()
    path.write_bytes(b"this is no database" * 2000)
    yield
    path.write_bytes(whole)


@contextlib.contextmanager
def full(where: str) -> Iterator[None]:
    """As on a full disk: what has a place can be written, and SQLite can neither write nor read."""
    path = Path(where, "leases.sqlite")
    path.rename(path.with_suffix(".away"))
    path.mkdir()
    yield
    path.rmdir()
    path.with_suffix(".away").rename(path)


UNUSABLE = {one.__name__: one for one in (held, damaged, full)}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds for which the database was waited for."""
    seconds: list[float] = []
    monkeypatch.setattr(store.time, "sleep", seconds.append)
    return seconds


@pytest.mark.parametrize("unusable", UNUSABLE.values(), ids=UNUSABLE)
def test_a_process_leaves_and_comes_back_with_the_spare_file_alone(
    where: str, unusable: Callable[[str], Any], waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(store.time, "sleep", lambda seconds: (waits.append(seconds), clock.append(seconds)))
    monkeypatch.setattr(store.time, "monotonic", lambda: sum(clock))
    with Work(ME, "asked", sizes=lambda: {"GPU-a": 5}, where=where) as work:
        work("lock")
        work("checkpoint")
    with unusable(where):
        with Work(ME, "asked", where=where) as work:
            assert work.found is not None and (work.found.step, work.found.bytes) == ("checkpoint", {"GPU-a": 5})
            work.ended("suspended", {"GPU-a": 7})
        off = records.of(ME, where)
        assert off is not None and (off.step, off.bytes, off.measured) == ("suspended", {"GPU-a": 7}, True)
        assert records.every(where) == [off]
        with Work(ME, "asked", where=where) as work:
            assert work.found == off
            for step in ("room", "restore", "unlock"):
                work(step)
            work.ended("running")
        assert records.of(ME, where) is None and spare.read(where) == []
        assert sum(waits) <= 1.0
    records.remove(ME, where)
    assert nothing_is_left(where)


@pytest.mark.parametrize("unusable", UNUSABLE.values(), ids=UNUSABLE)
def test_a_record_of_before_is_found_although_the_database_cannot_be_read(
    where: str, unusable: Callable[[str], Any], waits: list[float]
) -> None:
    records.write(RECORD, where)
    with unusable(where):
        assert records.of(ME, where) == RECORD and records.every(where) == [RECORD]


def test_the_room_of_the_spare_file_is_reserved_and_slots_of_the_dead_are_used_again(where: str) -> None:
    records.write(RECORD, where)
    path = Path(where, spare.NAME)
    assert path.stat().st_blocks * 512 >= path.stat().st_size == 16 * 4096
    others = [Process(ME.pid, ME.start + 1 + number) for number in range(40)]
    for process in others:
        records.write(replace(RECORD, process=process, command="x" * 300), where)
    assert path.stat().st_size == 16 * 4096 and records.of(ME, where) == RECORD
    records.remove(ME, where)
    assert records.of(ME, where) is None


def test_more_processes_than_slots_have_records(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "lives", lambda process: True)
    many = [
        replace(RECORD, process=Process(pid, 1), command="\U0001f600" * 200, budget="é" * 200) for pid in range(1, 40)
    ]
    for record in many:
        records.write(record, where)
    with damaged(where):
        assert records.every(where) == many
    for record in many:
        records.remove(record.process, where)
    assert nothing_is_left(where)


def test_a_writer_that_was_stopped_holds_nobody_up_for_long(where: str, waits: list[float]) -> None:
    records.write(RECORD, where)
    file = locks.hold(os.path.join(where, "leases.lock"), (spare.SPARE,))
    assert file is not None
    records.write(replace(RECORD, step="room"), where)
    with damaged(where), pytest.raises(OSError, match="busy"):
        records.write(replace(RECORD, step="restore"), where)
    locks.release(file, (spare.SPARE,))
    assert records.of(ME, where) == replace(RECORD, step="room")


def test_who_only_reads_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("MEMGUARD_LEASES", str(tmp_path / "leases"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "TMPDIR"))
    assert records.of(ME) is None and work_lock.worked_on(ME) is None and records.budget_of(ME) is None
    assert records.every() == [] and records.budgets() == []
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["TMPDIR", "XDG_RUNTIME_DIR"]


# Folders that other processes name.


def test_a_record_is_found_in_the_folder_that_its_process_was_started_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(0o700)
    monkeypatch.setattr(records, "_environ", lambda pid: {"MEMGUARD_LEASES": str(elsewhere)})
    records.write(RECORD, str(elsewhere))
    assert records.of(ME) == RECORD and str(elsewhere) in records.databases(ME)


@pytest.mark.parametrize("wrong", ["group", "others", "link", "relative", "file", "network", "another user's"])
def test_a_folder_that_another_process_names_is_checked_as_strictly_as_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """In one that others may enter, anybody may have written the records and the claims."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(0o700)
    records.write(RECORD, str(elsewhere))
    if wrong in ("group", "others"):
        elsewhere.chmod(0o750 if wrong == "group" else 0o777)
    elif wrong == "link":
        elsewhere.rename(tmp_path / "real")
        elsewhere.symlink_to(tmp_path / "real")
    elif wrong == "relative":
        monkeypatch.chdir(tmp_path)
    elif wrong == "file":
        elsewhere.rename(tmp_path / "real")
        elsewhere.touch(0o700)
    elif wrong == "network":
        monkeypatch.setattr(folders, "_mounts", lambda: f"1 2 0:1 / {elsewhere} rw - nfs4 server:/x rw\n")
    else:
        lstat = os.lstat
        found = os.lstat(elsewhere)
        foreign = os.stat_result([*found[:4], found.st_uid + 1, *found[5:10]])
        monkeypatch.setattr(os, "lstat", lambda path: foreign if str(path) == str(elsewhere) else lstat(path))
    named = "elsewhere" if wrong == "relative" else str(elsewhere)
    monkeypatch.setattr(records, "_environ", lambda pid: {"MEMGUARD_LEASES": named})
    assert records.of(ME) is None and records.budget_of(ME) is None
    assert named not in records.databases(ME) and work_lock.worked_on(ME) is None


# What is not believed.


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
        {"since": 10**400},
        {"since": -(10**400)},
        {"bytes": {"GPU-a": 10**400}},
        {"written": -1},
        {"written": "now"},
        {"written": 1.5},
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
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_what_memguard_would_not_have_written_is_not_believed(
    where: str, changes: dict[str, Any], place: Callable[[str, Any], object]
) -> None:
    text = json.dumps(message(**changes))
    place(where, text if place is row_of else text.encode())
    assert records.of(ME, where) is None and records.every(where) == []


def test_control_characters_do_not_get_out(where: str) -> None:
    file_of(where, json.dumps(message(command="\x1b]0;owned\x07", budget="a\nb")).encode())
    found = records.of(ME, where)
    assert found is not None and found.command.isprintable() and str(found.budget).isprintable()


@given(st.binary(max_size=300))
def test_any_bytes_are_no_record(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as where:
        for place in (file_of, slot_of):
            place(where, data)
        assert records.of(ME, where) is None and records.every(where) == []


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("data", [b"[" * 60_000, b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"\xff\xfe"])
def test_deep_long_and_broken_records(where: str, data: bytes, place: Callable[[str, bytes], object]) -> None:
    place(where, data)
    if place is row_of:
        row_of(where, data.decode("latin-1"))
    assert records.of(ME, where) is None and records.every(where) == []


@pytest.mark.parametrize("place", [file_of, slot_of])
@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "writable"])
def test_only_a_plain_file_of_this_user_is_read(where: str, kind: str, place: Callable[[str, bytes], object]) -> None:
    place(where, json.dumps(message()).encode())
    (path,) = Path(where).iterdir()
    if kind == "writable":
        path.chmod(0o666)
    elif kind == "link":
        path.rename(path.with_suffix(".other"))
        path.symlink_to(path.with_suffix(".other"))
    else:
        path.unlink()
        os.mkfifo(path) if kind == "fifo" else path.mkdir()
    assert records.of(ME, where) is None and records.every(where) == []


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_another_users_file_is_not_read(
    where: str, monkeypatch: pytest.MonkeyPatch, place: Callable[[str, Any], object]
) -> None:
    text = json.dumps(message())
    place(where, text if place is row_of else text.encode())
    assert records.of(ME, where) == RECORD
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
    assert left(where) == []


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


def test_a_full_disk_prevents_the_lock_and_nothing_after_it(where: str, nowhere: Callable[[], Any]) -> None:
    with Work(ME, "asked", where=where) as work:
        with nowhere(), pytest.raises(OSError, match="No space"):
            work("lock")
        work("lock")
        with nowhere():
            for step in ("settle", "checkpoint", "state"):
                work(step)
            work.ended("suspended", {"GPU-a": 1})
            for step in ("room", "restore", "unlock"):
                work(step)
        work.ended("running")
    assert nothing_is_left(where)


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
    assert left(where) == []


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
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert work_lock.worked_on(ME, where) is None and left(where) == [] and len(records.every(where)) == 1
    with Work(ME, "asked", where=where) as work:
        assert work.found is not None and work.found.step == "lock"

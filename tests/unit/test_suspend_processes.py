"""What `memguard ps` lists: from NVML, the records and `/proc`, each of which may say nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from memguard._base.units import GIB
from memguard._devices.checkpoint import IN_PROGRESS, State
from memguard._node import identity
from memguard._node.identity import Process, this_process
from memguard._node.leases.registry import Budgeted
from memguard._node.suspend import processes
from memguard._node.suspend.driver.channel import Answer
from memguard._node.suspend.processes import Gpu, Person, Readings, candidates, listing
from memguard._node.suspend.store import records
from memguard._node.suspend.store.records import Record
from memguard.cli.ps import table

A, B = "GPU-a", "GPU-b"
ONE, TWO, OFF = Process(11, 5), Process(12, 6), Process(13, 7)
PEOPLE = {
    11: Person(5, "alice", "python train.py"),
    12: Person(6, "bob", "vllm serve"),
    13: Person(7, "alice", "jupyter"),
}
RECORD = Record(OFF, "suspended", {A: 4 * GIB}, 1000.0, "by_others", "jupyter", "b.yaml", True)
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["memguard_processes", "gpus", "processes", "notes"],
    "properties": {
        "memguard_processes": {"const": 1},
        "notes": {"type": "array", "items": {"type": "string"}},
        "gpus": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["uuid", "index", "name", "total", "used", "free"],
                "properties": {
                    **{key: {"type": "string"} for key in ("uuid", "name")},
                    **{key: {"type": ["integer", "null"]} for key in ("index", "total", "used", "free")},
                },
            },
        },
        "processes": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["pid", "start", "state", "bytes", "utilisation", "budget", "by_others", "user", "command"],
                "properties": {
                    "pid": {"type": "integer"},
                    "bytes": {"type": "object", "additionalProperties": {"type": ["integer", "null"]}},
                    "utilisation": {"type": ["integer", "null"], "minimum": 0, "maximum": 100},
                    "by_others": {"type": ["boolean", "null"]},
                    "since": {"type": ["number", "null"]},
                    "state": {"enum": ["running", "locked", "suspended", "failed", "unknown"]},
                    "step": {"enum": [*records.STEPS, None]},
                    "why": {"enum": ["asked", "idle", "by_others", "unsafe", None]},
                    **{key: {"type": ["string", "null"]} for key in ("user", "command", "budget")},
                    **{key: {"type": ["integer", "null"]} for key in ("start", "worker")},
                },
            },
        },
    },
}


def gpu(processes: Mapping[int, int | None], busy: Mapping[int, int] | None = None, uuid: str = A, **more: Any) -> Gpu:
    used = more.get("used", sum(size or 0 for size in processes.values()))
    return Gpu(uuid, 0 if uuid == A else 1, "H200", 140 * GIB, used, 140 * GIB - (used or 0), processes, busy)


def test_who_is_on_the_gpus_and_who_is_off() -> None:
    gpus = (gpu({11: GIB, 12: 9 * GIB}, {12: 80}), gpu({11: 2 * GIB}, {11: 5}, B))
    read = Readings(gpus, PEOPLE, (RECORD,), (Budgeted(ONE, "b.yaml", True),), {OFF: State.CHECKPOINTED})
    found = listing(read)
    assert [row.pid for row in found.rows] == [12, 13, 11]
    busy = {row.pid: row.busy for row in found.rows}
    assert busy == {11: 5, 12: 80, 13: None}
    assert {row.pid: (row.budget, row.by_others) for row in found.rows} == {
        11: ("b.yaml", True),
        12: (None, None),
        13: ("b.yaml", None),
    }
    off = found.of(13)
    assert off is not None and (off.state, off.bytes, off.since, off.why) == (
        "suspended",
        {A: 4 * GIB},
        1000.0,
        "by_others",
    )
    one = found.of(11)
    assert one is not None and one.bytes == {A: GIB, B: 2 * GIB} and one.state == "running" and one.start == 5


def test_unknown_is_never_nothing() -> None:
    found = listing(Readings((gpu({11: None}, None, used=None),), {}))
    (row,) = found.rows
    assert (row.bytes, row.busy, row.budget, row.start, row.user) == ({A: None}, None, None, None, "")
    text = table(found, 0, {})
    assert text.splitlines()[1].split() == [
        "11",
        "unknown",
        "0:",
        "unknown",
        "unknown",
        "unknown",
        "unknown",
        "running",
        "unknown",
    ]
    assert found.as_dict()["processes"][0]["user"] is None


def test_without_a_record_a_suspended_process_is_listed_without_figures() -> None:
    (row,) = listing(Readings((gpu({}),), PEOPLE, (), (), {OFF: State.CHECKPOINTED})).rows
    assert (row.state, row.bytes, row.since, row.command) == ("suspended", {}, None, "jupyter")


@pytest.mark.parametrize(
    ("state", "says"),
    [*((state, "locked") for state in (State.LOCKED, *IN_PROGRESS)), (State.FAILED, "failed"), (None, "unknown")],
)
def test_what_the_driver_says_counts_more_than_the_record(state: State | None, says: str) -> None:
    (row,) = listing(Readings((gpu({}),), PEOPLE, (RECORD,), (), {OFF: state})).rows
    assert row.state == says


def test_a_record_of_one_that_runs_is_of_somebody_who_was_killed() -> None:
    read = Readings((gpu({13: GIB}),), PEOPLE, (RECORD,), (), {OFF: State.RUNNING})
    (row,) = listing(read).rows
    assert (row.state, row.step, row.since, row.bytes) == ("running", None, None, {A: GIB})
    read = Readings((gpu({13: GIB}),), PEOPLE, (RECORD,), (), {OFF: State.RUNNING}, {OFF: 99})
    (row,) = listing(read).rows
    assert (row.state, row.step, row.worker) == ("running", "suspended", 99)
    assert "running (suspended by 99)" in table(listing(read), 0, {})


def test_another_process_with_the_same_pid_has_none_of_it() -> None:
    read = Readings((gpu({13: GIB}),), {13: Person(8, "bob", "other")}, (RECORD,), (Budgeted(OFF, "b", True),))
    row = next(row for row in listing(read).rows if row.start == 8)
    assert (row.state, row.budget, row.step) == ("running", None, None)


def test_memory_that_nobody_is_listed_for_is_said() -> None:
    (note,) = listing(Readings((gpu({11: GIB}, used=9 * GIB),), PEOPLE)).notes
    assert "8.00 GiB" in note and "another container" in note
    assert listing(Readings((gpu({11: None}, used=9 * GIB),), PEOPLE)).notes == ()


def test_the_table() -> None:
    gpus = (gpu({11: GIB, 12: 9 * GIB}, {12: 80}),)
    found = listing(Readings(gpus, PEOPLE, (RECORD,), (), {OFF: State.CHECKPOINTED}))
    assert table(found, 1000 + 7200, {11: 512 << 20}).splitlines() == [
        "PID  USER   GPU MEMORY   RECLAIMABLE  BUSY     BUDGET   STATE              COMMAND",
        "12   bob    0: 9.00 GiB  unknown      80%      unknown  running            vllm serve",
        "13   alice  0: 4.00 GiB  unknown      unknown  b.yaml   suspended for 2 h  jupyter",
        "11   alice  0: 1.00 GiB  512.0 MiB    0%       unknown  running            python train.py",
    ]
    assert table(listing(Readings((), {})), 0, {}) == "no process with GPU memory is seen here"


SIZES = st.none() | st.integers(0, 200 * GIB)
MANY = st.dictionaries(st.integers(11, 14), SIZES, max_size=4)


@given(
    MANY,
    MANY,
    st.none() | st.dictionaries(st.integers(11, 14), st.integers(0, 100)),
    st.dictionaries(st.sampled_from([ONE, TWO, OFF]), st.sampled_from([*State, None])),
    st.lists(st.sampled_from(records.STEPS), max_size=3),
    st.booleans(),
)
def test_any_readings_make_a_listing(
    first: dict[int, int | None],
    second: dict[int, int | None],
    busy: dict[int, int] | None,
    states: dict[Process, State | None],
    steps: list[str],
    known: bool,
) -> None:
    recorded = tuple(
        Record(process, step, None, 5.0, "asked") for process, step in zip([ONE, TWO, OFF], steps, strict=False)
    )
    read = Readings((gpu(first, busy), gpu(second, None, B)), PEOPLE if known else {}, recorded, (), states)
    found = listing(read)
    Draft202012Validator(SCHEMA).validate(json.loads(json.dumps(found.as_dict())))
    assert table(found, 100.0, {})
    listed = {*first, *second}
    assert listed <= {row.pid for row in found.rows}
    assert len({(row.pid, row.start) for row in found.rows}) == len(found.rows)
    for process, state in states.items():
        if state is State.CHECKPOINTED and process.pid not in listed:
            row = found.of(process.pid)
            assert row is not None and row.state == "suspended"


# Reading: a fabricated /proc, NVML's stand-in.

_CUDA = "7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/libcuda.so.580.1\n"
_ON = "7f02-7f03 rw-s 00000000 00:05 2 /dev/nvidiactl\n7f04-7f05 rw-s 00000000 00:05 3 /dev/nvidia0\n"


def process(root: Path, pid: int, maps: str | None, state: str = "S") -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} (a ) b) {state} 1 " + " ".join(["0"] * 17) + f" {pid * 10} 0 0\n")
    if maps is not None:
        (folder / "maps").write_text(maps)


def test_what_looks_suspended_in_proc(tmp_path: Path) -> None:
    process(tmp_path, 21, _CUDA)
    process(tmp_path, 22, _CUDA + _ON)  # runs
    process(tmp_path, 23, "7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/libc.so.6\n")
    process(tmp_path, 24, None)  # another user's
    process(tmp_path, 25, _CUDA, "Z")
    process(tmp_path, 26, _CUDA)  # NVML lists it
    process(tmp_path, 27, _CUDA.replace(".1\n", ".1 (deleted)\n"))
    (tmp_path / "proc" / "self").mkdir()
    assert sorted(candidates(str(tmp_path), {26})) == [Process(21, 210), Process(27, 270)]


class Door:
    """Says what it is told of each PID, and counts."""

    def __init__(self, answers: dict[int, Answer]) -> None:
        self.answers, self.asked = answers, list[int]()

    def state(self, process: Process, limit: float = 10.0) -> Answer:
        self.asked.append(process.pid)
        return self.answers[process.pid]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> dict[int, int | None]:
    listed: dict[int, int | None] = {}
    monkeypatch.setattr(processes, "_gpus", lambda: (gpu(listed),))
    return listed


def test_the_driver_is_only_asked_if_it_has_to_be(tmp_path: Path, nvml: dict[int, int | None]) -> None:
    process(tmp_path, 22, _CUDA + _ON)
    where = tmp_path / "folder"
    where.mkdir(0o700)

    def door() -> Any:
        raise AssertionError("a helper is not needed")

    nvml[os.getpid()] = GIB
    read = processes.read(door, str(tmp_path), str(where))
    (row,) = listing(read).rows
    assert row.pid == os.getpid() and row.start == this_process().start and row.user and row.command


def test_states_that_the_driver_gives_or_not(
    tmp_path: Path, nvml: dict[int, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid in (21, 22, 23, 24, 25):
        process(tmp_path, pid, _CUDA)
    monkeypatch.setattr(identity, "stopped", lambda one: one.pid == 24)
    door = Door(
        {
            21: Answer(0, State.CHECKPOINTED),
            22: Answer(3),  # it has libcuda, and has not begun with CUDA
            23: Answer(None, trouble="timeout"),
            25: Answer(None, trouble="ended"),
        }
    )
    where = tmp_path / "folder"
    where.mkdir(0o700)
    found = listing(processes.read(lambda: door, str(tmp_path), str(where)))  # type: ignore[arg-type,return-value]
    assert sorted(door.asked) == [21, 22, 23, 25]
    assert [(row.pid, row.state) for row in found.rows] == [(21, "suspended")]
    assert any("23" in note and "did not say" in note for note in found.notes)
    assert any("24 is stopped" in note for note in found.notes)


def test_what_one_that_was_killed_left_behind_is_removed(tmp_path: Path, nvml: dict[int, int | None]) -> None:
    where, me = str(tmp_path), this_process()
    (tmp_path / "proc").mkdir()
    records.write(Record(me, "lock", {A: GIB}, 5.0, "asked"), where)
    nvml[me.pid] = GIB
    door = Door({me.pid: Answer(0, State.RUNNING)})
    found = listing(processes.read(lambda: door, str(tmp_path), where))  # type: ignore[arg-type,return-value]
    assert [row.state for row in found.rows] == ["running"] and records.of(me, where) is None
    records.write(Record(me, "suspended", {A: GIB}, 5.0, "asked"), where)
    nvml.clear()
    door.answers[me.pid] = Answer(0, State.CHECKPOINTED)
    found = listing(processes.read(lambda: door, str(tmp_path), where))  # type: ignore[arg-type,return-value]
    assert [row.state for row in found.rows] == ["suspended"] and records.of(me, where) is not None


def test_a_folder_that_cannot_be_trusted_is_a_note(
    tmp_path: Path, nvml: dict[int, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memguard").mkdir()
    (tmp_path / "memguard").chmod(0o777)
    (tmp_path / "proc").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    nvml[11] = GIB
    found = listing(processes.read(lambda: Door({}), str(tmp_path)))  # type: ignore[arg-type,return-value]
    assert len(found.rows) == 1 and "cannot be trusted" in found.notes[0]

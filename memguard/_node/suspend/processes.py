"""The processes with GPU memory, for `memguard ps`: those that NVML lists, and those that are off their GPUs.

A suspended process leaves NVML's list. It is found by its record, and by what it has mapped: libcuda, and none of the
driver's device files. The driver is asked for its state then, through the helper process.

It sees what the kernel shows: no processes of other containers or PID namespaces, and of other users those on a GPU, by
NVML. Who else's process is suspended, or runs under a budget, stays unknown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from memguard._base.units import format_size
from memguard._devices import proc
from memguard._devices.checkpoint import State
from memguard._devices.nvml import Nvml
from memguard._node import identity
from memguard._node.identity import Process
from memguard._node.leases.registry import Budgeted
from memguard._node.suspend import requests
from memguard._node.suspend.driver.channel import CheckpointChannel
from memguard._node.suspend.store import records, work_lock
from memguard._node.suspend.store.records import Record
from memguard.errors import DeviceError, MemguardError

SCHEMA = 1
At = Literal["running", "locked", "suspended", "failed", "unknown"]
_AT: Mapping[State | None, At] = {
    State.RUNNING: "running",
    State.LOCKED: "locked",
    State.CHECKPOINTED: "suspended",
    State.FAILED: "failed",
    State.CHECKPOINTING: "locked",
    State.RESTORING: "locked",
    None: "unknown",
}
STATE, STATES = 3.0, 20.0
"""Seconds in which the driver must say a process's state, and all of them."""
_HELPER = "from memguard._node.suspend.driver import helper"


@dataclass(frozen=True)
class Gpu:
    """One GPU by NVML, in bytes. `used`, and what a process has, is None where NVML does not say. `busy` in percent."""

    uuid: str
    index: int
    name: str
    total: int
    used: int | None
    free: int
    processes: Mapping[int, int | None]
    busy: Mapping[int, int] | None = None


class Person(NamedTuple):
    """What `/proc` says of a process; empty or None where it cannot be read."""

    start: int | None
    user: str
    command: str


@dataclass(frozen=True)
class Row:
    """One process. `start` as in `Process`, None if it cannot be read.

    `bytes` by GPU (UUID): on the GPU, or, of a suspended process, what it needs to come back. `busy` is its largest
    utilisation of a GPU in percent. `budget` and `by_others` are None where nobody knows whether it has one.
    `step` is where it was left, or is, on its way (`records.STEPS`), `since` Unix time. `worker`: the PID of who
    suspends or resumes it just now.
    """

    pid: int
    start: int | None
    user: str
    command: str
    bytes: Mapping[str, int | None]
    busy: int | None
    budget: str | None
    by_others: bool | None
    state: At
    step: str | None = None
    since: float | None = None
    why: str | None = None
    worker: int | None = None

    @property
    def total(self) -> int:
        return sum(size or 0 for size in self.bytes.values())

    def as_dict(self) -> dict[str, Any]:
        return {
            "pid": self.pid,
            "start": self.start,
            "user": self.user or None,
            "command": self.command or None,
            "bytes": dict(self.bytes),
            "utilisation": self.busy,
            "budget": self.budget,
            "by_others": self.by_others,
            "state": self.state,
            "step": self.step,
            "since": self.since,
            "why": self.why,
            "worker": self.worker,
        }


@dataclass(frozen=True)
class Readings:
    """All that was read, for `listing`. `states`: what the driver said; None if it did not, in time."""

    gpus: tuple[Gpu, ...]
    people: Mapping[int, Person]
    records: tuple[Record, ...] = ()
    budgets: tuple[Budgeted, ...] = ()
    states: Mapping[Process, State | None] = field(default_factory=dict)
    workers: Mapping[Process, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Listing:
    gpus: tuple[Gpu, ...]
    rows: tuple[Row, ...]
    unread: tuple[str, ...]
    """What could not be read."""
    unlisted: tuple[str, ...] = ()
    """What each GPU has in use that belongs to no process in the list."""

    @property
    def notes(self) -> tuple[str, ...]:
        return *self.unread, *self.unlisted

    def of(self, pid: int) -> Row | None:
        return next((row for row in self.rows if row.pid == pid), None)

    def as_dict(self) -> dict[str, Any]:
        keys = ("uuid", "index", "name", "total", "used", "free")
        return {
            "memguard_processes": SCHEMA,
            "gpus": [{key: getattr(gpu, key) for key in keys} for gpu in self.gpus],
            "processes": [row.as_dict() for row in self.rows],
            "notes": list(self.notes),
        }


def listing(read: Readings) -> Listing:
    """Who has GPU memory, most first, and who is off its GPUs. Pure."""
    recorded = {record.process: record for record in read.records}
    budgets = {found.process: found for found in read.budgets}
    listed: dict[int, dict[str, int | None]] = {}
    for gpu in read.gpus:
        for pid, size in gpu.processes.items():
            listed.setdefault(pid, {})[gpu.uuid] = size
    off = {
        process
        for process in {*recorded, *read.states}
        if read.states.get(process) is not State.RUNNING and process.pid not in listed
    }
    rows = []
    for pid, sizes in listed.items():
        start = read.people[pid].start if pid in read.people else None
        process = None if start is None else Process(pid, start)
        rows.append(_row(read, pid, process, sizes, recorded.get(process), budgets.get(process)))  # type: ignore[arg-type]
    for process in off:
        record = recorded.get(process)
        sizes = dict(record.bytes or {}) if record is not None else {}
        rows.append(_row(read, process.pid, process, sizes, record, budgets.get(process)))
    rows.sort(key=lambda row: (-row.total, row.pid))
    return Listing(read.gpus, tuple(rows), read.notes, _unlisted(read.gpus))


def _row(
    read: Readings,
    pid: int,
    process: Process | None,
    sizes: Mapping[str, int | None],
    record: Record | None,
    budget: Budgeted | None,
) -> Row:
    person = read.people.get(pid, Person(None, "", ""))
    listed = any(pid in gpu.processes for gpu in read.gpus)
    state: At = "running"
    if process is not None and (process in read.states or not listed):
        state = _AT[read.states.get(process)]
        if state == "unknown" and listed:
            state = "locked" if record is not None else "running"
    if state == "running":
        worker = read.workers.get(process) if process is not None else None
        record = record if worker is not None else None  # what one that was killed left behind
    return Row(
        pid,
        person.start if process is None else process.start,
        person.user,
        person.command or (record.command if record is not None else ""),
        dict(sizes),
        _busy(pid, read.gpus) if state == "running" else None,
        budget.budget if budget is not None else record.budget if record is not None else None,
        budget.by_others if budget is not None else None,
        state,
        record.step if record is not None else None,
        record.since if record is not None else None,
        record.why if record is not None else None,
        read.workers.get(process) if process is not None else None,
    )


def _busy(pid: int, gpus: Iterable[Gpu]) -> int | None:
    """Of the GPUs that it is on; None if none of them says."""
    said = [gpu.busy.get(pid, 0) for gpu in gpus if pid in gpu.processes and gpu.busy is not None]
    return max(said, default=None)


def _unlisted(gpus: Iterable[Gpu]) -> tuple[str, ...]:
    sizes = [(gpu.index, proc.unlisted(gpu.processes, gpu.used)) for gpu in gpus]
    return tuple(f"GPU {index}: {format_size(size)} belong to {proc.UNLISTED}" for index, size in sizes if size)


# Reading.


def read(door: Callable[[], CheckpointChannel], root: str = "/", where: str | None = None) -> Readings:
    """Raises DeviceError without NVML. `door` is opened only if the driver has to be asked."""
    gpus = _gpus()
    known, budgets, unsafe, unread = list[Record](), list[Budgeted](), "", ""
    try:
        known = records.every(where)
        requests.tidy(where)
    except (OSError, MemguardError) as error:
        unsafe = f"what processes have said of themselves is not read: {_line(error)}"
    try:
        budgets = records.budgets(where)
    except (OSError, MemguardError) as error:
        unread = "" if unsafe else f"which processes run under a budget is not read: {_line(error)}"
    listed = {pid for gpu in gpus for pid in gpu.processes}
    silent = candidates(root, listed | {os.getpid()})
    if not unsafe:  # those that were started elsewhere may have said it elsewhere
        others = [*silent, *(process for pid in listed if (process := identity.process_of(pid)) is not None)]
        have = {record.process for record in known}, {found.process for found in budgets}
        known += [one for process in others if process not in have[0] and (one := records.of(process, where))]
        budgets += [
            found for process in others if process not in have[1] and (found := records.budget_of(process, where))
        ]
    recorded = {record.process for record in known}
    states, notes = _states(door, [*recorded, *(one for one in silent if one not in recorded)])
    shown = {process for process, state in states.items() if process in recorded or state is not None}
    states = {process: states[process] for process in shown}
    workers = {process: by for process in recorded if (by := work_lock.worked_on(process, where)) is not None}
    for record in known:  # nobody is at it, and it runs: who began it was killed, or could not remove it
        left = states.get(record.process) is State.RUNNING and record.process not in workers
        if left and records.of(record.process, where) == record:
            records.remove(record.process, where=where)
    people = {pid: person(pid) for pid in listed | {process.pid for process in shown}}
    notes += [note for note in (unsafe, unread) if note]
    return Readings(gpus, people, tuple(known), tuple(budgets), states, workers, tuple(notes))


def _gpus() -> tuple[Gpu, ...]:
    nvml = Nvml()
    try:
        return gpus_of(nvml)
    finally:
        nvml.close()


def gpus_of(nvml: Nvml, busy: bool = True) -> tuple[Gpu, ...]:
    """Every GPU; without the processes' utilisation unless `busy`. Raises DeviceError."""
    found = []
    for device in nvml.devices():
        memory = nvml.memory(device.uuid)
        listed = nvml.processes(device.uuid)
        try:
            used = nvml.utilisation(device.uuid) if busy else None
        except DeviceError:
            used = None
        total, free = memory.total or 0, memory.free or 0
        found.append(Gpu(device.uuid, device.index, device.name, total, memory.used, free, listed, used))
    return tuple(found)


def person(pid: int) -> Person:
    command = "memguard (room for a restore)" if is_helper(pid) else proc.command(pid)
    return Person(identity.start_of(pid), proc.owner(pid), command)


def is_helper(pid: int, root: str = "/") -> bool:
    """Whether it is a helper process of memguard's, whose context is a placeholder's."""
    return _HELPER in (proc.text(proc.path_of(root, pid, "cmdline")) or "")


def candidates(root: str, without: Collection[int]) -> list[Process]:
    """Processes that have CUDA's driver and no GPU mapped: suspended ones, or such that have not begun with CUDA."""
    found = []
    for name in os.listdir(os.path.join(root, "proc")):
        if not (name.isascii() and name.isdecimal()) or int(name) in without:
            continue
        maps = proc.maps(root, int(name))
        if maps is None or maps.driver is None or maps.gpu:
            continue
        stat = proc.stat(root, int(name))
        if stat is not None and stat.state not in "ZX":
            found.append(Process(int(name), stat.start))
    return found


def _line(error: OSError | MemguardError) -> str:
    return error.advice.line() if isinstance(error, MemguardError) else str(error)


def _states(
    door: Callable[[], CheckpointChannel], asked: list[Process]
) -> tuple[dict[Process, State | None], list[str]]:
    """What the driver says of each, None where it does not say in time. Those that have no CUDA are left out."""
    found: dict[Process, State | None] = {}
    notes: list[str] = []
    if not asked:
        return found, notes
    until = time.monotonic() + STATES
    client = door()
    for process in asked:
        found[process] = None
        if identity.stopped(process):  # the driver would wait for it for ever
            notes.append(f"process {process.pid} is stopped (kill -CONT {process.pid}): the driver does not answer")
            continue
        if time.monotonic() > until:
            notes.append(f"process {process.pid}: not asked, as the others took {STATES:.0f} s")
            continue
        answer = client.state(process, STATE)
        found[process] = answer.state
        if answer.trouble == "start":
            notes.append(f"the driver cannot be asked: {answer.text or 'no helper'}")
            break
        if answer.trouble == "timeout":
            notes.append(f"process {process.pid}: the driver did not say its state within {STATE:.0f} s")
        if answer.trouble == "ended":
            del found[process]
    return found, notes

"""What is known of suspended processes beside the driver, one record each, in the database of the leases.

It is written before a process is locked, with each step, and removed when the process runs again, so that whoever comes
later knows what was going on: `memguard ps`, and `memguard resume PID` after the one who did it was killed. A lock
(`work_lock`) says whether that one still lives; the kernel takes it away with its owner.

The database may be held by another process, damaged, or on a full disk. So one file beside it has a copy of each
record (`spare`): either is enough, and nobody waits for the database longer than `Store.read_soon` does. Records are
read from both, and from the files of a process that runs memguard 0.1.0, which had one file each; the newest of a
process counts.

Which processes run under a budget is in the same database (`_node.leases.registry`).

Only files of this user that nobody else can write are read, and every value is checked: nothing in them is executed or
taken for a path. A record of a process that has ended is removed by whoever sees it; one of another PID namespace,
whose PIDs mean nothing here, is left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from memguard._base.logs import log as _log
from memguard._base.text import visible
from memguard._base.units import is_whole
from memguard._node.identity import Process, folder, lives, machine
from memguard._node.leases import registry
from memguard._node.leases.folders import VARIABLE, refuse_network, trusted
from memguard._node.leases.folders import folder as leases
from memguard._node.leases.locks import File
from memguard._node.leases.registry import Budgeted
from memguard._node.leases.store import Store
from memguard._node.suspend.store import spare
from memguard._node.suspend.types import Why
from memguard.errors import MemguardError

if TYPE_CHECKING:
    from sqlite3 import Connection

LIMIT = 64 * 1024
"""Bytes of a record at most."""
STEPS = ("lock", "settle", "checkpoint", "suspended", "room", "restore", "unlock", "lost")
"""`suspended` and `lost` are how it ended, the others what was just being done."""
_VERSION = 1
_LONGEST = 200
"""Characters of a command or a budget's name."""
_UUID = re.compile(r"[A-Za-z0-9./-]{1,100}", re.ASCII)
_MOST_PID = 1 << 31
_PREFIX = "suspended"
_NAME = re.compile(_PREFIX + r"-([0-9]{1,10})-([0-9]{1,19})\.json", re.ASCII)
"""The files of memguard 0.1.0."""
_TABLE = """
CREATE TABLE IF NOT EXISTS suspended (
    machine TEXT NOT NULL,
    pid INTEGER NOT NULL,
    start INTEGER NOT NULL,
    record TEXT NOT NULL,
    PRIMARY KEY (machine, pid, start)
)
"""
_THERE = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'suspended'"
_ROWS = f"SELECT record FROM suspended WHERE typeof(record) = 'text' AND length(record) <= {LIMIT} LIMIT 10000"
_PUT = "INSERT OR REPLACE INTO suspended VALUES (?, ?, ?, ?)"
_DROP = "DELETE FROM suspended WHERE machine = ? AND pid = ? AND start = ?"
_OF_ANOTHER_BOOT = "DELETE FROM suspended WHERE machine != '' AND substr(machine, 1, ?) != ?"


@dataclass(frozen=True)
class Record:
    """A process that is off its GPUs, or on its way. `step` is one of STEPS, `since` Unix time.

    `bytes` by GPU (UUID) that it needs to come back, None if nobody knows; unless `measured`, they are what NVML listed
    for it before, which is a little less. `command` and `budget` are for people.
    """

    process: Process
    step: str
    bytes: Mapping[str, int] | None
    since: float
    why: Why
    command: str = ""
    budget: str | None = None
    measured: bool = False


def path_of(process: Process, where: str) -> str:
    """The file of memguard 0.1.0."""
    return os.path.join(where, f"{_PREFIX}-{process.pid}-{process.start}.json")


def write(record: Record, where: str | None = None) -> None:
    """All of it or nothing. Raises OSError if it can be written nowhere, or MemguardError if the folder is not safe."""
    place, process = where or own(), record.process
    message = {
        "memguard_process": _VERSION,
        **process._asdict(),
        "machine": machine(),
        "written": time.monotonic_ns(),
        "step": record.step,
        "bytes": None if record.bytes is None else dict(record.bytes),
        "since": record.since,
        "why": record.why,
        "command": record.command[:_LONGEST],
        "budget": record.budget and record.budget[:_LONGEST],
        "measured": record.measured,
    }
    unwritten: OSError | None = None
    try:
        spare.write(place, message, lambda found: _is(found, process), _dead)
    except OSError as error:
        unwritten = error
    try:
        _into_table(place, message)
    except MemguardError as error:
        _log.debug("the record of process %d is in %s alone: %s", process.pid, spare.NAME, error)
        if unwritten is not None:
            raise unwritten from None
    with contextlib.suppress(OSError):
        os.unlink(path_of(process, place))


def write_budget(found: Budgeted, where: str | None = None) -> None:
    """It is known as long as this process lives, and until `remove_budget`. Raises MemguardError."""
    registry.enter(found, where or leases())


def remove(process: Process, where: str | None = None) -> None:
    """Nothing happens if there is none."""
    for place in _places(process, where):
        try:
            _out_of_table(place, [(machine(), *process)])
        except MemguardError as error:  # whoever reads it sees that the process runs
            _log.debug("the record of process %d stays in %s: %s", process.pid, place, error)
        _remove_files(place, process)


def remove_budget(process: Process, where: str | None = None) -> None:
    """Nothing happens if there is none."""
    for place in _places(process, where):
        with contextlib.suppress(OSError, MemguardError):
            refuse_network(place)
            registry.leave(process, place)


def of(process: Process, where: str | None = None) -> Record | None:
    """What is known of a process; None if nothing is."""
    for place in _places(process, where):
        if found := _known(place, process):
            return found[process]
    return None


def budget_of(process: Process, where: str | None = None) -> Budgeted | None:
    for place in _places(process, where):
        with contextlib.suppress(OSError, MemguardError):
            refuse_network(place)
            for found in registry.every(place):
                if found.process == process:
                    return found
    return None


def every(where: str | None = None) -> list[Record]:
    """Of all of this user's processes that live. What was left by others that have ended is removed.

    Raises OSError, or MemguardError if the folder is not this user's.
    """
    records = dict[Process, Record]()
    for place in [where] if where is not None else places():
        found = _known(place)
        ended = [process for process in found if not lives(process)]
        with contextlib.suppress(MemguardError):
            _out_of_table(place, [(machine(), *process) for process in ended])
        for process in ended:
            _remove_files(place, process)
        for process in found.keys() - ended:
            records.setdefault(process, found[process])
    return sorted(records.values(), key=lambda record: record.process)


def budgets(where: str | None = None) -> list[Budgeted]:
    """This user's processes that run under a budget. Raises OSError, or MemguardError if they cannot be read."""
    found = dict[Process, Budgeted]()
    if where is None:
        leases(make=False), folder(make=False)  # raise
    for place in [where] if where is not None else databases():
        for one in registry.every(place):
            found.setdefault(one.process, one)
    return list(found.values())


# Where.


def own() -> str:
    """The folder into which this process writes records: the leases', else the user's. Created if missing. Raises as
    `folder`."""
    try:
        return leases()
    except MemguardError:
        return folder()


def places(process: Process | None = None) -> list[str]:
    """The existing folders that may contain records and databases, this process's own first.

    With `process`, also those of the environment that it was started with. Raises as `folder`.
    """
    found = []
    with contextlib.suppress(OSError, MemguardError):
        found.append(leases(make=False))
    given = _environ(process.pid).get(VARIABLE, "") if process is not None else ""
    found += [*folders(process), *([given] if trusted(given) else [])]
    return [path for path in dict.fromkeys(found) if os.path.isdir(path)]


def databases(process: Process | None = None) -> list[str]:
    """The `places` that may contain a database: not on network file systems. Empty if the user's folder is not safe."""
    return [path for path in _places(process, None) if trusted(path)]


def folders(process: Process | None = None) -> list[str]:
    """The existing runtime folders of this user: this process's own first, then those of `process` and the defaults.

    One that was started elsewhere (cron, a job, another session) may have another XDG_RUNTIME_DIR or TMPDIR than this
    one. Only folders that nobody else can enter. Raises as `folder`.
    """
    user = os.geteuid()
    found = [one for one in (folder(make=False),) if os.path.isdir(one)]
    given = [os.environ, *([_environ(process.pid)] if process is not None else [])]
    runtimes = [environ.get("XDG_RUNTIME_DIR", "") for environ in given] + [f"/run/user/{user}"]
    temporary = [environ.get("TMPDIR", "") for environ in given] + [tempfile.gettempdir()]
    for path in (
        *(os.path.join(one, "memguard") for one in runtimes if os.path.isabs(one)),
        *(os.path.join(one, f"memguard-{user}") for one in temporary if os.path.isabs(one)),
    ):
        with contextlib.suppress(OSError, ValueError):
            state = os.lstat(path)
            if path not in found and stat.S_ISDIR(state.st_mode) and state.st_uid == user and not state.st_mode & 0o077:
                found.append(path)
    return found


def _places(process: Process | None, where: str | None) -> list[str]:
    if where is not None:
        return [where]
    try:
        return places(process)
    except (OSError, MemguardError):
        return []


def _environ(pid: int) -> dict[str, str]:
    """What a process was started with; empty if that cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = os.fsdecode(file.read(LIMIT)).split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


# The database, the spare file, and the files of memguard 0.1.0.


def _known(place: str, process: Process | None = None) -> dict[Process, Record]:
    """The newest record of each process of this PID namespace, or of that process alone, also of those that have
    ended."""
    found = dict[Process, tuple[int, Record]]()
    for message in [*_table(place), *spare.read(place), *_files(place, process)]:
        try:
            one = Process(message["pid"], message["start"])
            if process in (None, one) and _here(message):
                written = message.get("written", 0)
                if written >= found.get(one, (0,))[0]:
                    found[one] = written, record_of(message, one)
        except (KeyError, TypeError, ValueError) as error:
            _log.debug("a record in %s is not read: %s", place, error)
    return {process: record for process, (_, record) in found.items()}


def _table(place: str) -> list[dict[str, Any]]:
    def rows(connection: Connection, _: File) -> list[str]:
        there = connection.execute(_THERE).fetchone()
        return [text for (text,) in connection.execute(_ROWS)] if there else []

    try:
        refuse_network(place)
        texts = Store(place).read_soon(rows) or []
    except MemguardError as error:
        _log.debug("what the database says of suspended processes is not read: %s", error)
        return []
    messages = []
    for text in texts:
        with contextlib.suppress(ValueError):
            messages.append(_message(text.encode("utf-8", "replace")))
    return messages


def _into_table(place: str, message: Mapping[str, Any]) -> None:
    here, text = machine(), json.dumps(message)
    boot = here.partition(" ")[0] + " "

    def put(connection: Connection, _: File) -> None:
        connection.execute(_TABLE)
        if here:  # else this boot is unknown
            connection.execute(_OF_ANOTHER_BOOT, (len(boot), boot))  # of processes that have surely ended
        connection.execute(_PUT, (here, message["pid"], message["start"], text))

    refuse_network(place)
    Store(place).change_soon(put)


def _out_of_table(place: str, keys: list[tuple[str, int, int]]) -> None:
    def drop(connection: Connection, _: File) -> None:
        if connection.execute(_THERE).fetchone():
            connection.executemany(_DROP, keys)

    if keys and os.path.lexists(Store(place).path):
        Store(place).change_soon(drop)


def _remove_files(place: str, process: Process) -> None:
    with contextlib.suppress(OSError, MemguardError):
        spare.clear(place, lambda found: _is(found, process))
    with contextlib.suppress(OSError):
        os.unlink(path_of(process, place))


def _files(place: str, process: Process | None) -> list[dict[str, Any]]:
    names = [os.path.basename(path_of(process, place))] if process is not None else []
    if process is None:
        with contextlib.suppress(OSError):
            names = [name for name in sorted(os.listdir(place)) if _NAME.fullmatch(name)]
    found = []
    for name in names:
        try:
            message = _message(_read(os.path.join(place, name)))
            match = _NAME.fullmatch(name)
            if match is not None and [message.get("pid"), message.get("start")] == [int(match[1]), int(match[2])]:
                found.append(message)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            _log.debug("%s is not read: %s", os.path.join(place, name), error)
    return found


def _is(message: Mapping[str, Any], process: Process) -> bool:
    return _here(message) and (message.get("pid"), message.get("start")) == process


def _dead(message: Mapping[str, Any]) -> bool:
    """Whether its process has surely ended. Nobody knows without both boots: `machine` is empty in some containers."""
    pid, start, here = message.get("pid"), message.get("start"), str(message.get("machine"))
    boot, own = here.partition(" ")[0], machine().partition(" ")[0]
    if not boot or not own:
        return False
    if boot != own:
        return True
    return _here(message) and not (type(pid) is int and type(start) is int and lives(Process(pid, start)))


# A record, checked.


def record_of(message: Mapping[str, Any], process: Process) -> Record:
    """Raises ValueError for what memguard would not have written."""
    _check(message, process, {"step", "bytes", "since", "why", "command", "budget", "measured"})
    sizes, since = message["bytes"], message["since"]
    if message["step"] not in STEPS:
        raise ValueError("its step is unknown")
    if sizes is not None and not (
        isinstance(sizes, dict) and all(_UUID.fullmatch(uuid) and is_whole(size) for uuid, size in sizes.items())
    ):
        raise ValueError("its bytes are malformed")
    if type(since) not in (int, float) or not 0 <= since < 1 << 40:
        raise ValueError("its time is malformed")
    if message["why"] not in get_args(Why):
        raise ValueError("why is unknown")
    if not isinstance(message["measured"], bool):
        raise ValueError("whether its bytes were measured is unknown")
    budget = None if message["budget"] is None else _text(message["budget"])
    command, measured = _text(message["command"]), message["measured"]
    return Record(process, message["step"], sizes, float(since), message["why"], command, budget, measured)


def _check(message: Mapping[str, Any], process: Process, fields: set[str]) -> None:
    if type(message.get("written", 0)) is not int or message.get("written", 0) < 0:
        raise ValueError("when it was written is malformed")
    if message.get("memguard_process") != _VERSION or set(message) - {"written"} != fields | {
        "memguard_process",
        "pid",
        "start",
        "machine",
    }:
        raise ValueError("it is not one of memguard's, or another version's")
    numbers = (message["pid"], message["start"])
    if any(type(number) is not int for number in numbers) or numbers != tuple(process):
        raise ValueError("it is another process's")
    if not 0 < process.pid < _MOST_PID:
        raise ValueError("its PID is out of range")
    if not _here(message):
        raise ValueError("it is of another PID namespace")


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST:
        raise ValueError("a text is missing or too long")
    return visible(value, keep="")


def _here(message: Mapping[str, Any]) -> bool:
    """Whether its PIDs are ours: the same start of the same machine, the same PID namespace."""
    return message.get("machine") == machine()


def _read(path: str) -> bytes:
    """Raises OSError, or ValueError if it is not a file of this user's, or too long."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise ValueError("it is not a file that only this user can write")
        data = b""
        while len(data) <= LIMIT and (part := os.read(fd, LIMIT)):
            data += part
    finally:
        os.close(fd)
    if len(data) > LIMIT:
        raise ValueError("it is too long")
    return data


def _message(data: bytes) -> dict[str, Any]:
    """Raises ValueError if it is no JSON object."""
    try:
        message = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(message, dict):
        raise ValueError("it is not a JSON object")
    return message

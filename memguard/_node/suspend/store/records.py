"""What is known of suspended processes beside the driver: a small JSON file each, in the user's own folder.

It is written before a process is locked, with each step, and removed when the process runs again, so that whoever comes
later knows what was going on: `memguard ps`, and `memguard resume PID` after the one who did it was killed. A lock on a
file beside it (`work_lock.Work`) says whether that one still lives; the kernel takes it away with its owner.

Which processes run under a budget is in the registry that they share with the leases (`_node.leases.registry`).

Only files of this user that nobody else can write are read, and every value is checked: nothing in them is executed or
taken for a path. A file of a process that has ended is removed by whoever sees it; one of another PID namespace, whose
PIDs mean nothing here, is left alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from memguard._base.logs import log as _log
from memguard._base.text import visible
from memguard._base.units import is_whole
from memguard._node.identity import Process, folder, lives, machine
from memguard._node.leases import registry
from memguard._node.leases.folders import VARIABLE
from memguard._node.leases.folders import folder as leases
from memguard._node.leases.registry import Budgeted
from memguard._node.suspend.types import Why
from memguard.errors import MemguardError

LIMIT = 64 * 1024
"""Bytes in a file at most."""
STEPS = ("lock", "settle", "checkpoint", "suspended", "room", "restore", "unlock", "lost")
"""`suspended` and `lost` are how it ended, the others what was just being done."""
_VERSION = 1
_LONGEST = 200
"""Characters of a command or a budget's name."""
_UUID = re.compile(r"[A-Za-z0-9./-]{1,100}", re.ASCII)
_MOST_PID = 1 << 31
_PREFIX = "suspended"
_NAME = re.compile(_PREFIX + r"-([0-9]{1,10})-([0-9]{1,19})\.json", re.ASCII)


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


def path_of(process: Process, where: str | None = None) -> str:
    return os.path.join(where or folder(), f"{_PREFIX}-{process.pid}-{process.start}.json")


def write(record: Record, where: str | None = None) -> None:
    """All of it or nothing. Raises OSError, or MemguardError if the folder is not this user's."""
    fields = {
        "step": record.step,
        "bytes": None if record.bytes is None else dict(record.bytes),
        "since": record.since,
        "why": record.why,
        "command": record.command[:_LONGEST],
        "budget": record.budget and record.budget[:_LONGEST],
        "measured": record.measured,
    }
    _write(path_of(record.process, where), record.process, fields)


def write_budget(found: Budgeted, where: str | None = None) -> None:
    """It is known as long as this process lives, and until `remove_budget`. Raises MemguardError."""
    registry.enter(found, where or leases())


def remove(process: Process, where: str | None = None) -> None:
    """Nothing happens if there is none."""
    for one in _places(process, where):
        with contextlib.suppress(OSError):
            os.unlink(path_of(process, one))


def remove_budget(process: Process, where: str | None = None) -> None:
    """Nothing happens if there is none."""
    for one in with_budgets(process, where):
        with contextlib.suppress(OSError, MemguardError):
            registry.leave(process, one)


def of(process: Process, where: str | None = None) -> Record | None:
    """What is known of a process; None if nothing is."""
    for one in _places(process, where):
        with contextlib.suppress(OSError, ValueError):
            return record_of(_read(path_of(process, one)), process)
    return None


def budget_of(process: Process, where: str | None = None) -> Budgeted | None:
    for one in with_budgets(process, where):
        with contextlib.suppress(OSError, MemguardError):
            for found in registry.every(one):
                if found.process == process:
                    return found
    return None


def every(where: str | None = None) -> list[Record]:
    """Of all of this user's processes that live. What was left by others that have ended is removed.

    Raises OSError, or MemguardError if the folder is not this user's.
    """
    records = dict[Process, Record]()
    for place in [where] if where is not None else folders():
        for name in sorted(os.listdir(place)):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            process = Process(int(match[1]), int(match[2]))
            path = os.path.join(place, name)
            try:
                message = _read(path)
                if not _here(message):
                    continue
                if not lives(process):
                    os.unlink(path)
                else:
                    records.setdefault(process, record_of(message, process))
            except FileNotFoundError:
                continue  # it came back meanwhile
            except (OSError, ValueError) as error:
                _log.debug("%s is not read: %s", path, error)
    return list(records.values())


def budgets(where: str | None = None) -> list[Budgeted]:
    """This user's processes that run under a budget. Raises OSError, or MemguardError if they cannot be read."""
    found = dict[Process, Budgeted]()
    for place in with_budgets(None, where):
        for one in registry.every(place):
            found.setdefault(one.process, one)
    return list(found.values())


# Where.


def folders(process: Process | None = None) -> list[str]:
    """Where this user's processes may have written, this one's own folder first.

    One that was started elsewhere (cron, a job, another session) may have another XDG_RUNTIME_DIR or TMPDIR than this
    one: those of `process` are looked at too. Only folders that nobody else can enter. Raises as `place.folder`.
    """
    user = os.geteuid()
    found = [folder()]
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


def _places(process: Process, where: str | None) -> list[str]:
    if where is not None:
        return [where]
    try:
        return folders(process)
    except (OSError, MemguardError):
        return []


def with_budgets(process: Process | None, where: str | None = None) -> list[str]:
    """Where processes may have said that they run under a budget. Raises MemguardError without a `process`."""
    if where is not None:
        return [where]
    try:
        given = _environ(process.pid).get(VARIABLE, "") if process is not None else ""
        own = os.path.isabs(given) and os.path.isdir(given) and os.stat(given).st_uid == os.geteuid()
        return list(dict.fromkeys([leases(), *folders(process), *([given] if own else [])]))
    except (OSError, MemguardError):
        if process is None:
            raise
        return []


def _environ(pid: int) -> dict[str, str]:
    """What a process was started with; empty if that cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = os.fsdecode(file.read(LIMIT)).split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


# The content of a file, checked.


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
    if type(since) not in (int, float) or not math.isfinite(since) or not 0 <= since < 1 << 40:
        raise ValueError("its time is malformed")
    if message["why"] not in get_args(Why):
        raise ValueError("why is unknown")
    if not isinstance(message["measured"], bool):
        raise ValueError("whether its bytes were measured is unknown")
    budget = None if message["budget"] is None else _text(message["budget"])
    command, measured = _text(message["command"]), message["measured"]
    return Record(process, message["step"], sizes, float(since), message["why"], command, budget, measured)


def _check(message: Mapping[str, Any], process: Process, fields: set[str]) -> None:
    if message.get("memguard_process") != _VERSION or set(message) != fields | {
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


def _write(path: str, process: Process, fields: Mapping[str, Any]) -> None:
    message = {"memguard_process": _VERSION, **process._asdict(), "machine": machine(), **fields}
    new = f"{path}.{os.getpid()}-{time.monotonic_ns()}.new"
    fd = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            json.dump(message, file)
        os.rename(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


def _read(path: str) -> dict[str, Any]:
    """Raises OSError, or ValueError if it is not a file of this user's, or not a JSON object."""
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
    try:
        message = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(message, dict):
        raise ValueError("it is not a JSON object")
    return message

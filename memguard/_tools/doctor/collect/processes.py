"""Runs a process, records its report and stderr, and makes sure that it ends.

The process gets its own session. At its time-out or end it is killed with all processes that it started. Daemons
outside the session are found by an environment variable. Only processes with another environment or user escape.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from memguard._devices import proc
from memguard._tools.doctor.bounds import clip
from memguard._tools.doctor.probes.main import libraries

_SAID, _REPORTED = 1 << 18, 1 << 22
"""The bytes kept of stderr and of the report. The rest is read and dropped: a full pipe would block the process."""
_LINES, _LINE_LENGTH = 200, 400
_LINGER = 0.3
"""Seconds to go on reading after the end: a child may hold the pipes open, or a hung probe prints its traceback."""
_MARK = "MEMGUARD_PROBE"
_KILL_WAIT = 3.0
"""Seconds to wait after SIGKILL. A process blocked in a broken driver cannot be killed and is left behind."""
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass
class Ended:
    """How a process ended, and its report and stderr until then.

    reported   the objects of its JSON lines; invalid lines are dropped
    said       its lines on stderr, each once, the first and the last hundred
    libraries  the files it had mapped when it was stopped at its time-out
    """

    seconds: float
    exit: int | None = None
    signal: str | None = None
    hung: bool = False
    reported: list[dict[str, Any]] = field(default_factory=list)
    said: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


def watch(
    command: Sequence[str], spec: Mapping[str, Any], environ: Mapping[str, str], timeout: float, stop: threading.Event
) -> Ended:
    """Run `command` with `spec` as JSON in its last argument, together with the file descriptor of the report.

    Ends it after `timeout` seconds, or when `stop` is set. Raises OSError if it cannot be started.
    """
    inside, outside = _pipe()
    mark = f"{secrets.token_hex(16)}.{int(timeout) + 10}"  # the number: seconds after which the process ends itself
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            [*command, json.dumps({**spec, "fd": outside, "timeout": timeout})],
            env={**environ, _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(outside,),
            start_new_session=True,
        )
    except BaseException:
        os.close(inside)
        raise
    finally:
        os.close(outside)
    assert process.stderr is not None
    ended, code = Ended(0.0), None
    with os.fdopen(inside, "rb", 0) as reported, process.stderr as stderr:
        kept = {reported: _HeadAndTail(_REPORTED), stderr: _HeadAndTail(_SAID)}
        try:
            ended.hung = _read(process, kept, started + timeout, stop)
            if ended.hung:
                ended.libraries = _mapped(process.pid)
                if not stop.is_set():
                    with contextlib.suppress(OSError):
                        os.kill(process.pid, signal.SIGUSR1)  # a probe prints its traceback; other processes end
                    _read(process, kept, time.monotonic() + _LINGER, stop)
        finally:
            code = _kill(process, mark)
    ended.seconds = round(time.monotonic() - started, 3)
    if code is not None:
        ended.exit, ended.signal = (code, None) if code >= 0 else (None, _signal(-code))
    ended.reported = list(_objects(kept[reported].data))
    ended.said = lines(kept[stderr].data)
    return ended


def _pipe() -> tuple[int, int]:
    """A pipe with descriptors above 2: if 0, 1 or 2 is closed here, Popen would replace them in the child."""
    ends = os.pipe()
    try:
        inside = fcntl.fcntl(ends[0], fcntl.F_DUPFD_CLOEXEC, 3)
        try:
            return inside, fcntl.fcntl(ends[1], fcntl.F_DUPFD_CLOEXEC, 3)
        except OSError:
            os.close(inside)
            raise
    finally:
        for end in ends:
            os.close(end)


class _HeadAndTail:
    """Keeps the first and the last bytes of a stream: a crash is reported at the end."""

    def __init__(self, most: int) -> None:
        self._head, self._tail, self._half = b"", b"", most // 2

    @property
    def data(self) -> bytes:
        return self._head + self._tail

    def add(self, data: bytes) -> None:
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-self._half :]


def _read(
    process: subprocess.Popen[bytes], kept: Mapping[IO[bytes], _HeadAndTail], deadline: float, stop: threading.Event
) -> bool:
    """Read until the process has ended, and `_LINGER` longer. True if it did not end in time."""
    with selectors.DefaultSelector() as selector:
        for stream in kept:
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select(0.05):
                stream = key.fileobj  # type: ignore[assignment]
                data = os.read(stream.fileno(), 1 << 16)
                if data:
                    kept[stream].add(data)
                else:
                    selector.unregister(stream)
            now = time.monotonic()
            if _has_ended(process):
                deadline = min(deadline, now + _LINGER)
                if now >= deadline:
                    return False
            elif now >= deadline or stop.is_set():
                return True
        while not _has_ended(process):  # the process closed both pipes and still runs
            if time.monotonic() >= deadline or stop.wait(0.02):
                return True
    return False


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process has ended. Does not reap it: its PID is needed to kill its group."""
    return _was_reaped(process) or os.waitid(os.P_PID, process.pid, _PEEK) is not None


_PEEK = os.WEXITED | os.WNOHANG | os.WNOWAIT


def _was_reaped(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process was reaped elsewhere: by the kernel if SIGCHLD is ignored, or by a handler of SIGCHLD."""
    try:
        os.waitid(os.P_PID, process.pid, _PEEK)
        return False
    except ChildProcessError:
        return True


def _kill(process: subprocess.Popen[bytes], mark: str) -> int | None:
    """Kill the process and its descendants. Returns its exit code; None if it is stuck, or was reaped elsewhere."""
    reaped = _was_reaped(process)
    if not reaped:  # a reaped PID may belong to another process
        for pid in proc.descendants("/", process.pid) or ():  # before their parent: orphans get init as parent
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_WAIT
        while not _has_ended(process) and time.monotonic() < deadline:
            time.sleep(0.005)
        reaped = _was_reaped(process)
    _kill_marked(mark)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0)
    return None if reaped else process.returncode


def _kill_marked(mark: str) -> None:
    """Kill the processes outside the session, in rounds: one may have been starting another."""
    for _ in range(5):
        found = list(_marked(f"{_MARK}={mark}".encode()))
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.01)


def _marked(entry: bytes) -> Iterator[int]:
    """The PIDs of this user's processes with `entry` in their environment."""
    deadline = time.monotonic() + _START_WAIT
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if not name.isdecimal() or int(name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid != os.geteuid():
                    continue
                if entry in _environment(name, deadline).split(b"\0"):
                    yield int(name)


_START_WAIT = 0.5
"""Seconds to wait for starting processes; 20 ms were measured with two of them on each core."""


def _environment(pid: int | str, deadline: float) -> bytes:
    """The environment of a process, as the kernel shows it: empty while the process still executes execve."""
    while True:
        with open(f"/proc/{pid}/environ", "rb") as file:
            found = file.read()
        if found or time.monotonic() > deadline:
            return found
        with open(f"/proc/{pid}/stat", "rb") as file:
            if not _may_have_environment(file.read()):
                return found
        time.sleep(0.001)


def _may_have_environment(stat: bytes) -> bool:
    """Whether a process whose environment was read as empty may have one by now, or soon.

    By the fields of proc_pid_stat(5), with their numbers there; False if stat has fewer fields than on Linux.
    """
    fields = stat.rpartition(b")")[2].split()  # the process name may contain spaces and parentheses
    try:
        state, flags, code, start, end = (fields[number - 3] for number in (3, 9, 27, 50, 51))
        # While the kernel measures the environment, both of its ends are the begin; the end of the code is set after.
        none = 0 < int(end) == int(start) and int(code) > 0
        return state not in b"ZX" and not int(flags) & (_EXITING | _KTHREAD) and not none
    except (IndexError, ValueError):
        return False


_EXITING, _KTHREAD = 0x00000004, 0x00200000
"""PF_EXITING and PF_KTHREAD of the kernel's sched.h, in the field `flags`: neither has an environment."""


def _mapped(pid: int) -> tuple[str, ...]:
    """The files the process has mapped; empty if the kernel does not answer, as for a process stuck in a driver."""
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.extend(libraries(pid)), daemon=True)
    reader.start()
    reader.join(_KILL_WAIT)
    return tuple(found)


def _objects(data: bytes) -> list[dict[str, Any]]:
    found = []
    for line in data.splitlines():
        # A crash may have cut a line; other code may have written one.
        with contextlib.suppress(ValueError, RecursionError):
            value = clip(json.loads(line))
            if isinstance(value, dict):
                found.append(value)
    return found


def lines(data: bytes) -> tuple[str, ...]:
    """Split stderr into lines: no colours, bounded length and number. Lines that differ only in digits count as one."""
    found: dict[str, str] = {}
    for line in _ANSI.sub("", data.decode(errors="replace")).splitlines():
        plain = "".join(char for char in line.rstrip()[:_LINE_LENGTH] if char.isprintable() or char == "\t")
        if plain.strip():
            found.setdefault(re.sub(r"\d+", "0", plain), plain)
    kept = tuple(found.values())
    return kept if len(kept) <= _LINES else (*kept[: _LINES // 2], *kept[-_LINES // 2 :])


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"

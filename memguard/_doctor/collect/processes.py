"""A process that is watched: what it reports, what it says, how it ends. It ends, whatever it does.

It has a session of its own, and is killed with everything it started: at its time-out, and what outlives it too. What
has left its session and its parents, as a daemon does, is found by a variable in its environment; only what was
started with another environment, or belongs to another user, is not.
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

from memguard._doctor.bounds import clip
from memguard._doctor.probes.main import libraries

_SAID, _REPORTED = 1 << 18, 1 << 22
"""Bytes of stderr and of the report that are kept; the rest is read and dropped, or the process would wait."""
_LINES, _LONG = 200, 400
_LINGER = 0.3
"""Seconds in which pipes may still be read: a child of the ended one holds them open, or one says where it hangs."""
_MARK = "MEMGUARD_PROBE"
_STUCK = 3.0
"""Seconds for what takes none: a process that waits in a broken driver cannot be killed, and is left behind."""
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass
class Ended:
    """How a process ended, and what it had said until then.

    reported   the objects of its JSON lines, those that are none left out
    said       its lines on stderr, each once, the first and the last hundred
    libraries  what it had mapped when it was stopped for its time-out
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
    """Run `command`, to which `spec` is the last argument, as JSON, with the number of the pipe to report on in it.

    Ends it after `timeout` seconds, or when `stop` is set. Raises OSError where it cannot be started.
    """
    inside, outside = _pipe()
    mark = f"{secrets.token_hex(16)}.{int(timeout) + 10}"  # with the seconds after which it is to end by itself
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
    with os.fdopen(inside, "rb", 0) as reported, process.stderr as said:
        kept = {reported: _Kept(_REPORTED), said: _Kept(_SAID)}
        try:
            ended.hung = _read(process, kept, started + timeout, stop)
            if ended.hung:
                ended.libraries = _mapped(process.pid)
                if not stop.is_set():
                    with contextlib.suppress(OSError):
                        os.kill(process.pid, signal.SIGUSR1)  # a probe says where it is; any other ends
                    _read(process, kept, time.monotonic() + _LINGER, stop)
        finally:
            code = _kill(process, mark)
    ended.seconds = round(time.monotonic() - started, 3)
    if code is not None:
        ended.exit, ended.signal = (code, None) if code >= 0 else (None, _signal(-code))
    ended.reported = list(_objects(kept[reported].data))
    ended.said = lines(kept[said].data)
    return ended


def _pipe() -> tuple[int, int]:
    """A pipe whose numbers are none of the first three: where one of those is closed here, the process gets its own."""
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


class _Kept:
    """The beginning and the end of what was said: a crash is told at the end."""

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
    process: subprocess.Popen[bytes], kept: Mapping[IO[bytes], _Kept], deadline: float, stop: threading.Event
) -> bool:
    """Until the process has ended, and a moment longer for its pipes. True where it did not in time."""
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
            if _over(process):
                deadline = min(deadline, now + _LINGER)
                if now >= deadline:
                    return False
            elif now >= deadline or stop.is_set():
                return True
        while not _over(process):  # it closed both, and goes on
            if time.monotonic() >= deadline or stop.wait(0.02):
                return True
    return False


def _over(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended, without taking its number from it: its group is still to be killed by that."""
    return _taken(process) or os.waitid(os.P_PID, process.pid, _LOOK) is not None


_LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT


def _taken(process: subprocess.Popen[bytes]) -> bool:
    """It has ended and somebody else took its exit code: the kernel where SIGCHLD is ignored, or a handler of it."""
    try:
        os.waitid(os.P_PID, process.pid, _LOOK)
        return False
    except ChildProcessError:
        return True


def _kill(process: subprocess.Popen[bytes], mark: str) -> int | None:
    """It and all that it started. Its exit code; None where the driver does not let go of it, or nobody knows."""
    taken = _taken(process)
    if not taken:  # else its number may be another's by now
        for pid in descendants(process.pid):  # before their parent: they become init's then
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + _STUCK
        while not _over(process) and time.monotonic() < deadline:
            time.sleep(0.005)
        taken = _taken(process)
    _kill_marked(mark)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0)
    return None if taken else process.returncode


def _kill_marked(mark: str) -> None:
    """What has left the session and its parents. More than once: it may have been starting another."""
    for _ in range(5):
        found = list(_marked(f"{_MARK}={mark}".encode()))
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.01)


def _marked(entry: bytes) -> Iterator[int]:
    """The processes of this user that were started with it in their environment."""
    deadline = time.monotonic() + _STARTING
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if not name.isdecimal() or int(name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid != os.geteuid():
                    continue
                if entry in _environment(name, deadline).split(b"\0"):
                    yield int(name)


_STARTING = 0.5
"""Seconds for processes that are being started; 20 ms were measured with two of them to each core."""


def _environment(pid: int | str, deadline: float) -> bytes:
    """What the process was started with, as the kernel has it: nothing at first, while it still loads the program."""
    while True:
        with open(f"/proc/{pid}/environ", "rb") as file:
            found = file.read()
        if found or time.monotonic() > deadline:
            return found
        with open(f"/proc/{pid}/stat", "rb") as file:
            if not _may_have_one(file.read()):
                return found
        time.sleep(0.001)


def _may_have_one(stat: bytes) -> bool:
    """Whether a process whose environment was read as empty may have one: it was laid out since, or is to be yet.

    By the fields of proc_pid_stat(5), with their numbers there; not so where a kernel says less than Linux's.
    """
    fields = stat.rpartition(b")")[2].split()  # the name before it may have anything in it
    try:
        state, flags, code, start, end = (fields[number - 3] for number in (3, 9, 27, 50, 51))
        # While the kernel measures the environment, both of its ends are the begin; the end of the code is set after.
        none = 0 < int(end) == int(start) and int(code) > 0
        return state not in b"ZX" and not int(flags) & (_EXITING | _KTHREAD) and not none
    except (IndexError, ValueError):
        return False


_EXITING, _KTHREAD = 0x00000004, 0x00200000
"""PF_EXITING and PF_KTHREAD of the kernel's sched.h, in the field `flags`: one has none any more, the other never."""


def _mapped(pid: int) -> tuple[str, ...]:
    """What the process has mapped; nothing where the kernel does not say, as of one that is stuck in a driver."""
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.extend(libraries(pid)), daemon=True)
    reader.start()
    reader.join(_STUCK)
    return tuple(found)


def descendants(pid: int) -> list[int]:
    """The processes that it started, and those that they did, as far as they still are its own."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        for children in _children(waiting.pop()):
            found.append(children)
            waiting.append(children)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += [int(word) for word in file.read().split()]
    return found


def _objects(data: bytes) -> list[dict[str, Any]]:
    found = []
    for line in data.splitlines():
        # Cut short by a crash, or written by somebody else.
        with contextlib.suppress(ValueError, RecursionError):
            value = clip(json.loads(line))
            if isinstance(value, dict):
                found.append(value)
    return found


def lines(data: bytes) -> tuple[str, ...]:
    """What was said, as lines: each once however its numbers change, without colours, of bounded length and count."""
    found: dict[str, str] = {}
    for line in _ANSI.sub("", data.decode(errors="replace")).splitlines():
        plain = "".join(char for char in line.rstrip()[:_LONG] if char.isprintable() or char == "\t")
        if plain.strip():
            found.setdefault(re.sub(r"\d+", "0", plain), plain)
    said = tuple(found.values())
    return said if len(said) <= _LINES else (*said[: _LINES // 2], *said[-_LINES // 2 :])


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time one
        return f"signal {number}"

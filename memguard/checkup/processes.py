"""A process that is watched: what it reports, what it says, how it ends. It ends, whatever it does.

It has a session of its own, and is killed with everything it started: at its time-out, and what outlives it too.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from memguard.checkup.probes._main import libraries

_SAID, _REPORTED = 1 << 18, 1 << 22
"""Bytes of stderr and of the report that are kept; the rest is read and dropped, or the process would wait."""
_LINES, _LONG = 200, 400
_LINGER = 0.3
"""Seconds in which pipes may still be read that a child of the ended process holds open."""
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
    inside, outside = os.pipe()
    started = time.monotonic()
    try:
        process = subprocess.Popen(
            [*command, json.dumps({**spec, "fd": outside, "timeout": timeout})],
            env=dict(environ),
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
    ended = Ended(0.0)
    with os.fdopen(inside, "rb", 0) as reported, process.stderr as said:
        kept = {reported: _Kept(_REPORTED), said: _Kept(_SAID)}
        try:
            ended.hung = _read(process, kept, started + timeout, stop)
            if ended.hung:
                ended.libraries = _mapped(process.pid)
        finally:
            _kill(process)
    ended.seconds = round(time.monotonic() - started, 3)
    code = process.returncode
    if code is not None:  # else the driver does not let go of it
        ended.exit, ended.signal = (code, None) if code >= 0 else (None, _signal(-code))
    ended.reported = list(_objects(kept[reported].data))
    ended.said = lines(kept[said].data)
    return ended


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
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    for pid in descendants(process.pid):  # before their parent: they become init's then
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STUCK)


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
        with contextlib.suppress(ValueError):  # cut short by a crash, or written by somebody else
            value = json.loads(line)
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

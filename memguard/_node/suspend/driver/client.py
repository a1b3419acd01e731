"""Starts the helper process, asks it, and replaces it when it has died or hangs.

A helper may be killed at any moment: the driver ends the operation by itself, in the target (measured, H200, driver
580.159). One whose operation hangs is left alone with its stdin closed: when the call returns, it undoes a lock that
nobody waits for any more, and ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from memguard._base.advice import Advice
from memguard._base.logs import log as _log
from memguard._devices.checkpoint import State
from memguard._node.identity import Process
from memguard._node.suspend.driver.channel import Answer, Card, Event

START = 60.0
"""Seconds in which a new helper must have loaded and started CUDA's driver: a disk may be slow."""
_GRACE = 5.0
"""Seconds after `limit` in which the helper must have said so itself."""
_TURN = 0.2
"""Seconds for which one thread reads at a time."""
_LOOK = 0.01
"""Seconds after which who waits for an answer looks whether the thread that reads has got it."""
_SCRUBBED = ("MEMGUARD_", "PYTHON", "CUDA_VISIBLE_DEVICES", "CUDA_INJECTION")
"""Of the environment: a budget or a profiler is not for the helper, and it must see every GPU."""
_CODE = "import sys; sys.path[:] = {path!r}\nfrom memguard._node.suspend.driver import helper; helper.main({parent})"


def _python() -> str:
    """This interpreter's program. One that is found in PATH could be of another version, or anybody's.

    A program that embeds Python may not know it. Raises OSError then, unless Python's own installation has it.
    """
    if sys.executable and os.path.isabs(sys.executable):
        return sys.executable
    own = os.path.join(sys.base_exec_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    if os.path.isabs(own) and os.access(own, os.X_OK):
        return own
    raise FileNotFoundError(
        errno.ENOENT, f"this program embeds Python, and does not know its interpreter: set sys.executable; not {own}"
    )


class _Connection:
    """One helper process. It reads for whoever waits: one thread at a time, no thread of its own."""

    def __init__(self, environ: Mapping[str, str] | None, events: deque[Event]) -> None:
        from memguard._devices.cuda_order import importable

        path = [os.path.abspath(entry) for entry in importable()]
        given = {name: value for name, value in os.environ.items() if not name.startswith(_SCRUBBED)}
        # In memory: a full disk must not keep a process from coming back.
        self.said = os.fdopen(os.memfd_create("memguard-helper"), "w+b")
        undo = contextlib.ExitStack()
        undo.callback(self.said.close)
        with undo:
            # A socket, not a pipe: MSG_NOSIGNAL spares a program that does not ignore SIGPIPE when the helper has died.
            self.stdin, stdin = socket.socketpair()
            undo.callback(self.stdin.close)
            with stdin:
                self.process = subprocess.Popen(
                    # -I -S: nothing of the environment's is imported, and MEMGUARD_CONFIG's file is not read
                    [_python(), "-I", "-S", "-c", _CODE.format(path=path, parent=os.getpid())],
                    stdin=stdin.fileno(),
                    stdout=subprocess.PIPE,
                    stderr=self.said,
                    env={**given, **(environ or {})},
                    start_new_session=True,
                    bufsize=0,
                )
            undo.pop_all()
        assert self.process.stdout is not None
        self.stdout = self.process.stdout
        self.dead = False
        self.operations: set[object] = set()
        """Those under way: it is not killed for another request's sake then."""
        os.set_blocking(self.stdout.fileno(), False)  # a signal handler may read what this thread was about to
        self._writing, self._reading = threading.RLock(), threading.RLock()
        self._data = b""
        self._answers: dict[int, dict[str, Any] | None] = {}
        self._next = 0
        self._events = events

    def send(self, request: dict[str, Any]) -> int:
        with self._writing:
            self._next += 1
            number = self._next
            self._answers[number] = None
            line = memoryview((json.dumps({"id": number, **request}) + "\n").encode())
            try:
                while line:
                    line = line[self.stdin.send(line, socket.MSG_NOSIGNAL) :]
            except (OSError, ValueError):
                self.dead = True
        return number

    def wait(self, number: int, until: float) -> dict[str, Any] | None:
        """The answer; None if none came until then, or the helper has died (`dead`)."""
        try:
            while self._answers.get(number) is None and not self.dead and time.monotonic() < until:
                self.read(until, number)
            return self._answers.get(number)
        finally:
            self._answers.pop(number, None)

    def read(self, until: float, number: int = 0) -> None:
        """Read what has come, or wait for it until then; shorter if another thread reads already, or has read it."""
        patience = max(0.0, min(until - time.monotonic(), _TURN))
        if not self._reading.acquire(timeout=min(patience, _LOOK) if number else patience):
            return
        try:
            if self.dead or self._answers.get(number) is not None:
                return
            poll = select.poll()  # not `select`: a program may have more than 1,024 files open
            poll.register(self.stdout, select.POLLIN)
            if not poll.poll(1000 * patience):
                # Not only by its end of the pipe: something that it started may have that too.
                self.dead = self.process.poll() is not None
                return
            got = os.read(self.stdout.fileno(), 1 << 16)
            if not got:
                self.dead = True
            *lines, self._data = (self._data + got).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        except BlockingIOError:
            return
        except (OSError, ValueError):
            self.dead = True
        finally:
            self._reading.release()

    def _take(self, line: dict[str, Any]) -> None:
        if "event" in line:
            self._events.append(Event(line["event"], Process(line["pid"], line["start"])))
        elif line.get("id") in self._answers:
            self._answers[line["id"]] = line

    def last_words(self) -> str:
        """The last line that it wrote to stderr."""
        with contextlib.suppress(OSError, ValueError):
            self.said.seek(0)
            lines = self.said.read().decode(errors="replace").strip().splitlines()
            return lines[-1] if lines else ""
        return ""

    def close(self, kill: bool) -> None:
        """Let it end: at once, or when what it does is over."""
        self.dead = True
        with self._writing, contextlib.suppress(OSError):
            self.stdin.close()
        if kill and self.process.returncode is None:
            self.process.kill()
        read = self._reading.acquire(timeout=_GRACE)  # nobody reads a descriptor that is another file's by then
        with contextlib.suppress(OSError):
            self.stdout.close()
        if read:
            self._reading.release()
        self.said.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE if kill else _TURN)
        if self.process.returncode is None:
            _leaving.append(self.process.pid)
            self.process.returncode = 0  # else Popen warns when it is collected: `_reap` waits for it

    def forget(self) -> None:
        """In a forked child: it is the parent's. Only the descriptors are closed here."""
        self.dead = True
        self.process.returncode = 0
        for file in (self.stdin, self.stdout, self.said):
            with contextlib.suppress(OSError):
                file.close()


_leaving: list[int] = []
"""PIDs of helpers that end an operation first."""


def _reap() -> None:
    """Wait for those that have ended."""
    for pid in tuple(_leaving):
        try:
            ended = os.waitpid(pid, os.WNOHANG)[0] != 0
        except ChildProcessError:  # the program waits for all its children
            ended = True
        if ended:
            with contextlib.suppress(ValueError):  # another thread was first
                _leaving.remove(pid)


class Client:
    """A `CheckpointChannel` through a helper process, which is started at the first need. Any thread may ask.

    `environ` is added to the helper's environment. After a fork the child starts a helper of its own.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = environ
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._connection: _Connection | None = None
        self._events: deque[Event] = deque()
        self._watched: set[Process] = set()
        self._holding: _Connection | None = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The helper's; None if none runs."""
        connection = self._connection
        return None if connection is None or self._pid != os.getpid() else connection.process.pid

    def close(self) -> None:
        """End the helper: not within an operation. The next request starts another."""
        self._after_fork()
        with self._lock:
            connection, self._connection = self._connection, None
            self._watched.clear()
        if connection is not None:
            connection.close(kill=False)

    def request(self, op: str, limit: float, /, **fields: Any) -> dict[str, Any]:
        """The helper's answer to any of its operations; or `{"trouble": …, "text": …, "fix": …}` (`channel.Answer`)."""
        try:
            connection = self._connected()
        except (OSError, ValueError) as error:
            return {"trouble": "start", "text": f"the helper process cannot be started: {error}"}
        if isinstance(connection, Advice):
            return {"trouble": "start", "text": connection.reason, "fix": connection.fix}
        return self._ask(connection, op, limit, fields)

    def _ask(self, connection: _Connection, op: str, limit: float, fields: dict[str, Any]) -> dict[str, Any]:
        operation, mark = op in _OPERATIONS, object()
        if operation:
            connection.operations.add(mark)
        try:
            number = connection.send({"op": op, "limit": limit, **fields})
            answer = connection.wait(number, time.monotonic() + limit + _GRACE)
        finally:
            connection.operations.discard(mark)
        if answer is None:
            died = connection.dead
            text = connection.last_words() if died else ""
            self._drop(connection, kill=True)
            return {"trouble": "died" if died else "timeout", "text": text}
        if answer.get("timeout"):  # it is sound, and a call hangs
            if not connection.operations:
                self._drop(connection, kill=not operation)
            return {"trouble": "timeout"}
        if answer.get("ended"):
            return {"trouble": "ended"}
        if "error" in answer:
            return {"trouble": "start", "text": answer["error"], "fix": answer.get("fix", "")}
        return answer

    def _connected(self) -> _Connection | Advice:
        """The helper, which has answered; or why there is none."""
        self._after_fork()
        with self._lock:
            _reap()
            if self._connection is not None and not self._connection.dead:
                return self._connection
            if self._connection is not None:
                self._drop(self._connection, kill=True)
            connection = self._connection = _Connection(self._environ, self._events)
            ready = self._ask(connection, "ping", START, {})
            if "trouble" in ready:
                self._drop(connection, kill=True)
                return Advice(ready.get("text") or "the helper process does not answer", ready.get("fix", ""))
            for process in tuple(self._watched):
                connection.send({"op": "watch", **process._asdict()})
            return connection

    def _after_fork(self) -> None:
        """In a forked child: the parent's helper is not ours, and a lock may be held by a thread that is not here."""
        if self._pid == os.getpid():
            return
        connection, self._connection, self._holding = self._connection, None, None
        self._lock, self._watched, self._events = threading.RLock(), set(), deque()
        self._pid = os.getpid()
        _leaving.clear()
        if connection is not None:
            connection.forget()

    def _drop(self, connection: _Connection, kill: bool) -> None:
        with self._lock:
            if self._connection is connection:
                self._connection = None
                _log.debug("the helper process %d is given up", connection.process.pid)
                connection.close(kill)

    # the channel

    def state(self, process: Process, limit: float = 10.0) -> Answer:
        return self._driver("state", process, limit)

    def lock(self, process: Process, timeout_ms: int, limit: float) -> Answer:
        return self._driver("lock", process, limit, timeout_ms=timeout_ms)

    def checkpoint(self, process: Process, limit: float) -> Answer:
        return self._driver("checkpoint", process, limit)

    def restore(self, process: Process, limit: float) -> Answer:
        holding, self._holding = self._holding, None
        if holding is None:
            return self._driver("restore", process, limit)
        if holding is not self._connection or holding.dead:
            return Answer(None, trouble="unheld", text="the helper process that held the room has ended")
        return self._answer(self._ask(holding, "restore", limit, {**process._asdict(), "release": True}))

    def unlock(self, process: Process, limit: float) -> Answer:
        return self._driver("unlock", process, limit)

    def usage(self, limit: float = 20.0) -> dict[str, Card] | None:
        answer = self.request("usage", limit)
        if answer.get("trouble") == "died":  # since it was asked last: another one tells as well
            answer = self.request("usage", limit)
        gpus = answer.get("gpus")
        if gpus is None:
            return None
        return {
            uuid: Card(**{**card, "processes": {int(pid): size for pid, size in card["processes"].items()}})
            for uuid, card in gpus.items()
        }

    def used(self, pid: int, limit: float = 5.0) -> bool | None:
        """Whether a process has used a GPU since that was asked last, by NVML; None if nobody says."""
        used = self.request("used", limit, pid=pid).get("used")
        return used if isinstance(used, bool) else None

    def hold(self, sizes: Mapping[str, int], limit: float = 60.0) -> Answer:
        answer = self.request("hold", limit, bytes=dict(sizes))
        if "trouble" in answer:
            said = answer.get("text") or "the helper process did not answer"
            return Answer(None, trouble="room", text=said, fix=answer.get("fix", ""))
        self._holding = self._connection
        return Answer(0)

    def release(self, limit: float = 60.0) -> None:
        self._holding = None
        self._tell("release", limit)

    def _tell(self, op: str, limit: float, **fields: Any) -> None:
        """Ask the helper if it lives: none is started for what went with it."""
        connection = self._connection
        if connection is not None and not connection.dead and self._pid == os.getpid():
            self._ask(connection, op, limit, fields)

    def _driver(self, op: str, process: Process, limit: float, **fields: Any) -> Answer:
        return self._answer(self.request(op, limit, **process._asdict(), **fields))

    @staticmethod
    def _answer(answer: dict[str, Any]) -> Answer:
        if "trouble" in answer:
            return Answer(None, trouble=answer["trouble"], text=answer.get("text", ""), fix=answer.get("fix", ""))
        state = answer.get("state")
        return Answer(answer["code"], None if state is None else State(state))

    # who watches

    def watch(self, process: Process) -> None:
        """From now on `next_event` tells when the process runs again, has failed, or has ended."""
        self._watched.add(process)
        self.request("watch", 10.0, **process._asdict())

    def unwatch(self, process: Process) -> None:
        self._watched.discard(process)
        self._tell("unwatch", 10.0, **process._asdict())

    def next_event(self, timeout: float) -> Event | None:
        """The next event of a watched process; None if there is none within `timeout` seconds."""
        until = time.monotonic() + timeout
        while True:
            with contextlib.suppress(IndexError):
                event = self._events.popleft()
                if event.process in self._watched:
                    self._watched.discard(event.process)
                    return event
                continue
            left = until - time.monotonic()
            if left <= 0:
                return None
            try:
                connection = self._connected() if self._watched else None
            except (OSError, ValueError):
                connection = None
            if isinstance(connection, _Connection):
                connection.read(until)
            else:
                time.sleep(min(left, _TURN))


_OPERATIONS = ("lock", "checkpoint", "restore", "unlock")

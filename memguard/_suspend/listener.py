"""Other processes of this user may ask this one to suspend itself, if its budget says `suspend: {by_others: true}`.

A Unix socket in the user's own folder, which nobody else can enter; the kernel says who asks (`SO_PEERCRED`). One short
message is a request, one is the answer:

    {"memguard": 1, "op": "suspend"}    {"memguard": 1, "done": true, "bytes": {…}, "seconds": 0.7}
    {"memguard": 1, "op": "state"}      {"memguard": 1, "done": true, "step": "running"}
                                        {"memguard": 1, "done": false, "text": "why not, and what to do"}

The thread that listens makes no call of CUDA or NVML, so it lives on while the process is off its GPUs. It ends with
the budget. A forked child has none of it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from memguard._logs import log as _log
from memguard._logs import text_of
from memguard._suspend import records
from memguard._suspend.identity import this_process
from memguard._suspend.records import Budgeted
from memguard._suspend.turn import folder
from memguard._suspend.types import Process, Suspension
from memguard._undo import Undo
from memguard._units import is_whole
from memguard.errors import MemguardError, Suspended
from memguard.exchange.ipc import wire

VERSION = 1
REQUEST = 5.0
"""Seconds in which a peer must send its request."""
ANSWER = 600.0
"""Seconds in which the answer must come: the GPUs' work ends first, and the copy takes as long as it takes."""
MOST = 4
"""Requests that are served at once. One that asks beyond that waits for its turn."""
_AGAIN = 1.0
"""Seconds until the next try where there is no file descriptor for a connection; and for a connection in `tidy`."""
_TEXT = 2000
"""Characters of an answer's text."""
Ask = Callable[[], Suspension]


class Listener:
    """One socket, and the thread that listens there."""

    def __init__(self, ask: Ask, path: str) -> None:
        self._ask, self.path, self._pid = ask, path, os.getpid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._over = threading.Event()
        self._places = threading.Semaphore(MOST)

    def begin(self) -> None:
        folder, name = os.path.split(self.path)
        new = os.path.join(folder, f"new-{name}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        with _short(new) as path:
            self._socket.bind(path)
        os.chmod(new, 0o600)
        self._socket.listen(16)
        os.rename(new, self.path)  # now: one that is bound and does not listen looks like a dead one's
        threading.Thread(target=self._listen, name="memguard-listener", daemon=True).start()

    def end(self) -> None:
        """Nobody is served from now on. What is being answered is answered. In a forked child nothing is removed."""
        self._over.set()
        if self._pid == os.getpid():
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        else:
            self._socket.close()

    def _listen(self) -> None:
        with self._socket:
            while not self._over.is_set():
                try:
                    connection, _ = self._socket.accept()
                except OSError as error:  # it was shut, or no file descriptor is left
                    if not self._over.wait(_AGAIN):
                        _log.debug("listener: %s", error)
                    continue
                self._places.acquire()
                try:
                    threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
                except RuntimeError as error:  # no thread to be had, or Python is ending
                    _log.debug("listener: %s", error)
                    connection.close()
                    self._places.release()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                who = wire.peer(connection)
                if not wire.same_user(who):
                    raise wire.BadMessage(f"process {who.pid} belongs to user {who.uid}")
                message, fd = wire.receive(connection, REQUEST)
                if fd is not None:
                    os.close(fd)
                    raise wire.BadMessage("it came with a file descriptor")
                answer = self._answer(_op(message), who.pid)
                connection.settimeout(REQUEST)
                wire.send(connection, {"memguard": VERSION, **answer})
        except (OSError, EOFError, wire.BadMessage) as error:
            _log.debug("listener: a peer was not served: %s", error)
        finally:
            self._places.release()

    def _answer(self, op: str, pid: int) -> dict[str, Any]:
        if op == "state":
            return {"done": True, "step": _step()}
        _log.info("process %d asks this process to suspend itself", pid)
        try:
            found = self._ask()
        except MemguardError as error:
            already = isinstance(error, Suspended)
            return {"done": False, "text": str(error)[:_TEXT], "suspended": already}
        except BaseException as error:
            _log.warning("the process could not suspend itself: %s", text_of(error))
            return {"done": False, "text": text_of(error)[:_TEXT], "suspended": False}
        return {"done": True, "bytes": dict(found.bytes), "seconds": float(found.seconds)}


def _step() -> str:
    """What this process knows of itself, without asking the driver."""
    from memguard._devices import suspension

    return "running" if suspension.now is None else "suspended"


def _op(message: Mapping[str, Any]) -> str:
    op = message.get("op")
    if message.get("memguard") != VERSION or set(message) != {"memguard", "op"} or op not in ("suspend", "state"):
        raise wire.BadMessage("it is not a request")
    return str(op)


def path_of(process: Process, where: str | None = None) -> str:
    return os.path.join(where or folder(), f"listen-{process.pid}-{process.start}")


@contextlib.contextmanager
def _short(path: str) -> Iterator[str]:
    """The path, or one to the same place that fits into a socket's address (108 bytes)."""
    if len(os.fsencode(path)) < 108:
        yield path
        return
    fd = os.open(os.path.dirname(path), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{os.path.basename(path)}"
    finally:
        os.close(fd)


_active: list[Undo] = []


def start(ask: Ask | None, budget: str = "") -> Undo:
    """Let other processes know that this one runs under a budget, called `budget`, and suspend it through `ask`.

    `ask` suspends this process and raises MemguardError if it cannot; it is called on a thread of the listener's. None:
    nobody may. Returns what ends it. Raises OSError, or MemguardError if the user's folder is not safe.
    """
    _prepare()
    undo, process, where = Undo(), this_process(), folder()
    pid = os.getpid()

    def forget() -> None:
        if undo in _active:
            _active.remove(undo)
        if os.getpid() == pid:
            records.remove(process, records.BUDGET, where)

    try:
        _active.append(undo)
        undo.add("the note that it runs under a budget", forget)
        if ask is not None:
            listener = Listener(ask, path_of(process, where))
            undo.add("the listener for other processes", listener.end)
            listener.begin()
        records.write_budget(Budgeted(process, budget, ask is not None), where)
    except BaseException:
        undo.run()
        raise
    return undo


@functools.cache
def _prepare() -> None:
    import atexit

    atexit.register(_end)
    os.register_at_fork(after_in_child=_end)


def _end() -> None:
    """At the exit, and in a forked child, where only the child's copies are closed."""
    for undo in tuple(_active):
        undo.run()


def tidy(where: str | None = None) -> None:
    """Remove the sockets that nobody listens at any more."""
    where = where or folder()
    for name in os.listdir(where):
        if not name.startswith("listen-"):
            continue
        path = os.path.join(where, name)
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_AGAIN)
            try:
                with _short(path) as short:
                    connection.connect(short)
            except ConnectionRefusedError:
                os.unlink(path)


class RefusedError(MemguardError):
    """The process says no. `suspended`: because it is suspended already."""

    def __init__(self, text: str, suspended: bool = False) -> None:
        self.suspended = suspended
        super().__init__(text)


class SilentError(MemguardError):
    """The process gave no answer."""


def request(process: Process, op: str = "suspend", *, seconds: float = ANSWER, where: str | None = None) -> Any:
    """Ask a process. Its answer, checked: for `suspend` `(bytes, seconds)`, for `state` the step.

    Raises RefusedError; SilentError if it does not listen, is not the process that it claims to be, or does not answer.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(REQUEST)
            with _short(path_of(process, where)) as path:
                connection.connect(path)
            who = wire.peer(connection)
            if who.pid != process.pid or not wire.same_user(who):
                raise SilentError(f"process {process.pid}: another process listens in its place")
            wire.send(connection, {"memguard": VERSION, "op": op})
            message, fd = wire.receive(connection, seconds)
            if fd is not None:
                os.close(fd)
        return _checked(message, op)
    except (OSError, EOFError, wire.BadMessage) as error:
        raise SilentError(f"process {process.pid} does not answer: {text_of(error)}") from None


def _checked(message: Mapping[str, Any], op: str) -> Any:
    if message.get("memguard") != VERSION:
        raise wire.BadMessage("it is not an answer")
    if message.get("done") is False:
        text, suspended = message.get("text"), message.get("suspended")
        if not isinstance(text, str):
            raise wire.BadMessage("it refuses without a text")
        raise RefusedError(text[:_TEXT], suspended is True)
    if message.get("done") is not True:
        raise wire.BadMessage("it is not an answer")
    if op == "state":
        if message.get("step") not in ("running", "suspended"):
            raise wire.BadMessage("its state is unknown")
        return message["step"]
    sizes, spent = message.get("bytes"), message.get("seconds")
    if not isinstance(sizes, dict) or not all(map(is_whole, sizes.values())) or not isinstance(spent, (int, float)):
        raise wire.BadMessage("its figures are malformed")
    return sizes, float(spent)

"""A Unix socket at which a process listens for others of its user: in the user's own folder, which only they can enter.

The kernel says who asks, and who answers (`SO_PEERCRED`). What they say to each other is `wire`'s, one short message at
a time. The thread that listens makes no call of CUDA or NVML.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from memguard._base.logs import log as _log
from memguard._node.identity import Process, folder
from memguard._node.suspend.store import records
from memguard.exchange.ipc import wire

REQUEST = 5.0
"""Seconds in which a peer must send its request."""
MOST = 4
"""Peers that are served at once. One that asks beyond that waits for its turn."""
_AGAIN = 1.0
"""Seconds until the next try where there is no file descriptor for a connection; and for a connection in `tidy`."""
Serve = Callable[[socket.socket, int], None]
"""Talks to one peer, whose PID it gets. Raises OSError, EOFError or BadMessage where that fails."""


class Listening:
    """One socket, and the thread that listens there."""

    def __init__(self, serve: Serve, path: str, name: str = "memguard-listener") -> None:
        self._serve_peer, self.path, self._name, self._pid = serve, path, name, os.getpid()
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
        threading.Thread(target=self._listen, name=self._name, daemon=True).start()

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
                self._serve_peer(connection, who.pid)
        except (OSError, EOFError, wire.BadMessage) as error:
            _log.debug("listener: a peer was not served: %s", error)
        finally:
            self._places.release()


def received(connection: socket.socket, seconds: float = REQUEST) -> dict[str, Any]:
    """A message that has no file descriptor with it. Raises as `wire.receive`."""
    message, fd = wire.receive(connection, seconds)
    if fd is not None:
        os.close(fd)
        raise wire.BadMessage("it came with a file descriptor")
    return message


def left(connection: socket.socket) -> bool:
    """Whether the peer has closed its end."""
    poll = select.poll()
    poll.register(connection, 0)  # a hang-up is told unasked
    return bool(poll.poll(0))


@contextlib.contextmanager
def connected(kind: str, process: Process, where: str | None = None) -> Iterator[socket.socket]:
    """A connection to the process itself. Raises OSError; BadMessage if another one listens in its place."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(REQUEST)
        places = [where] if where is not None else records.folders(process) or [folder()]
        paths = [path_of(kind, process, one) for one in places]
        with _short(next((path for path in paths if os.path.exists(path)), paths[0])) as path:
            connection.connect(path)
        who = wire.peer(connection)
        if who.pid != process.pid or not wire.same_user(who):
            raise wire.BadMessage("another process listens in its place")
        yield connection


def path_of(kind: str, process: Process, where: str | None = None) -> str:
    return os.path.join(where or folder(), f"{kind}-{process.pid}-{process.start}")


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


def tidy(kind: str, where: str | None = None) -> None:
    """Remove the sockets of that kind that nobody listens at any more."""
    for place in [where] if where is not None else records.folders():
        for name in os.listdir(place):
            if name.startswith(f"{kind}-"):
                _tidy(os.path.join(place, name))


def _tidy(path: str) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_AGAIN)
        try:
            with _short(path) as short:
                connection.connect(short)
        except ConnectionRefusedError:
            os.unlink(path)

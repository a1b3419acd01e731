"""The exports of this process and what it has attached: one daemon thread while there are any, and one socket.

An open connection is a reference. The kernel closes it with its process, however that ends, so nothing is counted
that is gone. The thread never waits for a peer: each has a few seconds to say what it wants, and gets one answer.

A forked child has none of it: its copies are closed, and neither served nor undone.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hmac
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from memguard.exchange import lifetimes
from memguard.exchange.ipc import wire
from memguard.exchange.ipc.event_loop import Loop
from memguard.exchange.ipc.wire import Description

_log = logging.getLogger("memguard")
PATIENCE = 5.0
"""Seconds that a peer has to say what it wants."""
STRANGERS = 32
"""Peers that have not said yet what they want; more are turned away."""
_LONGEST = 107
"""Bytes of a Unix socket's path at most (`sun_path`)."""


class Export:
    """One array that others may attach. `fd` is its memory's, `release` lets go of it.

    `outlasts`: who has attached it keeps the memory when this process lets go. Else that waits for the last of them.
    """

    def __init__(self, description: Description, fd: int | None, outlasts: bool, release: Callable[[], None]) -> None:
        self.description, self.fd, self.outlasts, self._release = description, fd, outlasts, release
        self.token = secrets.token_hex(16)
        self.closed = False
        self.peers: set[_Peer] = set()

    def release(self) -> None:
        """Let go of the memory, and of what knows how to."""
        release, self._release = self._release, _nothing
        release()


def _nothing() -> None:
    return None


class _Peer:
    """A connection of another process."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection, self.pid = connection, pid
        self.data = b""
        self.deadline = time.monotonic() + PATIENCE
        self.export: Export | None = None


class Hub:
    """`_lock` guards the exports and the thread's life; the rest is the thread's alone.

    It can be taken twice: a destructor of a user's own may close a handle in the middle of any of this.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._exports: dict[str, Export] = {}
        self._listener: socket.socket | None = None
        self.path = ""
        self._loop = Loop(self._lock, self._busy, self._due)
        self._strangers: set[_Peer] = set()
        self._attached: set[socket.socket] = set()

    # For any thread.

    def add(self, export: Export) -> str:
        """Serve it from now on. Where: the path of the socket. Raises OSError."""
        with self._lock:
            if self._listener is None:
                self._listen()
            try:
                self._start()
            except BaseException:
                self._hang_up_unless_used()
                raise
            self._exports[export.token] = export
            return self.path

    def find(self, token: str) -> Export | None:
        """An export of this process that is open, or that others still hold."""
        with self._lock:
            return self._exports.get(token)

    def close(self, export: Export) -> None:
        """Nobody can attach it any more. A second call does nothing."""
        with self._lock:
            if export.closed:
                return
            export.closed = True
            over = export.outlasts or not export.peers
            if over:
                del self._exports[export.token]
            self._hang_up_unless_used()
            self._loop.later(functools.partial(self._dismiss, export))
        if over:
            export.release()

    def attached(self, export: Export) -> int:
        """The processes that hold it now."""
        with self._lock:
            return len({peer.pid or id(peer) for peer in list(export.peers)})

    def watch(self, connection: socket.socket, ended: Callable[[], None]) -> None:
        """Call `ended` on the thread when the other end is gone. Raises OSError."""
        with self._lock:
            self._attached.add(connection)
            try:
                self._start()
            except BaseException:
                self._attached.discard(connection)
                raise
        self._loop.later(functools.partial(self._watch, connection, ended))

    def leave(self, connection: socket.socket, undo: Callable[[], None]) -> None:
        """Undo on the thread, then close a connection that is watched. From a destructor too: it takes no lock."""
        self._loop.later(functools.partial(self._leave, connection, undo))

    def abandon(self) -> None:
        """Close this process's copies of everything, as a forked child; what they stand for is the parent's."""
        found: list[Any] = [self._listener, *self._attached]
        found += [peer.connection for peer in self._strangers]
        for export in self._exports.values():
            found += [peer.connection for peer in export.peers]
            if export.fd is not None:
                with contextlib.suppress(OSError):
                    os.close(export.fd)
        for connection in found:
            if connection is not None:
                connection.close()
        self._loop.abandon()

    def farewell(self) -> None:
        """The process ends: nothing of it stays on the disk."""
        with self._lock:
            self._hang_up()

    # With the lock held.

    def _listen(self) -> None:
        folder, path = _folder()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(path)
            listener.listen(64)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.rmdir(folder)
            raise
        self._listener, self.path = listener, path
        self._loop.later(functools.partial(self._loop.register, listener, functools.partial(self._accept, listener)))

    def _hang_up_unless_used(self) -> None:
        if all(export.closed for export in list(self._exports.values())):
            self._hang_up()

    def _hang_up(self) -> None:
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with contextlib.suppress(OSError):
            os.unlink(self.path)
            os.rmdir(os.path.dirname(self.path))
        if self._loop.running:
            self._loop.later(functools.partial(self._loop.close, listener))
        else:
            listener.close()

    def _start(self) -> None:
        _prepare()
        self._loop.start()

    # On the thread.

    def _busy(self) -> bool:
        return bool(self._exports or self._attached or self._strangers or self._listener is not None)

    def _due(self) -> float | None:
        now = time.monotonic()
        for peer in [peer for peer in self._strangers if peer.deadline <= now]:
            self._drop(peer, "it said nothing in time")
        return min((peer.deadline - now for peer in self._strangers), default=None)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no file descriptor left: the peer stays in the queue
            _log.debug("exchange: accept: %s", error)
            time.sleep(0.02)
            return
        try:
            connection.setblocking(False)
            who = wire.peer(connection)
            if not wire.same_user(who):
                raise OSError(f"process {who.pid} is of user {who.uid}")
            if len(self._strangers) >= STRANGERS:  # who has said nothing for longest makes room
                self._drop(min(self._strangers, key=lambda peer: peer.deadline), "too many at once")
        except OSError as error:
            _log.debug("exchange: a peer was turned away: %s", error)
            connection.close()
            return
        peer = _Peer(connection, who.pid)
        self._strangers.add(peer)
        self._loop.register(connection, functools.partial(self._hear, peer))

    def _hear(self, peer: _Peer) -> None:
        try:
            part = peer.connection.recv(4096)
            if not part:
                raise EOFError("it left")
            peer.data += part
            message = wire.unpacked(peer.data)  # one message and no more
            if message is not None:
                self._answer(peer, wire.asked(message))
        except BlockingIOError:
            return
        except (OSError, EOFError, wire.Garbage) as error:
            self._drop(peer, str(error))

    def _answer(self, peer: _Peer, token: str) -> None:
        with self._lock:  # while it goes out nobody closes the file descriptor
            found = [export for export in list(self._exports.values()) if hmac.compare_digest(export.token, token)]
            if not found or found[0].closed:
                raise wire.Garbage("its token is not known")
            found[0].peers.add(peer)
            peer.export = found[0]
            self._strangers.discard(peer)
            wire.send(peer.connection, found[0].description.message(), found[0].fd)

    def _drop(self, peer: _Peer, reason: str) -> None:
        _log.debug("exchange: process %d: %s", peer.pid, reason)
        self._strangers.discard(peer)
        self._loop.close(peer.connection)
        export, over = peer.export, False
        if export is not None:
            with self._lock:
                export.peers.discard(peer)
                over = export.closed and not export.peers and self._exports.pop(export.token, None) is not None
        if over and export is not None:
            export.release()

    def _dismiss(self, export: Export) -> None:
        """Who attached it is on its own from now on."""
        if export.outlasts:
            for peer in list(export.peers):
                self._drop(peer, "its export was closed")

    def _watch(self, connection: socket.socket, ended: Callable[[], None]) -> None:
        def look() -> None:
            try:
                if connection.recv(4096):
                    return
            except BlockingIOError:
                return
            except OSError as error:
                _log.debug("exchange: an exporter: %s", error)
            if connection in self._attached:
                self._loop.unregister(connection)  # it stays open until `leave`
                ended()

        if connection in self._attached:
            connection.setblocking(False)
            self._loop.register(connection, look)

    def _leave(self, connection: socket.socket, undo: Callable[[], None]) -> None:
        try:
            undo()
        finally:
            self._loop.close(connection)
            with self._lock:
                self._attached.discard(connection)


def _folder() -> tuple[str, str]:
    """A new directory that only this user can enter, and the path of a socket in it. Raises OSError."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    for parent in (runtime, tempfile.gettempdir(), "/tmp"):
        if not os.path.isabs(parent) or len(os.fsencode(parent)) > _LONGEST - 32 or not parent.isprintable():
            continue
        with contextlib.suppress(OSError):
            folder = tempfile.mkdtemp(prefix="memguard-", dir=parent)
            return folder, os.path.join(folder, "s")
    raise OSError("no directory for a socket: neither XDG_RUNTIME_DIR nor the one for temporary files can be written")


_accounts = threading.RLock()


def charge(ordinal: int, nbytes: int) -> None:
    """This process holds so many bytes more (or less) of a GPU for others, or that another left to it."""
    with _accounts:
        lifetimes.kept[ordinal] += nbytes
        if not lifetimes.kept[ordinal]:
            del lifetimes.kept[ordinal]


_hub = Hub()
_inherited: list[Hub] = []
"""A parent's, whose objects must not be undone here."""


def hub() -> Hub:
    return _hub


@functools.cache
def _prepare() -> None:
    atexit.register(_end)
    os.register_at_fork(after_in_child=_forked)


def _end() -> None:
    _hub.farewell()


def _forked() -> None:
    global _hub, _accounts
    _inherited.append(_hub)
    _hub.abandon()
    _hub, _accounts = Hub(), threading.RLock()
    lifetimes.kept.clear()

"""The exports of this process and the arrays that it has attached: one thread while there are any, and one socket.

An open connection is a reference. The kernel closes it with its process, however that ends, so no count outlives its
process. The thread never waits for a peer: each peer has a few seconds to send its request, and gets one answer. The
connections that hold an export, and all exports together, are limited: each takes a file descriptor of this process.

A forked child has none of it: it closes its copies, serves nothing and releases nothing.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from memguard._base import life
from memguard._base.logs import log as _log
from memguard._frameworks.arrays import lifetimes
from memguard.exchange.ipc import wire
from memguard.exchange.ipc.event_loop import EventLoop
from memguard.exchange.ipc.wire import Description

REQUEST_TIMEOUT = 5.0
"""Seconds in which a peer must send its request."""
MOST_WAITING = 32
"""Peers that have not sent their request yet; more than that many are not kept."""
MOST_PEERS = 128
"""Connections that may hold one export at once."""
_LONGEST = 107
"""Bytes in the path of a Unix socket at most (`sun_path`)."""


class Export:
    """One array that others may attach. `fd` is its memory's file descriptor, `release` frees it.

    `outlasts`: whoever has attached it keeps the memory when this process releases it. Otherwise this process releases
    it after the last of them is gone.
    """

    def __init__(self, description: Description, fd: int | None, outlasts: bool, release: Callable[[], None]) -> None:
        self.description, self.fd, self.outlasts, self._release = description, fd, outlasts, release
        self.token = secrets.token_hex(16)
        self.closed = False
        self.peers: set[_Peer] = set()

    def release(self) -> None:
        """Release the memory, once, and forget the function that did it: it keeps the array."""
        release, self._release = self._release, _nothing
        release()


def _nothing() -> None:
    return None


def most_in_all() -> int:
    """Connections that may hold exports of this process at once: the rest of its file descriptors is the program's."""
    import resource  # not there on Windows, where nothing is exported

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wire.MOST_HOLDERS if soft == resource.RLIM_INFINITY else max(soft // 4, 1)


class _Peer:
    """A connection of another process."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection, self.pid = connection, pid
        self.data = b""
        self.deadline = time.monotonic() + REQUEST_TIMEOUT
        self.export: Export | None = None


class Server:
    """`_lock` guards the exports and the thread's life; the thread alone uses the rest.

    The lock is reentrant: a destructor of the user's may close a handle in the middle of any of this.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._exports: dict[str, Export] = {}
        self._listener: socket.socket | None = None
        self.path = ""
        self._loop = EventLoop(self._lock, self._busy, self._drop_late)
        self._waiting: set[_Peer] = set()
        self._attached: set[socket.socket] = set()

    # For any thread.

    def add(self, export: Export) -> str:
        """Serve it from now on. Returns the path of the socket. Raises OSError."""
        with self._lock:
            if self._listener is None:
                self._listen()
            try:
                self._start()
            except BaseException:
                self._stop_listening_unless_used()
                raise
            self._exports[export.token] = export
            return self.path

    def find(self, token: str) -> Export | None:
        """An export of this process that is open, or that others still hold."""
        with self._lock:
            return self._exports.get(token)

    def close(self, export: Export) -> None:
        """From now on nobody can attach it. A second call does nothing."""
        with self._lock:
            if export.closed:
                return
            export.closed = True
            over = export.outlasts or not export.peers
            if over:
                del self._exports[export.token]
            self._stop_listening_unless_used()
            self._loop.call_soon(functools.partial(self._drop_peers, export))
        if over:
            export.release()

    def attached(self, export: Export) -> int:
        """The number of processes that hold it now."""
        with self._lock:
            return len({peer.pid or id(peer) for peer in list(export.peers)})

    def counts(self) -> tuple[int, int]:
        """How many arrays of this process others can attach or hold, and how many of others' it has attached."""
        with self._lock:
            offered = sum(export.description.kind != wire.NOTHING for export in list(self._exports.values()))
            return offered, len(self._attached)

    def watch(self, connection: socket.socket, ended: Callable[[], None]) -> None:
        """Call `ended` on the thread when the other end has gone. Raises OSError."""
        with self._lock:
            self._attached.add(connection)
            try:
                self._start()
            except BaseException:
                self._attached.discard(connection)
                raise
        self._loop.call_soon(functools.partial(self._watch, connection, ended))

    def leave(self, connection: socket.socket, undo: Callable[[], None]) -> None:
        """Run `undo` on the thread, then close a watched connection. From a destructor too: it takes no lock."""
        self._loop.call_soon(functools.partial(self._leave, connection, undo))

    def abandon(self) -> None:
        """In a forked child: close this process's copies of everything. The originals are the parent's."""
        found: list[Any] = [self._listener, *self._attached]
        found += [peer.connection for peer in self._waiting]
        for export in self._exports.values():
            found += [peer.connection for peer in export.peers]
            if export.fd is not None:
                with contextlib.suppress(OSError):
                    os.close(export.fd)
        for connection in found:
            if connection is not None:
                connection.close()
        self._loop.abandon()

    def at_exit(self) -> None:
        """The process ends: remove the socket from the disk."""
        with self._lock:
            self._stop_listening()

    # The caller holds the lock.

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
        accept = functools.partial(self._accept, listener)
        self._loop.call_soon(functools.partial(self._loop.register, listener, accept))

    def _stop_listening_unless_used(self) -> None:
        if all(export.closed for export in list(self._exports.values())):
            self._stop_listening()

    def _stop_listening(self) -> None:
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with contextlib.suppress(OSError):
            os.unlink(self.path)
            os.rmdir(os.path.dirname(self.path))
        if self._loop.running:
            self._loop.call_soon(functools.partial(self._loop.close, listener))
        else:
            listener.close()

    def _start(self) -> None:
        _prepare()
        self._loop.start()

    # On the thread.

    def _busy(self) -> bool:
        return bool(self._exports or self._attached or self._waiting or self._listener is not None)

    def _drop_late(self) -> float | None:
        """Drop each peer whose time is up. Returns the seconds until the next one's is; None if none waits."""
        now = time.monotonic()
        for peer in [peer for peer in self._waiting if peer.deadline <= now]:
            self._drop(peer, "it sent no request in time")
        return min((peer.deadline - now for peer in self._waiting), default=None)

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
                raise OSError(f"process {who.pid} belongs to user {who.uid}")
            if len(self._waiting) >= MOST_WAITING:  # the one that has waited longest makes room
                self._drop(min(self._waiting, key=lambda peer: peer.deadline), "too many peers wait")
        except OSError as error:
            _log.debug("exchange: a peer was refused: %s", error)
            connection.close()
            return
        peer = _Peer(connection, who.pid)
        self._waiting.add(peer)
        self._loop.register(connection, functools.partial(self._read, peer))

    def _read(self, peer: _Peer) -> None:
        try:
            part = peer.connection.recv(4096)
            if not part:
                raise EOFError("it closed the connection")
            peer.data += part
            message = wire.decode(peer.data)  # one message and no more
            if message is not None:
                self._answer(peer, wire.requested_token(message))
        except BlockingIOError:
            return
        except (OSError, EOFError, wire.BadMessage) as error:
            self._drop(peer, str(error))

    def _answer(self, peer: _Peer, token: str) -> None:
        with self._lock:  # so that nobody closes the file descriptor while it is sent
            found = [export for export in list(self._exports.values()) if hmac.compare_digest(export.token, token)]
            if not found or found[0].closed:
                raise wire.BadMessage("its token is unknown")
            if (refusal := self._refusal(found[0])) is not None:
                wire.send(peer.connection, refusal.message())
                raise ConnectionError(f"{refusal.limit} connections hold this {refusal.full} already")
            found[0].peers.add(peer)
            peer.export = found[0]
            self._waiting.discard(peer)
            wire.send(peer.connection, found[0].description.message(), found[0].fd)

    def _refusal(self, export: Export) -> wire.Refusal | None:
        """What a peer is told if too many hold the export, or all exports together. The caller holds the lock."""
        if len(export.peers) >= MOST_PEERS:
            return wire.Refusal(wire.EXPORT, MOST_PEERS)
        if sum(len(one.peers) for one in self._exports.values()) >= (most := most_in_all()):
            return wire.Refusal(wire.PROCESS, most)
        return None

    def _drop(self, peer: _Peer, reason: str) -> None:
        _log.debug("exchange: process %d: %s", peer.pid, reason)
        self._waiting.discard(peer)
        self._loop.close(peer.connection)
        export, over = peer.export, False
        if export is not None:
            with self._lock:
                export.peers.discard(peer)
                over = export.closed and not export.peers and self._exports.pop(export.token, None) is not None
        if over and export is not None:
            export.release()

    def _drop_peers(self, export: Export) -> None:
        """The export is closed: from now on whoever has attached it holds the memory alone."""
        if export.outlasts:
            for peer in list(export.peers):
                self._drop(peer, "its export was closed")

    def _watch(self, connection: socket.socket, ended: Callable[[], None]) -> None:
        def read() -> None:
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
            self._loop.register(connection, read)

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
    raise OSError("no directory for a socket: XDG_RUNTIME_DIR and the directory for temporary files are not writable")


_kept_lock = threading.RLock()


def charge(ordinal: int, nbytes: int) -> None:
    """This process now holds `nbytes` more (or less) of a GPU, for other processes or left to it by one."""
    with _kept_lock:
        lifetimes.kept[ordinal] += nbytes
        if not lifetimes.kept[ordinal]:
            del lifetimes.kept[ordinal]


_server = Server()
_inherited: list[Server] = []
"""The parent's, in a forked child: their objects must not be freed here."""


def current() -> Server:
    """This process's server."""
    return _server


@functools.cache
def _prepare() -> None:
    life.at_exit(life.HookOrder.EXPORTS, _at_exit)
    life.at_fork(life.HookOrder.EXPORTS, child=_forked)


def _at_exit() -> None:
    _server.at_exit()


def _forked() -> None:
    global _server, _kept_lock
    _inherited.append(_server)
    _server.abandon()
    _server, _kept_lock = Server(), threading.RLock()
    lifetimes.kept.clear()

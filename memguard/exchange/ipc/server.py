"""Serves this process's exports and watches its attached arrays, with one thread and one socket while there are any.

Each open connection counts as a reference to an export. The kernel closes the connections of a process that ends in any
way, so no reference outlives its process. The thread never blocks on a peer: each peer has a few seconds to send its
request, and gets one answer. The connections to one export, and to all exports together, are limited, because each
connection uses a file descriptor of this process.

A forked child inherits no export: it closes its copies of the sockets, serves nothing and releases nothing.
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
"""Seconds that a peer has to send its request."""
MOST_WAITING = 32
"""The most connected peers that have sent no request yet. When a further peer connects, the server drops the peer that
has waited longest."""
MOST_PEERS = 128
"""The most connections to one export at once."""
_LONGEST = 107
"""The most bytes of a Unix socket's path (`sun_path`)."""


class Export:
    """One array that other processes may attach. `fd` is its memory's file descriptor; `release` frees the memory.

    `kept_by_attachers`: True if attached processes keep the memory after this process has released it. If False, this
    process releases the memory only after the last attached process has disconnected.
    """

    def __init__(
        self, description: Description, fd: int | None, kept_by_attachers: bool, release: Callable[[], None]
    ) -> None:
        self.description, self.fd, self.kept_by_attachers, self._release = description, fd, kept_by_attachers, release
        self.token = secrets.token_hex(16)
        self.closed = False
        self.peers: set[_Peer] = set()

    def release(self) -> None:
        """Call the `release` function once, and drop it, because it references the array."""
        release, self._release = self._release, _nothing
        release()


def _nothing() -> None:
    return None


def process_connection_limit() -> int:
    """The most connections to all exports together: a quarter of the process's file descriptor limit
    (RLIMIT_NOFILE)."""
    import resource  # absent on Windows, where exports are impossible

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wire.MOST_HOLDERS if soft == resource.RLIM_INFINITY else max(soft // 4, 1)


class _Peer:
    """A connection from another process. `export` is None until this process has accepted the request."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection, self.pid = connection, pid
        self.data = b""
        self.deadline = time.monotonic() + REQUEST_TIMEOUT
        self.export: Export | None = None


class Server:
    """`_lock` guards the exports and the thread's start and end; only the event loop's thread uses the other
    attributes.

    The lock is re-entrant: a destructor in the user's program may close a handle inside any of these methods.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._exports: dict[str, Export] = {}
        self._listener: socket.socket | None = None
        self.path = ""
        self._loop = EventLoop(self._lock, self._busy, self._drop_expired)
        self._waiting: set[_Peer] = set()
        self._attached: set[socket.socket] = set()

    # Any thread may call the methods below.

    def add(self, export: Export) -> str:
        """Start serving the export. Returns the path of the socket. Raises OSError."""
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
        """This process's export with the token, if it is open or has connections; else None."""
        with self._lock:
            return self._exports.get(token)

    def close(self, export: Export) -> None:
        """Refuse new connections, and release the memory once no attached process needs this process to keep it."""
        with self._lock:
            if export.closed:
                return
            export.closed = True
            over = export.kept_by_attachers or not export.peers
            if over:
                del self._exports[export.token]
            self._stop_listening_unless_used()
            self._loop.call_soon(functools.partial(self._drop_peers, export))
        if over:
            export.release()

    def attached(self, export: Export) -> int:
        """The number of processes attached to the export now."""
        with self._lock:
            return len({peer.pid or id(peer) for peer in list(export.peers)})

    def counts(self) -> tuple[int, int]:
        """The number of exports of this process that are open or attached, and of other processes' arrays that
        this process has attached."""
        with self._lock:
            offered = sum(export.description.kind != wire.NOTHING for export in list(self._exports.values()))
            return offered, len(self._attached)

    def watch(self, connection: socket.socket, ended: Callable[[], None]) -> None:
        """Call `ended` on the event loop's thread when the exporter closes the connection. Raises OSError."""
        with self._lock:
            self._attached.add(connection)
            try:
                self._start()
            except BaseException:
                self._attached.discard(connection)
                raise
        self._loop.call_soon(functools.partial(self._watch, connection, ended))

    def detach(self, connection: socket.socket, undo: Callable[[], None]) -> None:
        """Run `undo` on the event loop's thread, then close a watched connection. Lock-free, because destructors call
        it."""
        self._loop.call_soon(functools.partial(self._detach, connection, undo))

    def abandon(self) -> None:
        """In a forked child: close the child's copies of the sockets and file descriptors. The parent keeps the
        originals."""
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
        """Remove the socket's file. Called at the process's exit."""
        with self._lock:
            self._stop_listening()

    # Callers of the methods below hold the lock.

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

    # Only the event loop's thread calls the methods below.

    def _busy(self) -> bool:
        return bool(self._exports or self._attached or self._waiting or self._listener is not None)

    def _drop_expired(self) -> float | None:
        """Drop each peer whose deadline has passed. Returns the seconds until the next deadline; None without a waiting
        peer."""
        now = time.monotonic()
        for peer in [peer for peer in self._waiting if peer.deadline <= now]:
            self._drop(peer, "it sent no request in time")
        return min((peer.deadline - now for peer in self._waiting), default=None)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no free file descriptor: the peer stays in the listen queue
            _log.debug("exchange: accept: %s", error)
            time.sleep(0.02)
            return
        try:
            connection.setblocking(False)
            process = wire.peer(connection)
            if not wire.same_user(process):
                raise OSError(f"process {process.pid} belongs to user {process.uid}")
            if len(self._waiting) >= MOST_WAITING:  # drop the peer that has waited longest
                self._drop(min(self._waiting, key=lambda peer: peer.deadline), "too many peers wait")
        except OSError as error:
            _log.debug("exchange: a peer was refused: %s", error)
            connection.close()
            return
        peer = _Peer(connection, process.pid)
        self._waiting.add(peer)
        self._loop.register(connection, functools.partial(self._read, peer))

    def _read(self, peer: _Peer) -> None:
        try:
            part = peer.connection.recv(4096)
            if not part:
                raise EOFError("it closed the connection")
            peer.data += part
            message = wire.decode(peer.data)  # raises BadMessage for more than one message
            if message is not None:
                self._answer(peer, wire.requested_token(message))
        except BlockingIOError:
            return
        except (OSError, EOFError, wire.BadMessage) as error:
            self._drop(peer, str(error))

    def _answer(self, peer: _Peer, token: str) -> None:
        with self._lock:  # so that no other thread closes the file descriptor during the send
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
        """The refusal for a peer if the export, or all exports together, have too many connections. Callers hold the
        lock."""
        if len(export.peers) >= MOST_PEERS:
            return wire.Refusal(wire.EXPORT, MOST_PEERS)
        if sum(len(one.peers) for one in self._exports.values()) >= (most := process_connection_limit()):
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
        """Close the connections to a closed export, if the attached processes keep its memory without this process."""
        if export.kept_by_attachers:
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
                self._loop.unregister(connection)  # the connection stays open until `detach`
                ended()

        if connection in self._attached:
            connection.setblocking(False)
            self._loop.register(connection, read)

    def _detach(self, connection: socket.socket, undo: Callable[[], None]) -> None:
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


_charge_lock = threading.RLock()


def charge(ordinal: int, nbytes: int) -> None:
    """Add `nbytes` (may be negative) to the bytes that this process holds for attached processes, or for an exporter
    that has ended."""
    with _charge_lock:
        lifetimes.held_for_processes[ordinal] += nbytes
        if not lifetimes.held_for_processes[ordinal]:
            del lifetimes.held_for_processes[ordinal]


_server = Server()
_inherited: list[Server] = []
"""In a forked child, keeps the parent's servers alive: their exports' destructors must not run in the child."""


def current() -> Server:
    """Return this process's server. A forked child has a new one."""
    return _server


@functools.cache
def _prepare() -> None:
    life.at_exit(life.HookOrder.EXPORTS, _at_exit)
    life.at_fork(life.HookOrder.EXPORTS, child=_forked)


def _at_exit() -> None:
    _server.at_exit()


def _forked() -> None:
    global _server, _charge_lock
    _inherited.append(_server)
    _server.abandon()
    _server, _charge_lock = Server(), threading.RLock()
    lifetimes.held_for_processes.clear()

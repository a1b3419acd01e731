"""One page over HTTP, for this machine only: a thread that answers `GET /metrics` at 127.0.0.1.

One thread waits for all peers at once, so that whoever connects and says nothing keeps nobody waiting. There are `MOST`
of them; a further one takes the place of the oldest that has not asked yet. Each has `PATIENCE`. The thread makes no
call of CUDA or NVML. In a forked child nobody serves, and the child keeps neither the port nor a connection.
"""

from __future__ import annotations

import contextlib
import functools
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from memguard._base import life
from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._runtime.sampler import Flag

ADDRESS = "127.0.0.1"
PATH = "/metrics"
PATIENCE = 2.0
"""Seconds in which a request must be there, and then for its answer to be taken."""
MOST = 8
"""Connections that are open at a time."""
LONGEST = 8192
"""Bytes of a request."""
_JOIN = 3.0
"""Seconds that `end` waits for an answer that is under way."""
_AGAIN = 1.0
"""Seconds until the next try where there is no file descriptor for a connection."""
_PLAIN = "text/plain; charset=utf-8"
_REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed"}
_REASONS |= {500: "Internal Server Error"}
Page = Callable[[], tuple[bytes, str]]
"""The page and its content type."""


@dataclass(eq=False)
class _Peer:
    """A connection. `until` is monotonic. `left` of its answer is not sent yet; None while its request is awaited."""

    socket: socket.socket
    until: float
    request: bytes = b""
    left: memoryview | None = None


class Server:
    """Listens from `begin` to `end`."""

    def __init__(self, page: Page, port: int) -> None:
        self._page, self._port = page, port
        self._over = Flag()
        self._socket: socket.socket | None = None
        self._peers: list[_Peer] = []
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Raises OSError if the port is taken, OverflowError if there is no such port."""
        _watch_forks()
        _live.append(self)
        listening = self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        # Linux: a connection that is closing keeps nobody from the port, one who listens does.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((ADDRESS, self._port))
        listening.listen(16)
        self._thread = threading.Thread(target=self._listen, args=(listening,), name="memguard-metrics", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """The port is free from now on. May be called again, or if `begin` was interrupted."""
        self._over.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is closed; in a forked child it always is
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(_JOIN)
        self.close()

    def close(self) -> None:
        """Close this process's end of what is open; in a forked child the parent's stays."""
        if self._socket is not None:
            self._socket.close()
        for peer in tuple(self._peers):
            self._drop(peer)
        if self in _live:
            _live.remove(self)

    def _listen(self, listening: socket.socket) -> None:
        with listening:
            while not self._over.is_set():
                try:
                    self._serve(listening)
                except (OSError, ValueError) as error:  # it was shut, or no file descriptor is left
                    if not self._over.wait(_AGAIN):
                        _log.debug("metrics: %s", text_of(error))

    def _serve(self, listening: socket.socket) -> None:
        """Wait until something comes, and do what can be done without waiting."""
        poll = select.poll()  # unlike epoll it has no descriptor that a child would keep
        poll.register(listening, select.POLLIN)
        for peer in self._peers:
            poll.register(peer.socket, select.POLLIN if peer.left is None else select.POLLOUT)
        soonest = min((peer.until for peer in self._peers), default=None)
        wait = None if soonest is None else max(soonest - time.monotonic(), 0.0) * 1000 + 1
        ready = {number for number, _ in poll.poll(wait)}
        for peer in tuple(self._peers):
            if self._over.is_set():
                return
            if peer.socket.fileno() in ready:
                self._go_on(peer)
            elif time.monotonic() >= peer.until:
                self._drop(peer)
        if listening.fileno() in ready and not self._over.is_set():
            connection, _ = listening.accept()
            connection.setblocking(False)
            if len(self._peers) >= MOST:
                self._drop(next((peer for peer in self._peers if peer.left is None), self._peers[0]))
            self._peers.append(_Peer(connection, time.monotonic() + PATIENCE))

    def _drop(self, peer: _Peer) -> None:
        peer.socket.close()
        if peer in self._peers:
            self._peers.remove(peer)

    def _go_on(self, peer: _Peer) -> None:
        """Take what came of a request, or send what the other side takes of the answer."""
        try:
            if peer.left is None:
                piece = peer.socket.recv(4096)
                peer.request += piece
                if not piece:
                    self._drop(peer)
                if not piece or (b"\r\n\r\n" not in peer.request and len(peer.request) <= LONGEST):
                    return
                peer.left = memoryview(self._answer(peer.request))
                peer.until = time.monotonic() + PATIENCE
            peer.left = peer.left[peer.socket.send(peer.left) :]
            if not peer.left:
                self._drop(peer)
        except BlockingIOError:
            return
        except OSError as error:
            self._drop(peer)
            _log.debug("metrics: a request was not answered: %s", text_of(error))

    def _answer(self, request: bytes) -> bytes:
        status, head, body, kind = _checked(request)
        if status == 200:
            try:
                body, kind = self._page()
            except Exception as error:
                _log.debug("metrics: the page could not be made: %s", text_of(error))
                status, body = 500, b"the figures cannot be told\n"
        lines = [f"HTTP/1.1 {status} {_REASONS[status]}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
        lines += ["Connection: close", "X-Content-Type-Options: nosniff", "", ""]
        return "\r\n".join(lines).encode() + (b"" if head else body)


_live: list[Server] = []


@functools.cache
def _watch_forks() -> None:
    life.at_fork(life.HookOrder.METRICS, child=_forked)


def _forked() -> None:
    """In a child: no thread of the parent's is there, and a copy of its socket would keep the port."""
    for server in tuple(_live):
        server.close()


def _checked(request: bytes) -> tuple[int, bool, bytes, str]:
    """The status of the answer, whether only its head is wanted, and what to say if it is not the page."""
    lines = request.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
    first = lines[0].split(" ")
    if len(request) > LONGEST or len(first) != 3 or not first[2].startswith("HTTP/1."):
        return 400, False, b"this is not a request for metrics\n", _PLAIN
    method, target, _ = first
    if method not in ("GET", "HEAD"):
        return 405, False, b"only GET is answered\n", _PLAIN
    hosts = [line.partition(":")[2].strip() for line in lines[1:] if line.lower().startswith("host:")]
    # A web page whose name was made to mean this machine (DNS rebinding) is refused.
    if any(host.rpartition(":")[0] not in _OWN and host not in _OWN for host in hosts):
        return 403, method == "HEAD", b"ask for 127.0.0.1 or localhost\n", _PLAIN
    if target.partition("?")[0] != PATH:
        return 404, method == "HEAD", b"the figures are at /metrics\n", _PLAIN
    return 200, method == "HEAD", b"", _PLAIN


_OWN = (ADDRESS, "localhost")

"""A daemon thread that looks after sockets, as long as there is something to look after."""

from __future__ import annotations

import contextlib
import functools
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

_log = logging.getLogger("memguard")
LINGER = 0.2
"""Seconds that the thread stays when there is nothing left: exports often follow each other."""


class Loop:
    """`lock` is its owner's, and can be taken twice. `busy` says whether the thread has to stay.

    `due` is called in each round, and gives the seconds until it has to be again; None for never.
    """

    def __init__(
        self,
        lock: contextlib.AbstractContextManager[object],
        busy: Callable[[], bool],
        due: Callable[[], float | None],
    ) -> None:
        self._lock, self._busy, self._due = lock, busy, due
        self._thread: threading.Thread | None = None
        self._bells: tuple[socket.socket, socket.socket] | None = None
        self._calls: deque[Callable[[], None]] = deque()
        self._selector = selectors.PollSelector()  # a forked child has no part in it, as it would in epoll's
        self._quiet: float | None = None

    @property
    def running(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        """Start the thread where it is not running. With the lock held."""
        if self._thread is not None:
            return
        bells = socket.socketpair()
        self._selector, self._bells, self._quiet = selectors.PollSelector(), bells, None
        try:
            for bell in bells:
                bell.setblocking(False)
            self._selector.register(bells[0], selectors.EVENT_READ, functools.partial(self._drain, bells[0]))
            self._thread = threading.Thread(target=self._run, name="memguard-sharing", daemon=True)
            self._thread.start()
        except BaseException:
            self._stop()
            raise

    def later(self, call: Callable[[], None]) -> None:
        """Call it on the thread, once that is running. From any thread, a destructor too: it takes no lock."""
        self._calls.append(call)
        bells = self._bells
        if bells is not None:
            with contextlib.suppress(OSError):  # full: it is awake already
                bells[1].send(b"\0")

    def abandon(self) -> None:
        """Close this process's copies, as a forked child."""
        for bell in self._bells or ():
            bell.close()

    # On the thread.

    def register(self, connection: socket.socket, call: Callable[[], None]) -> None:
        """Call it whenever there is something to read."""
        if connection.fileno() >= 0:
            self._selector.register(connection, selectors.EVENT_READ, call)

    def unregister(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)

    def close(self, connection: socket.socket) -> None:
        self.unregister(connection)
        connection.close()

    def _run(self) -> None:
        while True:
            self._round()
            if self._over():
                with self._lock:
                    if self._over():
                        self._stop()
                        return

    def _round(self) -> None:
        """A frame of its own: while the next one waits, nothing here keeps what the last one was about alive."""
        for key, _ in self._selector.select(self._until()):
            _safely(key.data)
        while self._calls:
            _safely(self._calls.popleft())

    def _until(self) -> float | None:
        """Seconds until something has to be done though nobody rings."""
        if self._calls:
            return 0
        times = [self._due(), None if self._quiet is None else self._quiet + LINGER - time.monotonic()]
        soon = [seconds for seconds in times if seconds is not None]
        return max(min(soon), 0.001) if soon else None

    def _over(self) -> bool:
        """Nothing to do, and for a while: whoever rang the bell last has long let go of it."""
        if self._calls or self._busy():
            self._quiet = None
            return False
        if self._quiet is None:
            self._quiet = time.monotonic()
        return time.monotonic() - self._quiet >= LINGER

    def _stop(self) -> None:
        bells, self._bells, self._thread = self._bells, None, None
        for bell in bells or ():
            bell.close()
        self._selector.close()

    def _drain(self, bell: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while bell.recv(4096):
                pass


def _safely(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:
        _log.debug("exchange: %s", error, exc_info=True)

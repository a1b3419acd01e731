"""A daemon thread that serves sockets, and ends when there are none.

memguard does not use asyncio's event loop, for these reasons:

- A destructor may call `call_soon`, on any thread and inside any code. So `call_soon` takes no lock.
- A forked child must not change its parent's sockets. asyncio uses epoll, whose set of sockets a child shares with its
  parent: if one process adds or removes a socket, it does so for both. With poll each process has its own set.
- The thread starts with the first socket and ends soon after the last is closed, both under the owner's lock. A program
  without exports has no thread, no socket and no import of asyncio.
- Between two rounds no frame of the thread references the last callback, so the thread keeps no array alive.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from memguard._base.logs import log as _log

LINGER = 0.2
"""Seconds that an idle thread waits before it ends, because a new export often follows soon."""


class EventLoop:
    """Runs callbacks of sockets on a daemon thread. `lock` is the re-entrant lock of the loop's owner. `busy` returns
    True while the thread must not end.

    The thread calls `check_deadlines` in each round. `check_deadlines` returns the seconds until the next call is due,
    or None.
    """

    def __init__(
        self,
        lock: contextlib.AbstractContextManager[object],
        busy: Callable[[], bool],
        check_deadlines: Callable[[], float | None],
    ) -> None:
        self._lock, self._busy, self._check_deadlines = lock, busy, check_deadlines
        self._thread: threading.Thread | None = None
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        self._calls: deque[Callable[[], None]] = deque()
        self._selector = selectors.PollSelector()
        self._idle_since: float | None = None

    @property
    def running(self) -> bool:
        return self._thread is not None

    def start(self) -> None:
        """Start the thread if it is not running. Callers hold the lock."""
        if self._thread is not None:
            return
        pair = socket.socketpair()
        self._selector, self._wakeup, self._idle_since = selectors.PollSelector(), pair, None
        try:
            for end in pair:
                end.setblocking(False)
            self._selector.register(pair[0], selectors.EVENT_READ, functools.partial(self._drain, pair[0]))
            self._thread = threading.Thread(target=self._run, name="memguard-sharing", daemon=True)
            self._thread.start()
        except BaseException:
            self._stop()
            raise

    def call_soon(self, call: Callable[[], None]) -> None:
        """Queue `call` for the thread. Takes no lock, so any thread and any destructor may call it."""
        self._calls.append(call)
        pair = self._wakeup
        if pair is not None:
            with contextlib.suppress(OSError):  # a full buffer means that the thread is awake already
                pair[1].send(b"\0")

    def abandon(self) -> None:
        """In a forked child: close this process's copies of the sockets."""
        for end in self._wakeup or ():
            end.close()

    # Only the event loop's thread calls the methods below.

    def register(self, connection: socket.socket, call: Callable[[], None]) -> None:
        """Run `call` whenever the connection can be read."""
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
            self._run_once()
            if self._finished():
                with self._lock:
                    if self._finished():
                        self._stop()
                        return

    def _run_once(self) -> None:
        """Run one round, in its own frame: after its return the thread references no callback."""
        for key, _ in self._selector.select(self._timeout()):
            _call(key.data)
        while self._calls:
            _call(self._calls.popleft())

    def _timeout(self) -> float | None:
        """Seconds until the next deadline; None if there is none."""
        if self._calls:
            return 0
        times = [self._check_deadlines()]
        times += [] if self._idle_since is None else [self._idle_since + LINGER - time.monotonic()]
        known = [seconds for seconds in times if seconds is not None]
        return max(min(known), 0.001) if known else None

    def _finished(self) -> bool:
        """True if the thread was idle for `LINGER` seconds, so that no caller still uses the wakeup socket."""
        if self._calls or self._busy():
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = time.monotonic()
        return time.monotonic() - self._idle_since >= LINGER

    def _stop(self) -> None:
        pair, self._wakeup, self._thread = self._wakeup, None, None
        for end in pair or ():
            end.close()
        self._selector.close()

    def _drain(self, end: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while end.recv(4096):
                pass


def _call(call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:
        _log.debug("exchange: %s", error, exc_info=True)

"""What others ask of a process waits here for its next checkpoint, and is done there, on the process's own thread.

Without a lock: a checkpoint may come within another one, by a signal handler or a finalizer. Each step is one call.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

from memguard._base.logs import text_of
from memguard._node.top.snapshot import Request
from memguard.errors import MemguardError

WAITING = 16
"""Requests that may wait at once."""
KEPT = 8
"""Answers that are kept."""
_TEXT = 1000
"""Characters of an answer."""
Do = Callable[[], str]
"""Does it, and says what came of it. Raises MemguardError if it cannot."""


class Requests:
    """In the order of coming."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._waiting: deque[tuple[Request, Do]] = deque()
        self._done: deque[Request] = deque(maxlen=KEPT)
        self._here = threading.local()

    def add(self, what: str, do: Do) -> int:
        """Its number. Raises MemguardError if too many wait already."""
        if len(self._waiting) >= WAITING:
            raise MemguardError(
                f"{WAITING} requests wait for the process's next checkpoint",
                fix="wait; a program without workloads calls memguard.checkpoint() in its loop",
            )
        number = next(self._numbers)
        self._waiting.append((Request(number, what, "waiting"), do))
        return number

    @property
    def waiting(self) -> bool:
        """Whether something waits."""
        return bool(self._waiting)

    def perform(self) -> None:
        """Do what waits, on this thread. Raises nothing but what interrupts it (Ctrl-C)."""
        if not self._waiting or getattr(self._here, "busy", False):  # mostly
            return
        self._here.busy = True
        try:
            while self._waiting:
                try:
                    request, do = self._waiting.popleft()
                except IndexError:  # another thread took it
                    return
                self._perform(request, do)
        finally:
            self._here.busy = False

    def _perform(self, request: Request, do: Do) -> None:
        state, answer = False, "interrupted"
        try:
            try:
                answer = do()
                state = True
            except MemguardError as error:
                answer = error.advice.line()
            except Exception as error:
                answer = text_of(error)
        finally:
            self._done.append(Request(request.number, request.what, "done" if state else "failed", answer[:_TEXT]))

    def seen(self) -> tuple[Request, ...]:
        """What was done, and what waits, oldest first."""
        waiting = [request for request, _ in self._waiting.copy()]
        return (*self._done.copy(), *waiting)

"""Work on a thread of its own, for a caller that can be interrupted while it waits.

The driver's steps must not be left in the middle by a Ctrl-C. So they run on another thread: an interruption asks that
one to stop where it can, and is raised once it has.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from memguard._runtime.sampler import Flag
from memguard.errors import MemguardError

T = TypeVar("T")
_SLICE = 0.05
"""Seconds between two looks at what the work wants to tell."""


class Calls:
    """What the work is given: `stop` is set at the first interruption, `give_up` at the next one.

    `tell` hands something to the waiting thread.
    """

    def __init__(self) -> None:
        self.stop, self.give_up = threading.Event(), threading.Event()
        self.told: deque[Any] = deque()

    def tell(self, what: Any) -> None:
        self.told.append(what)

    def interrupt(self) -> None:
        (self.give_up if self.stop.is_set() else self.stop).set()


class Task(Generic[T]):
    """`do` is called on the other thread."""

    def __init__(self, do: Callable[[Calls], T]) -> None:
        self._do = do
        self._calls, self._done = Calls(), Flag()
        self._found: list[T] = []
        self._error: BaseException | None = None
        self.interruption: BaseException | None = None
        """What came into the wait first: a KeyboardInterrupt, or what a signal handler or `tell` raised."""

    @property
    def given_up(self) -> bool:
        """Whether it was interrupted a second time."""
        return self._calls.give_up.is_set()

    @property
    def result(self) -> T | None:
        """What the work returned; None if it has failed."""
        return self._found[0] if self._found else None

    def wait(self, tell: Callable[[Any], object] | None = None, after: Callable[[], object] | None = None) -> T:
        """The result, or its error. `tell` is called on this thread with what the work hands over.

        `after` is called on this thread once the work has ended, and again if an interruption comes into it: it does
        what is left. An interruption asks the work to stop, and is raised when all has ended, in place of its error.
        `result` has what it returned all the same.
        """
        thread = threading.Thread(target=self._run, name="memguard-suspend", daemon=True)
        begun = False
        while True:
            try:
                if not begun:
                    begun = True
                    thread.start()
                while not self._done.wait(_SLICE):
                    while self._calls.told and tell is not None:
                        tell(self._calls.told.popleft())
                if after is not None:
                    after()
                break
            except BaseException as error:
                if thread.ident is None:  # it never began: the interpreter ends, or has no more threads
                    raise
                self.interruption = self.interruption or error
                self._calls.interrupt()
        failure, self._error = self._error, None
        if self.interruption is not None:
            raise self.interruption
        if failure is not None:
            raise failure
        if not self._found:
            raise MemguardError("the thread of the suspension has ended without an answer")
        return self._found[0]

    def _run(self) -> None:
        try:
            self._found.append(self._do(self._calls))
        except BaseException as error:
            self._error = error
        finally:
            self._done.set()

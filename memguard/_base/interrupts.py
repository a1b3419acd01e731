"""Defer Python-level signal handlers during a state change, so that a Ctrl-C cannot interrupt the change halfway."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class deferred_signals:  # noqa: N801 - used like a function: `with deferred_signals():`
    """Within the block, records signals that have a Python-level handler; their handlers run when the block ends.

    A handler runs once for each delivery: twice after two Ctrl-C. An exception of a handler propagates out of the
    block; its `__context__` is then the block's own exception, if any. A handler that the block installs stays
    installed, runs without deferral, and receives the deliveries recorded for its signal.

    Defers nothing on threads other than the main thread and in subinterpreters, where Python runs no handlers, and
    within another `deferred_signals` block. Does not change handlers in C (faulthandler, the wakeup fd, `SIG_DFL`) and
    the flags of `signal.siginterrupt`. Do not wait within the block: a blocking lock, an import, a join or a callback
    of the program could not be interrupted.

    Defers only signals: not MemoryError, and not an exception that another thread sets in this thread.
    """

    def __init__(self) -> None:
        self._replaced: list[_Recorder] = []
        self._recorded: list[int] = []
        self._process = os.getpid()

    def __enter__(self) -> None:
        global _current
        if threading.get_ident() != threading.main_thread().ident or (_current is not None and _current() is not None):
            return
        try:
            _current = weakref.ref(self)
            # Replace SIGINT first and restore it last, because other signals are rare.
            for number in (signal.SIGINT, *_OTHERS):
                handler = signal.getsignal(number)
                if callable(handler):
                    recorder = _Recorder(self, number, handler)
                    self._replaced.append(recorder)
                    _install(number, recorder)
        except BaseException as error:  # a handler not replaced yet raised, or this is a subinterpreter
            self._end(sys._getframe(1))
            if not (isinstance(error, ValueError) and "main interpreter" in str(error)):
                raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if _current is not None and _current() is self:
            self._end(sys._getframe(1))

    def record(self, number: int) -> None:
        """Record one delivery of the signal `number`, in place of running its handler."""
        self._drop_of_the_parent()
        self._recorded.append(number)

    def _end(self, frame: FrameType) -> None:
        """Restore the handlers in reverse order. Then run the handlers of the recorded signals with `frame`, the
        frame of the code that contains the block."""
        global _current
        try:
            while self._replaced:
                recorder = self._replaced[-1]
                if signal.getsignal(recorder.number) is recorder:
                    _install(recorder.number, recorder.handler)
                self._replaced.pop()
            _current = None
            self._drop_of_the_parent()
            while self._recorded:
                handler = signal.getsignal(self._recorded[0])
                # One C call pops the record and calls the program's current handler, so no signal can come between.
                call = handler if callable(handler) else lambda number, frame: signal.raise_signal(number)
                next(map(call, map(self._recorded.pop, (0,)), (frame,)))
        finally:
            if self._replaced or self._recorded:
                self._end(frame)

    def _drop_of_the_parent(self) -> None:
        """In a forked child, drop the recorded signals, which were sent to the parent."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._recorded.clear()


class _Recorder:
    """The signal handler during the block, which records each delivery. After the block it calls the original handler.

    Refers to the block weakly, so that deferral ends even if an exception set by another thread prevents `__exit__`.
    """

    def __init__(self, block: deferred_signals, number: int, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._block, self.number, self.handler = weakref.ref(block), number, handler

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        block = self._block()
        if block is None or _current is not self._block:
            return self.handler(number, frame)
        return block.record(number)


def _install(number: int, handler: Any) -> None:
    """Change the handler in Python's table only. `signal.signal` also sets the signal's disposition in the kernel,
    which is restored here."""
    sigaction, buffer = _libc()
    before = buffer()
    known = sigaction(int(number), None, before) == 0
    try:
        signal.signal(number, handler)
    finally:
        if known:
            sigaction(int(number), before, None)


@functools.cache
def _libc() -> tuple[Callable[..., int], Callable[[], Any]]:
    """Return libc's `sigaction` and a buffer type larger than `struct sigaction`. Without libc, the flags that
    `signal.siginterrupt` set are lost."""
    try:
        import ctypes

        return ctypes.CDLL(None).sigaction, ctypes.c_char * 512
    except (ImportError, OSError, TypeError, AttributeError):
        return lambda *_: -1, lambda: None


_OTHERS = sorted(signal.valid_signals() - {signal.SIGINT})
_current: weakref.ref[deferred_signals] | None = None

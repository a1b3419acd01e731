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
    """Within the block, Python-level signal handlers of the program are recorded; they run at its end.

    Every delivery counts: after two Ctrl-C the handler runs twice. A handler's exception is raised out of the block; an
    exception of the block itself is then its `__context__`. A handler that the block installs stays, is not deferred,
    and receives the deliveries recorded for its signal.

    It does nothing on other threads and in subinterpreters, where Python runs no handlers, and within another such
    block. Handlers in C (faulthandler, the wakeup fd, `SIG_DFL`) and the flags of `signal.siginterrupt` stay as they
    are. Keep waits outside: locks that may block, imports, joins and callbacks of the program could not be interrupted.

    It protects against signals only: an exception that another thread sets in this one, or MemoryError, is not
    deferred.
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
            # SIGINT first and, below, restored last: the other signals are rare.
            for number in (signal.SIGINT, *_OTHERS):
                handler = signal.getsignal(number)
                if callable(handler):
                    recorder = _Recorder(self, number, handler)
                    self._replaced.append(recorder)
                    _install(number, recorder)
        except BaseException as error:  # a handler that is not replaced yet raised it, or this is a subinterpreter
            self._end(sys._getframe(1))
            if not (isinstance(error, ValueError) and "main interpreter" in str(error)):
                raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if _current is not None and _current() is self:
            self._end(sys._getframe(1))

    def record(self, number: int) -> None:
        """Python calls this in place of the handler."""
        self._drop_of_the_parent()
        self._recorded.append(number)

    def _end(self, frame: FrameType) -> None:
        """Restore the handlers, last first. Then run the handlers whose signals were recorded, with the block's
        frame."""
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
                # Call the program's current handler. One C call: no signal comes between the removal and the handler.
                call = handler if callable(handler) else lambda number, frame: signal.raise_signal(number)
                next(map(call, map(self._recorded.pop, (0,)), (frame,)))
        finally:
            if self._replaced or self._recorded:
                self._end(frame)

    def _drop_of_the_parent(self) -> None:
        """In a forked child, drop the recorded signals: they were sent to its parent."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._recorded.clear()


class _Recorder:
    """The handler during the block: records its signal. Called after the block, it calls the original handler.

    The weak reference ends the deferral with the block even if an exception from another thread prevents `__exit__`.
    """

    def __init__(self, block: deferred_signals, number: int, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._block, self.number, self.handler = weakref.ref(block), number, handler

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        block = self._block()
        if block is None or _current is not self._block:
            return self.handler(number, frame)
        return block.record(number)


def _install(number: int, handler: Any) -> None:
    """Change the handler in Python's table only: restores the disposition that `signal.signal` sets too."""
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
    """libc's `sigaction`, and a buffer larger than its struct. Without libc, `signal.siginterrupt`'s flags are lost."""
    try:
        import ctypes

        return ctypes.CDLL(None).sigaction, ctypes.c_char * 512
    except (ImportError, OSError, TypeError, AttributeError):
        return lambda *_: -1, lambda: None


_OTHERS = sorted(signal.valid_signals() - {signal.SIGINT})
_current: weakref.ref[deferred_signals] | None = None

"""Order between streams: what one was given before a moment, and who waits for it. CUDA events, through ctypes.

Measured on an H200: `cuCtxRecordEvent` covers streams that were made non-blocking, which an event on the legacy
default stream does not. It and `cuCtxSynchronize` end a CUDA graph capture that any thread has under way in the
context, so a stream is better where one is known; recording on a stream that is not captured disturbs none.
"""

from __future__ import annotations

import ctypes
import functools
import os
from types import TracebackType
from typing import Any

from memguard._devices import contexts
from memguard.errors import DeviceError

_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_CAPTURED = 900  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
_CONTEXT, _ORDINAL = 1, 9  # CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
PER_THREAD = _NAMED = 2
"""CU_STREAM_PER_THREAD. Handles up to this name a default stream of the current context."""
LEGACY = 1
"""CU_STREAM_LEGACY, as DLPack and the CUDA array interface name the default stream."""
_idle: dict[int, list[int]] = {}
"""Events of each primary context that nobody waits for any more: making one costs as much as recording it."""


class Captured(DeviceError):
    """A CUDA graph is being captured, which what was asked for would end."""


class Handle(int):
    """A stream's handle that keeps the stream: the driver crashes over the handle of one that was destroyed."""

    owner: Any

    def __new__(cls, value: int, owner: Any) -> Handle:
        made = super().__new__(cls, value)
        made.owner = owner
        return made


class _Calls:
    """The driver's calls of a hand-over, each found once. With their types given ctypes takes plain numbers."""

    __slots__ = ("capturing", "create", "destroy", "query", "record", "record_context", "synchronize", "wait")

    def __init__(self, cuda: Any) -> None:
        if isinstance(cuda, ctypes.CDLL):  # types are of a library's object: others go on without
            cuda = ctypes.CDLL(cuda._name, mode=getattr(os, "RTLD_NOLOAD", 4))
        any_, uint = ctypes.c_void_p, ctypes.c_uint
        self.create = _typed(cuda, "cuEventCreate", any_, uint)
        self.destroy = _typed(cuda, "cuEventDestroy_v2", any_)
        self.record = _typed(cuda, "cuEventRecord", any_, any_)
        self.record_context = _typed(cuda, "cuCtxRecordEvent", any_, any_)
        self.query = _typed(cuda, "cuEventQuery", any_)
        self.wait = _typed(cuda, "cuStreamWaitEvent", any_, any_, uint)
        self.synchronize = _typed(cuda, "cuEventSynchronize", any_)
        self.capturing = _typed(cuda, "cuStreamIsCapturing", any_, any_)


def _typed(cuda: Any, name: str, *types: Any) -> Any:
    """The call; None where the driver is too old for it."""
    call = getattr(cuda, name, None)
    if call is not None:
        call.argtypes = types
    return call


_bound = functools.lru_cache(maxsize=1)(_Calls)


def _calls() -> _Calls:
    return _bound(loaded())


class Mark:
    """Everything that `stream` was given so far, on the GPU `ordinal`; without a stream everything of the context.

    `context` is another than the GPU's primary one. Raises DeviceError where CUDA refuses.
    """

    __slots__ = ("_calls", "_event", "_of", "_primary")

    def __init__(self, ordinal: int, stream: int | None = None, context: int | None = None) -> None:
        calls = self._calls = _calls()
        self._event, self._primary = 0, contexts.primary(ordinal) or 0
        self._of = self._primary if context is None else context
        if not self._of:
            return  # no context: nothing was ever given to the GPU
        with contexts.entered(self._of):
            if stream is None and calls.record_context is None:  # a driver before 12.5
                _check("cuCtxSynchronize", loaded().cuCtxSynchronize())
                return
            event = self._event = _event(calls, self._of)
            code = calls.record_context(self._of, event) if stream is None else calls.record(event, stream)
        self._succeeded("recording an event", code)

    def passed(self) -> bool:
        """Whether all of it is done. Never waits, and spoils no CUDA graph that is captured meanwhile."""
        if not self._event:
            return True
        with contexts.beside_captures():
            return self._over()

    def before(self, stream: int) -> None:
        """What `stream` of the same GPU is given from now on runs after it. The host does not wait."""
        if self._event:
            with contexts.entered(self._primary or self._of):  # handles 0 to 2 name a stream of the current context
                code = self._calls.wait(stream, self._event, 0)
            self._succeeded("cuStreamWaitEvent", code)

    def wait(self) -> None:
        """The host waits for it, without the GIL and without spoiling a CUDA graph that is captured meanwhile."""
        if self._event:
            with contexts.beside_captures():
                if not self._over():
                    self._succeeded("cuEventSynchronize", self._calls.synchronize(self._event))

    def _over(self) -> bool:
        code = self._calls.query(self._event)
        if code != _NOT_READY:
            self._succeeded("cuEventQuery", code)
        return bool(code == 0)

    def _succeeded(self, call: str, code: int) -> None:
        """Raises where it did not. The event is no use any more then, in whatever state it is."""
        if code:
            event, self._event = self._event, 0
            self._calls.destroy(event)
            _idle.pop(self._of, None)  # of a context that was reset, none is any more
            _check(call, code)

    def close(self) -> None:
        event, self._event = self._event, 0
        if event and self._of == self._primary:
            _idle.setdefault(self._of, []).append(event)
        elif event:  # another context may end, and its events with it
            self._calls.destroy(event)

    def __enter__(self) -> Mark:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def follow(ordinal: int, first: int | None, then: int | None, context: int | None = None) -> None:
    """The stream `then` (None: the host) runs on after what the stream `first` was given (None: the whole context).

    A stream has nothing to wait for in itself. Raises DeviceError where CUDA refuses, Captured where it would.
    """
    if first is not None and then is not None and (first or LEGACY) == (then or LEGACY):  # 0 and 1 are the same stream
        return
    captured = first is not None and capturing(ordinal, first)
    if captured != (then is not None and capturing(ordinal, then)):
        raise Captured("a CUDA graph is being captured, and may not wait for what is outside it, nor be waited for")
    with Mark(ordinal, first, context) as mark:
        if then is None:
            mark.wait()
        else:
            mark.before(then)


def capturing(ordinal: int, stream: int) -> bool:
    """Whether the stream is recording a CUDA graph. Asking does not disturb it. The legacy default stream never is."""
    if stream in (0, LEGACY):
        return False
    status = ctypes.c_int()
    if stream > _NAMED:
        code = _calls().capturing(stream, ctypes.byref(status))
        return bool(code == 0 and status.value)
    primary = contexts.primary(ordinal)
    if primary is None:
        return False
    with contexts.entered(primary):
        code = _calls().capturing(stream, ctypes.byref(status))
    return bool(code == 0 and status.value)


def place(address: int) -> tuple[int, int | None] | None:
    """The ordinal of the GPU that an address lies on, and the context it was allocated in (None: in none).

    `cuPointerGetAttribute`, 1 us each. None for memory that CUDA does not know, so the host's.
    """
    cuda = contexts.loaded()
    ordinal, context = ctypes.c_int(), ctypes.c_void_p()
    if cuda is None or cuda.cuPointerGetAttribute(ctypes.byref(ordinal), _ORDINAL, ctypes.c_uint64(address)):
        return None
    cuda.cuPointerGetAttribute(ctypes.byref(context), _CONTEXT, ctypes.c_uint64(address))
    return ordinal.value, context.value


def loaded() -> Any:
    """The driver. Raises DeviceError where nothing has initialised CUDA in this process."""
    cuda = contexts.loaded()
    if cuda is None:
        raise DeviceError("nothing has initialised CUDA in this process\n    fix: make an array on the GPU first")
    return cuda


def _event(calls: _Calls, context: int) -> int:
    """An event of the context, which is the current one."""
    try:
        return _idle[context].pop()
    except (KeyError, IndexError):
        event = ctypes.c_void_p()
        _check("cuEventCreate", calls.create(ctypes.byref(event), _NO_TIMING))
        return event.value or 0


def _check(call: str, code: int) -> None:
    if code == _CAPTURED:
        raise Captured(f"{call} ended the capture of a CUDA graph, which another thread had under way")
    contexts.check(call, code)

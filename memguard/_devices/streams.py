"""Order between streams: one waits for the work that another was given before. CUDA events, through ctypes.

Measured on an H200: `cuCtxRecordEvent` covers non-blocking streams, which an event on the legacy default stream does
not. It and `cuCtxSynchronize` end a CUDA graph capture that any thread has under way in the context, so callers give
the stream if they know it; recording on a stream that is not captured disturbs no capture. A stream that has nothing
left to do (`cuStreamQuery`) needs no event.
"""

from __future__ import annotations

from ctypes import c_int, c_uint, c_void_p
from types import TracebackType
from typing import Any

from memguard._devices import contexts, libcuda
from memguard.errors import DeviceError

_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_IMPLICIT = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
_CAPTURED = (900, 901, _IMPLICIT)  # CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, _INVALIDATED
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_CONTEXT, _ORDINAL = 1, 9  # CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
PER_THREAD = _NAMED = 2
"""CU_STREAM_PER_THREAD. A handle up to this one names a default stream of the current context."""
LEGACY = 1
"""CU_STREAM_LEGACY: DLPack and the CUDA array interface name the default stream so."""
_idle: dict[int, list[int]] = {}
"""Free events of each primary context, to be used again: creating one costs as much as recording it."""


class Captured(DeviceError):
    """A CUDA graph is being captured, and the call would end the capture."""


class StreamHandle(int):
    """A stream's handle that keeps the stream alive: the driver crashes on the handle of a destroyed stream."""

    owner: Any

    def __new__(cls, value: int, owner: Any) -> StreamHandle:
        made = super().__new__(cls, value)
        made.owner = owner
        return made


class Mark:
    """All work that `stream` was given so far, on the GPU `ordinal`; without a stream all work of the context.

    `context` is given if it is not the GPU's primary one. Raises DeviceError if CUDA refuses.
    """

    __slots__ = ("_cuda", "_event", "_of", "_primary")

    def __init__(self, ordinal: int, stream: int | None = None, context: int | None = None) -> None:
        cuda = self._cuda = contexts.driver()
        self._event, self._primary = 0, contexts.primary(ordinal) or 0
        self._of = self._primary if context is None else context
        if not self._of:
            return  # no context: the GPU was never given any work
        with contexts.entered(self._of):
            if stream is None and not hasattr(cuda, "cuCtxRecordEvent"):  # a driver before 12.5
                _check("cuCtxSynchronize", cuda.cuCtxSynchronize())
                return
            event = self._event = _event(cuda, self._of)
            code = cuda.cuCtxRecordEvent(self._of, event) if stream is None else cuda.cuEventRecord(event, stream)
        self._succeeded("recording an event", code)

    def passed(self) -> bool:
        """Whether all of the work is done. Never waits, and breaks no CUDA graph capture."""
        if not self._event:
            return True
        with contexts.beside_captures():
            return self._over()

    def before(self, stream: int) -> None:
        """Later work of `stream`, on the same GPU, runs after the marked work. The host does not wait."""
        if self._event:
            with contexts.entered(self._primary or self._of):  # handles 0 to 2 name a stream of the current context
                code = self._cuda.cuStreamWaitEvent(stream, self._event, 0)
            self._succeeded("cuStreamWaitEvent", code)

    def wait(self) -> None:
        """The host waits for the work, without the GIL, and breaks no CUDA graph capture."""
        if self._event:
            with contexts.beside_captures():
                event = self._event
                if not self._over() and event:
                    self._succeeded("cuEventSynchronize", self._cuda.cuEventSynchronize(event))

    def _over(self) -> bool:
        event = self._event
        if not event:  # a signal handler has closed it meanwhile
            return True
        code = self._cuda.cuEventQuery(event)
        if code != _NOT_READY:
            self._succeeded("cuEventQuery", code)
        return bool(code == 0)

    def _succeeded(self, call: str, code: int) -> None:
        """Raises if the call failed. The event is then in an unknown state, so it is destroyed."""
        if code:
            event, self._event = self._event, 0
            self._cuda.cuEventDestroy_v2(event)
            _idle.pop(self._of, None)  # if the context was reset, its other events are gone too
            _check(call, code)

    def close(self) -> None:
        event, self._event = self._event, 0
        if event and self._of == self._primary:
            _idle.setdefault(self._of, []).append(event)
        elif event:  # a context that is not primary may end, and its events with it
            self._cuda.cuEventDestroy_v2(event)

    def __enter__(self) -> Mark:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def follow(ordinal: int, first: int | None, then: int | None, context: int | None = None) -> None:
    """Later work of the stream `then` (None: the host) runs after the work of `first` (None: the whole context).

    Does nothing if both are the same stream, or if that of `first` is done. Raises DeviceError if CUDA refuses,
    Captured if it would end a capture.
    """
    if first is not None and then is not None and (first or LEGACY) == (then or LEGACY):  # 0 and 1 are the same stream
        return
    found = quiet(ordinal, first, then) if context is None else None
    if found:
        return
    captured = found is None and first is not None and capturing(ordinal, first)
    if captured != (found is None and then is not None and capturing(ordinal, then)):
        raise _apart()
    if found is None and first is not None and not captured and idle(ordinal, first, context):
        return
    with Mark(ordinal, first, context) as mark:
        if then is None:
            mark.wait()
        else:
            mark.before(then)


def follow_default(ordinal: int, then: int, context: int | None = None) -> None:
    """Later work of the stream `then` runs after that of the legacy default stream, and of all streams it waits for.

    By an event, which is work that waits for those streams (documented). It is not documented that `cuStreamQuery` of
    the default stream asks about them too. Raises as `follow` does.
    """
    if (then or LEGACY) == LEGACY:
        return
    if capturing(ordinal, then) or capturing(
        ordinal, LEGACY
    ):  # the latter raises if the default stream may not be used
        raise _apart()
    with Mark(ordinal, LEGACY, context) as mark:
        if not mark.passed():
            mark.before(then)


def quiet(ordinal: int, stream: int | None, other: int | None, inside: bool = False) -> bool | None:
    """Whether a stream of the GPU's primary context has nothing left to do; without a stream the whole context.

    None if the calls below have to find out: the stream or `other` may be recording a CUDA graph, or there is no
    context. Every hand-over asks this, so it is written out: the current context is looked up once, and nothing else
    is asked twice. `inside`: the context is current. Never waits. Raises DeviceError if CUDA refuses.
    """
    cuda, context = contexts.driver(), contexts.primary(ordinal)
    if not context:
        return None
    if not inside:
        here = c_void_p()
        if cuda.cuCtxGetCurrent(here) or here.value != context:
            with contexts.entered(context):
                return quiet(ordinal, stream, other, True)
    status = c_int()
    for asked in (stream, other):
        if asked is None:
            continue
        code = cuda.cuStreamIsCapturing(asked, status)
        if code == _IMPLICIT and asked in (0, LEGACY):
            raise _apart()
        if code or status.value:
            return None
    event = 0
    if stream is None:
        record = getattr(cuda, "cuCtxRecordEvent", None)  # a driver before 12.5 has none
        if record is None:
            return None
        event, call = _event(cuda, context), "cuCtxRecordEvent"
        code = record(context, event)
    else:
        code, call = 0, "cuStreamQuery"
    if not code:
        mode = c_int(_RELAXED)  # as `contexts.beside_captures`: CUDA puts the mode before here
        try:
            cuda.cuThreadExchangeStreamCaptureMode(mode)
            if stream is None:
                call, code = "cuEventQuery", cuda.cuEventQuery(event)
            else:
                code = cuda.cuStreamQuery(stream)
        finally:
            if mode.value != _RELAXED:
                cuda.cuThreadExchangeStreamCaptureMode(mode)
    if code and code != _NOT_READY:
        if event:  # it is in an unknown state; if the context was reset, its other events are gone too
            cuda.cuEventDestroy_v2(event)
            _idle.pop(context, None)
        _check(call, code)
    if event:
        _idle.setdefault(context, []).append(event)
    return code == 0


def capturing(ordinal: int, stream: int) -> bool:
    """Whether the stream is recording a CUDA graph. Asking does not disturb it.

    The legacy default stream never is. Captured, if it may not even be asked whether it is idle: a stream that it waits
    for is recording, and any use of the default stream would end that (documented of `cuStreamIsCapturing`).
    """
    status = c_int()
    if stream > _NAMED:
        code = contexts.driver().cuStreamIsCapturing(stream, status)
        return bool(code == 0 and status.value)
    primary = contexts.primary(ordinal)
    if primary is None:
        return False
    with contexts.entered(primary):
        code = contexts.driver().cuStreamIsCapturing(stream, status)
    if code == _IMPLICIT and stream in (0, LEGACY):
        raise _apart()
    return bool(code == 0 and status.value)


def idle(ordinal: int, stream: int, context: int | None = None) -> bool:
    """Whether the stream has nothing left to do (`cuStreamQuery`). Never waits.

    Not for a stream that is recording a CUDA graph: that would end its capture. `context` as for `Mark`.
    """
    cuda, of = contexts.driver(), contexts.primary(ordinal) if context is None else context
    if not of:
        return True  # no context: the GPU was never given any work
    with contexts.entered(of), contexts.beside_captures():
        code = cuda.cuStreamQuery(stream)
    if code != _NOT_READY:
        _check("cuStreamQuery", code)
    return bool(code == 0)


def awaits_capture(context: int) -> bool:
    """Whether a stream that the legacy default stream waits for is recording a CUDA graph, in a context.

    Work on the legacy stream would end that capture. Asking does not (documented: CUDA_ERROR_STREAM_CAPTURE_IMPLICIT).
    """
    with contexts.entered(context):
        return contexts.driver().cuStreamIsCapturing(LEGACY, c_int()) != 0


def blocking(stream: int) -> bool:
    """Whether the legacy default stream waits for the work of a stream of its context, given by its handle."""
    cuda, flags = contexts.loaded(), c_uint()
    if cuda is None or not hasattr(cuda, "cuStreamGetFlags") or cuda.cuStreamGetFlags(stream, flags):
        return False
    return not flags.value & _NON_BLOCKING


def forget(context: int) -> None:
    """The context ends: its events are gone, and the next one may have its handle."""
    _idle.pop(context, None)


def place(address: int) -> tuple[int, int | None] | None:
    """The ordinal of an address's GPU, and the context it was allocated in (None: in no context).

    None for memory that CUDA does not know, which is host memory. `cuPointerGetAttribute`, 1 us each; of a
    known primary context the first answer is enough.
    """
    cuda, context = contexts.loaded(), c_void_p()
    if cuda is not None and not cuda.cuPointerGetAttribute(context, _CONTEXT, address):
        known = contexts.ordinal_of(context.value)
        if known is not None:
            return known, context.value
    ordinal = c_int()
    if cuda is None or cuda.cuPointerGetAttribute(ordinal, _ORDINAL, address):
        return None
    return ordinal.value, context.value


def _event(cuda: libcuda.DriverAPI, context: int) -> int:
    """An event of the context, which is current."""
    try:
        return _idle[context].pop()
    except (KeyError, IndexError):
        event = c_void_p()
        _check("cuEventCreate", cuda.cuEventCreate(event, _NO_TIMING))
        return event.value or 0


def _apart() -> Captured:
    return Captured("a CUDA graph is being captured: a capture and streams outside it cannot wait for each other")


def _check(call: str, code: int) -> None:
    if code in _CAPTURED:
        raise Captured(f"{call} ended the capture of a CUDA graph, that another thread had begun")
    libcuda.check(call, code)

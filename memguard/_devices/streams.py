"""Orders streams with CUDA events, so that later work of one stream waits for earlier work of another.

Measured on an H200: `cuCtxRecordEvent` covers non-blocking streams, which an event on the legacy default stream does
not cover. `cuCtxRecordEvent` and `cuCtxSynchronize` break a CUDA graph capture of any thread in the context, so callers
pass the stream if they know it; recording on a stream that is not captured breaks no capture. A stream with all work
done (`cuStreamQuery`) needs no event.
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
"""CU_STREAM_PER_THREAD. Handles 0 to 2 name a default stream of the current context."""
LEGACY = 1
"""CU_STREAM_LEGACY: DLPack's and the CUDA array interface's handle of the default stream."""
_idle: dict[int, list[int]] = {}
"""Unused events of each primary context, for reuse: creating an event costs as much as recording it."""


class Captured(DeviceError):
    """A CUDA graph is being captured, and the call would break the capture."""


class StreamHandle(int):
    """A stream's handle that keeps the stream alive: the driver crashes on the handle of a destroyed stream."""

    owner: Any

    def __new__(cls, value: int, owner: Any) -> StreamHandle:
        made = super().__new__(cls, value)
        made.owner = owner
        return made


class Mark:
    """A CUDA event recorded after all work queued so far on `stream` of the GPU `ordinal`; without a stream, on the
    whole context.

    `context` is the context's handle if it is not the GPU's primary one. Raises DeviceError if a CUDA call fails.
    """

    __slots__ = ("_cuda", "_event", "_of", "_primary")

    def __init__(self, ordinal: int, stream: int | None = None, context: int | None = None) -> None:
        cuda = self._cuda = contexts.driver()
        self._event, self._primary = 0, contexts.primary(ordinal) or 0
        self._of = self._primary if context is None else context
        if not self._of:
            return  # no context, so no work on the GPU
        with contexts.entered(self._of):
            if stream is None and not hasattr(cuda, "cuCtxRecordEvent"):  # a driver before CUDA 12.5
                _check("cuCtxSynchronize", cuda.cuCtxSynchronize())
                return
            event = self._event = _event(cuda, self._of)
            code = cuda.cuCtxRecordEvent(self._of, event) if stream is None else cuda.cuEventRecord(event, stream)
        self._succeeded("recording an event", code)

    def passed(self) -> bool:
        """True if all work before the event is done. Never waits, and breaks no CUDA graph capture."""
        if not self._event:
            return True
        with contexts.capture_safe():
            return self._over()

    def before(self, stream: int) -> None:
        """Make later work of `stream`, on the same GPU, run after the work before the event. The host does not wait."""
        if self._event:
            with contexts.entered(self._primary or self._of):  # handles 0 to 2 name a stream of the current context
                code = self._cuda.cuStreamWaitEvent(stream, self._event, 0)
            self._succeeded("cuStreamWaitEvent", code)

    def wait(self) -> None:
        """Make the host wait for the event, without the GIL. Breaks no CUDA graph capture."""
        if self._event:
            with contexts.capture_safe():
                event = self._event
                if not self._over() and event:
                    self._succeeded("cuEventSynchronize", self._cuda.cuEventSynchronize(event))

    def _over(self) -> bool:
        event = self._event
        if not event:  # a signal handler closed the event during the wait
            return True
        code = self._cuda.cuEventQuery(event)
        if code != _NOT_READY:
            self._succeeded("cuEventQuery", code)
        return bool(code == 0)

    def _succeeded(self, call: str, code: int) -> None:
        """If the call failed, destroy the event, whose state is then unknown, and raise DeviceError."""
        if code:
            event, self._event = self._event, 0
            self._cuda.cuEventDestroy_v2(event)
            _idle.pop(self._of, None)  # after a reset of the context, its other events are invalid too
            _check(call, code)

    def close(self) -> None:
        event, self._event = self._event, 0
        if event and self._of == self._primary:
            _idle.setdefault(self._of, []).append(event)
        elif event:  # events of other contexts are not reused: the context may end and destroy them
            self._cuda.cuEventDestroy_v2(event)

    def __enter__(self) -> Mark:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def follow(ordinal: int, first: int | None, then: int | None, context: int | None = None) -> None:
    """Make later work of stream `then` (None: the host) run after the work of `first` (None: the whole context).

    Does nothing if both are the same stream, or if the work of `first` is done. Raises DeviceError if a CUDA call
    fails, Captured if the call would break a capture.
    """
    if first is not None and then is not None and (first or LEGACY) == (then or LEGACY):  # handle 0 equals LEGACY
        return
    found = quick_idle(ordinal, first, then) if context is None else None
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
    """Make later work of stream `then` run after the work of the legacy default stream and of all blocking streams.

    Records an event on the default stream, which waits for all blocking streams (documented). CUDA does not document
    that `cuStreamQuery` of the default stream covers blocking streams. Raises as `follow` does.
    """
    if (then or LEGACY) == LEGACY:
        return
    if capturing(ordinal, then) or capturing(
        ordinal, LEGACY
    ):  # `capturing` raises Captured if the default stream is unusable
        raise _apart()
    with Mark(ordinal, LEGACY, context) as mark:
        if not mark.passed():
            mark.before(then)


def quick_idle(ordinal: int, stream: int | None, other: int | None, inside: bool = False) -> bool | None:
    """True if all work of a stream of the GPU's primary context is done; without a stream, of the whole context.

    None if callers must use the slower calls below: the stream or `other` may be capturing a CUDA graph, or there is no
    context. Every hand-over calls this function, so it contains the code of the slower calls, without their repeated
    look-ups. `inside`: the primary context is current. Never waits. Raises DeviceError if a CUDA call fails.
    """
    cuda, context = contexts.driver(), contexts.primary(ordinal)
    if not context:
        return None
    if not inside:
        here = c_void_p()
        if cuda.cuCtxGetCurrent(here) or here.value != context:
            with contexts.entered(context):
                return quick_idle(ordinal, stream, other, True)
    status = c_int()
    for queried in (stream, other):
        if queried is None:
            continue
        code = cuda.cuStreamIsCapturing(queried, status)
        if code == _IMPLICIT and queried in (0, LEGACY):
            raise _apart()
        if code or status.value:
            return None
    event = 0
    if stream is None:
        record = getattr(cuda, "cuCtxRecordEvent", None)  # missing in drivers before 12.5
        if record is None:
            return None
        event, call = _event(cuda, context), "cuCtxRecordEvent"
        code = record(context, event)
    else:
        code, call = 0, "cuStreamQuery"
    if not code:
        mode = c_int(_RELAXED)  # as in `contexts.capture_safe`; CUDA stores the former mode in this variable
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
        if event:  # a failed call leaves the event unusable
            cuda.cuEventDestroy_v2(event)
            _idle.pop(context, None)
        _check(call, code)
    if event:
        _idle.setdefault(context, []).append(event)
    return code == 0


def capturing(ordinal: int, stream: int) -> bool:
    """Whether the stream is capturing a CUDA graph. The query breaks no capture.

    CUDA never captures the legacy default stream. Raises Captured if even a query of the default stream is forbidden,
    because a stream for which the default stream waits is capturing, and any use of the default stream would break that
    capture (documented for `cuStreamIsCapturing`).
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
    """True if all work of the stream is done (`cuStreamQuery`). Never waits. Never call it for a stream that is
    capturing a CUDA graph: the query would break the capture. `context` as for `Mark`.
    """
    cuda, of = contexts.driver(), contexts.primary(ordinal) if context is None else context
    if not of:
        return True  # no context, so no work on the GPU
    with contexts.entered(of), contexts.capture_safe():
        code = cuda.cuStreamQuery(stream)
    if code != _NOT_READY:
        _check("cuStreamQuery", code)
    return bool(code == 0)


def awaits_capture(context: int) -> bool:
    """True if a stream of the context that the legacy default stream waits for is capturing a CUDA graph.

    Work on the legacy stream would break that capture. This query does not break it (documented:
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT).
    """
    with contexts.entered(context):
        return contexts.driver().cuStreamIsCapturing(LEGACY, c_int()) != 0


def blocking(stream: int) -> bool:
    """True if `stream` is a blocking stream, so that its context's legacy default stream waits for its work."""
    cuda, flags = contexts.loaded(), c_uint()
    if cuda is None or not hasattr(cuda, "cuStreamGetFlags") or cuda.cuStreamGetFlags(stream, flags):
        return False
    return not flags.value & _NON_BLOCKING


def forget(context: int) -> None:
    """Drop the events of a context that ends, because a later context may reuse the handle."""
    _idle.pop(context, None)


def place(address: int) -> tuple[int, int | None] | None:
    """The ordinal of the GPU of `address`, and the context of the allocation (None: allocated without a context).

    Returns None for memory that CUDA does not know, which is host memory. Calls `cuPointerGetAttribute` (1 us) twice,
    or once if the primary context is cached.
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
    """A reused or new event of `context`, which must be current."""
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

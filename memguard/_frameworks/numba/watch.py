"""Watches which streams Numba's kernels and copies use, and which addresses its arrays export.

memguard's pool reuses a freed block once CUDA events have completed. An event on the legacy default stream covers the
work of that stream and of blocking streams, which `cuda.stream()` creates. memguard detects any other stream (an
external stream, a per-thread default stream, a stream of cuda.core) when Numba asks for the stream's handle. Such a
stream ends pooling permanently, because the program may already have used arrays on that stream. According to CUDA's
documentation, `cuStreamQuery` of the legacy stream reports only that stream's work, so the pool uses the query only
while Numba has no other stream (`default_alone`).

An address is exported if code outside Numba may use it. Numba's own kernels and copies read an address without
exporting it. Any other reader (the CUDA array interface, `device_ctypes_pointer`, an IPC handle, `gpu_data.handle`)
exports the block. All readers use the same attributes of Numba's pointers, so memguard distinguishes them by the
calling code. In a version of Numba that memguard does not know, every block counts as exported.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType, ModuleType
from typing import Any

from memguard._devices import contexts, streams, suspension
from memguard._frameworks.replacements import Replacements
from memguard.errors import DeviceError, Suspended

_blocking: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Numba's own live blocking streams, by handle."""
_unmarked: set[object] = set()
"""One entry for each of Numba's own streams, added before the stream's first work, and removed once the event at the
stream's destruction is recorded."""
_MOST_ENDED = 32
"""If `EndedStreams.marks` has more events than this, the completed events are removed. The bound then rises to twice
the number of incomplete events."""
_PER_THREAD = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM"
"""The environment variable that makes cuda-python's stream 0 a per-thread stream. Numba sets it if
NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM is set."""
_NEEDED = ("Stream", "Context", "MemoryPointer", "_stream_handle", "_to_core_stream")

_lost: weakref.WeakSet[ModuleType] = weakref.WeakSet()
"""Numba's driver modules that have used an uncovered stream, or whose streams were at some time not watched."""


def watch(driver: Any, replaced: Replacements, on_uncovered: Callable[[], None]) -> bool:
    """Watch Numba's streams until the caller undoes `replaced` and calls `stop_pooling`. Returns False if memguard
    cannot watch all streams.

    Calls `on_uncovered` on the thread that passes Numba a stream which the pool's events do not cover.
    """
    if driver in _lost or any(not hasattr(driver, name) for name in _NEEDED) or _per_thread(driver) or _configured():
        return False

    def end() -> None:
        _lost.add(driver)
        on_uncovered()

    def made(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, handle: Any, finalizer: Any = None, *args: Any, **kwargs: Any) -> None:
            # Numba's own streams have a finalizer, and the handle is valid as long as the object exists.
            own = finalizer is not None and streams.blocking(int(handle))
            original(self, handle, leaving(int(handle), finalizer) if own else finalizer, *args, **kwargs)
            if own:
                _blocking[int(handle)] = self

        return init

    def leaving(handle: int, finalizer: Callable[[], Any]) -> Callable[[], Any]:
        mark, one = ended.stream(handle), object()
        if driver not in _lost:
            _unmarked.add(one)

        def finish() -> Any:
            try:
                if driver not in _lost:
                    with contextlib.suppress(Suspended):  # during a suspension all work is complete
                        suspension.check("a mark")
                        mark()
                    _unmarked.discard(one)
            except DeviceError:
                end()
            return finalizer()

        return finish

    def given(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def handle(stream: Any) -> Any:
            found = original(stream)  # if `original` raises, Numba queues no work on the stream
            if not covered(stream):
                end()
            return found

        return handle

    replaced.put(driver.Stream, "__init__", made)
    return all(replaced.put(driver, name, given) for name in ("_stream_handle", "_to_core_stream"))


def stop_pooling(driver: Any) -> None:
    """Disable pooling permanently for this driver module, because its streams are no longer watched."""
    _lost.add(driver)


def covered(stream: Any) -> bool:
    """True if an event on the legacy default stream covers the work on the given stream."""
    if stream is None:
        return True
    try:
        handle = int(stream if isinstance(stream, int) else stream.handle)
    except (AttributeError, TypeError, ValueError):
        return False
    return handle in (0, streams.LEGACY) or handle in _blocking


def default_alone() -> bool:
    """True if no stream of Numba except the legacy default stream may have unfinished work."""
    return not _unmarked and not ended.marks  # in this order: a stream enters `marks` before it leaves `_unmarked`


class EndedStreams:
    """CUDA events for destroyed streams. CUDA does not document whether the legacy stream waits for their work.

    So a finalizer records a CUDA event on each stream before Numba destroys the stream.
    """

    def __init__(self) -> None:
        self.marks: list[EndedStreams.SharedMark] = []
        """The events that had not completed at the last check."""
        self._most = _MOST_ENDED
        self._lives = Counter[int]()  # by context handle, the number of destroyed contexts with this handle

    class SharedMark:
        """A CUDA event for which several batches of the pool wait. Closing one batch does not close the event."""

        def __init__(self, mark: streams.Mark, context: int) -> None:
            self.mark, self.context = mark, context

        def passed(self) -> bool:
            return self.mark.passed()

        def wait(self) -> None:
            self.mark.wait()

        def close(self) -> None: ...

    def stream(self, handle: int) -> Callable[[], None]:
        """Return a function that records a CUDA event on a stream, unless the stream's context has been destroyed. The
        function raises DeviceError if CUDA refuses."""
        ordinal, context = contexts.current() or 0, contexts.current_handle() or 0
        life = self._lives[context]

        def mark() -> None:
            if self._lives[context] == life:  # an event on a destroyed context's stream crashes the driver
                if len(self.marks) > self._most:
                    self._most = max(_MOST_ENDED, 2 * len(self.unfinished()))
                with contexts.capture_safe():
                    self.marks.append(self.SharedMark(streams.Mark(ordinal, handle, context), context))

        return mark

    def unfinished(self) -> list[EndedStreams.SharedMark]:
        """Remove the completed events and return the others. Raises DeviceError if a query fails."""
        for shared in self.marks.copy():
            if shared.passed():
                with contextlib.suppress(ValueError):  # another thread has removed `shared`
                    self.marks.remove(shared)
                    shared.mark.close()
        return self.marks.copy()

    def forget(self, context: int) -> None:
        """Remove the events of a context that is about to be destroyed, and record no more events on its streams."""
        self._lives[context] += 1
        for shared in self.marks.copy():  # no `clear`, because a finalizer may append at any time
            if shared.context == context:
                with contextlib.suppress(ValueError):
                    self.marks.remove(shared)


ended = EndedStreams()


class Addresses:
    """Distinguishes exports of an address from reads by Numba's own kernels and copies, by the calling code."""

    def __init__(self, driver: Any, arrays: Any) -> None:
        array, pointer = getattr(arrays, "DeviceNDArrayBase", None), driver.MemoryPointer
        passed_on = [getattr(driver, "device_pointer", None), getattr(driver, "device_ctypes_pointer", None)]
        copies = ("host_to_device", "device_to_host", "device_to_device", "device_memset")
        work = [getattr(driver, name, None) for name in copies]
        work += [getattr(array, "_strided_memory_view_shim", None)]  # prepares a kernel's argument
        work += [
            vars(pointer).get(name) for name in ("view", "memset", "device_ctypes_pointer", "device_pointer_value")
        ]
        self._between = _codes([*passed_on, getattr(array, "device_ctypes_pointer", None)])
        self._work = _codes(work)

    def exported(self, frame: FrameType | None) -> bool:
        """True if the code that reads the address, in this frame or its callers, exports the address."""
        while frame is not None and frame.f_code in self._between:
            frame = frame.f_back
        return frame is None or frame.f_code not in self._work


def _codes(functions: list[Any]) -> frozenset[CodeType]:
    """The code objects of functions, properties and cached properties."""
    plain = [getattr(one, "fget", getattr(one, "func", one)) for one in functions]
    return frozenset(one.__code__ for one in plain if hasattr(one, "__code__"))


def _configured() -> bool:
    """True if a kernel may have been configured with a stream before `watch`: Numba caches `kernel[blocks, threads,
    stream]`."""
    dispatcher = getattr(sys.modules.get("numba.cuda.dispatcher"), "CUDADispatcher", None)
    made = getattr(getattr(dispatcher, "configure", None), "cache_info", None)
    return made is not None and made().currsize > 0


def _per_thread(driver: Any) -> bool:
    config = getattr(driver, "config", None)
    return bool(getattr(config, "CUDA_PER_THREAD_DEFAULT_STREAM", 0)) or os.environ.get(_PER_THREAD, "0") not in (
        "",
        "0",
    )

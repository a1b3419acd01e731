"""Watches which streams Numba's kernels and copies use, and which addresses its arrays export.

An event on the legacy default stream covers that stream and the blocking streams, which `cuda.stream()` creates. Any
other stream (an external stream, a per-thread default stream, a stream of cuda.core) becomes visible when Numba creates
a handle for it. Such a stream ends pooling for good, because earlier arrays may have been used on it too. By CUDA's
documentation `cuStreamQuery` of the legacy stream reports on that stream alone, so the pool relies on it only while
Numba has no other stream (`default_alone`).

Numba's own kernels and copies read an address without exporting it. Any other reader (the CUDA array interface,
`device_ctypes_pointer`, an IPC handle, `gpu_data.handle`) exports the block. All readers call the same function of
Numba, so memguard distinguishes them by the calling code. In an unknown version of Numba, every block counts as
exported.
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
"""One entry for each of Numba's own streams, from before its first work until the event at its end is recorded. A
stream is in both this set and `_blocking` for a time, so that at least one of them always contains it."""
_MOST_ENDED = 32
"""If more events than this are kept, the completed ones are removed. The bound rises to twice the number of incomplete
events."""
_PER_THREAD = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM"
"""The variable that makes cuda-python's stream 0 a per-thread stream. Numba sets it for
NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM."""
_NEEDED = ("Stream", "Context", "MemoryPointer", "_stream_handle", "_to_core_stream")

_lost: weakref.WeakSet[ModuleType] = weakref.WeakSet()
"""Numba's driver modules whose streams were unwatched for a time, or that used a stream of another kind."""


def watch(driver: Any, replaced: Replacements, on_uncovered: Callable[[], None]) -> bool:
    """Watch Numba's streams until `replaced` is undone; then call `stop_pooling`. Returns whether it watches all
    streams.

    It calls `on_uncovered` on the thread that passes Numba a stream of another kind.
    """
    if driver in _lost or any(not hasattr(driver, name) for name in _NEEDED) or _per_thread(driver) or _configured():
        return False

    def end() -> None:
        _lost.add(driver)
        on_uncovered()

    def made(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, handle: Any, finalizer: Any = None, *args: Any, **kwargs: Any) -> None:
            # Numba's own streams have a finalizer, and their handle lives as long as they do.
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
                    with contextlib.suppress(Suspended):  # the suspension has completed all work of the stream
                        suspension.check("a mark")
                        mark()
                    _unmarked.discard(one)
            except DeviceError:
                end()
            return finalizer()

        return finish

    def given(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def handle(stream: Any) -> Any:
            found = original(stream)  # if this raises, no work reaches the stream
            if not covered(stream):
                end()
            return found

        return handle

    replaced.put(driver.Stream, "__init__", made)
    return all(replaced.put(driver, name, given) for name in ("_stream_handle", "_to_core_stream"))


def stop_pooling(driver: Any) -> None:
    """Disable pooling for this driver module for good, as its streams are no longer watched."""
    _lost.add(driver)


def covered(stream: Any) -> bool:
    """Whether an event on the legacy default stream covers the work of this stream of Numba."""
    if stream is None:
        return True
    try:
        handle = int(stream if isinstance(stream, int) else stream.handle)
    except (AttributeError, TypeError, ValueError):
        return False
    return handle in (0, streams.LEGACY) or handle in _blocking


def default_alone() -> bool:
    """True if of all Numba's streams only the legacy default stream may have unfinished work."""
    return not _unmarked and not ended.marks  # in this order: a stream enters `marks` before it leaves `_unmarked`


class EndedStreams:
    """The unfinished work of destroyed streams. CUDA does not document whether the legacy stream still waits for it.

    So a finalizer records a CUDA event on each stream before Numba destroys the stream.
    """

    def __init__(self) -> None:
        self.marks: list[EndedStreams.SharedMark] = []
        """The events that were incomplete at the last check."""
        self._most = _MOST_ENDED
        self._lives = Counter[int]()  # the number of ended contexts by handle, as a later context may reuse a handle

    class SharedMark:
        """A CUDA event that several flushes wait for. It is closed when it completes, not with the first flush."""

        def __init__(self, mark: streams.Mark, context: int) -> None:
            self.mark, self.context = mark, context

        def passed(self) -> bool:
            return self.mark.passed()

        def wait(self) -> None:
            self.mark.wait()

        def close(self) -> None: ...

    def stream(self, handle: int) -> Callable[[], None]:
        """Return a function that records a CUDA event on a stream, unless the stream's context has ended. Raises
        DeviceError if CUDA refuses."""
        ordinal, context = contexts.current() or 0, contexts.current_handle() or 0
        life = self._lives[context]

        def mark() -> None:
            if self._lives[context] == life:  # the context lives: on a destroyed stream the driver would crash
                if len(self.marks) > self._most:
                    self._most = max(_MOST_ENDED, 2 * len(self.unfinished()))
                with contexts.capture_safe():
                    self.marks.append(self.SharedMark(streams.Mark(ordinal, handle, context), context))

        return mark

    def unfinished(self) -> list[EndedStreams.SharedMark]:
        """The events whose work may be unfinished. Raises DeviceError if a query fails."""
        for shared in self.marks.copy():
            if shared.passed():
                with contextlib.suppress(ValueError):  # another thread removed it
                    self.marks.remove(shared)
                    shared.mark.close()
        return self.marks.copy()

    def forget(self, context: int) -> None:
        """Drop the events of a context that ends. No further event is recorded on its streams."""
        self._lives[context] += 1
        for shared in self.marks.copy():  # not `clear`: a finalizer may append at any time
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
        work += [getattr(array, "_strided_memory_view_shim", None)]  # a kernel's argument
        work += [
            vars(pointer).get(name) for name in ("view", "memset", "device_ctypes_pointer", "device_pointer_value")
        ]
        self._between = _codes([*passed_on, getattr(array, "device_ctypes_pointer", None)])
        self._work = _codes(work)

    def exported(self, frame: FrameType | None) -> bool:
        """Whether this frame's code reads the address in order to export it."""
        while frame is not None and frame.f_code in self._between:
            frame = frame.f_back
        return frame is None or frame.f_code not in self._work


def _codes(functions: list[Any]) -> frozenset[CodeType]:
    """The code objects of functions, properties and cached properties."""
    plain = [getattr(one, "fget", getattr(one, "func", one)) for one in functions]
    return frozenset(one.__code__ for one in plain if hasattr(one, "__code__"))


def _configured() -> bool:
    """Whether a kernel was configured with a stream before `watch`: Numba caches `kernel[blocks, threads, stream]`."""
    dispatcher = getattr(sys.modules.get("numba.cuda.dispatcher"), "CUDADispatcher", None)
    made = getattr(getattr(dispatcher, "configure", None), "cache_info", None)
    return made is not None and made().currsize > 0


def _per_thread(driver: Any) -> bool:
    config = getattr(driver, "config", None)
    return bool(getattr(config, "CUDA_PER_THREAD_DEFAULT_STREAM", 0)) or os.environ.get(_PER_THREAD, "0") not in (
        "",
        "0",
    )

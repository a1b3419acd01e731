"""Watches the streams of Numba's kernels and copies, and the exports of its arrays' addresses.

An event on the legacy default stream covers that stream and the blocking streams, which `cuda.stream()` creates. Any
other stream (an external one, a per-thread default one, one of cuda.core's) becomes visible when Numba makes a handle
of it, and ends pooling for good, as earlier arrays may have been used on it too. CUDA documents `cuStreamQuery` of the
legacy stream for that stream alone: so the pool uses it only while Numba has no other stream (`default_alone`).

Numba's own kernels and copies read an address without exporting it. Any other reader (the CUDA array interface,
`device_ctypes_pointer`, an IPC handle, `gpu_data.handle`) exports the block. Numba has one function for all readers, so
memguard distinguishes them by the calling code. With an unknown version of that code, every block counts as exported.
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
"""Numba's own blocking streams, by their handles, as long as they live."""
_unmarked: set[object] = set()
"""One entry for each of Numba's own streams, from before its first work until its end is marked. It overlaps with
`_blocking`, so that at every moment a stream is in one of them."""
_MOST_ENDED = 32
"""Marks to keep before a search for passed ones. The bound rises to twice the number of marks not passed."""
_PER_THREAD = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM"
"""Makes stream 0 of cuda-python a per-thread stream. Numba sets it for NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM."""
_NEEDED = ("Stream", "Context", "MemoryPointer", "_stream_handle", "_to_core_stream")

_lost: weakref.WeakSet[ModuleType] = weakref.WeakSet()
"""Numba drivers with streams that were unwatched for a time, or that used a stream of another kind."""


def watch(driver: Any, replaced: Replacements, tell: Callable[[], None]) -> bool:
    """Watch Numba's streams until `replaced` is undone; `lose` must follow. Returns whether it covers all of them.

    It calls `tell` when Numba is given a stream of another kind, on the same thread.
    """
    if driver in _lost or any(not hasattr(driver, name) for name in _NEEDED) or _per_thread(driver) or _configured():
        return False

    def end() -> None:
        _lost.add(driver)
        tell()

    def made(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, handle: Any, finalizer: Any = None, *args: Any, **kwargs: Any) -> None:
            # Numba's own streams have a finalizer: their handle lives as long as they do.
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
                    with contextlib.suppress(Suspended):  # all its work has ended: the process left the GPU afterwards
                        suspension.check("a mark")
                        mark()
                    _unmarked.discard(one)
            except DeviceError:
                end()
            return finalizer()

        return finish

    def given(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def handle(stream: Any) -> Any:
            found = original(stream)  # if this raises, the stream gets no work
            if not covered(stream):
                end()
            return found

        return handle

    replaced.put(driver.Stream, "__init__", made)
    return all(replaced.put(driver, name, given) for name in ("_stream_handle", "_to_core_stream"))


def lose(driver: Any) -> None:
    """Disable pooling for this Numba for good, as its streams may now be used unwatched."""
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
    """Whether none of Numba's streams but the legacy default one may have earlier work."""
    return not _unmarked and not ended.marks  # in this order: a stream is marked before it leaves `_unmarked`


class Ended:
    """The work of destroyed streams. CUDA does not document whether the legacy stream still waits for it.

    So each stream gets its own mark before Numba destroys it, in a finalizer.
    """

    def __init__(self) -> None:
        self.marks: list[Ended.Kept] = []
        """The marks not found passed yet."""
        self._most = _MOST_ENDED
        self._lives = Counter[int]()  # by a context's handle, which a later context may reuse

    class Kept:
        """A mark that several flushes wait for: it is closed when its work is done, not with the first flush."""

        def __init__(self, mark: streams.Mark, context: int) -> None:
            self.mark, self.context = mark, context

        def passed(self) -> bool:
            return self.mark.passed()

        def wait(self) -> None:
            self.mark.wait()

        def close(self) -> None: ...

    def stream(self, handle: int) -> Callable[[], None]:
        """A function that marks a stream's work, unless the context ended before. Raises DeviceError if CUDA
        refuses."""
        ordinal, context = contexts.current() or 0, contexts.current_handle() or 0
        life = self._lives[context]

        def mark() -> None:
            if self._lives[context] == life:  # else the handle is of a destroyed stream: the driver would crash
                if len(self.marks) > self._most:
                    self._most = max(_MOST_ENDED, 2 * len(self.under_way()))
                with contexts.capture_safe():
                    self.marks.append(self.Kept(streams.Mark(ordinal, handle, context), context))

        return mark

    def under_way(self) -> list[Ended.Kept]:
        """The marks whose work may be unfinished. Raises DeviceError if a query fails."""
        for kept in self.marks.copy():
            if kept.passed():
                with contextlib.suppress(ValueError):  # removed by another thread
                    self.marks.remove(kept)
                    kept.mark.close()
        return self.marks.copy()

    def forget(self, context: int) -> None:
        """Drop the work and streams of a context that ends."""
        self._lives[context] += 1
        for kept in self.marks.copy():  # removed one by one: a finalizer may append to the list at any time
            if kept.context == context:
                with contextlib.suppress(ValueError):
                    self.marks.remove(kept)


ended = Ended()


class Addresses:
    """Distinguishes exports from Numba's own kernels and copies, by the code that reads an address."""

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
        """Whether the code of this frame, which reads an address, exports it from Numba."""
        while frame is not None and frame.f_code in self._between:
            frame = frame.f_back
        return frame is None or frame.f_code not in self._work


def _codes(functions: list[Any]) -> frozenset[CodeType]:
    """The code of functions, properties and cached properties."""
    plain = [getattr(one, "fget", getattr(one, "func", one)) for one in functions]
    return frozenset(one.__code__ for one in plain if hasattr(one, "__code__"))


def _configured() -> bool:
    """Whether a kernel was given a stream before: Numba caches `kernel[blocks, threads, stream]`, unwatched."""
    dispatcher = getattr(sys.modules.get("numba.cuda.dispatcher"), "CUDADispatcher", None)
    made = getattr(getattr(dispatcher, "configure", None), "cache_info", None)
    return made is not None and made().currsize > 0


def _per_thread(driver: Any) -> bool:
    config = getattr(driver, "config", None)
    return bool(getattr(config, "CUDA_PER_THREAD_DEFAULT_STREAM", 0)) or os.environ.get(_PER_THREAD, "0") not in (
        "",
        "0",
    )

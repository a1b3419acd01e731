"""Who may use an array of Numba's: the streams that its kernels and copies are given, and who asked for its address.

An event on the legacy default stream covers the streams that this one waits for: itself, and blocking streams, as
`cuda.stream()` makes them. What else Numba is given (an external stream, a per-thread default one, one of cuda.core's)
is seen where Numba makes a handle of it, and ends the pool for good: it might have been given earlier arrays too.
`cuStreamQuery` of the legacy stream covers that stream alone, as far as it is documented: so it serves only while there
is no other (`default_alone`).

An address is asked for by Numba's own kernels and copies, which is in order, and by everybody else (the CUDA array
interface, `device_ctypes_pointer`, an IPC handle, `gpu_data.handle`): that block is exported. Who asks is told by the
code that asks, since Numba has one way for all. A Numba that was written otherwise makes every block exported.
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
from memguard.errors import DeviceError

_blocking: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Numba's own streams that the legacy default stream waits for, by their handles, as long as they live."""
_unmarked: set[object] = set()
"""One for each of Numba's own streams from before it is given work until its end is marked: as `_blocking`, but with no
moment between the two in which a stream is in neither."""
_MOST_ENDED = 32
"""So many marks are kept before they are looked through for those that are over; more if twice as many are not."""
_PER_THREAD = "CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM"
"""What makes stream 0 of cuda-python a stream of the thread. Numba sets it for NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM."""
_NEEDED = ("Stream", "Context", "MemoryPointer", "_stream_handle", "_to_core_stream")

_lost: weakref.WeakSet[ModuleType] = weakref.WeakSet()
"""Drivers of Numba whose streams were not watched for a time, or that were given another stream."""


def watch(driver: Any, replaced: Replacements, tell: Callable[[], None]) -> bool:
    """Watch Numba's streams until `replaced` is undone; `lose` must follow. Returns whether it covers all of them.

    `tell` is called, on the thread that gives it, when another stream is given.
    """
    if driver in _lost or any(not hasattr(driver, name) for name in _NEEDED) or _per_thread(driver) or _configured():
        return False

    def end() -> None:
        _lost.add(driver)
        tell()

    def made(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, handle: Any, finalizer: Any = None, *args: Any, **kwargs: Any) -> None:
            # Numba's own have a finalizer: their handle lives as long as they do.
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
                    if suspension.now is None:  # else all its work has ended: the GPU is left after that
                        mark()
                    _unmarked.discard(one)
            except DeviceError:
                end()
            return finalizer()

        return finish

    def given(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def handle(stream: Any) -> Any:
            found = original(stream)  # refused: it is given no work
            if not covered(stream):
                end()
            return found

        return handle

    replaced.put(driver.Stream, "__init__", made)
    return all(replaced.put(driver, name, given) for name in ("_stream_handle", "_to_core_stream"))


def lose(driver: Any) -> None:
    """From now on streams may be made and used unseen: arrays of this Numba are never again pooled."""
    _lost.add(driver)


def covered(stream: Any) -> bool:
    """Whether an event on the legacy default stream covers the work of a stream as Numba is given it."""
    if stream is None:
        return True
    try:
        handle = int(stream if isinstance(stream, int) else stream.handle)
    except (AttributeError, TypeError, ValueError):
        return False
    return handle in (0, streams.LEGACY) or handle in _blocking


def default_alone() -> bool:
    """Whether no stream of Numba's but the legacy default one may have work that was given to it before."""
    return not _unmarked and not ended.marks  # in this order: a stream is marked before it leaves `_unmarked`


class Ended:
    """The work of streams that were destroyed. Whether the legacy stream still waits for it is not documented.

    So each stream is marked by itself before Numba destroys it, in a finalizer.
    """

    def __init__(self) -> None:
        self.marks: list[Ended.Kept] = []
        """Those that were not found passed yet."""
        self._most = _MOST_ENDED
        self._lives = Counter[int]()  # by a context's handle, which the next one may have again

    class Kept:
        """A mark that several flushes wait for: it is closed when its work is done, not with the first of them."""

        def __init__(self, mark: streams.Mark, context: int) -> None:
            self.mark, self.context = mark, context

        def passed(self) -> bool:
            return self.mark.passed()

        def wait(self) -> None:
            self.mark.wait()

        def close(self) -> None: ...

    def stream(self, handle: int) -> Callable[[], None]:
        """Marks the work of a stream of the current context, when it ends before that. May raise DeviceError."""
        ordinal, context = contexts.current() or 0, contexts.current_handle() or 0
        life = self._lives[context]

        def mark() -> None:
            if self._lives[context] == life:  # else the handle is of a stream that is no more: the driver would crash
                if len(self.marks) > self._most:
                    self._most = max(_MOST_ENDED, 2 * len(self.under_way()))
                with contexts.beside_captures():
                    self.marks.append(self.Kept(streams.Mark(ordinal, handle, context), context))

        return mark

    def under_way(self) -> list[Ended.Kept]:
        """The marks whose work is not known to be done. Raises DeviceError if CUDA does not say."""
        for kept in self.marks.copy():
            if kept.passed():
                with contextlib.suppress(ValueError):  # removed by another thread
                    self.marks.remove(kept)
                    kept.mark.close()
        return self.marks.copy()

    def forget(self, context: int) -> None:
        """A context ends, and all work and all streams in it."""
        self._lives[context] += 1
        for kept in self.marks.copy():  # taken out one by one: a finalizer may add to the list at any time
            if kept.context == context:
                with contextlib.suppress(ValueError):
                    self.marks.remove(kept)


ended = Ended()


class Addresses:
    """Tells an export from the work of Numba's own kernels and copies, by the code that asks for an address."""

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
        """Whether the code of this frame, which asks for an address, hands it out of Numba."""
        while frame is not None and frame.f_code in self._between:
            frame = frame.f_back
        return frame is None or frame.f_code not in self._work


def _codes(functions: list[Any]) -> frozenset[CodeType]:
    """The code of functions, properties and cached properties."""
    plain = [getattr(one, "fget", getattr(one, "func", one)) for one in functions]
    return frozenset(one.__code__ for one in plain if hasattr(one, "__code__"))


def _configured() -> bool:
    """Whether a kernel was given a stream already: `kernel[blocks, threads, stream]` is kept, and was not watched."""
    dispatcher = getattr(sys.modules.get("numba.cuda.dispatcher"), "CUDADispatcher", None)
    made = getattr(getattr(dispatcher, "configure", None), "cache_info", None)
    return made is not None and made().currsize > 0


def _per_thread(driver: Any) -> bool:
    config = getattr(driver, "config", None)
    return bool(getattr(config, "CUDA_PER_THREAD_DEFAULT_STREAM", 0)) or os.environ.get(_PER_THREAD, "0") not in (
        "",
        "0",
    )

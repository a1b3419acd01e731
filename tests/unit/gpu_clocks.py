"""In the place of libcuda: GPUs whose streams are clocks. Each knows which work has to be over before its next begins.

Work has a number, and is over when somebody has waited for it or `finish` says so: never by itself. A read, a write
or a free out of order is listed in `wrong`. One process, any threads; two GPUs, and `peers` has which of them reaches
whose memory: none at first.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import defaultdict
from typing import Any

PRIMARY = 0x1000
NOT_READY, INVALID, NO_CONTEXT, CAPTURE, IMPLICIT = 600, 1, 201, 900, 906


class Driver:
    """`asked` has every call by name, `fails` the code of each call that fails.

    `waits` counts how often the host had to wait in one of them for work that was not over.
    """

    def __init__(self, gpus: int = 2) -> None:
        self.asked: list[str] = []
        self.fails: dict[str, int] = {}
        self.wrong: list[str] = []
        self.waits = 0
        self.freed: list[int] = []
        self.over: set[int] = set()
        self.capturing: set[int] = set()
        self.blocking: set[int] = set()  # streams that the legacy stream waits for, as it does for none at first
        self.peers: set[tuple[int, int]] = set()
        self.contexts = {PRIMARY + ordinal: ordinal for ordinal in range(gpus)}
        self.events: dict[int, set[int]] = {}
        self.pinned: dict[int, Any] = {}
        self._of: dict[int, int] = {}  # a stream's context
        self._known: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        self._written: defaultdict[int, set[int]] = defaultdict(set)
        self._touched: defaultdict[int, set[int]] = defaultdict(set)
        self._memory: dict[int, tuple[Any, int, int | None]] = {}
        self._numbers, self._handles = itertools.count(1), itertools.count(0x100)
        self._thread = threading.local()

    # what tests do

    def context(self, ordinal: int = 0) -> int:
        """Another context than the primary one."""
        handle = 0x2000 + next(self._handles)
        self.contexts[handle] = ordinal
        return handle

    def stream(self, context: int = PRIMARY) -> int:
        """One that waits for no other by itself (non-blocking)."""
        handle = next(self._handles)
        self._of[handle] = context
        return handle

    def alloc(self, nbytes: int, ordinal: int = 0, context: int | None = None, past: int = 0) -> int:
        """The address of memory, which is the process's own; `past` bytes behind a multiple of 256."""
        buffer = ctypes.create_string_buffer(nbytes + 512)
        address = -(-ctypes.addressof(buffer) // 256) * 256 + past
        self._memory[address] = buffer, ordinal, context
        return address

    def free(self, address: int, stream: int | None = None) -> None:
        """Whoever takes it next does so on `stream`, or anywhere."""
        late = self._touched.pop(address, set()) - self.over - (self._at(stream) if stream is not None else set())
        if late:
            self.wrong.append(f"freed before work {sorted(late)} is over")
        self._written.pop(address, None)
        self.freed.append(address)
        del self._memory[address]

    def write(self, stream: int, address: int) -> int:
        return self._launch(stream, address, writes=True)

    def read(self, stream: int, address: int) -> int:
        return self._launch(stream, address, writes=False)

    def finish(self, *work: int) -> None:
        """The GPU has done all, or this."""
        self.over |= set(work) or set().union(*self._known.values())

    def wait_for(self, stream: int) -> None:
        """The host waits for a stream, as a framework does itself."""
        self.over |= self._at(stream)

    def tell(self, stream: int, of: int) -> None:
        """`stream` waits for the stream `of`, as a framework does itself."""
        self._at(stream).update(self._at(of))

    @property
    def stack(self) -> list[int]:
        """The contexts of this thread, the current one last."""
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        found: list[int] = self._thread.stack
        return found

    def _launch(self, stream: int, address: int, *, writes: bool) -> int:
        known = self._at(stream)
        base = max(start for start in self._memory if start <= address)
        before = self._touched[base] if writes else self._written[base]
        if late := before - known - self.over:
            self.wrong.append(f"{'written' if writes else 'read'} before work {sorted(late)} is over")
        number = next(self._numbers)
        known.add(number)
        self._touched[base].add(number)
        if writes:
            self._written[base].add(number)
        return number

    def _at(self, stream: int) -> set[int]:
        if stream in (0, 1, 2):
            return self._known[self.stack[-1] if self.stack else PRIMARY, 0]
        return self._known[self._of[stream], stream]

    def _wait(self, work: set[int]) -> None:
        self.waits += not work <= self.over
        self.over |= work

    # the driver's calls

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cu"):
            return found

        def call(*args: Any) -> int:
            self.asked.append(name)
            if name in self.fails:
                return self.fails[name]
            code: int | None = found(*[0 if arg is None else arg for arg in args])  # None is NULL
            return code or 0

        return call

    def cuDeviceGetCount(self, out: Any) -> None:  # noqa: N802
        out.value = 2

    def cuDeviceGet(self, out: Any, ordinal: int) -> int:  # noqa: N802
        out.value = ordinal
        return 0 if PRIMARY + ordinal in self.contexts else INVALID

    def cuCtxGetDevice(self, out: Any) -> int:  # noqa: N802
        if not self.stack:
            return NO_CONTEXT
        out.value = self.contexts[self.stack[-1]]
        return 0

    def cuDevicePrimaryCtxGetState(self, device: int, flags: Any, active: Any) -> None:  # noqa: N802
        active.value = PRIMARY + device in self.contexts

    def cuDevicePrimaryCtxRetain(self, out: Any, device: int) -> None:  # noqa: N802
        out.value = PRIMARY + device

    def cuDevicePrimaryCtxRelease_v2(self, device: int) -> None:  # noqa: N802
        pass

    def cuCtxGetCurrent(self, out: Any) -> None:  # noqa: N802
        out.value = self.stack[-1] if self.stack else None

    def cuCtxPushCurrent_v2(self, context: int) -> int:  # noqa: N802
        if context not in self.contexts:
            return NO_CONTEXT
        self.stack.append(context)
        return 0

    def cuCtxPopCurrent_v2(self, out: Any) -> None:  # noqa: N802
        out.value = self.stack.pop()

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> None:  # noqa: N802
        before = getattr(self._thread, "mode", 0)
        self._thread.mode, mode.value = mode.value, before

    @property
    def mode(self) -> int:
        """This thread's capture mode: 0 at first."""
        found: int = getattr(self._thread, "mode", 0)
        return found

    def cuEventCreate(self, out: Any, flags: int) -> int:  # noqa: N802
        if not self.stack:
            return NO_CONTEXT
        out.value = next(self._handles)
        self.events[out.value] = set()
        return 0

    def cuEventDestroy_v2(self, event: int) -> None:  # noqa: N802
        del self.events[event]

    def cuEventRecord(self, event: int, stream: int) -> int:  # noqa: N802
        self.events[event] = set(self._at(stream))
        return self._uses(stream)

    def cuCtxRecordEvent(self, context: int, event: int) -> int:  # noqa: N802
        if self.capturing:
            self.capturing.clear()
            return CAPTURE
        of_it = [known for (of, _), known in self._known.items() if of == context]
        self.events[event] = set().union(*of_it)
        return 0

    def cuCtxSynchronize(self) -> int:  # noqa: N802
        if not self.stack:
            return NO_CONTEXT
        self._wait(set().union(*(known for (of, _), known in self._known.items() if of == self.stack[-1])))
        return 0

    def cuEventQuery(self, event: int) -> int:  # noqa: N802
        return 0 if self.events[event] <= self.over else NOT_READY

    def cuEventSynchronize(self, event: int) -> None:  # noqa: N802
        self._wait(self.events[event])

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:  # noqa: N802
        if stream in (0, 1, 2) and not self.stack:
            return NO_CONTEXT
        self._at(stream).update(self.events[event])
        return self._uses(stream)

    def cuStreamIsCapturing(self, stream: int, out: Any) -> int:  # noqa: N802
        out.value = int(stream in self.capturing)
        return IMPLICIT if stream in (0, 1) and self.capturing & self.blocking else 0

    def _uses(self, stream: int) -> int:
        """A capture of a stream that the legacy stream waits for ends when that is used. The code."""
        if stream not in (0, 1) or not self.capturing & self.blocking:
            return 0
        self.capturing.clear()
        return IMPLICIT

    def cuStreamQuery(self, stream: int) -> int:  # noqa: N802
        if stream in (0, 1, 2) and not self.stack:
            return NO_CONTEXT
        if stream in self.capturing:
            self.capturing.clear()
            return CAPTURE
        return self._uses(stream) or (0 if self._at(stream) <= self.over else NOT_READY)

    def cuPointerGetAttribute(self, out: Any, which: int, address: int) -> int:  # noqa: N802
        start = max((start for start in self._memory if start <= address), default=0)
        if not start or address >= start + len(self._memory[start][0]):
            return INVALID
        _, ordinal, context = self._memory[start]
        if which == 3:
            here = self.contexts[self.stack[-1]]
            out.value = address
            return 0 if here == ordinal or (here, ordinal) in self.peers else INVALID
        out.value = ordinal if which == 9 else context if context is not None else PRIMARY + ordinal
        return 0

    def cuMemcpy(self, to: int, source: int, nbytes: int) -> int:  # noqa: N802
        if not self.stack:
            return NO_CONTEXT
        for work in (self.read(1, source), self.write(1, to)):
            self.over.add(work)
        ctypes.memmove(to, source, nbytes)
        return 0

    def cuMemcpyAsync(self, to: int, source: int, nbytes: int, stream: int) -> int:  # noqa: N802
        if stream in (0, 1, 2) and not self.stack:
            return NO_CONTEXT
        self.read(stream, source)
        self.write(stream, to)
        ctypes.memmove(to, source, nbytes)
        return 0

    def cuStreamSynchronize(self, stream: int) -> None:  # noqa: N802
        self._wait(self._at(stream))

    def cuStreamCreate(self, out: Any, flags: int) -> int:  # noqa: N802
        if not self.stack:
            return NO_CONTEXT
        out.value = self.stream(self.stack[-1])
        return 0

    def cuStreamDestroy_v2(self, stream: int) -> None:  # noqa: N802
        del self._of[stream]

    def cuMemHostAlloc(self, out: Any, nbytes: int, flags: int) -> int:  # noqa: N802
        if not self.stack:
            return NO_CONTEXT
        buffer = ctypes.create_string_buffer(nbytes)
        out.value = ctypes.addressof(buffer)
        self.pinned[out.value] = buffer
        return 0

    def cuMemFreeHost(self, address: int) -> None:  # noqa: N802
        del self.pinned[address]

    def cuMemcpyDtoHAsync_v2(self, to: int, source: int, nbytes: int, stream: int) -> None:  # noqa: N802
        ctypes.memmove(to, source, nbytes)


def stand_in(monkeypatch: Any, driver: Driver | None = None) -> Driver:
    """Put a driver where memguard keeps libcuda, and nowhere else; nothing is shared at first."""
    from memguard._devices import contexts, streams
    from memguard._frameworks.arrays import lifetimes

    driver = driver or Driver()
    lifetimes._open.clear()
    lifetimes._parked.clear()
    monkeypatch.setattr(contexts, "_initialised", driver)
    monkeypatch.setattr(contexts, "unusable_after_fork", False)
    monkeypatch.setattr(contexts, "_primaries", {})
    monkeypatch.setattr(streams, "_idle", {})
    return driver

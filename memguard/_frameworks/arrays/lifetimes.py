"""Manages the lifetime of shared memory, from the hand-over until the consumer's last view is freed.

A `Lifetime` keeps the producer's array alive. Its destructor may run on any thread and inside any allocation, so `end`
takes no lock and never blocks. If the consumer's work on the memory is not done at that time, memguard makes the
producer's stream wait for the work. If the producer's stream is unknown, this module's thread releases the array once
the work is done. PyCUDA must free memory on the thread that allocated it, so a PyCUDA array is released on the thread
that handed it over.
"""

from __future__ import annotations

import _thread
import functools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from memguard._base.logs import log as _log
from memguard._devices import streams, suspension
from memguard._devices.streams import LEGACY, PER_THREAD, Mark
from memguard._frameworks.arrays.view import View
from memguard.errors import DeviceError, Suspended

_POLL, _POLL_SUSPENDED = 0.001, 0.1
"""Seconds between two checks whether the GPU work before a release is done; the second applies while the process is
suspended."""


class Offer(NamedTuple):
    """The producer's description of an array. `owner` is the object that keeps the memory alive.

    stream   the stream on which the producer will reuse the memory after its release; None if unknown
    context  the CUDA context that owns the memory; None for the GPU's primary one
    thread   the only thread that may release `owner`; None if any thread may
    done     True if the array's values are computed, so that no stream needs to wait
    """

    producer: str
    view: View
    owner: Any
    stream: int | None = None
    context: int | None = None
    thread: int | None = None
    done: bool = False


new_offer: Callable[[tuple[Any, ...]], Offer] = functools.partial(tuple.__new__, Offer)
"""Create an offer from all its fields, in a quarter of the constructor's time. Every hand-over creates an offer."""


class Lifetime:
    """Represents one consumer's use of a producer's memory; created by `begin`.

    `stream` is the consumer's stream; None if the consumer may use the memory on any stream. `context` is the
    consumer's CUDA context; None for the GPU's primary one. `releases_when_done`: the consumer releases memory only
    after its own work is done (JAX; measured), so the producer does not wait.
    """

    __slots__ = ("consumer", "context", "offer", "releases_when_done", "stream")
    offer: Offer
    consumer: str
    stream: int | None
    releases_when_done: bool
    context: int | None

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not ending():  # during finalization this module's globals may be missing
            self.end()

    def cancel(self) -> None:
        """End the lifetime of a failed hand-over without a wait, because the consumer never used the memory."""
        _open.pop(id(self), None)

    def end(self) -> None:
        """End the lifetime after the last view is freed. Callable on any thread, in any code. Idempotent."""
        if _open.pop(id(self), None) is None:
            return
        mark, thread = None, self.offer.thread
        if not self.releases_when_done:
            mark = _running_work(self.offer, self.stream, self.context)
        if mark is None and (thread is None or thread == threading.get_ident()):
            return  # the destruction of this object releases the owner
        parked = _Parked(self.offer, mark)
        del self.offer
        _parked.append(parked)
        _sweeper.wake()


class _Parked:
    """An ended hand-over whose memory stays alive until `mark` has passed and `thread` may release it.

    `sweep` references this object and not the offer, so that the thread that sets `offer` to None drops the last
    reference to the owner.
    """

    __slots__ = ("mark", "offer", "thread")

    def __init__(self, offer: Offer, mark: Mark | _DeferredMark | _AfterResume | None) -> None:
        self.offer: Offer | None = offer
        self.mark, self.thread = mark, offer.thread


class _SharedView(NamedTuple):
    producer: str
    consumer: str
    view: View


_new_shared_view: Callable[[tuple[Any, ...]], _SharedView] = functools.partial(tuple.__new__, _SharedView)
held_for_processes: Counter[int] = Counter()
"""Bytes by GPU (CUDA's ordinal) that this process holds for other processes. The ledger attributes these bytes to no
framework."""
_open: dict[int, _SharedView] = {}
"""The shared views by `id` of their `Lifetime`. An entry does not reference the array's owner."""
_parked: list[_Parked] = []


def begin(
    offer: Offer, consumer: str, stream: int | None, releases_when_done: bool = False, context: int | None = None
) -> Lifetime:
    """Create a lifetime. The lifetime ends when `end` is called, or when the last reference to the object is
    dropped."""
    lifetime = Lifetime()
    lifetime.offer, lifetime.consumer, lifetime.stream = offer, consumer, stream
    lifetime.releases_when_done, lifetime.context = releases_when_done, context
    _open[id(lifetime)] = _new_shared_view((offer.producer, consumer, offer.view))
    if _parked:
        sweep()
    return lifetime


def sweep() -> None:
    """Release each entry of `_parked` whose GPU work is done and which this thread may release."""
    here = threading.get_ident()
    for _ in range(len(_parked)):
        if suspension.now is not None:  # CUDA cannot be used while the process is suspended
            return
        try:
            parked = _parked.pop(0)
        except IndexError:  # another thread removed the last entry
            return
        over = False
        try:
            over = parked.thread in (None, here) and (parked.mark is None or _passed(parked.mark))
        finally:
            if over:
                parked.offer = None
            else:
                _parked.append(parked)


def lent() -> dict[int, dict[str, dict[str, int]]]:
    """Bytes of live shared views, by GPU (CUDA's ordinal), producer and consumer. The ledger reports them as `lent`.

    A byte that two consumers view counts once for each consumer.
    """
    found: dict[int, dict[str, dict[str, list[tuple[int, int]]]]] = {}
    for entry in list(_open.values()):
        view = entry.view
        if view.device is not None and view.size:
            producer = found.setdefault(view.device, {}).setdefault(entry.producer, {})
            producer.setdefault(entry.consumer, []).append(view.extent)
    return {
        device: {name: {to: covered(parts) for to, parts in consumers.items()} for name, consumers in rows.items()}
        for device, rows in found.items()
    }


def lent_by(producer: str, device: int) -> int:
    """Bytes of the producer's memory that other frameworks view. Each byte counts once."""
    views = [entry.view for entry in list(_open.values()) if entry.producer == producer]
    return covered(view.extent for view in views if view.device == device and view.size)


def covered(parts: Iterable[tuple[int, int]]) -> int:
    """The number of bytes in the union of the address ranges `parts`, each a start and an exclusive end."""
    total, reached = 0, 0
    for first, end in sorted(parts):
        total += max(end - max(first, reached), 0)
        reached = max(reached, end)
    return total


def _running_work(
    offer: Offer, stream: int | None, context: int | None = None
) -> Mark | _DeferredMark | _AfterResume | None:
    """An object whose `passed` tests if the consumer's work is done. None if the work is done already, or if the
    producer's stream now waits for the work."""
    _, shape, _, _, device, _ = offer.view
    if device is None or 0 in shape:
        return None
    if suspension.now is not None:
        return _AfterResume(offer._replace(owner=None), stream, context)
    # CU_STREAM_PER_THREAD names the calling thread's stream. Another thread may have queued the work: treat as None.
    stream = None if stream == PER_THREAD else stream
    mine = None if offer.stream == PER_THREAD else offer.stream
    try:
        if stream is not None and mine is not None and (stream or LEGACY) == (mine or LEGACY):
            return None  # the same stream runs the producer's next work after the consumer's
        if context is None and streams.quick_idle(device, stream, mine):
            return None
        if any(known is not None and streams.capturing(device, known) for known in (stream, mine)):
            return None  # a capturing stream must not wait; the graph's owner keeps the captured memory alive
        if stream is not None and streams.idle(device, stream, context):
            return None
        mark = Mark(device, stream, context)
        if mine is None:
            return None if _passed(mark) else mark
        with mark:
            if not mark.passed():
                # A caching allocator reuses memory on the stream of its allocation, mostly the legacy default stream,
                # even if another stream was current at the hand-over. So both of these streams wait.
                for then in dict.fromkeys((mine or LEGACY, LEGACY)):
                    if stream is None or (stream or LEGACY) != then:
                        streams.capturing(device, then)  # raises Captured if a wait would break a capture
                        mark.before(then)
        return None
    except Suspended:  # a suspension began during this call
        return _AfterResume(offer._replace(owner=None), stream, context)
    except DeviceError as error:
        _log.debug("exchange: %s", error)
    # The producer's stream is unknown or cannot wait, so `sweep` polls whether the work is done.
    if stream is not None:
        deferred = _DeferredMark(device, stream, context)
        return None if _passed(deferred) else deferred
    try:
        mark = Mark(device, None, context)
    except DeviceError:
        return None
    except Suspended:
        return _AfterResume(offer._replace(owner=None), stream, context)
    return None if _passed(mark) else mark


class _DeferredMark:
    """Records a stream's `Mark` only after CUDA graph capture has ended, because recording would break the capture."""

    def __init__(self, device: int, stream: int, context: int | None) -> None:
        self._device, self._stream, self._context = device, stream, context
        self._mark: Mark | None = None

    def passed(self) -> bool:
        try:
            if self._mark is None and not streams.capturing(self._device, self._stream):
                self._mark = Mark(self._device, self._stream, self._context)
        except streams.Captured:
            return False
        return self._mark is not None and self._mark.passed()

    def close(self) -> None:
        if self._mark is not None:
            self._mark.close()


class _AfterResume:
    """Calls `_running_work` after the suspended process has resumed. `offer` is a copy without the owner, so that this
    object keeps no memory alive."""

    def __init__(self, offer: Offer, stream: int | None, context: int | None) -> None:
        self._arguments: tuple[Offer, int | None, int | None] | None = (offer, stream, context)
        self._mark: Mark | _DeferredMark | _AfterResume | None = None

    def passed(self) -> bool:
        if suspension.now is not None:
            return False
        arguments, self._arguments = self._arguments, None
        if arguments is not None:
            self._mark = _running_work(*arguments)
        return self._mark is None or self._mark.passed()

    def close(self) -> None:
        if self._mark is not None:
            self._mark.close()


def _passed(mark: Mark | _DeferredMark | _AfterResume) -> bool:
    """Return True and close `mark` if the GPU work before `mark` is done. A CUDA error counts as done, because the
    context and its memory no longer exist."""
    try:
        if not mark.passed():
            return False
    except Suspended:  # a suspension began during this call
        return False
    except DeviceError as error:
        _log.debug("exchange: %s", error)
    mark.close()
    return True


class _Sweeper:
    """Runs a daemon thread that calls `sweep`, while `_parked` has entries that any thread may release."""

    def __init__(self) -> None:
        self._running = False

    def wake(self) -> None:
        if self._running or not any(parked.thread is None for parked in list(_parked)):
            return
        self._running = True
        try:  # `threading.Thread.start` would take locks that code interrupted by this call may hold
            _thread.start_new_thread(self._begin, ())
        except RuntimeError:  # the interpreter is shutting down
            self._running = False

    def _begin(self) -> None:
        try:
            threading.Thread(target=self._run, name="memguard-exchange", daemon=True).start()
        except RuntimeError:
            self._running = False

    def _run(self) -> None:
        try:
            while any(parked.thread is None for parked in list(_parked)):
                time.sleep(_POLL if suspension.now is None else _POLL_SUSPENDED)
                sweep()
        finally:
            self._running = False
        self.wake()  # `_parked` may have new entries since the loop ended


_sweeper = _Sweeper()

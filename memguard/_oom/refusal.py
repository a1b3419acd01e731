"""Counts refused requests, reports them as timeline events, and finds the figures for a report. Pure but for a lock.

The guard adds memory figures and an id to the `RefusedRequest` that a framework's adapter creates. memguard's own
allocators also store the id in the exception. `RefusalCounts` counts requests for the ledger and the metrics,
`RefusalEvents` creates the timeline's events, and `record_of` finds the recorded request of an exception. The other
functions choose the figures of a report. When an exception reaches memguard, the failing code may already have freed
memory. So the report takes the figures of the refusal from the best available source: the recorded request (from
memguard's own allocators and torch's observer), the error's text, the framework's peak, or the monitor's last sample.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from memguard._base.types import RECORD, Event, RefusedRequest, Sample
from memguard._base.units import MIB, format_size, parse_size
from memguard._frameworks.specs import NEVER_GIVE_BACK, SPECS

if TYPE_CHECKING:  # the modules for diagnosis are imported at the first error
    from memguard._ledger.types import DeviceLedger, Row
    from memguard._oom.classify import Classification, ErrorFacts

EVERY = 10.0
"""Seconds between two events of one framework on one GPU, because a program may probe thousands of batch sizes."""
_KEPT = 256
"""Maximum number of stored request ids, and of stored event times. Only recent requests can still get a report."""
_DIFFERS = 64 * MIB
"""Bytes. Figures that differ by less than `_DIFFERS`, or by less than 2%, count as equal in a report."""
_ROUNDED = Fraction(6, 1000)
"""Relative tolerance for a size printed with two decimals: `1.00 GiB` may be off by half a per cent."""


class RefusalCounts:
    """The number of each framework's refused requests on each GPU (UUID), and the last such request.

    Takes no lock, because it counts within the failing allocation.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], _Count] = {}

    def add(self, request: RefusedRequest) -> None:
        """Count one request."""
        if request.uuid is None:
            return
        known = self._counts.setdefault((request.framework, request.uuid), _Count())
        known.count, known.last = next(known.numbers), request

    def on(self, uuid: str, reporting: Iterable[str]) -> dict[str, tuple[int, float | None]]:
        """The number of refused requests on one GPU and the time of the last refused request, by framework. Frameworks
        that are not in `reporting` are included only after a refused request."""
        found: dict[str, tuple[int, float | None]] = dict.fromkeys(reporting, (0, None))
        for (name, where), known in [*self._counts.items()] if self._counts else ():
            if where == uuid and known.last is not None:
                found[name] = known.count, known.last.time
        return found

    def totals(self) -> dict[tuple[str, str], int]:
        """The number of refused requests by framework and GPU UUID."""
        return {key: known.count for key, known in [*self._counts.items()]}


class _Count:
    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.count = 0
        self.last: RefusedRequest | None = None


class _Waiting:
    """The refused requests since the last event, which the next event reports as one."""

    def __init__(self, since: float) -> None:
        self.since, self.count = since, 0
        self.last: RefusedRequest | None = None
        self.ids: deque[str | None] = deque(maxlen=_KEPT)


class RefusalEvents:
    """Convert refused requests to timeline events. The first request becomes an event immediately, and later requests
    become one event per `EVERY` seconds.

    A timeline reader matches each out-of-memory report to the event that counts the report's request. An event cannot
    contain request ids, because memguard 0.1.0 refuses an event with an unknown field. So each event gets a unique
    time, and a report contains the request's id and the event's time.

    Thread-safe. The lock is re-entrant, because a signal handler may interrupt the thread that holds the lock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.RLock()
        self._waiting: dict[tuple[str, str | None], _Waiting] = {}
        self._events: dict[str, float] = {}
        """Maps a request's id to the time of the event that counts the request."""
        self._times: deque[float] = deque(maxlen=_KEPT)

    def refused(self, request: RefusedRequest) -> list[Event]:
        """Add one request. Returns the events to write to the timeline."""
        key = request.framework, request.uuid
        with self._lock:
            waiting = self._waiting.get(key)
            if waiting is None:
                self._waiting[key] = _Waiting(self._clock())
                return [self._counted(request, 1, [request.id])]
            waiting.count, waiting.last = waiting.count + 1, request
            waiting.ids.append(request.id)
            return self._due(False)

    def forked(self) -> None:
        """In a forked child, drop the parent's pending events and replace the lock, which another thread may have
        held."""
        self._lock, self._waiting = threading.RLock(), {}

    def due(self, everything: bool = False) -> list[Event]:
        """The events whose interval has ended; with `everything`, all pending events."""
        if not self._waiting:  # nothing is pending, so skip the lock
            return []
        with self._lock:
            return self._due(everything)

    def event_of(self, request: str | None) -> float | None:
        """The time of the timeline event that counts the request with the id `request`; None if unknown."""
        return None if request is None else self._events.get(request)

    def _counted(self, request: RefusedRequest, count: int, ids: Iterable[str | None]) -> Event:
        """Create an event with a unique time, in whole milliseconds as in a timeline."""
        when = round(request.time, 3)
        while when in self._times:
            when = round(when + 0.001, 3)
        self._times.append(when)
        self._events.update((one, when) for one in ids if one is not None)
        while len(self._events) > _KEPT:
            del self._events[next(iter(self._events))]
        return _event(request._replace(time=when), count)

    def _due(self, everything: bool) -> list[Event]:
        now, events = self._clock(), []
        for key, waiting in list(self._waiting.items()):
            if not everything and 0 <= now - waiting.since < EVERY:
                continue
            if waiting.last is None:
                del self._waiting[key]
                continue
            events.append(self._counted(waiting.last, waiting.count, waiting.ids))
            self._waiting[key] = _Waiting(now)
        return events


def _event(request: RefusedRequest, count: int) -> Event:
    size = "" if request.requested is None else f" for {format_size(request.requested)}"
    held = ""
    if request.held is not None and request.cap is not None:
        held = f"; it held {format_size(request.held)} of its cap of {format_size(request.cap)}"
    free = "" if request.free is None else f", and the GPU had {format_size(request.free)} free"
    what = f"a request{size} was refused" if count == 1 else f"{count} more requests were refused, the last{size}"
    unhelped = "" if request.why_no_help is None else f"; no room was made for it: {request.why_no_help.text}"
    text = f"{request.framework}: {what}{held}{free}{unhelped}"
    return Event(
        request.time, "refused", text, None, request.uuid, request.framework, bytes=request.requested, times=count,
        held=request.held, in_use=request.in_use, reclaimable=request.reclaimable, cap=request.cap, free=request.free,
    )  # fmt: skip


def record_of(
    records: Mapping[int, RefusedRequest],
    facts: ErrorFacts,
    classification: Classification,
    name: str | None,
    pid: int,
    thread: int,
) -> int | None:
    """The number of the recorded request that caused the error; None if none is recorded. `records`: the recorded
    requests whose error has not been seen yet, by number.

    memguard's own allocators store the number in their errors. Observers of other allocators report only framework and
    size. Of several matching requests, the newest of `thread` is used, or else the newest of any thread, because
    `backward` allocates on another thread.
    """
    marked = facts.attributes.get(RECORD)
    if isinstance(marked, str) and marked.startswith(f"{pid}:"):
        number = int(marked.partition(":")[2])
        return number if number in records else None
    if classification.memory != "gpu":
        return None
    fit = [
        (request.thread == thread, number)
        for number, request in records.items()
        if request.source == "observer"
        and request.framework == name
        and _same(request.requested, classification.requested)
    ]
    return max(fit)[1] if fit else None


def _same(exact: int | None, printed: int | None) -> bool:
    return exact is None or printed is None or abs(exact - printed) <= int(exact * _ROUNDED) + 1024


def from_text(facts: ErrorFacts, classification: Classification, time: float) -> RefusedRequest | None:
    """The figures in the error's text, found by the patterns in the framework's spec; None if the text has none."""
    spec = SPECS.get(classification.requester or "")
    found: dict[str, Any] = {}
    for field, pattern in spec.figures if spec is not None else ():
        if field not in found and (match := re.search(pattern, facts.text)):
            size = _size(match[1])
            if size is not None:
                found[field] = size
    if not found or spec is None:
        return None
    if (cached := found.pop("cached", None)) is not None and "in_use" in found:
        found["held"] = found["in_use"] + cached
    # An allocator whose text has `held` has trimmed its cache before the refusal, so nothing is reclaimable. torch's
    # cudaMallocAsync backend prints only `in_use`, and the reclaimable part of the driver's pool is unknown.
    reclaimable = 0 if "held" in found else None
    return RefusedRequest(spec.name, "text", time, requested=classification.requested)._replace(
        reclaimable=reclaimable, **found
    )


def _size(text: str) -> int | None:
    number, _, unit = text.replace(",", "").partition(" ")
    try:
        return int(number) if unit == "bytes" else parse_size(f"{number}{unit}")
    except ValueError:
        return None


def from_sample_or_peak(
    gpu: DeviceLedger,
    classification: Classification,
    need: int,
    peak: int | None,
    samples: Sequence[Sample],
    time: float,
) -> RefusedRequest | None:
    """Figures from the last sample or the peak, for an error without recorded figures or figures in its text; None if
    neither source adds information.

    need  the bytes that the request needed under the requester's cap
    peak  the requester's peak of bytes in use on this GPU
    """
    row = next((row for row in gpu.rows if row.kind == "framework" and row.name == classification.requester), None)
    seen = next((d for d in samples[-1].devices if d.uuid == gpu.device.uuid), None) if samples else None
    free = gpu.row("free").bytes
    if row is None:
        if seen is None or free is None or free - seen.free < _DIFFERS:
            return None
        return RefusedRequest(
            classification.requester or "", "sample", samples[-1].time, gpu.device.uuid, free=seen.free
        )
    last = seen.frameworks.get(row.name) if seen is not None else None
    sampled = peaked = None
    if last is not None and seen is not None and _more(last.in_use, row.in_use):
        sampled = RefusedRequest(
            row.name, "sample", samples[-1].time, gpu.device.uuid, classification.requested, last.held, last.in_use,
            last.reclaimable, free=seen.free,
        )  # fmt: skip
    # Only for a pool that never shrinks: any other pool may have held less at the refusal.
    if peak is not None and row.name in NEVER_GIVE_BACK and peak >= (row.in_use or 0):
        held = row.bytes if row.at_least is None else None
        held = max(held, peak) if held is not None else None
        peaked = RefusedRequest(row.name, "peak", time, gpu.device.uuid, classification.requested, held, peak, 0)
    # The peak may be old, and the sample precedes the last requests. If both explain the error, the larger figure is
    # the better estimate of the bytes in use at the refusal, which never exceed the peak.
    fills = [one for one in (peaked, sampled) if one is not None and row.cap and (one.in_use or 0) + need > row.cap]
    return max(fills, key=lambda one: one.in_use or 0, default=peaked or sampled)


def _more(then: int | None, now: int | None) -> bool:
    return then is not None and now is not None and then - now >= _DIFFERS


def complete(request: RefusedRequest, other: RefusedRequest | None) -> RefusedRequest:
    """Fill the missing fields of `request` from `other`. `in_use` is the larger of both figures.

    PyTorch's text counts idle memory in the pools of CUDA graphs as in use; PyTorch's counters do not.
    """
    if other is None:
        return request
    known = {"requested", "held", "in_use", "reclaimable", "cap", "free", "pooled"}
    found = request._replace(**{name: getattr(other, name) for name in known if getattr(request, name) is None})
    if other.in_use is None or found.in_use is None or other.in_use * (1 - _ROUNDED) <= found.in_use:
        return found
    return found._replace(in_use=other.in_use if found.held is None else min(other.in_use, found.held))


def rows_at(gpu: DeviceLedger, request: RefusedRequest) -> DeviceLedger:
    """The ledger rows of one GPU, with the requester's memory and the free memory as of the refusal. Memory that the
    requester has returned since the refusal is not counted as free.
    """
    rows, returned = [], 0
    for row in gpu.rows:
        if row.kind == "framework" and row.name == request.framework:
            then = _row(row, request)
            returned = max((then.bytes or 0) - (row.bytes or 0), 0)
            rows.append(then)
        else:
            rows.append(row)
    free = request.free
    if free is None and returned and (now := gpu.row("free").bytes) is not None:
        free = max(now - returned, 0)
    if free is not None:
        rows = [replace(row, bytes=free) if row.kind == "free" else row for row in rows]
    return replace(gpu, rows=tuple(rows))


def _row(row: Row, request: RefusedRequest) -> Row:
    """The requester's row at the refusal. Fields that `request` lacks become None, because the row's current figures
    are not from the refusal."""
    if request.cap is not None and row.cap is not None and request.cap < row.cap:
        row = replace(row, cap=request.cap)  # the user set a lower limit
    if request.held is None and request.in_use is None:
        return row
    held, in_use = request.held, request.in_use
    if held is None:  # `in_use` is a lower bound of `held`
        held = max(row.bytes or 0, in_use or 0)
    if row.at_least is not None:
        return replace(row, bytes=held, at_least=held, in_use=in_use)
    cached = None if in_use is None else max(held - in_use, 0)
    return replace(row, bytes=held, in_use=in_use, cached=cached, reclaimable=request.reclaimable)


def changes_since(then: DeviceLedger, now: DeviceLedger | None, name: str | None, pooled: int | None = None) -> str:
    """The end of a sentence that states how the figures changed since the refusal; empty without a change or without
    `now`.

    pooled  bytes in `in_use` of `then` that are idle in private pools, which `in_use` of `now` excludes
    """
    if now is None:
        return ""
    before, after = (
        next((row for row in gpu.rows if row.kind == "framework" and row.name == name), None) for gpu in (then, now)
    )
    if before is not None and after is not None:
        if before.in_use is not None and _differ(before.in_use - (pooled or 0), after.in_use):
            return f"; now {format_size(after.in_use)} are in use"
        if _differ(before.bytes, after.bytes):
            return f"; now it holds {format_size(after.bytes)}"
    if _differ(then.row("free").bytes, free := now.row("free").bytes):
        return f"; now the {'machine' if then.device.unified else 'card'} has {format_size(free)} free"
    return ""


def _differ(then: int | None, now: int | None) -> bool:
    return then is not None and now is not None and abs(then - now) >= max(_DIFFERS, then // 50)

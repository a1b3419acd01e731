"""Record what the frameworks allocate, as a trace that `memguard replay` replays on any machine.

PyTorch (native allocator) and PyCUDA report every allocation. Of the others a daemon thread samples the bytes in use
until the block ends.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from memguard import api
from memguard._base.blocks import Block, End
from memguard._base.logs import log as _log
from memguard._base.types import Device, State, TraceEvent, Usage
from memguard._base.undo import Undo
from memguard._devices import suspension
from memguard._frameworks.base import Framework
from memguard._guard.guard import Guard
from memguard._runtime.workers import IdleGuard
from memguard._tools.simulate import trace
from memguard.errors import TraceError


@dataclass(frozen=True, eq=False)
class _Recording:
    """What goes on while a block is recorded, and how to stop it without a trace."""

    pid: int
    undo: Undo = field(default_factory=Undo)

    def give_up(self) -> None:
        """Stop whatever of it still goes on; nothing in a forked child, whose parent records."""
        global _recording
        if os.getpid() == self.pid:
            self.undo.run()
            if _recording is self:
                _recording = None
                suspension.forbidden.pop("recording", None)


_recording: _Recording | None = None
"""PyTorch keeps one history, so only one trace at a time is possible."""
INTERVAL = 0.002
"""Seconds between samples of a framework that does not report allocations; one sample of TensorFlow takes 2.3 µs."""


def record_trace(path: str | os.PathLike[str], *, interval: float = INTERVAL) -> Block[None]:
    """Record the block's allocations into a new file at `path` (JSONL, `docs/trace.md`).

    Needs an active budget. A framework that goes live inside the block is sampled from then on; to record each of
    PyTorch's allocations, call `torch.cuda.init()` before the block. The header has the peaks of each framework's
    held and in use. Times are those of a clock that is never set. Raises NotActive, TraceError.
    """

    def begin() -> tuple[None, End]:
        return None, _begin(path, interval)

    return Block(begin)


def _begin(path: str | os.PathLike[str], interval: float) -> End:
    """Start recording. The returned call ends it; if nobody can call that any more, it ends without a trace."""
    global _recording
    target = os.path.abspath(path)  # the block may change the working directory
    if os.path.lexists(target):
        raise TraceError(f"{target} exists already", fix="name a new file, or remove that one")
    if not os.access(os.path.dirname(target), os.W_OK | os.X_OK):
        raise TraceError(f"{target}: its folder cannot be written", fix="make the folder, or name another")
    guard = api.current()
    suspension.check("memguard.record_trace")
    if isinstance(guard, IdleGuard):
        _log.warning("no trace is recorded: %s", guard.why)
        return lambda error: None
    if _recording is not None and _recording.pid == os.getpid():
        raise TraceError("a trace is being recorded already", fix="end that block first")
    frameworks = dict(guard.frameworks)
    started, of_day = time.monotonic(), time.time()
    stops: dict[str, Callable[[], list[TraceEvent]]] = {}
    sampler = _Sampler(guard, frameworks, stops, interval, started)
    mine = _Recording(os.getpid())

    def finish() -> None:
        events = sampler.stop()
        reported = [stop() for stop in stops.values()]
        mine.undo.clear()
        ended = time.monotonic() - started  # after the last sample, so that marks come last
        for found in reported:
            events += since(found, of_day, time.time() - ended, ended)
        for name, framework in frameworks.items():
            events += _mark(guard, name, framework, ended)
        header = _header(guard, frameworks, of_day, sampler.most)
        trace.write(target, header, [e._replace(time=round(e.time, 6)) for e in sorted(events, key=lambda e: e.time)])

    def end(error: BaseException | None) -> None:
        if os.getpid() != mine.pid:  # a forked child also leaves the block, and must write nothing
            return
        try:
            finish()
        except Exception as failure:
            if error is None:
                raise
            _log.warning("%s", str(failure))  # the block's own error goes on, not this one
        finally:
            mine.give_up()

    # A Ctrl-C may come before the block has its end, which then nobody calls, or within that.
    weakref.finalize(end, mine.give_up).atexit = False
    try:
        _recording = mine
        why = "memguard.record_trace records what the frameworks allocate"
        suspension.forbidden["recording"] = mine.pid, why, "end that block first"
        for name, framework in frameworks.items():
            if framework.state() in (State.IMPORTED, State.LIVE) and (stop := framework.record()) is not None:
                mine.undo.add(f"the recording of {name}", stop)
                stops[name] = stop
        mine.undo.add("the sampling of the recording", sampler.halt)
        sampler.start()
    except BaseException:
        mine.give_up()  # now: the traceback keeps the end alive
        raise
    return end


def since(events: list[TraceEvent], begun: float, begun_now: float, ended: float) -> list[TraceEvent]:
    """The events of one framework, in order, with seconds since the recording began instead of times of the day.

    `begun` is the time of day at which it began. `begun_now` is the same by the clock as it was at the end: another, if
    the clock was set meanwhile. `ended` is the recording's length. No event is lost, and their order stays.
    """
    found: list[TraceEvent] = []
    last = 0.0
    for event in events:
        before, after = event.time - begun, event.time - begun_now
        time = before if last <= before <= ended else after
        last = min(max(time, last), ended)
        found.append(event._replace(time=last))
    return found


def _usage(framework: Framework, device: Device) -> Usage | None:
    """The framework's usage. None also if the reading raises, which must not break the block."""
    try:
        return framework.usage(device)
    except Exception as error:
        _log.debug("%s: %s", framework.name, error)
        return None


class _Sampler:
    def __init__(
        self, guard: Guard, frameworks: dict[str, Framework], reported: Mapping[str, object], interval: float,
        started: float,
    ) -> None:  # fmt: skip
        """Of the frameworks in `reported` only the most is kept."""
        self._guard, self._frameworks, self._reported, self._interval = guard, frameworks, reported, interval
        self._started = started
        self._stop = threading.Event()
        self._events: list[TraceEvent] = []
        self._last: dict[tuple[str, int], int] = {}
        self.most: dict[str, dict[str, int]] = {}
        self._thread = threading.Thread(target=self._run, name="memguard-trace", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def halt(self) -> None:
        """Take no more samples."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(1.0)  # a framework that hangs must not hang who gives up

    def stop(self) -> list[TraceEvent]:
        self._stop.set()
        self._thread.join()
        self._sample()
        return self._events

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._sample()

    def _sample(self) -> None:
        for name, framework in self._frameworks.items():
            for position, part in enumerate(self._guard.plan.devices):
                usage = _usage(framework, part.device)
                if usage is None:
                    continue
                self._measure(name, usage)
                if name in self._reported or usage.in_use is None:
                    continue
                if self._last.get((name, position), 0) == usage.in_use:
                    continue
                self._last[name, position] = usage.in_use
                now = time.monotonic() - self._started
                self._events.append(TraceEvent(now, name, "in_use", in_use=usage.in_use, device=position))

    def _measure(self, name: str, usage: Usage) -> None:
        most = self.most.setdefault(name, {})
        for what, size in (("held", usage.held), ("in_use", usage.peak if usage.peak is not None else usage.in_use)):
            if size is not None:
                most[what] = max(most.get(what, 0), size)


def _mark(guard: Guard, name: str, framework: Framework, when: float) -> list[TraceEvent]:
    marks = []
    for position, part in enumerate(guard.plan.devices):
        usage = _usage(framework, part.device)
        if usage is not None and (usage.held is not None or usage.in_use is not None):
            marks.append(TraceEvent(when, name, "mark", held=usage.held, in_use=usage.in_use, device=position))
    return marks


def _header(
    guard: Guard, frameworks: dict[str, Framework], started: float, most: dict[str, dict[str, int]]
) -> trace.TraceHeader:
    devices = (part.device for part in guard.plan.devices)
    return trace.TraceHeader(
        datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        tuple(trace.TraceDevice(d.name, d.total, d.reserved, d.architecture, d.unified) for d in devices),
        {
            name: {"version": _version(f.module), **guard.plan.options.get(name, {}), **f.about()}
            for name, f in frameworks.items()
        },
        guard.host.simulated,
        {
            "caps": {name: guard.plan.devices[0].caps[name] for name in frameworks},
            "most": most,
        },
    )


def _version(module: str) -> str | None:
    """The module's `__version__` first: CuPy's distributions have other names than its module."""
    version = getattr(sys.modules.get(module), "__version__", None)
    if version is not None:
        return str(version)
    try:
        return importlib.metadata.version(module)
    except importlib.metadata.PackageNotFoundError:
        return None

"""A timeline as a Chrome trace in JSON, which Perfetto and chrome://tracing show.

The format is Google's "Trace Event Format": counters (`C`) of each framework and GPU, instant events (`i`), metadata
(`M`) for names, and asynchronous events for spans (`b` and `e`): complete events of one thread have to nest, and
workloads need not. Times are microseconds since the run's first record. A counter has a new value only when it has
changed, and none while it is unknown: the viewer then shows the last one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from memguard._base.types import DeviceSample, Event, Sample
from memguard._timeline.parse import Record
from memguard._timeline.reader import Timeline
from memguard._tools.report import diagnosis
from memguard._tools.report.model import Entry

_EVENTS, _SPANS = 1, 2
"""The threads that events and spans are on."""


def trace(timelines: Iterable[tuple[str, Timeline]], processes: bool = False) -> Iterator[str]:
    """The trace, in pieces. Each run is a process of it."""
    yield '{"displayTimeUnit":"ms","traceEvents":['
    first = True
    for number, (name, timeline) in enumerate(timelines, 1):
        for event in _Run(number, processes).events(name, timeline):
            yield ("" if first else ",") + "\n" + json.dumps(event, separators=(",", ":"), allow_nan=False)
            first = False
    yield "\n]}\n"


class _Run:
    def __init__(self, number: int, processes: bool) -> None:
        self._pid, self._processes = number, processes
        self._begin: float | None = None
        self._suspended: float | None = None
        self._many = 0
        """Spans so far."""
        self._last: dict[str, dict[str, int]] = {}
        self._gpus: dict[str, str] = {}

    def events(self, name: str, timeline: Timeline) -> Iterator[dict[str, Any]]:
        header = timeline.header
        mark = ", simulated GPUs" if header.simulated else ""
        yield self._named("process_name", f"{diagnosis.clean(name)} (process {header.pid}{mark})", 0)
        yield self._named("thread_name", "events", _EVENTS)
        yield self._named("thread_name", "spans", _SPANS)
        self._gpus = {part.device.uuid: f"GPU {part.device.index}" for part in timeline.plan.devices}
        end = 0.0
        for record in timeline.records():
            end = max(end, record.time)
            yield from self._record(record)
        if self._suspended is not None:
            yield from self._span("suspended", "suspended", self._suspended, end)

    def _record(self, record: Record) -> Iterator[dict[str, Any]]:
        if self._begin is None:
            self._begin = record.time
        if isinstance(record, Sample):
            for device in record.devices:
                yield from self._counters(record.time, device)
        elif isinstance(record, Event):
            yield self._instant(diagnosis.of_event(record, self._processes))
            yield from self._spans(record)
        else:
            yield self._instant(diagnosis.of_oom(record, self._processes))

    def _counters(self, time: float, device: DeviceSample) -> Iterator[dict[str, Any]]:
        gpu = self._gpus.setdefault(device.uuid, diagnosis.clean(device.uuid))
        whole = {"process": device.process, "limit": device.limit}
        figures: dict[str, dict[str, int | None]] = {f"{gpu} {name}": {"bytes": size} for name, size in whole.items()}
        for name, (held, in_use, _, cap) in device.frameworks.items():
            label = f"{gpu} {diagnosis.clean(name)}"
            idle = None if held is None or in_use is None else max(held - in_use, 0)
            figures[label] = {"in use": in_use, "idle": idle} if in_use is not None else {"held": held}
            figures[f"{label} cap"] = {"bytes": cap}
        for label, values in figures.items():
            known = {key: size for key, size in values.items() if size is not None}
            if known and self._last.get(label) != known:
                self._last[label] = known
                yield {"name": label, "cat": "memory", "ph": "C", "ts": self._ts(time), "pid": self._pid, "args": known}

    def _instant(self, entry: Entry) -> dict[str, Any]:
        args: dict[str, str] = dict(entry.lines)
        args |= {f"held by {holder.name}": holder.size for holder in entry.holders}
        args |= {f"to do {number}": text for number, text in enumerate(entry.remedies, 1)}
        if entry.framework is not None:
            args["framework"] = entry.framework
        return {
            "name": entry.title, "cat": entry.kind, "ph": "i", "s": "p", "ts": self._ts(entry.time), "pid": self._pid,
            "tid": _EVENTS, "args": args,
        }  # fmt: skip

    def _spans(self, event: Event) -> Iterator[dict[str, Any]]:
        if event.kind == "suspended":
            self._suspended = event.time
        elif event.kind == "resumed" and self._suspended is not None:
            yield from self._span("suspended", "suspended", self._suspended, event.time)
            self._suspended = None
        elif event.kind == "workload" and event.seconds is not None:
            begin = event.time - max(event.seconds, 0.0)
            of = {} if event.framework is None else {"framework": diagnosis.clean(event.framework)}
            yield from self._span(diagnosis.clean(event.text), "workload", begin, event.time, of)

    def _span(
        self, name: str, kind: str, begin: float, end: float, args: dict[str, str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Its two events, which an id of their own joins: one for the whole trace."""
        self._many += 1
        start = self._ts(begin)
        number = f"{(self._pid << 32) + self._many:#x}"
        about = {"name": name, "cat": kind, "id": number, "pid": self._pid, "tid": _SPANS}
        yield {**about, "ph": "b", "ts": start, "args": args or {}}
        yield {**about, "ph": "e", "ts": max(self._ts(end), start), "args": {}}

    def _named(self, what: str, name: str, thread: int) -> dict[str, Any]:
        return {"name": what, "ph": "M", "ts": 0, "pid": self._pid, "tid": thread, "args": {"name": name}}

    def _ts(self, time: float) -> int:
        """Microseconds since the first record; 0 for what came before it."""
        return max(round((time - (self._begin or 0.0)) * 1e6), 0)

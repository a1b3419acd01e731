"""Formats headers and records as the JSON lines of a timeline, version 1, which `docs/timeline.md` specifies."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from memguard._base.types import Event, FrameworkSample, Plan, Sample
from memguard._base.units import MAX_SIZE, is_whole, short

VERSION = 1
MAGIC = b'{"memguard_timeline":'
"""The first bytes of every timeline file. memguard never changes a file that begins otherwise."""
MAX_LINE = 1 << 20
"""The most bytes of a line, for writer and reader. The reader rejects a longer line without loading the whole line."""
MAX_SECONDS = 1e10
"""Upper bound of a time in seconds, and of an event's `seconds` (three centuries)."""
MAX_WHOLE = 1 << 63
"""Upper bound of a whole number in options, in reports and in the header's `frameworks`."""
MAX_PART = 10**9 - 1
"""The highest number of a part (one file of a timeline): file names have at most nine digits for the number."""
_WHOLE = {int}
_TEXT = 500
"""The most characters of an event's text in the file."""
_DEPTH = 12
PEAK = "peak"
"""The kind of an event whose `bytes` is the peak of bytes in use, as a framework's allocator reports it."""
NUMBERS = ("bytes", "times", "held", "in_use", "reclaimable", "cap", "free")
"""The optional whole numbers of an event."""
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Oom(NamedTuple):
    """A recorded out-of-memory report, as JSON types. `time` is in seconds, as of `time.time()`."""

    time: float
    report: Mapping[str, Any]


@dataclass(frozen=True)
class Dropped:
    """The number of records missing from the files because they were thinned out, removed, or could not be written."""

    samples: int = 0
    events: int = 0
    ooms: int = 0

    def __add__(self, other: Dropped) -> Dropped:
        return Dropped(self.samples + other.samples, self.events + other.events, self.ooms + other.ooms)

    def most(self, other: Dropped) -> Dropped:
        return Dropped(max(self.samples, other.samples), max(self.events, other.events), max(self.ooms, other.ooms))

    def __bool__(self) -> bool:
        return bool(self.samples or self.events or self.ooms)

    def __str__(self) -> str:
        """`1 event, 3 samples`, or `nothing`."""
        counts = (("report", self.ooms), ("event", self.events), ("sample", self.samples))
        said = (f"{count:,} {what}{'s' if count != 1 else ''}" for what, count in counts if count)
        return ", ".join(said) or "nothing"


class Header(NamedTuple):
    """The first line of a file. The files (parts) of one run have the same `run`, and are numbered by `part` from 1.

    `frameworks` has properties of each framework, such as version and allocator, by name. Part 0 has a selection of the
    records of the oldest parts, which it replaces. Only part 0 has `every`, the seconds between its samples, and
    `through`, the number of the last part that it replaces.
    """

    recorded: str
    run: str
    pid: int
    rank: int | None
    simulated: bool
    part: int
    plan: Plan
    frameworks: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    dropped: Dropped = Dropped()
    every: float | None = None
    through: int = 0


class Columns:
    """The GPUs and frameworks that the numbers in a sample's rows refer to, with their totals, limits and caps, which
    rarely change."""

    __slots__ = ("caps", "devices", "frameworks", "limits", "texts", "totals")

    def __init__(self) -> None:
        self.devices: list[str] = []
        self.totals: list[int] = []
        self.limits: list[int | None] = []
        self.frameworks: list[str] = []
        self.caps: list[list[int | None]] = []
        self.texts: dict[tuple[int, str], tuple[FrameworkSample, str]] = {}
        """A cache of the last written figures and their text, by index of the GPU and name of the framework."""

    def as_dict(self) -> dict[str, Any]:
        devices = [list(row) for row in zip(self.devices, self.totals, self.limits, strict=True)]
        return {"devices": devices, "frameworks": self.frameworks, "caps": self.caps}


def columns_of(plan: Plan) -> Columns:
    columns = Columns()
    columns.frameworks = list(dict.fromkeys(name for part in plan.devices for name in part.caps))
    for part in plan.devices:
        columns.devices.append(part.device.uuid)
        columns.totals.append(part.device.total)
        columns.limits.append(part.limit)
        columns.caps.append([part.caps.get(name) for name in columns.frameworks])
    return columns


def header_line(header: Header, columns: Columns) -> bytes:
    record: dict[str, Any] = {"memguard_timeline": VERSION, "recorded": header.recorded, "run": header.run}
    record |= {"pid": header.pid, "rank": header.rank, "simulated": header.simulated, "part": header.part}
    if header.every is not None:
        record |= {"every": header.every, "through": header.through}
    record["dropped"] = asdict(header.dropped)
    record |= {"plan": _plan(header.plan), "frameworks": plain(header.frameworks), "columns": columns.as_dict()}
    return _line(record)


def columns_line(time: float, columns: Columns) -> bytes:
    return _line({"t": _time(time), "columns": columns.as_dict()})


def event_line(event: Event) -> bytes:
    record = {"kind": _words(event.kind), "text": _words(event.text)[:_TEXT]}
    if event.level is not None:
        record["level"] = event.level.value
    for key in ("uuid", "framework", "seconds", *NUMBERS):
        if (value := _detail(key, getattr(event, key))) is not None:
            record[key] = value
    return _line({"t": _time(event.time), "event": record})


def oom_line(time: float, report: Mapping[str, Any], most: int) -> bytes:
    """A line of at most `most` bytes: omits the largest entries of the report, and lists their keys in `cut`."""
    record = plain(report)
    cut: list[str] = []
    while len(line := _line({"t": _time(time), "oom": record})) > most and record.keys() - {"cut"}:
        largest = max(record.keys() - {"cut"}, key=lambda key: len(_encode(record[key])))
        del record[largest]
        cut.append(largest)
        record["cut"] = cut
    return line


def sample_line(sample: Sample, columns: Columns) -> tuple[bytes, bool]:
    """Returns the line, and True if `columns` changed. The caller must then write a columns line before this line."""
    changed = False
    rows = []
    names, texts = columns.frameworks, columns.texts
    for device in sample.devices:
        figures: list[Any] = [
            device.used, device.free, device.overhead, device.process, device.unaccounted, device.limit
        ]  # fmt: skip
        if {*map(type, figures)} != _WHOLE or max(figures) > MAX_SIZE or min(figures) < -MAX_SIZE:
            figures = [number(value) for value in figures]
        used, free, overhead, process, unaccounted, limit = figures
        known = device.used is None or used is not None  # None is valid: NVML reports no used memory on unified memory
        if not known or free is None or overhead is None or not is_whole(device.total):
            continue  # omit an invalid reading
        try:
            at = columns.devices.index(device.uuid)
        except ValueError:
            at, changed = len(columns.devices), True
            columns.devices.append(device.uuid)
            columns.totals.append(device.total)
            columns.limits.append(limit)
            columns.caps.append([None] * len(names))
        if columns.totals[at] != device.total or columns.limits[at] != limit:
            columns.totals[at], columns.limits[at], changed = device.total, limit, True
        caps, found = columns.caps[at], []
        frameworks = device.frameworks
        for position, name in enumerate(names):
            usage = frameworks.get(name)
            if usage is None:
                found.append("0")
                continue
            written = texts.get((at, name))
            if written is not None and written[0] == usage:
                found.append(written[1])
                continue
            held, in_use, reclaimable, cap = usage
            # Calls `number` only for unusual values: a call for each figure would take half of the time of the line.
            if type(held) is not int or not 0 <= held <= MAX_SIZE:
                held = number(held)
            if type(in_use) is not int or not 0 <= in_use <= MAX_SIZE:
                in_use = number(in_use)
            if type(reclaimable) is not int or not 0 <= reclaimable <= MAX_SIZE:
                reclaimable = number(reclaimable)
            if type(cap) is not int or not 0 <= cap <= MAX_SIZE:
                cap = number(cap)
            if caps[position] != cap:
                caps[position], changed = cap, True
            text = f"[{held},{in_use},{reclaimable}]"
            found.append(text)
            if usage == (held, in_use, reclaimable, cap):  # `number` changed no figure, so equal figures have this text
                texts[at, name] = usage, text
        if len(frameworks) > len(found) - found.count("0"):
            for name in frameworks.keys() - set(names):
                names.append(name)
                for other in columns.caps:
                    other.append(None)
            return sample_line(sample, columns)[0], True
        numbers = f"{at},{used},{free},{process},{overhead},{unaccounted}"
        rows.append(f"[{numbers},{','.join(found)}]" if found else f"[{numbers}]")
    # The line has no strings, so "None" can only be a missing number.
    return f'{{"t":{_time(sample.time)},"sample":[{",".join(rows)}]}}\n'.replace("None", "null").encode(), changed


def number(value: object) -> int | None:
    """Convert the value to an int within ±`MAX_SIZE`, which the timeline reader accepts; None if that is impossible."""
    if type(value) is not int:
        if value is None:
            return None
        try:
            value = operator.index(value)  # type: ignore[arg-type]
        except Exception:  # the value's own `__index__` may raise anything
            return None
    return int(value) if -MAX_SIZE <= value <= MAX_SIZE else None


def _words(value: object) -> str:
    return str(value) if isinstance(value, str) else short(value)


def _detail(key: str, value: object) -> Any:
    """Convert an optional field of an event to a value that the reader accepts; None if that is impossible."""
    if key in NUMBERS:
        return number(value)
    found = plain(value)
    if key == "seconds":
        return found if type(found) in (int, float) and abs(found) <= MAX_SECONDS else None
    return found[:100] if isinstance(found, str) else None


def plain(value: Any, depth: int = _DEPTH) -> Any:
    """Convert the value to JSON types. An object of another type becomes a short text, a number out of range None.

    A container nested more than `depth` levels deep also becomes a short text.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < MAX_WHOLE else None
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth and isinstance(value, Mapping):
        return {key if isinstance(key, str) else short(key): plain(entry, depth - 1) for key, entry in value.items()}
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return [plain(entry, depth - 1) for entry in value]
    return short(value)


def _time(time: float) -> float:
    """Return the time rounded to milliseconds; 0 if the time is out of range."""
    try:
        return round(float(time), 3) if 0 <= time < MAX_SECONDS else 0.0
    except (TypeError, ValueError, OverflowError):
        return 0.0


def _line(record: Mapping[str, Any]) -> bytes:
    return (_encode(record) + "\n").encode()


def _plan(plan: Plan) -> dict[str, Any]:
    devices = [
        {
            **asdict(part.device),
            "limit": part.limit,
            "reserve": part.reserve,
            "reserve_source": part.reserve_source,
            "caps": dict(part.caps),
            "unallocated": part.unallocated,
            "elastic": {name: list(bounds) for name, bounds in part.elastic.items()},
            "joined": list(part.joined),
        }
        for part in plan.devices
    ]
    return {"devices": devices, "options": plain(plan.options), "notes": list(plan.notes)}

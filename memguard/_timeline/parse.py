"""Parses the lines of a timeline, version 1; for an invalid line raises TimelineError with file, line and fix."""

from __future__ import annotations

import json
import math
from codecs import BOM_UTF8
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from memguard._base.text import malformed, visible
from memguard._base.types import Device, DevicePlan, DeviceSample, Event, FrameworkSample, Plan, Pressure, Sample
from memguard._base.units import MAX_SIZE, short
from memguard._timeline.format import (
    MAGIC,
    MAX_LINE,
    MAX_PART,
    MAX_SECONDS,
    MAX_WHOLE,
    NUMBERS,
    VERSION,
    Columns,
    Dropped,
    Header,
    Oom,
)  # fmt: skip
from memguard.errors import TimelineError

Record = Sample | Event | Oom
_NO_TIMELINE = "this is not a timeline: name a file that memguard's monitor wrote"
_OTHERS = "read the other parts of the timeline"
_UPGRADE = "read it with the memguard that wrote it, or a later one"
_LEVELS = {level.value: level for level in Pressure}
_Field = tuple[float, float, tuple[type, ...]]
"""The lower and upper bound of a number, and the permitted types of the value."""
_WORDS: _Field = (0, 0, (str,))
_TRUTH: _Field = (0, 1, (bool,))
_SIZE: _Field = (0, MAX_SIZE, (int,))
_MAYBE_SIZE: _Field = (0, MAX_SIZE, (int, type(None)))
_EVENT: Mapping[str, _Field] = {
    **dict.fromkeys(("kind", "text", "level", "uuid", "framework"), _WORDS),
    "seconds": (-MAX_SECONDS, MAX_SECONDS, (int, float)),
    **dict.fromkeys(NUMBERS, (-MAX_SIZE, MAX_SIZE, (int,))),
}
_DEVICE: Mapping[str, _Field] = {
    "uuid": _WORDS, "name": _WORDS, "index": _SIZE, "total": _SIZE, "reserved": _MAYBE_SIZE, "architecture": _WORDS,
    "ordinal": _MAYBE_SIZE, "simulated": _TRUTH, "unified": _TRUTH,
}  # fmt: skip
_PART: Mapping[str, _Field] = {"limit": _SIZE, "reserve": _SIZE, "unallocated": _SIZE}


class Parser:
    """Parses the lines of one file, in order. `line` is the number of the last parsed line, from 1."""

    def __init__(self, name: str) -> None:
        self.name, self.line = name, 0
        self._columns = Columns()

    def fail(self, what: str, fix: str) -> NoReturn:
        raise TimelineError(f"{self.name}:{self.line}: {what}", fix=fix)

    def header(self, raw: bytes) -> Header:
        record = self.object(raw.removeprefix(BOM_UTF8))  # an editor or a shell may have added a byte order mark
        if "memguard_trace" in record:
            what = "the first line is not the header of a timeline: this is a trace"
            self.fail(what, f"memguard replay -c BUDGET {self.name}")
        if "memguard_timeline" not in record:
            self.fail("the first line is not the header of a timeline", _NO_TIMELINE)
        if (version := record["memguard_timeline"]) != VERSION or type(version) is not int:
            self.fail(f"timeline version {short(version)}; this memguard reads {VERSION}", _UPGRADE)
        try:
            datetime.fromisoformat(record["recorded"])
            every = self._seconds(record, "every") if "every" in record else None
            thinned = every is not None  # only part 0, which has the thinned records, has the key `every`
            header = Header(
                record["recorded"],
                self._typed(record, "run", str),
                self._checked(record, "pid", 0, MAX_SIZE),
                None if record["rank"] is None else self._checked(record, "rank", 0, MAX_SIZE),
                self._typed(record, "simulated", bool),
                self._checked(record, "part", *((0, 0) if thinned else (1, MAX_PART))),
                self._plan(record["plan"]),
                {name: dict(about) for name, about in _in_range(record["frameworks"]).items()},
                Dropped(**{key: self._size(value) for key, value in record["dropped"].items()}),
                every,
                self._checked({"through": 0, **record}, "through", *((1, MAX_PART) if thinned else (0, 0))),
            )
            self._columns = self.columns(record["columns"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            self.fail(f"the header is damaged: {_why(error)}", _OTHERS)
        return header

    def record(self, raw: bytes) -> Record | None:
        """Parse a line. Returns its record, or None if the line defines new columns."""
        record = self.object(raw)
        time: Any = record.get("t")
        if type(time) not in (int, float) or not 0 <= time < MAX_SECONDS:
            self.fail(f"t: {short(time)} is not a time in seconds", "remove the line")
        if len(record) != 2:
            self.fail(f"it holds {short(sorted(record))}, not a time and one record", _UPGRADE)
        kind = next(key for key in record if key != "t")
        content = record[kind]
        try:
            if kind == "sample":
                return self._sample(float(time), content)
            if kind == "event":
                return self._event(float(time), content)
            if kind == "oom":
                return Oom(float(time), {**_in_range(content)})
            if kind != "columns":
                self.fail(f"{short(kind)} is not a record of version {VERSION}", _UPGRADE)
            self._columns = self.columns(content)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            self.fail(f"the {kind} is damaged: {_why(error)}", "remove the line")
        return None

    def object(self, raw: bytes) -> dict[str, Any]:
        self.line += 1
        if len(raw) > MAX_LINE:
            self.fail(f"longer than {MAX_LINE} bytes", "remove the line: memguard writes no line as long as this")
        header = _OTHERS if raw.startswith(MAGIC) else _NO_TIMELINE
        remove = "remove the line" if self.line > 1 else header
        try:
            record = _DECODER.decode(raw.decode())
        except RecursionError:
            self.fail("malformed JSON: nested too deeply", remove)
        except ValueError as error:  # UnicodeDecodeError is a ValueError
            self.fail(f"malformed JSON: {malformed(error)}", remove)
        if not isinstance(record, dict):
            self.fail("not a JSON object", remove)
        return record

    def _sample(self, time: float, rows: list[list[Any]]) -> Sample:
        if type(rows) is not list:
            raise ValueError(f"{short(rows)} is not a list of rows")
        columns = self._columns
        names = columns.frameworks
        devices = []
        for row in rows:
            at, used, free, process, overhead, unaccounted, *found = row
            self._whole(at, free, overhead)
            _whole_or_none(used, process, unaccounted)
            if not 0 <= at < len(columns.devices) or len(found) > len(names):
                raise ValueError("it has more columns than were named")
            caps = columns.caps[at]
            frameworks = {}
            for position, usage in enumerate(found):
                if usage != 0:
                    held, in_use, reclaimable = usage
                    _whole_or_none(held, in_use, reclaimable)
                    frameworks[names[position]] = FrameworkSample(held, in_use, reclaimable, caps[position])
            uuid, total, limit = columns.devices[at], columns.totals[at], columns.limits[at]
            devices.append(DeviceSample(uuid, total, used, free, process, limit, overhead, unaccounted, frameworks))
        return Sample(time, tuple(devices))

    def _event(self, time: float, content: dict[str, Any]) -> Event:
        about = dict(content)
        for key, value in about.items():
            if key not in _EVENT:
                raise ValueError(f"{key} is {short(value)}")
            self._checked(about, key, *_EVENT[key])
        if "level" in about:
            if about["level"] not in _LEVELS:
                raise ValueError(f"level is {short(about['level'])}")
            about["level"] = _LEVELS[about["level"]]
        return Event(time, **about)

    def columns(self, content: dict[str, Any]) -> Columns:
        columns = Columns()
        for uuid, total, limit in content["devices"]:
            columns.devices.append(self._typed({"uuid": uuid}, "uuid", str))
            columns.totals.append(self._size(total))
            _whole_or_none(limit)
            columns.limits.append(limit)
        columns.frameworks = [self._typed({"name": name}, "name", str) for name in content["frameworks"]]
        columns.caps = [list(caps) for caps in content["caps"]]
        for caps in columns.caps:
            _whole_or_none(*caps)
        if [len(caps) for caps in columns.caps] != [len(columns.frameworks)] * len(columns.devices):
            raise ValueError("caps do not match its devices and frameworks")
        return columns

    def _plan(self, content: dict[str, Any]) -> Plan:
        devices = []
        for part in content["devices"]:
            known = {"unified": False, **part}  # older files lack `unified`
            device = Device(**{key: self._checked(known, key, *field) for key, field in _DEVICE.items()})
            sizes = {key: self._checked(part, key, *field) for key, field in _PART.items()}
            caps = {str(name): self._size(cap) for name, cap in part["caps"].items()}
            source, elastic = str(part["reserve_source"]), {}
            for name, (least, most) in part.get("elastic", {}).items():  # older files lack `elastic`
                elastic[str(name)] = self._size(least), self._size(most)
            joined = tuple(str(name) for name in part.get("joined", ()))  # older files lack `joined`
            figures = sizes["limit"], sizes["reserve"], caps, sizes["unallocated"]
            devices.append(DevicePlan(device, *figures, source, elastic, joined))
        options = {name: dict(about) for name, about in _in_range(content["options"]).items()}
        return Plan(tuple(devices), options, tuple(str(note) for note in content["notes"]))

    def _typed(self, record: Mapping[str, Any], key: str, *types: type) -> Any:
        value = record[key]
        if type(value) not in types:
            raise ValueError(f"{key} is {short(value)}")
        return value

    def _checked(
        self, record: Mapping[str, Any], key: str, least: float, most: float, types: tuple[type, ...] = (int,)
    ) -> Any:
        value = self._typed(record, key, *types)
        if type(value) in (int, float) and not least <= value <= most:
            valid = least if least == most else f"{least} to {most}"
            raise ValueError(f"{key} must be {valid}, found {short(value)}")
        return value

    def _seconds(self, record: Mapping[str, Any], key: str) -> float:
        value = self._typed(record, key, int, float)
        if not 0 < value < MAX_WHOLE:
            raise ValueError(f"{key} is {short(value)}, which is not a length of time")
        return float(value)

    def _size(self, value: Any) -> int:
        if type(value) is not int or not 0 <= value <= MAX_SIZE:
            raise ValueError(f"{short(value)} is not a whole number of 0 or more")
        return value

    @staticmethod
    def _whole(*values: Any) -> None:
        for value in values:
            if type(value) is not int or not -MAX_SIZE <= value <= MAX_SIZE:
                raise ValueError(f"{short(value)} is not a whole number in range")


def _why(error: Exception) -> str:
    """The reason why a line is damaged. Replaces the messages of Python's own errors, which refer to this code."""
    if isinstance(error, KeyError):
        return f"{short(error.args[0])} is missing"
    if isinstance(error, (ValueError, OverflowError)) and "unpack" not in str(error):
        return visible(str(error), keep="")[:200]
    return "a value is missing, or is not of its type"


def _whole_or_none(*values: Any) -> None:
    for value in values:
        if value is not None and (type(value) is not int or not -MAX_SIZE <= value <= MAX_SIZE):
            raise ValueError(f"{short(value)} is neither a whole number in range nor null")


def _in_range(content: Any) -> Any:
    """Return `content` unchanged. Raises ValueError if a whole number at any depth of it is out of range."""
    left = [content]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif type(value) is int and abs(value) >= MAX_WHOLE:
            raise ValueError(f"{short(value)} is not a whole number in range")
    return content


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key appears twice")
    return record


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):  # for example 1e999
        raise ValueError(f"{short(text)} is too large a number")
    return number


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unique)

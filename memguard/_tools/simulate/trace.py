"""Reads and writes allocation traces: JSON lines, a header and then one event a line. Format: `docs/trace.md`."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from memguard._base.text import malformed
from memguard._base.types import TraceEvent
from memguard._base.units import MAX_SIZE
from memguard.errors import TraceError

VERSION = 1
MAX_LINE = 1 << 16
"""Bytes. No longer line is written, and none is read into memory."""

MAX_SECONDS = 1e10
"""Upper bound of a time: three centuries."""
_NEEDS = {"alloc": ("id", "bytes"), "free": ("id",), "in_use": ("in_use",), "trim": (), "mark": ()}
_MAY = {"mark": ("held", "in_use")}
_RANGE = {"id": (-(1 << 63), 1 << 63), "bytes": (1, MAX_SIZE)}
_COMMON = ("time", "framework", "op", "device")
_FIELDS = TraceEvent._fields


@dataclass(frozen=True)
class TraceDevice:
    """A GPU that the trace was recorded on; `total` and `reserved` are NVML's bytes.

    `unified`: it uses the machine's memory, and `total` is CUDA's. Older traces do not say it.
    """

    name: str
    total: int
    reserved: int | None = None
    architecture: str = "unknown"
    unified: bool = False


@dataclass(frozen=True)
class TraceHeader:
    """The first line. `frameworks` has version, allocator and so on by name; `extra` holds any further keys."""

    recorded: str
    devices: tuple[TraceDevice, ...]
    frameworks: Mapping[str, Mapping[str, Any]]
    simulated: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "memguard_trace": VERSION,
            "recorded": self.recorded,
            "devices": [asdict(device) for device in self.devices],
            "frameworks": {name: dict(about) for name, about in self.frameworks.items()},
            "simulated": self.simulated,
            **self.extra,
        }


@dataclass(frozen=True)
class Trace:
    header: TraceHeader
    events: tuple[TraceEvent, ...]


def read(path: str | os.PathLike[str]) -> Trace:
    """The trace in a file. TraceError names file, line and fix; the file is read line by line."""
    name = os.fspath(path)
    try:
        # O_NONBLOCK: opening a FIFO that nobody writes must not wait for ever; the next lines refuse it.
        handle = os.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise OSError(0, "not a regular file")
        with open(handle, "rb") as file:
            return _parse(name, file)
    except (OSError, ValueError) as error:
        raise TraceError(f"{name}: cannot be read: {_reason(error)}", fix="give the path of a trace file") from None


def write(path: str | os.PathLike[str], header: TraceHeader, events: Iterable[TraceEvent]) -> None:
    """Write a trace that `read` accepts, or raise TraceError and leave the existing file.

    The new file has mode 0600 and replaces the old one atomically. If the path is a symbolic link, the link is
    replaced and its target stays as it is.
    """
    target = Path(path)
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)  # 0600, O_EXCL
        with open(handle, "w", encoding="utf-8", newline="\n") as file:
            file.writelines(line + "\n" for line in _lines(os.fspath(path), header, events))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        temporary = None
    except (OSError, ValueError) as error:
        raise TraceError(f"{target}: cannot be written: {_reason(error)}", fix="check the folder") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _lines(name: str, header: TraceHeader, events: Iterable[TraceEvent]) -> Iterator[str]:
    reader = _Reader(name)
    line = _dump(name, 1, header.as_dict())
    reader.header(line)
    yield line
    for event in events:
        record = {key: value for key in _FIELDS if (value := getattr(event, key)) is not None}
        if event.device == 0:
            del record["device"]
        line = _dump(name, reader.line + 1, record)
        reader.event(line)
        yield line


def _dump(name: str, line: int, record: Mapping[str, Any]) -> str:
    try:
        return json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TraceError(f"{name}:{line}: cannot be written as JSON: {error}", fix="use plain values") from None


def _parse(name: str, file: BinaryIO) -> Trace:
    reader = _Reader(name)
    header: TraceHeader | None = None
    events = []
    while raw := file.readline(MAX_LINE + 1):
        if len(raw) > MAX_LINE:
            reader.line += 1
            reader.fail(f"longer than {MAX_LINE} bytes", "one event per line")
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            reader.line += 1
            reader.fail("not UTF-8 text", "check that this is a trace file, not a compressed one")
        if header is None:
            header = reader.header(text)
        elif text.strip():
            events.append(reader.event(text))
        else:
            reader.line += 1
    if header is None:
        raise TraceError(f"{name}: the file is empty", fix="record the trace again")
    return Trace(header, tuple(events))


class _Reader:
    """Checks lines in order and tracks which allocations are live."""

    def __init__(self, name: str) -> None:
        self.name, self.line, self.time = name, 0, 0.0
        self._live: dict[tuple[str, int], int] = {}
        self._head: TraceHeader | None = None

    def fail(self, what: str, fix: str) -> NoReturn:
        raise TraceError(f"{self.name}:{self.line}: {what}", fix=fix)

    def header(self, text: str) -> TraceHeader:
        record = self._object(text)
        version = record.pop("memguard_trace", None)
        if version is None and "memguard_timeline" in record:
            self.fail("this is a timeline, not a trace", f"memguard replay {self.name}")
        if version is None:
            self.fail("the first line is not a trace header", 'start the file with {"memguard_trace": 1, ...}')
        if type(version) is not int or version != VERSION:
            self.fail(f"trace version {_show(version)}; this memguard reads {VERSION}", "record again, or upgrade")
        recorded = record.pop("recorded", None)
        try:
            datetime.fromisoformat(str(recorded))
        except ValueError:
            self.fail(f"recorded: {_show(recorded)} is not a date", "write for example '2025-01-31T12:00:00+00:00'")
        devices = record.pop("devices", None)
        if not isinstance(devices, list) or not devices:
            self.fail("devices: at least one is needed", "list name, total, reserved and architecture of each GPU")
        frameworks = record.pop("frameworks", None)
        if not isinstance(frameworks, dict) or not all(isinstance(about, dict) for about in frameworks.values()):
            self.fail("frameworks: not a mapping of mappings", 'write {"torch": {"version": "2.11.0"}, ...}')
        simulated = record.pop("simulated", False)
        if not isinstance(simulated, bool):
            self.fail(f"simulated: {_show(simulated)} is neither true nor false", "write true or false")
        self._head = TraceHeader(
            str(recorded), tuple(self._device(d) for d in devices), frameworks, simulated, dict(record)
        )
        return self._head

    def _device(self, record: Any) -> TraceDevice:
        if not isinstance(record, dict):
            self.fail(f"devices: {_show(record)} is not a mapping", "give name, total, reserved and architecture")
        name, architecture = record.get("name"), record.get("architecture", "unknown")
        if not isinstance(name, str) or not isinstance(architecture, str):
            self.fail("devices: name and architecture are texts", 'write {"name": "NVIDIA H200", "total": ...}')
        total = self._whole("devices: total", record.get("total"), 1, MAX_SIZE)
        reserved = record.get("reserved")
        if reserved is not None:
            reserved = self._whole("devices: reserved", reserved, 0, total - 1)
        unified = record.get("unified", False)
        if not isinstance(unified, bool):
            self.fail(f"devices: unified: {_show(unified)} is neither true nor false", "write true or false")
        return TraceDevice(name, total, reserved, architecture, unified)

    def event(self, text: str) -> TraceEvent:
        record = self._object(text)
        assert self._head is not None
        op = self._known("op", record.get("op"), _NEEDS)
        framework = self._known("framework", record.get("framework"), self._head.frameworks)
        allowed = (*_COMMON, *_NEEDS[op], *_MAY.get(op, ()))
        for key in record:
            if key not in allowed:
                hint = f"; did you mean {near[0]!r}?" if (near := difflib.get_close_matches(key, allowed, n=1)) else ""
                self.fail(f"{_show(key)} does not belong to {op!r}{hint}", f"{op!r} has {', '.join(allowed)}")
        numbers = {
            key: self._whole(key, record[key], *_RANGE.get(key, (0, MAX_SIZE)))
            for key in ("id", "bytes", "held", "in_use")
            if record.get(key) is not None
        }
        for key in _NEEDS[op]:
            if key not in numbers:
                self.fail(f"{op!r} without {key}", f"add {key}, a whole number")
        if op == "mark" and not numbers:
            self.fail("'mark' without held and in_use", "give at least one of them, in bytes")
        devices = len(self._head.devices)
        device = self._whole("device", record.get("device", 0), 0, devices - 1)
        event = TraceEvent(self._clock(record.get("time")), framework, op, device=device, **numbers)
        self._track(event)
        return event

    def _track(self, event: TraceEvent) -> None:
        if event.id is None:
            return
        key = event.framework, event.id
        if event.op == "alloc":
            if key in self._live:
                self.fail(f"alloc of {event.framework}'s id {event.id}, which is live", "free it first, or number anew")
            self._live[key] = event.device
        elif key not in self._live:
            self.fail(f"free of {event.framework}'s id {event.id}, which is not live", "remove the line")
        elif (where := self._live.pop(key)) != event.device:
            self.fail(f"free on device {event.device} of an id allocated on {where}", f"write device {where}")

    def _clock(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < MAX_SECONDS:
            self.fail(f"time: {_show(value)} is not a number of seconds", "give seconds, 0 or more")
        if value < self.time:
            self.fail(f"time goes back from {self.time:g} s to {value:g} s", "sort the events by time")
        self.time = float(value)
        return self.time

    def _known(self, what: str, value: Any, known: Iterable[str]) -> str:
        names = list(known)
        if isinstance(value, str) and value in names:
            return names[names.index(value)]  # not the line's own copy: a trace has millions of lines
        return self._unknown(what, value, names)

    def _unknown(self, what: str, value: Any, names: list[str]) -> NoReturn:
        near = difflib.get_close_matches(value, names, n=1) if isinstance(value, str) else ()
        hint = f"; did you mean {near[0]!r}?" if near else ""
        where = " in the header" if what == "framework" else ""
        self.fail(f"unknown {what} {_show(value)}{hint}", f"use one of {', '.join(names) or 'none'}{where}")

    def _whole(self, what: str, value: Any, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(f"{what}: {_show(value)} is not a whole number", "write plain digits")
        if not least <= value <= most:
            self.fail(f"{what}: {_show(value)} is out of range", f"from {least} to {most} is possible")
        return value

    def _object(self, text: str) -> dict[str, Any]:
        self.line += 1
        if len(text.encode()) > MAX_LINE:
            self.fail(f"longer than {MAX_LINE} bytes", "shorten it")
        try:
            record = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        except RecursionError:
            self.fail("malformed JSON: nested too deeply", "write one flat object per line")
        except ValueError as error:
            self.fail(f"malformed JSON: {malformed(error)}", "write one JSON object per line; is the file cut off?")
        if not isinstance(record, dict):
            self.fail("not a JSON object", 'write {"time": ..., "framework": ..., "op": ...}')
        return record


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key appears twice")
    return record


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _show(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "a number of more than 19 digits"  # Python refuses to print very long ones
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

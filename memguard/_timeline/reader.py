"""Reads a timeline from its numbered files (parts), in order, one line at a time."""

from __future__ import annotations

import contextlib
import os
import stat
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from memguard._base.displays import plan_html, plan_text
from memguard._base.text import html, shown
from memguard._base.types import Event, Plan, Sample
from memguard._timeline.files import numbered, open_regular, rotated, written_as
from memguard._timeline.format import MAGIC, MAX_LINE, Dropped, Header, Oom
from memguard._timeline.parse import Parser, Record
from memguard.errors import TimelineError

_CUT = "{}: the last line was cut short, and is left out"


@dataclass(frozen=True)
class _Part:
    path: str
    header: Header


class Records(Iterator[Record]):
    """A lazy iterator over the records of a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self._found = timeline._read(b"", self)
        self._size = timeline.size
        self.done = 0
        """The number of bytes read so far."""

    def __next__(self) -> Record:
        return next(self._found)

    @property
    def part(self) -> float:
        """The bytes read so far, as a fraction of the size of all files, from 0 to 1."""
        return min(self.done / self._size, 1.0) if self._size else 0.0


class Timeline:
    """The timeline of one run. Every call of `records`, `samples`, `events` and `ooms` reads the files again.

    `header` is the header of the newest file. `notes` lists missing data; reading may add notes. A damaged line raises
    TimelineError with file, line and fix; a truncated last line only adds a note.
    """

    def __init__(self, parts: list[_Part], notes: list[str], earlier: tuple[str, ...] = ()) -> None:
        self._parts, self._notes = parts, notes
        self.earlier = earlier
        """The paths of omitted files, which an earlier run wrote under the same path."""
        self.header = parts[-1].header
        self.dropped = Dropped()
        for part in parts:
            self.dropped = self.dropped.most(part.header.dropped)
        every = parts[0].header.every
        if self.dropped:
            left = f"; the oldest parts keep one sample in {every:g} s, and the peaks" if every else ""
            self._note(f"no longer in the files, or never written: {self.dropped}{left}")

    def __repr__(self) -> str:
        """One line, which the Python prompt shows; `print` shows more."""
        parts = "" if len(self._parts) == 1 else f" in {len(self._parts)} parts"
        gpus = ", ".join(part.device.name for part in self.plan.devices)
        mark = " (simulated)" if self.header.simulated else ""
        return shown(f"<Timeline {self._parts[-1].path}{parts}: {self._run} on {gpus}{mark}>")

    def __str__(self) -> str:
        """The process and start time of the run, the plan in the header, and `notes`. Reads no file."""
        return shown(
            f"timeline of {self._run}, begun {self.header.recorded}\n{plan_text(self.plan, None, self._notes)}"
        )

    def _repr_html_(self) -> str:
        head = f"<div><b>timeline</b> of {self._run}, begun {html(self.header.recorded)}</div>"
        return f"{head}\n{plan_html(self.plan, None, self._notes)}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Prints the text that IPython shows in a terminal."""
        printer.text(str(self))

    @property
    def _run(self) -> str:
        rank = "" if self.header.rank is None else f", rank {self.header.rank}"
        return f"process {self.header.pid}{rank}"

    @property
    def plan(self) -> Plan:
        """The plan at the start of the run."""
        return self.header.plan

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the missing data that has been detected so far."""
        return tuple(self._notes)

    @property
    def size(self) -> int:
        """The current size of the timeline's files in bytes."""
        return sum(os.path.getsize(part.path) for part in self._parts if os.path.exists(part.path))

    def records(self) -> Iterator[Record]:
        """All records, in the order in which they were written."""
        return Records(self)

    def samples(self) -> Iterator[Sample]:
        """The samples, in the order in which they were written."""
        return (record for record in self._read(b"") if isinstance(record, Sample))

    def events(self) -> Iterator[Event]:
        """The events, in the order in which they were written. Does not parse the lines of other records."""
        return (record for record in self._read(b',"event":') if isinstance(record, Event))

    def ooms(self) -> Iterator[Oom]:
        """The reports of out-of-memory errors, in the order in which they were written."""
        return (record for record in self._read(b',"oom":') if isinstance(record, Oom))

    def _read(self, only: bytes, progress: Records | None = None) -> Iterator[Record]:
        """All records whose line has the text `only` directly after the time; every record if `only` is empty. Updates
        `progress`."""
        for part in self._parts:
            file = self._open(part)
            if file is None:
                self._note(f"{part.path} was removed while the timeline was read: its writer keeps the size bounded")
                continue
            with file:
                yield from self._lines(part.path, file, only, progress)

    def _lines(self, path: str, file: BinaryIO, only: bytes, progress: Records | None) -> Iterator[Record]:
        parser = Parser(path)
        parser.header(file.readline(MAX_LINE + 1))
        while raw := file.readline(MAX_LINE + 1):
            if progress is not None:
                progress.done += len(raw)
            if not raw.endswith(b"\n") and len(raw) <= MAX_LINE:
                self._note(_CUT.format(path))
            elif only and only not in raw[:40]:
                parser.line += 1
            elif (record := parser.record(raw)) is not None:
                yield record

    def _open(self, part: _Part) -> BinaryIO | None:
        """Open the part's file; None if it was removed. The writer may have renamed the file to its numbered name since
        `load_timeline`."""
        names = part.path, os.path.realpath(part.path)
        for path in (part.path, *(rotated(name, part.header.part) for name in names)):
            try:
                file = open_regular(path)
            except OSError:
                continue
            with contextlib.suppress(TimelineError):
                header = _header(path, file)
                if header is not None and (header.run, header.part) == (part.header.run, part.header.part):
                    file.seek(0)
                    return file
            file.close()
        return None

    def _note(self, note: str) -> None:
        if note not in self._notes:
            self._notes.append(note)


def load_timeline(path: str | os.PathLike[str]) -> Timeline:
    """Load the timeline whose newest file is `path`, with its older parts in the same folder (such as `run.1.jsonl`).

    Raises TimelineError for an invalid header. Reading the records raises TimelineError for an invalid line.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TimelineError(
            f"a timeline is loaded by its path, not by {type(path).__name__}",
            fix="load_timeline('run-PID-RANK.jsonl'), the file that 'monitor: {timeline: ...}' named",
        )
    name = os.fspath(path)
    notes: list[str] = []
    newest, older = [], []
    try:
        siblings = numbered(name)
        if os.path.exists(name) or not siblings:
            part = _part(name, notes)
            if part is not None:
                newest = [part]
            elif siblings:
                notes.append(f"{name}: the header was cut short: the process ended while it began this file")
            else:
                raise TimelineError(f"{name}: it has no complete line", fix="record the timeline again")
        else:
            notes.append(f"{name} does not exist: only its older parts do")
        for _, sibling in siblings:
            try:
                part = _part(sibling, notes)
            except FileNotFoundError:
                continue  # removed by the writer since the folder was listed
            except TimelineError as error:
                notes.append(f"left out: {error.advice.reason}")
                continue
            if part is not None:
                older.append(part)
            else:
                notes.append(f"left out: {sibling}: it has no complete line")
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        fix = "give the path of a timeline"
        if isinstance(error, FileNotFoundError) and (written := written_as(name)):
            more = f" (the newest of {len(written)})" if len(written) > 1 else ""
            fix = f"its name has PID and rank: {written[0]}{more}"
        if name == "-" or _is_pipe(name):
            fix = "a timeline cannot be read from a pipe: save it to a file"
        raise TimelineError(f"{name}: cannot be read: {reason}", fix=fix) from None
    if not newest and not older:
        raise TimelineError(f"{name}: no part of it has a header", fix="record the timeline again")
    run = (newest or older)[-1].header.run
    other = [part.path for part in older if part.header.run != run]
    if other:
        notes.append(of_earlier_runs(other))
    return Timeline(_in_order([part for part in older if part.header.run == run], newest, notes), notes, tuple(other))


def _is_pipe(path: str) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def of_earlier_runs(paths: Iterable[str]) -> str:
    """A note that these files are omitted because an earlier run wrote them."""
    return f"left out, as they belong to an earlier run: {', '.join(paths)}; each can be read alone"


def _in_order(older: list[_Part], newest: list[_Part], notes: list[str]) -> list[_Part]:
    """The parts of one run, sorted by number. Omits copies of a part, and the parts that part 0 replaces."""
    parts: dict[int, _Part] = {}
    for part in newest + older:
        first = parts.setdefault(part.header.part, part)
        if first is not part:
            notes.append(f"left out: {part.path}: it is part {part.header.part}, as {first.path} is")
    thinned = parts.get(0)
    through = thinned.header.through if thinned else 0
    for part in newest:
        if thinned is not None and 0 < part.header.part <= through:
            raise TimelineError(
                f"{part.path}:1: the header is damaged, or that of {thinned.path}: this is part {part.header.part} "
                f"of the run, and {thinned.path} replaces the parts up to {through}",
                fix="move one of the two files to another folder",
            )
    # A process killed during thinning does not remove the part that the thinned part 0 replaces.
    return [part for number, part in sorted(parts.items()) if number == 0 or number > through]


def _part(path: str, notes: list[str]) -> _Part | None:
    """Read the header of the file; None if the header is incomplete. Adds a note if the last line is truncated."""
    with open_regular(path) as file:
        header = _header(path, file)
        if header is None:
            return None
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            notes.append(_CUT.format(path))
    return _Part(path, header)


def _header(name: str, file: BinaryIO) -> Header | None:
    """Parse the header; None if the file is empty or ends within its header."""
    raw = file.readline(MAX_LINE + 1).removeprefix(BOM_UTF8)
    try:
        return Parser(name).header(raw)
    except TimelineError:
        if raw.endswith(b"\n") or len(raw) > MAX_LINE or raw[: len(MAGIC)] != MAGIC[: len(raw)]:
            raise
        return None

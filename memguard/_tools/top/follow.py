"""Follows a timeline while it is written: new lines, new parts, a file that is not there yet, a writer that dies.

The lines are parsed by `memguard._timeline`, as everywhere. What is here is only where to read on.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import BinaryIO

from memguard._node.top.snapshot import Gpu, State, Target
from memguard._node.top.state import Story
from memguard._timeline import Header, files
from memguard._timeline.format import MAGIC, MAX_LINE
from memguard._timeline.parse import Parser
from memguard.errors import TimelineError

SILENT = 5.0
"""Seconds without a line after which it is asked whether somebody still writes the file."""
MOST = 4 << 20
"""Bytes that are read at a time; the next reading goes on from there."""
_TOLD = (b',"event":', b',"oom":')
"""What is read of older parts: their samples are past."""


class Follower:
    """One timeline. `read` takes what is new, and never raises: what is wrong is in `Target.notes`."""

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock = os.fspath(path), clock
        self._file: BinaryIO | None = None
        self._parser = Parser(self.path)
        self._header: Header | None = None
        self._rest = b""
        self._story: Story | None = None
        self._notes: list[str] = []
        self._heard = self._looked = clock()
        self._state: State = "missing"
        self._since = clock()
        self._wrong: str | None = None

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self) -> None:
        """Take what was written since the last time."""
        try:
            self._wrong = None
            if self._file is None:
                self._open_first()
            else:
                self._go_on()
        except FileNotFoundError:
            self._become("missing" if self._story is None else "ended")
        except (OSError, ValueError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or str(error)
            self._wrong = f"{self.path} cannot be read: {why}"
            self._become("unreadable")
        except TimelineError as error:
            self._wrong = str(error)
            self.close()
            self._become("unreadable")
        else:
            self._become(self._alive())

    def target(self) -> Target:
        story, header, now = self._story, self._header, self._clock()
        state: State = "suspended" if story is not None and story.suspended and self._state != "ended" else self._state
        return Target(
            key=self.path,
            name=os.path.basename(self.path),
            pid=None if header is None else header.pid,
            state=state,
            read=None if story is None else story.time,
            since=self._since,
            file=self.path,
            simulated=header is not None and header.simulated,
            shares=() if story is None else story.shares(now),
            events=() if story is None else tuple(story.events),
            notes=self._all_notes(),
        )

    def gpus(self) -> tuple[Gpu, ...]:
        return () if self._story is None else self._story.gpus()

    def _all_notes(self) -> tuple[str, ...]:
        notes = list(self._notes)
        if self._wrong is not None:
            notes.append(self._wrong)
        elif self._state == "missing":
            written = files.written_as(self.path)
            hint = f": its name has PID and rank: {written[0]}" if written else ""
            there = os.path.exists(self.path)  # it was made, and its header not yet written
            said = "has no complete line yet: nothing was written to it" if there else f"is not there yet{hint}"
            notes.append(f"{self.path} {said}")
        return tuple(notes)

    def _become(self, state: State) -> None:
        if state != self._state:
            self._state, self._since = state, self._clock()

    def _alive(self) -> State:
        """Whether somebody writes it. Asked seldom: for an instant the question holds the lock that it asks for."""
        now = self._clock()
        if now - self._heard < SILENT:
            return "live"
        if now - self._looked >= SILENT or self._state not in ("silent", "ended"):
            self._looked = now
            try:
                return "silent" if files.in_use(os.path.realpath(self.path)) else "ended"
            except OSError:  # removed, perhaps with its folder
                return "ended"
        return self._state

    # where to read on

    def _open_first(self) -> None:
        """The whole run so far: what older parts told, then the newest one."""
        self._forget()
        file = files.open_regular(self.path)
        try:
            header = self._begin(file, self.path)
        except BaseException:
            file.close()
            raise
        if header is None:  # somebody is just writing it
            file.close()
            raise FileNotFoundError(self.path)
        story = self._running
        story.whole = self._older(header) and not header.dropped.events
        self._lines()
        if story.time is not None:
            self._heard = min(self._heard, story.time)  # its last line may be of yesterday

    def _forget(self) -> None:
        self._story = None

    @property
    def _running(self) -> Story:
        assert self._story is not None
        return self._story

    def _begin(self, file: BinaryIO, path: str) -> Header | None:
        """Read the header, and take the file as the one that is followed. None if it is not whole yet."""
        raw = file.readline(MAX_LINE + 1)
        if not raw.endswith(b"\n") and len(raw) <= MAX_LINE and raw[: len(MAGIC)] == MAGIC[: len(raw)]:
            return None
        parser = Parser(path)
        header = parser.header(raw)
        if self._header is not None and header.run != self._header.run:
            self._notes = [f"a new run was begun in it: process {header.pid}, before it process {self._header.pid}"]
            self._story = None
        if self._story is None:
            self._story = Story(header.plan)
        self.close()
        self._file, self._parser, self._header, self._rest = file, parser, header, b""
        self._heard = self._clock()
        return header

    def _older(self, header: Header) -> bool:
        """Add what the older parts of the run told. False if that may not be all."""
        parts: dict[int, str] = {}
        through, whole = 0, True
        for _, path in files.numbered(self.path):
            with contextlib.suppress(OSError, TimelineError), files.open_regular(path) as file:
                found = Parser(path).header(file.readline(MAX_LINE + 1))
                if found.run == header.run and found.part < header.part:
                    parts[found.part] = path
                    through = max(through, found.through)
                    whole = whole and not found.dropped.events
        numbers = [number for number in sorted(parts) if number == 0 or number > through]
        for number in numbers:
            with contextlib.suppress(OSError):
                self._told(parts[number])
        return whole and numbers == [*([0] if through else []), *range(through + 1, header.part)]

    def _told(self, path: str) -> None:
        with files.open_regular(path) as file:
            parser = Parser(path)
            file.readline(MAX_LINE + 1)
            while raw := file.readline(MAX_LINE + 1):
                if any(key in raw[:40] for key in _TOLD):
                    with contextlib.suppress(TimelineError):  # one line of the past that is damaged
                        record = parser.record(raw)
                        if record is not None:
                            self._running.add(record)

    def _go_on(self) -> None:
        """Lines that came; then, if the file was moved aside, the parts that were begun since."""
        assert self._file is not None and self._header is not None
        moved = self._moved()  # first: nothing is written to it once it is seen to be another one
        if not self._lines() or not moved:
            return
        for path in self._later():
            try:
                file = files.open_regular(path)
            except FileNotFoundError:
                continue  # moved or removed just now: the next reading finds it
            before = self._header
            try:
                header = self._begin(file, path)
            except BaseException:
                file.close()
                raise
            if header is None:
                file.close()
                return
            if header.run == before.run and header.part > before.part + 1:
                self._note("parts of the timeline were removed before they were read: events may be missing")
                self._running.whole = False
            if not self._lines():
                return

    def _moved(self) -> bool:
        assert self._file is not None
        own = os.fstat(self._file.fileno())
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            return False  # between two parts, or removed: the writer begins it again
        return (own.st_dev, own.st_ino) != (now.st_dev, now.st_ino)

    def _later(self) -> Iterator[str]:
        """The files that follow the one that was read, in order."""
        assert self._header is not None
        found: list[tuple[int, str]] = []
        for _, path in files.numbered(self.path):
            with contextlib.suppress(OSError, TimelineError), files.open_regular(path) as file:
                header = Parser(path).header(file.readline(MAX_LINE + 1))
                if header.run == self._header.run and header.part > self._header.part:
                    found.append((header.part, path))
        yield from (path for _, path in sorted(found))
        yield self.path

    def _lines(self) -> bool:
        """Take the whole lines. False if more is waiting, for the next reading."""
        assert self._file is not None
        data = self._file.read(MOST)
        if not data:
            return True
        self._heard = self._clock()
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_LINE:
            self._rest = b""
            self._note(f"{self._parser.name}: a line of more than {MAX_LINE} bytes is left out")
        for raw in lines:
            self._take(raw + b"\n")
        return len(data) < MOST

    def _take(self, raw: bytes) -> None:
        try:
            record = self._parser.record(raw)
        except TimelineError as error:
            self._note(f"left out: {error.advice.reason}")
            return
        if record is not None:
            self._running.add(record)

    def _note(self, note: str) -> None:
        """The newest few: a damaged file may have thousands."""
        if note not in self._notes:
            self._notes = [*self._notes[-2:], note]

"""Writes a timeline as JSON lines, into files of this process whose total size is bounded.

A full file is renamed to a numbered name and becomes an older part. When the total size reaches its limit, the oldest
part is thinned (see `thinning`): some of its records are merged into part 0, and its file is removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from memguard._base.locks import LockedRunner, LockOrder, awaiting
from memguard._base.types import Event, Plan, Sample
from memguard._base.units import KIB, MIB, format_size
from memguard._timeline import files
from memguard._timeline import format as records
from memguard._timeline.format import MAX_LINE, MAX_SECONDS, Columns, Dropped, Header
from memguard.errors import TimelineError

LIMIT = 64 * MIB
"""Default limit of the total size: more than a day of six frameworks on one GPU, at two samples a second."""
MIN_LIMIT = 512 * KIB
_PARTS = 32
"""A file is full at 1/32 of the limit. The space of two files is reserved, for the current file and for the temporary
file of the next thinning."""
_LOCK_TIMEOUT = 2.0
"""Seconds that a thread waits for another thread's write, so that a hanging disk does not hang the user's program."""
_CLOSING_TIMEOUT = 5.0
"""Seconds that a new writer of a file waits for another thread's unfinished write by a closed writer of that file."""
_RETRY = 5.0
"""Seconds between attempts to write samples while the disk is full or the folder is missing."""


_ONE_SAMPLE, _ONE_EVENT = Dropped(samples=1), Dropped(events=1)
_closing_writers: dict[int, Writer] = {}
"""This process's writers that were closed during a write and still have their file open, by `id`."""


class _Part:
    """An older part of the timeline. `own` is False if an earlier run wrote it."""

    def __init__(self, number: int, path: str, size: int, own: bool = True) -> None:
        self.number, self.path, self.size, self.own = number, path, size, own


class Writer:
    """Writes one process's timeline; any thread may call it. Raises TimelineError if the file cannot be created.

    With `begin=False`, call `check` to test whether the file can be created, and `begin` to create it. After `begin`
    no method raises: records that cannot be written are dropped and counted. `say` logs a sentence when a write first
    fails, and when a write succeeds again. In a forked child methods write nothing. `clock` works like `time.time`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        plan: Plan,
        *,
        limit_bytes: int = LIMIT,
        clock: Callable[[], float] = time.time,
        rank: int | None = None,
        simulated: bool | None = None,
        frameworks: Mapping[str, Mapping[str, Any]] | None = None,
        say: Callable[[str], None] | None = None,
        begin: bool = True,
    ) -> None:
        self._pid = os.getpid()
        self.path = files.expand(path, self._pid, rank)
        self._say, self._clock, self._locked = say, clock, LockedRunner(order=LockOrder.TIMELINE)
        # records received during another write on the same thread, or before `begin`
        self._pending: deque[Callable[[], object]] = deque()
        self._begun = False
        self._closing = False  # `close` was called; the thread that writes closes the file
        self._writing = 0  # the id of the last thread that took the lock
        self._limit, self._most = limit_bytes, limit_bytes // _PARTS
        self._columns, self._dirty = records.columns_of(plan), False
        recorded = datetime.fromtimestamp(clock(), UTC).isoformat(timespec="milliseconds")
        if simulated is None:
            simulated = any(part.device.simulated for part in plan.devices)
        run = os.urandom(4).hex()
        self._head = Header(recorded, run, self._pid, rank, simulated, 0, plan, dict(frameworks or {}))
        self._dropped, self._unreported = Dropped(), Dropped()
        if limit_bytes < MIN_LIMIT or 4 * len(self._header(1)) > self._most:
            least = format_size(max(MIN_LIMIT, 4 * _PARTS * len(self._header(1))))
            raise TimelineError(
                f"{self.path}: {format_size(limit_bytes)} is too small for a timeline of this plan",
                fix=f"give timeline_size at least {least}",
            )
        self._opened: list[int] = []
        self._moved: list[int] = []  # the descriptor of a file that the user moved, until a new file is open
        self._size = 0
        self._parts: list[_Part] = []
        self._kept: _Part | None = None
        self._every: float | None = None
        self._number = 1
        self._failure: str | None = None
        self._pending_message: str | None = None
        self._retry = 0.0
        if begin:
            self.begin()

    def begin(self) -> None:
        """Create the file and write the records received so far. Must be called only once."""
        with self._or_refused():
            try:
                self._locked.run(self._begin_first, _LOCK_TIMEOUT)
            finally:
                if self._pending or self._closing:  # a signal handler or finalizer called a method meanwhile
                    self._finish_pending(_LOCK_TIMEOUT)

    def _begin_first(self) -> None:
        if os.getpid() == self._pid:
            self._adopt_existing()
            self._begun = True
            self._begin()

    def check(self, held: Writer | None = None) -> None:
        """Raise TimelineError if `begin` would fail. `held` is a writer that will be closed before `begin`.

        Creates and removes a trial file; changes no existing timeline.
        """
        with self._or_refused():
            if os.path.lexists(self.path):
                self._refuse_others(held)
            trial = files.rotated(self.path, "check")
            opened: list[int] = []
            files.remove(trial)  # a process killed during `check` may have left the trial file
            try:
                try:
                    _write(files.create(trial, opened), self._header(1), 0)
                finally:
                    _discard(trial, opened)
            finally:
                _discard(trial, opened)  # again: a Ctrl-C may have interrupted the call above

    @contextlib.contextmanager
    def _or_refused(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            fix = "make the folder, or name another" if isinstance(error, FileNotFoundError) else "name another folder"
            raise TimelineError(f"{self.path}: cannot be written: {_reason(error)}", fix=fix) from None

    def sample(self, sample: Sample) -> None:
        self._put(_ONE_SAMPLE, sample.time, self._sample, sample)

    def event(self, event: Event) -> None:
        self._put(_ONE_EVENT, event.time, lambda: self._append(records.event_line(event)))

    def oom(self, report: Mapping[str, Any]) -> None:
        """Write an out-of-memory report of JSON types. Its time is `report["time"]` if valid, else the current time."""
        given = report.get("time")
        when = float(given) if isinstance(given, (int, float)) and 0 <= given < MAX_SECONDS else self._clock()
        self._put(Dropped(ooms=1), when, lambda: self._append(records.oom_line(when, report, self._longest)))

    def close(self) -> None:
        """Stop writing and close the file; no file is removed.

        If a signal handler calls `close` during a write, or another thread's write takes more than `_LOCK_TIMEOUT`
        seconds, the writing thread closes the file after its write.
        """
        if os.getpid() != self._pid:
            return
        self._closing = True
        _closing_writers[id(self)] = self
        if not self._locked.held_here:
            self._finish_pending(_LOCK_TIMEOUT)
        if self._pid < 0:  # the file was closed, so no later call removes the entry
            _closing_writers.pop(id(self), None)

    def _close(self) -> None:
        self._shut()
        self._pid = -1  # no process has this PID: later calls do nothing, as in a forked child
        _closing_writers.pop(id(self), None)

    def forked(self) -> None:
        """Close the inherited file in a forked child. Takes no lock: a thread of the parent may have held it."""
        if os.getpid() != self._pid:
            self._shut()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _longest(self) -> int:
        """The most bytes of one line, which must fit into a file together with a header."""
        return min(MAX_LINE, self._most // 2)

    def _put(self, one: Dropped, when: float, write: Callable[..., None], *given: Any) -> None:
        if self._closing or os.getpid() != self._pid:  # a forked child must not write to its parent's file
            return
        # If this call interrupted a write of the same thread, or `begin` has not ended, that call writes the record.
        if self._locked.held_here or not self._begun:
            self._pending.append(lambda: self._put_now(one, when, write, *given))
            return

        try:
            try:
                put = self._locked.run(self._put_now, _LOCK_TIMEOUT, one, when, write, *given)
                if put is None:
                    self._unreported += one
                    return
            finally:
                if self._pending or self._closing:
                    self._finish_pending(_LOCK_TIMEOUT)
        finally:
            if self._pending or self._closing:  # again: a Ctrl-C may have interrupted the call above
                self._finish_pending(_LOCK_TIMEOUT)
        (message,) = put
        if message is not None and self._say is not None:
            with contextlib.suppress(Exception):
                self._say(message)

    def _finish_pending(self, patience: float) -> None:
        """Write the pending records, then close the file if `close` was called.

        Waits at most `patience` seconds for another thread that holds the lock. After releasing the lock, the other
        thread also calls this method.
        """
        while self._pending or (self._closing and self._pid == os.getpid()):
            if awaiting(self._writing, self._locked.run, self._do_pending, patience) is None:
                return

    def _do_pending(self) -> None:
        self._writing = threading.get_ident()
        while self._pending:
            self._pending.popleft()()
        if self._closing:
            self._close()

    def _put_now(self, one: Dropped, when: float, write: Callable[..., None], *given: Any) -> str | None:
        """Write the record. Returns a sentence to log, or None."""
        if os.getpid() != self._pid or not self._begun:  # the file was closed after `_put` checked
            return None
        self._writing = threading.get_ident()
        try:
            if self._failure is not None and one.samples and 0 <= self._clock() - self._retry < _RETRY:
                self._unreported += one
                return None
            write(*given)
            if self._failure is None and self._pending_message is None:  # the common case
                return None
            message, self._pending_message = self._recover(when) or self._pending_message, None
            return message
        except _TooLong:
            self._unreported += one
        except Exception as error:  # no error here may break the user's program
            self._unreported += one
            return self._failed(error)
        return None

    def _failed(self, error: Exception) -> str | None:
        self._retry = self._clock()
        first, self._failure = self._failure is None, _reason(error)
        if not first:
            return None
        return f"the timeline {self.path} cannot be written: {self._failure}; records are dropped until it can be"

    def _recover(self, when: float) -> str | None:
        if self._failure is None:
            return None
        failure, lost = self._failure, self._unreported
        text = f"the timeline could not be written ({failure}); left out: {lost}"
        self._append(records.event_line(Event(when, "note", text)))
        self._failure, self._dropped, self._unreported = None, self._dropped + lost, Dropped()
        return f"the timeline {self.path} is written again; left out: {lost}"

    def _sample(self, sample: Sample) -> None:
        # `_dirty` stays True if writing the columns fails, so that the next call writes them.
        was, self._dirty = self._dirty, True
        line, changed = records.sample_line(sample, self._columns)
        if was or changed:
            self._append(records.columns_line(sample.time, self._columns))
        self._dirty = False
        self._append(line)

    def _append(self, line: bytes) -> None:
        """Append the line with one `write` call: if the process is killed during the call, only this line is lost."""
        if len(line) > MAX_LINE or 2 * len(line) > self._most:
            raise _TooLong
        size = 0
        if self._opened:
            about = os.fstat(self._opened[-1])
            size = about.st_size
            # False if the file is full, was truncated, or ends in a partial line that `_write` could not remove.
            room = size == self._size and size + len(line) <= self._most
            if about.st_nlink == 0:  # the user removed the file, so records written to it would be lost
                self._shut()
                self._pending_message = f"the timeline {self.path} was removed: it is begun anew"
            elif not self._in_place(about) and not self._follow(about):
                self._replace_moved(room)
            elif not room:
                self._rename(size, own=True)  # before `_shut`: if the rename fails, the file stays open
                self._shut()
        if not self._opened:
            self._begin()
        _write(self._opened[-1], line, self._size)
        self._size += len(line)

    def _adopt_existing(self) -> None:
        """Treat existing files with the timeline's name or the name of a part as parts of an earlier run. Raises
        TimelineError if the file with the timeline's name must not be changed."""
        for number, path in files.numbered(self.path):
            self._number = max(self._number, number + 1)
            if files.is_ours(path):
                self._parts.append(_Part(number, path, os.lstat(path).st_size, own=False))
        if not os.path.lexists(self.path):
            return
        self._refuse_others(None)
        self._keep_earlier()

    def _keep_earlier(self) -> None:
        """Rename the existing file to a part of an earlier run, or remove it if it is empty."""
        if size := os.lstat(self.path).st_size:
            self._rename(size, own=False)
        else:
            files.remove(self.path)

    def _refuse_others(self, held: Writer | None) -> None:
        """Raise TimelineError if the existing file must not be changed, or if a writer except `held` has it open."""
        if (why := files.why_not_ours(self.path)) is not None:
            raise TimelineError(
                f"{self.path}: {why}", fix="name another file; memguard overwrites only its own timelines"
            )
        if held is not None and held._writes(self.path):
            if not held._locked.held_here:
                return
        elif not files.in_use(self.path) or self._wait_for_closing_writer():
            return
        writers = [one for one in (held, *_closing_writers.values()) if one is not None]
        if any(one._locked.held_here and one._writes(self.path) for one in writers):
            raise TimelineError(
                f"{self.path}: this thread is just writing it, and memguard was called within that, by a signal "
                "handler or a finalizer",
                fix="call it once the other call has returned",
            )
        raise TimelineError(
            f"{self.path}: another process, or another budget in this process, is writing it",
            fix="put {pid} and {rank} into its name, and give each container a folder of its own",
        )

    def _wait_for_closing_writer(self) -> bool:
        """Wait for unfinished writes of closed writers to this file on other threads. Returns True if
        no writer has the file open afterwards."""
        for one in list(_closing_writers.values()):
            if one._pid == os.getpid() and not one._locked.held_here and one._writes(self.path):
                one._finish_pending(_CLOSING_TIMEOUT)
        return not os.path.lexists(self.path) or not files.in_use(self.path)

    def _writes(self, path: str) -> bool:
        try:
            return os.path.samefile(self.path, path)
        except OSError:  # one of the files was removed
            return False

    def _begin(self) -> None:
        self._make_room()
        if files.is_ours(self.path) and not files.in_use(self.path):
            # An earlier attempt that could not write the header left this file, or the user put it back.
            self._keep_earlier()
        handle = files.create(self.path, self._opened)
        self._head = self._head._replace(part=self._number)
        line, self._size = self._header(self._number), 0
        try:
            _write(handle, line, 0)
        except OSError:
            files.close(self._opened)
            raise
        self._size = len(line)
        self._dirty = False

    def _header(self, part: int) -> bytes:
        head = self._head._replace(part=part, dropped=self._dropped + self._unreported)
        return records.header_line(head, self._columns)

    def _in_place(self, about: os.stat_result) -> bool:
        """True if the timeline's path still refers to the open file."""
        try:
            there = os.lstat(self.path)
            return there.st_ino == about.st_ino and there.st_dev == about.st_dev
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # the path cannot be read, for example for lack of permission: assume that it is unchanged
            return True

    def _follow(self, about: os.stat_result) -> bool:
        """If the user moved the folder, change `path` to the new place and return True. False if only the file was
        moved, or if the new place is unknown."""
        if os.path.isdir(os.path.dirname(self.path)):
            return False
        try:
            where = os.readlink(f"/proc/self/fd/{self._opened[-1]}")
            renamed = os.path.basename(where) != os.path.basename(self.path)  # the user moved only this file
            if renamed or not os.path.samestat(os.lstat(where), about):
                return False
        except OSError:
            return False
        self._pending_message = f"the folder of the timeline {self.path} was moved: it is now written to {where}"
        self.path = where
        for part in (*self._parts, *([self._kept] if self._kept is not None else [])):
            part.path = os.path.join(os.path.dirname(where), os.path.basename(part.path))
        return True

    def _replace_moved(self, room: bool) -> None:
        """Create a new file after the user moved the current one. If that fails, keep writing to the moved file, unless
        `room` is False."""
        self._moved, size = self._opened, self._size
        self._opened = []
        self._number += 1  # the moved file has the old number
        try:
            self._begin()
        except OSError:
            if not room:
                files.close(self._moved)
                raise
            self._opened, self._moved, self._size = self._moved, [], size
            self._number -= 1
            return
        files.close(self._moved)
        self._pending_message = f"the timeline {self.path} was moved: it is begun anew"

    def _rename(self, size: int, own: bool) -> None:
        while os.path.lexists(target := files.rotated(self.path, self._number)):
            self._number += 1
        os.rename(self.path, target)
        self._parts.append(_Part(self._number, target, size, own))
        self._number += 1

    def _make_room(self) -> None:
        """Thin or remove the oldest parts until the limit allows a new file and the next thinning."""
        # Raises OSError if the folder is missing. The folder may reappear, so the loop must not forget its parts.
        os.stat(os.path.dirname(self.path))
        while self._parts and self._held() > self._limit - 2 * self._most:
            oldest = next((part for part in self._parts if not part.own), self._parts[0])
            if oldest.own:
                self._thin(oldest)
            else:
                files.remove(oldest.path)
            self._parts.remove(oldest)

    def _held(self) -> int:
        return sum(part.size for part in self._parts) + (self._kept.size if self._kept else 0)

    def _thin(self, oldest: _Part) -> None:
        from memguard._timeline.parse import Parser  # imported here because only a full timeline needs them
        from memguard._timeline.thinning import thin

        kept = _Part(0, files.rotated(self.path, 0), 0)
        try:
            lines = []
            for part in (self._kept, oldest):
                if part is not None and files.is_ours(part.path):
                    with files.open_regular(part.path) as file:
                        lines += [line for line in file if line.endswith(b"\n")]
            room = self._most - len(self._header(0)) - 512
            thinned = thin(lines, room, self._every)
            head = self._head._replace(
                part=0, every=thinned.every, through=oldest.number,
                dropped=self._dropped + self._unreported + thinned.dropped,
            )  # fmt: skip
            columns = Parser(kept.path).columns(thinned.columns) if thinned.columns else Columns()
            self._replace(kept.path, b"".join([records.header_line(head, columns), *thinned.lines]))
        except (OSError, ValueError, TypeError, LookupError, TimelineError):
            # The disk has no space for the result, or a part is damaged: remove the oldest part instead.
            with contextlib.suppress(OSError), files.open_regular(oldest.path) as file:
                self._dropped += Dropped(samples=sum(b',"sample":' in line[:40] for line in file))
            files.remove(oldest.path)
            return
        kept.size = os.lstat(kept.path).st_size
        self._kept, self._every, self._dropped = kept, thinned.every, self._dropped + thinned.dropped
        with contextlib.suppress(FileNotFoundError):
            files.remove(oldest.path)

    def _replace(self, path: str, content: bytes) -> None:
        temporary = files.rotated(self.path, "tmp")
        if os.path.lexists(temporary):
            files.remove(temporary)
        if os.path.lexists(path) and not files.is_ours(path):
            raise FileExistsError(path)
        opened: list[int] = []
        try:
            _write(files.create(temporary, opened), content, 0)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
        finally:
            files.close(opened)

    def _shut(self) -> None:
        files.close(self._opened)
        files.close(self._moved)


class _TooLong(Exception):
    """A line is too long for a file."""


def _discard(trial: str, opened: list[int]) -> None:
    if opened:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(trial)
        files.close(opened)


def _write(handle: int, data: bytes, size: int) -> None:
    """Append the data to a file of `size` bytes. Removes a partial write, as on a full disk, and raises OSError."""
    if os.write(handle, data) != len(data):
        os.ftruncate(handle, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the error that the next write would raise


def _reason(error: BaseException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__

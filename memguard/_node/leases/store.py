"""The claims of all processes of a user, in one SQLite database in the user's folder.

Every call opens the database, does one transaction, and closes it, under `locks.locked`: nothing of it crosses a fork,
and what a process had open when it was killed, the next one's recovery takes back. Whoever takes the write lock removes
the claims of the dead first (`locks`), and whoever has changed something grants what can be granted then, to everybody
(`serve`): so they are served in the order of coming, however seldom one of them looks.

    processes   one row for each process that claims, or that is `listed` (`registry`): who it is. `machine` says where
                its PID means something.
    claims      `id` is never given again: it is the offset of the claim's byte in the file of locks
    parts       what a claim wants of each GPU
    meta        one row: which file of locks the claims belong to

To keep more of a process: add columns, raise VERSION, and upgrade in `_prepare`. A row of `processes` goes with its
last claim, unless it is listed and its own byte is held.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import random
import stat
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from memguard._base.text import visible
from memguard._node.identity import Process, lives, machine
from memguard._node.leases import decide, locks, wakeups
from memguard._node.leases.columns import DamageError, checked, maybe, number, seconds, size, start, state, text
from memguard._node.leases.decide import Want
from memguard._node.leases.locks import File
from memguard._node.leases.types import Claim, Part
from memguard.errors import MemguardError

if TYPE_CHECKING:
    from sqlite3 import Connection

T = TypeVar("T")


class UnusableDatabaseError(MemguardError):
    """The database is damaged, or is not this memguard's."""


class BusyDatabaseError(MemguardError):
    """Another process or thread used the database all the time."""


Work = Callable[["Connection", File], T]
NAME, LOCKS = "leases.sqlite", "leases.lock"
VERSION = 1
_PROCESSES = 1 << 40
"""Where the bytes of processes begin in the file of locks, and how many there can be: no claim has such a number."""
PATIENCE = 30.0
"""Seconds in which the database must be had. A change takes milliseconds."""
BRIEF = 0.5
"""Seconds that a restore waits for the database in all."""
_REMEMBERED = 60.0
"""Seconds after a wait in vain for a database during which `read_soon` and `change_soon` do not wait for it again."""
_in_vain: dict[str, float] = {}
"""When they last waited in vain, by the monotonic clock, for each database (path)."""
_WRITER = 1 << 43
"""The byte of the file of locks whose holder may change the database. A failed attempt to lock it takes microseconds; a
failed attempt to begin a transaction takes a millisecond, which hundreds of processes would spend at once."""
_AGAIN = (0.005, 0.25)
"""Seconds between the first two attempts, and between two attempts at most."""
_SCHEMA = """
CREATE TABLE meta (lock INTEGER NOT NULL);
CREATE TABLE processes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    pid INTEGER NOT NULL CHECK (typeof(pid) = 'integer'),
    start INTEGER NOT NULL CHECK (typeof(start) = 'integer'),
    machine TEXT NOT NULL,
    command TEXT NOT NULL,
    budget TEXT NOT NULL,
    leaves REAL,
    by_others INTEGER NOT NULL DEFAULT 0,
    simulated INTEGER NOT NULL DEFAULT 0,
    listed INTEGER NOT NULL DEFAULT 0,
    UNIQUE (machine, pid, start)
);
CREATE TABLE claims (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    process INTEGER NOT NULL REFERENCES processes (id) ON DELETE CASCADE,
    state TEXT NOT NULL CHECK (state IN ('waiting', 'held', 'off')),
    asked REAL NOT NULL CHECK (typeof(asked) = 'real'),
    since REAL,
    replaces INTEGER
);
CREATE TABLE parts (
    claim INTEGER NOT NULL REFERENCES claims (id) ON DELETE CASCADE,
    gpu TEXT NOT NULL,
    bytes INTEGER NOT NULL CHECK (typeof(bytes) = 'integer' AND bytes >= 0),
    total INTEGER NOT NULL CHECK (typeof(total) = 'integer'),
    number INTEGER NOT NULL CHECK (typeof(number) = 'integer'),
    name TEXT NOT NULL,
    PRIMARY KEY (claim, gpu)
);
"""
_CLAIMERS = "SELECT pid, start, machine, command FROM processes WHERE id IN (SELECT process FROM claims)"
_CLAIMS = """
SELECT claims.id, pid, start, machine, command, budget, state, asked, since, replaces, leaves,
    gpu, bytes, total, number, name
FROM claims JOIN processes ON processes.id = claims.process JOIN parts ON parts.claim = claims.id
ORDER BY claims.id, gpu
"""
_GRANTED = "SELECT id FROM claims WHERE state = 'held' AND since >= ?"
_FIRST = """
SELECT DISTINCT min(claims.id) FROM claims JOIN parts ON parts.claim = claims.id WHERE state = 'waiting' GROUP BY gpu
"""
_COLUMNS = (
    number, number, start, text, text, text, state, seconds, maybe(seconds), maybe(number), maybe(seconds),
    text, size, size, number, text,
)  # fmt: skip


class Store:
    """The database in one folder, which no other user can enter."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.path, self.locks = os.path.join(folder, NAME), os.path.join(folder, LOCKS)

    def change(self, work: Work[T], patience: float = PATIENCE) -> T:
        """`work` within a transaction, all of it or nothing. The claims of the dead are gone by then.

        Raises MemguardError, with what to do, if the database cannot be used; whatever `work` raises.
        """
        return self._attempts(work, patience, writes=True)

    def read(self, work: Work[T], patience: float = PATIENCE) -> T | None:
        """The same without a change; None if there is no database."""
        if not os.path.lexists(self.path) or not os.path.lexists(self.locks):
            return None
        return self._attempts(work, patience, writes=False)

    def read_soon(self, work: Work[T]) -> T | None:
        """`read` for a caller that must not be delayed, such as a restore.

        It waits BRIEF seconds for the database. After a wait in vain, further calls make one attempt without waiting,
        until a write succeeds or _REMEMBERED seconds without another such attempt have passed.
        """
        return self._soon(functools.partial(self.read, work))

    def change_soon(self, work: Work[T]) -> T:
        """`change` for such a caller."""
        found = self._soon(functools.partial(self.change, work))
        self.patient_again()
        return found

    def patient_again(self) -> None:
        """The next `read_soon` or `change_soon` waits BRIEF seconds again."""
        _in_vain.pop(self.path, None)

    def _soon(self, call: Callable[[float], T]) -> T:
        try:
            return call(0.0 if time.monotonic() - _in_vain.get(self.path, -math.inf) < _REMEMBERED else BRIEF)
        except BusyDatabaseError:  # any other failure comes at once
            _in_vain[self.path] = time.monotonic()
            raise

    def claims(self, patience: float = PATIENCE) -> list[Claim]:
        """Those of living processes, first come first. Changes nothing."""
        return self.read(claims_of, patience) or []

    def check(self) -> str:
        """What SQLite finds wrong with the database: "ok" if nothing is, or there is none."""
        found = self.read(lambda connection, _: connection.execute("PRAGMA quick_check").fetchone())
        return str(found[0]) if found else "ok"

    def _attempts(self, work: Work[T], patience: float, writes: bool) -> T:
        try:
            import sqlite3
        except ImportError as error:  # Python was built without it
            raise MemguardError(
                f"leases need Python's sqlite3, which cannot be imported: {error}",
                fix="use a Python that has it, or take 'lease' out of the budget",
            ) from None

        if locks.locked.held_here:
            raise MemguardError(
                "a lease is being changed on this thread, and this call came within that, from a signal handler or a "
                "finalizer",
                fix="call it once the other call has returned",
            )
        until, pause = time.monotonic() + patience, _AGAIN[0]
        done: tuple[T] | None
        while True:
            before = _inode(self.path)  # an attempt fails in many ways if somebody removes the database meanwhile
            try:
                done = locks.locked.run(self._once, max(until - time.monotonic(), 0.0), work, writes)
                if done is None:
                    raise BusyDatabaseError(f"another thread of this process has had {self.path} for {patience:.0f} s")
                return done[0]
            except sqlite3.OperationalError as error:
                busy = any(word in str(error) for word in ("locked", "busy")) or _inode(self.path) != before
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)  # none: a text that is no UTF-8
                if not busy and code & 0xFF == sqlite3.SQLITE_ERROR:  # such as a table or column that is missing
                    raise self._unusable(f"is damaged ({error})") from None
                if busy and time.monotonic() < until:
                    left = max(until - time.monotonic(), 0.0)
                    # Without the lock: a fork may come meanwhile.
                    time.sleep(min(random.uniform(0.5, 1.0) * pause, left))
                    pause = min(1.5 * pause, _AGAIN[1])
                    continue
                if busy:
                    text = f"{self.path} is in use by another process for {patience:.0f} s"
                    fix = f"find out who has it (`fuser {self.path}`); one that was stopped (Ctrl-Z) goes on with `fg`"
                    raise BusyDatabaseError(text, fix=fix) from None
                raise MemguardError(
                    f"{self.path} cannot be used: {error}",
                    fix="look whether its disk is full or read-only; MEMGUARD_LEASES names another folder",
                ) from None
            except (sqlite3.Error, UnicodeDecodeError, DamageError) as error:
                raise self._unusable(f"is damaged ({error})") from None
            except OSError as error:
                if error.errno is None:  # of a signal handler, such as its TimeoutError
                    raise
                raise MemguardError(
                    f"{self.locks} cannot be used: {error.strerror}",
                    fix="look at its folder and at `ulimit -n`; MEMGUARD_LEASES names another folder",
                ) from None

    def _once(self, work: Work[T], writes: bool) -> T:
        import sqlite3

        if locks.torn:
            raise MemguardError(
                "this process was forked while the database of leases was open in its parent, so it cannot use leases",
                fix="fork it again, or start it by `spawn`; do not fork in a signal handler",
            )
        if isinstance(locks.in_use, sqlite3.Connection):  # an interrupted call left it open
            locks.in_use.close()
        _made(self.path, _create)
        made(self.locks)
        with locks.opened(self.locks) as file:
            try:
                if writes and not file.take(_WRITER):
                    raise sqlite3.OperationalError("locked")
                connection = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
                locks.in_use = connection
                try:
                    return self._transaction(connection, file, work, writes)
                finally:
                    connection.close()
                    locks.in_use = None
            finally:
                try:
                    file.drop(_WRITER)
                finally:  # again: a Ctrl-C may have come into the one before
                    file.drop(_WRITER)

    def _transaction(self, connection: Connection, file: File, work: Work[T], writes: bool) -> T:
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = NORMAL")
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if mode != "wal":
                fix = "set MEMGUARD_LEASES to a folder on another file system, such as /dev/shm/leases"
                raise MemguardError(f"{self.path}: SQLite cannot share memory here", fix=fix)
        began = time.time()
        connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        dead, awaited = list[int](), set[int]()
        try:
            self._prepare(connection, writes)
            if writes:
                self._same_locks(connection, file)
                dead = _tidy(connection, file)
            result = work(connection, file)
            if writes:
                found = [*connection.execute(_GRANTED, (began,)), *connection.execute(_FIRST)]
                awaited = {claim for (claim,) in checked(found, number)}
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        wakeups.remove(self.folder, dead)
        wakeups.wake(self.folder, awaited)
        return result

    def _prepare(self, connection: Connection, writes: bool) -> None:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == VERSION:
            return
        if version != 0 or connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise self._unusable(f"is of version {version}, and this memguard reads version {VERSION}")
        if writes:
            for statement in _SCHEMA.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")

    def _same_locks(self, connection: Connection, file: File) -> None:
        """Whether the locks are those that the claims were made with.

        If somebody has removed that file (a cleaner of old temporary files), nobody can ask for the locks in it any
        more. Processes that are surely dead are forgotten then; for others nothing is granted.
        """
        inode = file.identity[1]
        found = connection.execute("SELECT lock FROM meta").fetchone()
        if found is not None and found[0] != inode:
            here, boot = machine(), machine().partition(" ")[0]
            claimers = checked(connection.execute(_CLAIMERS), number, start, text, text)
            for pid, began, where, command in claimers:
                this_boot = not where or where.startswith(boot)  # empty: that process could not read its boot
                if lives(Process(pid, began)) if where == here else this_boot:
                    raise MemguardError(
                        f"{self.locks} was removed while process {pid} ({visible(command, keep='')}) had a lease, so "
                        "nobody can know whether it still has it",
                        fix=f"end that process, then `rm {self.path}*`; keep the folder where nothing cleans up",
                    )
            connection.execute("DELETE FROM processes")
        if found is None or found[0] != inode:
            connection.execute("DELETE FROM meta")
            connection.execute("INSERT INTO meta VALUES (?)", (inode,))

    def _unusable(self, what: str) -> MemguardError:
        return UnusableDatabaseError(
            f"{self.path} {what}",
            fix=f"end the processes that have leases, then `rm {self.folder}/leases.*`; they "
            "must all use one version of memguard",
        )


def _inode(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.lstat(path).st_ino
    return None


def made(path: str) -> None:
    """The file of locks, of this user's only: created if missing. Raises MemguardError."""
    _made(path, locks.create)


def _create(path: str) -> None:
    """The database, never opened here once it is there: its closing would free SQLite's locks."""
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))


def _made(path: str, create: Callable[[str], None]) -> None:
    with contextlib.suppress(FileExistsError):
        try:
            create(path)
            return
        except FileExistsError:
            raise
        except OSError as error:
            raise MemguardError(
                f"{path} cannot be made: {error.strerror}", fix="make its folder writable, or set MEMGUARD_LEASES"
            ) from None
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise MemguardError(f"{path} is not a file of this user's only, so it cannot be trusted", fix="remove it")


def _tidy(connection: Connection, file: File) -> list[int]:
    """Remove the claims of the dead. Their numbers."""
    claims = checked(connection.execute("SELECT id FROM claims"), number)
    dead = [(claim,) for (claim,) in claims if not file.alive(claim)]
    listed = checked(connection.execute("SELECT id FROM processes WHERE listed"), number)
    gone = [(row,) for (row,) in listed if not file.alive(byte_of(row))]
    if dead or gone:
        connection.executemany("DELETE FROM claims WHERE id = ?", dead)
        connection.executemany("UPDATE processes SET listed = 0 WHERE id = ?", gone)
        forget(connection)
    return [claim for (claim,) in dead]


def forget(connection: Connection) -> None:
    """Processes without a claim, and not listed."""
    connection.execute("DELETE FROM processes WHERE NOT listed AND id NOT IN (SELECT process FROM claims)")


def byte_of(row: int) -> int:
    """Where the byte of a process lies in the file of locks."""
    return _PROCESSES + row


def unlist() -> None:
    """Unlock this process's own byte: without it, no reader lists the process."""
    locks.let_go(_PROCESSES, 2 * _PROCESSES - 1)


def process_row(
    connection: Connection, where: str, process: Process, command: str, budget: str, leaves: float | None = None
) -> int:
    """The row of a process, made or brought up to date. Its number."""
    key = (where, *process)
    connection.execute(
        "INSERT INTO processes (machine, pid, start, command, budget, leaves) VALUES (?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (machine, pid, start) DO UPDATE SET command = excluded.command, budget = excluded.budget, "
        "leaves = coalesce(excluded.leaves, leaves)",
        (*key, command, budget, leaves),
    )
    found = connection.execute("SELECT id FROM processes WHERE machine = ? AND pid = ? AND start = ?", key).fetchone()
    return int(found[0])


def claims_of(connection: Connection, file: File) -> list[Claim]:
    """All claims of the living, first come first."""
    return [claim for claim in _rows(connection) if file.alive(claim.id)]


def _rows(connection: Connection) -> list[Claim]:
    if connection.execute("PRAGMA user_version").fetchone()[0] == 0:  # nobody has claimed yet
        return []
    heads: dict[int, tuple[Any, ...]] = {}
    parts: dict[int, dict[str, Part]] = {}
    for row in checked(connection.execute(_CLAIMS), *_COLUMNS):
        heads[row[0]] = row[:11]
        parts.setdefault(row[0], {})[row[11]] = Part(*row[11:])
    return [Claim._make((*head[:-1], parts[claim], head[-1])) for claim, head in heads.items()]


def add(connection: Connection, who: Any, replaces: int | None, parts: dict[str, Part]) -> int:
    """A waiting claim of a process (`Claimer`). Its number, which nobody had before and nobody will have again."""
    this = Process(who.pid, who.start)
    process = process_row(connection, who.machine, this, who.command, who.budget, who.leaves)
    number = connection.execute(
        "INSERT INTO claims (process, state, asked, replaces) VALUES (?, 'waiting', ?, ?)",
        (process, time.time(), replaces),
    ).lastrowid
    assert number is not None
    connection.executemany(
        "INSERT INTO parts VALUES (?, ?, ?, ?, ?, ?)",
        [(number, *one) for one in parts.values()],
    )
    return number


def serve(connection: Connection) -> list[Claim]:
    """Grant what can be granted, to whomever it is due. All claims after that, first come first.

    Also those whose processes have died since the transaction began: so what is held by the rows never exceeds a GPU.
    """
    claims = _rows(connection)
    granted = due(claims)
    now = time.time()
    connection.executemany(
        "UPDATE claims SET state = 'held', since = ? WHERE id = ?", [(now, number) for number in sorted(granted)]
    )
    return [claim._replace(state="held", since=now) if claim.id in granted else claim for claim in claims]


def due(claims: list[Claim]) -> frozenset[int]:
    """Those that can be granted now."""
    return decide.grantable(wants(claims), capacities(claims))


def leave(connection: Connection, number: int) -> list[Claim]:
    """Its process is off its GPUs: others may have them. All claims of the living after that."""
    connection.execute(
        "UPDATE claims SET state = 'off', since = ? WHERE id = ? AND state != 'off'", (time.time(), number)
    )
    return serve(connection)


def wants(claims: list[Claim]) -> list[Want]:
    """Of those that are held or wait."""
    return [want(claim) for claim in claims if claim.state != "off"]


def want(claim: Claim) -> Want:
    sizes = {gpu: part.bytes for gpu, part in claim.parts.items()}
    return Want(claim.id, claim.state == "held", sizes, claim.replaces)


def capacities(claims: list[Claim]) -> dict[str, int]:
    """By GPU, as those who claim it read it; the least if they differ."""
    found: dict[str, int] = {}
    for claim in claims:
        for gpu, part in claim.parts.items():
            found[gpu] = min(part.total, found.get(gpu, part.total))
    return found


def remove(connection: Connection, number: int) -> None:
    connection.execute("DELETE FROM claims WHERE id = ?", (number,))
    forget(connection)

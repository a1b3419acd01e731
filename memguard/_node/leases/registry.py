"""The processes of one user that run under a budget and say so: for `ps`, `suspend`, `top`, and who waits for a lease.

They are rows of the same table as those that have claims, and live as long as a byte of their own is held, or one of
their claims' (`locks`). The bytes of processes lie far above those of claims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from memguard._base.text import visible
from memguard._devices import proc
from memguard._node.identity import Process, lives, machine, this_process
from memguard._node.leases.columns import checked, number, start, text
from memguard._node.leases.locks import File
from memguard._node.leases.store import Store, UnusableDatabaseError, byte_of, forget, process_row, unlist

if TYPE_CHECKING:
    from sqlite3 import Connection

_PATIENCE, _END = 5.0, 2.0
"""Seconds in which a note must be written, and removed: neither the program's start nor its end waits for more."""
_LONGEST = 200
"""Characters of a command or a budget's name."""
_ROWS = "SELECT id, pid, start, machine, budget, by_others, simulated, listed FROM processes"


class Budgeted(NamedTuple):
    """A process under a budget: the budget's name (mostly a file's), and whether others may suspend the process.

    One whose GPUs are simulated has nothing that could be suspended from outside.
    """

    process: Process
    budget: str
    by_others: bool
    simulated: bool = False


def enter(found: Budgeted, folder: str) -> None:
    """This process says it of `found.process`, mostly itself. Raises MemguardError."""

    def change(connection: Connection, file: File) -> None:
        process = found.process
        row = process_row(connection, machine(), process, proc.command(process.pid)[:_LONGEST], found.budget[:_LONGEST])
        connection.execute(
            "UPDATE processes SET by_others = ?, simulated = ?, listed = 1 WHERE id = ?",
            (found.by_others, found.simulated, row),
        )
        file.take(byte_of(row))

    Store(folder).change(change, _PATIENCE)


def leave(process: Process, folder: str) -> None:
    """It is no longer said; its claims stay. Nothing happens if it was not. Raises MemguardError."""

    def change(connection: Connection, file: File) -> None:
        for row, *key in _rows(connection):
            if tuple(key[:3]) == (*process, machine()):
                connection.execute("UPDATE processes SET listed = 0 WHERE id = ?", (row,))
                file.drop(byte_of(row))
        forget(connection)

    store = Store(folder)
    try:
        if store.read(lambda connection, _: _rows(connection), _END):
            store.change(change, _END)
    except UnusableDatabaseError:
        if process == this_process():
            unlist()
        raise


def every(folder: str) -> list[Budgeted]:
    """Of the living, in this numbering of PIDs. Changes nothing. Raises MemguardError."""
    return Store(folder).read_soon(_living) or []


def _living(connection: Connection, file: File) -> list[Budgeted]:
    claims: dict[int, list[int]] = {}
    rows, here = _rows(connection), machine()
    for claim, process in checked(connection.execute("SELECT id, process FROM claims"), number, number) if rows else ():
        claims.setdefault(process, []).append(claim)
    found = []
    for row, pid, began, where, budget, by_others, simulated, listed in rows:
        process = Process(pid, began)
        held = [*([byte_of(row)] if listed else []), *claims.get(row, [])]
        if where == here and any(map(file.alive, held)) and lives(process):
            name = visible(budget, keep="")
            found.append(Budgeted(process, name, bool(by_others and listed), bool(simulated and listed)))
    return found


def _rows(connection: Connection) -> list[Any]:
    if connection.execute("PRAGMA user_version").fetchone()[0] == 0:  # nobody has entered yet
        return []
    return checked(connection.execute(_ROWS), number, number, start, text, text, number, number, number)

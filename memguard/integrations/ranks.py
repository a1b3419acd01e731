"""The ledger of one rank as plain data, and the ledgers of a job's ranks in one table."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memguard import _budget, api
from memguard._base.logs import text_of
from memguard._base.text import shown
from memguard._base.types import Sample
from memguard._devices import suspension
from memguard._guard.guard import Guard
from memguard._runtime import pressure
from memguard.errors import NotActive
from memguard.integrations import tables

_HEAD = ("rank", "host", *tables.COLUMNS)


_NOTHING: Mapping[str, Any] = {
    "rank": None, "host": None, "pid": None, "active": False, "simulated": False, "suspended": False, "pressure": None,
    "error": None,
}  # fmt: skip


@dataclass(frozen=True)
class Ledgers:
    """The ledgers of a job's ranks, by rank. `print` shows a table; sizes are in bytes.

    A rank without a budget has `active` False. A rank that could not be read has the reason in `error`.
    """

    ranks: Mapping[int, Mapping[str, Any]]

    @classmethod
    def of(cls, found: Iterable[Mapping[str, Any]]) -> Ledgers:
        """Make the table from the results of `own` in each rank."""
        return cls({one["rank"]: one for one in sorted(found, key=lambda one: int(one["rank"]))})

    def as_dict(self) -> dict[int, Any]:
        """Plain data, by rank."""
        return {rank: dict(one) for rank, one in self.ranks.items()}

    def __len__(self) -> int:
        return len(self.ranks)

    def __str__(self) -> str:
        body = [row for one in self.ranks.values() for row in _rows(one)]
        return tables.table(_HEAD, body, any(one["simulated"] for one in self.ranks.values()))

    def __repr__(self) -> str:
        return shown(f"<Ledgers of {len(self)} rank{'s' if len(self) != 1 else ''}: print it for a table>")


def _rows(one: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """The rows of the GPUs on which the rank holds memory; of its own GPU if it holds none yet."""
    who = str(one["rank"]), one["host"] or "unknown"
    if one["error"] is not None:
        yield *who, "", f"not read: {one['error'].partition(chr(10))[0]}"
        return
    if not one["active"]:
        yield *who, "", "no budget"
        return
    level = "suspended" if one["suspended"] else one["pressure"] or "unknown"
    if not one["devices"]:
        yield *who, "", f"process: {level}"
        return
    used = [part for part in one["devices"] if part["process"] or _holds(part)]
    used = used or [part for part in one["devices"] if part["own"]] or one["devices"]
    for row in tables.rows(used, level):
        yield *who, *row


def _holds(part: Mapping[str, Any]) -> bool:
    return any(usage["held"] or usage["in_use"] for usage in part["frameworks"].values())


def without_ledger(rank: int, why: str) -> dict[str, Any]:
    """The placeholder for the ledger of a rank that did not answer."""
    return tables.summary(None, {}, {**_NOTHING, "rank": rank, "error": why})


def own(rank: int) -> dict[str, Any]:
    """This rank's ledger as plain data. Never raises, because the other ranks wait for the result."""
    entry: dict[str, Any] = {**_NOTHING, "rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
    try:
        guard = api.current()
        if not guard.active:  # MEMGUARD_DISABLE, or no GPU
            return tables.summary(None, {}, entry)
        entry |= {"active": True, "simulated": guard.host.simulated, "suspended": suspension.now is not None}
        if entry["suspended"]:  # a query of its GPUs would block until the process resumes
            return tables.summary(None, {}, entry)
        sample = guard.sample()
        entry["pressure"] = str(_level(guard, sample))
        return _with_own(guard, tables.summary(sample, {p.device.uuid: p.device for p in guard.plan.devices}, entry))
    except NotActive:
        return tables.summary(None, {}, {**entry, "active": False})
    except Exception as error:
        return tables.summary(None, {}, {**entry, "error": text_of(error)})


def _level(guard: Guard, sample: Sample) -> Any:
    """The worst pressure now, by the levels of the budget's monitor, or the default ones without a monitor."""
    budget, parts = guard.budget, guard.plan.devices
    settings = pressure.Settings.of(
        budget.monitor or _budget.MonitorConfig(), (), [part.device for part in parts], parts
    )
    state, _ = pressure.decide(settings, sample, pressure.START)
    return tables.worst(state.level(one.uuid, name) for one in sample.devices for name in (None, *one.frameworks))


def _with_own(guard: Guard, found: dict[str, Any]) -> dict[str, Any]:
    """Mark the rank's own GPU, as `ranks: auto` assigns it."""
    mine = None if guard.sharing is None else guard.sharing.own
    ordinals = {part.device.uuid: part.device.ordinal for part in guard.plan.devices}
    for part in found["devices"]:
        part["own"] = mine is not None and ordinals.get(part["uuid"]) == mine
    return found

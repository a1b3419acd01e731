"""A worker's memory as data in its heartbeats, as columns on Dask's dashboard, and as a table at the client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memguard._base.text import shown
from memguard._base.units import format_size
from memguard.integrations import tables

METRIC = "memguard"
"""The key of the ledger in a heartbeat's metrics."""
HELD, PRESSURE = "memguard_held", "memguard_pressure"
"""Keys whose values are text: Dask's dashboard shows them as columns in its table of workers."""
_HEAD = ("worker", *tables.COLUMNS)


def held(ledger: Mapping[str, Any]) -> str:
    """`9.10 GiB of 63.0 GiB`: the process's bytes and its limit, for each GPU."""
    if not ledger["active"]:
        return "no budget"
    parts = [f"{format_size(one['process'])} of {format_size(one['limit'])}" for one in ledger["devices"]]
    text = "; ".join(parts) or "unknown"
    return f"{text} (simulated)" if ledger["simulated"] else text


def pressure(ledger: Mapping[str, Any]) -> str:
    """`ok`, `warn` or `critical`, and whether memguard has paused the worker."""
    if not ledger["active"]:
        return "no budget"
    return f"{ledger['pressure'] or 'unknown'}{', paused' if ledger['paused'] else ''}"


@dataclass(frozen=True)
class Ledgers:
    """The workers' ledgers by address, from their last heartbeats; None for a worker that sends none.

    `names` has the workers' names. `print` shows a table.
    """

    workers: Mapping[str, Mapping[str, Any] | None]
    names: Mapping[str, str]

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> Ledgers:
        """Read the ledgers from the scheduler's description of its cluster."""
        found = identity.get("workers", {})
        ledgers = {address: (one.get("metrics") or {}).get(METRIC) for address, one in found.items()}
        return cls(ledgers, {address: str(one.get("name", address)) for address, one in found.items()})

    def as_dict(self) -> dict[str, Any]:
        """Plain data, by the worker's address."""
        return {address: None if one is None else dict(one) for address, one in self.workers.items()}

    def __len__(self) -> int:
        return len(self.workers)

    def __str__(self) -> str:
        rows = [row for address in sorted(self.workers, key=self._order) for row in self._rows(address)]
        return tables.table(_HEAD, rows, any(one is not None and one["simulated"] for one in self.workers.values()))

    def __repr__(self) -> str:
        return shown(f"<Ledgers of {len(self)} workers: print it for a table>")

    def _order(self, address: str) -> tuple[int, int | str]:
        name = self.names[address]
        return (0, int(name)) if name.isdecimal() else (1, name)

    def _rows(self, address: str) -> Iterator[tuple[str, ...]]:
        name, ledger = self.names[address], self.workers[address]
        if ledger is None or not ledger["active"]:
            yield name, "", "no budget" if ledger is not None else "memguard says nothing"
            return
        for row in tables.rows(ledger["devices"], pressure(ledger)):
            yield name, *row

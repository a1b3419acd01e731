"""What a worker says of its memory: data in its heartbeats, columns on Dask's dashboard, a table at the client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memguard._text import shown
from memguard._types import Device, Pressure, Sample
from memguard._units import format_size

METRIC = "memguard"
"""The key of a heartbeat's metrics that has the ledger."""
HELD, PRESSURE = "memguard_held", "memguard_pressure"
"""Keys with text, which Dask's dashboard shows as columns of its table of workers."""
_HEAD = ("worker", "GPU", "what", "held", "in use", "cap")


def summary(sample: Sample | None, devices: Mapping[str, Device], more: Mapping[str, Any]) -> dict[str, Any]:
    """A sample as plain data, in bytes; None for what is not known. `more` is put in front."""
    parts: list[dict[str, Any]] = []
    for one in sample.devices if sample is not None else ():
        part = {key: value for key, value in one._asdict().items() if key != "frameworks"}
        part["name"] = devices[one.uuid].name if one.uuid in devices else one.uuid
        part["frameworks"] = {name: usage._asdict() for name, usage in one.frameworks.items()}
        parts.append(part)
    return {**more, "time": sample.time if sample is not None else None, "devices": parts}


def held(ledger: Mapping[str, Any]) -> str:
    """`9.10 GiB of 63.0 GiB`, of each GPU: what the process has of its limit."""
    if not ledger["active"]:
        return "no budget"
    parts = [f"{format_size(one['process'])} of {format_size(one['limit'])}" for one in ledger["devices"]]
    text = "; ".join(parts) or "unknown"
    return f"{text} (simulated)" if ledger["simulated"] else text


def pressure(ledger: Mapping[str, Any]) -> str:
    """`ok`, `warn`, `critical`, and whether the worker is paused for it."""
    if not ledger["active"]:
        return "no budget"
    return f"{ledger['pressure'] or 'unknown'}{', paused' if ledger['paused'] else ''}"


def worst(levels: Iterator[Pressure]) -> Pressure:
    return max(levels, key=lambda one: one.rank, default=Pressure.OK)


@dataclass(frozen=True)
class Ledgers:
    """The workers' ledgers by address, as their last heartbeats had them; None for a worker that sends none.

    `names` has the workers' names. `print` shows a table.
    """

    workers: Mapping[str, Mapping[str, Any] | None]
    names: Mapping[str, str]

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> Ledgers:
        """From the scheduler's description of its cluster."""
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
        widths = [max(len(row[n]) for row in (_HEAD, *rows)) for n in range(len(_HEAD))]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (_HEAD, *rows)
        ]
        if any(one is not None and one["simulated"] for one in self.workers.values()):
            lines.insert(0, "simulated GPUs: nothing real is limited")
        return shown("\n".join(lines))

    def __repr__(self) -> str:
        return shown(f"<Ledgers of {len(self)} workers: print it for a table>")

    def _order(self, address: str) -> tuple[int, int | str]:
        name = self.names[address]
        return (0, int(name)) if name.isdecimal() else (1, name)

    def _rows(self, address: str) -> Iterator[tuple[str, str, str, str, str, str]]:
        name, ledger = self.names[address], self.workers[address]
        if ledger is None or not ledger["active"]:
            yield name, "", "no budget" if ledger is not None else "memguard says nothing", "", "", ""
            return
        for one in ledger["devices"]:
            for what, usage in one["frameworks"].items():
                sizes = format_size(usage["held"]), format_size(usage["in_use"])
                yield name, one["name"], what, *sizes, "none" if usage["cap"] is None else format_size(usage["cap"])
            yield (
                name,
                one["name"],
                f"process: {pressure(ledger)}",
                format_size(one["process"]),
                "",
                format_size(one["limit"]),
            )

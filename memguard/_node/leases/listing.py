"""Who has claimed what, for `memguard leases`: the claims, and beside them what NVML lists of the same GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from memguard._devices.nvml import Nvml
from memguard._node.identity import machine
from memguard._node.leases import decide, neighbours
from memguard._node.leases.folders import folder
from memguard._node.leases.neighbours import Neighbour
from memguard._node.leases.store import Store, wants
from memguard._node.leases.types import Claim, Part
from memguard.errors import DeviceError

SCHEMA = 1
_ORDER = {"held": 0, "off": 1, "waiting": 2}


class Row(NamedTuple):
    """One claim on one GPU, in bytes. `pid` is None in another container, `used` where NVML does not say.

    `ahead` counts those who wait for the GPU and came before; None if it does not wait.
    """

    part: Part
    claim: Claim
    pid: int | None
    used: int | None
    ahead: int | None

    def as_dict(self) -> dict[str, Any]:
        claim = self.claim
        return {
            "pid": self.pid, "command": claim.command, "budget": claim.budget, "bytes": self.part.bytes,
            "used": self.used, "state": claim.state, "asked": claim.asked, "since": claim.since, "ahead": self.ahead,
        }  # fmt: skip


class Gpu(NamedTuple):
    """One GPU that somebody has claimed a part of, in bytes. `total` is what CUDA can give of it."""

    part: Part
    total: int
    leased: int
    rows: tuple[Row, ...]

    @property
    def free(self) -> int:
        return self.total - self.leased


class Listing(NamedTuple):
    """`database` is what SQLite finds wrong, "ok" if nothing is. `notes` are lines for people."""

    folder: str
    gpus: tuple[Gpu, ...]
    neighbours: tuple[Neighbour, ...]
    database: str
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "memguard_leases": SCHEMA,
            "folder": self.folder,
            "database": self.database,
            "gpus": [
                {
                    "uuid": gpu.part.uuid, "index": gpu.part.number, "name": gpu.part.name,
                    "simulated": gpu.part.simulated, "total": gpu.total, "leased": gpu.leased, "free": gpu.free,
                    "claims": [row.as_dict() for row in gpu.rows],
                }
                for gpu in self.gpus
            ],
            "neighbours": [
                {"uuid": one.gpu, "pid": one.pid, "used": one.used, "leased": one.leased} for one in self.neighbours
            ],
            "notes": list(self.notes),
        }  # fmt: skip


def listing(claims: Sequence[Claim], listed: neighbours.Listed, here: str) -> tuple[list[Gpu], list[Neighbour]]:
    """By GPU, real ones first, and on each who holds, then who is suspended, then who waits. Pure."""
    held = decide.leased(wants([*claims]))
    parts: dict[str, list[tuple[Claim, Part]]] = {}
    for claim in claims:
        for gpu, part in claim.parts.items():
            parts.setdefault(gpu, []).append((claim, part))
    found = []
    for gpu, entries in sorted(parts.items(), key=lambda entry: (entry[1][0][1].simulated, entry[1][0][1].number)):
        waiting = [claim.id for claim, _ in entries if claim.state == "waiting"]
        rows = []
        for claim, part in sorted(entries, key=lambda entry: (_ORDER[entry[0].state], entry[0].id)):
            pid = claim.pid if claim.machine == here else None
            same = pid is not None and neighbours.pids_mean_the_same(here)
            used = listed[gpu].get(claim.pid, 0) if same and gpu in listed else None
            ahead = waiting.index(claim.id) if claim.state == "waiting" else None
            rows.append(Row(part, claim, pid, used, ahead))
        found.append(Gpu(entries[0][1], min(part.total for _, part in entries), held.get(gpu, 0), tuple(rows)))
    return found, neighbours.neighbours(claims, listed, here, None)


def read() -> Listing:
    """Raises MemguardError if the database cannot be read. Without a driver what is used is unknown."""
    store, here = Store(folder(make=False)), machine()
    claims = store.claims()
    wanted = {gpu: part for claim in claims for gpu, part in claim.parts.items()}
    listed, notes = _listed({gpu: part for gpu, part in wanted.items() if not part.simulated})
    gpus, others = listing(claims, listed, here)
    notes += [neighbours.sentence(one, wanted[one.gpu], claims, here) for one in others]
    return Listing(store.folder, tuple(gpus), tuple(others), store.check(), tuple(notes))


def _listed(wanted: Mapping[str, Part]) -> tuple[dict[str, Mapping[int, int | None]], list[str]]:
    """What NVML lists of those GPUs, and why it does not."""
    if not wanted:
        return {}, []
    found: dict[str, Mapping[int, int | None]] = {}
    try:
        nvml = Nvml()
        try:
            known = {device.uuid for device in nvml.devices()}
            for gpu, part in wanted.items():
                if part.uuid in known:
                    found[gpu] = nvml.processes(part.uuid)
        finally:
            nvml.close()
    except DeviceError as error:
        return {}, [f"what is used is unknown: {error.advice.reason}"]
    lost = [str(part) for gpu, part in wanted.items() if gpu not in found]
    return found, [f"NVML does not know {part} here: what is used of it is unknown" for part in lost]

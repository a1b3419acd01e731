"""The leases against what NVML lists: who uses more of a GPU than it has claimed, or uses it without a lease.

A PID is compared only where it means the same to NVML and to the process that claimed: NVML has the machine's own
numbers, so those of a container with a PID namespace of its own cannot be told apart, and only sums are compared.

It does not cover what NVML does not list: processes that it hides from a container, and memory of unified GPUs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from memguard._base.logs import log as _log
from memguard._base.logs import text_of
from memguard._base.types import Event
from memguard._base.units import MIB, format_size
from memguard._devices import proc
from memguard._node.identity import machine
from memguard._node.leases import said
from memguard._node.leases.lease import Lease
from memguard._node.leases.types import Claim, Part
from memguard.errors import MemguardError

AGAIN = 10.0
"""Seconds from one look of the monitor's to the next."""
CHANGE = 512 * MIB
"""What a neighbour must use more than when it was named, to be named again."""
_PATIENCE = 2.0
_HOST = "pid:[4026531836]"
"""The PID namespace of the machine itself (PROC_PID_INIT_INO of Linux's proc_ns.h)."""
Listed = Mapping[str, Mapping[int, "int | None"]]


class Neighbour(NamedTuple):
    """Who uses more of a GPU than it has claimed. `pid` None: several, which cannot be told apart.

    `used` in bytes, None if NVML does not say. `leased` None: it has no lease.
    """

    gpu: str
    pid: int | None
    used: int | None
    leased: int | None


def pids_mean_the_same(here: str) -> bool:
    """Whether NVML's PIDs are those of this process: not in a container with a numbering of its own."""
    return here.endswith(_HOST)


def neighbours(claims: Iterable[Claim], listed: Listed, here: str, own: int | None) -> list[Neighbour]:
    """By GPU; without the process `own`. `listed` has NVML's bytes by GPU and PID. Pure."""
    held = [claim for claim in claims if claim.state == "held"]
    found = []
    for gpu, processes in listed.items():
        leased: dict[int, int] = {}
        elsewhere = 0
        for claim in held:
            size = claim.parts[gpu].bytes if gpu in claim.parts else 0
            if claim.machine == here and pids_mean_the_same(here):
                leased[claim.pid] = max(leased.get(claim.pid, 0), size)  # two while one takes the other's place
            else:
                elsewhere += size
        known = {pid: used for pid, used in processes.items() if leased.get(pid)}
        others = {pid: used for pid, used in processes.items() if pid not in known}
        for pid, used in known.items():
            if pid != own and used is not None and used > leased[pid]:
                found.append(Neighbour(gpu, pid, used, leased[pid]))
        if not elsewhere and pids_mean_the_same(here):
            found += [Neighbour(gpu, pid, used, None) for pid, used in others.items() if pid != own]
        elif None not in others.values():
            total = sum(used or 0 for used in others.values())
            if total > elsewhere:
                found.append(Neighbour(gpu, None, total, elsewhere or None))
    return found


def sentence(one: Neighbour, part: Part, claims: Sequence[Claim], here: str) -> str:
    """`process 41 (python train.py, budget.yaml) uses 40.00 GiB of GPU 0 (NVIDIA H200), 6.00 GiB above its lease`."""
    claim = next(
        (claim for claim in claims if one.pid is not None and (claim.machine, claim.pid) == (here, one.pid)), None
    )
    if claim is not None:
        name = said.who(claim, here)
    elif one.pid is not None:
        name = f"process {one.pid} ({proc.command(one.pid) or 'unknown'})"
    else:
        name = "processes that cannot be told apart from here (another container)"
    uses = "uses" if one.pid is not None else "use"
    if one.used is None:
        return f"{name} {uses} {part}, how much is unknown, without a lease"
    if one.leased is None:
        return f"{name} {uses} {format_size(one.used)} of {part} without a lease"
    whose = "its lease" if one.pid is not None else "their leases"
    return f"{name} {uses} {format_size(one.used)} of {part}, {format_size(one.used - one.leased)} above {whose}"


class Watch:
    """Names each neighbour once, and again when it uses much more. `listed` asks NVML, by GPU as in the lease."""

    def __init__(self, lease: Lease, listed: Callable[[], Listed]) -> None:
        self._lease, self._listed = lease, listed
        self._named: dict[tuple[str, int | None], int] = {}
        self._gone = False
        self._next = 0.0

    def due(self) -> list[Event]:
        """As `look`, every AGAIN seconds. What fails is left out: the program goes on."""
        if time.monotonic() < self._next:
            return []
        self._next = time.monotonic() + AGAIN
        try:
            return self.look()
        except (MemguardError, OSError) as error:
            _log.debug("leases were not compared with NVML: %s", text_of(error))
            return []

    def look(self) -> list[Event]:
        """What is new, as events."""
        if self._lease.number is None:
            return []
        claims, here, now = self._lease.store.claims(_PATIENCE), machine(), time.time()
        events = [] if self._gone else self._missing(claims, now)
        found = {(one.gpu, one.pid): one for one in neighbours(claims, self._listed(), here, os.getpid())}
        for key in [key for key in self._named if key not in found]:
            del self._named[key]
        for key, one in found.items():
            before = self._named.get(key)
            if before is None or (one.used or 0) >= before + CHANGE:
                self._named[key] = one.used or 0
                part = self._lease.parts[one.gpu]
                text = sentence(one, part, claims, here)
                events.append(Event(now, "lease", text, uuid=part.uuid, bytes=one.used))
        return events

    def _missing(self, claims: Sequence[Claim], now: float) -> list[Event]:
        if any(claim.id == self._lease.number for claim in claims):
            return []
        self._gone = True
        where = self._lease.store.folder
        text = f"this process's lease is gone from {where}, where somebody removed it: others may claim the same bytes"
        return [Event(now, "lease", text)]

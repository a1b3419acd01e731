"""While a process waits for a lease: it asks those that hold one and have nothing to do to leave their GPUs.

Only those that allow it (`suspend: {on_demand: 10s}`), and that NVML has not seen at work for as long as they say; on
simulated GPUs nothing is ever seen at work. They leave by themselves and may refuse. Who is asked, `choose` decides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from memguard._base.logs import log as _log
from memguard._base.units import format_size
from memguard._node.identity import Process, machine
from memguard._node.leases import choose, store
from memguard._node.leases.lease import Lease
from memguard._node.leases.types import Claim
from memguard._node.suspend import requests
from memguard._node.suspend.triggers.idle import Look, Usage, idle_for
from memguard._runtime.extensions import Extension

if TYPE_CHECKING:
    from memguard._runtime.extensions import SessionContext

EVERY = 1.0
"""Seconds between two looks at what the others do."""
_REFUSED = 10.0
"""Seconds until one that has refused is asked again."""
Request = Callable[[Process], "tuple[dict[str, int], float]"]


def _request(process: Process) -> tuple[dict[str, int], float]:
    found: tuple[dict[str, int], float] = requests.request(process, "leave")
    return found


class SuspendsIdle(Extension):
    """A budget with `device: {on_wait: suspend-idle}`, while `init` waits for its lease."""

    def while_waiting(
        self, session: SessionContext, say: Callable[[str], object]
    ) -> Callable[[list[Claim]], object] | None:
        return MakingRoom(session.lease, say).look if isinstance(session.lease, Lease) else None


class MakingRoom:
    """For one lease that waits. `used` says whether a PID has used a GPU since it was asked last; None: unknown.

    Without `used` this process asks NVML. One that is off its GPUs cannot: its helper does (`self_suspend.used`).
    """

    def __init__(
        self,
        lease: Lease,
        say: Callable[[str], object] = _log.info,
        request: Request = _request,
        used: Callable[[int], bool | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lease, self._say, self._request, self._clock = lease, say, request, clock
        self._used = used or _ByNvml()
        self._looks: dict[int, list[Look]] = {}
        self._not_before: dict[int, float] = {}
        self._next = float("-inf")
        self._asking: threading.Thread | None = None

    def look(self, claims: list[Claim]) -> None:
        """At each look of the lease. What takes long is done on a thread of its own."""
        now, number = self._clock(), self._lease.number
        if now < self._next or number is None or (self._asking is not None and self._asking.is_alive()):
            return
        self._next = now + EVERY
        idle = self._idle(claims, now)
        chosen = choose.to_suspend(number, store.wants(claims), store.capacities(claims), idle)
        if chosen:
            asked = [claim for claim in claims if claim.id in chosen]
            self._asking = threading.Thread(target=self._ask, args=(asked,), name="memguard-lease", daemon=True)
            self._asking.start()

    def _idle(self, claims: list[Claim], now: float) -> dict[int, float]:
        """Those that may be asked, and for how long each was seen without work."""
        here, found = machine(), {}
        wanted = set(self._lease.parts)
        for claim in claims:
            if claim.state != "held" or claim.leaves is None or claim.machine != here or claim.id == self._lease.number:
                continue
            if wanted.isdisjoint(claim.parts):
                continue
            simulated = all(part.simulated for part in claim.parts.values())
            used = False if simulated else self._used(claim.pid)
            looks = self._looks.setdefault(claim.id, [])
            look = Look(now, False, used is not False)  # what nobody knows counts as work
            self._looks[claim.id] = [look] if look.active or not looks else [looks[0], look]
            seconds = idle_for(self._looks[claim.id])
            if seconds >= claim.leaves and now >= self._not_before.get(claim.id, now):
                found[claim.id] = seconds
        for gone in {*self._looks} - {claim.id for claim in claims}:
            self._looks.pop(gone, None)
            self._not_before.pop(gone, None)
        return found

    def _ask(self, chosen: list[Claim]) -> None:
        for claim in chosen:
            name = f"process {claim.pid} ({claim.command or claim.budget})"
            self._say(f"asks {name}, which has nothing to do, to leave its GPUs until there is room for it again")
            try:
                sizes, seconds = self._request(Process(claim.pid, claim.start))
            except requests.RefusedError as error:
                if error.suspended:
                    continue
                self._not_before[claim.id] = self._clock() + _REFUSED
                self._say(f"{name} stays: {error.reason}")
                return
            except requests.SilentError as error:
                self._not_before[claim.id] = self._clock() + _REFUSED
                self._say(f"{name} stays: {error}")
                return
            self._say(f"{name} has left with {format_size(sum(sizes.values()))}, in {seconds:.1f} s")


class _ByNvml:
    """NVML asked for each PID by itself: what was used since this one was asked about last."""

    def __init__(self) -> None:
        self._each: dict[int, Usage] = {}

    def __call__(self, pid: int) -> bool | None:
        if pid not in self._each:
            self._each[pid] = Usage(pid=pid)
        return self._each[pid]()

"""The lease of a budget with `device: {lease: true}`: made before the caps, compared with NVML by the monitor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memguard._base.logs import log as _log
from memguard._devices import suspension
from memguard._node.leases.lease import Lease, of_plan
from memguard._node.leases.neighbours import Watch
from memguard._runtime.extensions import Extension

if TYPE_CHECKING:
    from memguard._base.types import Sample
    from memguard._runtime.extensions import SessionContext


class Leases(Extension):
    def __init__(self) -> None:
        self._session: SessionContext | None = None
        self._watch: Watch | None = None

    def prepare(self, session: SessionContext, before: SessionContext | None) -> None:
        budget, old = session.guard.budget, before.lease if before is not None else None
        leaves = budget.suspend.on_demand if budget.suspend is not None else None
        before_lease = old if isinstance(old, Lease) else None
        session.set_lease(of_plan(session.guard.own_plan, budget.source, before_lease, leaves))

    def start(self, session: SessionContext) -> None:
        """Name those who use more of its GPUs than they have claimed: now, and later at the monitor's ticks."""
        lease = session.lease
        assert isinstance(lease, Lease)
        host, parts = session.guard.host, session.guard.own_plan.devices
        devices = {gpu: part.device for gpu, part in zip(lease.parts, parts, strict=True)}
        watch = Watch(lease, lambda: {gpu: host.processes(one) for gpu, one in devices.items()})
        self._session = session
        self._name(watch)
        self._watch = watch  # from now on the monitor looks, and nobody else

    def tick(self, reading: Sample) -> None:
        if self._watch is not None:
            self._name(self._watch)

    def forked(self) -> None:
        self._watch = None

    def _name(self, watch: Watch) -> None:
        if suspension.now is None and self._session is not None:
            for event in watch.due():
                _log.warning("%s", event.text)
                self._session.announce(event)

"""What adapters have in common that draw from the shared pool: those that are capped in it, and those only watched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from memguard._base.types import Applied, Device, Enforcement, Shortage, Usage
from memguard._base.units import round_up
from memguard._frameworks.base import Framework, with_size
from memguard._frameworks.driver_pools import PIECE
from memguard._frameworks.joint_pool import JointPool
from memguard.errors import CapNotApplied

UNIT = 512
"""The driver rounds what a pool gives up to this, in bytes."""
MOST_TIMES = 3
"""So many times a request that the pool refused is tried again: others may be faster."""


class _Pooled(Framework):
    pooled = True

    def __init__(self, host: Any, joint: JointPool) -> None:
        super().__init__(host)
        self._joint = joint


class JointCapped(_Pooled):
    """For an adapter whose allocator is memguard's: what it has of the pool is what is live."""

    def give_back(self, device: Device, needed: int) -> None:
        """The cache is everybody's: all that idles in it."""
        self.trim(device)

    def resize(self, caps: Mapping[str, int]) -> None:
        raise CapNotApplied(self.name, "the shared pool has a fixed size", "change the budget file and restart")

    def footprint(self, size: int) -> int:
        """What it takes of the pool, which may have room for it in a piece that it holds."""
        return round_up(size, UNIT)

    def unseen(self) -> str | None:
        return None

    def _shortage_on(self, uuid: str, size: int, caps: Mapping[str, int]) -> Shortage:
        held, _ = self._joint.figures(uuid) or (0, 0)
        needed = round_up(size, PIECE)
        # If the cap allows it, the GPU is full.
        return Shortage(self.name, uuid, size, needed, held + needed <= caps.get(uuid, 0))

    def _told_on(self, uuid: str, error: BaseException, size: int, caps: Mapping[str, int]) -> BaseException:
        """The error of a request that is refused, with its size, of which was told."""
        with_size(error, size)
        if uuid in caps:
            self._refused(error, uuid, size, reclaimable=0)
        return error


class JointWatched(_Pooled):
    """For an adapter of a framework that takes from the device's default pool by itself, where it has no limit."""

    def usage(self, device: Device) -> Usage | None:
        """What is in use, as the framework says; the cache is everybody's."""
        found = super().usage(device)  # type: ignore[safe-super]  # of the adapter that comes next
        if found is None:
            return None
        self._joint.begin(self.name, device.uuid)
        return Usage(found.in_use, found.in_use, None if found.in_use is None else 0, peak=found.peak)

    def drift(self) -> list[str]:
        return []  # it is watched: there is no cap to drift

    def _watched(
        self,
        applied: Applied,
        standing: dict[str, Any],
        before: Mapping[str, Any],
        stays: str,
        note: str,
        restore: Callable[[], None] | None = None,
    ) -> Applied:
        """What was applied, counted in the pool from now on. Its undo runs `restore` first.

        `standing` are the limits that stay once the framework is live, `before` those of earlier budgets; `stays` says
        what of it does.
        """
        devices = {device.uuid: device for device in self.host.devices()}

        def counted(uuid: str) -> int:
            usage = self.usage(devices[uuid]) if uuid in devices else None
            return 0 if usage is None else usage.in_use or 0

        def undo() -> None:
            if restore is not None:
                restore()
            self._joint.forget(self.name)
            assert applied.undo is not None
            try:
                applied.undo()
            except CapNotApplied:
                standing.clear()  # it has no limit that could stand
                standing.update(before)
                raise CapNotApplied(self.name, stays, "restart the process") from None

        self._joint.count(self.name, counted)
        return Applied(Enforcement.WATCHED, undo, notes=(*applied.notes, note))

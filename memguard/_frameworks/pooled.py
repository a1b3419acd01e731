"""Base classes of the shared pool's adapters: `PooledCapped` under a cap, `PooledWatched` without one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from memguard._base.types import Applied, Device, Drift, Enforcement, Shortage, Usage
from memguard._base.undo import Undo
from memguard._base.units import round_up
from memguard._frameworks.base import Framework, attach_size
from memguard._frameworks.driver_pages import PIECE
from memguard._frameworks.shared_pool import SharedPool
from memguard.errors import CapNotApplied

UNIT = 512
"""The driver rounds the size of each allocation from the pool up to a multiple of this many bytes."""
MOST_TIMES = 3
"""Maximum number of retries of a request that the pool refused. More than one, because another thread may allocate the
released memory first."""


class _Pooled(Framework):
    pooled = True

    def __init__(self, host: Any, shared_pool: SharedPool) -> None:
        super().__init__(host)
        self.shared_pool = shared_pool


class PooledCapped(_Pooled):
    """Base class for frameworks that allocate with memguard's own allocator. Their held bytes are their live blocks."""

    def trim_partly(self, device: Device, needed: int) -> None:
        """Trim the whole pool, because the pool's cache belongs to all frameworks."""
        self.trim(device)

    def resize(self, caps: Mapping[str, int]) -> None:
        raise CapNotApplied(self.name, "the shared pool has a fixed size", "change the budget file and restart")

    def footprint(self, size: int) -> int:
        """The bytes that the request takes from the pool. The pool may serve them from idle memory, without the
        driver."""
        return round_up(size, UNIT)

    def unseen(self) -> str | None:
        return None

    def _shortage_on(self, uuid: str, size: int, caps: Mapping[str, int]) -> Shortage:
        held, _ = self.shared_pool.figures(uuid) or (0, 0)
        needed = round_up(size, PIECE)
        # The driver has refused the request. If the cap would allow these bytes, the GPU itself is full.
        return Shortage(self.name, uuid, size, needed, held + needed <= caps.get(uuid, 0))

    def _with_reported_refusal(
        self, uuid: str, error: BaseException, size: int, caps: Mapping[str, int]
    ) -> BaseException:
        """Report the refused request. Returns the error, with the requested size attached."""
        attach_size(error, size)
        if uuid in caps:
            self._report_refusal(error, uuid, size, reclaimable=0)
        return error


class PooledWatched(_Pooled):
    """Base class for frameworks that allocate from the device's default pool, where memguard cannot limit them."""

    def usage(self, device: Device) -> Usage | None:
        """The in-use bytes that the framework reports, as both held and in use, because the cache belongs to the
        pool."""
        found = super().usage(device)  # type: ignore[safe-super] # the next class of the MRO is an adapter
        if found is None:
            return None
        self.shared_pool.begin(self.name, device.uuid)
        return Usage(found.in_use, found.in_use, None if found.in_use is None else 0, peak=found.peak)

    def drift(self) -> Sequence[Drift]:
        return []  # the framework has no cap that could break

    def _watched(self, applied: Applied, note: str, undo: Undo) -> Applied:
        """Register the framework's count of in-use bytes with the pool. Returns `applied` with `note` added and the
        enforcement WATCHED (measured, not limited)."""
        devices = {device.uuid: device for device in self.host.devices()}

        def counted(uuid: str) -> int:
            usage = self.usage(devices[uuid]) if uuid in devices else None
            return 0 if usage is None else usage.in_use or 0

        undo.add(self.name, functools.partial(self.shared_pool.forget, self.name))
        self.shared_pool.count(self.name, counted)
        return Applied(Enforcement.WATCHED, notes=(*applied.notes, note))

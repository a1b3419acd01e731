"""JAX in the pool that several frameworks share: its allocator `cuda_async`, on the device's default pool. Watched.

Measured on an H200: JAX takes from the default pool whichever is current, its fraction is no cap there, and it sets
that pool's release threshold to 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memguard._frameworks import jax
from memguard._frameworks.jax import JAX
from memguard._frameworks.joint_pool import JointPool
from memguard._types import Applied, Device, Enforcement, Usage
from memguard.errors import CapNotApplied


class JointJAX(JAX):
    """JAX's `cuda_async` allocator over the device's default pool."""

    pooled = True
    _allocator = "cuda_async"

    def __init__(self, host: Any, joint: JointPool) -> None:
        super().__init__(host)
        self._joint = joint

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any]) -> Applied:
        if jax._client() is not None:
            raise CapNotApplied(
                self.name,
                "its backend has started with an allocator, which cannot change",
                "call memguard.init() before JAX's first operation, or write 'strategy: caps'",
            )
        before = dict(jax._standing)
        applied = super().apply(caps, options)
        devices = {device.uuid: device for device in self.host.devices()}

        def counted(uuid: str) -> int:
            usage = self.usage(devices[uuid]) if uuid in devices else None
            return 0 if usage is None else usage.in_use or 0

        def undo() -> None:
            self._joint.forget(self.name)
            assert applied.undo is not None
            try:
                applied.undo()
            except CapNotApplied:
                jax._standing.clear()  # it has no limit that could stand
                jax._standing.update(before)
                raise CapNotApplied(
                    self.name, "its backend has started and stays on the default pool", "restart the process"
                ) from None

        self._joint.count(self.name, counted)
        note = "jax: watched, not capped: it draws from the device's default pool, where its fraction is no limit"
        return Applied(Enforcement.WATCHED, undo, notes=(*applied.notes, note))

    def usage(self, device: Device) -> Usage | None:
        """What is in use, as JAX says; the cache is everybody's."""
        found = super().usage(device)
        if found is None:
            return None
        self._joint.begin(self.name, device.uuid)
        return Usage(found.in_use, found.in_use, None if found.in_use is None else 0, peak=found.peak)

    def drift(self) -> list[str]:
        return []  # it is watched: there is no cap to drift

    def _why_not(self, allocator: str) -> str | None:
        if allocator.strip().lower() in ("", self._allocator):
            return None
        return "does not draw from the default pool, which 'strategy: pool' shares"

    def _preallocate(self, own: Mapping[str, Any]) -> bool:
        return False  # it would take its part of the pool from the others at once

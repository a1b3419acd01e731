"""JAX in the shared pool, through JAX's allocator `cuda_async` on the device's default pool, without a cap.

Measured on an H200: JAX allocates from the default pool whichever pool is current, `memory_fraction` does not cap these
allocations, and JAX sets the default pool's release threshold to 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memguard._base.types import Applied
from memguard._base.undo import Undo
from memguard._frameworks.jax import adapter
from memguard._frameworks.jax.adapter import JAX
from memguard._frameworks.pooled import PooledWatched
from memguard.errors import CapNotApplied


class PooledJAX(PooledWatched, JAX):
    """JAX with the allocator `cuda_async`, which allocates from the device's default pool."""

    _allocator = "cuda_async"

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        if adapter.live_client() is not None:
            raise CapNotApplied(
                self.name,
                "its backend has started with an allocator, which cannot change",
                "call memguard.init() before JAX's first operation, or write 'strategy: caps'",
            )
        applied = super().apply(caps, options, undo)
        note = "jax: watched, not capped: it draws from the device's default pool, where its fraction is no limit"
        return self._watched(applied, note, undo)

    def _kept(self) -> CapNotApplied:
        """Return the error without recording caps, because `memory_fraction` does not cap this allocator."""
        return CapNotApplied(self.name, "its backend has started and stays on the default pool", "restart the process")

    def _why_uncapped(self, allocator: str) -> str | None:
        if allocator.strip().lower() in ("", self._allocator):
            return None
        return "does not draw from the default pool, which 'strategy: pool' shares"

    def _preallocate(self, own: Mapping[str, Any]) -> bool:
        return False  # preallocation would take the pool's memory from the other frameworks

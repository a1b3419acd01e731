"""TensorFlow in the shared pool, through `cuda_malloc_async` on the device's default pool, without a cap.

Measured on an H200: TensorFlow allocates from the default pool whichever pool is current, `memory_limit` does not cap
these allocations (11,274 MiB were allocated under a limit of 4,096), and TensorFlow sets the default pool's release
threshold to the limit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from memguard._base.types import Applied, Enforcement
from memguard._base.undo import Undo
from memguard._frameworks.pooled import PooledWatched
from memguard._frameworks.tensorflow import adapter
from memguard._frameworks.tensorflow.adapter import TensorFlow
from memguard.errors import CapNotApplied, ConflictingSetting

_WANTED = "cuda_malloc_async"
_VARIABLE = adapter.ALLOCATOR


class PooledTensorFlow(PooledWatched, TensorFlow):
    """TensorFlow with the allocator `cuda_malloc_async`, which allocates from the device's default pool."""

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        if self._live(sys.modules["tensorflow"]):
            raise CapNotApplied(
                self.name,
                "its allocator exists and cannot change",
                "call memguard.init() before TensorFlow's first operation, or write 'strategy: caps'",
            )
        applied = super().apply(caps, options, undo)
        if applied.enforcement is Enforcement.ABSENT:
            return applied
        undo.add(self.name, adapter.restorer(_VARIABLE))
        os.environ[_VARIABLE] = _WANTED
        note = "tensorflow: watched, not capped: it draws from the device's default pool, where its limit is none"
        return self._watched(applied, note, undo)

    def _kept(self) -> CapNotApplied:
        """Return the error without recording limits, because `memory_limit` does not cap this allocator."""
        return CapNotApplied(self.name, "its allocator exists and stays on the default pool", "restart the process")

    def _refuse_unlimited(self) -> None:
        value = os.environ.get(_VARIABLE, "").strip().lower()
        if value not in ("", _WANTED):
            raise ConflictingSetting(
                self.name,
                f"{_VARIABLE}={value}",
                "does not draw from the default pool, which 'strategy: pool' shares",
                f"unset {_VARIABLE}, or write 'strategy: caps'",
            )

    def _limited_allocator(self) -> None:
        """Select the shared pool's allocator again if the variable was changed. Called right before TensorFlow reads
        the variable."""
        value = os.environ.get(_VARIABLE, "")
        if self._gpus and value.strip().lower() != _WANTED and not self._started():
            os.environ[_VARIABLE] = _WANTED
            self._warn(
                f"tensorflow: {_VARIABLE}={value} was set after memguard.init: the shared pool's allocator stays"
            )

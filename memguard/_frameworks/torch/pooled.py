"""PyTorch in the shared pool, through its `cudaMallocAsync` backend, which allocates from the current pool.

The backend cannot change after torch's import, so `prepare` selects it in the environment before the import (measured
with torch 2.11). memguard attributes to torch all in-use bytes of the pool that no other framework counts, because
torch's own statistics describe the device's default pool with all its users.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from memguard._base.types import Applied, Device, Drift, Enforcement, Usage
from memguard._base.undo import Undo
from memguard._base.units import round_up
from memguard._frameworks.shared_pool import SharedPool
from memguard._frameworks.torch import settings
from memguard._frameworks.torch.adapter import Torch
from memguard.errors import CapNotApplied, ConflictingSetting

_BACKEND = "cudaMallocAsync"
_SELECTED = f"backend:{_BACKEND}"
_UNIT = 512
_NEW, _OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_FIRST_WITH_NEW = (2, 10)
"""The first torch version that needs only PYTORCH_ALLOC_CONF. Older versions always read PYTORCH_CUDA_ALLOC_CONF."""


class PooledTorch(Torch):
    """Torch with the backend `cudaMallocAsync`, which allocates from the shared pool."""

    pooled = True

    def __init__(self, host: Any, shared_pool: SharedPool) -> None:
        super().__init__(host)
        self.shared_pool = shared_pool

    def prepare(self, undo: Undo) -> None:
        """Select the backend in the environment variable that the user has set, or else in the variable that this torch
        reads."""
        names = [name for name in (_NEW, _OLD) if os.environ.get(name)]
        for name in names:
            chosen = re.search(r"backend\s*:\s*([^\s,]+)", os.environ[name])
            if chosen is not None and chosen[1] != _BACKEND:
                raise self._other(f"{name}={os.environ[name]}", f"remove backend:{chosen[1]} from it")
            if chosen is not None:
                return
        version = settings.version()
        for name in names or [_OLD if version is not None and version < _FIRST_WITH_NEW else _NEW]:
            before = os.environ.get(name)
            wanted = f"{before},{_SELECTED}" if before else _SELECTED
            undo.add(f"torch: {name}", functools.partial(_put_back, name, wanted, before))
            os.environ[name] = wanted

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        torch: Any = sys.modules["torch"]
        query = getattr(torch._C, "_cuda_getAllocatorBackend", None)  # missing in a build without CUDA
        if query is not None and not torch.version.hip and (backend := str(query())) != _BACKEND:
            raise self._other(
                f"the {backend} backend of a torch that is imported",
                f"`import torch` after memguard.init(), or set {_NEW}={_SELECTED} before Python starts",
            )
        applied = super().apply(caps, options, undo)
        if self.shared_pool.capped:
            return applied
        note = (
            "torch: watched: it draws from the device's default pool, which cannot be capped; its fraction bounds what "
            "it has in use itself"
        )
        return applied._replace(enforcement=Enforcement.WATCHED, notes=(*applied.notes, note))

    def usage(self, device: Device) -> Usage | None:
        """The pool's in-use bytes that no other framework counts. None while torch is not live."""
        torch = sys.modules.get("torch")
        live = getattr(getattr(torch, "cuda", None), "is_initialized", None)  # inlines `_live` for speed
        if live is None or not live() or device.uuid not in self._pools:
            return None
        in_use = self.shared_pool.remainder(device.uuid)
        return Usage(in_use, in_use, 0)

    def footprint(self, size: int) -> int:
        """The bytes that the request takes from the pool. The pool may serve them from idle memory, without the
        driver."""
        return round_up(size, _UNIT)

    def drift(self) -> Sequence[Drift]:
        return [*super().drift(), *(self.shared_pool.drift() if self._set else ())]

    def about(self) -> dict[str, str]:
        found = super().about()
        return {**found, "strategy": "pool"} if found else found

    def _apply_pluggable(self, caps: Mapping[str, int], undo: Undo) -> Applied:
        raise self._other("torch.cuda.memory.change_current_allocator", "remove that call")

    def _put_pool_under(self, uuid: str, ordinal: int, allowed: int) -> None:
        pool = self.shared_pool.use(self.name, uuid, ordinal)
        if pool is None:
            raise CapNotApplied(self.name, "the shared pool is just being made", "call torch.cuda.init() again")
        self._pools[uuid] = pool

    def _restore(self, torch: Any) -> None:
        self._pools = {}  # the guard restores the former pool
        super()._restore(torch)

    def _other(self, setting: str, fix: str) -> ConflictingSetting:
        why = f"does not draw from the pool that 'strategy: pool' asks for: that takes {_BACKEND}"
        return ConflictingSetting(self.name, setting, why, f"{fix}; or write 'strategy: caps'")


def _put_back(name: str, ours: str, before: str | None) -> None:
    """Restore the environment variable, unless other code has changed it since."""
    if os.environ.get(name) != ours:
        return
    if before is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = before

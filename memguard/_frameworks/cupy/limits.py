"""Sets the limits of CuPy's pools on each GPU, checks the user's later limits, and divides the cap among pools."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from memguard._base.locks import LockOrder, ordered
from memguard._base.units import MIB, format_size
from memguard._devices import contexts
from memguard._frameworks.base import Framework
from memguard._frameworks.cupy.blocks import Pieces
from memguard._frameworks.driver_pages import SMALL, slabs
from memguard.errors import CapNotApplied, ConflictingSetting

LIMIT = "CUPY_GPU_MEMORY_LIMIT"
"""The environment variable by which the user limits CuPy's default pool."""


class Limits(Framework):
    """Base class of CuPy's adapter that limits the pools. CuPy's current pool and its earlier pools share the cap."""

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self._lock: Any = ordered(threading.RLock(), LockOrder.ALLOCATOR)
        self._caps: dict[str, int] = {}
        self._limited: dict[
            int, tuple[int, int]
        ] = {}  # by CUDA ordinal, as a tuple (limit that the user set on the pool, limit that memguard set)
        self._pieces: dict[int, Pieces] = {}
        self._ordinals: dict[str, int] = {}
        self._pool: Any = None
        # Earlier pools, each with a dictionary like `_limited`.
        self._former: list[tuple[Any, dict[int, tuple[int, int]]]] = []
        # `_limit`: the limit that all GPUs of `_limited` share; -1 if their limits differ. `_safe`: while the pool's
        # total is at most `_safe`, no small request can exceed `_limit`, so `allocate` does not read the pool's limit.
        # If the limits differ, `_safe` is -1, and each request reads the limit. Before the first GPU is limited,
        # `_safe` is `sys.maxsize`.
        self._limit, self._safe = -1, sys.maxsize

    def _limit_here(self, cupy: Any, ordinal: int, _: Any = None) -> None:
        """Limit the pool on this thread's current GPU to the cap, or to the user's limit if that is stricter."""
        with self._lock:
            uuid = self._uuid(ordinal)
            cap = self._caps.get(uuid)
            if cap is None or ordinal in self._limited:
                if cap is None and self._caps:
                    self._add_note(
                        f"cupy: cuda:{ordinal} ({uuid or 'unknown to CUDA'}) is not in the budget: not capped there"
                    )
                return
            cap = max(cap - self._held_by_former_pools(ordinal), 1)
            before = self._pool.get_limit()
            if 0 < before < cap:
                self._add_note(f"cupy: its own limit of {format_size(before)} is stricter than the cap and stays")
                cap = before
            elif before > cap:  # memguard could not read this limit earlier, so warn instead of raising
                self._warn(f"cupy: its own limit of {format_size(before)} is looser than the cap, so the cap holds")
            self._pool.set_limit(size=cap)
            found = self._pool.get_limit()
            if found != cap:
                self._pool.set_limit(size=before)
                raise CapNotApplied(
                    self.name,
                    f"the limit reads back as {found}",
                    "report this with the version; until then leave cupy out of the budget",
                )
            self._record_limit(ordinal, before, cap)
            self._pieces.setdefault(ordinal, Pieces(slabs[uuid]))

    def _limit_live(self, cupy: Any) -> None:
        """Limit the pool on every GPU that already has a CUDA context."""
        for uuid, ordinal in self._by_uuid().items():
            if uuid not in self._caps:
                continue
            with contexts.pushed(ordinal) as there:
                if not there:
                    continue
                before = self._pool.get_limit()
                if before > self._caps[uuid]:
                    raise self._looser("cupy's MemoryPool.set_limit", before, self._caps[uuid])
                self._limit_here(cupy, ordinal)

    def _enforce_limit(self, ordinal: int, _: Any = None) -> None:
        """If the user has changed the pool's limit on this thread's current GPU, apply the stricter of cap and new
        limit."""
        with self._lock:
            if ordinal not in self._limited:
                return
            _, limit = self._limited[ordinal]
            user_limit = int(self._pool.get_limit())
            if user_limit == limit:
                return
            uuid = self._uuid(ordinal)
            cap = max(self._caps.get(uuid, limit) - self._held_by_former_pools(ordinal), 1)
            holds = user_limit if 0 < user_limit <= cap else cap
            self._record_limit(ordinal, user_limit, holds)
            if holds == user_limit:
                return
            self._pool.set_limit(size=holds)
        size = f"a limit of {format_size(user_limit)}" if user_limit else "no limit"
        self._warn(f"cupy: MemoryPool.set_limit asks for {size} on cuda:{ordinal}: its cap of {format_size(cap)} holds")

    def _held_by_former_pools(self, ordinal: int) -> int:
        """Free the idle blocks of earlier pools on the GPU, limit each pool to the bytes that it still holds, and
        return the sum of these bytes."""
        held = 0
        idle = bool(self._former) and not self.capturing()  # a free during a capture would break the capture
        for pool, limited in self._former:
            if idle:
                with contexts.capture_safe():
                    self._call_on_device(ordinal, lambda pool: pool.free_all_blocks(), pool)
            total = self._call_on_device(ordinal, lambda pool: int(pool.total_bytes()), pool) or 0
            if total or ordinal in limited:
                before, limit = limited.get(ordinal, (0, None))
                now = self._call_on_device(ordinal, limit_of, pool)
                before = before if now == limit else now
                limited[ordinal] = (before, max(total, 1))
                self._call_on_device(ordinal, functools.partial(limit_to, max(total, 1)), pool)
            held += total
        return held

    def _raise_limit(self, ordinal: int) -> bool:
        """Raise the pool's limit by the bytes that earlier pools have released. Returns True if the limit rose."""
        with self._lock:
            uuid = self._uuid(ordinal)
            if not self._former or ordinal not in self._limited or uuid not in self._caps:
                return False
            self._enforce_limit(ordinal)
            before, limit = self._limited[ordinal]
            cap = max(self._caps[uuid] - self._held_by_former_pools(ordinal), 1)
            most = min(cap, before or cap)
            if most <= limit:
                return False
            self._record_limit(ordinal, before, most)
            self._pool.set_limit(size=most)
            return True

    def _record_limit(self, ordinal: int, before: int, limit: int) -> None:
        """Record the user's limit (`before`) and the limit that memguard set on a GPU."""
        self._limited[ordinal] = (before, limit)
        limits = {limit for _, limit in self._limited.values()}
        self._limit, self._safe = (limit, limit - SMALL) if len(limits) == 1 else (-1, -1)

    def _refuse_looser(self, caps: Mapping[str, int]) -> None:
        text = os.environ.get(LIMIT, "").strip()
        if not text:
            return
        for device in self.host.devices():
            cap = caps.get(device.uuid)
            try:
                limit = int(float(text[:-1]) / 100 * device.usable) if text.endswith("%") else int(text)
            except (ValueError, OverflowError):
                limit = -1
            if limit < 0:
                raise ConflictingSetting(
                    self.name, f"{LIMIT}={text}", "cannot be read", "unset it, or write bytes or a percentage"
                )
            if cap is not None and limit > cap:
                raise self._looser(f"{LIMIT}={text}", limit, cap)

    def _looser(self, setting: str, limit: int, cap: int) -> ConflictingSetting:
        return ConflictingSetting(
            self.name,
            f"{setting} ({format_size(limit)})",
            f"is looser than the cap of {format_size(cap)}",
            f"remove it, lower it, or raise frameworks.cupy in the budget to at least {-(-limit // MIB)}MiB",
        )

    def _call_on_device(self, ordinal: int, call: Callable[[Any], Any], pool: Any = None) -> Any:
        """Return `call(pool)`, run in the GPU's CUDA context; None if the GPU has no context. `pool` defaults to
        `_queried_pool`."""
        with contexts.pushed(ordinal) as there:
            return call(self._queried_pool(sys.modules["cupy"]) if pool is None else pool) if there else None

    def _queried_pool(self, cupy: Any) -> Any:
        """The capped pool. If no pool is capped, the pool that is CuPy's allocator. If the allocator is not a pool,
        CuPy's default pool."""
        pool = self._pool or getattr(cupy.cuda.get_allocator(), "__self__", None)
        known = isinstance(pool, (cupy.cuda.MemoryPool, cupy.cuda.MemoryAsyncPool))
        return pool if known else cupy.get_default_memory_pool()

    def _uuid(self, ordinal: int) -> str:
        """The UUID of the GPU with this CUDA ordinal; "" if unknown."""
        return next((uuid for uuid, number in self._by_uuid().items() if number == ordinal), "")

    def _by_uuid(self) -> dict[str, int]:
        """Each GPU's CUDA ordinal, by UUID. CUDA must be initialised."""
        if not self._ordinals:
            self._ordinals = contexts.ordinals()
        return self._ordinals


def limit_of(pool: Any) -> int:
    return int(pool.get_limit())


def limit_to(size: int, pool: Any) -> None:
    pool.set_limit(size=size)

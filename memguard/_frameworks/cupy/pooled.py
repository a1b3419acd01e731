"""Makes CuPy allocate from the driver pool that all frameworks share under `strategy: pool`.

CuPy's own `MemoryAsync` allocates from the GPU's current driver pool. memguard does not use
`cupy.cuda.MemoryAsyncPool`: its constructor creates a CUDA context on every GPU (`cudaSetDevice`), and its
`used_bytes` and `total_bytes` include the other frameworks' memory. CuPy allocates on its current stream and frees on
the same stream. memguard counts the bytes of CuPy's live allocations, rounded as CuPy rounds them.

After the driver refuses a request, the allocator synchronises CuPy's stream and retries, as CuPy's own async pool does,
because the synchronisation makes the blocks freed on that stream available.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from memguard._base.types import Applied, Device, Drift, Enforcement, Usage
from memguard._base.undo import Undo
from memguard._base.units import format_size
from memguard._devices import contexts, suspension
from memguard._frameworks.cupy.adapter import CuPy, _imported, _named, _replaced
from memguard._frameworks.cupy.limits import LIMIT
from memguard._frameworks.pooled import MOST_TIMES, UNIT, PooledCapped
from memguard._frameworks.replacements import Replacements
from memguard._frameworks.rmm import resource
from memguard._frameworks.shared_pool import SharedPool
from memguard.errors import CapNotApplied, ConflictingSetting

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class PooledCuPy(PooledCapped, CuPy):
    """Caps CuPy by allocating with `MemoryAsync` from the shared pool."""

    def __init__(self, host: Any, shared_pool: SharedPool) -> None:
        super().__init__(host, shared_pool)
        self._live_sizes: dict[int, dict[int, int]] = {}  # allocated bytes, by ordinal and address

    def _live(self, module: Any) -> bool:
        return bool(self._live_sizes) or (not self._caps and super()._live(module))

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        cupy: Any = sys.modules["cupy"]
        before = cupy.cuda.get_allocator()
        pool = getattr(before, "__self__", None)
        if os.environ.get(LIMIT, "").strip():
            raise self._refused_setting(LIMIT, "is a limit of CuPy's own pool, and holds in no other", "unset it")
        if resource.is_cupys(before) or not isinstance(pool, (cupy.cuda.MemoryPool, cupy.cuda.MemoryAsyncPool)):
            setting = f"cupy.cuda.set_allocator({_named(before)})"
            raise self._refused_setting(setting, "allocates past the shared pool", "remove that call")
        if isinstance(pool, cupy.cuda.MemoryPool):
            self._refuse_what_it_holds(pool)
        self._caps, replaced = dict(caps), Replacements()
        self._raw_set = cupy.cuda.set_allocator
        self._user_allocator = before

        def restore() -> None:
            replaced.undo()
            ours, self._caps = self._allocate, {}
            self.shared_pool.forget(self.name)
            if ours is not None and cupy.cuda.get_allocator() is ours:
                self._set_allocator(self._user_allocator)
            self._allocate = None

        undo.add(self.name, restore)
        self._allocate = self._from_shared_pool(cupy)
        self.shared_pool.count(self.name, self._counted)
        self._set_allocator(self._allocate)
        for owner in (cupy.cuda, cupy.cuda.memory):
            replaced.put(owner, "set_allocator", lambda original: self._wrap_set_allocator(original, cupy))
        return Applied(Enforcement.ENFORCED)

    def usage(self, device: Device) -> Usage | None:
        """Return the bytes of CuPy's live allocations as held and used. Idle memory belongs to the shared pool and is
        not included. None before CuPy's first allocation on the GPU."""
        if not self._live_sizes:
            return None
        live = self._live_sizes.get(self._by_uuid().get(device.uuid, -1))
        if live is None:
            return None
        in_use = _total(live)
        return Usage(in_use, in_use, 0)

    def trim(self, device: Device) -> None:
        """Synchronise CuPy's stream, then release the pool's idle memory to the driver."""
        cupy = _imported()
        ordinal = self._by_uuid().get(device.uuid) if contexts.initialised() else None
        if cupy is None or ordinal not in self._live_sizes:
            return
        with contexts.pushed(ordinal) as there:
            if there:
                cupy.cuda.get_current_stream().synchronize()
                self.shared_pool.release(device.uuid)

    def _drift(self, cupy: Any) -> list[Drift]:
        if self._allocate is None:
            return []
        if (now := cupy.cuda.get_allocator()) is not self._allocate:
            return [_replaced(_named(now))]
        return self.shared_pool.drift()

    def about(self) -> dict[str, str]:
        return {"allocator": "MemoryAsync", "strategy": "pool"} if self._live_sizes else {}

    def forked(self) -> None:
        self._lock, self._caps, self._live_sizes = threading.RLock(), {}, {}

    def _counted(self, uuid: str) -> int:
        live = self._live_sizes.get(self._by_uuid().get(uuid, -1)) if self._live_sizes else None
        return 0 if live is None else _total(live)

    def _from_shared_pool(self, cupy: Any) -> Callable[[int], Any]:
        """Create an allocator like `cupy.cuda.malloc_async` that also counts CuPy's live allocations."""
        memory, error_of_driver = cupy.cuda.memory, cupy.cuda.runtime.CUDARuntimeError
        here, stream_here, known = cupy.cuda.runtime.getDevice, cupy.cuda.get_current_stream, self._live_sizes
        pointer, capped = memory.MemoryPointer, self.shared_pool.capped

        class Counted(memory.MemoryAsync):  # type: ignore[name-defined, misc]
            """An allocation in the shared pool, which memguard counts until CuPy frees the memory."""

            _among: dict[int, int] | None = None

            def __init__(self, size: int, stream: Any, among: dict[int, int]) -> None:
                super().__init__(size, stream)
                if self.ptr:
                    self._among = among
                    among[self.ptr] = size

            def __del__(self) -> None:
                if suspension.now is not None:  # `cudaFreeAsync` would block this thread until the resume
                    suspension.defer(self._ends)
                else:
                    self._ends()

            def _ends(self) -> None:  # runs before CuPy's free, because the address may be reused after the free
                if self._among is not None:
                    self._among.pop(self.ptr, None)
                inherited = getattr(super(), "__del__", None)
                if inherited is not None:
                    inherited()

        def take(size: int, ordinal: int, live: dict[int, int]) -> Any:
            """Allocate from the pool; None if the pool has too little memory."""
            claim, limit = None, None if capped else self.shared_pool.limit(self._uuid(ordinal))
            if limit is not None and (claim := limit.take(size)) is None:
                return None
            try:
                return pointer(Counted(size, stream_here(), live), 0)
            except error_of_driver as error:
                if error.status != _OUT_OF_MEMORY:
                    raise
                return None
            finally:
                if claim is not None:
                    claim.end()

        def allocate(size: int) -> Any:
            """CuPy's allocator under a memguard budget with `strategy: pool`."""
            ordinal = here()
            live = known.get(ordinal)
            if live is None:
                live = self._begin(cupy, ordinal)
            rounded = -(-size // UNIT) * UNIT
            taken = take(rounded, ordinal, live)
            if taken is not None:
                return taken
            return self._retry(cupy, ordinal, size, lambda: take(rounded, ordinal, live))

        return allocate

    def _begin(self, cupy: Any, ordinal: int) -> dict[int, int]:
        """Make the shared pool the GPU's current pool, before CuPy's first allocation there. Returns a dictionary for
        the sizes of CuPy's live allocations on the GPU."""
        uuid = self._uuid(ordinal)
        if uuid not in self._caps and self._caps:
            self._add_note(f"cupy: cuda:{ordinal} ({uuid or 'unknown to CUDA'}) is not in the budget: not capped there")
        self.shared_pool.use(self.name, uuid, ordinal)
        return self._live_sizes.setdefault(ordinal, {})

    def _retry(self, cupy: Any, ordinal: int, size: int, take: Callable[[], Any]) -> Any:
        """Retry a refused request. If every retry fails, report the refusal and raise CuPy's own error."""
        uuid = self._uuid(ordinal)
        for _ in range(MOST_TIMES):
            if self.capturing():  # synchronising the stream would break the capture
                break
            cupy.cuda.get_current_stream().synchronize()
            if (memory := take()) is not None:
                return memory
            if not self._request_room(self._shortage_on(uuid, size, self._caps)):
                break
        # No local variable: its reference cycle with the traceback would keep arrays alive.
        raise self._refusal(cupy, uuid, size)

    def _refusal(self, cupy: Any, uuid: str, size: int) -> BaseException:
        """Create CuPy's own error, and report the refusal."""
        held, _ = self.shared_pool.figures(uuid) or (0, 0)
        error = cupy.cuda.memory.OutOfMemoryError(size, held, self._caps.get(uuid, 0))
        return self._with_reported_refusal(uuid, error, size, self._caps)

    def _wrap_set_allocator(self, original: Callable[..., None], cupy: Any) -> Callable[..., None]:
        """Return a replacement for CuPy's `set_allocator`. If the user sets an async pool, the replacement keeps
        memguard's allocator, because both use the same driver pool. For any other allocator, the replacement
        warns immediately."""

        def set_allocator(allocator: Any = None) -> None:
            pool = getattr(allocator, "__self__", None)
            if isinstance(pool, cupy.cuda.MemoryAsyncPool) and self._allocate is not None:
                original(self._allocate)
                self._user_allocator = allocator
            else:
                original(allocator)
            self._check_drift_now()

        return set_allocator

    def _refuse_what_it_holds(self, pool: Any) -> None:
        for ordinal in self._by_uuid().values() if contexts.initialised() else ():
            with contexts.pushed(ordinal) as there:
                if not there:
                    continue
                pool.free_all_blocks()
                if held := int(pool.total_bytes()):
                    raise CapNotApplied(
                        self.name,
                        f"it holds {format_size(held)} of cuda:{ordinal} in a pool of its own, from before",
                        "call memguard.init() before CuPy's first array, or write 'strategy: caps'",
                    )

    def _refused_setting(self, setting: str, why: str, fix: str) -> ConflictingSetting:
        return ConflictingSetting(self.name, setting, why, f"{fix}, or write 'strategy: caps' in the budget")


def _total(live: dict[int, int]) -> int:
    """The sum of the sizes in `live`. Atomic, because `sum` over the values is one C call."""
    return sum(live.values())

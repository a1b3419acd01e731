"""Caps CuPy by setting its memory pool's limit on each GPU, and rounds requests up to the driver's 2 MiB pages.

Measured: a `MemoryPool` refuses a request that would raise its `total_bytes()` above its limit, and the limit can be
changed at any time. Reading the current device initialises CUDA, so the adapter sets the limit for a GPU at the first
allocation there. The pool counts requested bytes, not driver pages (220 MiB counted, 398 MiB taken, for 200 arrays of
1.1 MiB on an H200). So the adapter rounds each request up to whole pages, and passes the unrounded size only if the
allocation takes no new page. The limit of a `MemoryAsyncPool` is the release threshold of a driver pool that all
frameworks share, so the adapter reports the usage of such a pool, but does not cap it.

CuPy's pool class is compiled and its methods cannot be replaced, so memguard cannot intercept `set_limit`. Instead,
before each allocation that could exceed the cap, the adapter checks that the pool still has the limit that memguard
set. If `set_allocator` selects another pool later, the new pool and the earlier ones share the cap.

Before a request fails, the adapter asks the guard, which applies the budget, for memory (`_request_room`). The guard
trims other frameworks on this GPU or raises this cap. The adapter holds no lock during that call. CuPy's own
index of idle blocks shows the bytes that a trim would release (`blocks.py`).

The cap does not cover the CUDA context and its modules, cuBLAS and cuSOLVER workspaces, allocations within
`using_allocator`, or allocations made by calling another pool's `malloc` directly.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from memguard._base.locks import LockOrder, ordered
from memguard._base.types import Applied, Device, Drift, Enforcement, Shortage, Usage, usage_of
from memguard._base.undo import Undo
from memguard._base.units import GRANULE, round_up
from memguard._devices import contexts
from memguard._frameworks.base import attach_size
from memguard._frameworks.cupy import blocks
from memguard._frameworks.cupy.limits import Limits, limit_of, limit_to
from memguard._frameworks.cupy.room_before_gc import GcReplacement
from memguard._frameworks.cupy.spec import SPEC
from memguard._frameworks.driver_pages import SMALL, TINY, UNIT, returned_by_trim, slabs, whole_share
from memguard._frameworks.replacements import Replacements
from memguard._frameworks.rmm import resource
from memguard.errors import CapNotApplied, ConflictingSetting, DeviceError

_MOST_SIZES = 4096
"""The maximum number of request sizes whose rounded sizes are cached."""
_TRIES = 2
"""The maximum number of `_request_room` calls for one allocation. After the first call the request fits in the cap, but
the GPU may have too little free memory; the second call requests that memory."""
_CAPTURE_IMPLICIT = 906  # cudaErrorStreamCaptureImplicit, which a query of the null stream returns during a capture


class CuPy(Limits, resource.RmmClient):
    """Caps the `MemoryPool` that is CuPy's allocator when `apply` runs, by default CuPy's default pool."""

    spec = SPEC

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self._blocks = blocks.Blocks()
        # By CUDA ordinal, the last call of `_reclaimable`, as a tuple (held bytes, used bytes, time, result).
        self._idle: dict[int, tuple[int, int, float, int | None]] = {}
        self._allocate: Callable[[int], Any] | None = None
        self._gc_replacement: GcReplacement | None = None
        self._shares: dict[int, int] = {}  # cached results of `whole_share`, by requested size
        # For each capped allocator, the user's allocator that it replaces.
        self._user_allocators: dict[Callable[[int], Any], Callable[[int], Any]] = {}
        self._raw_set: Callable[..., None] | None = None
        self._drifted: Sequence[Drift] = []
        self._watched = False

    def _live(self, module: ModuleType) -> bool:
        if self._limited:
            return True
        initialised = contexts.initialised()
        return initialised and (self._rmm is not None or any(map(self._totals, range(_device_count(module)))))

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        cupy: Any = sys.modules["cupy"]
        allocator = cupy.cuda.get_allocator()
        pool = getattr(allocator, "__self__", None)
        if isinstance(pool, cupy.cuda.MemoryAsyncPool):
            self._watched = True
            note = "cupy: watched, not capped: the limit of its async pool is a threshold of a pool that all share"
            return Applied(Enforcement.WATCHED, notes=(note,))
        if resource.is_cupys(allocator):
            known = self._by_uuid() if contexts.initialised() else None  # else `_by_uuid` would initialise CUDA
            applied = self._limit_rmm(caps, undo, known)
            self._replace(cupy, undo)
            return applied
        if not isinstance(pool, cupy.cuda.MemoryPool):
            raise ConflictingSetting(
                self.name,
                f"cupy.cuda.set_allocator({_named(allocator)})",
                "bypasses CuPy's memory pool, which is what can be limited",
                "remove that call, or let it set the malloc of a cupy.cuda.MemoryPool",
            )
        self._refuse_looser(caps)
        undo.add(self.name, functools.partial(self._restore, cupy))
        self._caps, self._pool, self._raw_set = dict(caps), pool, cupy.cuda.set_allocator
        if contexts.initialised():
            self._limit_live(cupy)
        self._allocate = self._make_allocator(cupy, pool)
        self._user_allocators[self._allocate] = allocator
        self._set_allocator(self._allocate)
        self._install_collector(cupy.cuda.memory)
        self._replace(cupy, undo)
        return Applied(Enforcement.ENFORCED)

    def usage(self, device: Device) -> Usage | None:
        """Return CuPy's usage of the GPU, from the pool's `total_bytes` (0.15 µs) and `used_bytes`. Reads the pool's
        idle blocks only if these two values differ."""
        cupy: Any = sys.modules.get("cupy")
        if cupy is None or getattr(getattr(cupy, "__spec__", None), "_initializing", False):  # `_imported`, inlined
            return None
        here = contexts.current()
        if here is None and not contexts.initialised():
            return None
        ordinal = (self._ordinals or self._by_uuid()).get(device.uuid)
        if ordinal is None:
            return None
        if cupy.cuda.get_allocator() is not self._allocate and self._swapped_for(cupy) is not None:
            with contexts.pushed(ordinal) as there:
                return Usage(None, None) if there else None  # unknown, because the user's allocator reports no bytes
        if self._rmm is not None:
            return self._rmm.usage(device.uuid)
        total = self._totals_here(ordinal) if here == ordinal else self._totals(ordinal)
        if total is None:
            return None
        held, used = total
        idle = 0 if held == used else self._reclaimable(device.uuid, ordinal, held, used)
        return usage_of((held, used, idle, None, None, None))

    def _reclaimable(self, uuid: str, ordinal: int, held: int, used: int) -> int | None:
        """The bytes that a trim would release; None if unknown. Reuses the last result for `blocks.FRESH` seconds while
        `held` and `used` are unchanged."""
        now, last = time.monotonic(), self._idle.get(ordinal)
        if last is not None and last[0] == held and last[1] == used and now - last[2] < blocks.FRESH:
            return last[3]
        found = self._returned_by_trim(uuid, ordinal)
        if found is not None:
            found = min(found, max(held - used, 0))  # `found` counts whole pages, `held` requested bytes
        self._idle[ordinal] = held, used, now, found
        return found

    def _returned_by_trim(self, uuid: str, ordinal: int) -> int | None:
        """The bytes that a trim of the current and earlier pools would release to the driver; None if unknown."""
        found = 0
        known = slabs[uuid].pieces if ordinal in self._pieces else None
        with contexts.pushed(ordinal) as there:
            for pool in (
                (self._queried_pool(sys.modules["cupy"]), *(former for former, _ in self._former)) if there else ()
            ):
                if isinstance(pool, sys.modules["cupy"].cuda.MemoryAsyncPool):
                    part = returned_by_trim(int(pool.total_bytes()), int(pool.used_bytes()))
                else:
                    part = self._blocks.reclaimable(pool, ordinal, known)
                if part is None:
                    return None
                found += part
        return found

    def trim_partly(self, device: Device, needed: int) -> None:
        """Release at least `needed` bytes by freeing the idle blocks of some streams, or by trimming a
        `MemoryAsyncPool` to a smaller size. If neither is possible, call `trim`."""
        cupy = _imported()
        ordinal = self._by_uuid().get(device.uuid) if cupy is not None and contexts.initialised() else None
        if ordinal is None:
            return
        if self._rmm is None and not self._former:
            with contexts.capture_safe(), contexts.pushed(ordinal) as there:
                pool = self._queried_pool(cupy) if there else None
                if isinstance(pool, cupy.cuda.MemoryAsyncPool):
                    if self._trim_to(cupy, pool, ordinal, needed):
                        return
                elif pool is not None and self._blocks.free(pool, ordinal, needed):
                    return
        with contexts.capture_safe():
            self.trim(device)

    def _trim_to(self, cupy: Any, pool: Any, ordinal: int, needed: int) -> bool:
        """Trim the driver pool of a `MemoryAsyncPool` on the current GPU to release only `needed` bytes. Returns False
        if CuPy has no handle of the driver pool, or if the driver refuses to trim."""
        handles = getattr(pool, "_pools", None)  # the driver's pool handles, by ordinal
        if not isinstance(handles, list) or ordinal >= len(handles):
            return False
        from memguard._devices import pools

        cupy.cuda.get_current_stream().synchronize()  # completes frees queued on the stream, as CuPy's own trim does
        try:
            pools.trim_to(handles[ordinal], max(int(pool.total_bytes()) - needed, 0))
        except DeviceError:
            return False
        return True

    def trim(self, device: Device) -> None:
        """Call `free_all_blocks()` of the current and earlier pools: frees every unsplit idle block on this GPU."""
        cupy = _imported()
        if cupy is None or not contexts.initialised():
            return
        ordinal = self._by_uuid().get(device.uuid)
        if ordinal is not None:
            for pool in (*(former for former, _ in self._former), None):
                self._call_on_device(ordinal, lambda pool: pool.free_all_blocks(), pool)
            self._call_on_device(ordinal, lambda pool: self._raise_limit(ordinal))

    @resource.unless_rmm
    def resize(self, caps: Mapping[str, int]) -> None:
        with self._lock:
            for ordinal in list(self._limited):  # detect limits that the user has set since the last check
                self._call_on_device(ordinal, functools.partial(self._enforce_limit, ordinal))
            caps_before, limited_before = self._caps, dict(self._limited)
            self._caps = dict(caps)
            try:
                for uuid, ordinal in self._by_uuid().items() if contexts.initialised() else ():
                    if ordinal in self._limited and uuid in caps:
                        before, _ = self._limited[ordinal]
                        cap = min(caps[uuid], before or caps[uuid])  # keep the user's limit if it is stricter
                        cap = max(cap - self._held_by_former_pools(ordinal), 1)
                        self._record_limit(ordinal, before, cap)
                        self._call_on_device(ordinal, functools.partial(limit_to, cap))
            except BaseException:
                changed = [n for n, limit in limited_before.items() if self._limited[n] != limit]
                self._caps, self._limited = caps_before, limited_before
                self._limit = self._safe = -1
                for ordinal in changed:
                    with contextlib.suppress(Exception):
                        self._call_on_device(ordinal, functools.partial(limit_to, limited_before[ordinal][1]))
                raise

    def footprint(self, size: int) -> int:
        return whole_share(size)

    @resource.unless_rmm
    def unseen(self) -> str | None:
        return "its async pool tells nobody of a refused request" if self._watched else None

    def drift(self) -> Sequence[Drift]:
        cupy = _imported()
        if cupy is None:
            return []
        own = getattr(cupy.cuda.memory, "_get_thread_local_allocator", None)  # None if this CuPy lacks the function
        if own is not None and own() is not None:
            # Within `cupy.cuda.using_allocator`, `get_allocator` returns only this thread's allocator. So return the
            # last result.
            return self._drifted
        self._drifted = self._drift(cupy)
        return self._drifted

    def _drift(self, cupy: Any) -> Sequence[Drift]:
        if cupy.cuda.get_allocator() is not self._allocate and (swapped := self._swapped_for(cupy)) is not None:
            return [_replaced(swapped)]
        if self._rmm is not None:
            return super().drift()
        pool = self._pool
        here = contexts.current() if self._limited else None
        for ordinal, (_, limit) in list(self._limited.items()) if pool is not None else ():
            if here == ordinal:
                if pool.get_limit() != limit:
                    self._enforce_limit(ordinal)
                continue
            with contexts.pushed(ordinal) as there:
                if there and pool.get_limit() != limit:
                    self._enforce_limit(ordinal)
        return []

    def communicating(self) -> bool:
        """True if a communicator of `cupyx.distributed` is live. Searches all Python objects, because CuPy keeps no
        list of communicators."""
        kind = getattr(sys.modules.get("cupyx.distributed._nccl_comm"), "NCCLBackend", None)
        return kind is not None and any(
            type(one) is kind and getattr(one, "_comm", True) is not None for one in gc.get_objects()
        )

    def capturing(self) -> bool:
        cupy = _imported()
        if cupy is None or contexts.current() is None:
            return False
        try:
            return bool(cupy.cuda.get_current_stream().is_capturing())
        except cupy.cuda.runtime.CUDARuntimeError as error:
            return bool(error.status == _CAPTURE_IMPLICIT)

    def about(self) -> dict[str, str]:
        cupy = _imported()
        if cupy is None or not self._live(cupy):
            return {}
        return {"allocator": "rmm" if self._rmm is not None else type(self._queried_pool(cupy)).__name__}

    def forked(self) -> None:
        self._lock, self._caps, self._limited = ordered(threading.RLock(), LockOrder.ALLOCATOR), {}, {}
        self._blocks = blocks.Blocks()

    def _make_allocator(self, cupy: Any, pool: Any) -> Callable[[int], Any]:
        malloc, total_bytes, get_limit, shares = pool.malloc, pool.total_bytes, pool.get_limit, self._shares
        get_device, refusal, count, seen = cupy.cuda.runtime.getDevice, cupy.cuda.memory.OutOfMemoryError, 0, set[int]()

        def malloc_and_limit(size: int) -> Any:
            """Call the pool's `malloc`. Before the first allocation on a GPU, set the pool's limit there. Once CuPy
            has allocated on all GPUs, the pool's own `malloc` replaces this function."""
            nonlocal count, malloc, total_bytes, get_limit
            count = count or _device_count(cupy)
            ordinal = get_device()
            if ordinal not in seen:
                if self._pool is pool:
                    self._limit_here(cupy, ordinal)
                seen.add(ordinal)
            memory = pool.malloc(size)
            if len(seen) == count:
                malloc = pool.malloc
                one = _pool_of(memory) if count == 1 else None
                if one is not None:  # call the only GPU's own pool directly, without the `MemoryPool`
                    malloc, total_bytes, get_limit = one.malloc, one.total_bytes, one.get_limit
            return memory

        malloc = malloc_and_limit

        def refused(error: MemoryError, size: int, rounded: int) -> Any:
            """Retry a request that the pool refused, and return its memory. If every retry fails, report the refusal
            and return None; the caller then raises `error`."""
            if not isinstance(error, refusal):
                return None
            ordinal = get_device()
            if get_limit() != self._limit:
                self._enforce_limit(ordinal)
            memory = self._retry_alone(ordinal, pool, size, rounded, refusal)
            if memory is None and self.on_shortage is not None:
                memory = self._retry_with_room(ordinal, pool, size, rounded, refusal)
            if memory is None:
                self._report_refusal_on(attach_size(error, size), ordinal, size)
            return memory

        # Each allocation runs `allocate`, and each closure variable slows that call. So `allocate` reads rarely used
        # functions from `self`.
        def allocate(size: int) -> Any:
            """CuPy's allocator under a memguard budget. Rounds the size up to driver pages; the pool enforces the
            limit."""
            # Rounds as `whole_share` does, but inline for speed. Calls `_share` only for small sizes not yet cached.
            if size > SMALL:
                if get_limit() != self._limit:
                    self._enforce_limit(_device_here())
                rounded = -(-size // GRANULE) * GRANULE if size % GRANULE else size
                try:
                    return malloc(rounded)
                except MemoryError as error:
                    memory = refused(error, size, rounded)
                    if memory is None:
                        raise
                    return memory
            before = total_bytes()
            if before > self._safe and get_limit() != self._limit:
                self._enforce_limit(_device_here())
            rounded = size
            if size > TINY:
                try:
                    rounded = shares[size]
                except KeyError:
                    rounded = self._share(size)
            try:
                memory = malloc(rounded)
            except MemoryError as error:
                memory = refused(error, size, rounded)
                if memory is None:
                    raise
            if total_bytes() != before:
                self._record_piece(memory)
            return memory

        return allocate

    def _share(self, size: int) -> int:
        """Return `whole_share(size)`, which is `size` rounded up to a share of a slab. Caches the result."""
        if len(self._shares) >= _MOST_SIZES:
            self._shares.clear()
        found = self._shares[size] = whole_share(size)
        return found

    def _record_piece(self, memory: Any) -> None:
        """Record the driver allocation that contains `memory`, after a small request changed the pool's total on this
        thread's current GPU."""
        pieces = self._pieces.get(_device_here())
        if pieces is not None:
            pieces.took(memory.ptr)

    def _retry_alone(self, ordinal: int, pool: Any, size: int, rounded: int, refusal: type[BaseException]) -> Any:
        """Retry a refused request without trimming other frameworks. Returns None if the retry fails.

        Retries the rounded size if earlier pools have released memory, else the requested size. The requested size
        takes no new driver memory if it fits in an idle block of the pool, or in free space of a 2 MiB driver slab.
        """
        if self._raise_limit(ordinal):
            with contextlib.suppress(refusal):
                return pool.malloc(rounded)
        before, pieces = pool.total_bytes(), self._pieces.get(ordinal)
        if pieces is not None:
            pieces.drop_freed(before)
        gap = size <= SMALL and pieces is not None and pieces.gap(size)
        if rounded <= size or not (gap or pool.free_bytes() >= size):
            return None
        try:
            memory = pool.malloc(size)
        except refusal:
            return None
        if pool.total_bytes() == before or (gap and pieces is not None and pieces.in_known_slab(memory.ptr)):
            return memory
        del memory  # the allocation took a new slab or new pages, and so exceeds the cap
        pool.free_all_blocks()
        return None

    def _retry_with_room(self, ordinal: int, pool: Any, size: int, rounded: int, refusal: type[BaseException]) -> Any:
        """Ask the guard for memory and retry a refused request. Returns None if every retry fails."""
        if self.capturing():
            return None
        if pool.free_bytes():  # above its limit, CuPy refuses without freeing its idle blocks
            pool.free_all_blocks()
            with contextlib.suppress(refusal):
                return pool.malloc(rounded)
        for _ in range(_TRIES):
            shortage = self._shortage(ordinal, pool, size, rounded)
            if shortage is None or not self._request_room(shortage):
                return None
            with contextlib.suppress(refusal):
                return pool.malloc(rounded)
            memory = self._retry_alone(ordinal, pool, size, rounded, refusal)
            if memory is not None:
                return memory
        return None

    def _install_collector(self, memory: Any) -> None:
        """Install `GcReplacement` if CuPy holds no lock during garbage collection, as in every version with the index
        of idle blocks."""
        one = getattr(memory, "SingleDeviceMemoryPool", None)
        if vars(memory).get("gc") is gc and hasattr(one, blocks.INDEX) and self._allocate is not None:
            self._gc_replacement = GcReplacement(self._make_room_first, self._allocate.__code__)
            memory.gc = self._gc_replacement

    def _make_room_first(self, size: int, rounded: int, full: bool) -> bool:
        """Make memory available before CuPy runs Python's garbage collector. Returns True on success.

        `full`: True if the driver refused the request, False if the pool's limit did. First frees the pool's own
        idle blocks, because for a request above the limit CuPy frees these only after the garbage collection.
        """
        if self.on_shortage is None or self.capturing():
            return False
        self._pool.free_all_blocks()
        ordinal = _device_here()
        if (
            not full
            and int(self._pool.total_bytes()) + round_up(rounded, UNIT) <= self._limited.get(ordinal, (0, 0))[1]
        ):
            return True
        shortage = self._shortage(ordinal, self._pool, size, rounded, full)
        return shortage is not None and self._request_room(shortage)

    def _shortage(self, ordinal: int, pool: Any, size: int, rounded: int, full: bool | None = None) -> Shortage | None:
        """Describe the shortage of a refused request. Returns None if this GPU has no cap, if the user's limit is
        stricter than the cap, or if `pool` is an earlier pool, because memory of other frameworks then cannot help.

        The pool has already freed its unsplit idle blocks. `full`: True if the driver refused the request, False if
        the pool's limit did, None to compute this from the pool's total and limit.
        """
        uuid = self._uuid(ordinal)
        own, limit = self._limited.get(ordinal, (0, 0))
        if uuid not in self._caps or not limit or pool is not self._pool:
            return None
        if full is None:
            full = int(pool.total_bytes()) + round_up(rounded, UNIT) <= limit
        if not full and 0 < own <= limit:
            return None
        return Shortage(self.name, uuid, size, round_up(rounded), full)

    def _report_refusal_on(self, error: BaseException, ordinal: int, size: int) -> None:
        """Report a request that the pool refused. The report's reclaimable bytes are 0, because the pool has freed its
        unsplit idle blocks."""
        uuid = self._uuid(ordinal)
        if uuid in self._caps:
            _, limit = self._limited.get(ordinal, (0, 0))
            own = limit if 0 < limit < self._caps[uuid] else None  # the user's stricter limit
            self._report_refusal(error, uuid, size, reclaimable=0, cap=own)

    def _replace(self, cupy: Any, undo: Undo) -> None:
        """Replace `set_allocator` and `using_allocator`: cap a `MemoryPool` that the user sets later, and warn that any
        other allocator is not capped."""
        replaced = Replacements()
        undo.add(self.name, replaced.undo)

        def set_allocator(original: Callable[..., None]) -> Callable[..., None]:
            def call(allocator: Any = None) -> None:
                allocator = next(
                    (plain for capped, plain in self._user_allocators.items() if capped is allocator), allocator
                )
                pool = getattr(allocator, "__self__", None)
                held = isinstance(pool, cupy.cuda.MemoryPool) and getattr(allocator, "__name__", "") == "malloc"
                if held and self._allocate is not None:
                    self._switch_pool(cupy, pool, allocator)
                else:
                    original(allocator)
                self._check_drift_now()

            return call

        def using_allocator(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(allocator: Any = None) -> Any:
                if self._caps and not any(allocator is capped for capped in self._user_allocators):
                    name = "None" if allocator is None else _named(allocator)
                    self._warn(
                        f"cupy: using_allocator({name}) allocates past its cap on this thread; set_allocator with the "
                        "malloc of a MemoryPool stays within it"
                    )
                return original(allocator)

            return call

        for owner in (cupy.cuda, cupy.cuda.memory):
            replaced.put(owner, "set_allocator", set_allocator)
        replaced.put(cupy.cuda, "using_allocator", using_allocator)

    def _switch_pool(self, cupy: Any, pool: Any, allocator: Callable[[int], Any]) -> None:
        """Make `pool` the capped pool. The pool's limit is the cap minus the bytes that earlier pools still hold.
        `allocator` is the pool's `malloc`, as passed by the user."""
        with self._lock:
            if pool is self._pool:
                capped = self._allocate
                self._raw_allocator(capped)
                return
            capped = self._make_allocator(cupy, pool)
            self._raw_allocator(capped)  # CuPy raises here inside `using_allocator`
            self._user_allocators[capped] = allocator
            back = next((limited for former, limited in self._former if former is pool), {})
            self._former = [entry for entry in self._former if entry[0] is not pool]
            self._former.append((self._pool, self._limited))
            for ordinal, (before, limit) in back.items():  # restore the user's limit, which `_limit_here` reads
                if self._call_on_device(ordinal, limit_of, pool) == limit:
                    self._call_on_device(ordinal, functools.partial(limit_to, before), pool)
            self._pool, self._allocate, self._limited = pool, capped, {}
            self._limit = self._safe = -1
            for ordinal in self._by_uuid().values() if contexts.initialised() else ():
                self._call_on_device(ordinal, functools.partial(self._limit_here, cupy, ordinal))

    def _raw_allocator(self, allocator: Any) -> None:
        assert self._raw_set is not None
        self._raw_set(allocator)

    def _restore(self, cupy: Any) -> None:
        if self._gc_replacement is not None and vars(cupy.cuda.memory).get("gc") is self._gc_replacement:
            cupy.cuda.memory.gc = gc
        with self._lock:
            for pool, limited in (*self._former, (self._pool, self._limited)):
                for ordinal, (before, cap) in list(limited.items()):
                    if self._call_on_device(ordinal, limit_of, pool) == cap:
                        self._call_on_device(ordinal, functools.partial(limit_to, before), pool)
            self._limited.clear()
            self._idle.clear()
            for pieces in self._pieces.values():
                pieces.forget()
            self._pieces.clear()
            ours, plain = self._allocate, self._user_allocators
            self._former, self._caps = [], {}
        try:
            if ours is not None and cupy.cuda.get_allocator() is ours:
                self._set_allocator(plain[ours])
        except Exception:
            self._allocate, self._pool, self._user_allocators = None, None, {}
            raise
        # Reset these last, so that an interrupted undo can be repeated.
        self._allocate, self._pool, self._user_allocators = None, None, {}

    def _swapped_for(self, cupy: Any) -> str | None:
        """The name of CuPy's current allocator if it is not the capped one; else None."""
        now = cupy.cuda.get_allocator()
        if self._allocate is not None:
            swapped = now is not self._allocate
        else:
            swapped = self._rmm is not None and bool(self._rmm.standing) and not resource.is_cupys(now)
        return _named(now) if swapped else None

    def _set_allocator(self, allocator: Callable[[int], Any]) -> None:
        try:
            self._raw_allocator(allocator)
        except ValueError as error:
            raise CapNotApplied(
                self.name, f"its allocator cannot be set: {error}", "leave cupy.cuda.using_allocator first"
            ) from error

    def _totals(self, ordinal: int) -> tuple[int, int] | None:
        if contexts.current() == ordinal:
            return self._totals_here(ordinal)
        with contexts.pushed(ordinal) as there:
            return self._totals_here(ordinal) if there else None

    def _totals_here(self, ordinal: int) -> tuple[int, int] | None:
        """Held and used bytes of all pools on the GPU of the current CUDA context. None if CuPy has no memory and no
        limit there."""
        pool = self._pool or self._queried_pool(sys.modules["cupy"])
        total, used = int(pool.total_bytes()), int(pool.used_bytes())
        for former, _ in self._former:
            total, used = total + int(former.total_bytes()), used + int(former.used_bytes())
        if (pieces := self._pieces.get(ordinal)) is not None:
            pieces.drop_freed(total)
        return (total, used) if total or used or ordinal in self._limited else None


def _pool_of(memory: Any) -> Any:
    """The single-GPU pool that allocated `memory`; None if this CuPy does not expose that pool. `total_bytes()` takes
    40 ns on the single-GPU pool, and 150 ns on the `MemoryPool`."""
    reference = getattr(getattr(memory, "mem", None), "pool", None)
    pool = reference() if isinstance(reference, weakref.ref) else None
    needed = ("malloc", "total_bytes", "get_limit")
    return pool if all(callable(getattr(pool, name, None)) for name in needed) else None


def _device_here() -> int:
    return int(sys.modules["cupy"].cuda.runtime.getDevice())


def _device_count(cupy: Any) -> int:
    return int(cupy.cuda.runtime.getDeviceCount())


def _imported() -> Any:
    """The CuPy module if its import is complete, else None."""
    cupy = sys.modules.get("cupy")
    return None if getattr(getattr(cupy, "__spec__", None), "_initializing", False) else cupy


def _replaced(allocator: str) -> Drift:
    return Drift(f"its allocator was replaced after memguard.init ({allocator})", "its cap does not hold")


def _named(allocator: Any) -> str:
    owner = getattr(allocator, "__self__", None)
    name = getattr(allocator, "__name__", repr(allocator))
    return name if owner is None or isinstance(owner, ModuleType) else f"{type(owner).__name__}.{name}"

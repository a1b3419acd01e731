"""CuPy: the limit of its memory pool on every device, and requests rounded as the driver rounds them.

Measured: a `MemoryPool` stops at its limit by its own count, and the limit can change. Reading the current device
initialises CUDA, so the adapter sets a pool's limit at the first allocation on its device. The pool counts requested
bytes, not the driver's pages (220 MiB counted, 398 taken, for 200 arrays of 1.1 MiB on an H200). So the adapter rounds
each request up to pages, and uses the requested size only where that takes no page. The limit of `MemoryAsyncPool` is
the release threshold of a pool that all frameworks share, so the adapter only watches that pool.

The pool's class cannot be changed, so the adapter compares the pool's limit with the cap at each allocation with which
the pool could exceed the cap. A pool that `set_allocator` makes CuPy's allocator later shares the cap with the former
pools.

Before it refuses a request, the adapter requests room from siblings (`_short`), without a lock. It reads the bytes that
a trim would release from CuPy's own index of its idle blocks (`blocks.py`).

Outside the cap: context and modules, cuBLAS and cuSOLVER workspaces, `using_allocator`, and direct calls of other
pools.
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
from memguard._base.units import GRANULE, round_up
from memguard._devices import contexts
from memguard._frameworks.base import with_size
from memguard._frameworks.cupy import blocks
from memguard._frameworks.cupy.limits import Limits, limit_of, limit_to
from memguard._frameworks.cupy.room_before_gc import Collector
from memguard._frameworks.cupy.spec import SPEC
from memguard._frameworks.driver_pages import SMALL, TINY, UNIT, returned_by_trim, slabs, whole_share
from memguard._frameworks.replacements import Replacements
from memguard._frameworks.rmm import resource
from memguard.errors import CapNotApplied, ConflictingSetting, DeviceError

_MOST_SIZES = 4096
"""Request sizes to remember, with their rounded size."""
_TRIES = 2
"""A request may first exceed its cap, and then lack free memory on the GPU."""
_CAPTURE_IMPLICIT = 906  # cudaErrorStreamCaptureImplicit: the null stream cannot be queried during a capture


class CuPy(Limits, resource.RmmClient):
    """CuPy's default memory pool, or the pool that was its allocator when the cap was applied."""

    spec = SPEC

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self._blocks = blocks.Blocks()
        self._idle: dict[int, tuple[int, int, float, int | None]] = {}  # by ordinal: held, used, time, result
        self._allocate: Callable[[int], Any] | None = None
        self._collector: Collector | None = None
        self._shares: dict[int, int] = {}  # cache of `whole_share` by size
        self._plain: dict[Callable[[int], Any], Callable[[int], Any]] = {}  # the user's allocator by the capped one
        self._raw_set: Callable[..., None] | None = None
        self._drifted: Sequence[Drift] = []
        self._watched = False

    def _live(self, module: ModuleType) -> bool:
        if self._limited:
            return True
        initialised = contexts.initialised()
        return initialised and (self._rmm is not None or any(map(self._totals, range(_device_count(module)))))

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any]) -> Applied:
        cupy: Any = sys.modules["cupy"]
        allocator = cupy.cuda.get_allocator()
        pool = getattr(allocator, "__self__", None)
        if isinstance(pool, cupy.cuda.MemoryAsyncPool):
            self._watched = True
            note = "cupy: watched, not capped: the limit of its async pool is a threshold of a pool that all share"
            return Applied(Enforcement.WATCHED, lambda: None, notes=(note,))
        if resource.is_cupys(allocator):
            known = self._by_uuid() if contexts.initialised() else None  # else a CuPy call would initialise CUDA
            return self._told_at_once(cupy, self._limit_rmm(caps, known))
        if not isinstance(pool, cupy.cuda.MemoryPool):
            raise ConflictingSetting(
                self.name,
                f"cupy.cuda.set_allocator({_named(allocator)})",
                "bypasses CuPy's memory pool, which is what can be limited",
                "remove that call, or let it set the malloc of a cupy.cuda.MemoryPool",
            )
        self._refuse_looser(caps)
        self._caps, self._pool = dict(caps), pool
        replaced = Replacements()
        self._raw_set = cupy.cuda.set_allocator

        def undo() -> None:
            replaced.undo()
            if self._collector is not None and vars(cupy.cuda.memory).get("gc") is self._collector:
                cupy.cuda.memory.gc = gc
            self._restore(cupy)

        self.changes.add(self.name, undo)

        try:
            if contexts.initialised():
                self._limit_live(cupy)
            self._allocate = self._capped(cupy, pool)
            self._plain[self._allocate] = allocator
            self._set_allocator(self._allocate)
            self._replace(cupy, replaced)
            self._ask_before_collecting(cupy.cuda.memory)
        except BaseException:
            undo()
            raise
        return Applied(Enforcement.ENFORCED, undo)

    def usage(self, device: Device) -> Usage | None:
        """From `total_bytes` (0.15 µs) and `used_bytes` of the pool, and its idle blocks if there are any."""
        cupy: Any = sys.modules.get("cupy")
        if cupy is None or getattr(getattr(cupy, "__spec__", None), "_initializing", False):  # as `_imported`
            return None
        here = contexts.current()
        if here is None and not contexts.initialised():
            return None
        ordinal = (self._ordinals or self._by_uuid()).get(device.uuid)
        if ordinal is None:
            return None
        if cupy.cuda.get_allocator() is not self._allocate and self._swapped_for(cupy) is not None:
            with contexts.pushed(ordinal) as there:
                return Usage(None, None) if there else None  # the new allocator does not report its bytes
        if self._rmm is not None:
            return self._rmm.usage(device.uuid)
        total = self._totals_here(ordinal) if here == ordinal else self._totals(ordinal)
        if total is None:
            return None
        held, used = total
        idle = 0 if held == used else self._reclaimable(device.uuid, ordinal, held, used)
        return usage_of((held, used, idle, None, None, None))

    def _reclaimable(self, uuid: str, ordinal: int, held: int, used: int) -> int | None:
        """Cached bytes that a trim would release; None if CuPy or the driver does not report them."""
        now, last = time.monotonic(), self._idle.get(ordinal)
        if last is not None and last[0] == held and last[1] == used and now - last[2] < blocks.FRESH:
            return last[3]
        found = self._given_back(uuid, ordinal)
        if found is not None:
            found = min(found, max(held - used, 0))  # CuPy does not count whole pages as cached
        self._idle[ordinal] = held, used, now, found
        return found

    def _given_back(self, uuid: str, ordinal: int) -> int | None:
        """The bytes that a trim would return to the driver."""
        found = 0
        known = slabs[uuid].pieces if ordinal in self._pieces else None
        with contexts.pushed(ordinal) as there:
            for pool in (self._asked(sys.modules["cupy"]), *(former for former, _ in self._former)) if there else ():
                if isinstance(pool, sys.modules["cupy"].cuda.MemoryAsyncPool):
                    part = returned_by_trim(int(pool.total_bytes()), int(pool.used_bytes()))
                else:
                    part = self._blocks.reclaimable(pool, ordinal, known)
                if part is None:
                    return None
                found += part
        return found

    def give_back(self, device: Device, needed: int) -> None:
        """As `trim`, limited to the blocks of some streams, and to a part of the driver's own pool, if that
        suffices."""
        cupy = _imported()
        ordinal = self._by_uuid().get(device.uuid) if cupy is not None and contexts.initialised() else None
        if ordinal is None:
            return
        if self._rmm is None and not self._former:
            with contexts.capture_safe(), contexts.pushed(ordinal) as there:
                pool = self._asked(cupy) if there else None
                if isinstance(pool, cupy.cuda.MemoryAsyncPool):
                    if self._trim_to(cupy, pool, ordinal, needed):
                        return
                elif pool is not None and self._blocks.free(pool, ordinal, needed):
                    return
        with contexts.capture_safe():
            self.trim(device)

    def _trim_to(self, cupy: Any, pool: Any, ordinal: int, needed: int) -> bool:
        """Trim the driver's own pool on the current GPU to release only `needed` bytes. False if that is impossible."""
        handles = getattr(pool, "_pools", None)  # the driver's pool handles, by ordinal
        if not isinstance(handles, list) or ordinal >= len(handles):
            return False
        from memguard._devices import pools

        cupy.cuda.get_current_stream().synchronize()  # as CuPy's own trim: completes the pending frees
        try:
            pools.trim_to(handles[ordinal], max(int(pool.total_bytes()) - needed, 0))
        except DeviceError:
            return False
        return True

    def trim(self, device: Device) -> None:
        """`free_all_blocks()`: frees every block of this device that is not split."""
        cupy = _imported()
        if cupy is None or not contexts.initialised():
            return
        ordinal = self._by_uuid().get(device.uuid)
        if ordinal is not None:
            for pool in (*(former for former, _ in self._former), None):
                self._on(ordinal, lambda pool: pool.free_all_blocks(), pool)
            self._on(ordinal, lambda pool: self._make_room(ordinal))

    @resource.unless_rmm
    def resize(self, caps: Mapping[str, int]) -> None:
        with self._lock:
            for ordinal in list(self._limited):  # small requests do not compare the limit
                self._on(ordinal, functools.partial(self._hold, ordinal))
            caps_before, limited_before = self._caps, dict(self._limited)
            self._caps = dict(caps)
            try:
                for uuid, ordinal in self._by_uuid().items() if contexts.initialised() else ():
                    if ordinal in self._limited and uuid in caps:
                        before, _ = self._limited[ordinal]
                        cap = min(caps[uuid], before or caps[uuid])  # the pool's own stricter limit stays
                        cap = max(cap - self._elsewhere(ordinal), 1)
                        self._note(ordinal, before, cap)
                        self._on(ordinal, functools.partial(limit_to, cap))
            except BaseException:
                changed = [n for n, limit in limited_before.items() if self._limited[n] != limit]
                self._caps, self._limited = caps_before, limited_before
                self._limit = self._safe = -1
                for ordinal in changed:
                    with contextlib.suppress(Exception):
                        self._on(ordinal, functools.partial(limit_to, limited_before[ordinal][1]))
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
        own = getattr(cupy.cuda.memory, "_get_thread_local_allocator", None)  # None in a CuPy without this function
        if own is not None and own() is not None:
            # Within `cupy.cuda.using_allocator`, CuPy does not report the other threads' allocator.
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
                    self._hold(ordinal)
                continue
            with contexts.pushed(ordinal) as there:
                if there and pool.get_limit() != limit:
                    self._hold(ordinal)
        return []

    def communicating(self) -> bool:
        """Whether a communicator of `cupyx.distributed` is live, found among all objects: CuPy keeps no list of
        them."""
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
        return {"allocator": "rmm" if self._rmm is not None else type(self._asked(cupy)).__name__}

    def forked(self) -> None:
        self._lock, self._caps, self._limited = ordered(threading.RLock(), LockOrder.ALLOCATOR), {}, {}
        self._blocks = blocks.Blocks()

    def _capped(self, cupy: Any, pool: Any) -> Callable[[int], Any]:
        malloc, total_bytes, get_limit, shares = pool.malloc, pool.total_bytes, pool.get_limit, self._shares
        get_device, refusal, count, seen = cupy.cuda.runtime.getDevice, cupy.cuda.memory.OutOfMemoryError, 0, set[int]()

        def malloc_and_look(size: int) -> Any:
            """The pool's `malloc`, in use until every device has been seen and limited."""
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
                if one is not None:  # the single GPU's pool, to which CuPy's pool delegates
                    malloc, total_bytes, get_limit = one.malloc, one.total_bytes, one.get_limit
            return memory

        malloc = malloc_and_look

        def refused(error: MemoryError, size: int, rounded: int) -> Any:
            """Retry a refused request. Returns the memory, or None after reporting the refusal: the caller raises the
            error."""
            if not isinstance(error, refusal):
                return None
            ordinal = get_device()
            if get_limit() != self._limit:
                self._hold(ordinal)
            memory = self._once_more(ordinal, pool, size, rounded, refusal)
            if memory is None and self.on_shortage is not None:
                memory = self._with_room(ordinal, pool, size, rounded, refusal)
            if memory is None:
                self._tell(with_size(error, size), ordinal, size)
            return memory

        # Each allocation runs `allocate`, and each closure variable slows it: attributes of `self` hold the rarely used
        # functions.
        def allocate(size: int) -> Any:
            """CuPy's allocator under a memguard budget: rounded to the driver's pages, limited by the pool."""
            # `whole_share`, inlined for simple sizes and cached sizes.
            if size > SMALL:
                if get_limit() != self._limit:
                    self._hold(_device_here())
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
                self._hold(_device_here())
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
                self._took(memory)
            return memory

        return allocate

    def _share(self, size: int) -> int:
        """`whole_share`, cached."""
        if len(self._shares) >= _MOST_SIZES:
            self._shares.clear()
        found = self._shares[size] = whole_share(size)
        return found

    def _took(self, memory: Any) -> None:
        """Record that this small request changed the pool's total, on the current device of this thread."""
        pieces = self._pieces.get(_device_here())
        if pieces is not None:
            pieces.took(memory.ptr)

    def _once_more(self, ordinal: int, pool: Any, size: int, rounded: int, refusal: type[BaseException]) -> Any:
        """Retry a request that the pool refused, without help from siblings. None if that fails.

        It retries the rounded size if former pools released memory, else the requested size. That takes nothing from
        the driver if an idle piece of a block or a gap of a slab serves it.
        """
        if self._make_room(ordinal):
            with contextlib.suppress(refusal):
                return pool.malloc(rounded)
        before, pieces = pool.total_bytes(), self._pieces.get(ordinal)
        if pieces is not None:
            pieces.settle(before)
        gap = size <= SMALL and pieces is not None and pieces.gap(size)
        if rounded <= size or not (gap or pool.free_bytes() >= size):
            return None
        try:
            memory = pool.malloc(size)
        except refusal:
            return None
        if pool.total_bytes() == before or (gap and pieces is not None and pieces.beside(memory.ptr)):
            return memory
        del memory  # it opened a slab or took whole pages, which exceeds the cap
        pool.free_all_blocks()
        return None

    def _with_room(self, ordinal: int, pool: Any, size: int, rounded: int, refusal: type[BaseException]) -> Any:
        """Retry a request that the pool refused after siblings made room or its cap rose. None if that fails."""
        if self.capturing():
            return None
        if pool.free_bytes():  # CuPy refuses a request above its limit without freeing its idle blocks
            pool.free_all_blocks()
            with contextlib.suppress(refusal):
                return pool.malloc(rounded)
        for _ in range(_TRIES):
            shortage = self._shortage(ordinal, pool, size, rounded)
            if shortage is None or not self._short(shortage):
                return None
            with contextlib.suppress(refusal):
                return pool.malloc(rounded)
            memory = self._once_more(ordinal, pool, size, rounded, refusal)
            if memory is not None:
                return memory
        return None

    def _ask_before_collecting(self, memory: Any) -> None:
        """Install `Collector` in a CuPy known to hold no lock when it collects garbage: one with readable blocks."""
        one = getattr(memory, "SingleDeviceMemoryPool", None)
        if vars(memory).get("gc") is gc and hasattr(one, blocks.INDEX) and self._allocate is not None:
            self._collector = Collector(self._ask, self._allocate.__code__)
            memory.gc = self._collector

    def _ask(self, size: int, rounded: int, full: bool) -> bool:
        """Whether siblings make room before CuPy collects garbage for a request. `full`: the driver refused.

        Idle blocks of the pool itself are freed first: above its limit CuPy frees them only after a collection.
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
        return shortage is not None and self._short(shortage)

    def _shortage(self, ordinal: int, pool: Any, size: int, rounded: int, full: bool | None = None) -> Shortage | None:
        """Why the pool refuses; None where reclaim cannot help.

        It cannot help if no cap is set here, if the user's own limit is stricter, or for a former pool. The pool has
        already freed its unsplit blocks.
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

    def _tell(self, error: BaseException, ordinal: int, size: int) -> None:
        """Report a request that the pool refused. The pool has freed its unsplit blocks: nothing is reclaimable."""
        uuid = self._uuid(ordinal)
        if uuid in self._caps:
            _, limit = self._limited.get(ordinal, (0, 0))
            own = limit if 0 < limit < self._caps[uuid] else None  # the pool's own stricter limit
            self._refused(error, uuid, size, reclaimable=0, cap=own)

    def _replace(self, cupy: Any, replaced: Replacements) -> None:
        """Hold later allocators of the user to the cap, or report at once that memguard cannot hold them."""

        def set_allocator(original: Callable[..., None]) -> Callable[..., None]:
            def call(allocator: Any = None) -> None:
                allocator = next((plain for capped, plain in self._plain.items() if capped is allocator), allocator)
                pool = getattr(allocator, "__self__", None)
                held = isinstance(pool, cupy.cuda.MemoryPool) and getattr(allocator, "__name__", "") == "malloc"
                if held and self._allocate is not None:
                    self._use(cupy, pool, allocator)
                else:
                    original(allocator)
                self._changed()

            return call

        def using_allocator(original: Callable[..., Any]) -> Callable[..., Any]:
            def call(allocator: Any = None) -> Any:
                if self._caps and not any(allocator is capped for capped in self._plain):
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

    def _told_at_once(self, cupy: Any, applied: Applied) -> Applied:
        """With RMM: report at once that memguard cannot hold an allocator that the user sets later."""
        replaced, inner = Replacements(), applied.undo

        def undo() -> None:
            replaced.undo()
            if inner is not None:
                inner()

        self.changes.add(self.name, undo)
        try:
            self._replace(cupy, replaced)
        except BaseException:
            undo()
            raise
        return applied._replace(undo=undo)

    def _use(self, cupy: Any, pool: Any, allocator: Callable[[int], Any]) -> None:
        """Allocate from another pool: it gets the part of the cap that the former pools do not hold."""
        with self._lock:
            if pool is self._pool:
                capped = self._allocate
                self._raw_allocator(capped)
                return
            capped = self._capped(cupy, pool)
            self._raw_allocator(capped)  # CuPy refuses this inside `using_allocator`
            self._plain[capped] = allocator
            back = next((limited for former, limited in self._former if former is pool), {})
            self._former = [entry for entry in self._former if entry[0] is not pool]
            self._former.append((self._pool, self._limited))
            for ordinal, (before, limit) in back.items():  # the pool's own limit, for `_limit_here`
                if self._on(ordinal, limit_of, pool) == limit:
                    self._on(ordinal, functools.partial(limit_to, before), pool)
            self._pool, self._allocate, self._limited = pool, capped, {}
            self._limit = self._safe = -1
            for ordinal in self._by_uuid().values() if contexts.initialised() else ():
                self._on(ordinal, functools.partial(self._limit_here, cupy, ordinal))

    def _raw_allocator(self, allocator: Any) -> None:
        assert self._raw_set is not None
        self._raw_set(allocator)

    def _restore(self, cupy: Any) -> None:
        with self._lock:
            for pool, limited in (*self._former, (self._pool, self._limited)):
                for ordinal, (before, cap) in list(limited.items()):
                    if self._on(ordinal, limit_of, pool) == cap:
                        self._on(ordinal, functools.partial(limit_to, before), pool)
            self._limited.clear()
            self._idle.clear()
            for pieces in self._pieces.values():
                pieces.forget()
            self._pieces.clear()
            ours, plain = self._allocate, self._plain
            self._former, self._caps = [], {}
        try:
            if ours is not None and cupy.cuda.get_allocator() is ours:
                self._set_allocator(plain[ours])
        except Exception:
            self._allocate, self._pool, self._plain = None, None, {}
            raise
        # Last: an interrupted undo can still be repeated.
        self._allocate, self._pool, self._plain = None, None, {}

    def _swapped_for(self, cupy: Any) -> str | None:
        """The name of CuPy's allocator if it is no longer the capped one; else None."""
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
        """Held and used bytes on the GPU of the current context."""
        pool = self._pool or self._asked(sys.modules["cupy"])
        total, used = int(pool.total_bytes()), int(pool.used_bytes())
        for former, _ in self._former:
            total, used = total + int(former.total_bytes()), used + int(former.used_bytes())
        if (pieces := self._pieces.get(ordinal)) is not None:
            pieces.settle(total)
        return (total, used) if total or used or ordinal in self._limited else None


def _pool_of(memory: Any) -> Any:
    """The single-GPU pool of this memory; None if this CuPy lacks the attribute. Its figures take 40 ns instead of 150
    ns."""
    reference = getattr(getattr(memory, "mem", None), "pool", None)
    pool = reference() if isinstance(reference, weakref.ref) else None
    needed = ("malloc", "total_bytes", "get_limit")
    return pool if all(callable(getattr(pool, name, None)) for name in needed) else None


def _device_here() -> int:
    return int(sys.modules["cupy"].cuda.runtime.getDevice())


def _device_count(cupy: Any) -> int:
    return int(cupy.cuda.runtime.getDeviceCount())


def _imported() -> Any:
    """CuPy if its import is complete, else None."""
    cupy = sys.modules.get("cupy")
    return None if getattr(getattr(cupy, "__spec__", None), "_initializing", False) else cupy


def _replaced(allocator: str) -> Drift:
    return Drift(f"its allocator was replaced after memguard.init ({allocator})", "its cap does not hold")


def _named(allocator: Any) -> str:
    owner = getattr(allocator, "__self__", None)
    name = getattr(allocator, "__name__", repr(allocator))
    return name if owner is None or isinstance(owner, ModuleType) else f"{type(owner).__name__}.{name}"

"""Caps PyCUDA by making `mem_alloc` and `gpuarray` allocate from a pool whose driver memory memguard counts.

Measured: PyCUDA's `DeviceMemoryPool` has no limit, so the adapter checks the cap before a pool grows. A pool rounds
requests up to the size of a bin (272 MiB for 256 MiB), and the driver rounds allocations above 1 MiB up to 2 MiB and
packs smaller ones into 2 MiB slabs; the held bytes include this rounding. `mem_alloc` is a default argument of many
functions in `pycuda.gpuarray`, so the adapter replaces those defaults too. Unless the budget says `context: own`,
`Device.make_context` (which `pycuda.autoinit` calls) returns the GPU's primary context, which the other frameworks
also use: a second context takes 518 MiB (measured).

The adapter replaces the methods of the pool class, so existing and new pools, also of derived classes, share the cap.

Not counted: allocations by functions and bound methods that the program saved before memguard.init, `drv.Array`, and
managed memory.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from memguard._base.locks import LockOrder, ordered
from memguard._base.types import Applied, Device, Drift, Enforcement, TraceEvent, Usage, usage_of
from memguard._base.undo import Undo
from memguard._base.units import GRANULE, format_size, round_up
from memguard._devices import contexts
from memguard._frameworks.base import TRIES, Framework, attach_shortage, attached_shortage, holds_lock
from memguard._frameworks.driver_pages import DriverPages, slabs
from memguard._frameworks.pycuda.contexts import automatic, current_context, pushed, serve_by_primary, watch_streams
from memguard._frameworks.pycuda.pool import Pitched, Pool, RawPool
from memguard._frameworks.pycuda.spec import SPEC
from memguard._frameworks.replacements import Replacements
from memguard.errors import CapNotApplied

_Taken = TypeVar("_Taken")
_never_freed: list[Pool] = []


class PyCUDA(Framework):
    """Caps PyCUDA's device allocations: `mem_alloc`, `mem_alloc_pitch`, `gpuarray` and `DeviceMemoryPool`."""

    spec = SPEC

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self._lock: Any = ordered(threading.RLock(), LockOrder.ALLOCATOR)
        self._caps: dict[str, int] = {}
        self._by_ordinal: dict[int, str] = {}
        self._ordinals: dict[str, int] = {}
        self._seen: set[str] = set()  # GPUs on which `_uncounted` has found a PyCUDA context
        self._own: dict[int, Pool] = {}  # memguard's own pools, by context handle
        self._last: Pool | None = None  # the pool of the last `mem_alloc`
        self._others: dict[int, Pool] = {}  # the user's pools, by `id`
        self._pages: dict[str, DriverPages] = {}
        self._pitched: dict[str, Pitched] = {}
        self._peak: Counter[str] = Counter()
        self._freed: deque[tuple[Pitched, int, int]] = deque()  # finalizers append, `_apply_recorded` removes
        self._events: list[TraceEvent] | None = None
        self._recorded: set[int] = set()
        self._serial = 0
        self._some_wanted = False  # True if some pool's `wanted` is not 0
        self._mem_alloc: Callable[[int], Any] | None = None

    def _live(self, module: ModuleType) -> bool:
        return bool(self._own or self._others) or current_context(module) is not None

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        # This runs inside the import of pycuda.driver. `pycuda.tools` and `pycuda.gpuarray` may be partly imported, so
        # use only names of pycuda.driver.
        drv: Any = sys.modules["pycuda.driver"]
        devices = self.host.devices(ordinals=True)
        if any(device.ordinal is None for device in devices):
            raise CapNotApplied(
                self.name,
                "CUDA's numbering of several GPUs cannot be read",
                "run `memguard doctor` to see why CUDA does not start",
            )
        self._by_ordinal = {device.ordinal: device.uuid for device in devices if device.ordinal is not None}
        self._ordinals = {uuid: ordinal for ordinal, uuid in self._by_ordinal.items()}
        self._caps = dict(caps)
        if not hasattr(drv.DeviceMemoryPool, "managed_bytes"):  # PyCUDA 2020.1 and older
            raise CapNotApplied(
                self.name, "its memory pool does not say what it holds", "install PyCUDA 2021.1 or later"
            )
        own, notes = options.get("context") == "own", []
        if self._live(drv):
            notes.append("pycuda: it was live before memguard.init(): what it allocated before is not counted")
            if "pycuda.autoinit" in sys.modules and not own:
                notes.append(
                    "pycuda: pycuda.autoinit has made a second CUDA context (+518 MiB measured on an H200); "
                    "import it after memguard.init(), so that it gets the primary one"
                )
        self._patch(drv, own, undo)
        return Applied(Enforcement.ENFORCED, notes=tuple(notes))

    def usage(self, device: Device) -> Usage | None:
        drv = sys.modules.get("pycuda.driver")
        if drv is not None and not self._caps:
            return self._uncounted(device)
        if drv is None or not (self._own or self._live(drv)):
            return None
        uuid = device.uuid
        with self._lock:
            if self._freed:
                self._apply_recorded()
            pools, pages = self._pools(uuid), self._pages.get(uuid) or self._pages_of(uuid)
            if pages.changes:
                pages.apply_changes()
            in_use = 0
            pieces: list[tuple[int, int]] = []
            for pool in pools:
                active, unused = pool.refreshed_figures()
                in_use += active
                pieces += unused
            in_use = self._noted(uuid, in_use)
            held, peak = pages.held(), self._peak[uuid]
            idle = pages.returned_by(pieces) if pieces else 0
        if not pools and not held and not peak:
            return None  # PyCUDA uses another GPU, or has not allocated yet
        return usage_of((held, in_use, idle, None, None, peak))

    def _uncounted(self, device: Device) -> Usage | None:
        """Usage if PyCUDA has no cap, so that memguard does not count PyCUDA's memory. Returns `Usage(None, None)`
        (unknown bytes) if this or an earlier call has found a PyCUDA context on the GPU, else None. Finds another
        thread's context only if `pycuda.autoinit` created that context."""
        ordinal = contexts.ordinals().get(device.uuid)
        if ordinal is not None and (automatic(ordinal) or (pushed() is not None and contexts.current() == ordinal)):
            self._seen.add(device.uuid)
        return Usage(None, None) if device.uuid in self._seen else None

    def trim(self, device: Device) -> None:
        """Call `free_held()` of all pools whose idle blocks this thread can free."""
        self._shrink(device.uuid, None)

    def trim_partly(self, device: Device, needed: int) -> None:
        """Free the fewest idle blocks that return at least `needed` bytes to the driver.

        memguard's own pools can free blocks on a thread whose current PyCUDA context is the pool's context, or that has
        no current context. A user's pool (`DeviceMemoryPool`) can free blocks only on the thread that used it first. On
        any other thread, this method records the needed bytes, and PyCUDA's next request on a suitable thread frees
        them.
        """
        self._shrink(device.uuid, needed)

    def _shrink(self, uuid: str, needed: int | None) -> None:
        """Free at least `needed` bytes of idle blocks, or all idle blocks if `needed` is None."""
        drv = sys.modules.get("pycuda.driver")
        if drv is None or not self._caps:
            return
        nested = holds_lock(self._lock)
        with self._lock:
            self._apply_recorded()
            current = current_context(drv)
            here = None if current is None else current.handle
            pools, before = self._pools(uuid), self._counted_bytes(uuid)
            for pool in pools if needed is None else sorted(pools, key=_idle_bytes, reverse=True):
                missing = sys.maxsize if needed is None else needed - before + self._counted_bytes(uuid)
                if missing <= 0:
                    return
                if pool.reachable(here):
                    pool.free_held(needed=None if needed is None or nested else missing)
                elif needed is not None and _idle_bytes(pool):
                    pool.wanted, self._some_wanted = max(pool.wanted, missing), True
                    pool.close()  # disables `hit`, which would not free the wanted bytes

    def _free_wanted(self, drv: Any) -> None:
        """Free idle blocks that other threads needed but could not free (`Pool.wanted`). Callers hold the lock."""
        current = current_context(drv)
        self._some_wanted = False
        for pool in self._all():
            if pool.wanted and current is not None and pool.reachable(current.handle):
                needed, pool.wanted = pool.wanted, 0
                pool.free_held(needed=needed)
            elif pool.wanted:
                self._some_wanted = True

    def resize(self, caps: Mapping[str, int]) -> None:
        """Set new caps, which apply from the next check on, also to the retry of a request that has just failed. While
        the held bytes exceed a lowered cap, idle blocks still serve requests, but no pool takes more driver memory."""
        self._caps = dict(caps)

    def footprint(self, size: int) -> int:
        """Return the driver memory that a request of `size` bytes may take: the size of PyCUDA's bin (at most 1/16
        larger), rounded up to whole pages because a small block may open a slab.

        Excludes the extra small block that memguard allocates with a pool's first allocation and keeps idle in the
        pool.
        """
        with self._lock:
            pool = next(iter(self._own.values()), None)
            return round_up(pool.bin_size(size) if pool is not None and size > 0 else size + size // 16)

    def drift(self) -> Sequence[Drift]:
        drv = sys.modules.get("pycuda.driver")
        if drv is None or self._mem_alloc is None or drv.mem_alloc is self._mem_alloc:
            return []
        return [Drift("pycuda.driver.mem_alloc was replaced after memguard.init", "the cap does not hold there")]

    def contexts(self, device: Device) -> frozenset[int]:
        # The caller has called `usage`, which removes the pools of destroyed contexts.
        uuid = device.uuid
        return frozenset([pool.context for pool in self._all() if pool.uuid == uuid])

    def record(self) -> Callable[[], list[TraceEvent]] | None:
        if not self._caps:
            return None
        with self._lock:
            self._events = []
            for pool in self._all():
                pool.close()  # disables `hit`, which would serve requests without recording them

        def stop() -> list[TraceEvent]:
            events, self._events = self._events or [], None
            self._recorded.clear()
            return events

        return stop

    def forked(self) -> None:
        self._lock, self._caps = ordered(threading.RLock(), LockOrder.ALLOCATOR), {}

    def _patch(self, drv: Any, own_context: bool, undo: Undo) -> None:
        raw_alloc, raw_pitch, pool_class = drv.mem_alloc, drv.mem_alloc_pitch, drv.DeviceMemoryPool
        raw_pool = RawPool(pool_class, pool_class.allocate, pool_class.free_held)
        replaced, others, current_object = Replacements(), self._others, drv.Context.get_current
        ask, out, number = contexts.id_of_current()

        def mem_alloc(size: int) -> Any:
            pool = self._last
            # PyCUDA returns the same context object for a context that Python code pushed. If the id of the driver's
            # current context is also the pool's `context_id`, the pool's memory exists. Comparing the ids takes half
            # the time of `memory_exists`.
            if (
                pool is not None
                and current_object() is pool.made_in
                and ((ask(None, out) == 0 and number.value == pool.context_id) or pool.memory_exists())
            ):
                allocation = pool.hit(pool.own, size)
                if allocation is not None:
                    return allocation
            current = current_context(drv) if replaced.active else None
            if current is None or size <= 0:
                return raw_alloc(size)  # let PyCUDA raise its own error
            return self._allocate(drv, lambda: self._pool_here(drv, current, raw_pool), size)

        def mem_alloc_pitch(width: int, height: int, access_size: int) -> Any:
            # The driver chooses the pitch: a multiple of 512 bytes or of a larger unit.
            current = current_context(drv)
            if current is None:
                return raw_pitch(width, height, access_size)
            uuid, requested, more = self._uuid(drv, current), round_up(width, 512) * height, TRIES
            while True:
                try:
                    return pitched_within_cap(uuid, width, height, access_size)
                except drv.MemoryError as error:
                    if more <= 0 or not self._room_for(error, uuid, requested):
                        self._report_refusal_on(error, uuid, requested)
                        raise
                more -= 1  # retry outside the `except` block, whose end frees the error and its frames

        def pitched_within_cap(uuid: str, width: int, height: int, access_size: int) -> Any:
            with self._lock:
                self._apply_recorded()
                pages = self._pages_of(uuid)
                pitched = self._pitched.setdefault(uuid, Pitched(pages))

                def take() -> tuple[Any, int]:
                    allocation, pitch = raw_pitch(width, height, access_size)
                    pitched.add(int(allocation), pitch * height)
                    return allocation, pitch

                def undo_allocation(taken: tuple[Any, int]) -> None:
                    pitched.remove(int(taken[0]), taken[1] * height)
                    taken[0].free()

                requested = round_up(width, 512) * height
                fits = functools.partial(pages.fits, requested)
                allocation, pitch = self._within_cap(
                    drv, uuid, requested, round_up(requested), fits, take, undo_allocation
                )
                self._note_peak(uuid)
            gone = pitched, int(allocation), pitch * height
            weakref.finalize(allocation, self._freed.append, gone).atexit = False
            return allocation, pitch

        def allocate(pool: Any, size: int) -> Any:
            # A user's pool shares PyCUDA's cap, whether created before or after memguard.init.
            tracked = others.get(id(pool))
            if tracked is not None and tracked.reference() is pool:
                allocation = tracked.hit(pool, size)
                if allocation is not None:
                    return allocation
            current = current_context(drv) if replaced.active else None
            if current is None or size <= 0:
                return raw_pool.allocate(pool, size)
            with self._lock:
                tracked = self._tracked(pool)
                if tracked is None:
                    uuid = self._uuid(drv, current)
                    tracked = Pool(weakref.ref(pool), current.handle, uuid, self._pages_of(uuid), raw_pool)
                    tracked.on_new_peak = self._new_peak
                    tracked = others.setdefault(id(pool), tracked)  # a signal handler may have added the pool first
            return self._allocate(drv, lambda: tracked, size)

        def free_held(pool: Any) -> None:
            with self._lock:
                tracked = self._tracked(pool)
                if tracked is None:
                    raw_pool.free_held(pool)
                else:
                    tracked.free_held()

        def stop_holding(original: Callable[[Any], None]) -> Callable[[Any], None]:
            def call(pool: Any) -> None:
                with self._lock:
                    tracked = self._tracked(pool)
                    if tracked is None:
                        original(pool)
                    else:
                        tracked.stop_holding(original)

            return call

        def free(original: Callable[[Any], None]) -> Callable[[Any], None]:
            def call(allocation: Any) -> None:
                address = int(allocation)
                original(allocation)
                with self._lock:
                    any(pool.freed(address, allocation) for pool in self._all())

            return call

        def restore() -> None:
            replaced.undo()
            if self._mem_alloc is not None:
                _swap_defaults(self._mem_alloc, raw_alloc)  # also if gpuarray was imported after memguard.init
            current = current_context(drv)
            with self._lock:
                self._apply_recorded()
                for pool in self._own.values():
                    if current is not None and pool.context == current.handle:
                        pool.free_held()
                    else:
                        _never_freed.append(pool)  # a free without the pool's context may abort the process
                for pool in self._all():
                    pool.forget()
                self._last = None
                self._own.clear()  # does not free live arrays, because each array keeps its pool alive
                others.clear()
                self._caps, self._mem_alloc = {}, None

        undo.add(self.name, restore)
        replaced.put(drv, "mem_alloc", lambda _: mem_alloc, direct=True)
        self._mem_alloc = drv.mem_alloc
        replaced.put(drv, "mem_alloc_pitch", lambda _: mem_alloc_pitch)
        # Replaced on the class, so that the replacement applies to existing pools and derived classes.
        replaced.put(pool_class, "allocate", lambda _: allocate, direct=True)
        replaced.put(pool_class, "free_held", lambda _: free_held)
        replaced.put(pool_class, "stop_holding", stop_holding)
        replaced.put(getattr(drv, "PooledDeviceAllocation", None), "free", free)
        if not own_context:
            serve_by_primary(drv, replaced)
        # Until CUDA is initialised and PyCUDA is imported, no PyCUDA stream exists.
        imported = not getattr(drv.__spec__, "_initializing", False)
        watch_streams(drv, replaced, used=imported and contexts.initialised())
        _swap_defaults(raw_alloc, self._mem_alloc)

    def _pool_here(self, drv: Any, current: Any, raw: RawPool) -> Pool:
        with self._lock:
            handle = current.handle
            former = pool = self._own.get(handle)
            if pool is not None and pool.dead():  # the handle now belongs to a new context
                self._retire(pool)
                pool = None
            elif pool is not None and pool.empty() and pool.made_in is not current and not self._primary(handle):
                pool = None  # `dead` cannot detect a destroyed context if the pool has no memory
            if pool is None:
                made = raw.make()
                uuid = self._uuid(drv, current)
                pool = Pool(lambda: made, handle, uuid, self._pages_of(uuid), raw, current)
                pool.own, pool.on_new_peak = made, self._new_peak
                _discard(self._own, handle, former)
                pool = self._own.setdefault(handle, pool)  # a signal handler may have added a pool first
            self._last = pool
            return pool

    def _tracked(self, pool: Any) -> Pool | None:
        """memguard's `Pool` that tracks a user's pool; None if there is none. Drops the `Pool` of a deleted user's pool
        whose `id` the given pool has."""
        tracked = self._others.get(id(pool))
        if tracked is not None and tracked.reference() is not pool:
            self._drop(id(pool), tracked)
            return None
        return tracked

    def _drop(self, key: int, tracked: Pool) -> None:
        """Stop tracking a pool that the user has deleted. Does nothing to a new pool with the same `id`, which a signal
        handler may have added."""
        _discard(self._others, key, tracked)
        tracked.forget()

    def _all(self) -> list[Pool]:
        return [*self._own.values(), *self._others.values()]

    def _allocate(self, drv: Any, find: Callable[[], Pool], size: int) -> Any:
        """Allocate from the pool that `find` returns. After a refusal, ask the guard for memory and retry."""
        uuid, more = "", TRIES
        while True:
            try:
                with self._lock:
                    pool = find()
                    uuid = pool.uuid
                    allocation = self._allocate_counted(drv, pool, size)
                    if self._some_wanted:
                        self._free_wanted(drv)
                    return allocation
            except drv.MemoryError as error:
                if more <= 0 or not self._room_for(error, uuid, size):
                    self._report_refusal_on(error, uuid, size)
                    raise
            more -= 1  # retry outside the `except` block, whose end frees the error and its frames

    def _room_for(self, error: BaseException, uuid: str, requested: int) -> bool:
        """Ask the guard, for a failed request, to trim other frameworks or raise the cap. True if memory was released
        or the cap rose. Does nothing if this thread holds the adapter's lock."""
        shortage = attached_shortage(error, self.name, uuid, requested)
        if shortage is None or uuid not in self._caps or self.capturing():
            return False
        return not holds_lock(self._lock) and self._request_room(shortage)

    def _report_refusal_on(self, error: BaseException, uuid: str, size: int) -> None:
        """Report a refused request. Callers have released the lock."""
        if uuid in self._caps:
            self._report_refusal(error, uuid, size)

    def _allocate_counted(self, drv: Any, pool: Pool, size: int) -> Any:
        self._apply_recorded()
        pool.free_if_unknown()
        bin_size = pool.bin_size(size)
        if self._events is None:
            pool.open(size, bin_size)
            allocation = pool.hit(pool.reference(), size)
            if allocation is not None:
                return allocation
        pages = self._pages_of(pool.uuid)
        allocation = self._within_cap(
            drv,
            pool.uuid,
            size,
            round_up(bin_size) + (GRANULE if pool.empty() else 0),  # the first block also needs the small idle block
            lambda cap: pages.fits(bin_size, cap) or pool.has_free(bin_size),
            lambda: pool.take(size, bin_size),
            pool.undo_allocation,
        )
        self._note_peak(pool.uuid, pool)
        if self._events is None:
            pool.open(size, bin_size)
            return allocation
        self._serial += 1
        serial = self._serial
        self._recorded.add(serial)
        self._events.append(TraceEvent(time.time(), self.name, "alloc", serial, size, device=self._position(pool.uuid)))
        weakref.finalize(allocation, self._released, pool.uuid, serial).atexit = False
        return allocation

    def _within_cap(
        self,
        drv: Any,
        uuid: str,
        requested: int,
        needed: int,
        fits: Callable[[int], bool],
        take: Callable[[], _Taken],
        undo_allocation: Callable[[_Taken], None],
    ) -> _Taken:
        """Call `take` if `fits(cap)` is True, and return the result of `take`. Raises PyCUDA's own MemoryError if the
        cap or the driver refuses the allocation even after idle blocks are freed. `requested`: the request's bytes.
        `needed`: the bytes of driver memory that the allocation may take."""
        cap = self._caps.get(uuid)
        for last in (False, True):
            held = self._counted_bytes(uuid)
            if cap is None or fits(cap):
                try:
                    taken = take()
                except drv.MemoryError as error:  # attach the size, which the driver's error lacks
                    attach_shortage(error, requested, needed, full=True)
                    if last or cap is None:
                        raise
                else:
                    if cap is None or self._counted_bytes(uuid) <= max(cap, held):
                        return taken
                    undo_allocation(taken)  # the held bytes exceed the cap, because the driver opened a new slab
                    del taken
            self._apply_recorded()  # finalizers may have run since the check
            current = current_context(drv)
            for pool in self._pools(uuid):
                if current is not None and pool.reachable(current.handle):
                    pool.free_held()
        held = self._counted_bytes(uuid)
        raise attach_shortage(
            drv.MemoryError(
                f"out of memory: asked for {format_size(requested)} (takes {format_size(self.footprint(requested))}), "
                f"holds {format_size(held)} of the {format_size(cap or 0)} that the memguard budget gives pycuda"
            ),
            requested,
            needed,
            full=False,
        )

    def _pages_of(self, uuid: str) -> DriverPages:
        found = self._pages.get(uuid)
        return found if found is not None else self._pages.setdefault(uuid, DriverPages(slabs[uuid]))

    def _counted_bytes(self, uuid: str) -> int:
        for pool in self._pools(uuid):
            pool.refresh()
        return self._pages_of(uuid).counted()

    def _in_use(self, uuid: str, pools: Sequence[Pool] | None = None) -> int:
        """The bytes of live allocations on the GPU. Updates the peak."""
        pools = self._pools(uuid) if pools is None else pools
        return self._noted(uuid, sum([pool.active_bytes() for pool in pools]))

    def _noted(self, uuid: str, in_use: int) -> int:
        """Return the sum of `in_use`, the pools' bytes in use, and the bytes of pitched allocations. Updates the
        peak."""
        if (pitched := self._pitched.get(uuid)) is not None:
            in_use += pitched.in_use
        if uuid not in self._peak or in_use > self._peak[uuid]:
            self._peak[uuid] = in_use
        return in_use

    def _note_peak(self, uuid: str, rising: Pool | None = None) -> None:
        """Update the peak of the GPU's bytes in use, and then let `Pool.hit` skip this update.

        In the pool `rising`, `hit` skips the update until the GPU's bytes in use would exceed the peak. In each other
        pool, `hit` skips the update until that pool's bytes in use grow."""
        pools = self._pools(uuid)
        for pool in pools:
            pool.peak_room = -1  # makes a concurrent `hit` call this method and wait for the lock
        noted = [pool.check_peak() for pool in pools]
        active = [pool.active_bytes() for pool in pools]
        spare = -self._in_use(uuid, pools)
        spare += self._peak[uuid]  # read the peak after `_in_use`, which may have raised the peak
        for pool, size, idle in zip(pools, active, noted, strict=True):
            pool.peak_room = size + (spare if pool is rising else 0)
            pool.skip_peak_check(idle)

    def _new_peak(self, pool: Pool) -> None:
        with self._lock:
            self._note_peak(pool.uuid, pool)

    def _apply_recorded(self) -> None:
        """Stop counting pitched allocations whose finalizers have run, and finish changes that a Ctrl-C interrupted.

        Callers hold the lock.
        """
        for pages in list(self._pages.values()):
            if pages.changes:
                pages.apply_changes()
        while self._freed:
            try:
                count, address, size = self._freed.popleft()
            except IndexError:  # a signal handler removed the last entry
                return
            count.remove(address, size)

    def _retire(self, pool: Pool) -> None:
        """Stop using the pool of a destroyed context, and keep its object alive forever. The pool's memory no longer
        exists, and deleting the pool would abort the process."""
        _discard(self._own, pool.context, pool)
        if self._last is pool:
            self._last = None
        pool.forget()
        _never_freed.append(pool)

    def _pools(self, uuid: str) -> list[Pool]:
        """The pools on this GPU, except those of destroyed contexts.

        Every usage reading calls this method. To save time, the method does not check whether the primary context still
        exists, because the other frameworks keep that context alive.
        """
        pools = [pool for pool in list(self._own.values()) if pool.uuid == uuid]
        if pools:
            ordinal = self._ordinals.get(uuid)
            primary = None if ordinal is None else contexts.primary(ordinal)
            gone = [pool for pool in pools if pool.context != primary and pool.dead()]
            if not gone and not self._others:
                return pools
            for pool in gone:
                self._retire(pool)
        for key, pool in list(self._others.items()):
            if pool.reference() is None:
                self._drop(key, pool)
        return [pool for pool in (*self._own.values(), *self._others.values()) if pool.uuid == uuid]

    def _released(self, uuid: str, serial: int) -> None:
        # A finalizer calls this method, possibly inside an allocation and on any thread. So the method only appends: it
        # takes no lock and makes no CUDA call.
        events = self._events
        if events is not None and serial in self._recorded:
            events.append(TraceEvent(time.time(), self.name, "free", serial, device=self._position(uuid)))

    def _primary(self, handle: int) -> bool:
        """True if `handle` is the handle of a primary context, or if CUDA is not initialised. PyCUDA may have several
        context objects for one primary context."""
        return not contexts.initialised() or handle in map(contexts.primary, self._by_ordinal)

    def _position(self, uuid: str) -> int:
        return list(self._by_ordinal.values()).index(uuid)

    def _uuid(self, drv: Any, current: Any) -> str:
        pool = self._own.get(current.handle)
        if pool is not None:
            return pool.uuid
        device = drv.Context.get_device()
        for ordinal, uuid in self._by_ordinal.items():
            if drv.Device(ordinal) == device:
                return uuid
        raise CapNotApplied(self.name, "the current context's GPU is not in the budget", "name it, or use another GPU")


def _idle_bytes(pool: Pool) -> int:
    return sum([size for _, size in pool.refreshed_figures()[1]])


def _discard(pools: dict[int, Pool], key: int, pool: Pool | None) -> None:
    """Remove `pools[key]` if it is still `pool`. Atomic, because signal handlers run only at calls, and this
    function calls nothing."""
    if key in pools and pools[key] is pool:
        del pools[key]


def _swap_defaults(old: Any, new: Any) -> None:
    """Replace the default argument `old` by `new` in all functions of `pycuda.gpuarray`, because a default argument
    keeps the `mem_alloc` that existed when the function was defined."""
    module = sys.modules.get("pycuda.gpuarray")
    if module is None:
        return
    # During the import of `pycuda.gpuarray`, `GPUArray` may not exist yet. Functions defined later get `new` anyway.
    methods = vars(getattr(module, "GPUArray", object)).values()
    for value in [*vars(module).values(), *methods]:
        if not isinstance(value, FunctionType):
            continue
        if value.__defaults__ and any(default is old for default in value.__defaults__):
            value.__defaults__ = tuple(new if default is old else default for default in value.__defaults__)
        for key, default in (value.__kwdefaults__ or {}).items():
            if default is old:
                value.__kwdefaults__[key] = new  # type: ignore[index]

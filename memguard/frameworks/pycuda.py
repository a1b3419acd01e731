"""PyCUDA: one capped, counted pool behind `mem_alloc` and `gpuarray`, in the device's primary context.

Facts: PyCUDA's pool has no limit of its own, so the cap is checked before it grows; its bins round up
(256 MiB asked, 272 taken), and the driver rounds allocations above 1 MiB up to 2 MiB and packs smaller ones
into 2 MiB slabs (measured), so held counts both. `mem_alloc` is a default argument across `pycuda.gpuarray`,
so those defaults are swapped too. `Device.make_context`, and with it `pycuda.autoinit`, gives the primary
context that the other frameworks use: a second one costs 518 MiB (measured).

Not counted: functions taken from `pycuda.driver` before memguard.init, `drv.Array`, managed memory.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any, ClassVar

from memguard.errors import CapNotApplied
from memguard.frameworks.base import Framework
from memguard.model import Applied, Device, Enforcement, TraceEvent, Usage
from memguard.units import MIB, format_size, round_up

_log = logging.getLogger("memguard")
_SMALL = MIB
"""Up to here the driver packs allocations into 2 MiB slabs; above, each is rounded up to 2 MiB (measured)."""


class PyCUDA(Framework):
    """PyCUDA's device allocations: `mem_alloc`, `mem_alloc_pitch`, `gpuarray` and `DeviceMemoryPool`."""

    name: ClassVar[str] = "pycuda"
    module: ClassVar[str] = "pycuda"
    hook: ClassVar[str] = "pycuda.driver"
    tested: ClassVar[tuple[str, ...]] = ("2026.1",)

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self._lock = threading.RLock()
        self._caps: dict[str, int] = {}
        self._by_ordinal: dict[int, str] = {}
        self._own: dict[int, _Pool] = {}  # by context handle
        self._others: weakref.WeakKeyDictionary[Any, _Pool] = weakref.WeakKeyDictionary()  # the user's own pools
        self._pitched: defaultdict[str, _Pitched] = defaultdict(_Pitched)
        self._events: list[TraceEvent] | None = None
        self._recorded: set[int] = set()
        self._serial = 0

    def _live(self, module: ModuleType) -> bool:
        return bool(self._own or self._others) or _current_context(module) is not None

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any]) -> Applied:
        drv: Any = sys.modules["pycuda.driver"]
        import pycuda.tools as tools

        devices = self.host.devices(ordinals=True)
        if any(device.ordinal is None for device in devices):
            raise CapNotApplied(
                self.name,
                "CUDA's numbering of several GPUs cannot be asked for",
                "pip install 'memguard[cuda]'",
            )
        self._by_ordinal = {device.ordinal: device.uuid for device in devices if device.ordinal is not None}
        self._caps = dict(caps)
        notes = []
        if self._live(drv):
            notes.append("pycuda: was live before memguard.init(): what it allocated until then is not counted")
            if "pycuda.autoinit" in sys.modules:
                notes.append(
                    "pycuda: pycuda.autoinit had made a second CUDA context (+518 MiB measured on an H200); "
                    "import it after memguard.init() and it is served by the primary one"
                )
        return Applied(Enforcement.ENFORCED, self._patch(drv, tools), notes=tuple(notes))

    def usage(self, device: Device) -> Usage | None:
        drv = sys.modules.get("pycuda.driver")
        if drv is None or not self._caps or not self._live(drv):
            return None
        with self._lock:
            pools = self._pools(device.uuid)
            pitched = self._pitched[device.uuid]
            held = sum(p.held() for p in pools) + pitched.held()
            in_use = sum(p.active_bytes() for p in pools) + pitched.large + pitched.small
            idle = sum(p.idle_bytes() for p in pools)
        return Usage(held, in_use, idle)

    def trim(self, device: Device) -> None:
        """`free_held()` of the pools whose context is current on this thread; others can only be freed on theirs."""
        drv = sys.modules.get("pycuda.driver")
        current = _current_context(drv) if drv is not None else None
        if current is None:
            return
        with self._lock:
            for pool in self._pools(device.uuid):
                if pool.context == current.handle:
                    pool.free_held()

    def resize(self, caps: Mapping[str, int]) -> None:
        self._caps = dict(caps)

    def oom_types(self) -> tuple[type[BaseException], ...]:
        drv: Any = sys.modules.get("pycuda.driver")
        return () if drv is None else (drv.MemoryError,)

    def record(self) -> Callable[[], list[TraceEvent]] | None:
        if not self._caps:
            return None
        self._events = []

        def stop() -> list[TraceEvent]:
            events, self._events = self._events or [], None
            self._recorded.clear()
            return events

        return stop

    def forked(self) -> None:
        self._lock, self._caps = threading.RLock(), {}

    def _patch(self, drv: Any, tools: Any) -> Callable[[], None]:
        raw_alloc, raw_pitch = drv.mem_alloc, drv.mem_alloc_pitch
        raw_context, raw_pool = drv.Device.make_context, tools.DeviceMemoryPool

        def mem_alloc(size: int) -> Any:
            """Capped by memguard. Bytes in, an allocation out; raises pycuda.driver.MemoryError at the cap."""
            current = _current_context(drv)
            if current is None or size <= 0:
                return raw_alloc(size)  # PyCUDA's own error
            return self._allocate(drv, self._pool_here(drv, current, raw_pool), size)

        def mem_alloc_pitch(width: int, height: int, access_size: int) -> Any:
            """Capped by memguard; the pitch is the driver's choice, at least a multiple of 512 bytes."""
            current = _current_context(drv)
            if current is None:
                return raw_pitch(width, height, access_size)
            uuid = self._uuid(drv, current)
            with self._lock:
                pitched = self._pitched[uuid]
                self._make_room(drv, uuid, lambda: pitched.growth(round_up(width, 512) * height))
                allocation, pitch = raw_pitch(width, height, access_size)
                pitched.add(pitch * height)
            weakref.finalize(allocation, pitched.remove, pitch * height).atexit = False
            return allocation, pitch

        def make_context(device: Any, flags: int = 0) -> Any:
            """The primary context, retained and pushed: PyCUDA then shares the one of the other frameworks."""
            if flags:
                _log.info("pycuda: make_context flags %s are not set on the shared primary context", flags)
            context = device.retain_primary_context()
            context.push()
            return context

        framework = self

        class DeviceMemoryPool(raw_pool):  # type: ignore[misc, valid-type]
            """A pool of the user's own: it shares PyCUDA's cap."""

            def allocate(self, size: int) -> Any:
                current = _current_context(drv)
                if current is None or size <= 0:
                    return super().allocate(size)
                with framework._lock:
                    tracked = framework._others.get(self)
                    if tracked is None:
                        uuid = framework._uuid(drv, current)
                        tracked = _Pool(weakref.ref(self), current.handle, uuid, raw_pool)
                        framework._others[self] = tracked
                return framework._allocate(drv, tracked, size)

            def free_held(self) -> None:
                with framework._lock:
                    tracked = framework._others.get(self)
                    if tracked is None:
                        super().free_held()
                    else:
                        tracked.free_held()

        drv.mem_alloc, drv.mem_alloc_pitch = mem_alloc, mem_alloc_pitch
        drv.Device.make_context = make_context
        tools.DeviceMemoryPool = DeviceMemoryPool
        _swap_defaults(raw_alloc, mem_alloc)

        def undo() -> None:
            drv.mem_alloc, drv.mem_alloc_pitch = raw_alloc, raw_pitch
            drv.Device.make_context = raw_context
            tools.DeviceMemoryPool = raw_pool
            _swap_defaults(mem_alloc, raw_alloc)  # also those of a gpuarray imported after us
            current = _current_context(drv)
            with self._lock:
                for pool in self._own.values():
                    if current is not None and pool.context == current.handle:
                        pool.free_held()
                self._own.clear()  # live arrays keep their pool alive; it goes with the last of them
                self._caps = {}

        return undo

    def _pool_here(self, drv: Any, current: Any, make: Any) -> _Pool:
        with self._lock:
            pool = self._own.get(current.handle)
            if pool is None:
                made = make()
                pool = _Pool(lambda: made, current.handle, self._uuid(drv, current), make)
                self._own[current.handle] = pool
            return pool

    def _allocate(self, drv: Any, pool: _Pool, size: int) -> Any:
        with self._lock:
            bin_size = pool.bin_size(size)
            if not pool.has_free(bin_size):
                self._make_room(drv, pool.uuid, lambda: pool.growth(bin_size), size)
            allocation = pool.take(size, bin_size)
            self._serial += 1
            serial = self._serial
            if self._events is not None:
                self._recorded.add(serial)
                self._events.append(TraceEvent(time.time(), self.name, "alloc", serial, size))
        weakref.finalize(allocation, self._released, pool, bin_size, serial).atexit = False
        return allocation

    def _make_room(self, drv: Any, uuid: str, growth: Callable[[], int], asked: int | None = None) -> None:
        """Raise PyCUDA's own MemoryError where growing passes the cap, even without the idle blocks."""
        cap = self._caps.get(uuid)
        if cap is None or self._held(uuid) + growth() <= cap:
            return
        current = _current_context(drv)
        for pool in self._pools(uuid):
            if current is not None and pool.context == current.handle:
                pool.free_held()
        held, wanted = self._held(uuid), growth()
        if held + wanted > cap:
            raise drv.MemoryError(
                f"out of memory: asked for {format_size(asked or wanted)} (takes {format_size(wanted)}), "
                f"holds {format_size(held)} of the {format_size(cap)} that the memguard budget gives pycuda"
            )

    def _held(self, uuid: str) -> int:
        return sum(p.held() for p in self._pools(uuid)) + self._pitched[uuid].held()

    def _pools(self, uuid: str) -> list[_Pool]:
        return [p for p in (*self._own.values(), *self._others.values()) if p.uuid == uuid]

    def _released(self, pool: _Pool, bin_size: int, serial: int) -> None:
        # May run inside any allocation, on any thread: an append and a subtraction, no lock, no CUDA call.
        pool.active[bin_size] -= 1
        events = self._events
        if events is not None and serial in self._recorded:
            events.append(TraceEvent(time.time(), self.name, "free", serial))

    def _uuid(self, drv: Any, current: Any) -> str:
        pool = self._own.get(current.handle)
        if pool is not None:
            return pool.uuid
        device = drv.Context.get_device()
        for ordinal, uuid in self._by_ordinal.items():
            if drv.Device(ordinal) == device:
                return uuid
        raise CapNotApplied(self.name, "the current context's GPU is not in the budget", "name it, or use another GPU")


class _Pitched:
    """Pitched allocations on one GPU: bytes asked of the driver, and the pages it takes for them."""

    def __init__(self) -> None:
        self.large = self.small = self._slabs = 0

    def growth(self, size: int) -> int:
        return round_up(size) if size > _SMALL else max(round_up(self.small + size) - self._slabs, 0)

    def add(self, size: int) -> None:
        if size > _SMALL:
            self.large += round_up(size)
        else:
            self.small += size
            self._slabs = max(self._slabs, round_up(self.small))

    def remove(self, size: int) -> None:
        if size > _SMALL:
            self.large -= round_up(size)
        else:
            self.small -= size
            self._slabs = self._slabs if self.small else 0  # a slab goes back when its last piece does

    def held(self) -> int:
        return self.large + self._slabs


class _Pool:
    """A PyCUDA pool with what it does not tell: how many blocks of each bin exist and are handed out.

    `active` may count too many (an allocation freed by hand counts until its object dies), never too few,
    so a block reported as free is free.

    One small block always lies idle in the pool: PyCUDA's pool takes the current context when its first block
    is given back, and where none is current, as at exit or on another thread, that aborts the process (measured).
    """

    def __init__(self, pool: Callable[[], Any], context: int, uuid: str, raw: Any) -> None:
        self.context, self.uuid = context, uuid
        self.active: Counter[int] = Counter()
        self._pool, self._raw = pool, raw  # a pool of the user's own is referred to weakly
        self._blocks: Counter[int] = Counter()
        self._slabs = 0

    def bin_size(self, size: int) -> int:
        pool = self._pool()
        return int(pool.alloc_size(pool.bin_number(size)))

    def has_free(self, bin_size: int) -> bool:
        return self._there() and self._blocks[bin_size] > self.active[bin_size]

    def growth(self, bin_size: int) -> int:
        """Bytes by which `held` grows with one more block of this size."""
        there = self._there()
        large = round_up(bin_size) if bin_size > _SMALL else 0
        slabs = max(self._slabs, self._slabs_with(0 if large else bin_size))
        return large + (slabs - max(self._slabs, self._slabs_with(0)) if there else slabs)

    def take(self, size: int, bin_size: int) -> Any:
        allocation = self._take(size, bin_size)
        self.active[bin_size] += 1
        self._keep_one_idle()
        return allocation

    def free_held(self) -> None:
        pool = self._pool()
        if pool is None:
            return
        self._raw.free_held(pool)
        self._blocks &= self.active
        if not self._small():  # a slab goes back when its last piece does: until then none is counted as gone
            self._slabs = 0
        self._keep_one_idle()

    def held(self) -> int:
        """Bytes taken from the driver: what it rounds the pool's blocks up to."""
        if not self._there():
            return 0
        large = sum(round_up(size) * count for size, count in self._blocks.items() if size > _SMALL)
        return large + max(self._slabs, self._slabs_with(0))

    def active_bytes(self) -> int:
        pool = self._pool()
        return int(pool.active_bytes) if pool is not None else 0

    def idle_bytes(self) -> int:
        pool = self._pool()
        return int(pool.managed_bytes - pool.active_bytes) if pool is not None else 0

    def _take(self, size: int, bin_size: int) -> Any:
        pool = self._pool()
        before = pool.managed_bytes
        counted = self.has_free(bin_size)  # freed by hand and given back already, it may not be there any more
        try:
            allocation = self._raw.allocate(pool, size)
        except BaseException:
            if pool.managed_bytes != before:  # it gave idle blocks back, and still the driver refused
                self.free_held()
            raise
        grown = pool.managed_bytes - before
        if grown not in (0, bin_size):
            # The driver refused once, and PyCUDA gave idle blocks back, who knows which: now all of them are gone.
            self._raw.free_held(pool)
            self._blocks, counted = self._blocks & self.active, False
        if grown != 0 and not counted:
            self._blocks[bin_size] += 1
            self._slabs = max(self._slabs, round_up(self._small()))
        return allocation

    def _keep_one_idle(self) -> None:
        pool = self._pool()
        if pool.held_blocks == 0 and pool.managed_bytes:
            try:
                self._take(1, self.bin_size(1))  # dropped at once: the block stays in the pool
            except Exception as error:  # the card is full, which is no reason to fail what is there
                _log.debug("pycuda: no idle block for the pool: %s", error)

    def _there(self) -> bool:
        """Whether the pool has any memory; where not, no block of it is left either."""
        pool = self._pool()
        if pool is not None and pool.managed_bytes:
            return True
        self._blocks.clear()
        self._slabs = 0
        return False

    def _slabs_with(self, size: int) -> int:
        """Slabs for the small blocks, one of `size` and the idle one."""
        idle = self.bin_size(1) if self._pool() is not None else 0
        return round_up(self._small() + size + (0 if self._blocks[idle] > self.active[idle] else idle))

    def _small(self) -> int:
        return sum(size * count for size, count in self._blocks.items() if size <= _SMALL)


def _current_context(drv: Any) -> Any:
    """The thread's current context, or None; before `cuInit` PyCUDA raises, which means none as well."""
    try:
        return drv.Context.get_current()
    except drv.Error:
        return None


def _swap_defaults(old: Any, new: Any) -> None:
    """Exchange a default argument across `pycuda.gpuarray`, where `mem_alloc` was captured at definition."""
    module = sys.modules.get("pycuda.gpuarray")
    if module is None:
        return
    for value in [*vars(module).values(), *vars(module.GPUArray).values()]:
        if not isinstance(value, FunctionType):
            continue
        if value.__defaults__ and any(default is old for default in value.__defaults__):
            value.__defaults__ = tuple(new if default is old else default for default in value.__defaults__)
        for key, default in (value.__kwdefaults__ or {}).items():
            if default is old:
                value.__kwdefaults__[key] = new  # type: ignore[index]

"""Numba: a memory manager (EMM plugin) with a cap. It flushes the pending frees before it refuses.

Measured: the plugin must be set before Numba makes its context. Numba has no pool: each array is one allocation from
the driver. Frees are deferred until more than ten, or more than a fifth of the GPU, are pending. What counts is the
pages that the driver takes, including those of pending frees. `Device.reset()` destroys the memory of every framework.

A context that somebody else made has for its device whatever they gave it (`CUdevice`, a number, Numba's own object),
so a GPU is known by its number. All contexts of one GPU share its cap.

Outside the cap: context and modules, managed memory, arrays that others own (`as_cuda_array`), and copies of host
arrays that are given to a kernel: numba-cuda 0.30.4 takes them from cuda.core (`_to_strided_memory_view`), past its own
memory manager.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ClassVar

from memguard._devices import contexts
from memguard._frameworks import rmm
from memguard._frameworks.base import Framework, with_size
from memguard._frameworks.driver_pages import DriverPages, slabs
from memguard._frameworks.replacements import Replacements
from memguard._specs import SPECS
from memguard._types import Applied, Device, Enforcement, Moment, State, Usage
from memguard._units import format_size, round_up
from memguard.errors import CapNotApplied, ConflictingSetting

_DRIVER = "numba.cuda.cudadrv.driver"
_ARRAYS = "numba.cuda.cudadrv.devicearray"


_locks: defaultdict[str, threading.RLock] = defaultdict(threading.RLock)


class _Count:
    """What Numba holds in one context: live arrays, and arrays whose free is pending.

    Finalizers run at any time and on any thread, even inside `taken`. So they only append to the log.
    """

    def __init__(self, uuid: str) -> None:
        self.lock = _locks[uuid]  # of the GPU: its contexts share the cap
        self.peak = 0
        self._pages = DriverPages(slabs[uuid])
        self._sizes: dict[int, int] = {}  # by address, of the live ones
        self._log: deque[tuple[Callable[[int, int], None], int, int]] = deque()

    def pages(self) -> DriverPages:
        """The figures, after applying what finalizers logged. Call with the lock held."""
        while self._log:
            step, address, size = self._log.popleft()
            step(address, size)
        return self._pages

    def taken(self, address: int, size: int) -> None:
        pages = self.pages()
        self._sizes[address] = size
        pages.add(address, size)
        self.peak = max(self.peak, pages.in_use)

    def freeing(self, free: Callable[..., None], handle: Any) -> Callable[..., None]:
        """`free`, wrapped to log when it has run; unchanged if it frees a module, an event or managed memory."""
        try:
            address = int(getattr(handle, "value", handle))
        except (TypeError, ValueError):
            return free
        size = self._sizes.pop(address, None)
        if size is None:
            return free
        self._log.append((self._pages.going, address, size))

        def freed(*args: Any) -> None:
            free(*args)
            self._log.append((self._pages.remove, address, size))

        return freed


class Numba(Framework):
    """Numba's device arrays (`cuda.to_device`, `cuda.device_array`, temporaries of kernels)."""

    spec = SPECS["numba"]

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self._caps: dict[str, int] = {}
        self._manager: Any = None
        self._asked: Any = None  # the memory manager that the user wants
        self._rmm: rmm.Limit | None = None

    def why_absent(self) -> str | None:
        """Not installed, or kept off the GPU by NUMBA_DISABLE_CUDA or NUMBA_ENABLE_CUDASIM."""
        missing = super().why_absent()
        if missing:
            return missing
        for name in ("NUMBA_DISABLE_CUDA", "NUMBA_ENABLE_CUDASIM"):
            if os.environ.get(name, "0").strip() not in ("", "0"):
                return f"{name}={os.environ[name]} keeps numba off the GPU"
        return None

    def state(self) -> State:
        found = super().state()
        return State.ABSENT if found is State.IMPORTED and self.why_absent() else found

    def _live(self, module: ModuleType) -> bool:
        return bool(_contexts())

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any]) -> Applied:
        driver: Any = sys.modules.get(_DRIVER)
        needed = ("set_memory_manager", "NumbaCUDAMemoryManager", "_memory_manager", "_PendingDeallocs", "CudaAPIError")
        lacking = [name for name in needed if not hasattr(driver, name)]
        if driver is None or lacking:
            raise CapNotApplied(
                self.name, f"this numba.cuda has no {lacking[0] if lacking else 'driver'}", "pip install -U numba-cuda"
            )
        before = driver._memory_manager
        chosen = str(getattr(getattr(driver, "config", None), "CUDA_MEMORY_MANAGER", "default"))
        if chosen.startswith("rmm") or str(getattr(before, "__module__", "")).startswith("rmm."):
            return self._apply_rmm(caps)
        if chosen != "default" or before not in (None, driver.NumbaCUDAMemoryManager):
            setting = f"NUMBA_CUDA_MEMORY_MANAGER={chosen}" if chosen != "default" else f"set_memory_manager({before})"
            raise ConflictingSetting(
                self.name,
                setting,
                "allocates for Numba, past any cap",
                "remove it, or leave numba out of the budget",
            )
        live = [context.memory_manager for context in _contexts()]
        if not all(hasattr(manager, "memguard") for manager in live):
            raise CapNotApplied(
                self.name,
                "it was live before memguard.init(): its context keeps its memory manager",
                "call memguard.init() before Numba's first array or kernel",
            )
        manager: Any = type(live[0]) if live else _capped(driver)  # left by an earlier budget
        replaced, self._asked = Replacements(), before

        def undo() -> None:
            replaced.undo()
            if driver._memory_manager is manager:
                driver._memory_manager = self._asked
            manager.memguard = self._manager = None  # contexts made meanwhile keep it; it no longer refuses

        self.changes.add(self.name, undo)
        driver.set_memory_manager(manager)
        if driver._memory_manager is not manager:
            driver._memory_manager = before
            raise CapNotApplied(
                self.name,
                "its memory manager reads back as another one",
                "report this with the version; until then leave numba out of the budget",
            )
        self._caps, self._manager, manager.memguard = dict(caps), manager, self

        try:
            for owner in (driver, sys.modules.get("numba.cuda")):
                replaced.put(owner, "set_memory_manager", lambda original: self._set_later(original, driver))
        except BaseException:
            undo()
            raise
        return Applied(Enforcement.ENFORCED, undo)

    def _set_later(self, original: Callable[..., Any], driver: Any) -> Callable[..., Any]:
        def set_memory_manager(mm_plugin: Any) -> Any:
            """Numba's own manager is the capped one; another is told at once, unless no new context can get it."""
            if self._manager is None or mm_plugin not in (driver.NumbaCUDAMemoryManager, self._manager):
                answer = original(mm_plugin)
            else:
                answer, self._asked = original(self._manager), driver.NumbaCUDAMemoryManager
            self._changed()
            return answer

        return set_memory_manager

    def usage(self, device: Device) -> Usage | None:
        """From memguard's own count of Numba's allocations; None if Numba has no context on the device."""
        managers = _managers(device.uuid)
        if not managers:
            return None
        if self._rmm is not None:
            return self._rmm.usage(device.uuid)
        if self._manager is None:
            return None
        if not isinstance(managers[0], self._manager):
            return Usage(None, None)  # another memory manager took its place, and nobody counts
        counts: list[_Count] = [manager.deallocations.count for manager in _sharing(managers[0])]
        with counts[0].lock:
            pages = [count.pages() for count in counts]
            held, in_use = sum(one.held() for one in pages), sum(one.in_use for one in pages)
            return Usage(
                held, in_use, sum(one.reclaimable() for one in pages), peak=sum(count.peak for count in counts)
            )

    def trim(self, device: Device) -> None:
        """Flush the frees that are pending on the device."""
        for context in _contexts():
            pending = getattr(context.memory_manager, "deallocations", None)
            if pending is not None and _uuid(context) == device.uuid:
                count = getattr(pending, "count", None)  # an allocation may flush them at the same time
                lock = count.lock if count is not None else contextlib.nullcontext()
                with lock, contexts.pushed(int(context.device.id)) as there:
                    if there:
                        pending.clear()

    def resize(self, caps: Mapping[str, int]) -> None:
        if self._rmm is not None:
            return super().resize(caps)
        self._caps = dict(caps)
        return None

    def footprint(self, size: int) -> int:
        return round_up(size)

    def unseen(self) -> str | None:
        return rmm.UNSEEN if self._rmm is not None else None

    def uncounted(self) -> str | None:
        if not hasattr(sys.modules.get(_ARRAYS), "_to_strided_memory_view"):  # in numba-cuda 0.30.4, which was read
            return None
        return "copies of host arrays given to numba's kernels; cuda.to_device counts them"

    def drift(self) -> list[str]:
        if self._rmm is not None:
            return self._rmm.drift(self.name)
        driver: Any = sys.modules.get(_DRIVER)
        if self._manager is None or driver is None:
            return []
        others = [c.memory_manager for c in _contexts() if not isinstance(c.memory_manager, self._manager)]
        if driver._memory_manager is self._manager and not others:
            return []
        name = type(others[0]).__name__ if others else getattr(driver._memory_manager, "__name__", "another")
        return [f"numba: its memory manager was replaced after memguard.init ({name}): the cap does not hold"]

    def forked(self) -> None:
        self._caps = {}
        _locks.clear()  # another thread of the parent may have held the old ones
        for manager in list(self._manager.alive) if self._manager is not None else ():
            manager.deallocations.count.lock = _locks[manager.uuid]

    def allocate(self, driver: Any, manager: Any, size: int, ask: Callable[[int], Any]) -> Any:
        """Allocate through `ask`. Raises Numba's own error if the cap does not allow it, even with nothing pending."""
        count, cap = manager.deallocations.count, self._caps.get(manager.uuid)
        whole, others = cap or 0, [other.deallocations.count for other in _sharing(manager)[1:]]
        elsewhere = sum(other.pages().held() for other in others)  # in other contexts of the GPU
        cap = None if cap is None else max(cap - elsewhere, 0)
        for _ in range(2):
            if cap is None or count.pages().fits(size, cap):
                try:
                    memory = ask(size)
                except driver.CudaAPIError as error:  # its text names no size
                    with_size(error, size)
                    raise
                count.taken(int(memory.device_pointer_value or 0), size)
                if cap is None or count.pages().held() <= cap:
                    return memory
                del memory  # it fitted no hole in a slab, so the driver opened another slab
            manager.deallocations.clear()
        raise with_size(
            driver.CudaAPIError(
                driver.binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY if hasattr(driver, "binding") else 2,
                f"Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY: asked for {format_size(size)}, holds "
                f"{format_size(elsewhere + count.pages().held())} of the {format_size(whole)} that the memguard "
                "budget gives numba",
            ),
            size,
        )

    def tell(self, error: BaseException, uuid: str, size: int) -> None:
        """Tell of a request that was refused, when the count's lock is free again."""
        if uuid in self._caps:
            here = threading.get_ident()
            self._refused(error, Moment(self.name, "refusal", time.time(), uuid, size, thread=here))

    def _apply_rmm(self, caps: Mapping[str, int]) -> Applied:
        try:
            self._rmm, applied = rmm.apply(self.name, caps, rmm.ordinals(self.name, self.host))
        except ImportError as error:
            raise CapNotApplied(
                self.name, f"it is set to allocate through RMM, but {error}", "unset NUMBA_CUDA_MEMORY_MANAGER"
            ) from error
        return applied


def _capped(driver: Any) -> type:
    """The class of memory managers that ask the adapter in `memguard` before they take memory."""

    class Pending(driver._PendingDeallocs):  # type: ignore[misc]
        """Numba's pending frees. The count learns when a free becomes pending, and when the driver has the memory."""

        def __init__(self, uuid: str) -> None:
            super().__init__()
            self.count = _Count(uuid)

        def add_item(self, dtor: Callable[..., None], handle: Any, size: int = 0) -> None:
            super().add_item(self.count.freeing(dtor, handle), handle, size)

    class MemguardMemoryManager(driver.NumbaCUDAMemoryManager):  # type: ignore[misc]
        """Numba's own memory manager, capped by memguard."""

        memguard: ClassVar[Numba | None] = None
        alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
        """Those that have allocated since their last reset, of every GPU."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # With no context Numba only asks for the version. A device that is not known yet is the current one of the
            # first allocation.
            self.uuid = "" if self.context is None else _uuid(self.context)
            self.deallocations = Pending(self.uuid)

        def reset(self) -> None:
            super().reset()
            self.alive.discard(self)  # its context may be gone; if not, the next allocation counts it again

        def memalloc(self, size: int) -> Any:
            if not self.uuid and (here := _current_uuid()):
                self.uuid, self.deallocations.count = here, _Count(here)
            self.alive.add(self)
            try:
                return self._counted(size)
            except driver.CudaAPIError as error:
                framework = self.memguard
                if framework is not None and "OUT_OF_MEMORY" in str(error):
                    framework.tell(error, self.uuid, size)
                raise

        def _counted(self, size: int) -> Any:
            count: _Count = self.deallocations.count
            with count.lock:
                framework = self.memguard
                if framework is not None:
                    return framework.allocate(driver, self, size, super().memalloc)
                memory = super().memalloc(size)
                count.taken(int(memory.device_pointer_value or 0), size)
                return memory

    return MemguardMemoryManager


def _contexts() -> list[Any]:
    """Numba's existing contexts. Never makes one."""
    module = sys.modules.get(_DRIVER)
    devices = getattr(getattr(module, "driver", None), "devices", None) or {}
    return [device.primary_context for device in list(devices.values()) if device.primary_context is not None]


def _managers(uuid: str) -> list[Any]:
    return [context.memory_manager for context in _contexts() if _uuid(context) == uuid]


def _sharing(manager: Any) -> list[Any]:
    """The capped managers of all contexts on the GPU of this one, which is the first."""
    return [manager, *(other for other in list(manager.alive) if other is not manager and other.uuid == manager.uuid)]


def _uuid(context: Any) -> str:
    """The UUID of a context's GPU; "" if it cannot be known.

    Its device is Numba's own object, or what somebody else made the context with: a `CUdevice` of cuda-python, a
    number of ctypes or a plain one. These are CUDA's ordinals, as are Numba's numbers.
    """
    device = context.device
    try:
        known = getattr(device, "uuid", None)
        if known:
            return _as_nvml(known)
        ordinal = int(getattr(device, "value", getattr(device, "id", device)))
    except (AttributeError, ReferenceError, TypeError, ValueError):  # a device that is gone, or no device at all
        return ""
    return _of_ordinal(ordinal)


def _of_ordinal(ordinal: int) -> str:
    driver = getattr(sys.modules.get(_DRIVER), "driver", None)
    known = getattr((getattr(driver, "devices", None) or {}).get(ordinal), "uuid", None)
    if known:
        return _as_nvml(known)
    return next((uuid for uuid, number in contexts.ordinals().items() if number == ordinal), "")


def _current_uuid() -> str:
    """The UUID of the GPU whose context is current on this thread; "" if there is none."""
    ordinal = contexts.current()
    return "" if ordinal is None else _of_ordinal(ordinal)


def _as_nvml(uuid: Any) -> str:
    text = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"

"""Numba: a memory manager (EMM plugin) with a cap, and its pending frees flushed before it refuses.

Facts: the plugin must be set before Numba makes its context; Numba has no pool: each array is an allocation of the
driver's, freed later, when more than ten or a fifth of the card are pending. What is counted is what the driver makes
of them, pending ones included. `Device.reset()` destroys everybody's memory, not only Numba's.

Outside the cap: context and modules, managed memory, arrays that others own (`as_cuda_array`).
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ClassVar

from memguard.devices import contexts
from memguard.errors import CapNotApplied, ConflictingSetting
from memguard.frameworks import _rmm
from memguard.frameworks._driver_bytes import DriverBytes
from memguard.frameworks.base import Framework
from memguard.model import Applied, Device, Enforcement, State, Usage
from memguard.units import format_size, round_up

_log = logging.getLogger("memguard")
_DRIVER = "numba.cuda.cudadrv.driver"


class _Count:
    """What Numba holds on one GPU: live arrays and those whose free is pending."""

    def __init__(self) -> None:
        self.driver = DriverBytes()
        self.sizes: dict[int, int] = {}  # by address, until the driver has it back
        self.pending = 0
        self.peak = 0


class Numba(Framework):
    """Numba's device arrays (`cuda.to_device`, `cuda.device_array`, temporaries of kernels)."""

    name: ClassVar[str] = "numba"
    module: ClassVar[str] = "numba"
    hook: ClassVar[str] = "numba.cuda"
    tested: ClassVar[tuple[str, ...]] = ("0.30.4",)

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self._lock = threading.RLock()
        self._caps: dict[str, int] = {}
        self._counts: defaultdict[str, _Count] = defaultdict(_Count)
        self._manager: type | None = None
        self._rmm: _rmm.Limit | None = None

    def why_absent(self) -> str | None:
        """Not installed, or told to keep off the GPU (NUMBA_DISABLE_CUDA, NUMBA_ENABLE_CUDASIM)."""
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
        return any(True for _ in _contexts())

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
            self._rmm, applied = _rmm.apply(self.name, caps, self._ordinals())
            return applied
        if self._live(driver):
            raise CapNotApplied(
                self.name,
                "it was live before memguard.init(): its context keeps the memory manager that it has",
                "call memguard.init() before Numba's first array or kernel",
            )
        if chosen != "default" or before not in (None, driver.NumbaCUDAMemoryManager):
            setting = f"NUMBA_CUDA_MEMORY_MANAGER={chosen}" if chosen != "default" else f"set_memory_manager({before})"
            raise ConflictingSetting(
                self.name, setting, "allocates for Numba, past any cap", "remove it, or leave numba out of the budget"
            )
        self._caps = dict(caps)
        self._manager = self._capped(driver)
        driver.set_memory_manager(self._manager)
        if driver._memory_manager is not self._manager:
            raise CapNotApplied(self.name, "its memory manager reads back as another", "report this with its version")

        def undo() -> None:
            if driver._memory_manager is self._manager:
                driver._memory_manager = before
            with self._lock:  # contexts made meanwhile keep our manager: it refuses nothing any more
                self._caps, self._manager = {}, None

        return Applied(Enforcement.ENFORCED, undo)

    def usage(self, device: Device) -> Usage | None:
        """From memguard's own count of Numba's allocations; None where Numba has no context on the device."""
        if _DRIVER not in sys.modules or (self._manager is None and self._rmm is None):
            return None
        if self._rmm is not None:
            return self._rmm.usage(device.uuid)
        if not any(_uuid(context) == device.uuid for context in _contexts()):
            return None
        with self._lock:
            count = self._counts[device.uuid]
            held, in_use = count.driver.held(), count.driver.in_use() - count.pending
            return Usage(held, in_use, min(count.pending, held), peak=count.peak)

    def trim(self, device: Device) -> None:
        """Flush the frees that are pending on the device."""
        for context in list(_contexts()):
            if _uuid(context) == device.uuid:
                with contexts.pushed(int(context.device.id)) as there:
                    if there:
                        context.memory_manager.deallocations.clear()

    def resize(self, caps: Mapping[str, int]) -> None:
        if self._rmm is not None:
            return super().resize(caps)
        self._caps = dict(caps)
        return None

    def footprint(self, size: int) -> int:
        return round_up(size)

    def oom_types(self) -> tuple[type[BaseException], ...]:
        driver: Any = sys.modules.get(_DRIVER)
        return () if driver is None else (driver.CudaAPIError,)

    def drift(self) -> list[str]:
        driver: Any = sys.modules.get(_DRIVER)
        if self._manager is None or driver is None:
            return []
        others = [c.memory_manager for c in _contexts() if not isinstance(c.memory_manager, self._manager)]
        if driver._memory_manager is self._manager and not others:
            return []
        name = type(others[0]).__name__ if others else getattr(driver._memory_manager, "__name__", "another")
        return [f"numba: its memory manager was replaced after memguard.init ({name}): the cap does not hold"]

    def forked(self) -> None:
        self._lock, self._caps = threading.RLock(), {}

    def _capped(self, driver: Any) -> type:
        framework = self

        class Pending(driver._PendingDeallocs):  # type: ignore[misc]
            """Numba's pending frees; it is told when one of ours is pending, and when the driver has it back."""

            uuid = ""

            def add_item(self, dtor: Callable[..., None], handle: Any, size: int = 0) -> None:
                super().add_item(framework._freeing(self.uuid, dtor, handle), handle, size)

        class MemguardMemoryManager(driver.NumbaCUDAMemoryManager):  # type: ignore[misc]
            """Numba's own memory manager, capped by memguard."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.deallocations = Pending()
                if self.context is not None:
                    self.deallocations.uuid = _uuid(self.context)

            def memalloc(self, size: int) -> Any:
                with framework._lock:
                    framework._make_room(driver, self.deallocations, size)
                    memory = super().memalloc(size)
                    framework._taken(self.deallocations.uuid, int(memory.device_pointer_value or 0), size)
                return memory

        return MemguardMemoryManager

    def _make_room(self, driver: Any, pending: Any, size: int) -> None:
        """Raise Numba's own out-of-memory error where `size` more passes the cap, even without the pending frees."""
        cap = self._caps.get(pending.uuid)
        count = self._counts[pending.uuid]
        if cap is None or count.driver.held() + count.driver.growth(size) <= cap:
            return
        pending.clear()
        held, wanted = count.driver.held(), count.driver.growth(size)
        if held + wanted > cap:
            raise driver.CudaAPIError(
                driver.binding.CUresult.CUDA_ERROR_OUT_OF_MEMORY,
                f"Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY: asked for {format_size(size)}, holds "
                f"{format_size(held)} of the {format_size(cap)} that the memguard budget gives numba",
            )

    def _taken(self, uuid: str, address: int, size: int) -> None:
        count = self._counts[uuid]
        count.sizes[address] = size
        count.driver.add(size)
        count.peak = max(count.peak, count.driver.in_use() - count.pending)

    def _freeing(self, uuid: str, free: Callable[..., None], handle: Any) -> Callable[..., None]:
        """`free`, counted where it is of an array of ours. Finalizers call this: on any thread, at any time."""
        try:
            address = int(handle)
        except (TypeError, ValueError):  # a module or an event
            return free
        with self._lock:
            count = self._counts[uuid]
            size = count.sizes.pop(address, None)
            if size is None:
                return free
            count.pending += size

        @functools.wraps(free)
        def freed(*args: Any) -> None:
            free(*args)
            with self._lock:
                count.pending -= size
                count.driver.remove(size)

        return freed

    def _ordinals(self) -> dict[str, int]:
        devices = self.host.devices(ordinals=True)
        return {d.uuid: d.ordinal if d.ordinal is not None else d.index for d in devices}


def _contexts() -> list[Any]:
    """Numba's contexts that exist. Asking makes none."""
    module = sys.modules.get(_DRIVER)
    devices = getattr(getattr(module, "driver", None), "devices", None) or {}
    return [device.primary_context for device in list(devices.values()) if device.primary_context is not None]


def _uuid(context: Any) -> str:
    uuid = str(context.device.uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"

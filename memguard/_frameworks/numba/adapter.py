"""Numba: a memory manager (EMM plugin) with a cap and a pool, which releases free blocks before it refuses.

Measured: the plugin must be set before Numba creates its context. Numba itself has no pool: each array is one driver
allocation. Numba defers frees until more than ten, or more than a fifth of the GPU, are pending. The cap counts the
driver's pages, including those of pending frees and of pooled blocks. `Device.reset()` destroys the memory of every
framework.

A context created by other code has that code's device object (`CUdevice`, a number, Numba's own object), so memguard
identifies a GPU by its number. All contexts of one GPU share its cap.

Outside the cap: context and modules, managed memory, arrays owned by other code (`as_cuda_array`), and copies of host
arrays passed to a kernel: numba-cuda 0.30.4 allocates them from cuda.core (`_to_strided_memory_view`) and bypasses its
own memory manager.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memguard._base.locks import LockOrder, ordered
from memguard._base.logs import log as _log
from memguard._base.types import Applied, Device, Drift, Enforcement, Usage, usage_of
from memguard._base.units import round_up
from memguard._devices import contexts
from memguard._frameworks.base import shortage_of
from memguard._frameworks.numba.contexts import ARRAYS, DRIVER, managers_on, numba_contexts, uuid_of
from memguard._frameworks.numba.spec import SPEC
from memguard._frameworks.replacements import Replacements
from memguard._frameworks.rmm import resource
from memguard.errors import CapNotApplied, ConflictingSetting

if TYPE_CHECKING:
    from memguard._frameworks.numba.accounting import Bank


class Numba(resource.RmmClient):
    """Numba's device arrays (`cuda.to_device`, `cuda.device_array`, temporaries of kernels)."""

    spec = SPEC

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self.caps: dict[str, int] = {}
        self._manager: Any = None
        self._asked: Any = None  # the user's memory manager

    def why_absent(self) -> str | None:
        """Not installed, or kept off the GPU by NUMBA_DISABLE_CUDA or NUMBA_ENABLE_CUDASIM."""
        missing = super().why_absent()
        if missing:
            return missing
        for name in ("NUMBA_DISABLE_CUDA", "NUMBA_ENABLE_CUDASIM"):
            if os.environ.get(name, "0").strip() not in ("", "0"):
                return f"{name}={os.environ[name]} keeps numba off the GPU"
        return None

    def _live(self, module: ModuleType) -> bool:
        return bool(numba_contexts())

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any]) -> Applied:
        driver: Any = sys.modules.get(DRIVER)
        needed = (
            "set_memory_manager", "NumbaCUDAMemoryManager", "_memory_manager", "_PendingDeallocs", "CudaAPIError",
            "MemoryPointer", "OwnedPointer",
        )  # fmt: skip
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
        live = [context.memory_manager for context in numba_contexts()]
        if not all(hasattr(manager, "memguard") for manager in live):
            raise CapNotApplied(
                self.name,
                "it was live before memguard.init(): its context keeps its memory manager",
                "call memguard.init() before Numba's first array or kernel",
            )
        from memguard._frameworks.numba import watch  # imported only after Numba
        from memguard._frameworks.numba.manager import capped

        manager: Any = type(live[0]) if live else capped(driver)  # from an earlier budget
        replaced, self._asked = Replacements(), before

        def undo() -> None:
            manager.pooling = False
            watch.lose(driver)
            replaced.undo()
            if driver._memory_manager is manager:
                driver._memory_manager = self._asked
            manager.memguard = self._manager = None  # contexts created meanwhile keep it; it no longer refuses
            _give_back(manager.banks)

        def streams_are_others() -> None:
            if manager.pooling:
                manager.pooling = False
                self._say("numba: it works on a stream that is not its own: what it frees goes to the driver, unpooled")

        self.changes.add(self.name, undo)
        driver.set_memory_manager(manager)
        if driver._memory_manager is not manager:
            driver._memory_manager = before
            raise CapNotApplied(
                self.name,
                "its memory manager reads back as another one",
                "report this with the version; until then leave numba out of the budget",
            )
        self.caps, self._manager, manager.memguard = dict(caps), manager, self

        try:
            for owner in (driver, sys.modules.get("numba.cuda")):
                replaced.put(owner, "set_memory_manager", lambda original: self._set_later(original, driver))
            manager.pooling = watch.watch(driver, replaced, streams_are_others)
        except BaseException:
            undo()
            raise
        return Applied(Enforcement.ENFORCED, undo)

    def _set_later(self, original: Callable[..., Any], driver: Any) -> Callable[..., Any]:
        def set_memory_manager(mm_plugin: Any) -> Any:
            """Numba's own manager means the capped one; another is reported at once, unless no new context can get
            it."""
            if self._manager is None or mm_plugin not in (driver.NumbaCUDAMemoryManager, self._manager):
                answer = original(mm_plugin)
            else:
                answer, self._asked = original(self._manager), driver.NumbaCUDAMemoryManager
            self._changed()
            return answer

        return set_memory_manager

    def usage(self, device: Device) -> Usage | None:
        """From memguard's own count of Numba's allocations; None if Numba has no context on the device."""
        managers = managers_on(device.uuid)
        if not managers:
            return None
        if self._rmm is not None:
            return self._rmm.usage(device.uuid)
        if not isinstance(managers[0], self._manager or ()):
            return Usage(None, None)  # Numba is not in the budget, or another manager is set: nothing counts its memory
        bank: Bank = managers[0].bank
        if managers[0].alone():
            held, in_use, reclaimable, peak = managers[0].usage()
            return usage_of((held, in_use, reclaimable, None, None, peak))
        found = [manager.usage() for manager in {managers[0], *bank.all()}]
        held, in_use, reclaimable, peak = (sum(part) for part in zip(*found, strict=True))
        return Usage(held, in_use, reclaimable, peak=peak)

    def trim(self, device: Device) -> None:
        """Flush the frees pending on the device, and release its pool."""
        self._shrink(device, None)

    def give_back(self, device: Device, needed: int) -> None:
        """Flush the pending frees, then free the fewest pooled blocks with at least `needed` bytes of the driver's
        pages. The driver synchronises the GPU before each free."""
        self._shrink(device, needed)

    def _shrink(self, device: Device, needed: int | None) -> None:
        """`needed`: bytes; None for all."""
        for context in numba_contexts():
            manager = context.memory_manager
            pending = getattr(manager, "deallocations", None)
            if pending is not None and uuid_of(context) == device.uuid:
                with contexts.pushed(int(context.device.id)) as there:
                    if there and isinstance(manager, self._manager or ()):
                        with manager.bank.lock:  # an allocation may flush them at the same time
                            got = manager.give_back(needed)
                        needed = None if needed is None else needed - got
                    elif there:
                        pending.clear()
                if needed is not None and needed <= 0:
                    return

    @resource.unless_rmm
    def resize(self, caps: Mapping[str, int]) -> None:
        """Set the cap that the next check reads, even that of a request which has just failed. Pooled blocks above a
        lower cap serve no request: they must be released."""
        self.caps = dict(caps)

    def footprint(self, size: int) -> int:
        return round_up(size)

    @resource.unless_rmm
    def unseen(self) -> str | None:
        return None

    def uncounted(self) -> str | None:
        if not hasattr(sys.modules.get(ARRAYS), "_to_strided_memory_view"):  # read in numba-cuda 0.30.4
            return None
        return "copies of host arrays given to numba's kernels; cuda.to_device counts them"

    @resource.unless_rmm
    def drift(self) -> Sequence[Drift]:
        driver: Any = sys.modules.get(DRIVER)
        if self._manager is None or driver is None:
            return []
        others = [c.memory_manager for c in numba_contexts() if not isinstance(c.memory_manager, self._manager)]
        if driver._memory_manager is self._manager and not others:
            return []
        name = type(others[0]).__name__ if others else getattr(driver._memory_manager, "__name__", "another")
        return [Drift(f"its memory manager was replaced after memguard.init ({name})", "the cap does not hold")]

    def forked(self) -> None:
        self.caps = {}
        if self._manager is None:
            return
        self._manager.pooling = False
        for bank in self._manager.banks.values():
            # Another thread of the parent may have held the old lock.
            bank.lock = ordered(threading.RLock(), LockOrder.ALLOCATOR)

    def room_for(self, error: BaseException, uuid: str, size: int) -> bool:
        """Whether room was made for a failed request. Callers have released the count's lock."""
        shortage = shortage_of(error, self.name, uuid, size)
        return shortage is not None and uuid in self.caps and not self.capturing() and self._short(shortage)

    def tell(self, error: BaseException, uuid: str, size: int) -> None:
        """Report a refused request. Callers have released the count's lock."""
        if uuid in self.caps:
            self._refused(error, uuid, size)

    def _apply_rmm(self, caps: Mapping[str, int]) -> Applied:
        try:
            return self._limit_rmm(caps)
        except ImportError as error:
            raise CapNotApplied(
                self.name, f"it is set to allocate through RMM, but {error}", "unset NUMBA_CUDA_MEMORY_MANAGER"
            ) from error


def _give_back(banks: Mapping[str, Bank]) -> None:
    """Free every pooled block. Never raises: a block that the driver cannot free stays allocated."""
    for bank in list(banks.values()):
        with bank.lock, contexts.capture_safe():
            for manager in bank.all():
                try:
                    manager.drain()
                except Exception as error:
                    _log.debug("numba: its pool was not given back: %s", error)

"""Caps Numba by a memory manager (EMM plugin) that checks the cap at each allocation and pools freed blocks.

Measured: the plugin must be set before Numba creates its context. Numba itself has no pool; each array is one driver
allocation. Numba defers frees until more than ten frees, or more than a fifth of the GPU's memory, are pending. The cap
applies to the driver's pages, including the pages of pending frees and of pooled blocks. `Device.reset()` destroys the
memory of every framework.

The `device` of a Numba context may have the type `CUdevice`, a number type or Numba's own type, depending on the code
that created the context, so memguard identifies a GPU by its CUDA ordinal. All contexts of one GPU share its cap.

The cap does not cover the context and its modules, managed memory, arrays owned by other code (`as_cuda_array`), or the
device copies of host arrays passed to a kernel: numba-cuda 0.30.4 allocates these copies through cuda.core
(`_to_strided_memory_view`), not through the memory manager.
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
from memguard._base.undo import Undo
from memguard._base.units import round_up
from memguard._devices import contexts
from memguard._frameworks.base import attached_shortage
from memguard._frameworks.numba.contexts import ARRAYS, DRIVER, managers_on, numba_contexts, uuid_of
from memguard._frameworks.numba.spec import SPEC
from memguard._frameworks.replacements import Replacements
from memguard._frameworks.rmm import resource
from memguard.errors import CapNotApplied, ConflictingSetting

if TYPE_CHECKING:
    from memguard._frameworks.numba.accounting import ManagerGroup


class Numba(resource.RmmClient):
    """Caps Numba's device arrays (`cuda.to_device`, `cuda.device_array`, temporary arrays of kernels)."""

    spec = SPEC

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self.caps: dict[str, int] = {}
        self._manager: Any = None
        self._user_manager: Any = None

    def why_absent(self) -> str | None:
        """The reason if Numba cannot use a GPU: it is not installed, or NUMBA_DISABLE_CUDA or NUMBA_ENABLE_CUDASIM is
        set. Else None."""
        missing = super().why_absent()
        if missing:
            return missing
        for name in ("NUMBA_DISABLE_CUDA", "NUMBA_ENABLE_CUDASIM"):
            if os.environ.get(name, "0").strip() not in ("", "0"):
                return f"{name}={os.environ[name]} keeps numba off the GPU"
        return None

    def _live(self, module: ModuleType) -> bool:
        return bool(numba_contexts())

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
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
            return self._apply_rmm(caps, undo)
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
        from memguard._frameworks.numba import watch  # imported late, because `watch` needs Numba
        from memguard._frameworks.numba.manager import capped

        manager: Any = type(live[0]) if live else capped(driver)  # reuse the class of an earlier budget
        replaced, self._user_manager = Replacements(), before

        def restore() -> None:
            manager.pooling = False
            watch.stop_pooling(driver)
            replaced.undo()
            if driver._memory_manager is manager:
                driver._memory_manager = self._user_manager
            manager.memguard = self._manager = None  # existing contexts keep this manager, without a cap
            _free_pooled(manager.groups)

        def streams_are_others() -> None:
            if manager.pooling:
                manager.pooling = False
                self._add_note(
                    "numba: it works on a stream that is not its own: what it frees goes to the driver, unpooled"
                )

        undo.add(self.name, restore)
        driver.set_memory_manager(manager)
        if driver._memory_manager is not manager:
            driver._memory_manager = before
            raise CapNotApplied(
                self.name,
                "its memory manager reads back as another one",
                "report this with the version; until then leave numba out of the budget",
            )
        self.caps, self._manager, manager.memguard = dict(caps), manager, self
        for owner in (driver, sys.modules.get("numba.cuda")):
            replaced.put(owner, "set_memory_manager", lambda original: self._set_later(original, driver))
        manager.pooling = watch.watch(driver, replaced, streams_are_others)
        return Applied(Enforcement.ENFORCED)

    def _set_later(self, original: Callable[..., Any], driver: Any) -> Callable[..., Any]:
        def set_memory_manager(mm_plugin: Any) -> Any:
            """If the user sets Numba's own manager, set the capped one instead. Any other manager is set as given; then
            the guard warns immediately that the cap does not hold."""
            if self._manager is None or mm_plugin not in (driver.NumbaCUDAMemoryManager, self._manager):
                answer = original(mm_plugin)
            else:
                answer, self._user_manager = original(self._manager), driver.NumbaCUDAMemoryManager
            self._check_drift_now()
            return answer

        return set_memory_manager

    def usage(self, device: Device) -> Usage | None:
        """Usage as counted by the capped memory managers. None if Numba has no context on the GPU."""
        managers = managers_on(device.uuid)
        if not managers:
            return None
        if self._rmm is not None:
            return self._rmm.usage(device.uuid)
        if not isinstance(managers[0], self._manager or ()):
            return Usage(None, None)  # memguard does not count this manager's memory
        group: ManagerGroup = managers[0].group
        if managers[0].alone():
            held, in_use, reclaimable, peak = managers[0].usage()
            return usage_of((held, in_use, reclaimable, None, None, peak))
        found = [manager.usage() for manager in {managers[0], *group.all()}]
        held, in_use, reclaimable, peak = (sum(part) for part in zip(*found, strict=True))
        return Usage(held, in_use, reclaimable, peak=peak)

    def trim(self, device: Device) -> None:
        """Carry out Numba's pending frees on the GPU, and free all pooled blocks."""
        self._shrink(device, None)

    def trim_partly(self, device: Device, needed: int) -> None:
        """Carry out Numba's pending frees. If they return less than `needed` bytes to the driver, also free the fewest
        pooled blocks that return the rest, because the driver synchronises the GPU at each free."""
        self._shrink(device, needed)

    def _shrink(self, device: Device, needed: int | None) -> None:
        """Free at least `needed` bytes of pending and pooled blocks, or all such blocks if `needed` is None."""
        for context in numba_contexts():
            manager = context.memory_manager
            pending = getattr(manager, "deallocations", None)
            if pending is not None and uuid_of(context) == device.uuid:
                with contexts.pushed(int(context.device.id)) as there:
                    if there and isinstance(manager, self._manager or ()):
                        with manager.group.lock:  # because a concurrent allocation may also carry out pending frees
                            got = manager.trim_partly(needed)
                        needed = None if needed is None else needed - got
                    elif there:
                        pending.clear()
                if needed is not None and needed <= 0:
                    return

    @resource.unless_rmm
    def resize(self, caps: Mapping[str, int]) -> None:
        """Set new caps, which apply from the next check on, also to the retry of a request that has just failed. While
        the held bytes exceed a lowered cap, pooled blocks serve no requests, because they must be freed."""
        self.caps = dict(caps)

    def footprint(self, size: int) -> int:
        return round_up(size)

    @resource.unless_rmm
    def unseen(self) -> str | None:
        return None

    def uncounted(self) -> str | None:
        if not hasattr(sys.modules.get(ARRAYS), "_to_strided_memory_view"):  # present in numba-cuda 0.30.4
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
        for group in self._manager.groups.values():
            # In the parent, another thread may have held the old lock at the fork.
            group.lock = ordered(threading.RLock(), LockOrder.ALLOCATOR)

    def room_for(self, error: BaseException, uuid: str, size: int) -> bool:
        """Ask the guard, for a failed request, to trim other frameworks or raise the cap. True if memory was released
        or the cap rose. Callers have released the managers' lock."""
        shortage = attached_shortage(error, self.name, uuid, size)
        return shortage is not None and uuid in self.caps and not self.capturing() and self._request_room(shortage)

    def report_refusal(self, error: BaseException, uuid: str, size: int) -> None:
        """Report a refused request. Callers have released the managers' lock."""
        if uuid in self.caps:
            self._report_refusal(error, uuid, size)

    def _apply_rmm(self, caps: Mapping[str, int], undo: Undo) -> Applied:
        try:
            return self._limit_rmm(caps, undo)
        except ImportError as error:
            raise CapNotApplied(
                self.name, f"it is set to allocate through RMM, but {error}", "unset NUMBA_CUDA_MEMORY_MANAGER"
            ) from error


def _free_pooled(groups: Mapping[str, ManagerGroup]) -> None:
    """Free all pooled blocks. Logs errors instead of raising; a block that the driver cannot free stays allocated."""
    for group in list(groups.values()):
        with group.lock, contexts.capture_safe():
            for manager in group.all():
                try:
                    manager.drain()
                except Exception as error:
                    _log.debug("numba: its pool was not given back: %s", error)

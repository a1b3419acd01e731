"""Caps a framework that allocates through RMM, by RMM's limiting adaptor around each GPU's memory resource.

RMM's `LimitingResourceAdaptor` counts the bytes of live allocations. A `CudaMemoryResource` caches nothing, so for this
resource the live bytes are also the held bytes, and the cap holds. A pool resource may hold more than the live bytes,
so memguard reports, but does not cap, a framework with a pool resource. The adaptor counts requested bytes;
the driver's pages may take more. At the limit RMM raises the built-in MemoryError (measured).

RMM has one resource per GPU for all frameworks that use it: the cap of the first framework becomes the limit, which a
second framework shares. An `RmmClient` is an adapter whose framework can use RMM as its allocator.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from memguard._base.types import Applied, Drift, Enforcement, Usage
from memguard._base.undo import Undo
from memguard._devices.host import Host
from memguard._frameworks.base import Framework
from memguard.errors import CapNotApplied

_Method = TypeVar("_Method", bound=Callable[..., object])
_limits: dict[int, tuple[str, Any]] = {}
"""By CUDA ordinal: the framework whose cap limits RMM on that GPU, and the adaptor that applies the limit."""


class Limit:
    """RMM's limit for one framework. `adaptors`: by UUID, the adaptor around the resource of each capped GPU.
    `ordinals`: each GPU's CUDA ordinal by UUID."""

    def __init__(self, adaptors: Mapping[str, Any], ordinals: Mapping[str, int], uncapped: str | None = None) -> None:
        self._adaptors = dict(adaptors)
        self.uncapped = uncapped
        """The reason why memguard only reports RMM's usage and does not limit RMM; None if RMM is limited."""
        self.lost: list[Drift] = []
        """Reasons why the cap does not hold, found after memguard had reported the cap as enforced."""
        self.standing = {ordinals[uuid]: adaptor for uuid, adaptor in adaptors.items()}
        """The adaptors by CUDA ordinal. Empty if RMM is not limited, or after the undo."""

    def usage(self, uuid: str) -> Usage | None:
        """The live bytes allocated on the GPU since the limit was set. None if RMM is limited on other GPUs only;
        `Usage(None, None)` (unknown bytes) if RMM is not limited on any GPU."""
        adaptor = self._adaptors.get(uuid)
        if adaptor is None:
            return Usage(None, None) if not self._adaptors else None
        size = int(adaptor.get_allocated_bytes())
        return Usage(size, size, 0)

    def drift(self) -> list[Drift]:
        """Report each GPU whose current resource does not allocate through the adaptor, as after `rmm.reinitialize`."""
        rmm: Any = sys.modules.get("rmm")
        now = {n: rmm.mr.get_per_device_resource(n) for n in list(self.standing)} if rmm is not None else {}
        return self.lost + [
            Drift(
                f"RMM's resource on cuda:{ordinal} was replaced after memguard.init ({type(resource).__name__})",
                "its cap does not hold",
            )
            for ordinal, resource in now.items()
            if not _goes_through(resource, self.standing.get(ordinal))
        ]


class RmmClient(Framework):
    """Base class of an adapter whose framework can use RMM as its allocator.

    While RMM is the allocator, each method that a subclass decorates with `unless_rmm` is replaced by this class's
    method of the same name. RMM's limit cannot change, so `resize` raises, as `Framework.resize` does.
    """

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self._rmm: Limit | None = None

    def fixed(self) -> bool:
        """True while RMM is the allocator, because RMM's limit cannot change."""
        return self._rmm is not None or super().fixed()

    def unseen(self) -> str | None:
        return "RMM tells nobody of a refused request"

    def drift(self) -> Sequence[Drift]:
        return self._rmm.drift() if self._rmm is not None else []

    def _limit_rmm(self, caps: Mapping[str, int], undo: Undo, ordinals: Mapping[str, int] | None = None) -> Applied:
        """Limit RMM, which is the framework's allocator, and return the `Applied` result. `ordinals`: each GPU's CUDA
        ordinal by UUID, if known."""
        found = _ordinals(self.name, self.host) if ordinals is None else ordinals
        self._rmm, applied = apply(self.name, caps, found, undo)
        return applied


def unless_rmm(own: _Method) -> _Method:
    """Decorate an adapter's method: while RMM is the framework's allocator, `RmmClient`'s method replaces it."""
    through_rmm = getattr(RmmClient, own.__name__)

    @functools.wraps(own)
    def method(self: RmmClient, *args: Any) -> Any:
        return (own if self._rmm is None else through_rmm)(self, *args)

    return cast("_Method", method)


def is_cupys(allocator: Any) -> bool:
    """True if `allocator`, CuPy's current allocator, is RMM's."""
    return str(getattr(allocator, "__module__", "")).startswith("rmm.")


def is_loaded_for(framework: str) -> bool:
    """True if RMM's allocator module for the framework was imported. A replaced allocator of the framework is then most
    likely RMM's."""
    return f"rmm.allocators.{framework}" in sys.modules


def _ordinals(framework: str, host: Host) -> dict[str, int]:
    """Each GPU's CUDA ordinal by UUID, without initialising CUDA. NVML may number the GPUs differently."""
    devices = host.devices(ordinals=True)
    found = {device.uuid: device.ordinal for device in devices if device.ordinal is not None}
    if len(found) == len(devices):
        return found
    if len(devices) == 1:
        return {devices[0].uuid: 0}
    why = "CUDA's numbering of the GPUs could not be read"
    raise CapNotApplied(framework, why, "run `memguard doctor` to see why CUDA does not start")


def apply(framework: str, caps: Mapping[str, int], ordinals: Mapping[str, int], undo: Undo) -> tuple[Limit, Applied]:
    """Limit RMM's resource on every GPU with a cap, and return the limit and the `Applied` result. If one of these
    resources cannot be limited, limit none; memguard then only reports RMM's usage, and `Applied.notes` says why."""
    import rmm

    for uuid, ordinal in ordinals.items():
        if uuid not in caps:
            continue
        base = rmm.mr.get_per_device_resource(ordinal)
        if ordinal in _limits:
            why = f"it shares RMM with {_limits[ordinal][0]}, whose cap holds for both together"
        elif not isinstance(base, rmm.mr.CudaMemoryResource):
            why = f"it allocates through RMM's {type(base).__name__}, which may hold more than is in use"
        else:
            continue
        uncapped = f"watched: it has no cap of its own: {why}"
        return Limit({}, {}, uncapped), Applied(Enforcement.WATCHED, notes=(f"{framework}: {uncapped}",))
    capped = {ordinal: uuid for uuid, ordinal in ordinals.items() if uuid in caps}
    before = {ordinal: rmm.mr.get_per_device_resource(ordinal) for ordinal in capped}
    adaptors = {
        uuid: rmm.mr.LimitingResourceAdaptor(before[ordinal], allocation_limit=caps[uuid])
        for ordinal, uuid in capped.items()
    }
    limit, stays = Limit(adaptors, ordinals), list[str]()

    def restore() -> None:
        """Restore RMM's former resource on each GPU. If interrupted, a second call restores the rest."""
        limit.standing.clear()
        for ordinal, uuid in capped.items():
            if ordinal not in _limits or _limits[ordinal][1] is not adaptors[uuid]:
                continue  # this GPU was not limited, or an interrupted call has restored its resource
            now = rmm.mr.get_per_device_resource(ordinal)
            if now is adaptors[uuid]:
                rmm.mr.set_per_device_resource(ordinal, before[ordinal])
            elif now is not before[ordinal] and f"cuda:{ordinal}" not in stays:
                stays.append(f"cuda:{ordinal}")
            _limits.pop(ordinal, None)  # last, so that after an interruption a second call repeats this GPU
        if stays:
            why = f"RMM's resource was wrapped again after memguard.init, so its limit stays on {' and '.join(stays)}"
            stays.clear()
            raise CapNotApplied(framework, why, "undo what wraps it, or restart the process")

    undo.add(framework, restore)
    try:
        for ordinal, uuid in capped.items():
            _limits[ordinal] = (framework, adaptors[uuid])
            rmm.mr.set_per_device_resource(ordinal, adaptors[uuid])
    except BaseException:  # restore here, because `apply` may run again when PyTorch initialises CUDA
        restore()
        raise
    note = f"{framework}: capped through RMM, which is its allocator; what it held before is not counted"
    return limit, Applied(Enforcement.ENFORCED, notes=(note,))


def _goes_through(resource: Any, adaptor: Any) -> bool:
    """True if `resource` is the adaptor or wraps it, so that allocations reach the adaptor. Also True if `adaptor` is
    None."""
    for _ in range(100):
        if adaptor is None or resource is adaptor:
            return True
        upstream = getattr(resource, "get_upstream", None)
        if upstream is None:
            return False
        resource = upstream()
    return False

"""TensorFlow: a logical device with `memory_limit` on every visible GPU, and growth through the environment.

Facts: the limit must be set before TensorFlow builds its allocator (its first operation); growth set on the
device silently disappears beside a limit, so `TF_FORCE_GPU_ALLOW_GROWTH` is used; a GPU left unconfigured is
taken whole; `cuda_malloc_async` ignores the limit (11,274 MiB taken under 4,096), so it is refused; nothing
shrinks the pool afterwards, and with growth TensorFlow does not say how much it holds.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ClassVar

from memguard.errors import CapNotApplied, ConflictingSetting
from memguard.frameworks.base import Framework
from memguard.model import Applied, Device, Enforcement, Usage
from memguard.units import MIB, format_size, round_up

_log = logging.getLogger("memguard")
_standing: dict[str, tuple[int, bool]] = {}
"""Limit and growth that TensorFlow went live with, by device: they stay for the process, whatever comes next."""
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_ALLOCATOR = "TF_GPU_ALLOCATOR"
_UNLIMITED = {
    "cuda_malloc_async": "ignores memory_limit",
    "cuda_malloc": "passes every request on to the driver and knows no limit",
}


class TensorFlow(Framework):
    """TensorFlow's BFC allocator, capped by `LogicalDeviceConfiguration(memory_limit)`."""

    name: ClassVar[str] = "tensorflow"
    module: ClassVar[str] = "tensorflow"
    hook: ClassVar[str] = "tensorflow"
    tested: ClassVar[tuple[str, ...]] = ("2.21.0",)

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self._caps: dict[str, int] = {}
        self._growth = True
        self._logical: dict[str, int] = {}

    def _live(self, module: ModuleType) -> bool:
        context = _context()
        return context is not None and getattr(context, "_context_handle", None) is not None

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any]) -> Applied:
        tf: Any = sys.modules["tensorflow"]
        self._refuse_unlimited()
        if self._live(tf):
            return self._accept_standing(caps)
        gpus = tf.config.list_physical_devices("GPU")
        if not gpus:
            why = "" if tf.test.is_built_with_cuda() else ": this TensorFlow is built without CUDA"
            note = f"tensorflow sees no GPU{why}; its share stays free"
            _log.warning("%s", note)
            return Applied(Enforcement.ABSENT, lambda: None, notes=(note,))
        self._caps, self._growth = dict(caps), bool(options.get("growth", True))
        by_gpu = self._match(gpus)
        undo: list[Callable[[], None]] = []
        try:
            wanted, own = ("true" if self._growth else "false"), os.environ.get(_GROWTH, "").strip().lower()
            if own not in ("", wanted):
                self._say(f"tensorflow: {_GROWTH}={own} was set; growth: {wanted} of the budget holds")
            undo.append(_set_environment(_GROWTH, wanted))
            for gpu, uuid in by_gpu:
                undo.append(self._limit(tf, gpu, caps[uuid]))
            self._logical = {uuid: position for position, (_, uuid) in enumerate(by_gpu)}
        except BaseException:
            for step in reversed(undo):
                step()
            raise

        def undo_all() -> None:
            undo[0]()  # the environment, which children would inherit
            if self._live(tf):
                _standing.update({uuid: (self._caps[uuid], self._growth) for uuid in self._logical})
                raise CapNotApplied(self.name, "its allocator exists; its limit stays", "restart the process")
            for step in reversed(undo[1:]):
                step()
            self._logical = {}

        return Applied(Enforcement.ENFORCED, undo_all)

    def _accept_standing(self, caps: Mapping[str, int]) -> Applied:
        """Live already: right only where an earlier budget of this process left the very limits that are wanted."""
        if not _standing:
            raise CapNotApplied(
                self.name,
                "it was live before memguard.init(): its allocator exists and cannot be limited any more",
                "call memguard.init() before TensorFlow's first operation",
            )
        for uuid, (limit, self._growth) in _standing.items():
            if caps.get(uuid) != limit:
                raise CapNotApplied(
                    self.name,
                    f"it went live with a limit of {format_size(limit)}, which stays; this budget gives it "
                    f"{format_size(caps.get(uuid))}",
                    f"write tensorflow: {{limit: {limit // MIB}MiB}}, or restart the process",
                )
        self._caps = dict(caps)
        self._logical = {uuid: position for position, uuid in enumerate(_standing)}
        return Applied(Enforcement.ENFORCED, permanent="its limit stays from the budget before")

    def usage(self, device: Device) -> Usage | None:
        """`get_memory_info` (2.3 µs), asked only once TensorFlow is live, because it would initialise it.

        With growth it says what is in use, not what the pool holds: held is None, with bounds.
        """
        tf: Any = sys.modules.get("tensorflow")
        if tf is None or not self._live(tf):
            return None
        position = self._logical.get(device.uuid, 0 if device.ordinal is None else device.ordinal)
        try:
            info = tf.config.experimental.get_memory_info(f"GPU:{position}")
        except (ValueError, RuntimeError, AttributeError):
            return None
        cap = self._caps.get(device.uuid) if device.uuid in self._logical else None
        if cap is not None and not self._growth:
            return Usage(cap, info["current"], 0, peak=info["peak"])
        at_least = info["peak"]
        return Usage(None, info["current"], 0, held_at_least=at_least, held_at_most=cap, peak=info["peak"])

    def trim(self, device: Device) -> None:
        """Nothing from outside shrinks TensorFlow's pool."""

    def resize(self, caps: Mapping[str, int]) -> None:
        raise CapNotApplied(
            self.name,
            "TensorFlow's memory_limit is fixed once it is set",
            "change the budget file and restart the process",
        )

    def footprint(self, size: int) -> int:
        return round_up(size, 256)

    def oom_types(self) -> tuple[type[BaseException], ...]:
        tf: Any = sys.modules.get("tensorflow")
        return () if tf is None else (tf.errors.ResourceExhaustedError,)

    def drift(self) -> list[str]:
        """Limits that were taken away or raised: before TensorFlow went live, as later they cannot change."""
        tf: Any = sys.modules.get("tensorflow")
        if tf is None or not self._logical:
            return []
        gpus = zip(tf.config.list_physical_devices("GPU"), self._logical, strict=False)  # both in TensorFlow's order
        lost = [gpu.name for gpu, uuid in gpus if not _limited(tf, gpu, self._caps[uuid])]
        return [f"tensorflow: the limit of {name} was taken away after memguard.init" for name in lost]

    def _refuse_unlimited(self) -> None:
        value = os.environ.get(_ALLOCATOR, "").strip().lower()
        if value in _UNLIMITED:
            raise ConflictingSetting(
                self.name,
                f"{_ALLOCATOR}={value}",
                _UNLIMITED[value],
                f"unset {_ALLOCATOR}, so that TensorFlow uses its BFC allocator",
            )

    def _match(self, gpus: list[Any]) -> list[tuple[Any, str]]:
        """Each of TensorFlow's GPUs with its UUID: TensorFlow numbers them as CUDA does."""
        devices = self.host.devices(ordinals=True)
        by_ordinal = {device.ordinal: device.uuid for device in devices}
        matched = []
        for gpu in gpus:
            ordinal = int(gpu.name.rsplit(":", 1)[1])
            uuid = by_ordinal.get(ordinal) or (devices[0].uuid if len(devices) == len(gpus) == 1 else None)
            if uuid is None or uuid not in self._caps:
                raise CapNotApplied(
                    self.name,
                    f"TensorFlow's {gpu.name} cannot be matched with a GPU of the budget",
                    "pip install 'memguard[cuda]', so that CUDA's numbering can be asked for",
                )
            matched.append((gpu, uuid))
        return matched

    def _limit(self, tf: Any, gpu: Any, cap: int) -> Callable[[], None]:
        own = tf.config.get_logical_device_configuration(gpu)
        if own:
            limits = [c.memory_limit for c in own]
            if len(own) == 1 and limits[0] is not None and limits[0] * MIB <= cap:
                _log.info("tensorflow: its own memory_limit of %d MiB is stricter than the cap and stays", limits[0])
                return lambda: None
            raise ConflictingSetting(
                self.name,
                f"set_logical_device_configuration of {gpu.name} ({', '.join(str(limit) for limit in limits)} MiB)",
                f"is looser than the cap of {format_size(cap)}",
                "remove that call, or raise frameworks.tensorflow in the budget",
            )
        wanted = tf.config.LogicalDeviceConfiguration(memory_limit=cap // MIB)
        tf.config.set_logical_device_configuration(gpu, [wanted])
        back = tf.config.get_logical_device_configuration(gpu)
        if not back or back[0].memory_limit != cap // MIB:
            raise CapNotApplied(self.name, f"memory_limit reads back as {back!r}", "report this with its version")

        def undo() -> None:
            table = getattr(_context(), "_virtual_device_map", None)
            if not isinstance(table, dict):
                raise CapNotApplied(
                    self.name, "this TensorFlow keeps its device table elsewhere", "restart the process"
                )
            table.pop(gpu, None)

        return undo


def _limited(tf: Any, gpu: Any, cap: int) -> bool:
    limits = [entry.memory_limit for entry in tf.config.get_logical_device_configuration(gpu) or []]
    return bool(limits) and None not in limits and sum(limits) * MIB <= cap


def _context() -> Any:
    """TensorFlow's eager context where it exists; asking `context_safe` creates none."""
    module = sys.modules.get("tensorflow.python.eager.context")
    safe = getattr(module, "context_safe", None)
    return safe() if safe is not None else None


def _set_environment(name: str, value: str) -> Callable[[], None]:
    before = os.environ.get(name)
    os.environ[name] = value

    def undo() -> None:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before

    return undo

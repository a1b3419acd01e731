"""TensorFlow: a logical device with `memory_limit` on every visible GPU, and growth through the environment.

Measured: the limit must be set before TensorFlow builds its allocator, at its first operation. Growth set on the device
is silently lost beside a limit, so `TF_FORCE_GPU_ALLOW_GROWTH` is used. TensorFlow takes the whole of a GPU without a
limit. `cuda_malloc_async` ignores the limit (11,274 MiB taken under 4,096), so it is refused. Nothing shrinks the pool
afterwards. With growth TensorFlow does not say how much it holds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from memguard._frameworks.base import Framework, accept_standing
from memguard._logs import log as _log
from memguard._specs import SPECS
from memguard._types import Applied, Device, Enforcement, Usage
from memguard._units import MIB, format_size, round_up
from memguard.errors import CapNotApplied, ConflictingSetting, DeviceError

_standing: dict[str, tuple[int, int, bool]] = {}
"""Cap, limit and growth that TensorFlow went live with, by device UUID. They stay until the process ends."""
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_ALLOCATOR = "TF_GPU_ALLOCATOR"
_UNLIMITED = {
    "cuda_malloc_async": "ignores memory_limit",
    "cuda_malloc": "passes every request on to the driver and has no limit",
}


class TensorFlow(Framework):
    """TensorFlow's BFC allocator, capped by `LogicalDeviceConfiguration(memory_limit)`."""

    spec = SPECS["tensorflow"]

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self._caps: dict[str, int] = {}
        self._growth = True
        self._limits: dict[str, int] = {}  # what holds: the cap, or the user's own stricter limit
        self._logical: dict[str, int] = {}
        self._seen: dict[str, range] | None = None  # its numbers for each GPU, if live without caps

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
        undo: list[Callable[[], None]] = []
        notes = list(self.notes)
        try:
            by_gpu = self._match(gpus)
            wanted, own = ("true" if self._growth else "false"), os.environ.get(_GROWTH, "").strip().lower()
            if own not in ("", wanted):
                self._say(f"tensorflow: {_GROWTH}={own} was set, but the budget's growth: {wanted} holds")
            undo.append(_as_it_is(_GROWTH))
            self.changes.add(self.name, undo[0])
            os.environ[_GROWTH] = wanted
            for gpu, uuid in by_gpu:
                limit, step = self._limit(tf, gpu, caps[uuid])
                self._limits[uuid] = limit
                undo.append(step)
            self._logical = {uuid: position for position, (_, uuid) in enumerate(by_gpu)}
        except BaseException:
            self._caps, self._limits, self.notes = {}, {}, notes
            for step in reversed(undo):
                step()
            raise

        def undo_all() -> None:
            undo[0]()  # the environment variable, which children would inherit
            if self._live(tf):
                _standing.update({u: (self._caps[u], self._limits[u], self._growth) for u in self._logical})
                raise CapNotApplied(self.name, "its allocator exists; its limit stays", "restart the process")
            for step in reversed(undo[1:]):
                step()
            self._logical, self._limits = {}, {}

        return Applied(Enforcement.ENFORCED, undo_all)

    def _accept_standing(self, caps: Mapping[str, int]) -> Applied:
        standing = {uuid: (cap, limit) for uuid, (cap, limit, _) in _standing.items()}
        applied = accept_standing(self.name, "TensorFlow", "allocator", standing, caps)
        self._caps = dict(caps)
        for position, (uuid, (_, limit, self._growth)) in enumerate(_standing.items()):
            self._limits[uuid], self._logical[uuid] = limit, position
            self._say_stricter(f"GPU:{position}", limit, caps[uuid])
        return applied

    def usage(self, device: Device) -> Usage | None:
        """From `get_memory_info` (2.3 µs), called only once TensorFlow is live, because it would initialise TensorFlow.

        With growth it tells what is in use, not what the pool holds: then held is None, with bounds.
        """
        tf: Any = sys.modules.get("tensorflow")
        if tf is None or not self._live(tf):
            return None
        try:
            infos = [tf.config.experimental.get_memory_info(f"GPU:{n}") for n in self._numbers(tf, device)]
        except (ValueError, RuntimeError, AttributeError):
            return None
        if not infos:
            return None
        limit = self._limits.get(device.uuid) if device.uuid in self._logical else None
        in_use, peak = (sum(info[key] for info in infos) for key in ("current", "peak"))
        if limit is not None and not self._growth:
            return Usage(limit, in_use, 0, peak=peak)
        return Usage(None, in_use, 0, held_at_least=peak, held_at_most=limit, peak=peak)

    def trim(self, device: Device) -> None:
        """Does nothing: TensorFlow's pool cannot be shrunk from outside."""

    def resize(self, caps: Mapping[str, int]) -> None:
        raise CapNotApplied(
            self.name,
            "TensorFlow's memory_limit is fixed once it is set",
            "change the budget file and restart the process",
        )

    def footprint(self, size: int) -> int:
        return round_up(size, 256)

    def drift(self) -> list[str]:
        """Limits that were removed or raised before TensorFlow went live; afterwards they cannot change."""
        tf: Any = sys.modules.get("tensorflow")
        if tf is None or not self._logical:
            return []
        gpus = zip(tf.config.list_physical_devices("GPU"), self._logical, strict=False)  # both in TensorFlow's order
        lost = [gpu.name for gpu, uuid in gpus if not _limited(tf, gpu, self._caps[uuid])]
        return [f"tensorflow: the limit of {name} was removed or raised after memguard.init" for name in lost]

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
        """Each of TensorFlow's GPUs with its UUID. TensorFlow numbers GPUs as CUDA does."""
        devices = self.host.devices(ordinals=True)
        matched = []
        for gpu in gpus:
            uuid = _uuid(gpu, gpus, devices)
            if uuid is None or uuid not in self._caps:
                raise CapNotApplied(
                    self.name,
                    f"TensorFlow's {gpu.name} cannot be matched with a GPU of the budget",
                    "run `memguard doctor` to see why CUDA does not start",
                )
            matched.append((gpu, uuid))
        return matched

    def _numbers(self, tf: Any, device: Device) -> Sequence[int]:
        """The numbers of the GPU's logical devices; empty if TensorFlow has none there, or they cannot be known."""
        if self._logical:
            return [self._logical[device.uuid]] if device.uuid in self._logical else ()
        if self._seen is None:
            self._seen = self._look(tf)
        return self._seen.get(device.uuid, ())

    def _look(self, tf: Any) -> dict[str, range]:
        """The numbers for all GPUs. CUDA is initialised by now, so reading its numbering starts no child process."""
        gpus = tf.config.get_visible_devices("GPU")
        try:
            devices = self.host.devices(ordinals=True) if gpus else ()
        except DeviceError as error:
            _log.debug("tensorflow: its GPUs cannot be told apart: %s", error)
            return {}
        found, first = {}, 0
        for gpu in gpus:
            count = len(tf.config.get_logical_device_configuration(gpu) or "1")
            uuid = _uuid(gpu, gpus, devices)
            if uuid is not None:
                found[uuid] = range(first, first + count)
            first += count
        return found

    def _limit(self, tf: Any, gpu: Any, cap: int) -> tuple[int, Callable[[], None]]:
        """Limit a GPU. Returns what then holds, in bytes, and the undo. If it raises, the device table is as before."""
        own = tf.config.get_logical_device_configuration(gpu)
        if own:
            return self._keep(gpu, [c.memory_limit for c in own], cap), lambda: None
        wanted = tf.config.LogicalDeviceConfiguration(memory_limit=cap // MIB)

        def undo() -> None:
            table = getattr(_context(), "_virtual_device_map", None)
            if not isinstance(table, dict):
                raise CapNotApplied(
                    self.name, "this TensorFlow keeps its device table elsewhere", "restart the process"
                )
            table.pop(gpu, None)

        tf.config.set_logical_device_configuration(gpu, [wanted])
        try:
            back = tf.config.get_logical_device_configuration(gpu)
            if not back or back[0].memory_limit != cap // MIB:
                raise CapNotApplied(self.name, f"memory_limit reads back as {back!r}", "report this with its version")
        except BaseException:
            undo()
            raise
        return cap // MIB * MIB, undo

    def _keep(self, gpu: Any, limits: list[int | None], cap: int) -> int:
        """The user's own limit in bytes, which stays unless it is looser than the cap."""
        only = limits[0] if len(limits) == 1 else None
        if only is not None and only * MIB <= cap:
            self._say_stricter(gpu.name.rsplit("physical_device:", 1)[-1], only * MIB, cap)
            return only * MIB
        setting = f"set_logical_device_configuration of {gpu.name} ({', '.join(str(limit) for limit in limits)} MiB)"
        if len(limits) > 1:
            raise ConflictingSetting(
                self.name,
                setting,
                f"splits the GPU into {len(limits)} logical devices, which memguard cannot cap as one",
                "configure it as one logical device, or leave tensorflow out of the budget",
            )
        raise ConflictingSetting(
            self.name,
            setting,
            f"is looser than the cap of {format_size(cap)}",
            "remove that call, or raise frameworks.tensorflow in the budget",
        )

    def _say_stricter(self, name: str, limit: int, cap: int) -> None:
        if limit < cap // MIB * MIB:
            self._say(
                f"tensorflow: its own memory_limit of {format_size(limit)} on {name} is stricter than the cap of "
                f"{format_size(cap)} and stays"
            )


def _uuid(gpu: Any, gpus: Sequence[Any], devices: Sequence[Device]) -> str | None:
    """The UUID of one of TensorFlow's GPUs, by CUDA's ordinal. If both sides have only one GPU, no number is needed."""
    ordinal = int(gpu.name.rsplit(":", 1)[1])
    alone = devices[0].uuid if len(devices) == len(gpus) == 1 else None
    return next((device.uuid for device in devices if device.ordinal == ordinal), alone)


def _limited(tf: Any, gpu: Any, cap: int) -> bool:
    limits = [entry.memory_limit for entry in tf.config.get_logical_device_configuration(gpu) or []]
    return bool(limits) and None not in limits and sum(limits) * MIB <= cap


def _context() -> Any:
    """TensorFlow's eager context if it exists; `context_safe` creates none."""
    module = sys.modules.get("tensorflow.python.eager.context")
    safe = getattr(module, "context_safe", None)
    return safe() if safe is not None else None


def _as_it_is(name: str) -> Callable[[], None]:
    """What sets the environment variable back to what it is now."""
    before = os.environ.get(name)

    def undo() -> None:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before

    return undo

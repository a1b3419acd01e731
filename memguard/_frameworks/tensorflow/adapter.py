"""Caps TensorFlow by a logical device with `memory_limit` on every visible GPU, and sets its memory growth.

Measured: the limit must be set before TensorFlow creates its allocator, at its first operation. With a limit,
TensorFlow silently ignores `set_memory_growth`, so the adapter sets the environment variable
`TF_FORCE_GPU_ALLOW_GROWTH`. Without a limit, TensorFlow takes a whole GPU. `cuda_malloc_async` ignores the limit, so
the adapter refuses this allocator. TensorFlow's pool never shrinks. With growth TensorFlow does not report its held
bytes.

The adapter also applies the cap to later calls of `set_logical_device_configuration` and to the `config` of TF1
sessions. To do so, the adapter replaces the private functions `Context.set_logical_device_configuration` and
`BaseSession.__init__`. A session with its own `config` would ignore the logical devices.
"""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from memguard._base.logs import log as _log
from memguard._base.types import Applied, Device, Drift, Enforcement, Usage, usage_of
from memguard._base.undo import Undo
from memguard._base.units import MIB, format_size, round_up
from memguard._frameworks.base import Framework, accept_permanent_limits, weak_reference
from memguard._frameworks.replacements import Replacements
from memguard._frameworks.tensorflow.spec import SPEC
from memguard.errors import CapNotApplied, ConflictingSetting, DeviceError

permanent_caps: dict[str, tuple[int, int, bool]] = {}
"""The cap, limit and growth with which TensorFlow started, by device UUID. These limits stay in effect until the
process ends."""
_EAGER = "tensorflow.python.eager.context"
_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
_ALLOCATORS = SPEC.allocators
ALLOCATOR = _ALLOCATORS.variable


class TensorFlow(Framework):
    """TensorFlow's BFC allocator, capped by `LogicalDeviceConfiguration(memory_limit)`."""

    spec = SPEC
    resizable = False

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self._caps: dict[str, int] = {}
        self._growth = True
        self._limits: dict[str, int] = {}  # the effective limit: the cap, or the user's own stricter limit
        self._logical: dict[str, int] = {}
        self._seen: dict[str, range] | None = None  # indices of the logical devices by GPU, if no caps are set
        self._unmatched = False  # whether `_seen` lacks a GPU because its UUID is unknown
        self._gpus: dict[Any, str] = {}  # maps TensorFlow's physical devices to UUIDs
        self._user_devices: dict[Any, list[Any]] = {}  # the user's later configurations, by TensorFlow's device
        self._spans: dict[str, range] = {}  # like `_seen`, once the user has configured logical devices
        self._undo_allocator: Callable[[], None] = lambda: None
        self._last_drift: list[Drift] = []  # the drift at the last check
        self._final_context: weakref.ref[Any] | None = None  # the live context for which `_last_drift` is final
        self._session = False  # whether a TF1 session created the allocators, without the eager context

    def _live(self, module: ModuleType) -> bool:
        safe = getattr(sys.modules.get(_EAGER), "context_safe", None)  # inlines `_context` for speed
        return safe is not None and getattr(safe(), "_context_handle", None) is not None

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        tf: Any = sys.modules["tensorflow"]
        self._refuse_unlimited()
        if self._live(tf):
            return self._accept_standing(caps)
        gpus = tf.config.list_physical_devices("GPU")
        if not gpus:
            why = "" if tf.test.is_built_with_cuda() else ": this TensorFlow is built without CUDA"
            note = f"tensorflow sees no GPU{why}; its share stays free"
            _log.warning("%s", note)
            return Applied(Enforcement.ABSENT, notes=(note,))
        undo.add(self.name, functools.partial(self._forget, [*self.notes]))
        self._caps, self._growth, self._final_context = dict(caps), bool(options.get("growth", True)), None
        by_gpu = self._match(gpus)
        wanted, own = ("true" if self._growth else "false"), os.environ.get(_GROWTH, "").strip().lower()
        if own not in ("", wanted):
            self._add_note(f"tensorflow: {_GROWTH}={own} was set, but the budget's growth: {wanted} holds")
        undo.add(self.name, restorer(_GROWTH))
        os.environ[_GROWTH] = wanted
        for gpu, uuid in by_gpu:
            self._limits[uuid] = self._limit(tf, gpu, caps[uuid], undo)
        self._logical = {uuid: position for position, (_, uuid) in enumerate(by_gpu)}
        self._gpus = dict(by_gpu)
        self._replace(undo)
        return Applied(Enforcement.ENFORCED)

    def _forget(self, notes: list[str]) -> None:
        """Forget the caps, as the undo step that runs last. Raises CapNotApplied if TensorFlow has created its
        allocator."""
        self._undo_allocator()
        if self._started():
            raise self._kept()
        self._logical, self._limits, self._gpus, self._user_devices, self._spans = {}, {}, {}, {}, {}
        self._caps, self.notes = {}, notes

    def _kept(self) -> CapNotApplied:
        """Record the limits that stay until the process ends. Returns the error that reports them."""
        permanent_caps.update({u: (self._caps[u], self._limits[u], self._growth) for u in self._logical})
        return CapNotApplied(self.name, "its allocator exists; its limit stays", "restart the process")

    def _accept_standing(self, caps: Mapping[str, int]) -> Applied:
        standing = {uuid: (cap, limit) for uuid, (cap, limit, _) in permanent_caps.items()}
        applied = accept_permanent_limits(self.name, "TensorFlow", "allocator", standing, caps)
        self._caps, self._final_context = dict(caps), None
        for position, (uuid, (_, limit, self._growth)) in enumerate(permanent_caps.items()):
            self._limits[uuid], self._logical[uuid] = limit, position
            self._note_stricter(f"GPU:{position}", limit, caps[uuid])
        return applied

    def usage(self, device: Device) -> Usage | None:
        """Usage from `get_memory_info` (2.3 µs), only if TensorFlow is live, because the call would initialise it.

        With growth TensorFlow reports bytes in use, but not held bytes, so that held is None, with a lower and an upper
        bound. The lower bound is the peak in use; it is too high once the allocator has released idle regions, as it
        does before it refuses a request. Held and in-use bytes are both None for sessions of a TF1 program without the
        eager context, for an allocator without statistics, and if a GPU cannot be identified.
        """
        tf: Any = sys.modules.get("tensorflow")
        if tf is None:
            return None
        uuid = device.uuid
        if not self._live(tf):
            if not self._session or uuid not in self._logical:
                return None
            return self._unreported(uuid)
        in_use = peak = 0
        try:
            number = self._logical.get(uuid)
            numbers = (number,) if number is not None and not self._spans else self._numbers(tf, device)
            if numbers is None:
                return Usage(None, None, 0)
            for number in numbers:
                info = tf.config.experimental.get_memory_info(f"GPU:{number}")
                in_use, peak = in_use + info["current"], peak + info["peak"]
        except (ValueError, RuntimeError, AttributeError):
            return self._unreported(uuid) if _has_logical_gpu(tf, number or 0) else None
        if not numbers:
            return None
        limit = self._limits.get(uuid) if uuid in self._logical else None
        if limit is not None and not self._growth:
            return usage_of((limit, in_use, 0, None, None, peak))
        return usage_of((None, in_use, 0, peak, limit, peak))

    def _unreported(self, uuid: str) -> Usage:
        """Usage of a GPU for which TensorFlow reports no bytes. Without growth the pool's size is the limit."""
        limit = self._limits.get(uuid) if uuid in self._logical else None
        return Usage(None, None, 0, held_at_most=limit) if self._growth or limit is None else Usage(limit, None, 0)

    def trim(self, device: Device) -> None:
        """Does nothing, as TensorFlow has no function to shrink its pool."""

    def resize(self, caps: Mapping[str, int]) -> None:
        raise CapNotApplied(
            self.name,
            "TensorFlow's memory_limit is fixed once it is set",
            "change the budget file and restart the process",
        )

    def footprint(self, size: int) -> int:
        return round_up(size, 256)

    def drift(self) -> Sequence[Drift]:
        """Limits that other code removed or raised before TensorFlow went live; afterwards they cannot change."""
        tf: Any = sys.modules.get("tensorflow")
        if tf is None or not self._logical:
            return []
        context = _context()
        if getattr(context, "_context_handle", None) is None:  # `context` is None or not live
            context = None
        elif self._final_context is not None and self._final_context() is context:
            return self._last_drift
        # `self._logical` has the GPUs in the order of `list_physical_devices`.
        gpus = zip(tf.config.list_physical_devices("GPU"), self._logical, strict=False)
        lost = [gpu.name for gpu, uuid in gpus if not _limited(tf, gpu, self._caps[uuid])]
        self._last_drift = [Drift(f"the limit of {name} was removed or raised after memguard.init") for name in lost]
        self._final_context = weak_reference(context) if context is not None else None
        return self._last_drift

    def forked(self) -> None:
        self._gpus = {}  # so that the replacements pass the child's settings on unchanged

    def _refuse_unlimited(self) -> None:
        value = os.environ.get(ALLOCATOR, "").strip().lower()
        why = _ALLOCATORS.why_uncapped(value)
        if why is not None:
            raise ConflictingSetting(
                self.name,
                f"{ALLOCATOR}={value}",
                why,
                f"unset {ALLOCATOR}, so that TensorFlow uses its BFC allocator",
            )

    def _match(self, gpus: list[Any]) -> list[tuple[Any, str]]:
        """Pair each of TensorFlow's GPUs with its UUID. TensorFlow numbers GPUs as CUDA does."""
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

    def _numbers(self, tf: Any, device: Device) -> Sequence[int] | None:
        """The indices of the GPU's TensorFlow logical devices; empty if the GPU has none, None if they are unknown."""
        if self._spans:
            return self._spans.get(device.uuid, ())
        if self._logical:
            number = self._logical.get(device.uuid)
            return () if number is None else (number,)
        if self._seen is None:
            self._seen = self._read_numbers(tf)
        return self._seen.get(device.uuid, None if self._unmatched else ())

    def _count_numbers(self) -> dict[str, range]:
        """Map each GPU's UUID to the index range of its TensorFlow logical devices, computed from the user's
        configurations. The user may have split a GPU into several logical devices."""
        found, first = {}, 0
        for gpu, uuid in self._gpus.items():
            count = len(self._user_devices.get(gpu) or "1")
            found[uuid] = range(first, first + count)
            first += count
        return found

    def _read_numbers(self, tf: Any) -> dict[str, range]:
        """Map each GPU's UUID to the index range of its logical devices, read from a live TensorFlow. As CUDA is
        initialised, reading CUDA's ordinals starts no child process."""
        gpus = tf.config.get_visible_devices("GPU")
        try:
            devices = self.host.devices(ordinals=True) if gpus else ()
        except DeviceError as error:
            _log.debug("tensorflow: its GPUs cannot be told apart: %s", error)
            devices = ()
        found, first = {}, 0
        for gpu in gpus:
            count = len(tf.config.get_logical_device_configuration(gpu) or "1")
            uuid = _uuid(gpu, gpus, devices)
            if uuid is not None:
                found[uuid] = range(first, first + count)
            self._unmatched = self._unmatched or uuid is None
            first += count
        return found

    def _limit(self, tf: Any, gpu: Any, cap: int, undo: Undo) -> int:
        """Set a GPU's limit. Returns the effective limit in bytes: the cap, or the user's own stricter limit."""
        own = tf.config.get_logical_device_configuration(gpu)

        def restore() -> None:
            if self._started():  # the limit stays, as `_forget` reports
                return
            table = getattr(_context(), "_virtual_device_map", None)
            if not isinstance(table, dict):
                raise CapNotApplied(
                    self.name, "this TensorFlow keeps its device table elsewhere", "restart the process"
                )
            if gpu in self._user_devices:
                table[gpu] = self._user_devices[gpu]
            elif not own:
                table.pop(gpu, None)

        undo.add(self.name, restore)
        if own:
            return self._accept_user_limit(gpu, [c.memory_limit for c in own], cap)
        wanted = tf.config.LogicalDeviceConfiguration(memory_limit=cap // MIB)
        tf.config.set_logical_device_configuration(gpu, [wanted])
        back = tf.config.get_logical_device_configuration(gpu)
        if not back or back[0].memory_limit != cap // MIB:
            raise CapNotApplied(self.name, f"memory_limit reads back as {back!r}", "report this with its version")
        return cap // MIB * MIB

    def _replace(self, undo: Undo) -> None:
        """Replace TensorFlow's configuration functions, so that limits which the user sets later fit the cap."""
        replaced = Replacements()
        undo.add(self.name, replaced.undo)
        context: Any = sys.modules.get("tensorflow.python.eager.context")
        session: Any = sys.modules.get("tensorflow.python.client.session")
        cls = getattr(context, "Context", None)
        if cls is not None:
            replaced.put(cls, "set_logical_device_configuration", self._wrap_set_configuration)
            replaced.put(cls, "set_memory_growth", self._wrap_set_growth)
            replaced.put(cls, "_compute_gpu_options", self._wrap_gpu_options)
        if hasattr(session, "BaseSession"):
            replaced.put(session.BaseSession, "__init__", self._wrap_session_init)

    def _wrap_set_configuration(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_logical_device_configuration(context: Any, dev: Any, virtual_devices: Any) -> Any:
            uuid = self._gpus.get(dev)
            if uuid is None or any(entry.memory_limit is None for entry in virtual_devices):
                # The budget does not cap this GPU, or a limit is missing, for which TensorFlow raises its own error.
                return original(context, dev, virtual_devices)
            cap = self._caps[uuid] // MIB
            limits = _scaled_to_cap([entry.memory_limit for entry in virtual_devices], cap)
            entries = list(virtual_devices) or [_module("LogicalDeviceConfiguration")()]
            held = [entry._replace(memory_limit=limit) for entry, limit in zip(entries, limits, strict=True)]
            fits = held == entries
            answer = original(context, dev, virtual_devices if fits else held)
            self._user_devices[dev], self._limits[uuid] = virtual_devices, int(sum(limits)) * MIB
            self._spans = self._count_numbers()
            if not fits:
                asked = int(sum(entry.memory_limit or 0 for entry in entries)) * MIB
                self._warn_of_larger(
                    f"set_logical_device_configuration ({format_size(asked) if asked else 'no limit'})",
                    _short_name(dev),
                    cap * MIB,
                )
            return answer

        return set_logical_device_configuration

    def _wrap_set_growth(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_memory_growth(context: Any, dev: Any, enable: bool) -> Any:
            """Remove memguard's entry from the device table during the original call, because TensorFlow refuses growth
            for a device with an entry."""
            table = getattr(context, "_virtual_device_map", None)
            if dev not in self._gpus or dev in self._user_devices or not isinstance(table, dict) or dev not in table:
                return original(context, dev, enable)
            ours = table[dev]
            try:
                del table[dev]
                answer = original(context, dev, enable)
            finally:
                table[dev] = ours
            if bool(enable) != self._growth:
                self._add_note(
                    f"tensorflow: set_memory_growth({enable}) changes nothing: the budget's growth: "
                    f"{str(self._growth).lower()} holds"
                )
            return answer

        return set_memory_growth

    def _wrap_gpu_options(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _compute_gpu_options(context: Any) -> Any:
            self._limited_allocator()
            return original(context)

        return _compute_gpu_options

    def _limited_allocator(self) -> None:
        """Unset TF_GPU_ALLOCATOR if it was set after memguard.init to an allocator without a limit. Called right before
        TensorFlow reads the variable."""
        value = os.environ.get(ALLOCATOR, "")
        why = _ALLOCATORS.why_uncapped(value)
        if self._gpus and why is not None and not self._started():
            self._undo_allocator = restorer(ALLOCATOR)
            os.environ.pop(ALLOCATOR, None)
            self._warn(
                f"tensorflow: {ALLOCATOR}={value} was set after memguard.init, and it {why}: it is unset, so that "
                "the cap holds"
            )

    def _started(self) -> bool:
        return self._session or getattr(_context(), "_context_handle", None) is not None

    def _wrap_session_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(session: Any, target: Any = "", graph: Any = None, config: Any = None) -> None:  # noqa: N807
            self._limited_allocator()
            # True for a session in this process with a valid config.
            here = not target and (config is None or hasattr(config, "gpu_options"))
            original(session, target, graph, self._capped_config(config) if here and config is not None else config)
            self._session = self._session or (here and _uses_gpus(config))

        return __init__

    def _capped_config(self, config: Any) -> Any:
        """A copy of the session's ConfigProto with limits within the cap of every GPU. Returns `config` itself if its
        limits are within the caps."""
        options = config.gpu_options
        uuids = list(self._gpus.values())
        listed = [int(n) for n in options.visible_device_list.split(",") if n.strip().isdigit()]
        chosen = [uuids[n] for n in listed if n < len(uuids)] if listed else uuids
        if not chosen or not _uses_gpus(config):
            return config
        own = [list(entry.memory_limit_mb) for entry in options.experimental.virtual_devices]
        fraction = options.per_process_gpu_memory_fraction
        usable = {device.uuid: device.usable for device in self.host.devices()}
        caps = [self._limits[uuid] // MIB for uuid in chosen]
        asked: list[list[float]] = own or [
            [int(fraction * usable.get(uuid, 0)) // MIB] if fraction else [] for uuid in chosen
        ]
        wanted = [_scaled_to_cap(limits, cap) for limits, cap in zip(asked, caps, strict=False)]
        if wanted == asked and len(asked) == len(caps):
            return config
        held = type(config)()
        held.CopyFrom(config)
        held.gpu_options.ClearField("per_process_gpu_memory_fraction")  # TensorFlow rejects both fraction and limit
        devices = held.gpu_options.experimental.virtual_devices
        if not own:
            for limits in wanted:
                devices.add().memory_limit_mb.extend(limits)
        else:
            for entry, limits in zip(devices, wanted, strict=False):
                del entry.memory_limit_mb[:]
                entry.memory_limit_mb.extend(limits)
        given = [sum(limits) * MIB if limits else None for limits in asked]
        if fraction or own:
            shown = f"per_process_gpu_memory_fraction={fraction:.4g}" if fraction else "virtual_devices"
            largest = max((size for size in given if size is not None), default=0)
            setting = f"the config of a session ({shown}, {format_size(int(largest))})"
            self._warn_of_larger(setting, f"GPU:{listed[0] if listed else 0}", caps[0] * MIB)
        else:
            self._add_note("tensorflow: a session has a config without a limit: the cap holds in it")
        return held

    def _warn_of_larger(self, setting: str, where: str, cap: int) -> None:
        self._warn(f"tensorflow: {setting} asks for more than the cap of {format_size(cap)} on {where}: the cap holds")

    def _accept_user_limit(self, gpu: Any, limits: list[int | None], cap: int) -> int:
        """The user's own limit in bytes. Raises ConflictingSetting if it exceeds the cap, or for several limits."""
        only = limits[0] if len(limits) == 1 else None
        if only is not None and only * MIB <= cap:
            self._note_stricter(_short_name(gpu), only * MIB, cap)
            return only * MIB
        setting = f"set_logical_device_configuration of {gpu.name} ({', '.join(str(limit) for limit in limits)} MiB)"
        if len(limits) > 1:
            raise ConflictingSetting(
                self.name,
                setting,
                f"splits the GPU into {len(limits)} logical devices, which memguard cannot cap as one",
                "configure it as one logical device, or leave tensorflow out of the budget",
            )
        larger = "" if only is None else f", or raise frameworks.tensorflow in the budget to at least {only}MiB"
        raise ConflictingSetting(
            self.name, setting, f"is looser than the cap of {format_size(cap)}", f"remove that call{larger}"
        )

    def _note_stricter(self, name: str, limit: int, cap: int) -> None:
        if limit < cap // MIB * MIB:
            self._add_note(
                f"tensorflow: its own memory_limit of {format_size(limit)} on {name} is stricter than the cap of "
                f"{format_size(cap)} and stays"
            )


def _uuid(gpu: Any, gpus: Sequence[Any], devices: Sequence[Device]) -> str | None:
    """The UUID of a TensorFlow GPU, found by CUDA's ordinal. If no ordinal matches, and TensorFlow and CUDA both see
    only one GPU, returns that GPU's UUID; else None."""
    ordinal = int(gpu.name.rsplit(":", 1)[1])
    alone = devices[0].uuid if len(devices) == len(gpus) == 1 else None
    return next((device.uuid for device in devices if device.ordinal == ordinal), alone)


def _scaled_to_cap(limits: Sequence[float], cap: int) -> list[float]:
    """Limits of one GPU's logical devices, in MiB, scaled down so that their sum fits the cap."""
    total = sum(limits)
    if not limits:
        return [cap]
    return list(limits) if total <= cap else [max(int(limit * cap / total), 1) for limit in limits]


def _uses_gpus(config: Any) -> bool:
    """True if a session with this ConfigProto may use a GPU. `config` is None for a session without a ConfigProto."""
    return config is None or "GPU" not in config.device_count or config.device_count["GPU"] > 0


def _short_name(gpu: Any) -> str:
    """The name without its prefix, such as `GPU:0`."""
    return str(gpu.name).rsplit("physical_device:", 1)[-1]


def _module(name: str) -> Any:
    return getattr(sys.modules["tensorflow.python.eager.context"], name)


def _limited(tf: Any, gpu: Any, cap: int) -> bool:
    limits = [entry.memory_limit for entry in tf.config.get_logical_device_configuration(gpu) or []]
    return bool(limits) and None not in limits and sum(limits) * MIB <= cap


def _has_logical_gpu(tf: Any, number: int) -> bool:
    """True if the live TensorFlow has a logical GPU with this index, or if that is unknown."""
    try:
        return number < len(tf.config.list_logical_devices("GPU"))
    except (ValueError, RuntimeError, AttributeError):
        return True


def _context() -> Any:
    """TensorFlow's eager context, or None if there is none. Never creates a context."""
    module = sys.modules.get(_EAGER)
    safe = getattr(module, "context_safe", None)
    return safe() if safe is not None else None


def restorer(name: str) -> Callable[[], None]:
    """Return a function that restores the environment variable's current value."""
    before = os.environ.get(name)

    def undo() -> None:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before

    return undo

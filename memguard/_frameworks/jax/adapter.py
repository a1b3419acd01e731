"""Caps JAX by the client option `memory_fraction`, and turns off preallocation unless the user requested it.

Measured: the fraction refers to the memory available to CUDA. JAX reads the fraction once, when the GPU backend starts;
afterwards the limit is fixed, and the pool never shrinks. For a cap of 4 GiB on an H200 the limit was 4,294,967,296
bytes. The client options override the environment. If both XLA_CLIENT_MEM_FRACTION and XLA_PYTHON_CLIENT_MEM_FRACTION
are set, the GPU backend does not load, and JAX silently uses the CPU. The allocators `cuda_async` and `platform` have
no limit; `vmm` has a limit but reports no memory statistics (see `jax/spec.py`). JAX raises an out-of-memory error only
10 s after the request.

The cap does not cover context and modules, cuBLAS and cuSOLVER workspaces, NCCL and collective memory.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import struct
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from memguard._base.types import Applied, Device, Drift, Enforcement, Usage, usage_of
from memguard._base.undo import Undo
from memguard._base.units import MIB, format_size, round_up
from memguard._frameworks.base import Framework, accept_permanent_limits, weak_reference
from memguard._frameworks.jax.spec import SPEC
from memguard._frameworks.replacements import Replacements
from memguard.errors import CapNotApplied, ConflictingSetting

_BRIDGE = "jax._src.xla_bridge"
_OPTIONS = "jax_pjrt_client_create_options"
_FRACTION, _DEPRECATED = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_ALLOCATORS = SPEC.allocators
_NOWHERE: tuple[Callable[[], object], int] = (lambda: None, 0)
permanent_caps: dict[str, int] = {}
"""The caps with which JAX's backend started, by device UUID. These caps stay in effect until the process ends."""


class JAX(Framework):
    """JAX's BFC allocator (from XLA), capped by the `memory_fraction` of its client."""

    spec = SPEC
    resizable = False
    _allocator = "bfc"

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self._caps: dict[str, int] = {}
        self._by_ordinal: dict[int, str] | None = None
        self._options: dict[str, Any] = {}
        self._last_drift: list[Drift] = []  # the drift at the last check
        self._final_backend: weakref.ref[Any] | None = None  # the started backend for which `_last_drift` is final
        self._user_options: Any = None
        # Maps a GPU's UUID to a weak reference to the backend and the GPU's index in the backend's `local_devices()`.
        self._positions: dict[str, tuple[Callable[[], object], int]] = {}

    def why_absent(self) -> str | None:
        """Why JAX cannot use a GPU (not installed, no CUDA plugin, or excluded by JAX_PLATFORMS); None if JAX can.
        Imports nothing."""
        missing = super().why_absent()
        if missing:
            return missing
        asked = getattr(getattr(sys.modules.get("jax"), "config", None), "jax_platforms", None)
        platforms = (os.environ.get("JAX_PLATFORMS", "") if asked is None else asked).lower().split(",")
        named = [name.strip() for name in platforms if name.strip()]
        if named and not {"cuda", "gpu"} & set(named):
            return f"JAX_PLATFORMS={','.join(named)} keeps jax off the GPU"
        if not _has_plugin():
            return "this jax has no CUDA plugin; fix: pip install 'jax[cuda13]' or 'jax[cuda12]'"
        return None

    def _live(self, module: ModuleType) -> bool:
        return live_client() is not None

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        jax: Any = sys.modules["jax"]
        if live_client() is not None:
            standing = {uuid: (cap, cap) for uuid, cap in permanent_caps.items()}
            applied = accept_permanent_limits(self.name, "JAX", "pool", standing, caps)
            self._caps, self._final_backend = dict(caps), None
            return applied
        if not hasattr(jax.config, _OPTIONS):
            raise CapNotApplied(
                self.name, f"jax {jax.__version__} has no option {_OPTIONS}", "install jax 0.5 or newer"
            )
        before = getattr(jax.config, _OPTIONS)
        own = as_mapping(before)
        self._refuse_conflicts(own)
        usable = {device.uuid: device.usable for device in self.host.devices() if device.uuid in caps}
        if not usable:
            raise CapNotApplied(self.name, "no GPU of the budget is visible", "check CUDA_VISIBLE_DEVICES")
        fraction = min(_fraction(caps[uuid], total) for uuid, total in usable.items())
        if len({_fraction(caps[uuid], total) for uuid, total in usable.items()}) > 1:
            self._add_note("jax: it has one fraction for all GPUs, so its smallest cap applies to every GPU")
        fraction = self._stricter(fraction, own, usable, caps)
        wanted = {**own, "memory_fraction": fraction, "preallocate": self._preallocate(own)}
        # The option overrides XLA_PYTHON_CLIENT_ALLOCATOR, even if the variable is set later.
        wanted.setdefault("allocator", self._allocator)
        self._options, self._user_options = wanted, before
        replaced = Replacements()
        undo.add(self.name, functools.partial(self._restore, jax, replaced))
        jax.config.update(_OPTIONS, wanted)
        found = getattr(jax.config, _OPTIONS)
        if found != wanted:
            jax.config.update(_OPTIONS, before)
            raise CapNotApplied(
                self.name,
                f"the options read back as {found!r}",
                "report this with the version; until then leave jax out of the budget",
            )
        self._caps, self._final_backend = dict(caps), None
        replaced.put(type(jax.config), "update", lambda original: self._wrap_config_update(original, wanted, usable))
        return Applied(Enforcement.ENFORCED)

    def _restore(self, jax: Any, replaced: Replacements) -> None:
        """Restore the user's options. Raises CapNotApplied if the backend has started."""
        replaced.undo()
        if live_client() is not None:
            raise self._kept()
        if getattr(jax.config, _OPTIONS) == self._options:
            jax.config.update(_OPTIONS, self._user_options)
        self._caps = {}

    def _kept(self) -> CapNotApplied:
        """Record the caps that stay until the process ends. Returns the error that reports them."""
        permanent_caps.update(self._caps)
        return CapNotApplied(self.name, "its backend has started; its limit stays", "restart the process")

    def usage(self, device: Device) -> Usage | None:
        """Usage from the live backend's `memory_stats()` (1.4 µs); `pool_bytes` is the held memory."""
        backends = getattr(sys.modules.get(_BRIDGE), "_backends", None)  # inlines `live_client` for speed
        client = backends.get("cuda") if isinstance(backends, dict) else None
        if client is None:
            return None
        # `_positions` stores indices instead of JAX's device objects, which do not support weak references. A strong
        # reference to a device would keep the backend alive.
        backend, place = self._positions.get(device.uuid, _NOWHERE)
        known = backend() is client
        if known:
            found = client.local_devices()[place]
        else:
            found, unknown = self._device_by_uuid(client, device.uuid)
            if found is None:
                return Usage(None, None) if unknown else None
        stats = found.memory_stats()
        if not stats or "pool_bytes" not in stats:  # an allocator other than BFC has no pool
            return Usage(None, (stats or {}).get("bytes_in_use"))
        return usage_of((stats["pool_bytes"], stats["bytes_in_use"], 0, None, None, stats["peak_bytes_in_use"]))

    def _device_by_uuid(self, client: Any, wanted: str) -> tuple[Any, bool]:
        """Returns the client's device with this UUID, or None. The second value is True if the search found no such
        device, but met a device of unknown UUID."""
        known, unknown = self._numbering(), False
        for position, local in enumerate(client.local_devices()):
            uuid = known.get(_ordinal(local), "")
            if uuid == wanted:
                if (reference := weak_reference(client)) is not None:
                    self._positions[wanted] = reference, position
                return local, False
            unknown = unknown or not uuid
        return None, unknown

    def trim(self, device: Device) -> None:
        """Does nothing, as XLA has no function to shrink its pool."""

    def resize(self, caps: Mapping[str, int]) -> None:
        raise CapNotApplied(
            self.name,
            "JAX's memory_fraction is fixed once its backend has started",
            "change the budget file and restart the process",
        )

    def footprint(self, size: int) -> int:
        return round_up(size, 256)

    def drift(self) -> Sequence[Drift]:
        if not self._caps:
            return []
        client = live_client()
        if client is None:
            now = as_mapping(getattr(getattr(sys.modules.get("jax"), "config", None), _OPTIONS, None))
            lost = any(now.get(key) != self._options.get(key) for key in ("memory_fraction", "allocator"))
            change = f"its {_OPTIONS} were changed after memguard.init"
            return [Drift(change, "the cap will not hold")] if lost else []
        # Check each backend once, because the limit of a started backend never changes.
        if self._final_backend is None or self._final_backend() is not client:
            self._last_drift = [
                Drift(
                    f"its backend started {f'with a limit of {format_size(limit)}' if limit else 'without a limit'} "
                    f"on cuda:{ordinal}, but its cap is {format_size(cap)}"
                )
                for ordinal, (limit, cap) in self._limits().items()
                if not 0 < limit <= cap
            ]
            self._final_backend = weak_reference(client)
        return self._last_drift

    def forked(self) -> None:
        self._caps = {}  # so that the replacement of `update` passes the child's settings on unchanged

    def about(self) -> dict[str, str]:
        if live_client() is None:
            return {}
        return {"allocator": str(as_mapping(self._options).get("allocator", "bfc"))}

    def _refuse_conflicts(self, own: Mapping[str, Any]) -> None:
        fractions = [name for name in (_FRACTION, _DEPRECATED) if os.environ.get(name)]
        if len(fractions) == 2:
            raise ConflictingSetting(
                self.name,
                " and ".join(fractions),
                "are both set: JAX then loads no GPU backend and silently uses the CPU",
                f"unset {_DEPRECATED}, the deprecated one",
            )
        for setting, value in (
            (_ALLOCATORS.variable, os.environ.get(_ALLOCATORS.variable, "")),
            (f"{_OPTIONS} allocator", str(own.get("allocator", ""))),
        ):
            why = self._why_uncapped(value)
            if why is not None:
                raise ConflictingSetting(
                    self.name, f"{setting}={value}", why, f"unset it, so that JAX uses its allocator {self._allocator}"
                )

    def _why_uncapped(self, allocator: str) -> str | None:
        """Why the adapter cannot cap JAX with this allocator; None if it can."""
        return _ALLOCATORS.why_uncapped(allocator)

    def _wrap_config_update(
        self, original: Callable[..., Any], cap: Mapping[str, Any], usable: Mapping[str, int]
    ) -> Callable[..., Any]:
        """Wrap `jax.config.update` to keep the client's options within the cap, until the backend has read them."""

        def update(config: Any, name: str, val: Any) -> Any:
            if name != _OPTIONS or not self._caps or live_client() is not None:
                return original(config, name, val)
            original(config, name, val)  # JAX raises its own error for an invalid value
            theirs, lost = as_mapping(val), []
            held = {**theirs, "memory_fraction": cap["memory_fraction"], "allocator": cap["allocator"]}
            held.setdefault("preallocate", cap["preallocate"])
            fraction = theirs.get("memory_fraction")
            try:
                number = math.nan if fraction is None else float(fraction)
            except (TypeError, ValueError):
                number = math.inf
            if 0 < number <= cap["memory_fraction"]:
                held["memory_fraction"] = fraction
            elif fraction is not None:
                lost.append(f"memory_fraction={fraction}")
            allocator = theirs.get("allocator")
            if allocator is not None and self._why_uncapped(str(allocator)) is None:
                held["allocator"] = allocator
            elif allocator is not None:
                lost.append(f"allocator={allocator}")
            self._user_options, self._options = val, held
            original(config, name, held)
            if lost:
                size = min(self._caps[uuid] for uuid in usable)
                self._warn(
                    f"jax: {_OPTIONS} asks for {' and '.join(lost)}, past its cap of {format_size(size)}: the cap holds"
                )
            return None

        return update

    def _stricter(
        self, fraction: float, own: Mapping[str, Any], usable: Mapping[str, int], caps: Mapping[str, int]
    ) -> float:
        """The smaller of the cap's fraction and the user's fraction. Raises ConflictingSetting if the user's fraction
        allows more than the cap."""
        name = next((n for n in (_FRACTION, _DEPRECATED) if os.environ.get(n)), "")
        given = [(f"{_OPTIONS} memory_fraction", own.get("memory_fraction")), (name, os.environ.get(name))]
        for setting, value in given:
            if value is None or value == "":
                continue
            try:
                theirs = float(value)
                if not 0 < theirs < math.inf:
                    raise ValueError(value)
            except (TypeError, ValueError):
                raise ConflictingSetting(
                    self.name, f"{setting}={value}", "cannot be read", "unset it, or write a number such as 0.25"
                ) from None
            if any(int(theirs * total) > caps[uuid] + MIB for uuid, total in usable.items()):
                most = int(theirs * max(usable.values()))
                raise ConflictingSetting(
                    self.name,
                    f"{setting}={value}",
                    f"is looser than the cap of {format_size(min(caps[uuid] for uuid in usable))}",
                    f"unset it, lower it, or raise frameworks.jax in the budget to at least {-(-most // MIB)}MiB",
                )
            if theirs < fraction:
                self._add_note(f"jax: its own {setting}={value} is stricter than the cap and stays")
                fraction = theirs
        return fraction

    def _preallocate(self, own: Mapping[str, Any]) -> bool:
        """True if the user requested preallocation, so that JAX allocates its whole cap when its backend starts."""
        asked = own.get("preallocate", os.environ.get(_PREALLOCATE) or None)
        if asked is None or str(asked) in ("false", "False", "0"):
            return False
        setting = f"{_OPTIONS} preallocate" if "preallocate" in own else _PREALLOCATE
        self._add_note(f"jax: {setting} stays, so JAX takes its whole cap when its backend starts")
        return True

    def _local_devices(self) -> list[tuple[Any, str]]:
        """The devices of a live backend, each with its UUID ("" if unknown). JAX numbers devices as CUDA does."""
        client = live_client()
        if client is None:
            return []
        known = self._numbering()
        return [(found, known.get(_ordinal(found), "")) for found in client.local_devices()]

    def _numbering(self) -> dict[int, str]:
        """Map JAX's device index, which is CUDA's ordinal, to the device's UUID."""
        if self._by_ordinal is None:
            known = self.host.devices(ordinals=True)
            self._by_ordinal = {d.ordinal: d.uuid for d in known if d.ordinal is not None}
            if len(known) == 1:
                self._by_ordinal = self._by_ordinal or {0: known[0].uuid}
        return self._by_ordinal

    def _limits(self) -> dict[int, tuple[int, int]]:
        """Map each capped GPU's CUDA ordinal to the live backend's limit and the cap, in bytes."""
        return {
            _ordinal(found): ((found.memory_stats() or {}).get("bytes_limit", 0), self._caps[uuid])
            for found, uuid in self._local_devices()
            if uuid in self._caps
        }


def _ordinal(local: Any) -> int:
    ordinal = getattr(local, "local_hardware_id", None)
    return int(local.id if ordinal is None else ordinal)


def live_client() -> Any:
    """JAX's CUDA backend if it has started, else None. Never starts a backend."""
    bridge = sys.modules.get(_BRIDGE)
    backends = getattr(bridge, "_backends", None)
    return backends.get("cuda") if isinstance(backends, dict) else None


def _has_plugin() -> bool:
    """True if a CUDA plugin of JAX is installed. Imports no code, as `jax_plugins` is a namespace package."""
    try:
        spec = importlib.util.find_spec("jax_plugins")
    except (ImportError, ValueError):
        return False
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return any(path.name.startswith("xla_cuda") for folder in folders for path in Path(folder).glob("*"))


def as_mapping(options: Any) -> dict[str, Any]:
    """`jax_pjrt_client_create_options` as a mapping. JAX accepts a mapping or a string `key:value;key:value`."""
    if isinstance(options, str):
        pairs = (part.split(":", 1) for part in options.split(";") if ":" in part)
        return dict(pairs)
    return dict(options or {})


def _fraction(cap: int, total: int) -> float:
    """The largest single-precision fraction (JAX stores a 32-bit float) of `total` that stays within the cap."""
    fraction = struct.unpack("f", struct.pack("f", cap / total))[0]
    while int(fraction * total) > cap:
        bits = struct.unpack("I", struct.pack("f", fraction))[0] - 1
        fraction = struct.unpack("f", struct.pack("I", bits))[0]
    return float(fraction)

"""Caps PyTorch by its caching allocator's per-process fraction, to the exact byte.

Measured on an H200 with torch 2.11: the native allocator stops exactly at the cap. With expandable segments it maps
memory in steps of 20 MiB and may exceed the cap by less than one step, so the adapter sets the fraction 20 MiB lower.
The async backend compares the fraction with bytes *in use*, and its pool held 4 % more than the cap. So the adapter
makes a driver pool with `maxSize` current, from which the backend allocates (CUDA 12.2 and newer). Setting the fraction
creates no context.

The adapter replaces `torch._C._cuda_setMemoryFraction`, which every public function calls, to limit fractions that the
user sets later.

The cap does not cover the context, cuBLAS and cuDNN workspaces, NCCL, and allocations after
`caching_allocator_enable(False)`.

memguard attaches an out-of-memory observer to the native allocator, to learn of refused requests. The observer runs on
the requesting thread, after torch has released its locks (`c10/cuda/CUDACachingAllocator.cpp`). Torch cannot detach
an observer, and attaching an observer initialises CUDA.

Before the observer runs, torch has released its releasable cache, so nothing is reclaimable. Idle memory of a private
pool (a CUDA graph's, a `MemPool`'s) serves no other request. So torch's error text counts this idle memory as
allocated, and so does memguard's record of the refused request.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memguard._base.logs import log as _log
from memguard._base.types import Applied, Device, Drift, Enforcement, TraceEvent, Usage, usage_of
from memguard._base.undo import Undo
from memguard._base.units import GRANULE, MIB, format_size, round_up
from memguard._frameworks.driver_pages import PIECE, returned_by_trim
from memguard._frameworks.replacements import Replacements
from memguard._frameworks.rmm import resource
from memguard._frameworks.torch import settings
from memguard._frameworks.torch.spec import SPEC
from memguard.errors import CapNotApplied, ConflictingSetting, DeviceError

if TYPE_CHECKING:
    from memguard._devices.pools import CappedPool, DefaultPool

SEGMENT = 20 * MIB
"""Expandable segments map memory in steps of this many bytes (measured)."""

_observed: Any = None
"""The torch module to which memguard's observer is attached. Prevents a second attachment, because torch cannot detach
an observer."""
_observer: tuple[Torch, int] | None = None
"""The adapter that the observer calls, and the id of the adapter's process; None if no cap is set."""
_NO_LIBRARIES = frozenset[str]()
_FIGURES = (
    ("reserved_bytes", "current"),
    ("allocated_bytes", "current"),
    ("allocated_bytes", "peak"),
    ("active_bytes", "current"),
    ("inactive_split_bytes", "current"),
)
"""The names of the `_cuda_memoryStats` entries that `usage` reads."""


class Torch(resource.RmmClient):
    """PyTorch's CUDA allocator: native (with or without expandable segments) or cudaMallocAsync."""

    spec = SPEC

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self._caps: dict[str, int] = {}
        self._before: dict[int, float] = {}
        self._pools: dict[str, CappedPool | DefaultPool] = {}
        self._uuids: dict[str, int] | None = None
        self._set: dict[int, float] = {}  # the fractions in effect, as torch reports them, by ordinal
        self._expandable: bool | None = None  # whether segments were expandable when memguard set the caps
        self._most: dict[int, tuple[float, float]] = {}  # the cap's fraction by ordinal: as set, as reported
        self._raw_set: Callable[[float, int], None] | None = None
        self._reconfigured = self._uncached = False
        self._unseen: str | None = None

    def why_absent(self) -> str | None:
        """Why torch cannot use a GPU (not installed, or built without CUDA according to the text of `version.py`); None
        if torch can. Imports nothing."""
        missing = super().why_absent()
        if missing:
            return missing
        built_for = settings.cuda_version()
        if built_for is None:
            return "this torch is built without CUDA; fix: install a CUDA build of torch"
        return None

    def _live(self, module: ModuleType) -> bool:
        query = getattr(getattr(module, "cuda", None), "is_initialized", None)  # missing during torch's import
        return query is not None and bool(query())

    def apply(self, caps: Mapping[str, int], options: Mapping[str, Any], undo: Undo) -> Applied:
        torch = self._torch()
        if torch.version.hip:
            raise CapNotApplied(self.name, "this is a ROCm build", "memguard budgets NVIDIA GPUs: install a CUDA build")
        if not hasattr(torch._C, "_cuda_setMemoryFraction"):
            raise CapNotApplied(self.name, "this build has no CUDA allocator", "install a CUDA build of torch")
        settings.refuse(self.host.devices(), caps)
        if torch.cuda.get_allocator_backend() == "pluggable":
            return self._apply_pluggable(caps, undo)
        undo.add(self.name, functools.partial(self._lift, torch))
        self._caps = dict(caps)
        self._replace(torch, undo)
        if self._live(torch):
            self._set_now(torch)
            return Applied(Enforcement.ENFORCED)
        self._queue(torch, undo)
        note = "torch: the cap is set when torch initialises CUDA, before its first allocation"
        return Applied(Enforcement.ENFORCED, notes=(note,))

    def usage(self, device: Device) -> Usage | None:
        """Usage from `torch._C._cuda_memoryStats` (22 µs), which initialises nothing in a live torch.

        None for a GPU on which torch never held memory, although a live torch has initialised all GPUs.
        """
        torch = sys.modules.get("torch")
        live = getattr(getattr(torch, "cuda", None), "is_initialized", None)  # inlines `_live` for speed
        if torch is None or live is None or not live():
            return None
        known = self._uuids
        ordinal = (self._ordinals(torch) if known is None else known).get(device.uuid)
        if ordinal is None:
            return None
        if self._rmm is not None:
            return self._rmm.usage(device.uuid)
        try:
            stats = torch._C._cuda_memoryStats(ordinal)
        except RuntimeError:  # a pluggable allocator reports nothing
            return Usage(None, None)
        try:
            held, allocated = stats["reserved_bytes"]["all"]["current"], stats["allocated_bytes"]["all"]
            in_use, peak = allocated["current"], allocated["peak"]
            active, stuck = stats["active_bytes"]["all"]["current"], stats["inactive_split_bytes"]["all"]["current"]
        except (KeyError, TypeError):  # this torch does not report all of these figures
            held, in_use, peak, active, stuck = [settings.stat(stats, *figure) for figure in _FIGURES]
        pool = self._pools.get(device.uuid) if self._pools else None
        pooled = pool is not None and pool.peak()
        if held == 0 and not pooled and settings.never_held(stats):
            return None
        if pool is not None:
            reserved, used = pool.reserved(), pool.used()
            return Usage(reserved, used, returned_by_trim(reserved, used), peak=peak)
        if held is None or in_use is None:
            return Usage(held, in_use)
        # Idle blocks of a partly used segment are cached but not reclaimable, as PyTorch frees whole segments only.
        idle = held - (active or in_use) - (stuck or 0)
        return usage_of((held, in_use, max(0, idle), None, None, peak))

    def trim(self, device: Device) -> None:
        """Call `torch.cuda.empty_cache()`, which frees every wholly unused segment on every device; under the async
        backend, also trim the driver pool. Does nothing during a graph capture."""
        torch = sys.modules.get("torch")
        if torch is None or not self._live(torch) or self.capturing():
            return
        torch.cuda.empty_cache()
        pool = self._pools.get(device.uuid)
        if pool is not None:
            torch.cuda.synchronize(self._ordinals(torch)[device.uuid])
            pool.trim()

    def trim_partly(self, device: Device, needed: int) -> None:
        """Under the async backend, release at least `needed` bytes of its driver pool. Otherwise call `trim`, because
        `empty_cache()` cannot release only a part.

        `empty_cache()` silently does nothing while another thread captures a CUDA graph or a `MemPool` is in use.
        """
        torch, pool = sys.modules.get("torch"), self._pools.get(device.uuid)
        if torch is None or pool is None or not self._live(torch):
            self.trim(device)
        elif not self.capturing():
            torch.cuda.synchronize(self._ordinals(torch)[device.uuid])  # waits until the queued frees have run
            pool.trim(max(pool.reserved() - round_up(needed, PIECE), 0))  # the argument: bytes that the pool keeps

    @resource.unless_rmm
    def resize(self, caps: Mapping[str, int]) -> None:
        """Change the fractions. Any thread may call this while other threads allocate.

        Torch stores the fraction without locking its allocator (`c10/cuda/CUDACachingAllocator.cpp`), and the next
        request that needs a segment reads the fraction. Some versions clear the old fraction before they store the new
        one. In between, an allocation on a thread without the GIL (autograd's) is not capped. Torch's own public
        function has the same gap.
        """
        if self._pools:
            raise CapNotApplied(
                self.name,
                "the driver pool under the async backend has a fixed size",
                "change the budget file and restart, or use the native backend",
            )
        before, self._caps = self._caps, dict(caps)
        torch = sys.modules.get("torch")
        if torch is None or not self._live(torch):
            return
        try:
            self._set_now(torch)
        except BaseException:
            self._caps = before
            self._set_now(torch)  # restores the previous caps
            raise

    def fixed(self) -> bool:
        """False for the native allocator, whose caps can change. True for the async backend, whose pool has a fixed
        size, and for RMM, whose limit is fixed."""
        torch: Any = sys.modules.get("torch")
        if not hasattr(getattr(torch, "_C", None), "_cuda_getAllocatorBackend"):  # `apply` refuses such a build
            return False
        return bool(torch.cuda.get_allocator_backend() != "native")

    def footprint(self, size: int) -> int:
        """The size of the segment that the caching allocator requests: 2 MiB for `size` up to 1 MiB, 20 MiB below 10
        MiB, else `size` rounded up to a multiple of 2 MiB."""
        if self._pools:
            return round_up(size, PIECE)
        segment = GRANULE if size <= MIB else SEGMENT if size < 10 * MIB else round_up(size)
        torch, expandable = sys.modules.get("torch"), self._expandable
        if expandable is None:  # `_set_now` has not stored the setting; reading it lists all blocks
            expandable = torch is not None and self._live(torch) and settings.expandable(torch)
        return max(segment, size) + SEGMENT if expandable else segment

    @resource.unless_rmm
    def drift(self) -> Sequence[Drift]:
        torch = sys.modules.get("torch")
        live = getattr(getattr(torch, "cuda", None), "is_initialized", None)  # inlines `_live` for speed
        if torch is None or not self._set or live is None or not live():
            return []
        if torch.cuda.get_allocator_backend() == "pluggable":
            return [Drift("its allocator was replaced after memguard.init", "the cap no longer holds")]
        read = getattr(torch._C, "_cuda_getMemoryFraction", None)
        lost = []
        if self._uncached:
            lost.append(Drift("caching_allocator_enable(False) was called: past its cache no cap holds"))
        if read is None:
            return lost
        for ordinal, (_, most) in self._most.items():
            if (now := read(ordinal)) > most:
                change = f"its fraction on cuda:{ordinal} was raised from {most:.4g} to {now:.4g} after memguard.init"
                lost.append(Drift(change, "the cap no longer holds"))
        return lost

    @resource.unless_rmm
    def unseen(self) -> str | None:
        return self._unseen

    def capturing(self) -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and self._live(torch) and bool(torch.cuda.is_current_stream_capturing())

    def libraries(self) -> frozenset[str]:
        """One `nccl N` for each process group that has run a collective: NCCL allocates its memory at the first
        collective."""
        distributed = sys.modules.get("torch.distributed.distributed_c10d")
        groups = getattr(getattr(distributed, "_world", None), "pg_map", None)
        if not groups:
            return _NO_LIBRARIES
        count = sum(1 for group in list(groups) if _communicates(group))
        return frozenset(f"nccl {number}" for number in range(1, count + 1))

    def record(self) -> Callable[[], list[TraceEvent]] | None:
        """Record PyTorch's own allocation history, at most `history.ENTRIES` entries. None with the async backend,
        which has no history."""
        torch = sys.modules.get("torch")
        if torch is None or not self._live(torch) or self.about()["allocator"] != "native":
            return None
        from memguard._frameworks.torch import history

        try:
            torch.cuda.memory._record_memory_history(max_entries=history.ENTRIES, context=None, stacks="python")
        except (AttributeError, RuntimeError, TypeError):
            return None

        def stop() -> list[TraceEvent]:
            traces = torch.cuda.memory._snapshot()["device_traces"]
            torch.cuda.memory._record_memory_history(enabled=None)
            return history.events(traces)

        return stop

    def about(self) -> dict[str, str]:
        torch = sys.modules.get("torch")
        if torch is None or not self._live(torch):
            return {}
        backend = str(torch.cuda.get_allocator_backend())
        return {"allocator": "expandable_segments" if backend == "native" and settings.expandable(torch) else backend}

    def forked(self) -> None:
        self._caps, self._set, self._most = {}, {}, {}  # so that calls queued for torch's initialisation set nothing

    def _torch(self) -> Any:
        return sys.modules["torch"]

    def _replace(self, torch: Any, undo: Undo) -> None:
        """Replace torch's setters, so that settings which the user makes later cannot exceed the cap. Replaces private
        functions, which all public ones call, because user code may already hold references to the public functions."""
        replaced = Replacements()
        undo.add(self.name, replaced.undo)
        self._raw_set = torch._C._cuda_setMemoryFraction
        replaced.put(torch._C, "_cuda_setMemoryFraction", self._wrap_set_fraction)
        replaced.put(torch._C, "_cuda_changeCurrentAllocator", self._wrap_change_allocator)
        replaced.put(torch._C, "_cuda_cudaCachingAllocator_enable", self._wrap_enable_caching)
        for name in ("_accelerator_setAllocatorSettings", "_cuda_cudaCachingAllocator_set_allocator_settings"):
            replaced.put(torch._C, name, self._wrap_set_settings)

    def _wrap_set_fraction(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_fraction(fraction: float, device: int) -> None:
            most = self._most.get(device)
            if most is None:
                original(fraction, device)
                return
            held, read = most
            original(held if fraction > read else fraction, device)
            self._record_fraction(device, fraction, "torch.cuda.set_per_process_memory_fraction")

        return set_fraction

    def _record_fraction(self, ordinal: int, fraction: float, setting: str) -> None:
        """Record the user's fraction, which the undo restores. Until the undo, the smaller of this fraction and the cap
        is in effect."""
        read = getattr(self._torch()._C, "_cuda_getMemoryFraction", None)
        self._before[ordinal] = fraction
        if read is not None:
            self._set[ordinal] = read(ordinal)
        most = self._most[ordinal][1]
        if fraction > most:
            self._warn(
                f"torch: {setting} asks for {fraction:.4g} of cuda:{ordinal}, more than its cap, which is {most:.4g}: "
                "the cap holds"
            )

    def _wrap_change_allocator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def change_allocator(allocator: Any) -> None:
            torch = self._torch()
            if self._caps and not self._live(torch) and not resource.is_loaded_for("torch"):
                raise self._unlimited()
            original(allocator)  # a live torch refuses the change; RMM's allocator is limited when torch becomes live
            self._check_drift_now()

        return change_allocator

    def _wrap_enable_caching(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enable(value: bool) -> None:
            original(value)
            self._uncached = not value
            self._check_drift_now()

        return enable

    def _wrap_set_settings(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_settings(env: str) -> Any:
            answer, torch = original(env), self._torch()
            if not self._most or not self._live(torch):
                self._reconfigured = True  # memguard reads the setting when torch becomes live
                return answer
            read = getattr(torch._C, "_cuda_getMemoryFraction", None)
            for ordinal in list(self._most) if read is not None else ():
                if read is not None and read(ordinal) != self._set[ordinal]:
                    self._record_fraction(ordinal, read(ordinal), f"the setting {env!r}")
            self._set_now(torch)
            return answer

        return set_settings

    def _unlimited(self) -> ConflictingSetting:
        return ConflictingSetting(
            self.name,
            "torch.cuda.memory.change_current_allocator",
            "replaces the caching allocator with one that memguard cannot limit",
            "remove that call, or leave torch out of the budget",
        )

    def _lift(self, torch: Any) -> None:
        self._caps = {}
        self._restore(torch)

    def _queue(self, torch: Any, undo: Undo) -> None:
        """Set the fractions during torch's CUDA initialisation, which runs the calls queued by `_lazy_call`."""
        if not hasattr(torch.cuda, "_lazy_call"):
            why = f"torch {torch.__version__} has no torch.cuda._lazy_call"
            raise CapNotApplied(self.name, why, "call torch.cuda.init() before memguard.init()")

        def set_caps() -> None:
            if not self._caps:
                return
            try:
                settings.refuse((), {})  # the environment may have disabled caching since `apply`
                if torch.cuda.get_allocator_backend() == "pluggable":  # the allocator was replaced since memguard.init
                    applied = self._apply_pluggable(self._caps, undo)
                    if self._rmm is not None and self._rmm.uncapped is not None:
                        self._rmm.lost = [Drift(self._rmm.uncapped)]
                    else:
                        self.notes += applied.notes
                else:
                    self._set_now(torch)
            except BaseException:
                self._restore(torch)
                raise

        def unqueue() -> None:  # if `set_caps` stays queued, it does nothing, because `_caps` is empty by then
            queue = getattr(torch.cuda, "_queued_calls", None)
            if isinstance(queue, list):
                queue[:] = [entry for entry in queue if entry[0] is not set_caps]

        undo.add(self.name, unqueue)
        torch.cuda._lazy_call(set_caps)

    def _set_now(self, torch: Any) -> None:
        """Set the fraction of every capped device and read it back."""
        if self._caps:
            self._check_properties(torch)
        backend = torch.cuda.get_allocator_backend()
        self._expandable = backend != "cudaMallocAsync" and bool(self._caps) and settings.expandable(torch)
        for uuid, ordinal in self._ordinals(torch).items():
            if uuid not in self._caps:
                continue
            allowed = self._caps[uuid]
            if backend == "cudaMallocAsync":
                self._put_pool_under(uuid, ordinal, allowed)
            elif self._expandable:
                allowed -= SEGMENT
            self._set_fraction(torch, ordinal, allowed)
        self._unseen = self._observe(torch, backend) if self._set else None

    def _observe(self, torch: Any, backend: str) -> str | None:
        """Attach the observer to a live torch's allocator, to learn of refused requests. Returns the reason if that is
        impossible, else None."""
        global _observed, _observer
        attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if backend != "native" or attach is None:
            return f"torch's {backend} allocator has no observer of refused requests"
        if _observed is not torch:
            try:
                attach(_on_refused)
            except (RuntimeError, TypeError) as error:
                return f"torch's allocator took no observer of refused requests: {error}"
            _observed = torch
        _observer = self, os.getpid()
        return None

    def _report_observed(self, ordinal: int, requested: int, allowed: int, free: int) -> None:
        uuid = next((uuid for uuid, number in (self._uuids or {}).items() if number == ordinal), None)
        if uuid in self._caps:
            own = allowed if allowed < self._caps[uuid] - SEGMENT else None  # the user's fraction, if stricter
            in_use, pooled = self._in_use(ordinal, requested)
            figures = {"cap": own, "free": free, "in_use": in_use, "pooled": pooled}
            self._report_refusal(None, uuid, requested, "observer", reclaimable=0, **figures)

    def _in_use(self, ordinal: int, requested: int) -> tuple[int | None, int | None]:
        """Returns the bytes in use plus the idle bytes of private pools, and these idle bytes alone. Both None if all
        idle bytes together are too few for the request, so that private pools make no difference."""
        torch = self._torch()
        stats = torch._C._cuda_memoryStats(ordinal)
        held, in_use = (settings.stat(stats, name, "current") for name in ("reserved_bytes", "allocated_bytes"))
        if held is None or in_use is None or held - in_use < requested:
            return None, None
        pooled = settings.idle_in_private_pools(torch, ordinal)
        return in_use + pooled, pooled

    def _set_fraction(self, torch: Any, ordinal: int, allowed: int) -> None:
        total = torch.cuda.get_device_properties(ordinal).total_memory
        if allowed <= 0:
            raise CapNotApplied(
                self.name, f"expandable segments need a cap above {format_size(SEGMENT)}", "raise its share"
            )
        read = getattr(torch._C, "_cuda_getMemoryFraction", None)
        first = ordinal not in self._before
        before = self._before.setdefault(ordinal, read(ordinal) if read is not None else 1.0)
        most = _exactly(allowed, total)
        if int(before * total) < allowed:
            self._add_note(f"torch: its own fraction of {before:.4g} is stricter than the cap and stays")
            allowed = int(before * total)
        elif first and before < 1.0 and int(before * total) > allowed + SEGMENT:
            setting = f"torch.cuda.set_per_process_memory_fraction({before:.4g})"
            if not self._reconfigured:
                raise settings.looser(setting, int(before * total), allowed)
            self._warn(
                f"torch: the allocator's settings ask for {before:.4g} of cuda:{ordinal}, more than its cap, which is "
                f"{most:.4g}: the cap holds"
            )
        fraction = _exactly(allowed, total)
        set_fraction = self._raw_set or torch._C._cuda_setMemoryFraction
        set_fraction(fraction, ordinal)
        back = read(ordinal) if read is not None else fraction
        if abs(back * total - allowed) >= 1:
            set_fraction(self._set.get(ordinal, before), ordinal)
            what = f"set {allowed} bytes, read back {int(back * total)}"
            raise CapNotApplied(self.name, what, "report this with the torch version")
        self._set[ordinal] = back
        self._most[ordinal] = (most, back if fraction == most else most)

    def _apply_pluggable(self, caps: Mapping[str, int], undo: Undo) -> Applied:
        """Cap an allocator set by `change_current_allocator`. memguard can limit only RMM's allocator."""
        if not resource.is_loaded_for("torch"):
            raise self._unlimited()
        return self._limit_rmm(caps, undo)  # takes no torch ordinals, because reading them would initialise torch

    def _put_pool_under(self, uuid: str, ordinal: int, allowed: int) -> None:
        if uuid in self._pools:
            return
        from memguard._devices.pools import CappedPool

        try:
            self._pools[uuid] = CappedPool(ordinal, allowed)
        except DeviceError as error:
            raise CapNotApplied(
                self.name,
                f"under cudaMallocAsync the fraction counts bytes in use, not what the pool holds, and no driver pool "
                f"could be put under it ({error.advice.reason})",
                "use PyTorch's native allocator, or a driver for CUDA 12.2 or newer (535)",
            ) from error

    def _restore(self, torch: Any) -> None:
        """Restore the former fractions, except where the user has set another fraction. If one step fails, the other
        steps still run."""
        global _observer
        if _observer is not None and _observer[0] is self:
            _observer = None
        self._expandable = None
        read = getattr(torch._C, "_cuda_getMemoryFraction", None)
        interrupted = True  # stays True only after a Ctrl-C, so that the next call restores the rest
        try:
            with ExitStack() as steps:
                for pool in self._pools.values():
                    steps.callback(pool.restore)
                for ordinal, before in self._before.items():
                    # If `_set` has no entry, a Ctrl-C may have come after the fraction was set, before it was recorded.
                    if read is None or self._set.get(ordinal) in (None, read(ordinal)):
                        set_fraction = self._raw_set or torch._C._cuda_setMemoryFraction
                        steps.callback(set_fraction, before, ordinal)
            interrupted = False
        except Exception:
            interrupted = False
            raise
        finally:
            if not interrupted:
                self._before, self._set, self._most, self._pools = {}, {}, {}, {}

    def _check_properties(self, torch: Any) -> None:
        """Compare torch's multiprocessor counts with the driver's.

        If torch is bound to TensorFlow's CUDA runtime, it misreads the counts, and its first matrix product kills the
        process with SIGFPE (measured).
        """
        for uuid, ordinal in self._ordinals(torch).items():
            true = self.host.multiprocessors(uuid)
            believed = torch.cuda.get_device_properties(ordinal).multi_processor_count
            if true is not None and believed != true:
                raise CapNotApplied(
                    self.name,
                    f"torch reads {believed} multiprocessors, the driver says {true}: TensorFlow's CUDA "
                    "runtime was loaded before torch's, and the first matrix product would kill the process (SIGFPE)",
                    "call memguard.init() before `import tensorflow`, or import torch before tensorflow",
                )
            if "tensorflow" not in sys.modules:
                continue
            if true is None:
                self._add_note("torch beside tensorflow: not checked, because the driver does not show this GPU")
            else:
                self._add_note(
                    f"torch beside tensorflow: checked, both torch and the driver see {true} multiprocessors"
                )

    def _ordinals(self, torch: Any) -> dict[str, int]:
        """Map UUIDs to CUDA's ordinals, from a live torch. Torch's `uuid` lacks the prefix `GPU-` of NVML's UUIDs."""
        if self._uuids is None:
            count = torch.cuda.device_count()
            uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
            self._uuids = {_nvml_uuid(uuid): i for i, uuid in enumerate(uuids)}
        return self._uuids


def _exactly(allowed: int, total: int) -> float:
    """The fraction from which torch computes exactly `allowed` bytes, although torch truncates the product."""
    fraction = min(allowed / total, 1.0)
    return fraction if int(fraction * total) >= allowed else min(math.nextafter(fraction, 1.0), 1.0)


def _on_refused(device: int, requested: int, allowed: int, free: int) -> None:
    """The observer that torch's allocator calls before it raises OutOfMemoryError. Must not raise, because its own
    exception would replace OutOfMemoryError."""
    found = _observer
    if found is None or found[1] != os.getpid():
        return
    try:
        found[0]._report_observed(device, requested, allowed, free)
    except Exception as error:
        _log.debug("torch: a refused request was not recorded: %s", error)


def _nvml_uuid(uuid: str) -> str:
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _communicates(group: Any) -> bool:
    """True if a process group has created its NCCL communicator. Only ProcessGroupNCCL has `_is_initialized`."""
    try:
        import torch

        query = getattr(group._get_backend(torch.device("cuda")), "_is_initialized", None)
        return bool(query()) if query is not None else False
    except RuntimeError:  # the group has no backend for CUDA tensors (gloo), or was destroyed
        return False

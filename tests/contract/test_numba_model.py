"""Numba under a cap, on a model of Numba's memory managers in plain Python (`fake_numba`), over counted pages."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.capping import AppliedCaps, apply_caps
from support.drifts import drifts

from memguard._base.types import Device, Enforcement, State, Usage
from memguard._base.units import GIB, MIB
from memguard._devices import contexts, streams
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks import driver_pages
from memguard._frameworks.import_hook import ImportHook
from memguard._frameworks.numba import watch
from memguard._frameworks.numba.adapter import Numba
from memguard.errors import CapNotApplied, ConflictingSetting

pytestmark = pytest.mark.one_case  # no version of what is installed changes it: all of it is our own code

HERE = Path(__file__).parent


def forget() -> None:
    driver_pages.slabs.clear()
    watch.ended.marks.clear()
    watch._unmarked.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("numba", "rmm", "card")]:
        del sys.modules[name]


def driver_of_model() -> Any:
    return sys.modules["numba.cuda.cudadrv.driver"]


def instead(name: str) -> Callable[..., Any]:
    """What the model has in the place of a call to CUDA."""
    return lambda *args: getattr(driver_of_model(), name)(*args)


class Setting:
    """The model freshly imported, a framework over it, and the figures of its driver."""

    def __init__(self, *gpus: str) -> None:
        self.host = SimulatedHost(gpus or ("h200", "h200"))
        self.framework = Numba(self.host)
        self.gpu, self.other = (*self.host.devices(), self.host.devices()[0])[:2]

    def bring(self) -> None:
        importlib.import_module("numba.cuda")
        self.driver.Device.uuids = tuple(gpu.uuid for gpu in self.host.devices())

    def apply(self, *caps: int, to: Numba | None = None) -> AppliedCaps:
        self.bring()
        uuids = [gpu.uuid for gpu in self.host.devices()]
        wanted = caps if len(caps) == len(uuids) else (caps or (64 * MIB,)) * len(uuids)
        return apply_caps(to or self.framework, dict(zip(uuids, wanted, strict=True)))

    @property
    def driver(self) -> Any:
        return sys.modules["numba.cuda.cudadrv.driver"]

    @property
    def cuda(self) -> Any:
        return sys.modules["numba.cuda"]

    def taken(self, gpu: int = 0) -> int:
        """What the driver has really handed out."""
        return int(self.driver.cards[gpu].taken)

    def pending(self, gpu: int = 0) -> int:
        return len(self.driver.driver.devices[gpu].primary_context.memory_manager.deallocations)

    def usage(self, gpu: Device | None = None) -> Usage:
        found = self.framework.usage(gpu or self.gpu)
        assert found is not None
        return found

    def refused(self, size: int) -> Any:
        with pytest.raises(self.driver.CudaAPIError) as caught:
            self.cuda.device_array(size)
        return caught.value

    def fill(self, size: int = 8 * MIB) -> list[Any]:
        live: list[Any] = []
        with pytest.raises(self.driver.CudaAPIError):
            for _ in range(4000):
                live.append(self.cuda.device_array(size))
        return live


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Setting]]:
    """Make a setting. The model is imported anew for every test and gone afterwards."""
    saved = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("numba", "rmm", "card")}
    forget()
    monkeypatch.syspath_prepend(HERE / "fake_numba")
    others = [finder for finder in sys.meta_path if type(finder).__name__ != "NumbaCudaFinder"]  # numba-cuda's .pth
    monkeypatch.setattr(sys, "meta_path", others)
    for owner, name in (
        (contexts, "pushed"), (contexts, "current_handle"), (contexts, "primary"), (streams, "Mark"),
        (streams, "blocking"), (streams, "quick_idle"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, instead(name))
    monkeypatch.setattr(contexts, "current", lambda: next(iter(driver_of_model()._stack()[-1:]), None))
    monkeypatch.setattr(streams, "awaits_capture", lambda context: driver_of_model().gpu.awaits_capture(context))
    for name in (
        "NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM",
        "NUMBA_DISABLE_CUDA",
        "NUMBA_ENABLE_CUDASIM",
        "NUMBA_CUDA_MEMORY_MANAGER",
    ):
        monkeypatch.delenv(name, raising=False)
    yield Setting
    gc.collect()
    forget()
    sys.modules.update(saved)


Model = Callable[..., Setting]


# what it is, before anything is allocated


def test_looking_makes_no_context(model: Model) -> None:
    setting = model()
    framework = setting.framework
    assert framework.state() is State.IMPORTABLE
    importlib.import_module("numba")
    assert framework.state() is State.IMPORTABLE, "only numba.cuda counts"
    setting.bring()
    assert framework.state() is State.IMPORTED
    setting.apply()
    framework.trim(setting.gpu)
    assert framework.usage(setting.gpu) is None and framework.drift() == []
    assert framework.state() is State.IMPORTED and setting.driver.cards[0].contexts == 0
    setting.cuda.device_array(1)
    assert framework.state() is State.LIVE and framework.usage(setting.other) is None


@pytest.mark.parametrize("name", ["NUMBA_DISABLE_CUDA", "NUMBA_ENABLE_CUDASIM"])
def test_kept_off_the_gpu_it_is_absent(model: Model, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    setting = model()
    for value in ("0", "", " 0 "):
        monkeypatch.setenv(name, value)
        assert setting.framework.state() is State.IMPORTABLE and setting.framework.why_absent() is None
    monkeypatch.setenv(name, "1")
    assert setting.framework.state() is State.ABSENT
    assert setting.framework.why_absent() == f"{name}=1 keeps numba off the GPU"
    setting.bring()
    assert setting.framework.state() is State.ABSENT, "imported too"


def test_capped_by_the_import_hook(model: Model) -> None:
    setting, hook = model(), ImportHook()
    hook.watch(setting.framework.hook, lambda: setting.apply(16 * MIB) and None)
    importlib.import_module("numba")
    assert hook in sys.meta_path
    importlib.import_module("numba.cuda")
    assert hook not in sys.meta_path and len(setting.fill()) == 2


# the cap


@pytest.mark.parametrize("gpu", [0, 1])
@pytest.mark.parametrize("size", [2 * MIB, 5 * MIB + 1, 8 * MIB, 64 * MIB])
def test_the_cap_is_exact_on_each_gpu(model: Model, gpu: int, size: int) -> None:
    setting = model()
    caps = (64 * MIB, 96 * MIB)
    setting.apply(*caps)
    with setting.cuda.gpus[gpu]:
        live = setting.fill(size)
        pages = -(-size // (2 * MIB)) * 2 * MIB
        assert len(live) == caps[gpu] // pages
        usage = setting.usage(setting.host.devices()[gpu])
        assert usage.held == setting.taken(gpu) == len(live) * pages <= caps[gpu]
        assert usage.in_use == usage.peak == len(live) * size
    assert setting.taken(1 - gpu) == 0


@pytest.mark.parametrize("size", [5000, 60_000, 300_000, 700_000, 716_800, MIB - 1, MIB])
def test_gaps_in_the_drivers_slabs_are_counted(model: Model, size: int) -> None:
    """Measured on an H200: of 0.7 MiB only two fit a slab, 60 pieces take 60 MiB."""
    setting = model()
    setting.apply(8 * MIB)
    live = setting.fill(size)
    fit = 2 * MIB // (-(-size // 512) * 512)
    assert len(live) == 4 * fit and setting.usage().held == setting.taken() == 8 * MIB
    assert setting.driver.cards[0].most == 8 * MIB, "the driver was not even asked for more"
    assert setting.usage().in_use == len(live) * size


def test_gaps_that_are_too_small_one_by_one_open_no_further_slab(model: Model) -> None:
    setting = model()
    setting.apply(4 * MIB)
    live = [setting.cuda.device_array(size) for size in (700_000, 700_000, 600_000, MIB, MIB)]
    assert setting.taken() == 4 * MIB
    kept = live[1], live[3], live[4]
    live.clear()
    setting.framework.trim(setting.gpu)
    setting.refused(800_000)  # of that slab 1,397,152 bytes are free, in two parts
    assert setting.taken() == 4 * MIB == setting.usage().held and setting.pending() == 0
    live = [setting.cuda.device_array(690_000), setting.cuda.device_array(690_000)]
    assert setting.taken() == 4 * MIB
    del kept


def test_what_came_and_went_leaves_no_gap_behind(model: Model) -> None:
    setting = model()
    setting.apply(2 * MIB)
    kept = setting.cuda.device_array(MIB)
    for _ in range(2200):
        setting.cuda.device_array(513)
    assert setting.cuda.device_array(MIB - 20 * 1024) is not None
    del kept


def test_the_error_is_numbas_own(model: Model) -> None:
    setting = model()
    setting.apply()
    live = setting.cuda.device_array(40 * MIB)
    error = setting.refused(30 * MIB)
    assert type(error) is setting.driver.CudaAPIError and error.code == 2
    assert error.code is setting.driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    assert "asked for 30.0 MiB, holds 40.0 MiB of the 64.0 MiB that the memguard budget gives numba" in error.msg
    assert setting.taken() == 40 * MIB
    del live


def test_without_nvidias_binding_the_code_is_a_number(model: Model) -> None:
    """numba-cuda up to 0.20 with its own ctypes binding: no `binding`, and addresses in ctypes objects."""
    setting = model()
    setting.apply()
    import ctypes

    free = setting.driver.Driver.cuMemFree
    take = setting.driver.Driver.cuMemAlloc

    class Pointer(ctypes.c_size_t):
        __hash__ = object.__hash__

    setting.driver.Driver.cuMemAlloc = lambda self, size: Pointer(take(self, size))

    def give(self: Any, pointer: Any) -> None:
        free(self, pointer.value)

    give.__name__ = "cuMemFree"
    setting.driver.Driver.cuMemFree = give
    setting.driver.AutoFreePointer.device_pointer_value = property(lambda self: self.address.value)
    array = setting.cuda.device_array(60 * MIB)
    del array
    assert setting.usage().in_use == 0 and setting.usage().reclaimable == 60 * MIB
    array = setting.cuda.device_array(60 * MIB)
    binding, clear = setting.driver.binding, setting.driver._PendingDeallocs.clear
    del setting.driver.binding
    assert setting.refused(6 * MIB).code == 2
    setting.driver.binding, setting.driver._PendingDeallocs.clear = binding, clear
    del array


def test_pending_frees_count_until_the_driver_has_them(model: Model) -> None:
    setting = model()
    setting.apply()
    arrays = [setting.cuda.device_array(4 * MIB + 1) for _ in range(3)]
    small = setting.cuda.device_array(1000)
    arrays.pop()
    usage = setting.usage()
    assert setting.pending() == 1 and usage.held == setting.taken() == 20 * MIB
    assert usage.in_use == 2 * (4 * MIB + 1) + 1000 and usage.reclaimable == 6 * MIB
    assert usage.peak == 3 * (4 * MIB + 1) + 1000
    del small
    assert setting.usage().reclaimable == 8 * MIB, "a slab goes back with its last piece"
    setting.framework.trim(setting.gpu)
    assert setting.pending() == 0 and setting.usage().held == setting.taken() == 12 * MIB
    assert setting.usage().reclaimable == 0


def test_a_slab_with_a_live_piece_is_not_promised(model: Model) -> None:
    setting = model()
    setting.apply()
    kept, gone = setting.cuda.device_array(1000), setting.cuda.device_array(1000)
    del gone
    assert setting.usage().reclaimable == 0
    setting.framework.trim(setting.gpu)
    assert setting.usage().held == 2 * MIB
    del kept


def test_pending_frees_are_flushed_before_a_refusal(model: Model) -> None:
    setting = model()
    setting.apply()
    gone = [setting.cuda.device_array(8 * MIB) for _ in range(8)]
    gone.clear()
    assert setting.pending() == 8 and setting.taken() == 64 * MIB
    array = setting.cuda.device_array(60 * MIB)
    assert setting.taken() == 60 * MIB and setting.pending() == 0
    del array


def test_where_numba_may_not_flush_nothing_passes_the_cap(model: Model) -> None:
    setting = model()
    setting.apply()
    with setting.cuda.defer_cleanup():
        gone = setting.cuda.device_array(60 * MIB)
        del gone
        setting.refused(8 * MIB)
        assert setting.taken() == 60 * MIB
    assert setting.cuda.device_array(64 * MIB) is not None


def test_numbas_own_rules_flush(model: Model) -> None:
    """More than ten are pending, or more than a fifth of the card."""
    setting = model()
    setting.apply(15 * GIB)
    arrays = [setting.cuda.device_array(4 * MIB) for _ in range(11)]
    for left in range(10, 0, -1):
        arrays.pop()
        assert setting.pending() == 11 - left
    arrays.pop()
    assert setting.pending() == 0 and setting.usage() == Usage(44 * MIB, 0, 44 * MIB, peak=44 * MIB)
    large = setting.cuda.device_array(4 * GIB)
    del large
    assert setting.pending() == 0 and setting.usage().reclaimable == setting.usage().held == setting.taken()
    setting.framework.trim(setting.gpu)
    assert setting.taken() == 0 and setting.usage() == Usage(0, 0, 0, peak=4 * GIB)


def test_unpooled_what_is_flushed_goes_to_the_driver(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CUDA_PER_THREAD_DEFAULT_STREAM", "1")
    setting = model()
    setting.apply(15 * GIB)
    arrays = [setting.cuda.device_array(4 * MIB) for _ in range(11)]
    arrays.clear()
    assert setting.pending() == 0 and setting.usage() == Usage(0, 0, 0, peak=44 * MIB) and setting.taken() == 0


def test_the_drivers_own_refusal_comes_through(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    setting.driver.cards[0].total = 32 * MIB
    gone = setting.cuda.device_array(20 * MIB)
    del gone
    array = setting.cuda.device_array(30 * MIB)  # the card is full, and Numba flushes by itself
    refusal = setting.refused(4 * MIB)
    assert "memguard" not in refusal.msg and refusal.memguard_requested == 4 * MIB
    assert setting.usage().held == setting.taken() == 30 * MIB and setting.usage().in_use == 30 * MIB
    del array


def test_a_resize_holds_at_once_and_evicts_nothing(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    live = setting.fill()
    uuids = [gpu.uuid for gpu in setting.host.devices()]
    setting.framework.resize(dict.fromkeys(uuids, 96 * MIB))
    live += setting.fill()
    assert setting.taken() == 96 * MIB
    setting.framework.resize(dict.fromkeys(uuids, 32 * MIB))
    assert setting.usage().held == 96 * MIB
    setting.refused(1)
    del live[3:]
    live += setting.fill()
    assert setting.taken() == 32 * MIB


# the end of it


def test_undone_while_live_the_cap_is_gone(model: Model) -> None:
    setting = model()
    applied = setting.apply(64 * MIB)
    live = setting.fill()
    assert applied.permanent is None
    applied.undo()
    assert setting.driver._memory_manager is None and setting.framework.usage(setting.gpu) == Usage(None, None)
    live.append(setting.cuda.device_array(GIB))
    live.clear()
    setting.framework.trim(setting.gpu)
    assert setting.taken() == 0 and setting.framework.drift() == []


def test_a_budget_after_a_budget_holds_though_it_is_live(model: Model) -> None:
    """Its context keeps the first one's memory manager: the next budget takes that over, count and all."""
    setting = model()
    first = setting.apply(64 * MIB)
    live = [setting.cuda.device_array(40 * MIB)]
    first.undo()
    live.append(setting.cuda.device_array(20 * MIB))
    setting.framework = Numba(setting.host)
    second = setting.apply(50 * MIB)
    assert second.enforcement is Enforcement.ENFORCED
    assert setting.usage() == Usage(60 * MIB, 60 * MIB, 0, peak=60 * MIB)
    setting.refused(1)
    live.pop(0)
    assert len(setting.fill(6 * MIB)) == 5
    with setting.cuda.gpus[1]:
        assert len(setting.fill(10 * MIB)) == 5, "a context made now is capped too"
    assert setting.framework.drift() == []
    second.undo()
    live.append(setting.cuda.device_array(GIB))


def test_live_before_it_cannot_be_capped(model: Model) -> None:
    setting = model()
    setting.bring()
    array = setting.cuda.device_array(1)
    with pytest.raises(CapNotApplied, match=r"was live before memguard\.init\(\)"):
        setting.apply()
    assert setting.driver._memory_manager is setting.driver.NumbaCUDAMemoryManager, "nothing stays"
    assert setting.framework.usage(setting.gpu) == Usage(None, None), "nobody counts what it holds"
    del array
    setting.cuda.close()
    assert setting.framework.usage(setting.gpu) is None


def test_an_undo_keeps_its_hands_off_a_manager_set_later(model: Model) -> None:
    setting = model()
    applied = setting.apply()
    own = type("Own", (setting.driver.NumbaCUDAMemoryManager,), {})
    setting.cuda.set_memory_manager(own)
    applied.undo()
    assert setting.driver._memory_manager is own


def test_a_context_that_is_made_anew_counts_from_nothing(model: Model) -> None:
    """`cuda.close()` destroys all memory; arrays that outlive it are not held any more."""
    setting = model()
    setting.apply(64 * MIB)
    live = setting.fill()
    setting.cuda.close()
    assert setting.framework.usage(setting.gpu) is None
    array = setting.cuda.device_array(8 * MIB)
    assert setting.usage().held == setting.taken() == 8 * MIB
    live.clear()
    assert len(setting.fill()) == 7
    del array


# managers of others


@pytest.mark.parametrize("before", [True, False], ids=["not live", "live"])
def test_a_manager_of_the_users_own_is_a_conflict(model: Model, before: bool) -> None:
    setting = model()
    setting.bring()
    own = type("Own", (setting.driver.NumbaCUDAMemoryManager,), {})
    setting.cuda.set_memory_manager(own)
    array = None if before else setting.cuda.device_array(1)
    with pytest.raises(ConflictingSetting, match="past any cap") as caught:
        setting.apply()
    assert "set_memory_manager" in caught.value.setting and "Own" in caught.value.setting
    assert setting.driver._memory_manager is own
    del array


def test_a_manager_from_the_environment_is_a_conflict(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CUDA_MEMORY_MANAGER", "my_pool")
    setting = model()
    with pytest.raises(ConflictingSetting) as caught:
        setting.apply()
    assert caught.value.setting == "NUMBA_CUDA_MEMORY_MANAGER=my_pool"
    assert setting.driver._memory_manager is None


class Resource:
    def __init__(self, upstream: Any = None, allocation_limit: int = 0) -> None:
        self.upstream, self.limit, self.allocated = upstream, allocation_limit, 5

    def get_allocated_bytes(self) -> int:
        return self.allocated


@pytest.fixture
def rmm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """RMM with a resource for each of two GPUs."""
    from memguard._frameworks.rmm import resource as rmm

    class CudaMemoryResource(Resource):
        pass

    class LimitingResourceAdaptor(Resource):
        pass

    module: Any = types.ModuleType("rmm")
    module.resources = {0: CudaMemoryResource(), 1: CudaMemoryResource()}
    module.mr = types.SimpleNamespace(
        CudaMemoryResource=CudaMemoryResource,
        LimitingResourceAdaptor=LimitingResourceAdaptor,
        get_per_device_resource=module.resources.__getitem__,
        set_per_device_resource=module.resources.__setitem__,
    )
    monkeypatch.setattr(rmm, "_limits", {})
    return module


@pytest.mark.parametrize("how", ["environment", "call"])
def test_rmms_manager_is_limited_in_rmm(model: Model, rmm: Any, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "environment":
        monkeypatch.setenv("NUMBA_CUDA_MEMORY_MANAGER", "rmm.allocators.numba")
    setting = model()
    monkeypatch.setitem(sys.modules, "rmm", rmm)
    setting.bring()
    manager = type("RMM", (setting.driver.NumbaCUDAMemoryManager,), {"__module__": "rmm.allocators.numba"})
    if how == "call":
        setting.cuda.set_memory_manager(manager)
    applied = setting.apply(64 * MIB)
    assert applied.enforcement is Enforcement.ENFORCED and "RMM" in applied.notes[0]
    assert [rmm.resources[n].limit for n in (0, 1)] == [64 * MIB, 64 * MIB]
    assert setting.driver._memory_manager in (None, manager), "Numba's own setting stays"
    assert setting.framework.usage(setting.gpu) is None, "not live"
    setting.driver._memory_manager = manager
    array = setting.cuda.device_array(1)
    assert setting.usage() == Usage(5, 5, 0) and setting.framework.drift() == []
    limited, rmm.resources[1] = rmm.resources[1], rmm.mr.CudaMemoryResource()
    (said,) = drifts(setting.framework)
    assert "numba: RMM's resource on cuda:1 was replaced" in said
    rmm.resources[1] = limited
    with pytest.raises(CapNotApplied):
        setting.framework.resize({setting.gpu.uuid: GIB})
    applied.undo()
    assert all(type(resource).__name__ == "CudaMemoryResource" for resource in rmm.resources.values())
    del array


def test_rmm_is_not_limited_by_guessed_numbers(model: Model, rmm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CUDA_MEMORY_MANAGER", "rmm")
    setting = model()
    monkeypatch.setitem(sys.modules, "rmm", rmm)
    setting.bring()
    unknown = tuple(dataclasses.replace(gpu, ordinal=None) for gpu in setting.host.devices())
    monkeypatch.setattr(setting.host, "devices", lambda *, ordinals=False: unknown)
    before = dict(rmm.resources)
    with pytest.raises(CapNotApplied, match="fix: run `memguard doctor`"):
        setting.apply()
    assert rmm.resources == before


def test_rmm_that_is_not_installed_is_said(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CUDA_MEMORY_MANAGER", "rmm")
    setting = model()
    monkeypatch.setitem(sys.modules, "rmm", None)
    with pytest.raises(CapNotApplied, match="unset NUMBA_CUDA_MEMORY_MANAGER"):
        setting.apply()


@pytest.mark.parametrize("live", [False, True])
def test_a_manager_set_later_is_told(model: Model, live: bool) -> None:
    setting = model()
    setting.apply()
    array = setting.cuda.device_array(1) if live else None
    assert setting.framework.drift() == []
    setting.cuda.set_memory_manager(type("Own", (setting.driver.NumbaCUDAMemoryManager,), {}))
    (said,) = drifts(setting.framework)
    assert "replaced after memguard.init (Own)" in said
    del array


def test_a_context_with_another_manager_is_told_and_trimmed_only_where_that_can(model: Model) -> None:
    setting = model()
    setting.apply()
    ours = setting.driver._memory_manager

    class Foreign(setting.driver.BaseCUDAMemoryManager):  # type: ignore[misc]
        """A plugin from the ground up: no pending frees."""

    setting.cuda.set_memory_manager(Foreign)
    setting.cuda.current_context()
    setting.driver._memory_manager = ours
    (said,) = drifts(setting.framework)
    assert "(Foreign)" in said and setting.usage() == Usage(None, None), "live, and nobody counts"
    setting.framework.trim(setting.gpu)
    setting.framework.forked()


@pytest.mark.parametrize(
    "name",
    [
        "set_memory_manager", "NumbaCUDAMemoryManager", "_memory_manager", "_PendingDeallocs", "CudaAPIError",
        "MemoryPointer", "OwnedPointer",
    ],
)  # fmt: skip
def test_a_numba_without_what_is_needed_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    setting = model()
    setting.bring()
    monkeypatch.delattr(setting.driver, name)
    with pytest.raises(CapNotApplied, match=f"has no {name}"):
        setting.apply()


def test_a_manager_that_reads_back_as_another_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = model()
    setting.bring()
    monkeypatch.setattr(setting.driver, "set_memory_manager", lambda manager: None)
    with pytest.raises(CapNotApplied, match=r"(?s)reads back as another.*leave numba out of the budget"):
        setting.apply()

    def otherwise(manager: Any) -> None:
        setting.driver._memory_manager = type("Other", (manager,), {})

    monkeypatch.setattr(setting.driver, "set_memory_manager", otherwise)
    with pytest.raises(CapNotApplied, match="reads back as another"):
        setting.apply()
    assert setting.driver._memory_manager is None, "nothing stays"
    array = setting.cuda.device_array(GIB)
    del array


# what is not Numba's arrays


def test_managed_memory_and_events_are_not_counted(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    array = setting.cuda.device_array(8 * MIB)
    managed, events = setting.cuda.managed_array(GIB), [setting.cuda.event() for _ in range(15)]
    assert setting.usage() == Usage(8 * MIB, 8 * MIB, 0, peak=8 * MIB)
    del managed
    events.clear()
    assert setting.usage() == Usage(8 * MIB, 8 * MIB, 0, peak=8 * MIB) and setting.pending() == 1
    setting.framework.trim(setting.gpu)
    assert setting.taken() == 8 * MIB == setting.usage().held
    del array


def test_an_address_that_managed_memory_gets_next_is_not_an_array(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    array = setting.cuda.device_array(8 * MIB)
    address = array.gpu_data.device_pointer_value
    del array
    setting.framework.trim(setting.gpu)
    managed = setting.cuda.managed_array(8 * MIB)
    assert managed.gpu_data.device_pointer_value == address
    del managed
    assert setting.pending() == 1 and setting.usage() == Usage(0, 0, 0, peak=8 * MIB)


def test_what_has_no_address_may_pend_too(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    freed: list[object] = []

    def unload(handle: object) -> None:
        freed.append(handle)

    module = object()
    setting.cuda.current_context().memory_manager.deallocations.add_item(unload, module)
    setting.framework.trim(setting.gpu)
    assert freed == [module] and setting.usage() == Usage(0, 0, 0, peak=0)


def test_a_free_that_fails_stays_counted(model: Model) -> None:
    """Numba drops the entry all the same, and the driver keeps the memory."""
    setting = model()
    setting.apply(64 * MIB)

    def failing(address: int) -> None:
        raise setting.driver.CudaAPIError(700, "an illegal memory access was encountered")

    setting.driver.driver.cuMemFree = failing
    array = setting.cuda.device_array(40 * MIB)
    del array
    with pytest.raises(setting.driver.CudaAPIError, match="illegal"):
        setting.framework.trim(setting.gpu)
    assert setting.pending() == 0 and setting.usage().held == setting.taken() == 40 * MIB


def test_a_trim_is_of_one_gpu_with_its_context_current(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    give, seen = setting.driver.driver.cuMemFree, []

    def freed(address: int) -> None:
        seen.append(list(setting.driver._stack()))
        give(address)

    setting.driver.driver.cuMemFree = freed
    for number in (0, 1):
        with setting.cuda.gpus[number]:
            array = setting.cuda.device_array(40 * MIB)
            del array
    setting.framework.trim(setting.other)
    assert [setting.taken(0), setting.taken(1)] == [40 * MIB, 0]
    assert seen == [[1]] and setting.driver._stack() == []


def test_a_trim_where_the_context_is_gone_does_nothing(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    array = setting.cuda.device_array(40 * MIB)
    del array
    setting.driver.cards[0].contexts = 0
    setting.framework.trim(setting.gpu)
    assert setting.pending() == 1


def test_a_trim_waits_for_an_allocation_on_another_thread(model: Model) -> None:
    """That one may be flushing the same pending frees."""
    setting = model()
    setting.apply(64 * MIB)
    array = setting.cuda.device_array(40 * MIB)
    del array
    lock = setting.driver.driver.devices[0].primary_context.memory_manager.group.lock
    with lock:
        thread = threading.Thread(target=setting.framework.trim, args=(setting.gpu,))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and setting.pending() == 1
    thread.join(20)
    assert setting.pending() == 0


# threads, finalizers, forks


def test_finalizers_on_other_threads(model: Model) -> None:
    setting = model()
    setting.apply(GIB)
    arrays = [[setting.cuda.device_array(3 * MIB) for _ in range(40)] for _ in range(4)]

    def drop(batch: list[Any]) -> None:
        with setting.cuda.gpus[0]:
            batch.clear()

    threads = [threading.Thread(target=drop, args=(batch,)) for batch in arrays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    setting.framework.trim(setting.gpu)
    assert setting.taken() == 0 and setting.usage() == Usage(0, 0, 0, peak=480 * MIB)


def test_a_finalizer_does_not_wait_for_a_thread_that_allocates(model: Model) -> None:
    setting = model()
    setting.apply(GIB)
    array = setting.cuda.device_array(3 * MIB)
    inside, done = threading.Event(), threading.Event()
    take = setting.driver.driver.cuMemAlloc

    def slow(size: int) -> int:
        inside.set()
        assert done.wait(20)
        return int(take(size))

    setting.driver.driver.cuMemAlloc = slow
    kept: list[Any] = []

    def work() -> None:
        with setting.cuda.gpus[0]:
            kept.append(setting.cuda.device_array(MIB))

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(20)
    del array
    done.set()
    thread.join(20)
    assert kept and setting.usage().in_use == MIB and setting.usage().reclaimable == 4 * MIB


def test_an_array_in_a_cycle_that_is_collected_inside_an_allocation(model: Model) -> None:
    setting = model()
    setting.apply(GIB)
    take = setting.driver.driver.cuMemAlloc

    def collecting(size: int) -> int:
        gc.collect()
        return int(take(size))

    for number in range(30):
        cycle: list[Any] = [setting.cuda.device_array(5 * MIB if number % 2 else 700_000)]
        cycle.append(cycle)
        del cycle
        setting.driver.driver.cuMemAlloc = collecting if number % 3 else take
    gc.collect()
    setting.framework.trim(setting.gpu)
    usage = setting.usage()
    assert (usage.held, usage.in_use, setting.taken()) == (0, 0, 0)


def test_two_threads_do_not_get_the_same_room(model: Model) -> None:
    setting = model()
    setting.apply(8 * MIB)
    take, both = setting.driver.driver.cuMemAlloc, threading.Barrier(2)

    def slow(size: int) -> int:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.3)
        return int(take(size))

    setting.driver.driver.cuMemAlloc = slow
    live: list[Any] = []

    def work() -> None:
        with setting.cuda.gpus[0], contextlib.suppress(setting.driver.CudaAPIError):
            live.append(setting.cuda.device_array(8 * MIB))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(live) == 1 and setting.driver.cards[0].most == 8 * MIB


def test_threads_that_allocate_at_once_stay_under_the_cap(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    above: list[int] = []

    def work(number: int) -> None:
        with setting.cuda.gpus[0]:
            live: list[Any] = []
            for step in range(120):
                try:
                    live.append(setting.cuda.device_array((number + step) % 7 * MIB + 1))
                except setting.driver.CudaAPIError:
                    live = live[: len(live) // 2]
                if (taken := setting.taken()) > 64 * MIB:
                    above.append(taken)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    setting.framework.trim(setting.gpu)
    assert above == [] and setting.taken() == 0 == setting.usage().held


def test_in_a_forked_child_nothing_is_capped_and_nobody_waits(model: Model) -> None:
    setting = model()
    setting.apply(16 * MIB)
    array = setting.cuda.device_array(8 * MIB)
    inside, done = threading.Event(), threading.Event()
    bank = setting.driver.driver.devices[0].primary_context.memory_manager.group

    def hold() -> None:
        with bank.lock:
            inside.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(20)
    child = os.fork()
    if child == 0:
        import signal

        signal.alarm(20)
        setting.framework.forked()
        kept = setting.cuda.device_array(64 * MIB)
        os._exit(0 if setting.usage().held == 72 * MIB and kept else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    setting.refused(16 * MIB)
    del array


# whatever is done


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("take"), st.one_of(st.integers(1, MIB), st.integers(400_000, MIB), st.integers(MIB, 9 * MIB))
        ),
        st.tuples(st.just("drop"), st.integers(0, 1000)),
        st.tuples(st.sampled_from(["trim", "managed", "event", "cycle"]), st.integers(1, 3 * MIB)),
        st.tuples(st.just("resize"), st.integers(1, 16).map(lambda n: n * 2 * MIB)),
        st.tuples(st.just("full"), st.booleans()),
    ),
    max_size=60,
)


def collections() -> int:
    """How often the garbage collector has run."""
    return sum(generation["collections"] for generation in gc.get_stats())


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(steps=STEPS)
def test_whatever_is_done_the_books_hold(model: Model, steps: list[tuple[str, int]]) -> None:
    forget()
    setting = model("h200")
    cap = 16 * MIB
    setting.apply(cap)
    setting.cuda.current_context()
    live: list[Any] = []
    outside: list[Any] = []
    for step, size in steps:
        if step == "take":
            before = collections()
            try:
                live.append(setting.cuda.device_array(size))
            except setting.driver.CudaAPIError:
                pages = -(-size // (2 * MIB)) * 2 * MIB
                late = collections() > before  # a cycle's frees may have become pending after the driver had refused
                full = setting.driver.cards[0].total < GIB and (setting.pending() == 0 or late)
                assert full or (setting.usage().held or 0) > cap - pages
        elif step == "drop" and live:
            del live[size % len(live)]
        elif step == "cycle" and live:
            cycle = [live.pop()]
            cycle.append(cycle)
            del cycle
        elif step == "trim":
            before, promised = setting.usage().held or 0, setting.usage().reclaimable or 0
            setting.framework.trim(setting.gpu)
            assert before - (setting.usage().held or 0) == promised
        elif step == "managed":
            with contextlib.suppress(setting.driver.CudaAPIError):
                outside.append(setting.cuda.managed_array(size))
        elif step == "event":
            outside.append(setting.cuda.event())
        elif step == "resize":
            cap = max(size, setting.usage().held or 0)
            setting.framework.resize({setting.gpu.uuid: cap})
        elif step == "full":
            setting.driver.cards[0].total = setting.taken() + MIB if size else 16 * GIB
        usage = setting.usage()
        own = sum(-(-a.nbytes // (2 * MIB)) * 2 * MIB for a in outside if hasattr(a, "nbytes"))
        assert usage.held is not None and usage.in_use is not None and usage.reclaimable is not None
        assert 0 <= usage.in_use <= usage.held <= cap
        assert 0 <= usage.reclaimable <= usage.held
        assert setting.taken() - own <= usage.held + 2 * MIB
    live.clear()
    outside.clear()
    gc.collect()
    setting.framework.trim(setting.gpu)
    assert setting.usage().held == 0 == setting.usage().in_use and setting.taken() == 0


def test_copies_past_the_memory_manager_are_named_where_this_numba_makes_them(model: Model) -> None:
    setting = model()
    setting.apply()
    assert setting.framework.uncounted() is None, "a Numba that asks its memory manager"
    name = "numba.cuda.cudadrv.devicearray"
    sys.modules[name] = types.ModuleType(name)
    assert setting.framework.uncounted() is None
    vars(sys.modules[name])["_to_strided_memory_view"] = lambda obj: obj
    assert "cuda.to_device" in (setting.framework.uncounted() or "")

"""PyCUDA under a cap, on a model of PyCUDA in plain Python (`fake_pycuda`): the cap holds for every way to allocate."""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.util
import inspect
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.capping import AppliedCaps, apply_caps
from support.drifts import drifts

from memguard._base.types import Device, Enforcement, State, Usage
from memguard._base.units import GIB, KIB, MIB
from memguard._devices import contexts
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks import driver_pages
from memguard._frameworks.import_hook import ImportHook
from memguard._frameworks.pycuda import pool as pools
from memguard._frameworks.pycuda.adapter import PyCUDA
from memguard.errors import CapNotApplied

pytestmark = pytest.mark.long  # no version of what is installed changes it: all of it is our own code

HERE = Path(__file__).parent


class Setting:
    """The model freshly imported, a framework over it, and the figures of its driver."""

    def __init__(self, *gpus: str) -> None:
        self.host = SimulatedHost(gpus or ("h200",))
        self.framework = PyCUDA(self.host)
        self.gpu = self.host.devices()[0]

    def apply(self, cap: int = 64 * MIB, *, context: bool = True) -> AppliedCaps:
        importlib.import_module("pycuda.driver")
        applied = apply_caps(self.framework, {gpu.uuid: cap for gpu in self.host.devices()})
        if context:
            self.drv.init()
            self.drv.Device(0).make_context()
        return applied

    @property
    def drv(self) -> Any:
        return sys.modules["pycuda.driver"]

    @property
    def tools(self) -> Any:
        return importlib.import_module("pycuda.tools")

    @property
    def arrays(self) -> Any:
        return importlib.import_module("pycuda.gpuarray")

    @property
    def taken(self) -> int:
        """What the driver has really handed out on the first GPU."""
        return int(self.drv.gpus[0].taken)

    def usage(self, gpu: Device | None = None) -> Usage:
        found = self.framework.usage(gpu or self.gpu)
        assert found is not None
        return found

    def ways(self) -> dict[str, Callable[[int], Any]]:
        pool = self.tools.DeviceMemoryPool()
        return {
            "mem_alloc": lambda n: self.drv.mem_alloc(n),
            "pitch": lambda n: self.drv.mem_alloc_pitch(1000, -(-n // 1024), 4),
            "array": lambda n: self.arrays.GPUArray(n),
            "empty": lambda n: self.arrays.empty(n),
            "zeros": lambda n: self.arrays.zeros(n),
            "arange": lambda n: self.arrays.arange(n),
            "own pool": pool.allocate,
        }


WAYS = ("mem_alloc", "pitch", "array", "empty", "zeros", "arange", "own pool")


def modelled() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] in ("pycuda", "card")]


def forget() -> None:
    driver_pages.slabs.clear()
    for name in modelled():
        del sys.modules[name]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Setting]]:
    """Make a setting. The model is imported anew for every test and gone afterwards."""
    driver_pages.slabs.clear()
    for name in modelled():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(HERE / "fake_pycuda")
    monkeypatch.setattr(contexts, "buffer", lambda address: sys.modules["card"].buffer(address))
    yield Setting
    gc.collect()
    drv = sys.modules.get("pycuda.driver")
    aborts = drv.counters["aborts"] if drv is not None else 0
    forget()
    assert aborts == 0, "PyCUDA's pool would have ended the process"


Model = Callable[..., Setting]


def fill(way: Callable[[int], Any], size: int, error: type[BaseException]) -> list[Any]:
    """Allocate until refused."""
    live = []
    with pytest.raises(error):
        for _ in range(1000):
            live.append(way(size))
    return live


# what it is, before anything is allocated


def test_states(model: Model) -> None:
    setting = model()
    framework = setting.framework
    assert framework.state() is State.IMPORTABLE and framework.usage(setting.gpu) is None
    framework.trim(setting.gpu)
    assert not [name for name in sys.modules if name.startswith("pycuda")], "looking imports nothing"
    drv = importlib.import_module("pycuda.driver")
    assert framework.state() is State.IMPORTED
    framework.trim(setting.gpu)
    assert framework.usage(setting.gpu) is None and not drv._initialised, "looking initialises nothing"
    drv.init()
    assert framework.state() is State.IMPORTED
    drv.Device(0).make_context()
    assert framework.state() is State.LIVE


def test_only_the_driver_module_counts_as_imported(model: Model) -> None:
    setting = model()
    importlib.import_module("pycuda")
    assert setting.framework.state() is State.IMPORTABLE


def test_capping_creates_no_context(model: Model) -> None:
    setting = model()
    applied = setting.apply(context=False)
    assert applied.enforcement is Enforcement.ENFORCED and applied.notes == ()
    assert not setting.drv._initialised and setting.drv.gpus[0].contexts == 0
    assert setting.framework.state() is State.IMPORTED and setting.framework.usage(setting.gpu) is None


@pytest.mark.parametrize("module", ["autoinit", "autoprimaryctx"])
def test_capped_by_the_import_hook(model: Model, module: str) -> None:
    setting, hook = model(), ImportHook()
    hook.watch(setting.framework.hook, lambda: apply_caps(setting.framework, {setting.gpu.uuid: 64 * MIB}) and None)
    importlib.import_module(f"pycuda.{module}")
    assert hook not in sys.meta_path and setting.drv.gpus[0].contexts == 1
    fill(setting.arrays.empty, 8 * MIB, setting.drv.MemoryError)
    assert setting.taken <= 64 * MIB


@pytest.mark.parametrize("module", ["driver", "tools", "elementwise", "gpuarray", "autoinit", "autoprimaryctx"])
def test_whatever_module_comes_first_the_cap_holds(model: Model, module: str) -> None:
    """`pycuda.tools` and what imports it are half empty when `pycuda.driver` is complete."""
    setting, hook = model(), ImportHook()
    hook.watch(setting.framework.hook, lambda: apply_caps(setting.framework, {setting.gpu.uuid: 64 * MIB}) and None)
    importlib.import_module(f"pycuda.{module}")
    importlib.import_module("pycuda.autoinit")
    for way in setting.ways().values():
        fill(way, 8 * MIB, setting.drv.MemoryError)
    assert hook not in sys.meta_path and setting.taken <= 64 * MIB


def test_applied_while_gpuarray_is_half_imported(model: Model) -> None:
    """As by a thread that calls `memguard.init` while another one imports."""
    setting = model()
    applied: list[AppliedCaps] = []
    importlib.import_module("pycuda.driver")
    elementwise = importlib.import_module("pycuda.elementwise")
    del sys.modules["pycuda.elementwise"], sys.modules["pycuda"].elementwise  # type: ignore[attr-defined]

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
            return importlib.util.spec_from_loader(name, Loader()) if name == "pycuda.elementwise" else None

    class Loader(importlib.abc.Loader):
        def create_module(self, spec: Any) -> Any:
            applied.append(setting.apply(64 * MIB))
            return elementwise

        def exec_module(self, module: Any) -> None: ...

    finder = Finder()
    sys.meta_path.insert(0, finder)
    try:
        arrays = setting.arrays
    finally:
        sys.meta_path.remove(finder)
    assert len(applied) == 1
    fill(arrays.empty, 8 * MIB, setting.drv.MemoryError)
    assert setting.taken <= 64 * MIB


# the cap


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [60_000, 700_000, MIB, MIB + 1, 3 * MIB, 5 * MIB + 17, 16 * MIB, 31 * MIB, 60 * MIB])
def test_the_cap_holds_and_the_error_is_pycudas_own(model: Model, way: str, size: int) -> None:
    setting = model()
    setting.apply(64 * MIB)
    allocate, live = setting.ways()[way], []
    with pytest.raises(setting.drv.MemoryError) as caught:
        for _ in range(2000):
            live.append(allocate(size))
    usage = setting.usage()
    assert usage.held is not None and setting.taken <= usage.held <= 64 * MIB
    assert "64.0 MiB that the memguard budget gives pycuda" in str(caught.value)
    assert len(live) * size >= 24 * MIB, "much less would be a waste"


def test_a_framework_that_uses_all_ways_at_once_stays_under_its_cap(model: Model) -> None:
    """Sizes of every kind, freed in any order, also by hand, on a card that others fill and empty."""
    for seed in range(8):
        rng = random.Random(seed)
        setting = model()
        forget()
        cap = rng.choice([4, 6, 20, 64, 100]) * MIB
        setting.apply(cap)
        ways = list(setting.ways().values())
        live: list[Any] = []
        dead: list[Any] = []
        served = 0
        for _ in range(400):
            if live and rng.random() < 0.45:
                live.pop(rng.randrange(len(live)))
            else:
                size = int(2 ** rng.uniform(0, 25))
                try:
                    live.append(rng.choice(ways)(size))
                    served += 1
                except setting.drv.MemoryError:
                    pass
            if live and rng.random() < 0.05 and hasattr(live[-1], "free"):
                live[-1].free()  # by hand: the object stays
                dead.append(live.pop())
            if rng.random() < 0.02:
                setting.framework.trim(setting.gpu)
            if rng.random() < 0.02:
                dead.clear()
            if rng.random() < 0.05:
                setting.drv.gpus[0].total = rng.choice([setting.drv.CONTEXT + setting.taken, GIB])
            usage = setting.usage()
            assert usage.held is not None and usage.in_use is not None and usage.reclaimable is not None
            assert setting.taken <= usage.held <= cap, (seed, setting.taken, usage)
            assert 0 <= usage.in_use <= usage.held and 0 <= usage.reclaimable <= usage.held - usage.in_use
        assert served > 50
        del live, dead
        setting.framework.trim(setting.gpu)
        assert setting.usage().in_use == 0
        assert setting.taken <= 2 * MIB * (1 + len(setting.framework._pools(setting.gpu.uuid)))


@pytest.mark.parametrize("way", ["array", "empty", "zeros", "arange"])
def test_arrays_imported_before_the_budget_are_capped_too(model: Model, way: str) -> None:
    setting = model()
    importlib.import_module("pycuda.gpuarray")
    setting.apply(64 * MIB)
    fill(setting.ways()[way], 8 * MIB, setting.drv.MemoryError)
    assert 48 * MIB < setting.taken <= 64 * MIB


def test_what_the_bins_round_up_counts(model: Model) -> None:
    """Measured: 256 MiB asked, 272 taken."""
    setting = model()
    setting.apply(GIB)
    array = setting.drv.mem_alloc(256 * MIB)
    usage = setting.usage()
    assert usage.in_use == 256 * MIB and usage.held is not None and 272 * MIB <= usage.held <= 274 * MIB
    del array


def test_one_request_larger_than_the_cap(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    with pytest.raises(setting.drv.MemoryError, match=r"asked for 100\.0 MiB \(takes .*holds 0 B of the 64\.0 MiB"):
        setting.drv.mem_alloc(100 * MIB)
    assert setting.taken == 0
    setting.drv.mem_alloc(10 * MIB)


def test_what_is_freed_serves_again(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    live = fill(setting.drv.mem_alloc, 8 * MIB, setting.drv.MemoryError)
    number = len(live)
    taken = setting.taken
    live.clear()
    assert setting.taken == taken
    live = fill(setting.drv.mem_alloc, 8 * MIB, setting.drv.MemoryError)
    assert len(live) == number


def test_a_hit_in_a_full_pool_gives_nothing_back(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    live = fill(setting.drv.mem_alloc, 8 * MIB, setting.drv.MemoryError)
    setting.drv.counters["free_held"] = 0
    for _ in range(10):
        live.pop()
        live.append(setting.drv.mem_alloc(8 * MIB))
    assert setting.drv.counters["free_held"] == 0


def test_only_where_nothing_can_come_between_is_a_request_served_without_the_lock(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not without the GIL."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    assert pools._undisturbed()
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert not pools._undisturbed()
    setting = model()
    setting.apply(40 * MIB)
    pool = setting.drv.DeviceMemoryPool()
    for _ in range(3):
        for way in (setting.drv.mem_alloc, pool.allocate):
            way(3 * MIB)
    assert not any(known._ready for known in setting.framework._all())
    fill(setting.drv.mem_alloc, 3 * MIB, setting.drv.MemoryError)
    assert setting.drv.gpus[0].most <= 40 * MIB and setting.usage().held == setting.taken


def test_a_request_that_fits_to_the_last_page_gives_nothing_back(model: Model) -> None:
    setting = model()
    setting.apply(26 * MIB)
    idle = setting.drv.mem_alloc(8 * MIB)  # ten, and two for the small block that always lies idle
    del idle
    setting.drv.counters["free_held"] = 0
    array = setting.drv.mem_alloc(13 * MIB)
    assert setting.taken == 26 * MIB and setting.drv.counters["free_held"] == 0
    with pytest.raises(setting.drv.MemoryError):
        setting.drv.mem_alloc(13 * MIB)
    del array


def test_idle_blocks_go_back_before_a_request_is_refused(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    live = fill(setting.drv.mem_alloc, 8 * MIB, setting.drv.MemoryError)
    live.clear()
    assert setting.taken > 48 * MIB
    array = setting.drv.mem_alloc(50 * MIB)
    assert setting.taken <= 64 * MIB and setting.usage().in_use == 50 * MIB
    del array


def test_pools_of_the_users_own_share_the_cap(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    first, second = setting.tools.DeviceMemoryPool(), setting.tools.DeviceMemoryPool()
    held = [first.allocate(20 * MIB), setting.drv.mem_alloc(20 * MIB)]
    with pytest.raises(setting.drv.MemoryError):
        second.allocate(22 * MIB)
    held.append(second.allocate(10 * MIB))
    assert setting.usage().in_use == 50 * MIB
    first_array = held.pop(0)
    del first_array
    assert second.allocate(22 * MIB) is not None, "the idle block of the first pool makes room for the second"
    assert isinstance(first, setting.tools.DeviceMemoryPool) and first.held_blocks <= 1


@pytest.mark.parametrize("kind", ["DeviceMemoryPool", "DebugMemoryPool"])
def test_a_pool_made_before_the_budget_shares_the_cap_from_then_on(model: Model, kind: str) -> None:
    setting = model()
    drv = importlib.import_module("pycuda.driver")
    drv.init()
    drv.Device(0).make_context()
    pool = getattr(setting.tools, kind)()
    before = pool.allocate(8 * MIB)
    setting.apply(64 * MIB, context=False)
    live = fill(pool.allocate, 8 * MIB, drv.MemoryError)
    assert len(live) == 6, "each takes a block of 9 MiB or so"
    assert fill(setting.arrays.empty, 8 * MIB, drv.MemoryError) == []
    held = setting.usage().held
    assert held is not None and held <= 64 * MIB and setting.taken <= held + 10 * MIB, "only `before` is not counted"
    del before


def test_the_pools_methods_look_like_pycudas(model: Model) -> None:
    setting = model()
    pool, drv = setting.tools.DeviceMemoryPool, importlib.import_module("pycuda.driver")
    functions = [(pool, "allocate"), (pool, "free_held"), (drv, "mem_alloc"), (drv, "mem_alloc_pitch")]
    functions += [(drv.Device, "make_context")]
    before = [getattr(owner, name) for owner, name in functions]
    setting.apply(context=False)
    assert setting.tools.DeviceMemoryPool is pool
    for then, (owner, name) in zip(before, functions, strict=True):
        now = getattr(owner, name)
        assert now is not then and (now.__name__, now.__doc__) == (then.__name__, then.__doc__)
        assert inspect.signature(now) == inspect.signature(then)


def test_a_pool_that_its_user_empties(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    pool = setting.tools.DeviceMemoryPool()
    pool.free_held()
    live = fill(pool.allocate, 8 * MIB, setting.drv.MemoryError)
    number = len(live)
    live.clear()
    pool.free_held()
    assert setting.taken <= 2 * MIB and setting.usage().held == setting.taken
    live = fill(setting.drv.mem_alloc, 8 * MIB, setting.drv.MemoryError)
    assert len(live) >= number - 1 and setting.taken <= 64 * MIB


def test_a_pool_that_its_user_dropped(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    pool = setting.tools.DeviceMemoryPool()
    array = pool.allocate(10 * MIB)
    del array, pool
    gc.collect()
    assert setting.usage().in_use == 0
    setting.drv.mem_alloc(40 * MIB)


def test_pitched_memory_is_counted_and_given_back(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    allocation, pitch = setting.drv.mem_alloc_pitch(1000, 20 * 1024, 4)
    assert pitch == 1024 and setting.usage() == Usage(20 * MIB, 20 * MIB, 0, peak=20 * MIB)
    with pytest.raises(setting.drv.MemoryError):
        setting.drv.mem_alloc_pitch(1000, 50 * 1024, 4)
    del allocation
    assert setting.usage().held == 0 and setting.taken == 0


@pytest.mark.parametrize("cap", [64 * MIB, 64 * GIB])
def test_a_refusal_carries_the_size_that_was_asked_for(model: Model, cap: int) -> None:
    """PyCUDA's own text names none where the driver refuses."""
    setting = model()
    setting.apply(cap)
    for take in (setting.drv.mem_alloc, lambda n: setting.drv.mem_alloc_pitch(1024, n // 1024, 4)):
        with pytest.raises(setting.drv.MemoryError) as caught:
            take(20 * GIB)
        assert caught.value.memguard_requested == 20 * GIB


def test_a_slab_counts_until_its_last_piece_is_gone(model: Model) -> None:
    """The driver packs small blocks into 2 MiB slabs, three of these into each; their addresses say which."""
    setting = model()
    setting.apply(64 * MIB)
    small = [setting.drv.mem_alloc(600_000) for _ in range(12)]  # 12 bins of 622,591 bytes, and the idle one
    assert setting.usage().held == setting.taken == 8 * MIB
    del small[1::3], small[1::2]  # two of each slab
    setting.framework.trim(setting.gpu)
    assert setting.usage().held == setting.taken == 8 * MIB
    del small[1:]
    setting.framework.trim(setting.gpu)
    assert setting.usage().held == setting.taken == 2 * MIB
    small.clear()
    setting.framework.trim(setting.gpu)
    assert setting.usage().held == setting.taken == 0
    again = [setting.drv.mem_alloc(600_000) for _ in range(12)]
    assert setting.usage().held == setting.taken == 8 * MIB
    del again


def test_small_pitched_memory_lies_in_slabs_too(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    small = [setting.drv.mem_alloc_pitch(1024, 1024, 4)[0] for _ in range(3)]
    assert setting.usage().held == setting.taken == 4 * MIB and setting.usage().in_use == 3 * MIB
    del small[1]
    assert setting.usage().held == setting.taken == 4 * MIB and setting.usage().in_use == 2 * MIB
    del small[1]
    assert setting.usage().held == setting.taken == 2 * MIB and setting.usage().in_use == MIB
    small.clear()
    assert setting.usage().held == setting.taken == 0


def test_pitched_memory_that_leaves_gaps_in_slabs_counts_with_them(model: Model) -> None:
    """Measured on an H200: of 0.7 MiB only two fit a slab, 60 pieces take 60 MiB."""
    setting = model()
    setting.apply(8 * MIB)
    live = fill(lambda n: setting.drv.mem_alloc_pitch(1024, n // 1024, 4), 700 * 1024, setting.drv.MemoryError)
    assert len(live) == 8 and setting.usage().held == 8 * MIB


def test_a_block_that_went_while_it_was_counted_is_not_counted_twice(model: Model) -> None:
    """Freed by hand and trimmed away, its object still alive: the next one of its size takes its place."""
    setting = model()
    setting.apply(64 * MIB)
    kept, dead = setting.drv.mem_alloc(2000), setting.drv.mem_alloc(8 * MIB)
    dead.free()
    setting.framework.trim(setting.gpu)
    del dead
    array = setting.drv.mem_alloc(8 * MIB)
    assert setting.usage().held == setting.taken == 12 * MIB
    del array, kept


def test_sizes_that_are_none_get_pycudas_own_error(model: Model) -> None:
    setting = model()
    setting.apply()
    for size in (0, -1):
        with pytest.raises(setting.drv.LogicError, match="invalid argument"):
            setting.drv.mem_alloc(size)
    pool = setting.tools.DeviceMemoryPool()
    with pytest.raises(setting.drv.LogicError, match="of no size"):
        pool.allocate(-1)


def test_resizing(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    live = fill(setting.drv.mem_alloc, 8 * MIB, setting.drv.MemoryError)
    setting.framework.resize({setting.gpu.uuid: 128 * MIB})
    live += fill(setting.drv.mem_alloc, 8 * MIB, setting.drv.MemoryError)
    assert 100 * MIB < setting.taken <= 128 * MIB
    setting.framework.resize({setting.gpu.uuid: 32 * MIB})
    with pytest.raises(setting.drv.MemoryError):
        setting.drv.mem_alloc(2 * MIB)
    live.clear()
    setting.framework.trim(setting.gpu)
    fill(setting.drv.mem_alloc, 8 * MIB, setting.drv.MemoryError)
    assert setting.taken <= 32 * MIB


def test_trimming_gives_back_what_lies_idle(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    kept, gone = setting.drv.mem_alloc(8 * MIB), setting.drv.mem_alloc(24 * MIB)
    del gone
    before, usage = setting.taken, setting.usage()
    setting.framework.trim(setting.gpu)
    assert before - setting.taken >= 24 * MIB and setting.usage().in_use == 8 * MIB
    assert usage.reclaimable is not None and usage.reclaimable >= 24 * MIB
    del kept


def test_a_full_card_is_pycudas_own_error(model: Model) -> None:
    setting = model()
    setting.apply(GIB)
    setting.drv.gpus[0].total = setting.drv.CONTEXT + 64 * MIB
    live = fill(setting.drv.mem_alloc, 8 * MIB, setting.drv.MemoryError)
    with pytest.raises(setting.drv.MemoryError, match="cuMemAlloc failed"):
        setting.drv.mem_alloc(8 * MIB)
    del live[::2]
    with pytest.raises(setting.drv.MemoryError, match="cuMemAlloc failed"):
        setting.drv.mem_alloc(60 * MIB)  # gave its idle blocks back, in vain
    assert setting.usage().held == setting.taken
    array = setting.drv.mem_alloc(13 * MIB)  # PyCUDA gives its idle blocks back by itself and tries again
    usage = setting.usage()
    assert usage.held is not None and setting.taken <= usage.held <= 64 * MIB
    del array


def test_a_card_that_the_request_fills_to_the_last_page(model: Model) -> None:
    setting = model()
    setting.apply(GIB)
    setting.drv.gpus[0].total = setting.drv.CONTEXT + 10 * MIB
    array = setting.drv.mem_alloc(8 * MIB)
    assert setting.taken == 10 * MIB
    with pytest.raises(setting.drv.MemoryError, match="cuMemAlloc failed"):
        setting.drv.mem_alloc(8 * MIB)
    del array
    setting.drv.mem_alloc(8 * MIB)


def test_blocks_that_pycuda_gave_back_by_itself_are_not_counted_on(model: Model) -> None:
    """Where the driver refuses, PyCUDA frees idle blocks; no later request may pass the cap as if they were there."""
    setting = model()
    setting.apply(64 * MIB)
    live = [setting.drv.mem_alloc(8 * MIB) for _ in range(3)]
    setting.drv.gpus[0].total = setting.drv.CONTEXT + setting.taken + 4 * MIB
    del live[:2]
    live.append(setting.drv.mem_alloc(13 * MIB))
    setting.drv.gpus[0].total = GIB
    live += fill(setting.drv.mem_alloc, 8 * MIB, setting.drv.MemoryError)
    assert setting.taken <= 64 * MIB


def test_arrays_freed_by_hand_are_not_counted_on_either(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    dead = []
    for _ in range(10):
        dead.append(setting.drv.mem_alloc(8 * MIB))
        dead[-1].free()
    dead.clear()
    live = fill(setting.drv.mem_alloc, 8 * MIB, setting.drv.MemoryError)
    assert len(live) >= 5 and setting.taken <= 64 * MIB


def test_a_cap_of_one_page(model: Model) -> None:
    """PyCUDA's pool keeps a small block idle, whose page counts too."""
    setting = model()
    setting.apply(2 * MIB)
    array = setting.drv.mem_alloc(1000)
    assert setting.taken == 2 * MIB
    with pytest.raises(setting.drv.MemoryError):
        setting.drv.mem_alloc(MIB + 1)
    del array


def test_the_peak_is_that_of_what_was_in_use(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    first, second = setting.drv.mem_alloc(8 * MIB), setting.drv.mem_alloc(20 * MIB)
    del first, second
    assert setting.usage().in_use == 0 and setting.usage().peak == 28 * MIB


@pytest.mark.parametrize("size", [1, 1000, MIB, 3 * MIB + 1, 8 * MIB, 31 * MIB])
def test_what_a_request_would_take_is_foretold(model: Model, size: int) -> None:
    """At most by one bin and one page too much, never too little."""
    setting = model()
    setting.apply(64 * MIB)
    early = setting.framework.footprint(size)
    kept = setting.drv.mem_alloc(2000)
    late, before = setting.framework.footprint(size), setting.taken
    array = setting.drv.mem_alloc(size)
    for foretold in (early, late):
        assert setting.taken - before <= max(foretold, 2 * MIB) <= size * 17 // 16 + 2 * MIB
    del array, kept


@pytest.mark.parametrize("seed", range(8))
def test_what_fits_under_the_cap_by_its_footprint_is_not_refused(model: Model, seed: int) -> None:
    """Whatever lies in the slabs, others' too, and whatever was freed: a small block may have to open a slab."""
    setting = model()
    setting.apply(24 * MIB)
    card, allocate, dice, refusals = setting.drv.gpus[0], setting.drv.mem_alloc, random.Random(seed), 0
    live, theirs = [allocate(1000)], []  # with the first comes the block that its pool keeps idle

    def fits(size: int) -> bool:
        return bool((setting.usage().held or 0) + setting.framework.footprint(size) <= 24 * MIB)

    for _ in range(300):
        if dice.random() < 0.1:
            theirs.append(card.take(dice.randint(1, MIB)))
        if dice.random() < 0.1:
            dice.shuffle(live)
            del live[dice.randint(0, len(live)) :]
        size = dice.choice([dice.randint(1, MIB), dice.randint(400, 700) * KIB, dice.randint(MIB, 9 * MIB)])
        foretold = fits(size)
        try:
            live.append(allocate(size))
        except setting.drv.MemoryError:
            assert not foretold and not fits(size), f"{size} bytes were refused"
            refusals += 1
    assert refusals > 10
    for address in theirs:
        card.give(address)


@pytest.mark.parametrize("size", [444 * KIB, 647 * KIB])
def test_a_small_request_may_take_a_whole_slab(model: Model, size: int) -> None:
    """Measured: refused with 1.0 and 0.8 MiB left under the cap, as the slabs that others opened had no room."""
    setting = model()
    setting.apply(4 * MIB)
    card = setting.drv.gpus[0]
    theirs = card.take(MIB)  # into the rest of whose slab the first piece goes, and counts as what it is
    live = fill(setting.drv.mem_alloc, size, setting.drv.MemoryError)
    held = setting.usage().held
    assert live and held is not None and size < 4 * MIB - held < 2 * MIB, "more is left than it asked for"
    assert held + setting.framework.footprint(size) > 4 * MIB
    card.give(theirs)


# contexts and threads


def test_make_context_and_autoinit_give_the_primary_context(model: Model) -> None:
    setting = model()
    setting.apply(context=False)
    importlib.import_module("pycuda.autoinit")
    context = setting.drv.Device(0).make_context(flags=4)
    assert context.primary and context is setting.drv.Device(0).retain_primary_context()
    assert setting.drv.gpus[0].contexts == 1
    assert setting.drv.Context.get_current() is context


def test_a_thread_without_a_context_gets_pycudas_own_error(model: Model) -> None:
    setting = model()
    setting.apply()
    errors: dict[str, BaseException] = {}
    ways = setting.ways()

    def work() -> None:
        for name, way in ways.items():
            try:
                way(MIB)
            except BaseException as error:
                errors[name] = error

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert {name: type(error) for name, error in errors.items()} == dict.fromkeys(WAYS, setting.drv.LogicError)
    assert all("no currently active context" in str(error) for error in errors.values())


def test_arrays_that_die_on_a_thread_without_a_context(model: Model) -> None:
    """PyCUDA's pool takes the current context when its first block comes back, and ends the process without one."""
    setting = model()
    setting.apply(64 * MIB)
    arrays = [setting.drv.mem_alloc(MIB), setting.drv.mem_alloc(8 * MIB)]
    thread = threading.Thread(target=arrays.clear)
    thread.start()
    thread.join()
    setting.framework.trim(setting.gpu)
    arrays = [setting.tools.DeviceMemoryPool().allocate(MIB)]
    thread = threading.Thread(target=arrays.clear)
    thread.start()
    thread.join()
    assert setting.usage().in_use == 0


@pytest.mark.parametrize("way", ["mem_alloc", "own pool"])
def test_it_is_live_on_every_thread_once_it_holds_memory(model: Model, way: str) -> None:
    setting = model()
    setting.apply(64 * MIB)
    ways = setting.ways()
    array = ways[way](8 * MIB)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend([setting.framework.state(), setting.usage().in_use]))
    thread.start()
    thread.join()
    assert found == [State.LIVE, 8 * MIB]
    del array


def test_trimming_on_a_thread_without_a_context_frees_what_can_be_freed_there(model: Model) -> None:
    """Memguard's own pool, in its context. The user's gives back on its own thread alone."""
    setting = model()
    setting.apply(64 * MIB)
    pool = setting.drv.DeviceMemoryPool()
    arrays = [setting.drv.mem_alloc(24 * MIB), pool.allocate(9 * MIB)]
    del arrays
    own = setting.usage().held
    thread = threading.Thread(target=setting.framework.trim, args=(setting.gpu,))
    thread.start()
    thread.join()
    assert setting.drv._stacks.keys() == {threading.get_ident()} and setting.drv.counters["leaked"] == 0
    assert own > 33 * MIB and 8 * MIB < setting.taken == setting.usage().held < 14 * MIB
    setting.framework.trim(setting.gpu)
    assert setting.taken == setting.usage().held == 0


def test_threads_with_the_context_share_the_cap(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    context = setting.drv.Context.get_current()
    strange: list[BaseException] = []
    most = [0]

    def work(seed: int) -> None:
        rng = random.Random(seed)
        context.push()
        live: list[Any] = []
        try:
            for _ in range(200):
                if live and rng.random() < 0.5:
                    live.pop(rng.randrange(len(live)))
                try:
                    live.append(setting.drv.mem_alloc(rng.randrange(1, 12 * MIB)))
                except setting.drv.MemoryError:
                    live.clear()
                most[0] = max(most[0], setting.taken)
            live.clear()
        except BaseException as error:
            strange.append(error)
        finally:
            setting.drv.Context.pop()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert strange == [] and 32 * MIB < most[0] <= 64 * MIB
    assert setting.usage().in_use == 0


def test_a_gpu_that_it_never_used_has_no_row(model: Model) -> None:
    setting = model("h200", "h200")
    first, second = setting.host.devices()
    setting.apply(64 * MIB)
    assert setting.framework.state() is State.LIVE
    assert [setting.framework.usage(gpu) for gpu in (first, second)] == [None, None], "a context, and nothing in it"
    array = setting.drv.mem_alloc(8 * MIB)
    assert setting.usage(first).in_use == 8 * MIB and setting.framework.usage(second) is None
    del array
    assert setting.usage(first).in_use == 0 and setting.usage(first).peak == 8 * MIB
    setting.drv.Device(1).make_context()
    pitched, _ = setting.drv.mem_alloc_pitch(1000, 8192, 4)
    assert (setting.usage(second).in_use or 0) > 0
    del pitched
    setting.drv.Context.pop()
    assert setting.usage(second).in_use == setting.usage(second).held == 0


def test_finalizers_leave_the_counts_to_who_has_the_lock(model: Model) -> None:
    """Without the interpreter's lock a subtraction in a finalizer would lose another thread's."""
    setting = model()
    setting.apply(64 * MIB)
    framework, uuid = setting.framework, setting.gpu.uuid
    arrays = [setting.drv.mem_alloc_pitch(1000, 8192, 4)]
    with framework._lock:
        before = framework._pitched[uuid].in_use
        thread = threading.Thread(target=arrays.clear)
        thread.start()
        thread.join()
        assert framework._pitched[uuid].in_use == before
    assert setting.usage().in_use == 0 and framework._pitched[uuid].in_use == 0


def test_the_end_of_an_allocation_runs_no_python(model: Model) -> None:
    """It may come inside any other call, on any thread: it waits for no lock, and nothing interrupts it half way."""
    setting = model()
    setting.apply(64 * MIB)
    pool = setting.tools.DeviceMemoryPool()
    for allocate in (setting.drv.mem_alloc, pool.allocate):
        for _ in range(2):  # the first time it is a new block, then an idle one
            array = allocate(8 * MIB)
            (reference,) = weakref.getweakrefs(array)
            assert inspect.isbuiltin(reference.__callback__)
            with setting.framework._lock:
                thread = threading.Thread(target=[array].clear)
                del array
                thread.start()
                thread.join(5)
                assert not thread.is_alive()
    assert setting.usage().in_use == 0 and setting.usage().reclaimable == setting.taken


def test_nothing_keeps_an_allocation_or_a_pool(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    pool = setting.tools.DeviceMemoryPool()
    ends = [weakref.ref(pool)]
    for _ in range(3):
        ends += map(weakref.ref, [pool.allocate(2000), setting.drv.mem_alloc(2000)])
    array = pool.allocate(8 * MIB)
    del pool
    assert [end() is None for end in ends] == [False] + [True] * 6, "the live allocation alone keeps its pool"
    del array
    assert ends[0]() is None and setting.taken == 2 * MIB, "the idle block of memguard's own pool"
    assert setting.usage().held == 2 * MIB


def test_what_died_after_the_undo_keeps_no_pool(model: Model) -> None:
    setting = model()
    applied = setting.apply(64 * MIB)
    array = setting.drv.mem_alloc(8 * MIB)
    applied.undo()
    del array
    gc.collect()
    assert setting.taken == 0


def test_each_gpu_has_its_own_cap(model: Model) -> None:
    setting = model("h200", "h200")
    first, second = setting.host.devices()
    setting.apply(64 * MIB)
    live = fill(setting.drv.mem_alloc, 8 * MIB, setting.drv.MemoryError)
    setting.drv.Device(1).make_context()
    live += fill(setting.drv.mem_alloc, 8 * MIB, setting.drv.MemoryError)
    assert setting.usage(first).held == setting.usage(second).held
    assert setting.drv.gpus[0].taken == setting.drv.gpus[1].taken > 48 * MIB
    setting.drv.Context.pop()
    live.clear()


def test_a_gpu_that_the_budget_does_not_have(model: Model) -> None:
    setting = model()
    setting.apply()
    setting.drv.Device(1).make_context()
    with pytest.raises(CapNotApplied, match="not in the budget"):
        setting.drv.mem_alloc(MIB)


def test_gpus_without_cudas_numbering(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = model()
    importlib.import_module("pycuda.driver")
    gpu = setting.gpu
    nameless = Device(gpu.uuid, gpu.name, 0, gpu.total, gpu.reserved, gpu.architecture, ordinal=None)
    monkeypatch.setattr(setting.host, "devices", lambda **_: (nameless, nameless))
    raw = setting.drv.mem_alloc
    with pytest.raises(CapNotApplied, match="fix: run `memguard doctor`"):
        apply_caps(setting.framework, {gpu.uuid: GIB})
    assert setting.drv.mem_alloc is raw


# live before the budget


def test_live_before_the_budget_is_said(model: Model) -> None:
    setting = model()
    importlib.import_module("pycuda.autoinit")
    early = setting.drv.mem_alloc(100 * MIB)
    applied = apply_caps(setting.framework, {setting.gpu.uuid: 64 * MIB})
    assert len(applied.notes) == 2
    assert (
        "what it allocated before is not counted" in applied.notes[0]
        and "second CUDA context (+518 MiB" in applied.notes[1]
    )
    fill(setting.drv.mem_alloc, 8 * MIB, setting.drv.MemoryError)
    assert setting.usage().held is not None and setting.taken <= 64 * MIB + 100 * MIB
    del early


# undo


def test_a_function_that_is_replaced_later_is_told(model: Model) -> None:
    setting = model()
    assert setting.framework.drift() == [], "not imported"
    applied = setting.apply()
    assert setting.framework.drift() == []
    ours = setting.drv.mem_alloc
    setting.drv.mem_alloc = lambda size: None
    (said,) = drifts(setting.framework)
    assert "pycuda.driver.mem_alloc was replaced after memguard.init" in said
    setting.drv.mem_alloc = ours
    assert setting.framework.drift() == []
    applied.undo()
    assert setting.framework.drift() == [] and setting.drv.mem_alloc is not ours


def test_undone_everything_is_as_before(model: Model) -> None:
    setting = model()
    drv, tools, arrays = importlib.import_module("pycuda.driver"), setting.tools, setting.arrays

    def state() -> list[Any]:
        functions = (arrays.empty, arrays.zeros, arrays.arange, arrays.GPUArray.__init__, arrays.GPUArray.copy)
        defaults = [(f.__defaults__, dict(f.__kwdefaults__ or {})) for f in functions]
        pool = tools.DeviceMemoryPool
        replaced = [drv.mem_alloc, drv.mem_alloc_pitch, drv.Device.make_context, pool.allocate, pool.free_held]
        return [*replaced, pool, *defaults]

    before = state()
    applied = setting.apply(64 * MIB)
    same = [now == then for now, then in zip(state(), before, strict=True)]
    assert same == [False] * 5 + [True] + [False] * 2 + [True, False, False], (
        "arange has no allocator among its defaults"
    )
    array = drv.mem_alloc(8 * MIB)
    gone = drv.mem_alloc(40 * MIB)
    del gone
    applied.undo()
    assert state() == before
    assert setting.taken < 20 * MIB, "idle blocks went back"
    assert setting.framework.usage(setting.gpu) is None
    more = drv.mem_alloc(200 * MIB)
    del array, more
    assert drv.Device(0).make_context().primary is False


def test_undone_in_arrays_that_were_imported_later_too(model: Model) -> None:
    setting = model()
    applied = setting.apply(64 * MIB)
    arrays = setting.arrays
    applied.undo()
    arrays.empty(200 * MIB)
    arrays.zeros(200 * MIB)


def test_a_pool_made_under_the_budget_lives_on_without_a_cap(model: Model) -> None:
    setting = model()
    applied = setting.apply(64 * MIB)
    pool = setting.tools.DeviceMemoryPool()
    array = pool.allocate(8 * MIB)
    applied.undo()
    other = pool.allocate(200 * MIB)
    del array, other
    pool.free_held()


def test_applied_again_after_an_undo(model: Model) -> None:
    setting = model()
    first = setting.apply(64 * MIB)
    first.undo()
    setting.apply(32 * MIB, context=False)
    fill(setting.drv.mem_alloc, 4 * MIB, setting.drv.MemoryError)
    assert setting.taken <= 32 * MIB


# recording


def test_recording(model: Model) -> None:
    setting = model()
    assert setting.framework.record() is None
    setting.apply(64 * MIB)
    before = setting.drv.mem_alloc(MIB)
    stop = setting.framework.record()
    assert stop is not None
    array = setting.drv.mem_alloc(5 * MIB)
    other = setting.tools.DeviceMemoryPool().allocate(7 * MIB)
    del before, array
    events = stop()
    del other
    assert [(e.op, e.bytes) for e in events] == [("alloc", 5 * MIB), ("alloc", 7 * MIB), ("free", None)]
    assert events[2].id == events[0].id and events[0].time <= events[2].time


# forks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_not_capped_and_waits_for_no_lock(model: Model) -> None:
    setting = model()
    setting.apply(64 * MIB)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with setting.framework._lock:
            held.set()
            release.wait(20)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(5)
    pid = os.fork()
    if pid == 0:
        import signal

        signal.alarm(10)
        code = 1
        try:
            setting.framework.forked()
            setting.drv.mem_alloc(200 * MIB)
            code = 0 if setting.framework.usage(setting.gpu) is None else 2
        finally:
            os._exit(code)
    release.set()
    thread.join(5)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    with pytest.raises(setting.drv.MemoryError):
        setting.drv.mem_alloc(200 * MIB)


# the whole of it: the public functions over the model


def test_a_whole_program_ends_cleanly() -> None:
    """memguard.init with a stand-in host, autoinit, arrays alive at exit: nothing aborts and nothing is printed."""
    code = """
import sys
import memguard
from memguard import api
from memguard._runtime import runtime
from memguard._guard.guard import Guard
from memguard._budget import from_mapping
from memguard._devices.simulated import SimulatedHost

class Host(SimulatedHost):
    simulated = False

runtime.open_host = lambda simulate: Host(["h200"])
guard = memguard.init({"version": 1, "frameworks": {"pycuda": {"limit": "64MiB"}}})
import pycuda.autoinit, pycuda.driver as drv, pycuda.gpuarray as arrays
keep = arrays.empty(8 << 20)
try:
    drv.mem_alloc(100 << 20)
except drv.MemoryError:
    row = memguard.ledger().devices[0].row("pycuda")
    print(row.enforcement, row.in_use, row.cap)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE / "fake_pycuda"), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["enforced", str(8 * MIB), str(64 * MIB)], "")

"""RMM as the allocator of CuPy, and of whoever else asks `_rmm`, on a model in plain Python (`fake_cupy/rmm`)."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.capping import AppliedCaps, apply_caps
from support.drifts import drifts

from memguard._base.types import Enforcement, State, Usage
from memguard._base.undo import Undo
from memguard._base.units import MIB
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.cupy.adapter import CuPy
from memguard._frameworks.rmm import resource as rmm
from memguard.errors import CapNotApplied

HERE = Path(__file__).parent
WATCHED = "torch: watched: it has no cap of its own: "


class NotSimulated(SimulatedHost):
    simulated = False


class Setting:
    """CuPy on RMM, over the model's two cards."""

    def __init__(self) -> None:
        self.host = NotSimulated(["h200", "h200"])
        self.framework = CuPy(self.host)
        self.first, self.second = self.host.devices()
        self.cp: Any = importlib.import_module("cupy")
        self.mr: Any = importlib.import_module("rmm").mr
        self.card: Any = sys.modules["fake_card"]
        self.card.use(0)
        allocators: Any = importlib.import_module("rmm.allocators.cupy")
        self.allocator = allocators.rmm_cupy_allocator
        self.cp.cuda.set_allocator(self.allocator)
        self.ordinals = {self.first.uuid: 0, self.second.uuid: 1}

    def caps(self, first: int = 64 * MIB, second: int = 24 * MIB) -> dict[str, int]:
        return {self.first.uuid: first, self.second.uuid: second}

    def apply(self) -> AppliedCaps:
        return apply_caps(self.framework, self.caps())

    def resources(self) -> list[Any]:
        return [self.mr.get_per_device_resource(0), self.mr.get_per_device_resource(1)]

    def alloc(self, size: int, ordinal: int = 0) -> Any:
        with self.cp.cuda.Device(ordinal):
            return self.cp.cuda.alloc(size)

    def fill(self, ordinal: int = 0) -> list[Any]:
        live = []
        with pytest.raises(MemoryError):
            for _ in range(1000):
                live.append(self.alloc(2 * MIB, ordinal))
        return live

    def taken(self, ordinal: int = 0) -> int:
        return int(self.card.gpus[ordinal].taken)


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("cupy", "rmm", "fake_card", "card")]:
        del sys.modules[name]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Setting]]:
    """Make a setting. The model is imported anew for every test and gone afterwards."""
    forget()
    monkeypatch.syspath_prepend(HERE / "fake_cupy")
    monkeypatch.delenv("CUPY_GPU_MEMORY_LIMIT", raising=False)
    monkeypatch.setattr(rmm, "_limits", {})
    importlib.import_module("fake_card").stand_in(monkeypatch)
    yield Setting
    forget()


Model = Callable[[], Setting]


def test_over_the_drivers_own_allocations_the_cap_holds_on_each_gpu(model: Model) -> None:
    setting = model()
    applied = setting.apply()
    assert applied.enforcement is Enforcement.ENFORCED
    assert applied.notes == ("cupy: capped through RMM, which is its allocator; what it held before is not counted",)
    assert setting.cp.cuda.get_allocator() is setting.allocator and setting.framework.state() is State.LIVE
    assert setting.framework.usage(setting.first) == Usage(0, 0, 0)
    live = setting.fill() + setting.fill(1)
    assert (setting.taken(0), setting.taken(1)) == (64 * MIB, 24 * MIB)
    assert setting.framework.usage(setting.first) == Usage(64 * MIB, 64 * MIB, 0)
    assert setting.framework.usage(setting.second) == Usage(24 * MIB, 24 * MIB, 0)
    assert setting.framework.about() == {"allocator": "rmm"} and setting.framework.drift() == []
    live.clear()
    assert setting.framework.usage(setting.first) == Usage(0, 0, 0) and setting.taken() == 0


def test_the_error_is_rmms_and_is_named(model: Model) -> None:
    setting = model()
    setting.apply()
    with pytest.raises(MemoryError, match="Exceeded memory limit") as caught:
        setting.alloc(100 * MIB)
    assert not isinstance(caught.value, setting.cp.cuda.memory.OutOfMemoryError)


def test_what_was_held_before_is_not_counted(model: Model) -> None:
    setting = model()
    before = setting.alloc(100 * MIB)
    setting.apply()
    assert setting.framework.usage(setting.first) == Usage(0, 0, 0)
    live = setting.fill()
    del before
    assert setting.framework.usage(setting.first) == Usage(64 * MIB, 64 * MIB, 0), "given back to where it came from"
    del live


def test_its_cap_cannot_be_changed(model: Model) -> None:
    setting = model()
    assert not setting.framework.fixed()
    setting.apply()
    assert setting.framework.fixed()  # so that no request tries to raise an elastic cap
    with pytest.raises(CapNotApplied, match="its limit is fixed"):
        setting.framework.resize(setting.caps(128 * MIB))
    setting.framework.trim(setting.first)
    setting.framework.forked()


@pytest.mark.parametrize("ordinal", [0, 1])
@pytest.mark.parametrize("kind", ["PoolMemoryResource", "StatisticsResourceAdaptor"])
def test_over_anything_else_it_is_watched_on_every_gpu(model: Model, kind: str, ordinal: int) -> None:
    """A pool holds more than is in use: what is allocated from it is no cap."""
    setting = model()
    setting.mr.set_per_device_resource(ordinal, getattr(setting.mr, kind)(setting.mr.CudaMemoryResource()))
    before = setting.resources()
    applied = setting.apply()
    assert applied.enforcement is Enforcement.WATCHED
    (note,) = applied.notes
    assert "watched: it has no cap" in note and f"RMM's {kind}, which may hold more" in note
    assert setting.resources() == before and rmm._limits == {}
    array = setting.alloc(100 * MIB)
    assert setting.framework.usage(setting.first) == Usage(None, None), "not known, and not 0"
    applied.undo()
    assert setting.resources() == before
    del array


def test_a_gpu_that_is_not_in_the_budget_is_left_alone(model: Model) -> None:
    setting = model()
    setting.mr.set_per_device_resource(1, setting.mr.PoolMemoryResource(setting.mr.CudaMemoryResource()))
    before = setting.resources()
    limit, applied = rmm.apply("torch", {setting.first.uuid: 64 * MIB}, setting.ordinals, Undo())
    assert applied.enforcement is Enforcement.ENFORCED and setting.resources()[1] is before[1]
    assert limit.usage(setting.first.uuid) == Usage(0, 0, 0) and limit.usage(setting.second.uuid) is None
    assert setting.resources()[0].get_allocation_limit() == 64 * MIB


def test_a_second_framework_shares_the_limit_of_the_first(model: Model) -> None:
    setting = model()
    first = setting.apply()
    limited = setting.resources()
    undo = Undo()
    limit, second = rmm.apply("torch", setting.caps(1024 * MIB), setting.ordinals, undo)
    assert second.enforcement is Enforcement.WATCHED
    assert second.notes == (WATCHED + "it shares RMM with cupy, whose cap holds for both together",)
    assert limit.usage(setting.first.uuid) == Usage(None, None) and setting.resources() == limited
    undo.run()
    assert setting.resources() == limited, "the limit is the first one's"
    first.undo()
    _, again = rmm.apply("torch", setting.caps(), setting.ordinals, Undo())
    assert again.enforcement is Enforcement.ENFORCED, "nobody's limit is there any more"


@pytest.mark.parametrize("ordinal", [0, 1])
def test_a_resource_that_is_replaced_is_told(model: Model, ordinal: int) -> None:
    """`rmm.reinitialize` does it too."""
    setting = model()
    applied = setting.apply()
    limited = setting.resources()
    assert setting.framework.drift() == []
    setting.mr.set_per_device_resource(ordinal, setting.mr.CudaMemoryResource())
    (said,) = drifts(setting.framework)
    assert said == (
        f"cupy: RMM's resource on cuda:{ordinal} was replaced after memguard.init (CudaMemoryResource): "
        "its cap does not hold"
    )
    wrapped = setting.mr.PoolMemoryResource(setting.mr.StatisticsResourceAdaptor(limited[ordinal]))
    setting.mr.set_per_device_resource(ordinal, wrapped)
    assert setting.framework.drift() == [], "all of it still goes through the limit"
    setting.mr.set_per_device_resource(ordinal, limited[ordinal])
    applied.undo()
    assert setting.framework.drift() == []


def test_only_watched_nothing_drifts(model: Model) -> None:
    setting = model()
    setting.apply()
    limit, _ = rmm.apply("torch", setting.caps(), setting.ordinals, Undo())
    setting.mr.set_per_device_resource(0, setting.mr.CudaMemoryResource())
    assert limit.drift() == [] and len(drifts(setting.framework)) == 1


def test_an_allocator_that_is_no_longer_rmms_is_told(model: Model) -> None:
    setting = model()
    setting.apply()
    setting.cp.cuda.set_allocator(setting.cp.get_default_memory_pool().malloc)
    (said,) = drifts(setting.framework)
    assert "allocator was replaced after memguard.init (MemoryPool.malloc)" in said
    assert setting.framework.usage(setting.first) == Usage(None, None)


@pytest.mark.parametrize("gpus", [1, 2])
def test_capping_before_cuda_is_initialised_does_not_initialise_it(
    model: Model, monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    setting = model()
    setting.card.initialised, setting.card.asked = False, 0
    applied = setting.apply()
    assert applied.enforcement is Enforcement.ENFORCED
    assert setting.card.asked == 0 and not setting.card.initialised
    assert [found.get_allocation_limit() for found in setting.resources()] == [64 * MIB, 24 * MIB]
    assert setting.framework.state() is State.IMPORTED and setting.framework.usage(setting.first) is None
    applied.undo()
    unknown = tuple(dataclasses.replace(gpu, ordinal=None, index=5) for gpu in setting.host.devices()[:gpus])
    monkeypatch.setattr(setting.host, "devices", lambda *, ordinals=False: unknown)
    if gpus == 1:
        setting.apply()
        assert setting.resources()[0].get_allocation_limit() == 64 * MIB, "there is no other"
        return
    before = setting.resources()
    with pytest.raises(CapNotApplied, match="fix: run `memguard doctor`"):
        setting.apply()
    assert setting.resources() == before and setting.card.asked == 0


def test_a_resource_that_cannot_be_set_leaves_nothing_behind(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = model()
    before, put = setting.resources(), setting.mr.set_per_device_resource

    def failing(ordinal: int, resource: Any) -> None:
        if ordinal == 1:
            raise RuntimeError("not now")
        put(ordinal, resource)

    monkeypatch.setattr(setting.mr, "set_per_device_resource", failing)
    with pytest.raises(RuntimeError, match="not now"):
        setting.apply()
    assert setting.resources() == before and rmm._limits == {} and setting.framework.drift() == []


def test_an_undo_restores_the_resources_while_arrays_live(model: Model) -> None:
    setting = model()
    before = setting.resources()
    applied = setting.apply()
    array = setting.alloc(10 * MIB)
    applied.undo()
    assert setting.resources() == before and rmm._limits == {}
    other = setting.alloc(100 * MIB)
    del array
    assert setting.taken() == 100 * MIB
    del other


def test_an_undo_says_where_the_limit_stays(model: Model) -> None:
    setting = model()
    before = setting.resources()
    applied = setting.apply()
    wrapped = setting.mr.StatisticsResourceAdaptor(setting.resources()[1])
    setting.mr.set_per_device_resource(1, wrapped)
    with pytest.raises(CapNotApplied) as caught:
        applied.undo()
    assert caught.value.reason == "RMM's resource was wrapped again after memguard.init, so its limit stays on cuda:1"
    assert caught.value.framework == "cupy" and "undo what wraps it" in caught.value.remedy
    assert setting.resources() == [before[0], wrapped]
    applied.undo()  # it was said once
    array = setting.alloc(100 * MIB)
    with pytest.raises(MemoryError):
        setting.alloc(100 * MIB, 1)
    _, again = rmm.apply("cupy", setting.caps(), setting.ordinals, Undo())
    assert again.enforcement is Enforcement.WATCHED and "StatisticsResourceAdaptor" in again.notes[0]
    del array


def test_a_limit_that_cannot_be_made_leaves_nothing_behind(model: Model) -> None:
    setting = model()
    before = setting.resources()
    with pytest.raises(OverflowError):
        rmm.apply("torch", setting.caps(64 * MIB, -1), setting.ordinals, Undo())
    assert setting.resources() == before and rmm._limits == {}


def test_how_it_is_recognised(model: Model) -> None:
    setting = model()
    assert rmm.is_cupys(setting.allocator) and not rmm.is_cupys(setting.cp.get_default_memory_pool().malloc)
    assert not rmm.is_cupys(None) and not rmm.is_loaded_for("torch")
    importlib.import_module("rmm.allocators.torch")
    assert rmm.is_loaded_for("torch") and not rmm.is_loaded_for("numba")

"""What idles in the shared pool serves frameworks outside it too, and is counted among what could come back."""

from __future__ import annotations

from typing import Any

import pytest
from test_cupy_model import model
from test_cupy_pooled import FakePool, Joint

from memguard import _budget
from memguard._base.types import POOL, DeviceSample, Enforcement, FrameworkSample, MemoryInfo, Sample
from memguard._base.units import MIB
from memguard._devices import pools
from memguard._guard.figures import FrameworkReclaimable
from memguard._guard.guard import Guard
from memguard.errors import BudgetExceeded

__all__ = ["model"]
TOTAL = 400 * MIB
"""What the model's card has for this process."""
ASKED = "200MiB"


@pytest.fixture
def gpus() -> int:
    return 1


class Scene:
    """CuPy in the pool, PyCUDA outside it, on a card where little else is free."""

    def __init__(self, joint: Joint, monkeypatch: pytest.MonkeyPatch, **pycuda: str) -> None:
        self.joint, host = joint, joint.setting.host
        beside = {**(pycuda or {"limit": "256MiB"}), "context": "own"}
        frameworks = {"cupy": {"limit": "256MiB"}, "pycuda": beside}
        text = {"version": 1, "strategy": "pool", "frameworks": frameworks}
        self.device = host.devices()[0]

        def memory(device: Any) -> MemoryInfo:
            return MemoryInfo(device.total, 0, joint.gpu.pool_held, TOTAL - joint.gpu.pool_held, None)

        monkeypatch.setattr(host, "memory", memory)
        monkeypatch.setattr(host, "processes", lambda device: {host.pid: joint.gpu.pool_held})
        self.guard = Guard(_budget.from_mapping(text), host)

    @property
    def held(self) -> int:
        return int(self.joint.gpu.pool_held)


def test_a_tick_calls_back_what_is_lent_beside_a_pool_that_holds_too_much(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample has the room in the pool as its frameworks' caps, which move with its use and not with the plan's."""
    guard = Scene(Joint(model(), 256 * MIB), monkeypatch, min="128MiB", max="256MiB").guard
    guard.start()
    try:
        (part,) = guard.plan.devices
        guard.caps.entry("pycuda").enforcement = Enforcement.PENDING  # it is not installed here
        guard.caps.set_cap("pycuda", part.device.uuid, 256 * MIB)
        rows = {
            "cupy": FrameworkSample(MIB, MIB, 0, 255 * MIB),
            POOL: FrameworkSample(part.limit, 0, None, None),
            "pycuda": FrameworkSample(0, 0, 0, 256 * MIB),
        }
        device = DeviceSample(part.device.uuid, part.device.total, 0, 0, 0, part.limit, 0, 0, rows)
        after = guard.rebalance(Sample(0, (device,))).devices[0].frameworks
        assert (guard.plan.devices[0].caps["pycuda"], after["pycuda"].cap) == (128 * MIB, 128 * MIB)
        assert after["cupy"].cap == 255 * MIB
    finally:
        guard.stop()


@pytest.fixture
def scene(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(pools, "CappedPool", FakePool)
    monkeypatch.setattr(FakePool, "fails", "")
    found = Scene(Joint(model(), 256 * MIB), monkeypatch)
    found.guard.start()
    yield found
    found.guard.stop()


def cached(scene: Scene) -> Any:
    """256 MiB of the pool in use, and 224 MiB of it given back to the pool."""
    setting = scene.joint.setting
    live = [setting.alloc(32 * MIB), setting.alloc(224 * MIB)]
    del live[1]
    assert scene.held == 256 * MIB
    return live


def test_a_request_outside_gets_as_much_of_the_pools_cache_as_it_needs(scene: Scene) -> None:
    live = cached(scene)
    room = scene.guard.make_room("pycuda", 200 * MIB)
    assert not room.missing and TOTAL - scene.held >= 200 * MIB and live
    assert room.returned == {POOL: 256 * MIB - scene.held} and scene.held > 100 * MIB, "no more than it needs"
    (event,) = scene.guard.take_events()
    assert f"room for pycuda: {POOL} gave back" in event.text


def test_require_and_a_workload_get_it_too(scene: Scene) -> None:
    live = cached(scene)
    scene.guard.require("pycuda", ASKED)
    assert TOTAL - scene.held >= 200 * MIB
    live.append(scene.joint.setting.alloc(200 * MIB))
    live.pop()
    assert TOTAL - scene.held < 200 * MIB
    with scene.guard.workload("w", framework="pycuda", needs=ASKED):
        assert TOTAL - scene.held >= 200 * MIB
    live.append(scene.joint.setting.alloc(200 * MIB))
    with pytest.raises(BudgetExceeded, match="caches of other frameworks in this process add"):
        scene.guard.require("pycuda", ASKED)


def test_what_its_frees_wait_for_is_waited_for_only_if_the_rest_does_not_do(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, gpu = cached(scene), scene.joint.gpu
    trimmed, real = list[int](), gpu.trim_pool
    before = scene.joint.setting.card.synchronized

    def trim(keep: int = 0) -> None:
        """The frees still wait for work of CuPy's stream."""
        trimmed.append(keep)
        if scene.joint.setting.card.synchronized > before:
            real(keep)

    monkeypatch.setattr(gpu, "trim_pool", trim)
    assert not scene.guard.make_room("pycuda", 200 * MIB).missing and live
    assert scene.joint.setting.card.synchronized > before and trimmed[0] > 0 and 0 in trimmed


def test_who_is_in_the_pool_asks_nobody_for_its_own_cache(scene: Scene) -> None:
    live = cached(scene)
    room = scene.guard.make_room("cupy", 200 * MIB)
    assert not room.missing, "the pool's idle memory serves it"
    assert room.returned == {} and scene.held == 256 * MIB and live


def test_it_is_a_row_of_what_could_come_back_and_a_trim_gives_it_back(scene: Scene) -> None:
    live = cached(scene)
    (part,) = scene.guard.reclaimable().devices
    row = next(one for one in part.frameworks if one.framework == POOL)
    assert row == FrameworkReclaimable(POOL, 224 * MIB, 224 * MIB, None, "memguard.trim"), (
        "pieces with a live block stay"
    )
    assert str(scene.guard.reclaimable()).splitlines()[-1].endswith("unknown  memguard.trim()")
    live.clear()
    (part,) = scene.guard.reclaimable().devices
    assert part.reclaimable == 256 * MIB
    assert scene.guard.trim(POOL) == 256 * MIB and scene.held == 0
    assert scene.guard.reclaimable().devices[0].reclaimable == 0

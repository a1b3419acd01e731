"""Simulated frameworks ask for room before they refuse, where the real ones do, and give back the least that serves."""

from __future__ import annotations

import threading

import pytest
from support.capping import apply_caps

from memguard._base.types import Device, Shortage
from memguard._base.units import GIB, KIB, MIB
from memguard._devices.catalog import Model
from memguard._devices.simulated import CONTEXT, SimulatedHost
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory, SimulatedFramework

ASK = ["cupy", "pycuda", "numba"]
NEVER_ASK = ["torch", "tensorflow", "jax"]


def capped(name: str, cap: int = 64 * MIB, total: int = 8 * GIB) -> tuple[SimulatedFramework, Device]:
    host = SimulatedHost([Model("small", "hopper", total)])
    (gpu,) = host.devices()
    framework = SimulatedFramework(host, name)
    apply_caps(framework, {gpu.uuid: cap})
    return framework, gpu


@pytest.mark.parametrize("name", ASK)
def test_a_request_above_the_cap_asks_and_is_served_once_there_is_room(name: str) -> None:
    framework, gpu = capped(name)
    framework.allocate(40 * MIB)
    asked: list[Shortage] = []

    def make_room(shortage: Shortage) -> bool:
        asked.append(shortage)
        framework.resize({gpu.uuid: 128 * MIB})
        return True

    framework.on_shortage = make_room
    framework.allocate(33 * MIB)
    (shortage,) = asked
    assert (shortage.framework, shortage.uuid, shortage.requested, shortage.full) == (name, gpu.uuid, 33 * MIB, False)
    assert framework.stats(gpu).held <= 40 * MIB + 4 * MIB + shortage.needed, "needed is the most that it takes"


@pytest.mark.parametrize("name", ASK)
def test_it_asks_at_most_twice_for_one_request(name: str) -> None:
    framework, _gpu = capped(name)
    asked: list[Shortage] = []
    framework.on_shortage = lambda shortage: asked.append(shortage) is None
    with pytest.raises(FrameworkOutOfMemory, match="its cap is reached"):
        framework.allocate(GIB)
    assert len(asked) == 2
    framework.on_shortage = lambda shortage: asked.append(shortage) is not None
    with pytest.raises(FrameworkOutOfMemory):
        framework.allocate(GIB)
    assert len(asked) == 3, "who is told that nothing changed gives up"


@pytest.mark.parametrize("name", NEVER_ASK)
def test_allocators_that_are_not_memguards_never_ask(name: str) -> None:
    framework, _gpu = capped(name)
    framework.on_shortage = lambda _: pytest.fail("asked")
    with pytest.raises(FrameworkOutOfMemory):
        framework.allocate(GIB)
    assert framework.resizable == (name == "torch")


@pytest.mark.parametrize("name", ASK)
def test_it_says_that_the_gpu_is_full_and_what_its_start_takes(name: str) -> None:
    framework, gpu = capped(name, cap=4 * GIB, total=GIB)
    host = framework.host
    assert isinstance(host, SimulatedHost)
    host.occupy(gpu, 1, GIB - 100 * MIB)
    asked: list[Shortage] = []

    def make_room(shortage: Shortage) -> bool:
        asked.append(shortage)
        host.occupy(gpu, 1, host.memory(gpu).free + GIB - 100 * MIB - shortage.needed)
        return True

    framework.on_shortage = make_room
    framework.allocate(8 * MIB)
    assert [shortage.full for shortage in asked] == [True]
    assert asked[0].needed >= CONTEXT + framework.model.first_work + 8 * MIB


@pytest.mark.parametrize("name", ASK)
def test_it_asks_without_its_lock(name: str) -> None:
    framework, gpu = capped(name)
    block = framework.allocate(40 * MIB)

    def make_room(_: Shortage) -> bool:
        other = threading.Thread(target=framework.free, args=[block])
        other.start()
        other.join(5)
        return not other.is_alive()

    framework.on_shortage = make_room
    framework.allocate(60 * MIB)
    assert framework.stats(gpu).in_use <= 62 * MIB


@pytest.mark.parametrize("name", ["pycuda", "numba"])
@pytest.mark.parametrize(
    ("kept", "needed", "stay"),
    [
        ([8, 16, 32], 6, [16, 32]),  # the smallest that serves alone
        ([8, 16, 32], 9, [8, 32]),
        ([8, 16, 32], 40, [16]),  # none serves alone: the largest, and the smallest that serves with it
        ([8, 16, 32], 100, []),
        ([8, 16, 32], 0, [8, 16, 32]),
        ([8, 0.5], 2, [0.5]),  # a piece of a slab goes last
        ([0.5, 0.5], 2, []),
    ],
)
def test_the_fewest_blocks_that_serve_are_given_back(
    name: str, kept: list[float], needed: int, stay: list[float]
) -> None:
    framework, gpu = capped(name)
    blocks = [framework.allocate(int(size * MIB) - KIB) for size in kept]
    for block in blocks:
        framework.free(block)
    framework.trim_partly(gpu, needed * MIB)
    assert framework.stats(gpu).held == sum(int(size * MIB) if size > 1 else 2 * MIB for size in stay)


@pytest.mark.parametrize("name", ["cupy", "torch"])
def test_others_give_the_whole_cache(name: str) -> None:
    framework, gpu = capped(name)
    blocks = [framework.allocate(20 * MIB) for _ in range(2)]
    for block in blocks:
        framework.free(block)
    framework.trim_partly(gpu, MIB)
    assert framework.stats(gpu).held == 0

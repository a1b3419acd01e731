"""Numba short of memory, or asked for some of its own (`fake_numba`): nothing is refused that room was made for."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import short
from short import PAGE, filled, refusals, two_at_once
from support.interrupted import interruptions
from test_numba_model import Model, Setting, model
from test_numba_pool import flush, manager

from memguard._base.types import Shortage
from memguard._base.units import GIB, MIB, round_up
from memguard._devices import contexts
from memguard._frameworks.base import TRIES

__all__ = ["model"]  # a fixture

CAP = 64 * MIB
STRIDE = int(os.environ.get("MEMGUARD_TEST_STRIDE", "23"))


@pytest.fixture
def setting(model: Model) -> Setting:
    made = model("h200")
    made.apply(CAP)
    made.cuda.current_context()
    short.noted(made)
    return made


def shortages(setting: Setting, serve: Callable[[Shortage], bool]) -> list[Shortage]:
    """What is asked for from now on; `serve` answers, without the lock of the GPU's count."""
    return short.shortages(setting, serve, lambda setting: not manager(setting).group.lock._is_owned())


def cap(setting: Setting, size: int) -> None:
    setting.framework.resize({setting.gpu.uuid: size})


def exact(setting: Setting) -> None:
    usage = setting.usage()
    assert (usage.held, usage.reclaimable) == (setting.taken(), usage.held), "all that is held, once nothing is in use"


# short


def test_a_request_above_its_cap_is_served_once_the_cap_is_raised(setting: Setting) -> None:
    live = [setting.cuda.device_array(8 * MIB)]

    def raised(shortage: Shortage) -> bool:
        cap(setting, setting.taken() + shortage.needed)
        return True

    asked = shortages(setting, raised)
    for size in (CAP, 3 * MIB, 1000):
        live.append(setting.cuda.device_array(size))
    assert refusals(setting) == []
    assert asked == [
        Shortage("numba", setting.gpu.uuid, size, round_up(size), full=False) for size in (CAP, 3 * MIB, 1000)
    ]


def test_a_request_on_a_full_card_is_served_once_others_gave_back(setting: Setting) -> None:
    warm, card = setting.cuda.device_array(1000), setting.driver.cards[0]
    with filled(card) as gave:
        asked = shortages(setting, gave)
        array = setting.cuda.device_array(19 * MIB)
        assert asked == [Shortage("numba", setting.gpu.uuid, 19 * MIB, 20 * MIB, full=True)]
        assert refusals(setting) == []
        del array, warm


@pytest.mark.parametrize(("answer", "times"), [(False, 1), (True, TRIES)])
def test_where_it_does_not_help_the_request_is_refused_once(setting: Setting, answer: bool, times: int) -> None:
    asked = shortages(setting, lambda _: answer)
    error = setting.refused(CAP + 1)
    assert len(asked) == times and len(refusals(setting)) == 1 and error.memguard_requested == CAP + 1
    assert setting.usage().held == setting.taken() == 0 and manager(setting).figures.in_use == 0


def test_within_another_call_that_has_the_lock_nobody_is_asked(setting: Setting) -> None:
    """As a finalizer or a signal handler is, which comes into an allocation on the same thread."""
    asked: list[Shortage] = []
    setting.framework.on_shortage = lambda shortage: bool(asked.append(shortage)) or True
    with manager(setting).group.lock:
        setting.refused(CAP + 1)
    assert asked == []


def test_two_threads_short_at_once_are_both_served(setting: Setting) -> None:
    live: list[Any] = []

    def work() -> None:
        with setting.cuda.gpus[0]:
            live.append(setting.cuda.device_array(CAP + PAGE))

    def raise_cap(shortage: Shortage) -> None:
        cap(setting, setting.framework.caps[setting.gpu.uuid] + shortage.needed)

    two_at_once(setting, raise_cap, work)
    assert len(live) == 2 and refusals(setting) == [] and setting.usage().held == setting.taken() == 2 * (CAP + PAGE)


def test_above_a_lowered_cap_the_driver_is_asked_for_nothing_and_the_pool_goes_back(setting: Setting) -> None:
    live = [setting.cuda.device_array(8 * MIB) for _ in range(3)]
    del live[:2]
    flush(setting)
    cap(setting, 8 * MIB)
    setting.refused(8 * MIB)
    assert setting.usage().held == setting.taken() == 8 * MIB
    cap(setting, 16 * MIB)
    live.append(setting.cuda.device_array(8 * MIB))
    assert setting.usage().held == setting.taken() == 16 * MIB


# asked for some of its own


@pytest.mark.parametrize("seed", range(8))
def test_enough_goes_and_little_more_and_the_books_stay_right(setting: Setting, seed: int) -> None:
    dice, live, parts = random.Random(seed), list[Any](), 0
    cap(setting, 256 * MIB)
    for number in range(150):
        for _ in range(dice.randrange(4)):
            size = dice.choice([1, 1000, 300_000, 700_000, MIB, 3 * MIB, 5 * MIB, dice.randint(1, 30 * MIB)])
            with contextlib.suppress(setting.driver.CudaAPIError):
                live.append(setting.cuda.device_array(size))
        while live and dice.random() < 0.6:
            live.pop(dice.randrange(len(live)))
        if live and dice.random() < 0.2:
            setting.cuda.launch(live[0])
        if number % 3:
            continue
        if dice.random() < 0.5:
            flush(setting)
        before, needed = setting.usage(), dice.choice([1, PAGE, 7 * MIB, dice.randint(1, 64 * MIB)])
        idle = {block.address: block.size for block in manager(setting).figures._resting}
        taken, unpooled = setting.taken(), not manager(setting).pooling
        setting.framework.trim_partly(setting.gpu, needed)
        got, after = taken - setting.taken(), setting.usage()
        left = {block.address for block in manager(setting).figures._resting}
        gone = [round_up(size) for address, size in idle.items() if address not in left]
        assert got >= min(needed, before.reclaimable or 0), (got, needed, before)
        assert got < needed + max(gone, default=1) or unpooled, (got, needed, gone)
        assert (after.held, after.in_use, after.peak) == (setting.taken(), before.in_use, before.peak)
        assert after.reclaimable == (before.reclaimable or 0) - got
        parts += 0 < len(gone) < len(idle)
    assert parts > 3
    live.clear()
    setting.driver.gpu.wait()


def test_the_rest_of_the_blocks_go_on_serving(setting: Setting) -> None:
    arrays = [setting.cuda.device_array(8 * MIB) for _ in range(4)]
    arrays.clear()
    setting.framework.trim_partly(setting.gpu, 9 * MIB)
    assert setting.taken() == 16 * MIB == setting.usage().reclaimable
    taken = setting.driver.driver.cuMemAlloc
    setting.driver.driver.cuMemAlloc = None
    arrays = [setting.cuda.device_array(8 * MIB) for _ in range(2)]
    setting.driver.driver.cuMemAlloc = taken
    assert len({int(array.gpu_data._block.address) for array in arrays}) == 2


def test_flushing_what_is_pending_may_be_enough(setting: Setting) -> None:
    exported = setting.cuda.device_array(8 * MIB)
    assert exported.gpu_data.handle  # somebody else knows its address: it is not pooled
    pooled = setting.cuda.device_array(8 * MIB)
    del exported, pooled
    setting.framework.trim_partly(setting.gpu, 8 * MIB)
    assert setting.taken() == 8 * MIB == setting.usage().reclaimable


@pytest.mark.parametrize("needed", [9 * MIB, GIB])
def test_a_ctrl_c_anywhere_leaves_the_books_right(
    setting: Setting, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "buffer", lambda address: sys.modules["card"].buffer(address))
    wrong, at = list[str](), 1
    while True:  # with no piece of a slab: of those a Ctrl-C may lose the count (`DriverPages.settle`)
        arrays = [setting.cuda.device_array(size) for size in (8 * MIB, 8 * MIB, 3 * MIB, 5 * MIB, 5 * MIB, 3 * MIB)]
        del arrays[1:5]
        in_use = setting.usage().in_use
        point = interruptions.Points(at)
        with contextlib.suppress(KeyboardInterrupt):
            point.run(lambda: setting.framework.trim_partly(setting.gpu, needed))
        if not point.place:
            break
        usage = setting.usage()
        if usage.held != setting.taken() or usage.in_use != in_use:
            wrong.append(f"{point.place}: {usage}, taken {setting.taken()}, in use before {in_use}")
        if manager(setting).group.lock._is_owned():
            wrong.append(f"{point.place}: the lock is held")
            break
        del arrays
        gc.collect()
        setting.framework.trim(setting.gpu)
        if setting.taken() or setting.usage().held:
            wrong.append(f"{point.place}: {setting.taken()} stay, {setting.usage()}")
        at += STRIDE
    assert at > 3 * STRIDE and not wrong, "\n".join(sorted({*wrong})[:10])

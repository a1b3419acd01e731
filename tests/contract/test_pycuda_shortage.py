"""PyCUDA short of memory, or asked for some of its own (`fake_pycuda`): nothing is refused that room was made for."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import short
from short import PAGE, filled, refusals, two_at_once
from support.interrupted import interruptions
from test_pycuda_model import Model, Setting, model  # noqa: F401 (a fixture)
from test_pycuda_oracle import Program

from memguard._base.types import Shortage
from memguard._base.units import GIB, MIB, round_up
from memguard._frameworks.base import TRIES
from memguard._frameworks.simulated import allocators

CAP = 40 * MIB
STRIDE = int(os.environ.get("MEMGUARD_TEST_STRIDE", "61"))


@pytest.fixture
def setting(model: Model) -> Setting:  # noqa: F811
    made = model()
    made.apply(CAP)
    short.noted(made)
    return made


def shortages(setting: Setting, serve: Callable[[Shortage], bool]) -> list[Shortage]:
    """What is asked for from now on; `serve` answers, while any other thread may have the adapter's lock."""

    def unlocked(setting: Setting) -> bool:
        free: list[bool] = []
        thread = threading.Thread(target=lambda: free.append(setting.framework._lock.acquire(blocking=False)))
        thread.start()
        thread.join()
        setting.framework._lock = threading.RLock()  # the one taken belongs to a thread that is gone
        return free == [True]

    return short.shortages(setting, serve, unlocked)


def cap(setting: Setting, size: int) -> None:
    setting.framework.resize({gpu.uuid: size for gpu in setting.host.devices()})


def on_another_thread(work: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


# short


@pytest.mark.parametrize("way", ["mem_alloc", "pitch", "empty", "own pool"])
def test_a_request_above_its_cap_is_served_once_the_cap_is_raised(setting: Setting, way: str) -> None:
    allocate = setting.ways()[way]
    live = [allocate(8 * MIB)]

    def raised(shortage: Shortage) -> bool:
        cap(setting, setting.taken + shortage.needed)
        return True

    asked = shortages(setting, raised)
    for size in (CAP, 3 * MIB, 1000):
        live.append(allocate(size))
    assert refusals(setting) == [] and 1 <= len(asked) <= 3
    first = asked[0]
    assert (first.framework, first.uuid, first.full) == ("pycuda", setting.gpu.uuid, False)
    assert (
        first.requested >= CAP
        and first.needed % PAGE == 0
        and first.requested <= first.needed < first.requested * 1.07 + PAGE
    )
    assert setting.usage().held == setting.taken


@pytest.mark.parametrize("way", ["mem_alloc", "pitch", "own pool"])
def test_a_request_on_a_full_card_is_served_once_others_gave_back(setting: Setting, way: str) -> None:
    allocate, card = setting.ways()[way], setting.drv.gpus[0]
    warm = allocate(1000)
    with filled(card) as gave:
        asked = shortages(setting, gave)
        array = allocate(20 * MIB)
        assert [one.full for one in asked] == [True] and refusals(setting) == []
        assert round_up(20 * MIB) <= asked[0].needed <= 24 * MIB
        del array, warm


def test_what_another_pool_of_pycudas_keeps_idle_goes_before_anybody_is_asked(setting: Setting) -> None:
    card, pool = setting.drv.gpus[0], setting.drv.DeviceMemoryPool()
    cap(setting, GIB)
    pool.allocate(100 * MIB)
    warm = setting.drv.mem_alloc(1000)
    with filled(card):
        asked = shortages(setting, lambda _: False)
        array = setting.drv.mem_alloc(90 * MIB)
        assert asked == [] and refusals(setting) == []
        del array, warm


@pytest.mark.parametrize(("answer", "times"), [(False, 1), (True, TRIES)])
def test_where_it_does_not_help_the_request_is_refused_once(setting: Setting, answer: bool, times: int) -> None:
    asked = shortages(setting, lambda _: answer)
    with pytest.raises(setting.drv.MemoryError, match=r"asked for 40.0 MiB") as caught:
        setting.drv.mem_alloc(CAP)
    assert len(asked) == times and len(refusals(setting)) == 1 and caught.value.memguard_requested == CAP
    assert setting.usage().held == setting.taken


def test_the_first_error_is_gone_when_the_request_is_tried_again(setting: Setting) -> None:
    first: list[Any] = []

    def raised(_: Shortage) -> bool:
        first.append(weakref.ref(sys.exc_info()[1]))  # type: ignore[arg-type]
        cap(setting, GIB)
        return True

    shortages(setting, raised)
    card, there = setting.drv.gpus[0], list[object]()
    take = card.take

    def taken(size: int) -> int:
        if first:
            there.append(first[0]())
        return int(take(size))

    card.take = taken
    setting.drv.mem_alloc(CAP)
    assert there and there[0] is None


def test_within_another_call_that_has_the_lock_nobody_is_asked(setting: Setting) -> None:
    """As a finalizer or a signal handler is, which comes into an allocation on the same thread."""
    asked: list[Shortage] = []
    setting.framework.on_shortage = lambda shortage: bool(asked.append(shortage)) or True
    with setting.framework._lock, pytest.raises(setting.drv.MemoryError):
        setting.drv.mem_alloc(CAP)
    assert asked == []


def test_two_threads_short_at_once_are_both_served(setting: Setting) -> None:
    live: list[Any] = []
    warm = setting.drv.mem_alloc(1000)
    context = setting.drv.Context.get_current()

    def work() -> None:
        context.push()
        try:
            live.append(setting.drv.mem_alloc(CAP))
        finally:
            setting.drv.Context.pop()

    def raise_cap(shortage: Shortage) -> None:
        cap(setting, setting.framework._caps[setting.gpu.uuid] + shortage.needed)

    two_at_once(setting, raise_cap, work)
    assert len(live) == 2 and refusals(setting) == [] and setting.usage().held == setting.taken
    del warm


# a cap that moves


def test_above_a_lowered_cap_idle_blocks_serve_and_the_driver_is_asked_for_nothing(setting: Setting) -> None:
    live = [setting.drv.mem_alloc(8 * MIB) for _ in range(3)]
    del live[:2]
    held = setting.usage().held
    cap(setting, PAGE)
    live.append(setting.drv.mem_alloc(8 * MIB))
    assert setting.usage().held == setting.taken == held
    with pytest.raises(setting.drv.MemoryError):
        setting.drv.mem_alloc(3 * MIB)
    assert setting.taken == setting.usage().held < held, "what idled went back"


# asked for some of its own


class Giving(Program):
    """A random program that is asked for memory now and then."""

    given = 0

    def idle(self) -> dict[int, int]:
        """Pages by address; a piece of a slab has one."""
        sizes = self.setting.tools.DeviceMemoryPool.alloc_size
        return {
            address: round_up(sizes(number))
            for pool, _ in self.all_pools()
            for number, addresses in pool._blocks.free.items()
            for address in addresses
        }

    def ask(self) -> None:
        needed = self.dice.choice([1, PAGE, 3 * MIB, 7 * MIB, 20 * MIB, self.dice.randint(1, self.cap)])
        here = self.drv.Context.get_current()
        before, idle, all_idle, in_use = self.card.taken, self.idle(), self.idle_bytes(), self.in_use()
        pools = [pool for pool, made_in in self.all_pools() if made_in is here]
        there = sum(1 for pool, _ in self.all_pools() if pool.managed_bytes)
        self.setting.framework.trim_partly(self.setting.gpu, needed)
        got, gone = before - self.card.taken, {address: idle[address] for address in idle.keys() - self.idle().keys()}
        if len(pools) == len(self.all_pools()):
            assert got >= min(needed, all_idle - PAGE * there), (got, needed, all_idle)
        largest = max([*gone.values(), PAGE])
        # Where all of a pool has to go, its small block and pieces in slabs of others go too.
        assert got < needed + largest + PAGE * there, (got, needed, gone)
        assert self.in_use() == in_use and self.drv.counters["leaked"] == 0
        self.given += got > 0 and len(gone) < len(idle)


@pytest.mark.parametrize("contexts", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_enough_goes_and_little_more_and_the_books_stay_right(model: Model, seed: int, contexts: int) -> None:  # noqa: F811
    program = Giving(model(), seed, contexts)
    for number in range(200):
        program.step()
        program.check()
        if number % 4 == 0:
            del program.live[: program.dice.randrange(4)]
            program.ask()
            program.check()
    assert program.given > 2


def test_the_rest_of_the_blocks_go_on_serving(setting: Setting) -> None:
    cap(setting, 80 * MIB)
    blocks = [setting.drv.mem_alloc(8 * MIB) for _ in range(4)]
    where = {int(block) for block in blocks}
    blocks.clear()
    peak = setting.usage().peak
    before = setting.taken
    setting.framework.trim_partly(setting.gpu, 9 * MIB)
    assert before - setting.taken == round_up(8 * MIB + 1), "one block, in its bin"
    setting.drv.counters["free_held"], taken = 0, setting.taken
    blocks = [setting.drv.mem_alloc(8 * MIB) for _ in range(3)]
    assert {int(block) for block in blocks} < where and setting.taken == taken
    usage = setting.usage()
    assert setting.drv.counters["free_held"] == 0 and usage.peak == peak and usage.held == taken


class Blocks:
    """Idle blocks of several sizes, in slabs and beside them, in two pools, with live ones in between."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.pool = setting, setting.drv.DeviceMemoryPool()
        cap(setting, 200 * MIB)
        self.fill()

    def fill(self) -> None:
        self.live = list[Any]()
        ways = (self.setting.drv.mem_alloc, self.pool.allocate)
        arrays = [way(size) for size in (8 * MIB, 3 * MIB, 3 * MIB, 700_000, 700_000, 1000) for way in ways]
        self.live = [arrays[2], arrays[-1]]

    def trim_partly(self, needed: int) -> None:
        self.setting.framework.trim_partly(self.setting.gpu, needed)


@pytest.mark.parametrize("needed", [2 * MIB, 9 * MIB, GIB])
def test_whoever_comes_in_between_finds_true_figures(setting: Setting, needed: int) -> None:
    """A signal handler, at each point: it reads, and what it reads of live arrays and of the peak is as before."""
    blocks, wrong, at = Blocks(setting), list[str](), 1
    before = setting.usage()

    def look() -> None:
        now = setting.usage()
        small = (now.in_use or 0) - (before.in_use or 0)  # the block that stays idle may be on its way, with its byte
        if small not in (0, 1) or now.peak != before.peak:
            wrong.append(f"in use {now.in_use}, before {before.in_use}; peak {now.peak}, before {before.peak}")

    while True:
        point = interruptions.Points(at, look)
        point.run(lambda: blocks.trim_partly(needed))
        if not point.place:
            break
        usage = setting.usage()
        if usage.held != setting.taken or wrong:
            wrong.append(f"{point.place}: held {usage.held}, taken {setting.taken}")
        blocks.fill()
        at += STRIDE
    assert at > 3 * STRIDE and not wrong, "\n".join(wrong[:10])


@pytest.mark.parametrize("needed", [2 * MIB, 9 * MIB, GIB])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_ctrl_c_anywhere_leaves_the_books_right(setting: Setting, needed: int, elsewhere: bool) -> None:
    # PyCUDA's bins are its own code, into which no Ctrl-C comes; the model has memguard's.
    bins = {
        name: FunctionType(getattr(allocators, name).__code__.replace(co_filename="PyCUDA"), vars(allocators))
        for name in ("bin_number", "alloc_size")
    }
    sys.modules["pycuda._pools"].allocators = SimpleNamespace(**bins)  # type: ignore[attr-defined]
    blocks, wrong, at = Blocks(setting), list[str](), 1
    before = setting.usage()
    while True:
        point = interruptions.Points(at)

        def work(point: Any = point) -> None:
            with contextlib.suppress(KeyboardInterrupt):
                point.run(lambda: blocks.trim_partly(needed))

        on_another_thread(work) if elsewhere else work()
        if not point.place:
            break
        gc.collect()
        usage = setting.usage()
        assert setting.drv.counters["leaked"] == setting.drv.counters["aborts"] == 0, point.place
        if (usage.held, usage.in_use, usage.peak) != (setting.taken, before.in_use, before.peak):
            wrong.append(f"{point.place}: {usage} after {before}, taken {setting.taken}")
        assert setting.drv._stacks.keys() == {threading.get_ident()}, f"{point.place}: a context is left"
        setting.framework.trim(setting.gpu)
        blocks.fill()
        if setting.usage().held != setting.taken or setting.usage().in_use != before.in_use:
            wrong.append(f"{point.place}: {setting.usage()}, {setting.taken} later on")
        at += STRIDE
    assert at > 3 * STRIDE and not wrong, "\n".join(sorted({*wrong})[:10])


# from other threads


def test_on_a_thread_without_a_context_memguards_pool_gives_back_in_its_own(setting: Setting) -> None:
    blocks = [setting.drv.mem_alloc(8 * MIB) for _ in range(3)]
    kept = blocks.pop()
    blocks.clear()
    before = setting.taken
    on_another_thread(lambda: setting.framework.trim_partly(setting.gpu, 3 * MIB))
    assert before - setting.taken == round_up(8 * MIB + 1) and setting.drv.counters["leaked"] == 0
    assert setting.drv._stacks.keys() == {threading.get_ident()}, "the context was popped"
    assert setting.usage().held == setting.taken and kept is not None


def test_a_pool_of_the_users_gives_back_with_its_next_request_on_its_own_thread(setting: Setting) -> None:
    pool = setting.drv.DeviceMemoryPool()
    for _ in range(2):
        blocks = [pool.allocate(8 * MIB) for _ in range(3)]
        blocks.clear()
    before = setting.taken
    on_another_thread(lambda: setting.framework.trim_partly(setting.gpu, 3 * MIB))
    assert setting.taken == before == setting.usage().held, "nothing: it would leak"
    block = pool.allocate(8 * MIB)
    assert before - setting.taken == round_up(8 * MIB + 1), "one of the two that idle"
    again = pool.allocate(8 * MIB)
    assert before - setting.taken == round_up(8 * MIB + 1) and setting.drv.counters["leaked"] == 0
    assert setting.usage().held == setting.taken
    del block, again

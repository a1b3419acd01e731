"""PyCUDA under a cap against an oracle: the model of the driver and of PyCUDA's pools, asked without memguard's code.

Each step of a random program is judged: what the driver has handed out, what memguard says of it, and each refusal.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
from test_pycuda_model import Model, Setting, model  # noqa: F401 (a fixture)

from memguard._base.units import KIB, MIB

pytestmark = pytest.mark.long  # no version of what is installed changes it: all of it is our own code

PAGE = 2 * MIB
SEEDS = 8
STEPS = 250


class Program:
    """A random program over several pools and contexts, and what it must see."""

    def __init__(self, setting: Setting, seed: int, contexts: int = 1) -> None:
        self.setting, self.dice = setting, random.Random(seed)
        self.cap = self.dice.choice([4, 6, 20, 64]) * MIB
        setting.apply(self.cap, context=False)
        self.drv = setting.drv
        self.drv.init()
        self.card = self.drv.gpus[0]
        primary = self.drv.Device(0).retain_primary_context()
        self.contexts = [primary, *(self.drv.Context(0, primary=False) for _ in range(contexts - 1))]
        self.contexts[0].push()
        self.pools = [(setting.tools.DeviceMemoryPool(), self.drv.Context.get_current()) for _ in range(2)]
        self.live: list[Any] = []
        self.by_hand: list[Any] = []
        self.peak = self.refusals = self.hits = 0

    def size(self) -> int:
        dice = self.dice
        return dice.choice([1, 1024, 300 * KIB, 700 * KIB, MIB, 3 * MIB, 5 * MIB, dice.randint(1, 9 * MIB)])

    def ways(self) -> list[tuple[Any, Callable[[int], Any]]]:
        here = self.drv.Context.get_current()
        own = self.setting.framework._own.get(here.handle)
        pool = own.own if own is not None else None
        return [(pool, self.drv.mem_alloc), *((p, p.allocate) for p, made_in in self.pools if made_in is here)]

    def allocate(self) -> None:
        size, (pool, way) = self.size(), self.dice.choice(self.ways())
        number = self.setting.tools.DeviceMemoryPool.bin_number(size)
        idle = pool is not None and number in pool._blocks.free
        before = self.card.taken
        try:
            self.live.append(way(size))
        except self.drv.MemoryError:
            self.refusals += 1
            assert not idle, "an idle block serves it"
            assert not self.would_fit(pool, size), f"{size} bytes were refused"
        else:
            if idle:
                self.hits += 1
                assert self.card.taken in (before, before + 2 * MIB), "at most the block that stays idle is new"
        self.peak = max(self.peak, self.in_use())

    def would_fit(self, wanted: Any, size: int) -> bool:
        """Whether the driver would have given it under the cap, once all idle blocks that can go have gone.

        Each pool that has memory keeps one block of a byte.
        """
        card, here = copy.deepcopy(self.card), self.drv.Context.get_current()
        pools = [(pool, made_in) for pool, made_in in self.all_pools() if made_in is here]
        sizes = type(pools[0][0]) if pools else self.setting.tools.DeviceMemoryPool
        kept = []
        for pool, _ in pools:
            for addresses in pool._blocks.free.values():
                for address in addresses:
                    card.give(address)
            if pool._blocks.active_blocks and pool._blocks.holds:
                kept.append(pool)
        try:
            for _ in kept:
                card.take(1)
            card.take(sizes.alloc_size(sizes.bin_number(size)))
            if wanted not in kept and (wanted is None or wanted._blocks.holds):
                card.take(1)
        except self.drv.card.OutOfMemory:
            return False
        return bool(card.taken <= self.cap)

    def counts_whole(self, address: int) -> bool:
        """Whether the slab around the address is one that the cap counts whole: whose slab it is only memguard says."""
        slab = self.setting.framework._pages_of(self.setting.gpu.uuid)._slabs.get(address // PAGE)
        return slab is not None and slab.whole

    def all_pools(self) -> list[tuple[Any, Any]]:
        own = [(pool.own, pool.made_in) for pool in self.setting.framework._own.values()]
        return own + self.pools

    def in_use(self) -> int:
        return int(sum(pool.active_bytes for pool, _ in self.all_pools()))

    def idle_bytes(self) -> int:
        """What goes back to the driver with all idle blocks."""
        card = copy.deepcopy(self.card)
        for pool, _ in self.all_pools():
            for addresses in pool._blocks.free.values():
                for address in addresses:
                    card.give(address)
        return int(self.card.taken - card.taken)

    def step(self) -> None:
        dice = self.dice
        what = dice.random()
        if what < 0.55:
            self.allocate()
        elif what < 0.8 and self.live:
            self.live.pop(dice.randrange(len(self.live)))
        elif what < 0.88 and self.live:
            freed = self.live.pop(dice.randrange(len(self.live)))
            freed.free()  # by hand: the object may live on
            if dice.random() < 0.5:
                self.by_hand.append(freed)
        elif what < 0.9:
            self.by_hand.clear()
        elif what < 0.92:
            dice.choice(self.pools)[0].free_held()
        elif what < 0.94:
            self.setting.framework.trim(self.setting.gpu)
        elif what < 0.95 and len(self.pools) > 1:
            self.pools[dice.randrange(len(self.pools))][0].stop_holding()
        elif what < 0.97 and len(self.pools) < 5:
            self.pools.append((self.setting.tools.DeviceMemoryPool(), self.drv.Context.get_current()))
        elif what < 0.98:
            stop = self.setting.framework.record()
            if stop is not None:
                self.allocate()
                stop()
        elif len(self.contexts) > 1:
            self.drv.Context.pop()
            dice.choice(self.contexts).push()

    def check(self) -> None:
        assert self.card.taken <= self.cap
        usage = self.setting.framework.usage(self.setting.gpu)
        if usage is None:
            assert self.card.taken == 0
            return
        assert usage.held == self.card.taken
        assert usage.in_use == self.in_use()
        assert usage.reclaimable == self.idle_bytes()
        assert usage.peak == self.peak


@pytest.mark.parametrize("contexts", [1, 2])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_step_is_as_the_driver_has_it(model: Model, seed: int, contexts: int) -> None:  # noqa: F811
    program = Program(model(), seed, contexts)
    for _ in range(STEPS):
        program.step()
        program.check()
    assert program.hits > 3


@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_refusal_where_the_driver_would_have_had_room(model: Model, seed: int) -> None:  # noqa: F811
    """Others' small pieces open slabs, and leave holes in them that a request may go into."""
    program = Program(model(), seed)
    card, dice, allocate = program.card, program.dice, program.drv.mem_alloc
    sizes = program.setting.tools.DeviceMemoryPool
    theirs: list[int] = []
    refused = 0

    def held() -> int:
        usage = program.setting.framework.usage(program.setting.gpu)
        return (usage.held or 0) if usage is not None else 0

    def needed(size: int) -> int:
        """What the cap counts more with this request, by where the driver would put it. All that is idle has gone."""
        first = not any(pool.managed_bytes for pool, _ in program.all_pools())  # then one block stays idle beside it
        after, found = copy.deepcopy(card), 0
        for piece in [sizes.alloc_size(sizes.bin_number(size)), *([1] if first else [])]:
            before, address = after.taken, after.take(piece)
            found += after.taken - before
            if after.taken == before and not program.counts_whole(address):
                found += -(-piece // 512) * 512 if address % PAGE else PAGE
        return int(found)

    for _ in range(STEPS):
        if dice.random() < 0.3:
            theirs.append(card.take(dice.randint(1, MIB)))
        elif dice.random() < 0.3 and theirs:
            card.give(theirs.pop(dice.randrange(len(theirs))))
        elif dice.random() < 0.3 and program.live:
            program.live.pop(dice.randrange(len(program.live)))
        size = dice.choice([dice.randint(1, MIB), dice.randint(400, 700) * KIB, dice.randint(1, 4 * MIB)])
        try:
            program.live.append(allocate(size))
        except program.drv.MemoryError:
            refused += 1
            left = program.cap - held()
            assert needed(size) > left, f"{size} bytes were refused with {left} left"
        assert held() <= program.cap
    assert refused
    program.live.clear()
    for address in theirs:
        card.give(address)

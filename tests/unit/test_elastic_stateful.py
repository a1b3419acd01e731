"""Six simulated frameworks under one guard, driven by Hypothesis: what must hold after every step, whatever they do.

And a million steps of the lending rule alone, over figures.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from schedules import LIMIT, RESERVE, guarded
from simulated_runner import SimulatedRunner
from support import schedules as _schedules
from support.oracle import MIB, PAGE, Entry, in_the_way, judge

from memguard._base.types import State
from memguard._base.units import round_up
from memguard._frameworks.specs import SPECS
from memguard._guard.lending import CapState, plan_raise, rebalance
from memguard.errors import BudgetExceeded

names = st.sampled_from(_schedules.FRAMEWORKS)
sizes = st.one_of(
    st.integers(1, MIB),
    st.integers(MIB, 256 * MIB),
    st.integers(1, 60).map(lambda part: part * (LIMIT - RESERVE) // 60),
)


class Elastic(RuleBasedStateMachine):
    """The program's own steps, in any order. The oracle judges them when they end."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Entry] = []
        self.numbers = 0

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        self.terms = _schedules.terms(seed, LIMIT, RESERVE)
        self.entered = guarded(self.terms)
        self.guard = self.entered.__enter__()
        self.runner = SimulatedRunner(self.guard)
        self.play = _schedules._Play(self.runner, self.terms)

    def teardown(self) -> None:
        if hasattr(self, "entered"):
            self.entered.__exit__(None, None, None)
            faults = judge(self.log, self.terms).faults
            assert not faults, faults[0].what

    @rule(name=names, size=sizes)
    def allocate(self, name: str, size: int) -> None:
        self.numbers += 1
        self.log.append(self.play.allocate(self.numbers, name, self.numbers, size))

    @rule(name=names, part=st.integers(1, 4))
    def take_all_that_it_may_have(self, name: str, part: int) -> None:
        """Everything, or a half or less of it: as sure to be at an edge as can be."""
        left = self.play.books.most(name) - self.play.books.live(name)
        self.allocate(name, max(left // part, 1))

    @precondition(lambda self: getattr(self, "play", None) and self.play.arrays)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.play.arrays)))
        self.log.append(self.play.free(self.numbers, block))

    @rule(name=names, size=sizes, pieces=st.integers(1, 6))
    def peak(self, name: str, size: int, pieces: int) -> None:
        self.numbers += 1
        step = _schedules.Step("peak", 0, name, sizes=(max(size // pieces, 1),) * pieces)
        self.log += self.play.step(self.numbers, step)

    @rule()
    def idle(self) -> None:
        self.runner.idle()

    @rule(name=st.none() | names)
    def trim(self, name: str | None) -> None:
        self.guard.trim(name)

    @rule(name=names, size=sizes)
    def require(self, name: str, size: int) -> None:
        """What `require` grants can be had at once, unless it is there only in pieces of what the framework holds."""
        try:
            self.guard.require(name, size)
        except BudgetExceeded:
            return
        self.allocate(name, size)
        entry, books = self.log[-1], self.play.books
        if entry.refused is None:
            return
        if entry.trimmed is not None:  # the room was in pieces, of its own at least
            who, own = in_the_way(books, entry), self.runner.frameworks[name]
            assert name in who, f"require granted {size} bytes to {name}"
            if own.model.silent:  # nobody knows its pieces
                assert who == [name], f"require granted {size} bytes to {name}"
            else:  # others may keep it from growing: its own pieces together were enough
                figures = own.stats(self.runner.gpu)
                assert size <= figures.held - figures.in_use, f"require granted {size} bytes to {name}"
        else:  # there is no room, because of how allocators round
            assert not SPECS[name].pads, f"{name} serves no request from what blocks were rounded up by"
            asked = sum(nbytes for one, nbytes, _ in self.play.arrays.values() if one == name)
            assert asked + size <= books.most(name), f"require granted {size} bytes to {name}"

    @invariant()
    def caps_keep_the_rules(self) -> None:
        if not hasattr(self, "guard"):
            return
        (part,) = self.guard.plan.devices
        assert sum(part.caps.values()) + part.unallocated == self.terms.room and part.unallocated >= 0
        for name, framework in self.runner.frameworks.items():
            figures = framework.stats(self.runner.gpu)
            assert self.terms.least(name) <= part.caps[name] <= self.terms.most(name)
            assert figures.cap in (part.caps[name], None if framework.state() is State.IMPORTABLE else 0)
            assert figures.held <= part.caps[name]
        assert self.runner.host.peak(self.runner.gpu) <= self.terms.limit


TestElastic = Elastic.TestCase
TestElastic.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_require_grants_tensorflow_what_only_its_own_pieces_can_refuse() -> None:
    """TensorFlow does not say what it holds, so its live arrays count: `require` refuses only what is sure to fail.

    Its arrays keep two regions of 256 MiB. The second has one byte in use, and torch too holds more than its arrays.
    """
    run = Elastic()
    run.begin(seed=433)
    try:
        for size in (1, MIB + 1, 1911 * MIB):
            run.require("torch", size)
        for size in (156 * MIB, 1, 1365 * MIB):
            run.require("tensorflow", size)
            run.caps_keep_the_rules()
        entry, figures = run.log[-1], run.runner.frameworks["tensorflow"].stats(run.runner.gpu)
        assert entry.refused is not None and entry.size == 1365 * MIB, "granted, and not served"
        assert figures.in_use + entry.size <= run.terms.least("tensorflow") < figures.held + entry.size
        assert in_the_way(run.play.books, entry) == ["tensorflow"]
    finally:
        run.teardown()


def test_require_grants_what_own_pieces_may_serve_though_a_sibling_keeps_others() -> None:
    """`require` counts what CuPy has free in pieces. An array needs one piece, and torch's keep CuPy from growing."""
    run = Elastic()
    run.begin(seed=433)
    try:
        for number, (name, first, size) in enumerate((("torch", 3000, 20), ("cupy", 2000, 1000))):
            run.allocate(name, first * MIB)
            run.log.append(run.play.free(run.numbers, run.numbers))
            run.allocate(name, size * MIB)
            if number:
                run.allocate(name, 20 * MIB)
                run.log.append(run.play.free(run.numbers, run.numbers - 1))
        run.allocate("pycuda", 4000 * MIB)
        run.allocate("numba", 4000 * MIB)
        run.require("cupy", 1500 * MIB)
        run.caps_keep_the_rules()
        entry = run.log[-1]
        assert entry.refused is not None and entry.size == 1500 * MIB, "granted, and not served"
        assert in_the_way(run.play.books, entry) == ["torch", "cupy"]
    finally:
        run.teardown()


# The lending rule alone

STEPS, PARTS = 1_000_000, 10


class Figures:
    """Frameworks as figures: what is live, what is cached of it, and their caps. No guard, and no allocator."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.terms = rng, _schedules.terms(rng.randrange(1 << 30), 64 * PAGE * 16, 64 * PAGE)
        self.room = self.terms.room
        self.parts = {
            name: CapState(
                self.terms.least(name), self.terms.most(name), self.terms.least(name), requests_room=name != "torch"
            )
            for name in self.terms.shares
        }
        self.names = list(self.parts)

    def step(self) -> None:
        rng = self.rng
        name, kind = self.names[int(rng.random() * len(self.names))], rng.random()
        part = self.parts[name]
        if kind < 0.5:
            self.take(name, 1 + int(rng.random() ** 3 * (part.most - part.held + part.idle)))
        elif kind < 0.8:  # arrays are freed: they stay as cache
            live = part.held - part.idle
            self.parts[name] = part._replace(idle=part.idle + int(rng.random() * live))
        elif kind < 0.9:
            self.trim(name, int(rng.random() * part.idle))
        else:
            self.move(rebalance(self.parts, self.room))

    def take(self, name: str, size: int) -> None:
        """A request: from its own cache, from the driver below its cap, or after a loan. Its live bytes grow by it."""
        part = self.parts[name]
        reused = min(part.idle, size)
        self.parts[name] = part._replace(idle=part.idle - reused)
        size -= reused
        if size == 0:
            return
        wanted = self.parts[name].held + size  # its own cache is used up
        if wanted > part.cap and not self.lent(name, wanted):
            return
        self.parts[name] = self.parts[name]._replace(held=wanted)

    def lent(self, name: str, wanted: int) -> bool:
        for _ in range(2 * len(self.parts)):
            loan = plan_raise(self.parts, self.room, name, wanted)
            if loan.missing:
                others = sum(
                    max(part.least, round_up(part.held - part.idle)) for one, part in self.parts.items() if one != name
                )
                allowed = min(self.parts[name].most, self.room - others)
                assert round_up(wanted) > allowed, f"{name} was refused {wanted} of {allowed}"
                assert wanted > self.parts[name].least
                return False
            if not loan.trims:
                self.move(loan.caps)
                assert self.parts[name].cap >= wanted
                return True
            sibling, size = loan.trims[0]
            self.trim(sibling, size if self.rng.random() < 0.5 else self.parts[sibling].idle)
        raise AssertionError(f"{name} asked for {wanted} again and again")

    def trim(self, name: str, size: int) -> None:
        part = self.parts[name]
        gone = min(part.idle, round_up(size))
        self.parts[name] = part._replace(held=part.held - gone, idle=part.idle - gone)

    def move(self, caps: dict[str, int]) -> None:
        for name, cap in caps.items():
            part = self.parts[name]
            assert part.least <= cap <= part.most and part.held <= cap
            self.parts[name] = part._replace(cap=cap)
            assert sum(one.cap for one in self.parts.values()) <= self.room


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, PARTS))])
def test_a_million_steps_violate_no_minimum(seed: int) -> None:
    """Each cap is at least its min and they fit the room after every move, so every min can be had at once; what is
    refused does not fit beside what others have live."""
    rng = random.Random(seed)
    for _ in range(10):
        figures = Figures(rng)
        for _ in range(STEPS // PARTS // 10):
            figures.step()

"""Who may have what now: against a model, in all orders of coming, being granted, giving back and dying."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from memguard._node.leases.decide import Want, before, grantable, leased

pytestmark = pytest.mark.one_case
CAPACITY = {"a": 100, "b": 60}
SIZES = st.dictionaries(st.sampled_from("ab"), st.integers(0, 60), min_size=1).filter(
    lambda sizes: all(size <= CAPACITY[gpu] for gpu, size in sizes.items())
)


def waits(number: int, replaces: int | None = None, **sizes: int) -> Want:
    return Want(number, False, sizes, replaces)


def holds(number: int, replaces: int | None = None, **sizes: int) -> Want:
    return Want(number, True, sizes, replaces)


@pytest.mark.parametrize(
    ("claims", "granted"),
    [
        ([], set()),
        ([waits(1, a=100)], {1}),
        ([waits(1, a=60), waits(2, a=40)], {1, 2}),
        ([waits(1, a=60), waits(2, a=41)], {1}),
        ([holds(1, a=60), waits(2, a=50), waits(3, a=40)], set()),  # the third would fit, and came later
        ([holds(1, a=60), waits(2, a=50), waits(3, b=40)], {3}),  # on another GPU it may
        ([holds(1, a=60), waits(2, a=50, b=10), waits(3, b=40)], set()),  # all of a claim at once
        ([holds(1, a=60), waits(2, a=50, b=10), waits(3, b=40), waits(4, a=1)], set()),
        ([holds(1, b=60), waits(2, a=10), waits(3, b=1)], {2}),
        ([waits(1, c=1), waits(2, a=1)], {2}),  # of a GPU that nobody knows nothing is granted
        ([holds(1, a=60), waits(2, 1, a=100)], {2}),  # it counts with what it has more
        ([holds(1, a=60), waits(2, 1, a=101)], set()),
        ([holds(1, a=60), waits(2, a=50), waits(3, 1, a=60)], {3}),  # nothing more: at once
        ([holds(1, a=60), waits(2, a=50), waits(3, 1, a=61)], set()),  # more: behind who came before
        ([holds(1, a=60), holds(2, 1, a=80), waits(3, a=20)], {3}),  # until the first is gone: the larger of both
        ([holds(1, a=60), holds(2, 1, a=10), waits(3, a=41)], set()),
        ([holds(2, 1, a=10), waits(3, a=90)], {3}),
        ([waits(2, 1, a=100)], {2}),  # what it should replace has gone
    ],
)
def test_who_is_granted(claims: list[Want], granted: set[int]) -> None:
    assert grantable(claims, CAPACITY) == granted


def test_who_is_in_the_way() -> None:
    claims = [holds(1, a=50), holds(2, b=10), waits(3, b=9), waits(4, a=60), waits(5, a=60), waits(6, a=1)]
    held, ahead = before(claims[4], claims)
    assert [one.id for one in held] == [1] and [one.id for one in ahead] == [4]
    held, ahead = before(holds(2, 1, a=5), [holds(1, a=50), holds(2, 1, a=5)])
    assert (held, ahead) == ((), ())


@given(st.lists(st.tuples(st.booleans(), SIZES), max_size=8))
def test_nothing_is_granted_past_those_who_came_before(drawn: list[tuple[bool, dict[str, int]]]) -> None:
    claims = [Want(n, held, sizes) for n, (held, sizes) in enumerate(drawn, 1)]
    granted = grantable(claims, CAPACITY)
    after = [one._replace(held=one.held or one.id in granted) for one in claims]
    had, has = leased(claims), leased(after)
    assert all(has[gpu] <= CAPACITY[gpu] for gpu in has if has[gpu] > had.get(gpu, 0))
    for one in claims:
        if one.id in granted:
            earlier = [other for other in claims if other.id < one.id and not other.held and other.id not in granted]
            assert all(set(other.sizes).isdisjoint(one.sizes) for other in earlier)


class Crowd(RuleBasedStateMachine):
    """Processes come, look, are granted, replace, give back and die, in any order.

    The model is a queue for each GPU and a sum, kept apart from `decide`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.claims: dict[int, Want] = {}
        self.number = 0
        self.queues: dict[str, list[int]] = {gpu: [] for gpu in CAPACITY}

    def come(self, sizes: dict[str, int], replaces: int | None = None) -> None:
        self.number += 1
        self.claims[self.number] = Want(self.number, False, sizes, replaces)
        for gpu in sizes:
            self.queues[gpu].append(self.number)

    @rule(sizes=SIZES)
    def claim(self, sizes: dict[str, int]) -> None:
        self.come(sizes)

    @precondition(lambda self: any(one.held for one in self.claims.values()))
    @rule(data=st.data(), sizes=SIZES)
    def replace(self, data: Any, sizes: dict[str, int]) -> None:
        taken = {one.replaces for one in self.claims.values()}
        free = [one.id for one in self.claims.values() if one.held and one.id not in taken]
        if free:
            self.come(sizes, data.draw(st.sampled_from(free)))

    @rule()
    def look(self) -> None:
        """Whoever looks grants what can be granted, to all."""
        for number in sorted(grantable(self.claims.values(), CAPACITY)):
            one = self.claims[number]
            old = self.claims.get(one.replaces) if one.replaces is not None else None
            own = old.sizes if old is not None else {}
            if old is None or not old.held or any(size > own.get(gpu, 0) for gpu, size in one.sizes.items()):
                for gpu in one.sizes:
                    assert self.queues[gpu][0] == number, "somebody was overtaken"
            for gpu in one.sizes:
                self.queues[gpu].remove(number)
            self.claims[number] = one._replace(held=True)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def die(self, data: Any) -> None:
        """A process with all its claims, or the end of the older one of two."""
        number = data.draw(st.sampled_from(sorted(self.claims)))
        gone = self.claims.pop(number)
        for gpu in gone.sizes:
            if not gone.held:
                self.queues[gpu].remove(number)

    @invariant()
    def never_more_than_there_is(self) -> None:
        held = {one.id: one for one in self.claims.values() if one.held}
        for gpu, capacity in CAPACITY.items():
            total = 0
            for one in held.values():
                pair = next((other for other in held.values() if other.replaces == one.id), None)
                total += one.sizes.get(gpu, 0) if pair is None else 0
                old = held.get(one.replaces) if one.replaces is not None else None
                if old is not None:  # the pair counts as the larger of both
                    total += max(old.sizes.get(gpu, 0) - one.sizes.get(gpu, 0), 0)
            assert total <= capacity

    @invariant()
    def somebody_gets_on(self) -> None:
        """Nobody starves: once all that is held is given back, the first who waits is granted, and so on."""
        left = {number: one for number, one in self.claims.items() if not one.held}
        served = []
        while left:
            granted = sorted(grantable(left.values(), CAPACITY))
            assert granted, "all wait for each other"
            served += granted
            for number in granted:
                del left[number]
        for gpu in CAPACITY:
            assert [n for n in served if gpu in self.claims[n].sizes] == self.queues[gpu]


Crowd.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestCrowd = Crowd.TestCase

"""The book of reservations: no schedule of begin, allocate, free and end admits more than fits."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard._base.types import MemoryInfo, Usage
from memguard._base.units import GIB
from memguard._guard import reservations
from memguard._guard.reservations import EMPTY, Request, Reservation, Reservations

GPU = "GPU-0"
CAPS = {"torch": 12, "cupy": 10}
CARD = 16


def entry(number: int, framework: str = "torch", size: int = 6, **more: object) -> Reservation:
    made = Reservation(number, f"w{number}", framework, size, (GPU,), 0.0, f"thread {number}", size=size)
    return made._replace(**more)  # type: ignore[arg-type]


def begun(book: Reservations, one: Reservation, in_use: int | None) -> Reservations:
    return reservations.begun(book, one, {GPU: in_use})


def ended(book: Reservations, number: int, in_use: int | None) -> Reservations:
    return reservations.ended(book, number, {GPU: in_use})


class Process:
    """What really happens, which the book cannot see: who has which bytes."""

    def __init__(self) -> None:
        self.book = EMPTY
        self.sizes: dict[int, tuple[str, int]] = {}
        self.used: dict[int, int] = {}
        self.left = dict.fromkeys(CAPS, 0)
        self.cached = dict.fromkeys(CAPS, 0)
        self.numbers = 0

    def in_use(self, name: str) -> int:
        return self.left[name] + sum(self.used[n] for n, (own, _) in self.sizes.items() if own == name)

    @property
    def free(self) -> int:
        return CARD - sum(self.in_use(name) + self.cached[name] for name in CAPS)

    def usages(self) -> dict[str, Usage | None]:
        return {
            name: Usage(self.in_use(name) + self.cached[name], self.in_use(name), self.cached[name]) for name in CAPS
        }

    def request(self, name: str, size: int) -> Request:
        return Request(name, GPU, size, size, CAPS[name])

    def begin(self, name: str, size: int, *, careless: bool = False, within: int | None = None) -> bool:
        memory = MemoryInfo(CARD, 0, CARD - self.free, self.free)
        mine = frozenset[int]() if within is None else frozenset({within})
        request = self.request(name, size)._replace(enclosing=mine, reserves=True)
        verdict = reservations.admit(EMPTY if careless else self.book, request, self.usages(), memory)
        if verdict.refusal is not None or verdict.covered:  # then the one around has its bytes, and takes them
            return False
        for sibling in verdict.trim:
            self.cached[sibling] = 0
        self.numbers += 1
        self.book = begun(self.book, entry(self.numbers, name, size), self.in_use(name))
        self.sizes[self.numbers], self.used[self.numbers] = (name, size), 0
        return True

    def allocate(self, number: int, size: int) -> None:
        """Within its size. As the allocator does: from its cache, then from the driver, after siblings are trimmed."""
        name, most = self.sizes[number]
        size = min(size, most - self.used[number])
        self.used[number] += size
        self.cached[name] -= min(size, self.cached[name])
        for sibling in CAPS:
            if self.free < 0:
                self.cached[sibling] = 0

    def free_some(self, number: int, size: int) -> None:
        size = min(size, self.used[number])
        self.used[number] -= size
        self.cached[self.sizes[number][0]] += size

    def end(self, number: int, read: bool) -> None:
        name, _ = self.sizes.pop(number)
        self.left[name] += self.used.pop(number)  # what it did not free stays
        self.book = ended(self.book, number, self.in_use(name) if read else None)

    def look(self) -> None:
        for name in CAPS:
            self.book = reservations.with_lower_bases(self.book, name, {GPU: self.in_use(name)})

    def check(self) -> None:
        for name, cap in CAPS.items():
            promised = sum(size for own, size in self.sizes.values() if own == name)
            assert self.left[name] + promised <= cap, "its own cap"
            rest = sum(size - self.used[n] for n, (own, size) in self.sizes.items() if own == name)
            assert reservations.reserved_not_taken(self.book, name, GPU, self.in_use(name)) >= rest, (
                "counted too little"
            )
        assert sum(self.left.values()) + sum(size for _, size in self.sizes.values()) <= CARD, "the card"
        assert self.free >= 0


KINDS = ["begin", "begin", "inner", "allocate", "allocate", "free", "end", "drop", "look", "left"]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 7),
        st.integers(1, 9),
    ),
    max_size=40,
)


def play(steps: list[tuple[str, int, int]], *, careless: bool = False) -> Process:
    process = Process()
    names = list(CAPS)
    for step, which, size in steps:
        alive = list(process.sizes)
        number = alive[which % len(alive)] if alive else None
        if step == "begin":
            process.begin(names[which % 2], size, careless=careless)
        elif step == "look":
            process.look()
        elif step == "left":  # what an earlier one has left is freed, by anybody
            name = names[which % 2]
            process.left[name] -= min(size, process.left[name])
        elif number is None:
            continue
        elif step == "inner":
            process.begin(names[which % 2], size, within=number)
        elif step == "allocate":
            process.allocate(number, size)
        elif step == "free":
            process.free_some(number, size)
        else:
            process.end(number, read=step == "end")
        process.check()
    return process


@settings(max_examples=200)
@given(STEPS)
def test_no_schedule_admits_more_than_fits(steps: list[tuple[str, int, int]]) -> None:
    process = play(steps)
    for number in list(process.sizes):
        process.end(number, read=True)
    assert process.book is EMPTY


def test_nor_does_any_of_many_drawn_ones() -> None:
    admitted = 0
    for seed in range(300):
        rng = random.Random(seed)
        steps = [(rng.choice(KINDS), rng.randrange(8), rng.randint(1, 9)) for _ in range(40)]
        admitted += play(steps).numbers
    assert admitted > 1500  # and it admits what fits


def test_without_the_book_more_is_admitted_than_fits() -> None:
    three = [("begin", 0, 6)] * 3
    assert len(play(three).sizes) == 2
    with pytest.raises(AssertionError, match="its own cap"):
        play(three, careless=True)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=12))
def test_one_workload_at_a_time_is_counted_exactly(steps: list[tuple[bool, int]]) -> None:
    process = Process()
    assert process.begin("torch", 8)
    for more, size in steps:
        process.allocate(1, size) if more else process.free_some(1, size)
        assert (
            reservations.reserved_not_taken(process.book, "torch", GPU, process.in_use("torch")) == 8 - process.used[1]
        )


def test_what_an_ended_workload_may_have_left_is_not_taken_for_that_of_another() -> None:
    book = begun(begun(EMPTY, entry(1), 0), entry(2, size=4), 0)
    book = ended(book, 1, 4)  # the 4 bytes may be those that 1 left, or those of 2
    assert reservations.reserved_not_taken(book, "torch", GPU, 4) == 4
    book = reservations.with_lower_bases(book, "torch", {GPU: 1})
    assert reservations.reserved_not_taken(book, "torch", GPU, 3) == 2


def test_more_than_was_reserved_counts_as_nobody_s() -> None:
    book = begun(EMPTY, entry(1), 2)
    assert reservations.reserved_not_taken(book, "torch", GPU, 20) == 0
    book = begun(book, entry(2, size=4), 20)
    assert reservations.reserved_not_taken(book, "torch", GPU, 20) == 4


def test_a_figure_that_is_not_known_counts_as_no_growth() -> None:
    book = begun(EMPTY, entry(1), None)
    assert (
        reservations.reserved_not_taken(book, "torch", GPU, 5)
        == reservations.reserved_not_taken(book, "torch", GPU, None)
        == 6
    )
    book = ended(begun(book, entry(2, size=4), 3), 1, 3)
    assert reservations.reserved_not_taken(book, "torch", GPU, 3) == 4


def admit(book: Reservations, request: Request, free: int = CARD, **usages: Usage) -> reservations.AdmissionResult:
    return reservations.admit(book, request, usages, MemoryInfo(CARD, 0, CARD - free, free))


def test_a_sibling_s_cache_is_left_for_what_its_own_workload_may_still_take() -> None:
    book = begun(EMPTY, entry(1, "cupy", 4), 0)
    request, cached = Request("torch", GPU, 8, 8, 12), Usage(6, 0, 6)
    assert admit(book, request, free=6, cupy=cached).trim == ("cupy",)  # 6 free, and 2 of the 6 cached
    assert admit(book, request._replace(needed=9, footprint=9), free=6, cupy=cached).reserved
    assert admit(book, request._replace(needed=6, footprint=6), free=6, cupy=cached) == reservations.AdmissionResult(12)
    assert admit(book, request._replace(needed=6, footprint=6), free=6, cupy=Usage(2, 0, 2)).reserved


def test_what_another_client_of_the_allocator_has_reserved_must_fit_under_its_cap_too() -> None:
    book = begun(EMPTY, entry(1, "cupy", 4), 0)
    shared = {"torch": "pool", "cupy": "pool"}
    request, pool = Request("torch", GPU, 4, 4, 12, shared=shared), Usage(6, 3)
    fits = admit(book, request, free=6, cupy=Usage(0, 0, 0), torch=Usage(3, 3, 0), pool=pool)
    assert fits == reservations.AdmissionResult(5, reserved_under_cap=4), (
        "12 less 3 in use and 4 reserved; 3 idle serve the request"
    )
    more = request._replace(needed=6, footprint=6)
    refused = admit(book, more, free=6, cupy=Usage(0, 0, 0), torch=Usage(3, 3, 0), pool=pool)
    assert refused.reserved and refused.available == 5
    outside = admit(book, Request("numba", GPU, 5, 5, 12, shared=shared), free=6, pool=pool)
    assert outside == reservations.AdmissionResult(12), "the pool's cache serves what its own client has reserved"


def test_within_a_workload_its_own_bytes_are_there() -> None:
    book = begun(EMPTY, entry(1, size=8), 0)
    mine = Request("torch", GPU, 6, 6, 12, frozenset({1}))
    assert admit(book, mine._replace(enclosing=frozenset())).reserved
    assert admit(book, mine).covered
    assert not admit(book, mine._replace(needed=9, footprint=9)).covered  # more than it reserved
    used = Usage(8, 8, 0)
    again = admit(book, mine._replace(needed=4, footprint=4), torch=used)
    assert not again.covered and again.refusal is None  # used up; the cap has 4 more
    assert admit(book, mine._replace(needed=5, footprint=5), torch=used).refusal


def test_two_within_one_do_not_get_the_same_part_of_it() -> None:
    book = begun(EMPTY, entry(1, size=8), 0)
    ask = Request("torch", GPU, 5, 5, 12, frozenset({1}), reserves=True)
    assert admit(book, ask).covered
    book = begun(book, entry(2, requested=5, size=0, outer=frozenset({1})), 0)
    second = admit(book, ask)
    assert not second.covered and second.refusal is not None
    assert admit(book, ask._replace(enclosing=frozenset({1, 2}))).covered  # within the second one


def test_those_who_wait_are_served_in_order_but_not_before_what_they_wait_for() -> None:
    book = begun(EMPTY, entry(1), 0)
    for number in (2, 3):
        book = reservations.queued(book, entry(number))
    assert [one.id for one in reservations.served_before(book, 3, frozenset())] == [2]
    assert [one.id for one in reservations.served_before(book, None, frozenset())] == [2, 3]
    assert reservations.served_before(book, None, frozenset({1})) == ()
    assert [one.id for one in reservations.served_before(book, None, frozenset({99}))] == [2, 3]  # that one is over
    small = Request("cupy", GPU, 6, 6, 10)
    assert admit(book, small).refusal is None
    assert admit(book, small._replace(before=book.waiting[:1])).reserved  # 6 + 6 + 6 are more than the card
    assert ended(book, 2, None).waiting == book.waiting[1:]


@pytest.mark.parametrize(("cap", "room", "what"), [(12, 16, "torch's cap"), (30, 13, "what the budget has there")])
def test_a_workload_that_would_wait_for_itself(cap: int, room: int, what: str) -> None:
    book = begun(EMPTY, entry(1, size=8), 0)
    request = Request("torch", GPU, 6, 6, cap, frozenset({1}))
    why = reservations.why_waiting_is_useless(book, request, room, cap)
    assert (
        why is not None
        and "'w1', within which it is asked, reserved 8 B" in why.reason
        and what in why.reason
        and why.fix
    )
    assert reservations.why_waiting_is_useless(book, request._replace(enclosing=frozenset()), room, cap) is None
    assert reservations.why_waiting_is_useless(book, request._replace(needed=3, footprint=3), room, cap) is None


def test_who_holds_what() -> None:
    book = begun(begun(EMPTY, entry(1, "cupy", 6 * GIB), 0), entry(2, size=GIB), 0)
    book = reservations.queued(book, entry(3, size=2 * GIB, since=10.0))
    seen: Mapping[str, int | None] = {"cupy": 4 * GIB, "torch": None}
    assert reservations.reservation_lines(book, GPU, seen, 12.34) == [
        "'w1' (cupy, thread 1) reserved 6.00 GiB 12.3 s ago, 4.00 GiB of it in use",
        "'w2' (torch, thread 2) reserved 1.00 GiB 12.3 s ago",
        "'w3' (torch, thread 3) has waited 2.3 s for 2.00 GiB",
    ]
    assert reservations.reservation_lines(book, "GPU-1", seen, 0.0) == []
    for number in range(4, 30):
        book = reservations.queued(book, entry(number))
    assert reservations.reservation_lines(book, GPU, seen, 12.0)[-1] == "and 17 more"

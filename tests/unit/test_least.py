"""Which idle blocks go back where a part is enough: against every choice there is."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memguard._frameworks.driver_pages import DriverPages, Slabs, addresses_to_free, fewest_blocks

MIB, PAGE = 1 << 20, 2 << 20


@given(st.lists(st.integers(1, 40), max_size=9), st.integers(0, 200))
@example([6, 5, 4], 9)
@example([1, 1, 5], 2)
def test_enough_goes_and_nothing_that_could_stay(sizes: list[int], needed: int) -> None:
    chosen = fewest_blocks(sizes, needed)
    if chosen is None:
        assert sum(sizes) < needed
        return
    given_back = [sizes[one] for one in chosen]
    assert len({*chosen}) == len(chosen) and sum(given_back) >= needed
    assert not given_back or sum(given_back) - min(given_back) < needed, "one of them could stay"
    assert not any(sum(some) >= needed for some in combinations(sizes, len(chosen) - 1)) if chosen else needed <= 0, (
        "fewer blocks suffice"
    )


@pytest.mark.parametrize(
    ("sizes", "needed", "given_back"),
    [
        ([64, 2, 8, 32], 8, [8]), ([64, 2, 8, 32], 9, [32]), ([64, 2, 8, 32], 70, [64, 8]), ([4, 4, 4], 12, [4, 4, 4]),
        ([4, 4], 0, []), ([3, 5], 6, [5, 3]), ([8], 1, [8]), ([10, 9, 2], 12, [10, 2]),
    ],
)  # fmt: skip
def test_the_smallest_that_is_enough(sizes: list[int], needed: int, given_back: list[int]) -> None:
    chosen = fewest_blocks(sizes, needed)
    assert chosen is not None and sorted(sizes[one] for one in chosen) == sorted(given_back)


def test_a_slab_goes_whole_or_not_at_all() -> None:
    pages = DriverPages(Slabs())
    whole, partly, large = (
        [(at, MIB // 2) for at in (0, MIB // 2)],
        [(PAGE, 1000), (PAGE + 1024, 1000)],
        (8 * PAGE, PAGE),
    )
    for address, size in (*whole, *partly, large):
        pages.add(address, size)
    idle = [*whole, partly[0], large]
    assert addresses_to_free(pages, idle, PAGE) in ({0, MIB // 2}, {8 * PAGE})
    assert addresses_to_free(pages, idle, PAGE + 1) == {0, MIB // 2, 8 * PAGE}
    assert addresses_to_free(pages, idle, 2 * PAGE + 1) is None, "all have to go, though it is not enough"
    assert addresses_to_free(pages, idle, 0) == frozenset()


def test_a_piece_in_a_slab_of_others_gives_nothing_back_by_itself() -> None:
    shared = Slabs()
    theirs, pages = DriverPages(shared), DriverPages(shared)
    theirs.add(0, 1000)
    pages.add(1024, 1000)
    assert pages.groups([(1024, 1000)]) == []

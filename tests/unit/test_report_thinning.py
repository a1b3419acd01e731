"""Thinning: few points, in order, with every extreme, and a gap where something was unknown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard._tools.report.thinning import KEPT, Thinner

VALUES = st.lists(st.none() | st.integers(-5, 40), max_size=400)


def thinned(values: list[int | None], most: int) -> list[tuple[int, int | None]]:
    thinner: Thinner[tuple[int, int | None]] = Thinner(most)
    for number, value in enumerate(values):
        thinner.add((number, value), value, int(value is None))
    return list(thinner)


@given(VALUES, st.integers(2 * KEPT, 60))
def test_what_is_left_is_part_of_what_came_in_its_order(values: list[int | None], most: int) -> None:
    kept = thinned(values, most)
    assert len(kept) <= most
    assert [number for number, _ in kept] == sorted({number for number, _ in kept})
    assert all(values[number] == value for number, value in kept)


@given(VALUES, st.integers(2 * KEPT, 60))
def test_the_extremes_stay_and_the_first_of_equals(values: list[int | None], most: int) -> None:
    kept = thinned(values, most)
    known = [value for value in values if value is not None]
    if known:
        assert (values.index(max(known)), max(known)) in kept
        assert (values.index(min(known)), min(known)) in kept
    else:
        assert all(value is None for _, value in kept)


@given(VALUES, st.integers(2 * KEPT, 60))
def test_a_line_through_what_is_left_crosses_no_bucket_that_had_an_unknown(values: list[int | None], most: int) -> None:
    """Buckets have one size: the power of two with which they are few enough."""
    kept = thinned(values, most)
    size = 1
    while -(-len(values) // size) > most // KEPT:
        size *= 2
    for begin in range(0, len(values), size):
        bucket = values[begin : begin + size]
        left = [value for number, value in kept if begin <= number < begin + size]
        assert (None in left) == (None in bucket)
        assert 0 < len(left) <= KEPT
        known = [value for value in bucket if value is not None]
        assert {value for value in left if value is not None} == ({min(known), max(known)} if known else set())


@given(st.lists(st.none() | st.integers(0, 9), max_size=20))
def test_few_stay_as_they_are(values: list[int | None]) -> None:
    assert thinned(values, 60) == list(enumerate(values))


def test_whole_samples_keep_the_one_with_the_most_unknown() -> None:
    thinner: Thinner[str] = Thinner(2 * KEPT)
    for name, rank, gaps in (("a", 5, 0), ("b", 4, 1), ("c", 4.5, 2), ("d", 9, 0), ("e", 8, 2), ("f", None, 0)):
        thinner.add(name, rank, gaps)
    assert list(thinner) == ["b", "c", "d", "e"]  # two buckets: a b c d and e f


def test_memory_does_not_grow_with_the_length() -> None:
    thinner: Thinner[int] = Thinner(30)
    for number in range(10_000):
        thinner.add(number, number % 777)
    assert len(thinner._buckets) <= 30 // KEPT
    assert len(list(thinner)) <= 30


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="most must be at least 6, found 5"):
        Thinner(5)

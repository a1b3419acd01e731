"""Sizes, percentages and durations: what is read, what is refused and in which words."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memguard._base.units import (
    GIB,
    GRANULE,
    KIB,
    MAX_SIZE,
    MIB,
    TIB,
    format_size,
    gpu_uuid,
    parse_duration,
    parse_percent,
    parse_size,
    round_down,
    round_up,
    short,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * MIB),
        ("1.5GiB", 3 * GIB // 2),
        (" 2 gib ", 2 * GIB),
        ("1TIB", TIB),
        ("3KiB", 3 * KIB),
        ("7B", 7),
        ("4096", 4096),
        (4096, 4096),
        ("0.3KiB", 307),
        (MAX_SIZE, MAX_SIZE),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("5GB", "the unit 'GB' is ambiguous; write '5GiB'"),
        ("5g", "the unit 'g' is ambiguous; write '5GiB'"),
        ("1.5", "has no unit; write for example '1.5GiB'"),
        ("5XB", "unknown unit 'XB'; allowed: B, KiB"),
        ("-5MiB", "is not a size"),
        ("1_000", "is not a size"),
        ("1:30", "is not a size"),
        ("٣MiB", "is not a size"),
        ("", "is not a size"),
        (True, "True is not a size"),
        (1.5, "1.5 is not a size"),
        (None, "None is not a size"),
        (0, "above 0"),
        ("0.0001KiB", "above 0"),
        (MAX_SIZE + 1, "larger than any GPU"),
        ("9" * 30, "larger than any GPU"),
        pytest.param(10**5000, "larger than any GPU", id="huge"),
        ("9" * 50, "is not a size"),
    ],
)
def test_what_is_not_a_size(value: object, said: str) -> None:
    with pytest.raises(ValueError, match=r"size|unit|larger") as raised:
        parse_size(value)
    assert said in str(raised.value)
    assert len(str(raised.value)) < 160


@pytest.mark.parametrize(
    ("text", "fraction"),
    [("50%", Fraction(1, 2)), ("100 %", Fraction(1)), (" 12.5% ", Fraction(1, 8)), ("0.1%", Fraction(1, 1000))],
)
def test_percentages(text: str, fraction: Fraction) -> None:
    assert parse_percent(text) == fraction


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (50, "write for example '50%'"),
        (30, "write for example '30%'"),
        (0.25, "write for example '25%'"),
        ("0.25", "write for example '25%'"),
        (float("nan"), "nan is not a percentage; write for example '50%'"),
        pytest.param(10**5000, "is not a percentage; write for example '50%'", id="huge"),
        (True, "write for example '50%'"),
        ("0%", "above 0%"),
        ("100.1%", "at most 100%"),
        ("-5%", "is not a percentage"),
        ("half", "is not a percentage"),
    ],
)
def test_what_is_not_a_percentage(value: object, said: str) -> None:
    with pytest.raises(ValueError, match="percentage") as raised:
        parse_percent(value)
    assert said in str(raised.value)


def test_formats() -> None:
    assert [format_size(n) for n in (None, 0, 5, 1536, 512 * MIB, 4 * GIB, 2 * TIB, -3 * MIB // 2)] == [
        "unknown", "0 B", "5 B", "1.5 KiB", "512.0 MiB", "4.00 GiB", "2.00 TiB", "-1.5 MiB",
    ]  # fmt: skip
    assert gpu_uuid(bytes(range(16))) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


@given(st.integers(0, MAX_SIZE), st.integers(1, 4 * GRANULE))
def test_rounding_lands_on_the_nearest_multiple(size: int, granule: int) -> None:
    down, up = round_down(size, granule), round_up(size, granule)
    assert down <= size <= up
    assert down % granule == up % granule == 0
    assert up - down == (granule if size % granule else 0)


@given(st.integers(1, MAX_SIZE))
def test_whole_bytes_are_read_back(size: int) -> None:
    assert parse_size(size) == parse_size(str(size)) == parse_size(f"{size}B") == size


def test_a_value_that_cannot_be_shown_is_named_by_its_type() -> None:
    class Silent:
        def __repr__(self) -> str:
            raise RuntimeError

    assert short(Silent()) == "a Silent that cannot be shown"
    assert len(short("x" * 100)) == 60


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5), (" 1.5 S ", 1.5), ("2", 2.0), ("0.25", 0.25), ("5min", 300.0), ("1h", 3600.0), ("0", 0.0),
        (3, 3.0), (0.1, 0.1), (Fraction(1, 4), 0.25),
    ],
)  # fmt: skip
def test_durations(text: object, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5m", "unknown unit 'm'; write '5min'"),
        ("5us", "unknown unit 'us'; allowed: ms, s, min, h"),
        ("-1s", "'-1s' is not a duration; write '500ms', '2s' or a plain number of seconds"),
        ("1:30", "'1:30' is not a duration"),
        (-1, "-1 is not a duration"),
        (True, "True is not a duration"),
        (float("nan"), "nan is not a duration"),
        (float("inf"), "inf is not a duration"),
        (None, "None is not a duration"),
        ("", "'' is not a duration"),
    ],
)
def test_what_is_no_duration(text: object, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        parse_duration(text)


@given(st.text(max_size=12) | st.floats() | st.integers())
def test_any_duration_is_seconds_or_a_value_error(value: object) -> None:
    try:
        assert 0 <= parse_duration(value) < 1e14
    except ValueError as error:
        assert str(error)

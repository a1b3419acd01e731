"""What tests/gpu expects of hand-overs, against memguard's own account of what each framework takes."""

from __future__ import annotations

import random

import pytest
from support import arrays, edges, exchanged, order

from memguard._frameworks.arrays import compatibility
from memguard._frameworks.arrays.view import DTYPES, View
from memguard.exchange.adapters import registry

pytestmark = pytest.mark.long  # no version of what is installed changes what this code does

SIX = ("torch", "tensorflow", "cupy", "jax", "pycuda", "numba")


def test_memguard_accepts_exactly_the_documented_dtypes() -> None:
    assert set(arrays.DTYPES) == set(DTYPES)
    assert set(arrays.TAKES) == set(SIX)
    for name, dtypes in arrays.TAKES.items():
        assert registry.by_name(name).traits.dtypes == dtypes, name


ODD = {
    "compact": (0x1000, (64, 64), None),
    "rows": (0x1000 + 8 * 256, (16, 64), (256, 4)),
    "stepped": (0x1000, (32,), (8,)),
    "reversed": (0x10FC, (64,), (-4,)),
    "transposed": (0x1000, (64, 32), (4, 256)),
    "broadcast": (0x1000, (8, 64), (0, 4)),
    "4 past": (0x1004, (32,), (4,)),
    "16 past": (0x1010, (32,), (4,)),
    "32 past": (0x1020, (32,), (4,)),
    "a dimension of one": (0x1000, (1, 64), (9999 * 4, 4)),
    "nothing in it": (0x1004, (0, 3), (12, 4)),
    "0-d": (0x1000, (), ()),
    "three dimensions": (0x1000, (2, 3, 4), (48, 16, 4)),
    "three, permuted": (0x1000, (4, 2, 3), (4, 48, 16)),
    "three, with gaps": (0x1000, (2, 3, 4), (64, 16, 4)),
}


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("target", SIX)
@pytest.mark.parametrize("name", ODD)
def test_compatibility_says_what_is_expected(name: str, target: str, readonly: bool) -> None:
    """Two accounts of the same: that of tests/gpu is written from docs/exchange.md."""
    address, shape, strides = ODD[name]
    facts = arrays.Facts(address, shape, strides, "float32", readonly)
    wanted, copied = edges.expected(name, facts, target)
    counted = tuple(stride // 4 for stride in strides) if strides is not None else (64, 1)
    view = View(address, shape, counted, "float32", 0, readonly)
    obstacle = compatibility.obstacle(view, registry.by_name(target).traits, 0)
    assert wanted == ("shared" if obstacle is None else "refused")
    assert copied == "equal" and (obstacle is None or obstacle.copied)


def test_refusals_are_expected_of_arrays_without_memory() -> None:
    assert edges.expected("ragged", None, "torch") == ("refused", "refused")
    plain = arrays.Facts(0x1000, (4,), None, "float32")
    assert edges.expected("requires a gradient", plain, "jax") == ("refused", "equal")
    assert edges.expected("64-bit", plain._replace(dtype="float64"), "jax") == ("refused", "refused")
    assert edges.expected("64-bit", plain._replace(dtype="float64"), "torch") == ("shared", "equal")


def test_a_refusal_is_recorded_without_its_remedy() -> None:
    assert exchanged.refusal(ValueError("no\n    fix: so")) == "ValueError: no"


@pytest.mark.parametrize("between_us", [0, 20, 60, 300, 5000])
@pytest.mark.parametrize("launch_us", [0, 8])
@pytest.mark.parametrize("mhz", [345, 1980])
def test_work_ends_just_when_it_is_looked_at_on_any_card(between_us: float, launch_us: float, mhz: int) -> None:
    """Slow clocks and fast, a hand-over that asks soon or late after the launch: 600 rounds of each.

    Where the launch alone takes longer than the hand-over, all work is still under way, and the shortest is tried.
    """
    edge, noise = order.Edge(7, 100_000), random.Random(between_us)
    for _ in range(600):
        works = launch_us + edge.length() / mhz
        edge.told(works <= between_us * noise.uniform(0.8, 1.3))
    assert edge.ended + edge.under_way == 600
    if between_us <= launch_us * 1.3:
        assert edge.ended <= 60 and edge.middle == edge.SHORTEST
    else:
        assert edge.ended >= 200 and edge.under_way >= 200

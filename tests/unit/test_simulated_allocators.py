"""The allocators' models: properties that hold for any sequence of requests, and the figures measured on an H200."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from counted_driver import Driver
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard._base.units import GIB, KIB, MIB, round_up
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.driver_pages import whole_share
from memguard._frameworks.simulated.allocators import (
    AllocationRefused,
    Allocator,
    BFCAllocator,
    PyCUDAPool,
    TorchCachingAllocator,
    alloc_size,
    bin_number,
    tensorflow_default_limit,
)
from memguard._frameworks.simulated.driver_allocators import CuPyPool, NumbaMemory

pytestmark = pytest.mark.one_case  # no version of what is installed changes it: all of it is our own code

Make = Callable[[Driver, int], Allocator]


def torch(driver: Driver, cap: int | None) -> TorchCachingAllocator:
    return TorchCachingAllocator(driver.take, driver.give, cap)


def pool(driver: Driver, cap: int | None) -> PyCUDAPool:
    return PyCUDAPool(driver.take, driver.give, cap)


def growing(driver: Driver, cap: int) -> BFCAllocator:
    return BFCAllocator(driver.take, driver.give, cap, growth=True)


def at_once(driver: Driver, cap: int) -> BFCAllocator:
    return BFCAllocator(driver.take, driver.give, cap, growth=False)


def xla(driver: Driver, cap: int) -> BFCAllocator:
    return BFCAllocator(driver.take, driver.give, cap, growth=True, collects=False)


def cupy(driver: Driver, cap: int) -> CuPyPool:
    return CuPyPool(driver.take, driver.give, cap)


def numba(driver: Driver, cap: int) -> NumbaMemory:
    return NumbaMemory(driver.take, driver.give, cap, total=400 * MIB)


ALL: dict[str, Make] = {
    "torch": torch,
    "pycuda": pool,
    "bfc growing": growing,
    "bfc at once": at_once,
    "xla": xla,
    "cupy": cupy,
    "numba": numba,
}
SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(1, 90 * MIB))
STEPS = st.lists(st.one_of(SIZES, st.integers(-30, -1), st.just(0)), max_size=60)
"""Above 0: allocate; 0: trim; below: free the n-th live block."""


def could_fit(allocator: Allocator, nbytes: int, cap: int) -> bool:
    """Whether the request, as the allocator rounds it, fits under the cap beside what cannot be given back."""
    if isinstance(allocator, TorchCachingAllocator):
        need = allocator.segment_size(round_up(nbytes, 512))
    elif isinstance(allocator, PyCUDAPool):
        size = alloc_size(bin_number(nbytes))
        need = round_up(size) if size > MIB else 2 * MIB
    elif isinstance(allocator, CuPyPool):
        need = round_up(whole_share(nbytes), 512)
    elif isinstance(allocator, NumbaMemory):
        need = round_up(nbytes)
    else:
        return allocator.held + round_up(nbytes, 256) <= cap
    return allocator.held - allocator.reclaimable + need <= cap


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None)
@given(steps=STEPS, cap=st.integers(1, 120).map(lambda n: n * 2 * MIB), room=st.integers(0, 300 * MIB))
def test_any_sequence_keeps_the_books(name: str, steps: list[int], cap: int, room: int) -> None:
    driver = Driver(room)
    allocator = ALL[name](driver, cap)
    live: dict[int, int] = {}
    for step in steps:
        if step > 0:
            before = allocator.in_use
            try:
                block = allocator.allocate(step)
            except AllocationRefused as refused:
                assert (refused.requested, refused.held, refused.cap) == (step, allocator.held, cap)
                assert allocator.in_use == before
                if refused.driver is None:
                    assert not could_fit(allocator, step, cap)
            else:
                assert block not in live
                live[block] = allocator.in_use - before
                assert live[block] >= step
        elif step == 0:
            expected, before = allocator.reclaimable, allocator.held
            assert allocator.trim() == expected == before - allocator.held
            assert allocator.reclaimable == 0
        elif live:
            block = list(live)[step % len(live)]
            before = allocator.in_use
            allocator.free(block)
            assert before - allocator.in_use == live.pop(block)
            with pytest.raises(ValueError, match="freed twice"):
                allocator.free(block)
        assert allocator.held <= cap and driver.taken <= room
        # CuPy counts what it asked for, and the driver has slabs that are not full.
        assert allocator.held <= driver.taken if name == "cupy" else allocator.held == driver.taken
        assert sum(live.values()) == allocator.in_use <= allocator.held
        assert 0 <= allocator.reclaimable <= allocator.held - allocator.in_use
        assert allocator.peak_held >= allocator.held and allocator.peak_in_use >= allocator.in_use
    for block in live:
        allocator.free(block)
    allocator.trim()
    assert allocator.in_use == 0
    if not isinstance(allocator, BFCAllocator):
        assert allocator.held == driver.taken == 0


@pytest.mark.parametrize("name", ALL)
def test_what_cannot_be_asked(name: str) -> None:
    allocator = ALL[name](Driver(), GIB)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="cannot allocate"):
            allocator.allocate(wrong)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(1)


@pytest.mark.parametrize("name", ["torch", "bfc growing", "bfc at once", "xla", "cupy"])
@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 4 * MIB), min_size=2, max_size=30), order=st.randoms(use_true_random=False))
def test_neighbours_coalesce(name: str, sizes: list[int], order: object) -> None:
    """Whatever was carved out of one region, once all is free the region serves a request of its whole size."""
    driver = Driver()
    allocator = ALL[name](driver, 256 * MIB)
    allocator.free(allocator.allocate(200 * MIB))
    held = allocator.held
    blocks = [allocator.allocate(2 * MIB + size) for size in sizes]  # all from the one large region
    assert allocator.held == held
    order.shuffle(blocks)  # type: ignore[attr-defined]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(200 * MIB)
    assert allocator.held == held


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
    ],
)
def test_torch_segments(asked: int, segment: int) -> None:
    allocator = torch(Driver(), None)
    allocator.allocate(asked)
    assert allocator.held == segment
    assert allocator.in_use == round_up(asked, 512)


def test_torch_splits_as_it_does() -> None:
    allocator = torch(Driver(), None)
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(19 * MIB)  # 1 MiB would be left: not more than 1 MiB, so it stays in the block
    assert allocator.in_use == 20 * MIB
    allocator = torch(Driver(), None)
    allocator.free(allocator.allocate(20 * MIB))
    allocator.allocate(19 * MIB - 512)
    assert allocator.in_use == 19 * MIB - 512
    small = torch(Driver(), None)
    blocks = [small.allocate(512) for _ in range(4096)]
    assert small.held == 2 * MIB == small.in_use and len(blocks) == 4096


def test_torch_takes_the_best_fit() -> None:
    allocator = torch(Driver(), None)
    large, small = allocator.allocate(60 * MIB), allocator.allocate(30 * MIB)
    allocator.free(large)
    allocator.free(small)
    allocator.allocate(30 * MIB)  # must take the 30, or the 60 no longer fits
    allocator.allocate(60 * MIB)
    assert allocator.held == 90 * MIB


def test_torch_fragmentation_is_not_reclaimable() -> None:
    allocator = torch(Driver(), None)
    keep, drop = allocator.allocate(4 * MIB), allocator.allocate(4 * MIB)
    allocator.free(drop)
    assert (allocator.held, allocator.in_use, allocator.reclaimable) == (20 * MIB, 4 * MIB, 0)
    assert allocator.trim() == 0
    allocator.free(keep)
    assert allocator.reclaimable == 20 * MIB
    assert allocator.trim() == 20 * MIB


def test_torch_cap_can_move() -> None:
    """Measured: 4 GiB stops at 4,096 MiB exactly; raised to 6 it grows to 6,144; lowered it evicts nothing."""
    allocator = torch(Driver(), 4 * GIB)
    blocks = [allocator.allocate(256 * MIB) for _ in range(16)]
    with pytest.raises(AllocationRefused):
        allocator.allocate(256 * MIB)
    assert allocator.held == 4096 * MIB
    allocator.cap = 6 * GIB
    blocks += [allocator.allocate(256 * MIB) for _ in range(8)]
    with pytest.raises(AllocationRefused):
        allocator.allocate(1)
    assert allocator.held == 6144 * MIB
    for block in blocks:
        allocator.free(block)
    allocator.cap = 1 * GIB
    assert allocator.held == 6144 * MIB
    allocator.free(allocator.allocate(256 * MIB))  # from the cache: nothing new is taken
    assert allocator.held == 6144 * MIB
    allocator.allocate(300 * MIB)  # no segment of 256 MiB serves that, and the cache gives way
    assert allocator.held == 300 * MIB


def test_torch_gives_its_cache_back_before_it_refuses() -> None:
    driver = Driver(100 * MIB)
    allocator = torch(driver, None)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert allocator.held == 80 * MIB
    with pytest.raises(AllocationRefused) as caught:
        allocator.allocate(40 * MIB)
    assert caught.value.driver is not None and caught.value.driver.free == 20 * MIB


def test_bfc_regions_double() -> None:
    allocator = growing(Driver(), GIB)
    held = []
    for _ in range(15):
        allocator.allocate(2 * MIB)
        held.append(allocator.held // MIB)
    assert held == [2, 6, 6, *[14] * 4, *[30] * 8]
    fresh = growing(Driver(), GIB)
    fresh.allocate(200 * MIB)
    assert fresh.held == 256 * MIB
    fresh.allocate(200 * MIB)
    assert fresh.held == 512 * MIB  # enlarged for a request, the next region is not doubled again


def test_bfc_last_region_is_what_the_limit_leaves() -> None:
    allocator = growing(Driver(), 300 * MIB + 100)
    allocator.allocate(200 * MIB)
    assert allocator.held == 256 * MIB
    with pytest.raises(AllocationRefused):
        allocator.allocate(45 * MIB)
    assert allocator.held == 256 * MIB
    allocator.allocate(44 * MIB)
    assert allocator.held == 300 * MIB


def test_bfc_without_growth_takes_everything_at_first_use() -> None:
    driver = Driver()
    allocator = at_once(driver, GIB)
    assert driver.taken == 0
    allocator.free(allocator.allocate(1))
    assert driver.taken == GIB
    assert allocator.trim() == 0 and driver.taken == GIB


def test_bfc_backs_off_once() -> None:
    driver = Driver(900 * MIB)
    allocator = at_once(driver, GIB)
    allocator.allocate(800 * MIB)
    assert 0.9 * 0.9 * GIB <= driver.taken <= 900 * MIB
    taken = driver.taken
    with pytest.raises(AllocationRefused) as caught:
        allocator.allocate(60 * MIB)  # 70 MiB are free, but the second time no smaller region is tried
    assert caught.value.driver is not None and driver.taken == taken


def test_bfc_splits_as_it_does() -> None:
    allocator = at_once(Driver(), GIB)
    outer, _ = allocator.allocate(100 * MIB), allocator.allocate(1)  # the second keeps the first from coalescing
    allocator.free(outer)
    inner = allocator.allocate(60 * MIB)  # less than twice fits: the block is given whole
    assert allocator.in_use == 100 * MIB + 256
    allocator.free(inner)
    inner = allocator.allocate(60 * MIB, exact=True)
    assert allocator.in_use == 60 * MIB + 256
    allocator.free(inner)
    allocator.allocate(50 * MIB)
    assert allocator.in_use == 50 * MIB + 256


def test_bfc_wastes_less_than_128_mib() -> None:
    allocator = at_once(Driver(), 1000 * MIB)
    allocator.allocate(1000 * MIB - 128 * MIB)
    assert allocator.in_use == 872 * MIB
    allocator = at_once(Driver(), 1000 * MIB)
    allocator.allocate(1000 * MIB - 128 * MIB + 256)
    assert allocator.in_use == 1000 * MIB


def test_bfc_gives_free_regions_back_before_it_refuses() -> None:
    allocator = growing(Driver(), 512 * MIB)
    first, second = allocator.allocate(256 * MIB), allocator.allocate(256 * MIB)
    allocator.free(first)
    allocator.free(second)
    allocator.allocate(400 * MIB)
    assert allocator.held == 512 * MIB


def test_xla_gives_no_region_back() -> None:
    driver = Driver()
    allocator = xla(driver, 512 * MIB)
    for block in [allocator.allocate(256 * MIB), allocator.allocate(256 * MIB)]:
        allocator.free(block)
    with pytest.raises(AllocationRefused):
        allocator.allocate(400 * MIB)
    assert allocator.trim() == 0 and driver.taken == 512 * MIB
    assert growing(Driver(), 512 * MIB).collects, "TensorFlow's does"


@pytest.mark.parametrize(
    ("asked", "taken"),
    [(1, 1), (3, 3), (17, 17), (33, 33), (34, 35), (3 * MIB + 1, 3_276_799), (256 * MIB, 285_212_671)],
)
def test_pycuda_bins(asked: int, taken: int) -> None:
    assert alloc_size(bin_number(asked)) == taken


@given(nbytes=st.integers(1, 1 << 45))
def test_pycuda_bins_are_intervals(nbytes: int) -> None:
    number = bin_number(nbytes)
    size = alloc_size(number)
    assert nbytes <= size <= nbytes * 17 // 16
    assert bin_number(size) == number and bin_number(size + 1) > number


def test_pycuda_counts_driver_pages() -> None:
    allocator = pool(Driver(), None)
    allocator.allocate(1000)
    allocator.allocate(1000)
    assert allocator.held == 2 * MIB
    allocator.allocate(256 * MIB)
    assert allocator.held == 274 * MIB
    assert allocator.in_use == 2000 + 256 * MIB


def test_pycuda_reuses_only_the_same_bin() -> None:
    allocator = pool(Driver(), None)
    allocator.free(allocator.allocate(64 * MIB))
    allocator.allocate(65 * MIB)  # the same bin
    assert allocator.held == 68 * MIB
    allocator.free(allocator.allocate(32 * MIB))
    allocator.allocate(16 * MIB)  # a smaller bin: what is kept does not serve
    assert allocator.held == (68 + 34 + 18) * MIB
    assert allocator.reclaimable == 34 * MIB


def test_pycuda_gives_kept_blocks_back_at_the_cap() -> None:
    allocator = pool(Driver(), 100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert allocator.held == 84 * MIB
    with pytest.raises(AllocationRefused) as caught:
        allocator.allocate(20 * MIB)
    assert caught.value.driver is None


def test_pycuda_frees_the_largest_first_when_the_driver_refuses() -> None:
    allocator = pool(Driver(120 * MIB), None)
    kept = [allocator.allocate(size * MIB) for size in (60, 30)]
    for block in kept:
        allocator.free(block)
    allocator.allocate(50 * MIB)
    assert allocator.reclaimable == 32 * MIB  # what was kept of 30
    assert allocator.held == (32 + 52) * MIB


def test_tensorflow_default_limit() -> None:
    h200 = SimulatedHost().devices()[0].usable
    context, modules = 518 * MIB, 4 * MIB
    process = tensorflow_default_limit(h200 - context - modules, "hopper") + context + modules
    assert abs(process - 141_350 * MIB) < 16 * MIB
    assert tensorflow_default_limit(16 * GIB, "turing") == 16 * GIB - 1050 * MIB
    assert tensorflow_default_limit(GIB, "hopper") == GIB - 225 * MIB
    assert tensorflow_default_limit(0, "ada") > 0

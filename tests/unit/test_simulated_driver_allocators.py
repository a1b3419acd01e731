"""The models of CuPy's pool and of Numba, which take single allocations from the driver, and the driver's pages."""

from __future__ import annotations

import pytest
from counted_driver import Driver
from hypothesis import given, settings
from hypothesis import strategies as st

from memguard._base.units import GIB, KIB, MIB, round_up
from memguard._frameworks.driver_pages import whole_share
from memguard._frameworks.simulated.allocators import AllocationRefused
from memguard._frameworks.simulated.driver_allocators import CuPyPool, NumbaMemory, Piece, SimulatedPages

pytestmark = pytest.mark.one_case  # no version of what is installed changes it: all of it is our own code

TOTAL = 1000 * MIB


def pages(driver: Driver) -> SimulatedPages:
    def take(nbytes: int) -> bool:
        if driver.taken + nbytes > driver.room:
            return False
        driver.take(nbytes)
        return True

    return SimulatedPages(take, driver.give)


def cupy(driver: Driver, cap: int | None = None) -> CuPyPool:
    return CuPyPool(driver.take, driver.give, cap)


def numba(driver: Driver, cap: int | None = None, total: int = TOTAL) -> NumbaMemory:
    return NumbaMemory(driver.take, driver.give, cap, total=total)


class TestTheDriversPages:
    @pytest.mark.parametrize(
        ("sizes", "taken"),
        [
            ([1], 2 * MIB),
            ([MIB] * 2, 2 * MIB),
            ([MIB] * 2 + [1], 4 * MIB),
            ([MIB + 1], 2 * MIB),
            ([2 * MIB + 1], 4 * MIB),
            ([700 * KIB] * 3, 4 * MIB),  # two fit a slab; the third leaves a gap behind
            ([512] * 4096, 2 * MIB),
            ([500, 511] * 2048, 2 * MIB),
            ([513] * 2049, 4 * MIB),
            ([int(0.7 * MIB)] * 60, 60 * MIB),  # measured
        ],
    )
    def test_sizes(self, sizes: list[int], taken: int) -> None:
        driver = Driver()
        table = pages(driver)
        pieces = [table.allocate(size) for size in sizes]
        assert driver.taken == taken
        for piece in pieces:
            assert piece is not None
            table.free(piece)
        assert driver.taken == 0

    def test_a_slab_goes_back_with_its_last_part(self) -> None:
        driver = Driver()
        table = pages(driver)
        first, second, third = (table.allocate(600 * KIB) for _ in range(3))
        assert first and second and third and driver.taken == 2 * MIB
        table.free(first)
        table.free(third)
        assert driver.taken == 2 * MIB and table.returned_by([second]) == 2 * MIB
        assert table.allocate(600 * KIB) and driver.taken == 2 * MIB, "the gap is used"
        assert table.returned_by([second]) == 0
        table.free(second)
        assert driver.taken == 2 * MIB

    def test_refused_it_has_taken_nothing(self) -> None:
        driver = Driver(3 * MIB)
        table = pages(driver)
        assert table.allocate(MIB + 1) is not None
        assert table.allocate(MIB + 1) is None and table.allocate(1) is None
        assert driver.taken == 2 * MIB

    @settings(max_examples=60, deadline=None)
    @given(
        steps=st.lists(st.one_of(st.integers(1, 3 * MIB), st.integers(1, 40_000), st.integers(-20, -1)), max_size=60)
    )
    def test_what_is_taken_is_what_lies_in_it(self, steps: list[int]) -> None:
        driver = Driver()
        table = pages(driver)
        live: list[Piece] = []
        for step in steps:
            if step > 0:
                piece = table.allocate(step)
                assert piece is not None and piece.size >= step
                live.append(piece)
            elif live:
                gone = [live.pop(step % len(live)) for _ in range(min(-step, len(live)))]
                expected, before = table.returned_by(gone), driver.taken
                for piece in gone:
                    table.free(piece)
                assert before - driver.taken == expected
            large = sum(piece.size for piece in live if piece.part is None)
            small = sum(piece.size for piece in live if piece.part is not None)
            parts = sum(piece.part is not None for piece in live)
            assert round_up(small) <= driver.taken - large <= 2 * MIB * parts, "no slab without a part"


class TestCuPy:
    @pytest.mark.parametrize(
        ("asked", "held"),
        [
            (1, 512),
            (513, 1024),
            (600 * KIB, 682 * KIB + 512),  # three to a slab, whole units of 512
            (700 * KIB, MIB),
            (MIB, MIB),
            (MIB + 1, 2 * MIB),
            (5 * MIB, 6 * MIB),
        ],
    )
    def test_under_a_cap_requests_are_whole_shares_of_the_drivers_pages(self, asked: int, held: int) -> None:
        pool = cupy(Driver(), GIB)
        pool.allocate(asked)
        assert (pool.held, pool.in_use) == (held, held)

    def test_without_a_cap_it_is_as_it_comes(self) -> None:
        """Measured: 200 arrays of 1.1 MiB, 220 MiB counted, 398 taken (the first lay in a chunk that was there)."""
        driver = Driver()
        pool = cupy(driver)
        for _ in range(200):
            pool.allocate(11 * MIB // 10)
        assert pool.held == 200 * round_up(11 * MIB // 10, 512) and driver.taken == 400 * MIB
        driver = Driver()
        pool = cupy(driver, GIB)
        for _ in range(200):
            pool.allocate(11 * MIB // 10)
        assert pool.held == driver.taken == 400 * MIB

    def test_the_smallest_chunk_that_fits_is_split(self) -> None:
        driver = Driver()
        pool = cupy(driver, GIB)
        blocks = [pool.allocate(size * MIB) for size in (60, 20, 40)]
        for block in blocks:
            pool.free(block)
        pool.allocate(16 * MIB)  # of the 20
        pool.allocate(4 * MIB)  # its rest
        pool.allocate(40 * MIB)
        pool.allocate(60 * MIB)
        assert pool.held == driver.taken == 120 * MIB == pool.in_use

    def test_a_tiny_request_keeps_a_large_chunk(self) -> None:
        pool = cupy(Driver(), GIB)
        pool.free(pool.allocate(100 * MIB))
        small = pool.allocate(1)
        assert (pool.in_use, pool.held, pool.reclaimable) == (512, 100 * MIB, 0)
        assert pool.trim() == 0, "it is split"
        pool.free(small)
        assert pool.trim() == 100 * MIB and pool.held == 0

    def test_chunks_of_two_allocations_do_not_merge(self) -> None:
        pool = cupy(Driver(), 100 * MIB)
        for block in [pool.allocate(40 * MIB), pool.allocate(40 * MIB)]:
            pool.free(block)
        held = pool.held
        pool.allocate(40 * MIB)
        assert pool.held == held
        pool.allocate(60 * MIB)  # neither of the two chunks: the free one goes back for it
        assert pool.held == 100 * MIB

    def test_at_the_cap_whole_chunks_go_back_first(self) -> None:
        driver = Driver()
        pool = cupy(driver, 100 * MIB)
        pool.free(pool.allocate(60 * MIB))
        pool.allocate(80 * MIB)
        assert pool.held == driver.taken == 80 * MIB
        with pytest.raises(AllocationRefused) as caught:
            pool.allocate(21 * MIB)
        assert caught.value.driver is None and (caught.value.requested, caught.value.held) == (21 * MIB, 80 * MIB)
        pool.allocate(20 * MIB)

    def test_at_the_cap_idle_pieces_and_gaps_serve_what_fits_into_them_as_it_was_asked(self) -> None:
        driver = Driver()
        pool = cupy(driver, 8 * MIB)
        pool.free(pool.allocate(8 * MIB))
        pool.allocate(MIB)
        pool.allocate(13 * MIB // 2)  # 8 MiB of pages; 7 are idle
        assert pool.held == driver.taken == 8 * MIB
        with pytest.raises(AllocationRefused):
            pool.allocate(MIB)
        small = cupy(Driver(), 4 * MIB)
        for size in (2 * MIB, 698_880, MIB):
            small.allocate(size)
        small.allocate(349_600)  # a fifth of a slab would not fit into its gap
        assert small.held == 4 * MIB
        with pytest.raises(AllocationRefused):
            small.allocate(512)

    def test_fragmented_it_refuses_with_memory_to_spare(self) -> None:
        pool = cupy(Driver(), 100 * MIB)
        pool.free(pool.allocate(100 * MIB))
        blocks = [pool.allocate(10 * MIB) for _ in range(10)]
        for block in blocks[::2]:
            pool.free(block)
        assert pool.held - pool.in_use == 50 * MIB
        with pytest.raises(AllocationRefused):
            pool.allocate(12 * MIB)

    def test_where_the_driver_refuses_whole_chunks_go_back_first(self) -> None:
        driver = Driver(100 * MIB)
        pool = cupy(driver)
        pool.free(pool.allocate(60 * MIB))
        pool.allocate(80 * MIB)
        with pytest.raises(AllocationRefused) as caught:
            pool.allocate(40 * MIB)
        assert caught.value.driver is not None and caught.value.driver.free == 20 * MIB
        assert pool.held == driver.taken == 80 * MIB

    def test_its_cap_can_move_and_lowering_evicts_nothing(self) -> None:
        pool = cupy(Driver(), 100 * MIB)
        blocks = [pool.allocate(50 * MIB) for _ in range(2)]
        pool.cap = 40 * MIB
        assert pool.held == 100 * MIB
        pool.free(blocks[0])
        pool.allocate(50 * MIB)  # from the cache: nothing is taken
        with pytest.raises(AllocationRefused):
            pool.allocate(2 * MIB)
        pool.cap = 150 * MIB
        pool.allocate(50 * MIB)
        assert pool.held == 150 * MIB

    def test_the_drivers_slabs_are_not_in_its_count(self) -> None:
        driver = Driver()
        pool = cupy(driver, GIB)
        first = pool.allocate(1000)
        assert (pool.held, driver.taken) == (1024, 2 * MIB)
        pool.allocate(1000)
        assert (pool.held, driver.taken) == (2048, 2 * MIB)
        pool.free(first)
        assert pool.trim() == 1024 and driver.taken == 2 * MIB, "the slab has another part"

    def test_a_level_is_rounded_already(self) -> None:
        pool = cupy(Driver(), GIB)
        pool.allocate(3 * MIB + 512, exact=True)
        assert pool.in_use == pool.held == 3 * MIB + 512

    @settings(max_examples=200, deadline=None)
    @given(nbytes=st.integers(1, 4 * MIB))
    def test_whole_shares(self, nbytes: int) -> None:
        """A slab is full of as many as it holds, but for what is at most a sixteenth; larger ones fill their pages."""
        size = round_up(whole_share(nbytes), 512)
        assert nbytes <= size
        wasted = 2 * MIB % size if size <= MIB else round_up(size) - size
        assert wasted <= 2 * MIB // 16

    @settings(max_examples=60, deadline=None)
    @given(
        sizes=st.lists(st.one_of(st.integers(1, 3 * MIB), st.integers(1, 90 * MIB)), max_size=40),
        order=st.randoms(use_true_random=False),
    )
    def test_all_freed_and_trimmed_nothing_is_left(self, sizes: list[int], order: object) -> None:
        driver = Driver()
        pool = cupy(driver, GIB)
        live = []
        for size in sizes:
            try:
                live.append(pool.allocate(size))
            except AllocationRefused:
                assert pool.held + whole_share(size) > GIB
            assert pool.in_use <= pool.held <= min(driver.taken, GIB)
        order.shuffle(live)  # type: ignore[attr-defined]
        for block in live:
            pool.free(block)
        assert pool.reclaimable == pool.held and pool.in_use == 0
        pool.trim()
        assert pool.held == driver.taken == 0


class TestNumba:
    @pytest.mark.parametrize(
        ("asked", "held"),
        [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 2 * MIB), (5 * MIB, 6 * MIB)],
    )
    def test_what_is_held_is_the_drivers_pages(self, asked: int, held: int) -> None:
        memory = numba(Driver(), GIB)
        block = memory.allocate(asked)
        assert (memory.held, memory.in_use) == (held, asked)
        memory.free(block)
        assert (memory.held, memory.in_use) == (held, 0)

    def test_the_eleventh_pending_free_frees_all(self) -> None:
        driver = Driver()
        memory = numba(driver)
        blocks = [memory.allocate(4 * MIB) for _ in range(12)]
        for number, block in enumerate(blocks[:10], 1):
            memory.free(block)
            assert (memory.reclaimable, memory.in_use) == (number * 4 * MIB, (12 - number) * 4 * MIB)
            assert memory.held == driver.taken == 48 * MIB
        memory.free(blocks[10])
        assert (memory.held, memory.in_use, memory.reclaimable) == (4 * MIB, 4 * MIB, 0)
        memory.free(blocks[11])
        assert memory.held == memory.reclaimable == 4 * MIB, "the count starts anew"

    def test_more_than_a_fifth_of_the_card_pending_frees_all(self) -> None:
        memory = numba(Driver(), total=1000 * MIB)
        blocks = [memory.allocate(size * MIB) for size in (150, 50, 2)]
        memory.free(blocks[0])
        memory.free(blocks[1])
        assert memory.reclaimable == 200 * MIB == memory.held - memory.in_use
        memory.free(blocks[2])
        assert memory.held == 0
        memory.free(memory.allocate(100 * MIB))
        assert memory.held == 100 * MIB, "the sum starts anew"

    def test_there_is_no_pool(self) -> None:
        memory = numba(Driver())
        memory.free(memory.allocate(10 * MIB))
        memory.allocate(10 * MIB)
        assert memory.held == 20 * MIB, "what is pending is not used again"

    def test_under_a_cap_what_is_flushed_is_pooled(self) -> None:
        driver = Driver()
        memory = numba(driver, GIB)
        blocks = [memory.allocate(4 * MIB) for _ in range(12)]
        for block in blocks[:11]:
            memory.free(block)
        assert (memory.held, memory.in_use, memory.reclaimable) == (48 * MIB, 4 * MIB, 44 * MIB)
        memory.allocate(2 * MIB + 1)
        assert memory.held == driver.taken == 48 * MIB, "the driver would round it up to that"
        memory.allocate(2 * MIB)
        assert memory.held == driver.taken == 50 * MIB
        assert memory.trim() == 40 * MIB and memory.held == driver.taken == 10 * MIB

    def test_at_the_cap_no_more_of_the_pool_goes_back_than_has_to(self) -> None:
        memory = numba(Driver(), 100 * MIB)
        for block in [memory.allocate(4 * MIB) for _ in range(22)]:
            memory.free(block)
        memory.allocate(20 * MIB)
        assert memory.held == 100 * MIB and memory.reclaimable == 80 * MIB
        memory.cap = 40 * MIB
        with pytest.raises(AllocationRefused):
            memory.allocate(21 * MIB)
        assert memory.held == 20 * MIB and memory.reclaimable == 0

    def test_the_manager_of_an_undone_budget_pools_nothing(self) -> None:
        memory = numba(Driver(), GIB)
        memory.cap = None
        for block in [memory.allocate(4 * MIB) for _ in range(11)]:
            memory.free(block)
        assert memory.held == 0

    def test_at_the_cap_what_is_pending_is_freed_first(self) -> None:
        driver = Driver()
        memory = numba(driver, 100 * MIB)
        memory.free(memory.allocate(60 * MIB))
        memory.allocate(80 * MIB)
        assert memory.held == driver.taken == 80 * MIB
        with pytest.raises(AllocationRefused) as caught:
            memory.allocate(21 * MIB)
        assert caught.value.driver is None and caught.value.held == 80 * MIB
        memory.allocate(20 * MIB)
        with pytest.raises(AllocationRefused):
            memory.allocate(1)

    def test_where_the_driver_refuses_what_is_pending_is_freed_first(self) -> None:
        driver = Driver(100 * MIB)
        memory = numba(driver)
        memory.free(memory.allocate(60 * MIB))
        memory.allocate(80 * MIB)
        with pytest.raises(AllocationRefused) as caught:
            memory.allocate(40 * MIB)
        assert caught.value.driver is not None and memory.held == 80 * MIB

    def test_a_slab_with_a_live_part_is_not_reclaimable(self) -> None:
        memory = numba(Driver())
        first, second = memory.allocate(MIB), memory.allocate(MIB)
        memory.free(first)
        assert (memory.held, memory.in_use, memory.reclaimable) == (2 * MIB, MIB, 0)
        assert memory.trim() == 0
        memory.free(second)
        assert memory.reclaimable == 2 * MIB == memory.trim()

    @settings(max_examples=60, deadline=None)
    @given(
        steps=st.lists(st.one_of(st.integers(1, 3 * MIB), st.integers(1, 90 * MIB), st.integers(-9, -1)), max_size=60)
    )
    def test_what_is_held_is_live_or_pending(self, steps: list[int]) -> None:
        driver = Driver()
        memory = numba(driver, 400 * MIB)
        live: list[int] = []
        for step in steps:
            if step > 0:
                try:
                    live.append(memory.allocate(step))
                except AllocationRefused:
                    assert memory.reclaimable == 0 and memory.held + round_up(step) > 400 * MIB
            elif live:
                memory.free(live.pop(step % len(live)))
            assert memory.in_use + memory.reclaimable <= memory.held == driver.taken <= 400 * MIB
        for block in live:
            memory.free(block)
        memory.trim()
        assert memory.held == memory.in_use == driver.taken == 0

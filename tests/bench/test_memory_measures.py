"""What the measurements of memory compute from what their processes tell."""

from __future__ import annotations

import pytest

from bench.measure import Failed
from bench.measures import allocation
from bench.programs.six import MIB, PAGE
from bench.programs.ways import WAYS, Allocator


def found(**us: float) -> allocation.Found:
    """12 rounds in which every way takes 1 µs, but those named "library_way"."""
    made = allocation.Found()
    for library, ways in WAYS.items():
        for way in ways:
            for size in allocation.SIZES:
                for share in allocation.SHARES:
                    for number in range(12):
                        told = {"us": us.get(f"{library}_{way}", 1.0), "below": 0, "asks": 0.0}
                        made.keep((library, way, size, share), divmod(number, 4), told)
    return made


@pytest.mark.parametrize(
    ("row", "slow", "figure"),
    [
        ("torch", {"torch_memguard": 1.05}, 1.05),
        ("torch", {"torch_memguard": 1.05, "torch_plain, again": 1.1}, 1.05 / 1.1),
        ("cupy", {"cupy_memguard": 1.2}, 1.2), ("pycuda", {"pycuda_memguard": 3.0}, 1.2),
        ("pycuda", {"pycuda_memguard": 1.9, "pycuda_own pool": 0.4}, 0.95),
        ("pycuda_pool", {"pycuda_memguard, pool": 5.0}, 2.0), ("numba", {"numba_rmm": 2.0}, 0.5),
    ],
)  # fmt: skip
def test_an_allocation_is_held_to_what_it_is_compared_with(row: str, slow: dict[str, float], figure: float) -> None:
    groups = found(**slow).worst(row, "90%")
    assert [len(group) for group in groups] == [4, 4, 4]
    assert [value for group in groups for value in group] == [pytest.approx(figure)] * 12


def test_the_worst_size_counts_and_a_way_without_rounds_says_why() -> None:
    made = found()
    made.us["cupy", "memguard", "1 MiB", "10%"] = dict.fromkeys([(0, 0), (1, 0), (2, 0)], 1.5)
    assert made.worst("cupy", "10%") == [[1.5], [1.5], [1.5]]
    del made.us["numba", "rmm", "1 MiB", "10%"]
    made.keep(("numba", "rmm", "1 MiB", "10%"), (0, 0), {"us": 1.0, "below": 9 * MIB})
    with pytest.raises(Failed, match="bytes below its part"):
        made.worst("numba", "10%")


@pytest.mark.parametrize("counts", [True, False])
def test_memory_is_filled_to_a_part_of_the_cap_for_every_size(counts: bool) -> None:
    live = [0]

    class Block:
        def __init__(self, size: int) -> None:
            self.size = -(-size // PAGE) * PAGE
            live[0] += self.size

        def __del__(self) -> None:
            live[0] -= self.size

    cap = 1024 * MIB
    filled = allocation.Filled(Allocator(Block, (lambda: live[0]) if counts else None), cap)
    for share in allocation.SHARES.values():
        for size in allocation.SIZES.values():
            assert 0 <= int(share * cap) - filled.to(size, share) <= allocation.SLACK
    filled.empty()
    assert live == [0]

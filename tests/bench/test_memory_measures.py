"""What the measurements of memory compute from what their processes tell."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench.measure import Failed, discover
from bench.measures import allocation, ledger
from bench.programs.quiet import NEAR, Quiet
from bench.programs.six import MIB, PAGE
from bench.programs.ways import AGAIN, CONTROL, WAYS, Allocator


@pytest.mark.parametrize("name", ["caps", "ledger", "overheads", "exchange", "allocation"])
def test_each_row_with_a_bar_has_a_unit(name: str) -> None:
    one = discover()[name]
    assert isinstance(one.bar, dict) and one.bar
    assert isinstance(one.unit, str) or set(one.bar) <= set(one.unit)


def test_what_cupti_saw_is_summed_by_library() -> None:
    """100 random histories against a count by hand: releases come in any order, addresses are taken again."""
    rng = random.Random(3)
    sources = ["/x/libc10_cuda.so", "libtensorflow_cc.so.2", "/y/xla_cuda_plugin.so", "runtime.cpython-312.so",
               "_driver.cpython-312-linux-gnu.so", "cydriver.cpython-312.so", "libcublas.so.13", None]  # fmt: skip
    names = ["torch", "tensorflow", "jax", "cupy", "pycuda", "numba", "libcublas.so.13", "unknown"]
    for _ in range(100):
        records: list[tuple[Any, ...]] = []
        live: dict[int, tuple[str, int]] = {}
        for at in range(200):
            if live and rng.random() < 0.4:
                address = rng.choice(list(live))
                del live[address]
                records.append((at, 2, 3, address, 0, None))
            else:
                number, size, kind = rng.randrange(8), rng.choice([512, MIB, MIB + 1, 20 * MIB]), rng.choice([3, 3, 2])
                address = rng.choice([n for n in range(50) if n not in live])
                records.append((at, 1, kind, address, size, sources[number]))
                if kind == 3:
                    live[address] = names[number], size if size <= MIB else -(-size // PAGE) * PAGE
        rng.shuffle(records)
        expected: dict[str, int] = {}
        for name, size in live.values():
            expected[name] = expected.get(name, 0) + size
        assert ledger.live_bytes(records, 1, 2, 3) == expected


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
        ("cupy", {"cupy_memguard": 1.2}, 1.2),
        ("pycuda", {"pycuda_memguard": 3.0}, 1.2),
        ("pycuda", {"pycuda_memguard": 1.9, "pycuda_own pool": 0.4}, 0.95),
        ("pycuda_pool", {"pycuda_memguard, pool": 5.0}, 2.0),
        ("numba", {"numba_rmm": 2.0}, 0.5),
    ],
)
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


def test_near_the_cap_numba_counts_where_its_pool_serves() -> None:
    made = found(numba_memguard=2.0)
    made.asks["numba", "memguard", "64 MiB", "99.9%"] = made.asks["numba", "memguard", "64 MiB", "10%"] = [1.0] * 3
    made.us["numba", "memguard", "64 MiB", "99.9%"] = made.us["numba", "memguard", "64 MiB", "10%"] = {(0, 0): 9.0}
    assert made.worst("numba", "99.9%")[0][0] == 2 and made.worst("numba", "10%") == [[9.0]]


def test_two_processes_that_do_the_same_show_what_may_be_chance() -> None:
    assert found(**{f"torch_plain{AGAIN}": 0.8}).control("torch") == [pytest.approx(1.25)]
    assert set(CONTROL) == set(WAYS)


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


def test_a_disturbed_part_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    yards = iter([1.0] * 20 + [1.0, 1.0, 9.0, 1.0, *[1.0] * 20])
    monkeypatch.setattr("bench.programs.quiet.yardstick", lambda: next(yards))
    quiet, took = Quiet(), iter([1.0, 50.0, 40.0, 1.0, 1.0, 1.0])
    assert quiet.limit(2.0) == NEAR and quiet.median(lambda: next(took), 1.0, 3) == 1.0

"""The model of the driver's memory, which the models of CuPy, Numba and PyCUDA share: what was measured on an H200."""

from __future__ import annotations

import gc
import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memguard.units import GIB, MIB

HERE = Path(__file__).parent
PAGE = 2 * MIB


def forget() -> None:
    gc.collect()
    for name in [n for n in sys.modules if n.partition(".")[0] in ("card", "cupy", "fake_card", "numba", "pycuda")]:
        del sys.modules[name]


@pytest.fixture
def card() -> Iterator[Any]:
    forget()
    yield importlib.import_module("card")
    forget()


def test_small_ones_share_slabs_and_large_ones_take_pages(card: Any) -> None:
    gpu = card.cards[0]
    first, second, large = gpu.take(700_000), gpu.take(700_000), gpu.take(MIB + 1)
    assert first % PAGE == large % PAGE == 0 and second == first + 700_416 and gpu.taken == 2 * PAGE
    third = gpu.take(700_000)
    assert third % PAGE == 0 and gpu.taken == 3 * PAGE, "no piece lies in two slabs"
    small = gpu.take(1)
    assert small == second + 700_416, "into the oldest slab with room"
    gpu.give(first)
    assert gpu.take(512) == first and gpu.taken == 3 * PAGE
    gpu.give(third)
    assert gpu.taken == 2 * PAGE, "gone with its last piece"


def test_a_buffer_id_is_of_a_live_allocation_by_its_start_and_never_comes_again(card: Any) -> None:
    gpu, other = card.cards
    address = gpu.take(3 * MIB)
    number = gpu.buffer(address)
    assert number is not None and gpu.buffer(address + 512) is None and other.buffer(address) is None
    assert card.buffer(address) == number and gpu.allocation(address + 512) == (address, 2 * PAGE)
    gpu.give(address)
    assert gpu.buffer(address) is None and gpu.allocation(address) is None
    again = gpu.take(3 * MIB)
    assert again == address and gpu.buffer(again) not in (None, number)


def test_whatever_is_taken_lies_apart_and_all_of_it_goes_back(card: Any) -> None:
    rng = random.Random(1)
    live: dict[int, int] = {}
    for gpu in card.cards:
        gpu.total = GIB
    for _ in range(4000):
        if live and rng.random() < 0.45:
            address = rng.choice(list(live))
            del live[address]
            card.give(address)
        else:
            size = int(2 ** rng.uniform(0, 23))
            try:
                address = rng.choice(card.cards).take(size)
            except card.OutOfMemory:
                continue
            assert address % (PAGE if size > MIB else 512) == 0
            assert size > MIB or address // PAGE == (address + size - 1) // PAGE
            live[address] = size
    ends = [0, *(address + size for address, size in sorted(live.items()))]
    assert all(end <= start for end, start in zip(ends, sorted(live), strict=False))
    pages = {page for a, size in live.items() for page in range(a // PAGE, (a + size - 1) // PAGE + 1)}
    assert sum(gpu.taken for gpu in card.cards) == len(pages) * PAGE <= 2 * GIB
    for address in live:
        card.give(address)
    assert [gpu.taken for gpu in card.cards] == [0, 0]


def test_all_models_share_the_slabs_of_a_gpu(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("fake_cupy", "fake_numba", "fake_pycuda"):
        monkeypatch.syspath_prepend(HERE / folder)
    others = [finder for finder in sys.meta_path if type(finder).__name__ != "NumbaCudaFinder"]  # numba-cuda's .pth
    monkeypatch.setattr(sys, "meta_path", others)
    cuda, cupy = importlib.import_module("numba.cuda"), importlib.import_module("cupy")
    sys.modules["numba.cuda.cudadrv.driver"].Device.uuids = ("", "")
    drv, tools = importlib.import_module("pycuda.driver"), importlib.import_module("pycuda.tools")
    drv.init()
    context = drv.Device(0).make_context()
    chunk, array = cupy.cuda.alloc(1000), cuda.device_array(1000)
    single, pooled = drv.mem_alloc(1000), tools.DeviceMemoryPool().allocate(1000)
    addresses = [chunk.ptr, array.gpu_data.device_pointer_value, int(single), int(pooled)]
    assert [address - addresses[0] for address in addresses] == [0, 1024, 2048, 3072]
    assert addresses[0] % PAGE == 0 and card.cards[0].taken == PAGE
    del chunk, array, single, pooled
    context.pop()


def test_cupys_pool_splits_a_chunk_and_its_pointers_lie_in_it(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE / "fake_cupy")
    cupy: Any = importlib.import_module("cupy")
    whole = cupy.cuda.alloc(4 * MIB)
    start = whole.mem.ptr
    assert whole.ptr == start and whole.mem.size == 4 * MIB and card.buffer(start) is not None
    del whole
    first, second = cupy.cuda.alloc(1000), cupy.cuda.alloc(1000)
    assert (first.ptr, second.ptr, second.mem.size) == (start, start + 1024, 1024)
    assert card.buffer(second.ptr) is None and card.cards[0].taken == 4 * MIB
    del first, second
    assert cupy.cuda.alloc(4 * MIB).ptr == start, "merged again"

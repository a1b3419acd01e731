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

from memguard._base.units import GIB, MIB
from memguard._frameworks import driver_pages
from memguard._frameworks.driver_pages import DriverPages, Slabs

pytestmark = pytest.mark.long  # no version of what is installed changes it: all of it is our own code

HERE = Path(__file__).parent
PAGE = 2 * MIB


def forget() -> None:
    driver_pages.slabs.clear()
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


class Counted:
    """Frameworks that count their own pieces on one card, as DriverPages, and what the driver really takes."""

    def __init__(self, card: Any, *whole: bool) -> None:
        self.card, self.slabs = card.cards[0], Slabs()
        self.pages = [DriverPages(self.slabs, one) for one in whole]
        self.live: list[list[tuple[int, int]]] = [[] for _ in whole]

    def take(self, who: int, size: int) -> None:
        address = self.card.take(size)
        self.pages[who].add(address, size)
        self.live[who].append((address, size))

    def give(self, who: int, which: int) -> None:
        address, size = self.live[who].pop(which)
        self.card.give(address)
        self.pages[who].remove(address, size)

    def check(self) -> None:
        assert sum(pages.held() for pages in self.pages) + self.slabs.gaps == self.card.taken
        for pages, live in zip(self.pages, self.live, strict=True):
            assert sum(size for _, size in live) <= pages.held()


def test_rows_and_gaps_come_to_what_the_driver_takes(card: Any) -> None:
    """Two that count slabs whole and one that counts bytes, in the same slabs, in any order."""
    rng = random.Random(5)
    counted = Counted(card, True, True, False)
    for _ in range(4000):
        who = rng.randrange(3)
        live = counted.live[who]
        if live and rng.random() < 0.48:
            counted.give(who, rng.randrange(len(live)))
        else:
            counted.take(who, int(2 ** rng.uniform(0, 23)) if rng.random() < 0.9 else MIB)
        counted.check()
    for who, live in enumerate(counted.live):
        while live:
            counted.give(who, -1)
            counted.check()
    assert counted.slabs.gaps == 0 == sum(pages.held() for pages in counted.pages)


def test_one_that_counts_slabs_whole_is_exact_alone(card: Any) -> None:
    rng, counted = random.Random(6), Counted(card, True)
    for _ in range(3000):
        if counted.live[0] and rng.random() < 0.5:
            counted.give(0, rng.randrange(len(counted.live[0])))
        else:
            size = int(2 ** rng.uniform(0, 22))
            before, growth = counted.pages[0].held(), counted.pages[0].growth(size)
            counted.take(0, size)
            assert counted.pages[0].held() - before >= growth
        assert counted.pages[0].held() == counted.card.taken and counted.slabs.gaps == 0


def test_a_piece_in_a_slab_that_nobody_here_opened_counts_its_bytes(card: Any) -> None:
    """A raw cudaMalloc of an extension: its slab is not ours, nor are the gaps in it."""
    counted = Counted(card, True)
    raw = counted.card.take(600_000)
    counted.take(0, 1000)
    assert (counted.pages[0].held(), counted.slabs.gaps) == (1024, 0)
    counted.card.give(raw)
    counted.give(0, 0)
    assert (counted.pages[0].held(), counted.slabs.gaps, counted.card.taken) == (0, 0, 0)


def test_a_slab_goes_back_with_its_last_piece(card: Any) -> None:
    counted = Counted(card, True)
    for size in (600_000, 700_000, 3 * MIB):
        counted.take(0, size)
    pages, (first, second, large) = counted.pages[0], counted.live[0]
    assert pages.returned_by([first, large]) == 4 * MIB
    assert pages.returned_by([first, second, large]) == 6 * MIB == pages.held()
    counted.give(0, 0)
    assert pages.returned_by([large]) == 4 * MIB
    assert pages.returned_by([second, large]) == 6 * MIB == pages.held()


def test_cupys_pieces_follow_the_driver(card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its pool gave back is seen at the next reading, also where another piece lies at the same address."""
    from memguard._devices import contexts
    from memguard._frameworks.cupy.blocks import Pieces

    gpu, slabs = card.cards[0], Slabs()
    monkeypatch.setattr(contexts, "allocation", gpu.allocation)
    monkeypatch.setattr(contexts, "buffer", gpu.buffer)
    pieces = Pieces(slabs)
    first, second, large = gpu.take(300_032), gpu.take(MIB), gpu.take(4 * MIB)
    for address in (first, second, large, first + 512):
        pieces.took(address)
    pieces.drop_freed(1)
    assert slabs.gaps == PAGE - 300_032 - MIB
    gpu.give(first)
    assert gpu.take(300_032) == first
    pieces.drop_freed(1)
    assert slabs.gaps == PAGE - 300_032 - MIB, "its total has not changed, so nothing is asked"
    pieces.drop_freed(2)
    assert slabs.gaps == PAGE - MIB, "another allocation lies there now"
    pieces.forget()
    assert slabs.gaps == 0


def test_what_is_noted_of_cupys_pieces_does_not_grow_without_a_reading(
    card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that come and go between two readings, and many that stay: the driver is asked now and then."""
    from memguard._devices import contexts
    from memguard._frameworks.cupy.blocks import Pieces

    gpu, slabs, asked = card.cards[0], Slabs(), []
    monkeypatch.setattr(contexts, "allocation", gpu.allocation)
    monkeypatch.setattr(contexts, "buffer", lambda address: asked.append(address) or gpu.buffer(address))
    pieces = Pieces(slabs)
    for _ in range(10_000):
        address = gpu.take(1024)
        pieces.took(address)
        assert len(pieces._new) <= 1001
        gpu.give(address)
    assert len(asked) < 3 * 10_000
    pieces.drop_freed(1)
    assert slabs.gaps == 0 and not pieces._there
    asked.clear()
    for _ in range(5000):
        pieces.took(gpu.take(512))
    assert len(asked) < 6 * 5000 and len(pieces._there) + len(pieces._new) == 5000
    pieces.drop_freed(2)
    assert slabs.gaps == 2 * PAGE - 5000 * 512
    pieces.forget()
    assert slabs.gaps == 0

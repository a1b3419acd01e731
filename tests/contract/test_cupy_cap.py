"""What CuPy's cap refuses, judged by the driver's pages of `card`, which knows nothing of memguard."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from test_cupy_model import Model, Setting, model

from memguard._base.types import Shortage, Usage
from memguard._base.units import MIB
from memguard._frameworks.cupy import adapter, blocks
from memguard._frameworks.driver_pages import TINY, slabs, whole_share

pytestmark = pytest.mark.one_case  # no version of what is installed changes it: all of it is our own code

__all__ = ["model"]
PAGE = 2 * MIB
UNIT = 512
KINDS = {
    "of a slab": (129 << 10, MIB),
    "tiny": (1, 128 << 10),
    "of pages": (MIB + 1, 9 * MIB),
    "any": (1, 6 * MIB),
}


@pytest.fixture(params=[2, 1])
def gpus(request: pytest.FixtureRequest) -> int:
    """Of the model: with one GPU its own pool is asked."""
    number: int = request.param
    return number


def would_fit(setting: Setting, size: int, cap: int) -> str:
    """Why a request would have been served within the cap, once idle blocks were given back; empty if not."""
    asked = -(-size // UNIT) * UNIT
    pool = setting.pool._here()
    if any(chunk.size >= asked for chunk in pool.idle):
        return "an idle piece of a block that is in use"
    card = setting.card.gpus[0].card
    gap = size <= MIB and any(end - start >= asked for gaps in card._slabs.values() for start, end in gaps)
    pages = 0 if gap else -(-max(size, PAGE) // PAGE) * PAGE
    return f"{pages >> 20} MiB of pages" if card.taken + pages <= cap else ""


def driven(setting: Setting, rng: random.Random, cap: int, sizes: tuple[int, int], steps: int) -> dict[str, Any]:
    """A random sequence under the cap: the refusals that were wrong, and the most that the driver handed out."""
    live: list[Any] = []
    found: dict[str, Any] = {"refused": 0, "served": 0, "wrong": [], "over": 0, "count": 0}
    for _ in range(steps):
        size = round(2 ** rng.uniform(*(len(bin(bound)) - 2.5 for bound in sizes)))
        size = min(max(size, sizes[0]), sizes[1])
        try:
            live.append(setting.alloc(size))
            found["served"] += 1
        except setting.oom:
            found["refused"] += 1
            setting.pool.free_all_blocks()
            if why := would_fit(setting, size, cap):
                found["wrong"].append((size, setting.pool.total_bytes(), setting.taken(), why))
            rng.shuffle(live)
            del live[: rng.randint(1, len(live) or 1)]
        if rng.random() < 0.25 and live:
            live.pop(rng.randrange(len(live)))
        found["count"] = max(found["count"], setting.pool.total_bytes())
        found["over"] = max(found["over"], setting.taken() - cap)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(int(os.environ.get("MEMGUARD_SEEDS", "6"))))
def test_nothing_is_refused_that_would_have_fitted(model: Model, kind: str, seed: int) -> None:
    setting, rng = model("h200"), random.Random(f"{kind} {seed}")
    cap = rng.choice([2] if kind == "tiny" else [8, 13, 32, 64]) * MIB + rng.choice([0, 0, 1, 700_000])
    setting.apply(cap)
    found = driven(setting, rng, cap, KINDS[kind], 800)
    assert found["refused"] and found["served"] >= 100
    assert found["count"] <= cap, "by the pool's own count"
    assert found["wrong"] == [], f"{len(found['wrong'])} of {found['refused']}: {found['wrong'][:3]}"


def test_what_a_size_is_rounded_to_is_worked_out_once(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 sizes, 20 of them over and over: all are what `whole_share` says, and no table grows without end."""
    asked: list[int] = []
    monkeypatch.setattr(adapter, "whole_share", lambda size: (asked.append(size), whole_share(size))[1])
    setting, rng = model("h200"), random.Random(1)
    setting.apply(64 * MIB)

    def taken(size: int) -> int:
        memory = setting.alloc(size)
        assert memory is not None
        return int(setting.pool.used_bytes())

    often = [rng.randint(TINY + 1, MIB) for _ in range(20)]
    for size in often * 50:
        assert taken(size) == -(-whole_share(size) // UNIT) * UNIT
    assert sorted(set(often)) == sorted(asked)
    many = rng.sample(range(TINY + 1, MIB + 1), 5000)
    for size in many + often:
        assert taken(size) == -(-whole_share(size) // UNIT) * UNIT
    assert 20 + 5000 < len(asked) <= 20 + 5000 + 20, "the table was full in between"


def test_a_gap_of_a_slab_serves_what_its_rounded_size_would_not_fit_into(model: Model) -> None:
    """An even part of a slab is larger than the gap: the request as it was asked is not, and takes no page."""
    setting = model("h200")
    setting.apply(4 * MIB)
    live = [setting.alloc(size) for size in (2 * MIB, 698_880, MIB)]
    left = 4 * MIB - setting.pool.total_bytes()
    assert setting.taken() == 4 * MIB and 0 < left == 349_696
    with pytest.raises(setting.oom):
        setting.alloc(left + 1)
    live.append(setting.alloc(left - 96))
    assert setting.taken() == 4 * MIB == setting.pool.total_bytes() and len(live) == 4


def test_what_would_open_a_slab_is_given_back_and_refused(model: Model) -> None:
    """The pool's count has room for it as it was asked; the gaps of the slab have too, together and not alone."""
    setting = model("h200")
    setting.apply(1_907_984)
    live = [setting.alloc(419_328) for _ in range(4)]
    live[1] = None
    with pytest.raises(setting.oom) as caught:
        setting.alloc(600_000)
    assert caught.value.memguard_requested == 600_000
    assert setting.pool.total_bytes() == setting.pool.used_bytes() == 3 * 419_328
    assert setting.taken() == 2 * MIB
    live.append(setting.alloc(400_000))
    assert setting.taken() == 2 * MIB


def test_an_idle_piece_serves_what_its_rounded_size_would_not_fit_into(model: Model) -> None:
    """6.5 MiB are 8 MiB of pages; a piece of 7 MiB is idle beside one that is in use."""
    setting = model("h200")
    setting.apply(8 * MIB)
    setting.alloc(8 * MIB)
    live = [setting.alloc(MIB), setting.alloc(13 * MIB // 2)]
    assert setting.taken() == setting.pool.total_bytes() == 8 * MIB and len(live) == 2
    with pytest.raises(setting.oom):
        setting.alloc(MIB)
    assert setting.taken() == 8 * MIB


# what a trim gives back


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_reclaimable_comes_back(model: Model, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, as far as the pool counts it: of a slab it counts the pieces, and not the gaps."""
    monkeypatch.setattr(blocks, "FRESH", 0)
    setting, rng = model("h200"), random.Random(f"{kind} {seed}")
    setting.apply(1024 * MIB)
    streams = [setting.cp.cuda.Stream(number) for number in range(3)]
    live: list[Any] = []
    known = slab = 0
    for step in range(600):
        low, high = KINDS[kind]
        with streams[rng.randrange(3) if kind == "of pages" else 0]:
            live.append(setting.alloc(round(2 ** rng.uniform(low.bit_length() - 1, high.bit_length() - 1))))
        while live and rng.random() < 0.45:
            live.pop(rng.randrange(len(live)))
        if rng.random() < 0.02:
            live.clear()
        if step % 5 == 0:
            usage, before = setting.usage(), setting.taken()
            setting.framework.trim(setting.first)
            back = before - setting.taken()
            assert usage.held is not None and usage.in_use is not None
            assert usage.reclaimable == min(back, usage.held - usage.in_use), step
            known += back > 0
            slab += 0 < usage.reclaimable < back
    assert known > 2 and (slab > 0) == (kind in ("tiny", "of a slab", "any"))


def test_a_slab_in_which_a_siblings_piece_lies_is_not_reclaimable(model: Model) -> None:
    """memguard counts the pieces of its allocators. Of a piece that it does not see it knows only if there is room."""
    setting = model("h200")
    setting.apply(64 * MIB)
    memory = [setting.alloc(400_000), setting.alloc(400_000)]
    sibling = setting.card.gpus[0].card.take(512)
    memory.clear()
    assert setting.usage().reclaimable == setting.usage().held
    slabs[setting.first.uuid].add_piece(sibling)
    setting.framework._idle.clear()
    assert setting.usage().reclaimable == 0
    memory = [setting.alloc(3 * MIB)]
    memory.clear()
    assert setting.usage().reclaimable == 4 * MIB
    setting.framework.trim(setting.first)
    assert setting.taken() == 2 * MIB


def test_of_a_pool_that_is_not_capped_only_full_slabs_are_known_to_come_back(model: Model) -> None:
    setting = model("h200")
    live = [setting.alloc(512 << 10) for _ in range(6)] + [setting.alloc(3 * MIB + 1)]
    live.clear()
    usage = setting.usage()
    assert usage.reclaimable == 2 * MIB + 4 * MIB and setting.taken() == 8 * MIB
    setting.framework.trim(setting.first)
    assert setting.taken() == 0


def test_a_figure_is_used_again_only_for_a_moment(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held and in use are the same before and after; what is split is not."""
    setting = model("h200")
    setting.apply(64 * MIB)
    first, second, third = setting.alloc(8 * MIB), setting.alloc(4 * MIB), setting.alloc(4 * MIB)
    del first, second, third
    part = [setting.alloc(2 * MIB)]
    assert setting.usage() == Usage(16 * MIB, 2 * MIB, 12 * MIB), "of one of 4 MiB"
    hole, part = [setting.alloc(2 * MIB), setting.alloc(4 * MIB)], [setting.alloc(2 * MIB)]
    hole.clear()
    assert setting.usage()[:2] == (16 * MIB, 2 * MIB)
    monkeypatch.setattr(blocks, "FRESH", 0)
    assert setting.usage().reclaimable == 8 * MIB and len(part) == 1, "of the one of 8 MiB"


def test_the_blocks_of_a_pool_before_are_counted(model: Model) -> None:
    setting = model("h200")
    setting.apply(64 * MIB)
    arrays = [setting.alloc(8 * MIB), setting.alloc(4 * MIB)]
    setting.cp.cuda.set_allocator(setting.cp.cuda.MemoryPool().malloc)
    arrays.append(setting.alloc(6 * MIB))
    del arrays[0], arrays[-1]
    assert setting.usage() == Usage(18 * MIB, 4 * MIB, 14 * MIB)
    setting.framework.trim_partly(setting.first, 1)
    assert setting.taken() == 4 * MIB


def test_the_driver_gives_back_a_part_of_its_pool(model: Model) -> None:
    """The async pool takes from it. What comes back is known if nothing is live, or if it is less than a piece."""
    setting = model("h200")
    setting.cp.cuda.set_allocator(setting.cp.cuda.MemoryAsyncPool().malloc)
    setting.apply()
    live = [setting.alloc(64 * MIB) for _ in range(4)]
    assert setting.usage() == Usage(256 * MIB, 256 * MIB, 0)
    live.pop()
    assert setting.usage() == Usage(256 * MIB, 192 * MIB, None)
    live.clear()
    assert setting.usage() == Usage(256 * MIB, 0, 256 * MIB)
    setting.framework.trim_partly(setting.first, 40 * MIB)
    assert setting.taken() == 192 * MIB
    setting.framework.trim_partly(setting.first, 500 * MIB)
    assert setting.taken() == 0


# shortages


def test_a_shortage_names_the_gpu_that_the_thread_uses(model: Model) -> None:
    setting = model()
    last = setting.number - 1
    uuids = [setting.first.uuid, setting.second.uuid]
    setting.apply(64 * MIB, 64 * MIB)
    arrays, asked = [setting.alloc(48 * MIB, ordinal) for ordinal in range(setting.number)], list[Shortage]()

    def short(shortage: Shortage) -> bool:
        asked.append(shortage)
        setting.framework.resize({uuids[0]: 64 * MIB} | {uuids[last]: 96 * MIB})
        return True

    setting.framework.on_shortage = short
    arrays.append(setting.alloc(20 * MIB, last))
    assert asked == [Shortage("cupy", uuids[last], 20 * MIB, 20 * MIB, False)]
    assert setting.taken(last) == 68 * MIB and len(arrays) == last + 2


def test_what_the_pools_before_leave_is_what_a_raised_cap_adds_to(model: Model) -> None:
    setting = model("h200")
    setting.apply(32 * MIB)
    large = setting.alloc(24 * MIB)
    setting.cp.cuda.set_allocator(setting.cp.cuda.MemoryPool().malloc)
    setting.framework.on_shortage = lambda shortage: setting.framework.resize({setting.first.uuid: 48 * MIB}) is None
    small = setting.alloc(20 * MIB)
    assert setting.taken() == 44 * MIB and setting.framework.drift() == [] and large is not small

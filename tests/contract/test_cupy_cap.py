"""What CuPy's cap refuses, judged by the driver's pages of `card`, which knows nothing of memguard."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from test_cupy_model import Model, Setting, model

from memguard._frameworks.cupy import adapter
from memguard._frameworks.driver_pages import TINY, whole_share
from memguard._units import MIB

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

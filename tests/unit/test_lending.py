"""The caps of elastic frameworks: what always holds, whoever asks for what."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from memguard._base.units import GIB, GRANULE, MIB, round_up
from memguard._guard.lending import CapChange, CapState, plan_raise, rebalance

NAMES = ("torch", "cupy", "pycuda", "numba", "jax")
granules = st.integers(1, 400).map(lambda count: count * GRANULE)


@st.composite
def scenes(draw: st.DrawFn, elastic_above: bool = False) -> tuple[dict[str, CapState], int, str]:
    """Frameworks whose caps fit the room, in any state that the rules allow; and one of them. A cap that does not move
    may have been lowered below what is held; with `elastic_above` one that moves, too."""
    parts, room = {}, 0
    for name in draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True)):
        least = draw(granules)
        elastic = name != "jax" and draw(st.booleans())
        most = least + (draw(granules) if elastic else 0)
        cap = least + draw(st.integers(0, (most - least) // GRANULE)) * GRANULE
        above = (elastic_above or not elastic) and draw(st.booleans())
        held = cap + draw(granules) if above else draw(st.integers(0, cap))
        parts[name] = CapState(least, most, cap, held, draw(st.integers(0, held)), name != "torch")
        room += cap
    return parts, room + draw(st.integers(0, 200)) * GRANULE, draw(st.sampled_from(sorted(parts)))


def after(parts: Mapping[str, CapState], caps: Mapping[str, int]) -> dict[str, CapState]:
    return {name: part._replace(cap=caps.get(name, part.cap)) for name, part in parts.items()}


def had(parts: Mapping[str, CapState]) -> int:
    """What the process may come to hold with these caps."""
    return sum(max(part.cap, round_up(part.held)) for part in parts.values())


def holds(parts: Mapping[str, CapState], room: int, caps: Mapping[str, int]) -> None:
    """Each step of the change leaves caps that fit the room beside what is held above one, none below a min or below
    what is held."""
    now = dict(parts)
    for name, cap in caps.items():
        assert parts[name].least <= cap <= parts[name].most
        assert cap >= min(round_up(parts[name].held), parts[name].cap)
        assert cap % GRANULE == 0
        now[name] = now[name]._replace(cap=cap)
        assert sum(part.cap for part in now.values()) <= room and had(now) <= max(room, had(parts))
    if any(cap > parts[name].cap for name, cap in caps.items()):
        assert had(now) <= room


@given(scenes(), granules)
def test_what_is_lent_is_never_anybodys_min_nor_live(scene: tuple[dict[str, CapState], int, str], more: int) -> None:
    parts, room, who = scene
    holds(parts, room, plan_raise(parts, room, who, parts[who].cap + 1).caps)
    loan = plan_raise(parts, room, who, parts[who].held + more)
    holds(parts, room, loan.caps)
    if loan.caps:
        assert loan.caps[who] >= parts[who].held + more and not loan.trims and not loan.missing
        assert all(cap < parts[name].cap for name, cap in loan.caps.items() if name != who)


@given(scenes(), granules)
def test_a_request_within_its_min_asks_nobody(scene: tuple[dict[str, CapState], int, str], more: int) -> None:
    parts, room, who = scene
    assert plan_raise(parts, room, who, min(more, parts[who].least)) == CapChange({})


@given(scenes(), granules)
def test_it_is_refused_only_if_all_caches_together_would_not_serve(
    scene: tuple[dict[str, CapState], int, str], more: int
) -> None:
    parts, room, who = scene
    wanted = parts[who].held + more
    others = [part for name, part in parts.items() if name != who]
    # What stays with a sibling whatever happens: its min, or what it has live above that.
    stays = sum(max(part.least, round_up(max(part.held - part.idle, 0))) for part in others)
    loan = plan_raise(parts, room, who, wanted)
    if wanted <= parts[who].most and round_up(wanted) + stays <= room:
        assert not loan.missing
    if loan.missing:
        assert not loan.caps and not loan.trims


@example(
    (
        {
            "torch": CapState(2 * MIB, 2 * MIB, 2 * MIB, requests_room=False),
            "cupy": CapState(2 * MIB, 4 * MIB, 4 * MIB),
            "jax": CapState(2 * MIB, 2 * MIB, 2 * MIB, 116 * MIB, 114 * MIB),
            "pycuda": CapState(2 * MIB, 2 * MIB, 2 * MIB),
            "numba": CapState(102 * MIB, 104 * MIB, 102 * MIB),
        },
        112 * MIB,
        "numba",
    ),
    104 * MIB,
)
@given(scenes(), granules)
def test_following_what_it_says_ends_served_and_calls_no_cache_in_vain(
    scene: tuple[dict[str, CapState], int, str], more: int
) -> None:
    parts, room, who = scene
    wanted, called = parts[who].held + more, 0
    above = max(had(parts) - room, 0)  # held above caps, beyond the room: called before anything is given
    for _ in range(3 * len(parts)):  # rounding may call the rest of a granule
        loan = plan_raise(parts, room, who, wanted)
        assert not (called and loan.missing)
        if not loan.trims:
            break
        name, size = loan.trims[0]
        part = parts[name]
        assert 0 < size <= part.idle
        assert all(parts[other].cached <= part.cached for other in parts if other != who)
        parts = {**parts, name: part._replace(held=part.held - size, idle=part.idle - size)}
        called += size
    assert not loan.trims
    assert called == 0 or called < wanted + above + GRANULE * len(parts)


@example(
    (
        {
            "cupy": CapState(2 * MIB, 6 * MIB, 6 * MIB),
            "pycuda": CapState(2 * MIB, 2 * MIB, 2 * MIB, 18 * MIB),
            "jax": CapState(2 * MIB, 2 * MIB, 2 * MIB, 118 * MIB),
            "torch": CapState(2 * MIB, 4 * MIB, 2 * MIB, requests_room=False),
            "numba": CapState(2 * MIB, 2 * MIB, 2 * MIB),
        },
        144 * MIB,
        "cupy",
    )
)
@example(
    (
        {
            "torch": CapState(2 * MIB, 400 * MIB, 2 * MIB, 100 * MIB, requests_room=False),
            "cupy": CapState(2 * MIB, 2 * MIB, 2 * MIB),
        },
        142 * MIB,
        "torch",
    )
)
@given(scenes(elastic_above=True))
def test_a_tick_moves_something_once_under_a_constant_load(scene: tuple[dict[str, CapState], int, str]) -> None:
    parts, room, _ = scene
    caps = rebalance(parts, room)
    holds(parts, room, caps)
    assert all(not parts[name].requests_room for name, cap in caps.items() if cap > parts[name].cap)
    assert rebalance(after(parts, caps), room) == {}


def test_what_is_held_above_a_lowered_cap_is_lent_to_nobody() -> None:
    parts = {
        "torch": CapState(GIB, 30 * GIB, 12 * GIB, 2 * GIB, requests_room=False),
        "cupy": CapState(GIB, 30 * GIB, 2 * GIB, 2 * GIB),
        "numba": CapState(GIB, GIB, GIB, 14 * GIB),
    }
    refused = plan_raise(parts, 28 * GIB, "cupy", 13 * GIB)
    assert (refused.missing, refused.live) == (GIB, {"torch": GIB, "numba": 13 * GIB})
    assert plan_raise(parts, 28 * GIB, "cupy", 12 * GIB).caps == {"torch": 2 * GIB, "cupy": 12 * GIB}
    cached = {**parts, "numba": parts["numba"]._replace(idle=9 * GIB)}
    assert plan_raise(cached, 28 * GIB, "cupy", 13 * GIB).trims == (("numba", GIB),)
    assert rebalance(parts, 28 * GIB) == {}, "it fits"
    assert rebalance(parts, 20 * GIB) == {"torch": 4 * GIB}, "eight too much, which nobody uses"
    assert rebalance(parts, 10 * GIB) == {"torch": 2 * GIB}, "as far as that goes"


def test_what_is_held_above_its_own_cap_is_not_charged_to_the_free_room_twice() -> None:
    parts = {
        "torch": CapState(GIB, 16 * GIB, 2 * GIB, 5 * GIB, requests_room=False),
        "cupy": CapState(GIB, GIB, GIB),
    }
    assert rebalance(parts, 7 * GIB) == {"torch": 6 * GIB}, "the one that is free becomes headroom"
    assert rebalance(parts, 6 * GIB) == {"torch": 5 * GIB}
    assert rebalance(parts, 5 * GIB) == {}, "one too much"
    reserved = {**parts, "torch": parts["torch"]._replace(reserved=2 * GIB)}
    assert rebalance(reserved, 5 * GIB) == {"torch": 4 * GIB}, "three are held, one is free"


def test_unlent_memory_goes_first_then_what_is_unused_then_cache() -> None:
    siblings = {
        "torch": CapState(2 * GIB, 12 * GIB, 6 * GIB, 5 * GIB, 3 * GIB, requests_room=False),
        "cupy": CapState(2 * GIB, 12 * GIB, 4 * GIB, 1 * GIB, 0),
    }
    room = 12 * GIB  # one is lent to nobody

    def for_numba(wanted: int, most: int | None = None, **other: CapState) -> CapChange:
        numba = CapState(1 * GIB, most or wanted, 1 * GIB, 1 * GIB, 0)
        return plan_raise({**siblings, **other, "numba": numba}, room, "numba", wanted)

    assert for_numba(2 * GIB).caps == {"numba": 2 * GIB}
    # What can ask again lends first, and torch keeps its headroom.
    assert for_numba(4 * GIB).caps == {"cupy": 2 * GIB, "numba": 4 * GIB}
    cache = for_numba(6 * GIB)
    assert (cache.caps, cache.trims) == ({}, (("torch", GIB),))
    too_much = for_numba(9 * GIB)
    assert (too_much.caps, too_much.trims, too_much.missing, too_much.live) == ({}, (), GIB, {})
    live = for_numba(6 * GIB, torch=siblings["torch"]._replace(idle=0))
    assert (live.missing, live.live) == (GIB, {"torch": 3 * GIB})


def test_caches_whose_reclaimable_bytes_are_known_are_trimmed_first() -> None:
    """As for a GPU that is full: a trim of the others may return nothing."""
    parts = {
        "torch": CapState(GIB, 16 * GIB, 9 * GIB, 9 * GIB, 8 * GIB, sure=False),
        "pycuda": CapState(GIB, 16 * GIB, 5 * GIB, 5 * GIB, 4 * GIB),
        "numba": CapState(GIB, 16 * GIB, 2 * GIB, 2 * GIB),
    }
    assert plan_raise(parts, 16 * GIB, "numba", 5 * GIB).trims == (("pycuda", 3 * GIB),)
    assert plan_raise(parts, 16 * GIB, "numba", 8 * GIB).trims == (("pycuda", 4 * GIB), ("torch", 2 * GIB))


def test_what_is_missing_is_in_whole_pages_so_that_asking_for_so_much_less_serves() -> None:
    """A room is no whole number of pages, and caps are."""
    room = 16 * GIB - 5 * MIB // 2
    parts = {
        "torch": CapState(GIB, 15 * GIB, GIB, requests_room=False),
        "cupy": CapState(GIB, 15 * GIB, 15 * GIB - 4 * MIB),
    }
    most = plan_raise(parts, room, "torch", 15 * GIB)
    assert most.missing % GRANULE == 0 and most.missing > 0
    assert plan_raise(parts, room, "torch", 15 * GIB - most.missing).caps["torch"] >= 15 * GIB - most.missing


def test_a_cap_rises_further_than_it_must_by_what_nobody_uses() -> None:
    """So that it is not asked for at each request. Whoever can ask keeps half of it, torch its headroom."""
    parts = {
        "torch": CapState(2 * GIB, 16 * GIB, 6 * GIB, 4 * GIB, requests_room=False),
        "cupy": CapState(GIB, 16 * GIB, 5 * GIB, GIB),
        "numba": CapState(GIB, 17 * GIB, GIB, GIB),
    }
    assert plan_raise(parts, 13 * GIB, "numba", 2 * GIB).caps == {"cupy": 4 * GIB, "numba": 3 * GIB}
    parts["numba"] = CapState(GIB, 17 * GIB, 5 * GIB, 5 * GIB)
    assert plan_raise(parts, 17 * GIB, "numba", 6 * GIB).caps == {"torch": 5 * GIB, "cupy": 3 * GIB, "numba": 9 * GIB}
    parts["cupy"] = CapState(GIB, 16 * GIB, 8 * GIB, GIB)
    assert plan_raise(parts, 19 * GIB, "torch", 7 * GIB).caps == {"cupy": 5 * GIB, "torch": 9 * GIB}, (
        "twice its headroom"
    )


def test_a_framework_that_cannot_ask_gets_headroom_from_those_that_can() -> None:
    parts = {
        "torch": CapState(GIB, 8 * GIB, GIB, GIB - MIB, requests_room=False),
        "cupy": CapState(GIB, 8 * GIB, 7 * GIB, 2 * GIB, 0),
    }
    assert rebalance(parts, 8 * GIB) == {"cupy": 6 * GIB, "torch": 2 * GIB}


@pytest.mark.parametrize("wanted", [9 * GIB, 100 * GIB])
def test_above_its_max_nothing_is_lent(wanted: int) -> None:
    parts = {"cupy": CapState(GIB, 8 * GIB, GIB, 0, 0), "numba": CapState(GIB, GIB, GIB, GIB, GIB)}
    assert plan_raise(parts, 16 * GIB, "cupy", wanted) == CapChange({}, missing=wanted - 8 * GIB)

"""Computes how elastic caps move between min and max, and which idle caches are trimmed. Pure.

On each GPU the room for all caps is limit − reserve, in bytes. The room above the sum of the minima is lent to elastic
frameworks. The rules:

- The free room is the room less the sum, over all frameworks, of the larger of cap and held bytes
  (`_budget.policy.room_left`), because lowering a cap below live arrays frees no memory. If the free room is negative,
  nothing is lent, and a monitor tick lowers elastic caps by their unused headroom.
- The sum of the caps never exceeds the room, and no cap is below its framework's min. So a framework can always
  allocate up to its min without waiting, however much the other frameworks on the GPU (its siblings) hold.
- A cap is never lowered below the bytes that its framework holds plus the bytes that the framework's workloads have
  reserved. So a changed cap never affects live arrays, and lent memory that is idle can be called back for any
  framework.
- A framework that needs more memory is given, in this order: room that is not lent; lent room that is unused; lent
  memory that is only cached, after a trim has returned this memory to the driver. Caches whose reclaimable bytes are
  known are trimmed before other caches, and larger caches before smaller caches. A cache is trimmed only if the request
  needs the memory and all caches together are large enough.
- Requests are served in order of arrival. A framework whose allocator cannot call memguard when an allocation fails
  (torch) keeps headroom (cap − held bytes) instead. A monitor tick fills headroom from unused room, first for the
  framework that has borrowed the smallest fraction of its span (max − min). The headroom of such frameworks is lent to
  other frameworks last.

Hysteresis: headroom below a threshold is filled to twice the threshold. So under a constant load, caps move at only one
tick.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from memguard._base.types import Usage
from memguard._base.units import GRANULE, MIB, round_down, round_up
from memguard._budget.policy import room_left, trim_order
from memguard._frameworks.specs import NEVER_GIVE_BACK

_STEP = 16
"""A raised cap rises further by 1/`_STEP` of its span (max − min), or by its borrowed bytes (cap − min) if that is
more, as far as unused room allows. Without this margin, each further request would raise the cap again."""
_LOW = 64 * MIB
"""Minimum headroom (cap − held bytes) of a framework that cannot request room; 1/`_STEP` of the framework's max if that
is more."""


class CapState(NamedTuple):
    """The cap and the memory of one allocator on one GPU, in bytes.

    `least` and `most` bound `cap`; both equal `cap` if the cap is fixed. `reserved`: the bytes that the allocator's
    workloads have reserved and not yet allocated. `held`: the bytes taken from the driver plus `reserved`. `idle`: an
    upper bound of the bytes of `held` that a trim would return. `sure`: the framework reports how much of its cache a
    trim returns. `requests_room`: the allocator calls memguard when an allocation fails, so it needs no headroom.
    """

    least: int
    most: int
    cap: int
    held: int = 0
    idle: int = 0
    requests_room: bool = True
    reserved: int = 0
    sure: bool = True

    @property
    def cap_and_held(self) -> tuple[int, int]:
        """The arguments of `room_left`: the cap, and the bytes taken from the driver in whole granules."""
        return self.cap, round_up(max(self.held - self.reserved, 0))

    @property
    def unused(self) -> int:
        """The unused headroom, by which the cap can be lowered without trimming."""
        return max(self.cap - max(self.least, round_up(self.held)), 0)

    @property
    def cached(self) -> int:
        """The bytes, in addition to `unused`, that a trim of the cache would make available, including cached bytes
        above the cap."""
        stays = max(self.least, round_up(max(self.held - self.idle, 0)))
        return max(max(self.cap_and_held) - self.unused - stays, 0)


class CapChange(NamedTuple):
    """The steps that raise a cap, in bytes.

    `caps`: the changed caps, lowered caps first; empty if `trims` or `missing` is set. `trims`: the siblings to trim
    first, and the bytes of each; after a trim, the caller plans again. `missing`: the bytes that are not available.
    `live`, set only with `missing`: the bytes that each sibling holds in live arrays above its min, or above its cap if
    the cap is fixed.
    """

    caps: Mapping[str, int]
    trims: tuple[tuple[str, int], ...] = ()
    missing: int = 0
    live: Mapping[str, int] = {}


def plan_raise(states: Mapping[str, CapState], room: int, requester: str, wanted: int) -> CapChange:
    """Plan the steps that raise the cap of `requester` to at least `wanted` bytes. `room` is limit − reserve."""
    own, wanted = states[requester], round_up(wanted)
    if wanted <= own.cap:
        return CapChange({})
    if wanted > own.most:
        return CapChange({}, missing=wanted - own.most)
    siblings = {name: state for name, state in states.items() if name != requester}
    need = wanted - room_left(room, [state.cap_and_held for state in siblings.values()])
    caps, need = _lower_unused(siblings, need)
    if need <= 0:
        return CapChange({**caps, **_raise_further(siblings, caps, requester, own, wanted, -need)})
    cached = {name: state.cached for name, state in siblings.items()}
    trims = []
    for name in sorted(cached, key=lambda one: trim_order(cached[one], siblings[one].sure)):
        if need > 0 and cached[name] > 0:
            trims.append((name, min(cached[name], need)))
            need -= cached[name]
    if need <= 0:
        return CapChange({}, tuple(trims))
    # All caches together are too small.
    live = {name: stuck for name, state in siblings.items() if (stuck := _live_above_min(state)) > 0}
    return CapChange({}, missing=round_up(need), live=live)  # rounded up because caps are multiples of the granule


def _raise_further(
    siblings: Mapping[str, CapState], caps: Mapping[str, int], requester: str, own: CapState, wanted: int, spare: int
) -> dict[str, int]:
    """Raise the cap of `requester` beyond `wanted`, first by free room (`spare` bytes), then by siblings' unused
    headroom. Returns the raised cap, and the siblings' caps that are lowered further than in `caps`.

    If `requester` can request room, a sibling that can request room keeps half of its unused headroom. A sibling that
    cannot request room keeps headroom of `_headroom_threshold`. If `requester` cannot request room, the extra bytes
    become the headroom of `requester`.
    """
    step = (
        max((own.most - own.least) // _STEP, own.cap - own.least) if own.requests_room else 2 * _headroom_threshold(own)
    )
    step = round_down(max(min(step, own.most - wanted), 0))
    got = min(round_down(spare), step)
    lowered: dict[str, int] = {}
    for name, state in sorted(siblings.items(), key=lambda item: not item[1].requests_room):
        now = caps.get(name, state.cap)
        unused = state.unused - (state.cap - now)
        left = (unused // 2 if own.requests_room else 0) if state.requests_room else _headroom_threshold(state)
        if (taken := min(round_down(max(unused - left, 0)), step - got)) > 0:
            lowered[name] = now - taken
            got += taken
    return {**lowered, requester: wanted + got}


def rebalance(states: Mapping[str, CapState], room: int) -> dict[str, int]:
    """The caps that change at a monitor tick, lowered caps first, to fill the headroom of frameworks that cannot
    request room.

    This headroom comes from free room, and from unused headroom of frameworks that can request room. If the free room
    is negative, caps are first lowered by their unused headroom.
    """
    spare = room_left(room, [state.cap_and_held for state in states.values()])
    lowered, missing = _lower_unused(states, -spare)
    if lowered:
        spare = -missing
        states = {name: state._replace(cap=lowered.get(name, state.cap)) for name, state in states.items()}
    short_of_headroom = {
        name: state
        for name, state in states.items()
        if not state.requests_room and state.cap - state.held < _headroom_threshold(state)
    }
    if not short_of_headroom:
        return lowered
    lenders = {name: round_down(state.unused) for name, state in states.items() if state.requests_room}
    raised: dict[str, int] = {}
    for name, state in sorted(short_of_headroom.items(), key=lambda item: _borrowed_share(item[1])):
        wanted = min(round_down(state.most), round_up(state.held + 2 * _headroom_threshold(state)))
        need = round_up(wanted - state.cap) if wanted > state.cap else 0
        # `room_left` already subtracts bytes held above the cap. So a cap raised to the held bytes takes no further
        # room.
        got = min(max(state.cap_and_held) - state.cap, need) if spare >= 0 else 0
        lent = min(round_down(max(spare, 0)), need - got)
        spare -= lent
        got += lent
        for lender in sorted(lenders, key=lambda one: -lenders[one]):
            taken = min(lenders[lender], need - got)
            if taken > 0:
                lenders[lender] -= taken
                lowered[lender] = lowered.get(lender, states[lender].cap) - taken
                got += taken
        if got:
            raised[name] = state.cap + got
    return {**lowered, **raised}


def plan_call_back(states: Mapping[str, CapState], room: int) -> dict[str, int]:
    """The lowered caps if the free room is negative, which happens if a framework holds more than its cap."""
    return _lower_unused(states, -room_left(room, [state.cap_and_held for state in states.values()]))[0]


def _lower_unused(states: Mapping[str, CapState], need: int) -> tuple[dict[str, int], int]:
    """Lower caps by their unused headroom until `need` bytes of the budget are unassigned. Releases no memory.

    Returns the lowered caps and the bytes still missing (negative if more than `need` became unassigned). Lowers the
    caps of frameworks that can request room first, and among these the cap with the most unused headroom.
    """
    caps: dict[str, int] = {}
    unused = {name: state.unused for name, state in states.items()} if need > 0 else {}
    for name in sorted(unused, key=lambda one: (not states[one].requests_room, -unused[one])):
        if need > 0 and (taken := min(round_down(unused[name]), round_up(need))) > 0:
            caps[name] = states[name].cap - taken
            need -= taken
    return caps, need


class ReclaimableCache(NamedTuple):
    """The cache of a sibling, in bytes. `idle`: the bytes that a trim is expected to return. `most`: the whole cache.

    `sure`: the framework reports how much of its cache is reclaimable. Otherwise `idle` is an upper bound.
    """

    name: str
    idle: int
    most: int
    sure: bool


def reclaimable_caches(usages: Mapping[str, Usage | None], requester: str) -> list[ReclaimableCache]:
    """The caches of the siblings of `requester` from which a trim can return memory."""
    found = []
    for name, usage in usages.items():
        if name == requester or usage is None or name in NEVER_GIVE_BACK or usage.held is None or usage.in_use is None:
            continue
        cached = max(usage.held - usage.in_use, usage.reclaimable or 0)  # `reclaimable` may be newer than `held`
        idle = cached if usage.reclaimable is None else usage.reclaimable
        if idle > 0:
            found.append(ReclaimableCache(name, idle, cached, usage.reclaimable is not None))
    return found


def pick_donor(found: Iterable[ReclaimableCache], short: int) -> ReclaimableCache | None:
    """Pick the sibling to trim first if `short` bytes are missing. This is the sibling with the largest `sure` cache,
    or with the largest cache if none is `sure`.

    None if all caches together are too small, because then the request fails even after trims.
    """
    ordered = sorted(found, key=lambda one: trim_order(one.idle, one.sure))
    return ordered[0] if ordered and sum(one.most for one in ordered) >= short else None


def _live_above_min(state: CapState) -> int:
    """The bytes that the framework holds above its min in live arrays."""
    return max(state.held - state.reserved - state.least - state.idle, 0)


def _headroom_threshold(state: CapState) -> int:
    return max(state.most // _STEP, _LOW) if state.cap < state.most else 0


def _borrowed_share(state: CapState) -> float:
    return (state.cap - state.least) / max(state.most - state.least, GRANULE)

"""How elastic caps move between min and max, and whose idle cache goes. Pure: figures in, caps out.

On each GPU the room is limit − reserve. What is above the sum of the minima is lent. The rules:

- What is given away leaves room for each cap, and for what is held above one (`_budget.policy.room_left`): a cap that
  was lowered below live arrays frees none of them. If all have more than the room already, nothing is lent until they
  have less, and a tick calls back what is lent and not used.
- The caps never add up to more than the room, and no cap is below its min. So whatever others hold, a framework has its
  min at once: it asks nobody for it.
- A cap is lowered only to what its framework holds (or has promised to a block of work). So what is live is never
  taken, and what is lent and idles comes back to whoever asks for it.
- Who needs more gets, in this order: what is lent to nobody; what is lent and not used; what is lent and only cached,
  most first, after it was given back to the driver. No cache goes that is not needed, and none if it would not suffice.
- First come, first served. Those whose allocators cannot ask within a request (torch) keep some headroom: at a tick the
  one that has the smallest part of what it may borrow is served first, from what nobody uses. They are the last whose
  headroom is taken.

Hysteresis: headroom is filled up to twice the level below which it is filled. So under a constant load a tick moves
something once, and nothing after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from memguard._base.specs import NEVER_GIVE_BACK
from memguard._base.types import Usage
from memguard._base.units import GRANULE, MIB, round_down, round_up
from memguard._budget.policy import room_left

_STEP = 16
"""A cap that rises goes on by this part of its span (max − min), or by as much as it has borrowed if that is more, as
far as nobody uses that: one that rose by a request at a time would be asked for at each."""
_LOW = 64 * MIB
"""The least headroom that a framework which cannot ask is to have, and a sixteenth of its max if that is more."""


class Part(NamedTuple):
    """One framework's part of one GPU, in bytes.

    `least` and `most` bound its cap; both are the cap if it cannot move. `held` is what it has of the driver, and what
    was promised to a block of work beyond that. `idle` is the part of `held` that it could give back, at most. `asks`:
    its allocator asks within a request that it cannot serve, so it needs no headroom. `promised` is the part of `held`
    that it has not taken yet.
    """

    least: int
    most: int
    cap: int
    held: int = 0
    idle: int = 0
    asks: bool = True
    promised: int = 0

    @property
    def taken(self) -> tuple[int, int]:
        """What `room_left` counts: its cap, and what it has taken from the driver, in whole granules."""
        return self.cap, round_up(max(self.held - self.promised, 0))

    @property
    def unused(self) -> int:
        """What the cap can be lowered by, with nothing given back."""
        return max(self.cap - max(self.least, round_up(self.held)), 0)

    @property
    def cached(self) -> int:
        """What comes back beyond that, once its cache was given back: of its cap, or of what it holds above that."""
        stays = max(self.least, round_up(max(self.held - self.idle, 0)))
        return max(max(self.taken) - self.unused - stays, 0)


class CapChange(NamedTuple):
    """What to do for a framework that needs a larger cap, in bytes.

    `caps` are those that change, the lowered ones first: empty as long as something is missing. `calls` are siblings
    whose cache has to go before that, with how much of it; then ask again. `missing` is what cannot be had. `live` is
    what siblings hold in live arrays above their min, or above the cap of one that does not move.
    """

    caps: Mapping[str, int]
    calls: tuple[tuple[str, int], ...] = ()
    missing: int = 0
    live: Mapping[str, int] = {}


def plan_raise(parts: Mapping[str, Part], room: int, who: str, wanted: int) -> CapChange:
    """What has to change so that the cap of `who` is at least `wanted` bytes, in a room of so many."""
    own, wanted = parts[who], round_up(wanted)
    if wanted <= own.cap:
        return CapChange({})
    if wanted > own.most:
        return CapChange({}, missing=wanted - own.most)
    siblings = {name: part for name, part in parts.items() if name != who}
    need = wanted - room_left(room, [part.taken for part in siblings.values()])
    caps: dict[str, int] = {}
    for name, part in sorted(siblings.items(), key=lambda item: (not item[1].asks, -item[1].unused)):
        if need > 0 and (taken := min(round_down(part.unused), round_up(need))) > 0:
            caps[name] = part.cap - taken
            need -= taken
    if need <= 0:
        return CapChange({**caps, **_further(siblings, caps, room, who, own, wanted)})
    live = {name: stuck for name, part in siblings.items() if (stuck := _live(part)) > 0}
    calls = []
    for name, part in sorted(siblings.items(), key=lambda item: -item[1].cached):
        if need > 0 and part.cached > 0:
            calls.append((name, min(part.cached, need)))
            need -= part.cached
    if need > 0:  # it would not suffice
        return CapChange({}, missing=round_up(need), live=live)  # whole pages, as caps are
    return CapChange({}, tuple(calls), live=live)


def _further(
    siblings: Mapping[str, Part], caps: Mapping[str, int], room: int, who: str, own: Part, wanted: int
) -> dict[str, int]:
    """The cap of `who`, further than it asked for by what nobody uses, and those that are lowered for that.

    Of the unused memory of siblings that can ask for it again, half is left to them; of that of others, their headroom.
    A framework that cannot ask gets headroom itself.
    """
    step = max((own.most - own.least) // _STEP, own.cap - own.least) if own.asks else 2 * _low(own)
    step = round_down(max(min(step, own.most - wanted), 0))
    now = {name: caps.get(name, part.cap) for name, part in siblings.items()}
    beside = room_left(room, [part._replace(cap=now[name]).taken for name, part in siblings.items()])
    got = min(round_down(max(beside - wanted, 0)), step)
    lowered: dict[str, int] = {}
    for name, part in sorted(siblings.items(), key=lambda item: not item[1].asks):
        unused = part._replace(cap=now[name]).unused
        left = (unused // 2 if own.asks else 0) if part.asks else _low(part)
        if (taken := min(round_down(max(unused - left, 0)), step - got)) > 0:
            lowered[name] = now[name] - taken
            got += taken
    return {**lowered, who: wanted + got}


def rebalance(parts: Mapping[str, Part], room: int) -> dict[str, int]:
    """The caps that change at a tick, the lowered ones first: headroom for those that cannot ask within a request.

    It comes from what is lent to nobody, and from what those have unused that can ask for it again. There is none as
    long as all have more than the room: then what is unused is called back.
    """
    spare = room_left(room, [part.taken for part in parts.values()])
    if spare < 0:
        return called_back(parts, room)
    lenders = {name: round_down(part.unused) for name, part in parts.items() if part.asks}
    poor = {name: part for name, part in parts.items() if not part.asks and part.cap - part.held < _low(part)}
    lowered: dict[str, int] = {}
    raised: dict[str, int] = {}
    for name, part in sorted(poor.items(), key=lambda item: _part_of_span(item[1])):
        wanted = min(round_down(part.most), round_up(part.held + 2 * _low(part)))
        need = round_up(wanted - part.cap) if wanted > part.cap else 0
        got = min(round_down(spare), need)
        spare -= got
        for lender in sorted(lenders, key=lambda one: -lenders[one]):
            taken = min(lenders[lender], need - got)
            if taken > 0:
                lenders[lender] -= taken
                lowered[lender] = lowered.get(lender, parts[lender].cap) - taken
                got += taken
        if got:
            raised[name] = part.cap + got
    return {**lowered, **raised}


def called_back(parts: Mapping[str, Part], room: int) -> dict[str, int]:
    """The caps to lower because all together have more than the room, as one holds more than its cap: by what nobody
    uses, first of those that can ask for it again."""
    need, lowered = -room_left(room, [part.taken for part in parts.values()]), {}
    for name, part in sorted(parts.items(), key=lambda item: (not item[1].asks, -item[1].unused)):
        if need > 0 and (back := min(round_down(part.unused), round_up(need))) > 0:
            lowered[name] = part.cap - back
            need -= back
    return lowered


class ReclaimableCache(NamedTuple):
    """What a sibling could give back, in bytes. `idle` is what a trim returns as far as is known, `most` all its cache.

    They differ where the framework does not say how its cache is split into pieces. `sure`: it does say.
    """

    name: str
    idle: int
    most: int
    sure: bool


def reclaimable_caches(usages: Mapping[str, Usage | None], who: str) -> list[ReclaimableCache]:
    """Those of the siblings of `who` that cache something and give it back."""
    found = []
    for name, usage in usages.items():
        if name == who or usage is None or name in NEVER_GIVE_BACK or usage.held is None or usage.in_use is None:
            continue
        cached = max(usage.held - usage.in_use, usage.reclaimable or 0)  # two readings, at two moments
        idle = cached if usage.reclaimable is None else usage.reclaimable
        if idle > 0:
            found.append(ReclaimableCache(name, idle, cached, usage.reclaimable is not None))
    return found


def pick_donor(found: Iterable[ReclaimableCache], short: int) -> ReclaimableCache | None:
    """The sibling that gives back first, if `short` bytes are missing: the one that has most, of those that know.

    None if all of them together would not suffice: a request that fails in any case costs nobody a cache.
    """
    ordered = sorted(found, key=lambda one: (not one.sure, -one.idle))
    return ordered[0] if ordered and sum(one.most for one in ordered) >= short else None


def _live(part: Part) -> int:
    """What it holds above its min that is no cache."""
    return max(part.held - part.promised - part.least - part.idle, 0)


def _low(part: Part) -> int:
    return max(part.most // _STEP, _LOW) if part.cap < part.most else 0


def _part_of_span(part: Part) -> float:
    return (part.cap - part.least) / max(part.most - part.least, GRANULE)

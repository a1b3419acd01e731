"""Computes how elastic caps move between min and max, and whose idle cache is trimmed. Pure: figures in, caps out.

On each GPU the room is limit − reserve. The room above the sum of the minima is lent to elastic frameworks. The rules:

- The free room is the room less each cap, or less the held bytes where a framework holds more than its cap
  (`_budget.policy.room_left`): a cap that was lowered below live arrays frees none of them. If the free room is
  negative, nothing is lent, and a monitor tick calls back lent memory that is unused.
- The sum of the caps never exceeds the room, and no cap is below its framework's min. So a framework always has its
  min at once, whatever its siblings hold.
- A cap is never lowered below the bytes that its framework holds and its workloads have reserved. So live arrays are
  never affected, and idle lent memory can be called back for any framework.
- A framework that needs more is given, in this order: room that is not lent; lent room that is unused; lent memory that
  is only cached, the largest cache first, after a trim has returned it to the driver. No cache is trimmed without need,
  and none if all caches together are too small.
- First come, first served. A framework whose allocator cannot request room within an allocation (torch) keeps headroom
  instead. A tick fills headroom from unused room, first for the framework that has borrowed the smallest part of its
  span. Headroom of these frameworks is taken last.

Hysteresis: headroom below a threshold is filled to twice the threshold. So under a constant load a tick moves caps
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from memguard._base.types import Usage
from memguard._base.units import GRANULE, MIB, round_down, round_up
from memguard._budget.policy import room_left, trim_order
from memguard._frameworks.specs import NEVER_GIVE_BACK

_STEP = 16
"""A raised cap rises further by 1/`_STEP` of its span (max − min), or by the bytes it has borrowed if that is more, as
far as unused room allows. Otherwise every single request would raise the cap again."""
_LOW = 64 * MIB
"""The least headroom of a framework that cannot request room, or 1/`_STEP` of its max if that is more."""


class Part(NamedTuple):
    """The figures of one framework on one GPU, in bytes.

    `least` and `most` bound its cap; both are the cap if it cannot move. `held` is the memory taken from the driver
    plus `promised`. `promised` is the memory that its workloads have reserved and not yet allocated. `idle` is the part
    of `held` that it could give back, at most. `asks`: its allocator requests room when an allocation fails, so it
    needs no headroom.
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
        """The arguments of `room_left`: the cap, and the bytes taken from the driver in whole granules."""
        return self.cap, round_up(max(self.held - self.promised, 0))

    @property
    def unused(self) -> int:
        """The bytes by which the cap can be lowered without a trim."""
        return max(self.cap - max(self.least, round_up(self.held)), 0)

    @property
    def cached(self) -> int:
        """The further bytes that a trim of its cache would release, from its cap or from memory held above the cap."""
        stays = max(self.least, round_up(max(self.held - self.idle, 0)))
        return max(max(self.taken) - self.unused - stays, 0)


class CapChange(NamedTuple):
    """The steps that raise a cap, in bytes.

    `caps`: the changed caps, lowered ones first; empty while `calls` or `missing` is not. `calls`: siblings to trim
    first, with the bytes; plan again after that. `missing`: the bytes that are not available. `live`: the bytes that
    siblings hold in live arrays above their min, or above their cap if it cannot move.
    """

    caps: Mapping[str, int]
    calls: tuple[tuple[str, int], ...] = ()
    missing: int = 0
    live: Mapping[str, int] = {}


def plan_raise(parts: Mapping[str, Part], room: int, who: str, wanted: int) -> CapChange:
    """Plan the steps that raise the cap of `who` to at least `wanted` bytes. `room` is limit − reserve."""
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
    if need > 0:  # even all caches are too small
        return CapChange({}, missing=round_up(need), live=live)  # a multiple of the granule, as caps are
    return CapChange({}, tuple(calls), live=live)


def _further(
    siblings: Mapping[str, Part], caps: Mapping[str, int], room: int, who: str, own: Part, wanted: int
) -> dict[str, int]:
    """Raise the cap of `who` beyond `wanted` from unused room. Returns that cap and the siblings' caps lowered for it.

    A sibling that can request room keeps half of its unused memory; other siblings keep their headroom. If `who` cannot
    request room, the extra bytes are its own headroom.
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
    """The caps that change at a tick, lowered ones first, to fill the headroom of frameworks that cannot request room.

    Headroom comes from free room, and from unused memory of frameworks that can request room. If the free room is
    negative, unused memory is called back instead.
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
    """The caps to lower while caps and held memory together exceed the room, because a framework holds more than its
    cap. Takes unused memory, first from frameworks that can request room."""
    need, lowered = -room_left(room, [part.taken for part in parts.values()]), {}
    for name, part in sorted(parts.items(), key=lambda item: (not item[1].asks, -item[1].unused)):
        if need > 0 and (back := min(round_down(part.unused), round_up(need))) > 0:
            lowered[name] = part.cap - back
            need -= back
    return lowered


class ReclaimableCache(NamedTuple):
    """The cache of a sibling, in bytes. `idle`: the bytes that a trim is expected to return. `most`: the whole cache.

    `sure`: the framework reports which part of its cache is reclaimable. If it does not, `idle` is an upper bound.
    """

    name: str
    idle: int
    most: int
    sure: bool


def reclaimable_caches(usages: Mapping[str, Usage | None], who: str) -> list[ReclaimableCache]:
    """The caches of the siblings of `who` that a trim can return."""
    found = []
    for name, usage in usages.items():
        if name == who or usage is None or name in NEVER_GIVE_BACK or usage.held is None or usage.in_use is None:
            continue
        cached = max(usage.held - usage.in_use, usage.reclaimable or 0)  # the figures may be read at different moments
        idle = cached if usage.reclaimable is None else usage.reclaimable
        if idle > 0:
            found.append(ReclaimableCache(name, idle, cached, usage.reclaimable is not None))
    return found


def pick_donor(found: Iterable[ReclaimableCache], short: int) -> ReclaimableCache | None:
    """Pick the sibling to trim first if `short` bytes are missing: the largest cache, `sure` ones before others.

    None if all caches together are too small: a request that fails anyway must not cost a sibling its cache.
    """
    ordered = sorted(found, key=lambda one: trim_order(one.idle, one.sure))
    return ordered[0] if ordered and sum(one.most for one in ordered) >= short else None


def _live(part: Part) -> int:
    """The bytes held above its min that are not cached."""
    return max(part.held - part.promised - part.least - part.idle, 0)


def _low(part: Part) -> int:
    return max(part.most // _STEP, _LOW) if part.cap < part.most else 0


def _part_of_span(part: Part) -> float:
    return (part.cap - part.least) / max(part.most - part.least, GRANULE)

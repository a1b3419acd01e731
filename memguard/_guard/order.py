"""Whose idle memory goes when the GPU is full. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from memguard._base.specs import NEVER_GIVE_BACK
from memguard._base.types import Usage


class Offer(NamedTuple):
    """What a sibling could give back, in bytes. `idle` is what a trim returns as far as is known, `most` all its cache.

    They differ where the framework does not say how its cache is split into pieces. `sure`: it does say.
    """

    name: str
    idle: int
    most: int
    sure: bool


def offers(usages: Mapping[str, Usage | None], who: str) -> list[Offer]:
    """Those of the siblings of `who` that cache something and give it back."""
    found = []
    for name, usage in usages.items():
        if name == who or usage is None or name in NEVER_GIVE_BACK or usage.held is None or usage.in_use is None:
            continue
        cached = max(usage.held - usage.in_use, usage.reclaimable or 0)  # two readings, at two moments
        idle = cached if usage.reclaimable is None else usage.reclaimable
        if idle > 0:
            found.append(Offer(name, idle, cached, usage.reclaimable is not None))
    return found


def first(found: Iterable[Offer], short: int) -> Offer | None:
    """The sibling that gives back first, if `short` bytes are missing: the one that has most, of those that know.

    None if all of them together would not suffice: a request that fails in any case costs nobody a cache.
    """
    ordered = sorted(found, key=lambda one: (not one.sure, -one.idle))
    return ordered[0] if ordered and sum(one.most for one in ordered) >= short else None

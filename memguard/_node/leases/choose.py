"""Whom to ask to leave its GPUs, so that one who waits can have its lease. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from memguard._node.leases import decide
from memguard._node.leases.decide import Want


def to_suspend(
    number: int, claims: Iterable[Want], capacity: Mapping[str, int], idle: Mapping[int, float]
) -> tuple[int, ...]:
    """The held claims whose processes would have to leave for the waiting claim `number`: no more than it takes.

    `idle`: for how many seconds each has done nothing, of those who may be asked. Who was idle for longest is asked
    first. Nobody is asked in vain: none if even all of them together would not do, or if another one comes first.
    """
    claims = [*claims]
    chosen: list[int] = []
    for other in sorted(idle, key=lambda one: (-idle[one], one)):
        if _served(number, claims, capacity, chosen):
            break
        chosen.append(other)
    if not _served(number, claims, capacity, chosen):
        return ()
    for other in [*chosen]:  # a large one may make up for those before it
        rest = [one for one in chosen if one != other]
        if _served(number, claims, capacity, rest):
            chosen = rest
    return tuple(chosen)


def _served(number: int, claims: list[Want], capacity: Mapping[str, int], gone: Iterable[int]) -> bool:
    left = set(gone)
    return number in decide.grantable([one for one in claims if one.id not in left], capacity)

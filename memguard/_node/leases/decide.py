"""Who may have what now. Pure: what was claimed in, who is granted out.

First come, first served, on each GPU: a claim is granted if there is room for it on all of its GPUs, and nobody who
came before it waits for one of them. It gets all of them at once, so that no two wait for each other. So a claim waits
only for those that came before it, and for those that hold: nobody starves while holders end.

A claim that takes the place of another one of its process (`replaces`) counts beside that one only with what it has
more. One that wants nothing more anywhere is granted at once: that takes nothing from anybody who waits. One that wants
more waits behind those who came before it; if these wait for its process in turn, the time that it may wait ends that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Want(NamedTuple):
    """One claim: bytes by GPU."""

    id: int
    held: bool
    sizes: Mapping[str, int]
    replaces: int | None = None


def grantable(claims: Iterable[Want], capacity: Mapping[str, int]) -> frozenset[int]:
    """The waiting claims that may be held now. Not one of a GPU whose capacity is not given."""
    ordered = sorted(claims)
    held = {claim.id: claim for claim in ordered if claim.held}
    taken = leased(ordered)
    wanted: set[str] = set()
    granted = set()
    for claim in ordered:
        if claim.held:
            continue
        more = extra(claim, held)
        room = all(taken.get(gpu, 0) + size <= capacity.get(gpu, -1) for gpu, size in more.items())
        if (claim.replaces in held and not any(more.values())) or (room and wanted.isdisjoint(claim.sizes)):
            granted.add(claim.id)
            held[claim.id] = claim
            for gpu, size in more.items():
                taken[gpu] = taken.get(gpu, 0) + size
        else:
            wanted.update(claim.sizes)
    return frozenset(granted)


def extra(claim: Want, held: Mapping[int, Want]) -> dict[str, int]:
    """What the claim needs beside the one whose place it takes, if that one is still held; bytes by GPU."""
    before = held.get(claim.replaces) if claim.replaces is not None else None
    own = before.sizes if before is not None else {}
    return {gpu: max(size - own.get(gpu, 0), 0) for gpu, size in claim.sizes.items()}


def leased(claims: Iterable[Want]) -> dict[str, int]:
    """The sum of what is held, by GPU."""
    held = {claim.id: claim for claim in claims if claim.held}
    found: dict[str, int] = {}
    for claim in held.values():
        for gpu, size in extra(claim, held).items():
            found[gpu] = found.get(gpu, 0) + size
    return found


def before(claim: Want, claims: Iterable[Want]) -> tuple[tuple[Want, ...], tuple[Want, ...]]:
    """Who holds one of its GPUs, and who waits for one and came before it; without its own process's other claim."""
    near = [one for one in sorted(claims) if one.id not in (claim.id, claim.replaces)]
    near = [one for one in near if not set(one.sizes).isdisjoint(claim.sizes)]
    return tuple(one for one in near if one.held), tuple(one for one in near if not one.held and one.id < claim.id)

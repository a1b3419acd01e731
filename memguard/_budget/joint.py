"""Frameworks that share one driver pool: the plan's part of it, and admission. Pure.

Under `strategy: pool` those that can draw from one stream-ordered pool have one cap together: the sum of their parts,
which is the pool's size. Each may use all of it while the others use none, so frameworks that peak in turn need room
for one peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from memguard._base.specs import SPECS
from memguard._base.types import DevicePlan, FrameworkSample, Usage
from memguard._base.units import format_size

if TYPE_CHECKING:
    from memguard._budget import Budget

POOL = "shared pool"
"""The ledger's row of what the pool holds beyond the frameworks' arrays: one cache for all."""
REMAINDER = (
    "≈ a remainder: what is in use in the shared pool and counted by no other framework, as torch's own figures cover "
    "everybody there"
)


def capped(names: Iterable[str]) -> bool:
    """Whether the driver can cap the pool that these frameworks share: none takes from the default one alone."""
    return not any(SPECS[name].default_pool for name in names)


def how(part: DevicePlan, name: str) -> str:
    """How the joint cap holds for a framework, for `memguard plan`."""
    if capped(part.joined):
        return "enforced, jointly: the size (maxSize) of one driver pool for all of them"
    if SPECS[name].asks:
        return "enforced by memguard's allocator: what all have in use in the default pool"
    return "watched: it draws from the device's default pool, which nothing caps"


def members(budget: Budget) -> tuple[str, ...]:
    """The frameworks of the budget that draw from one pool; empty with `strategy: caps`."""
    if budget.strategy != "pool":
        return ()
    return tuple(
        n for n, entry in budget.frameworks.items() if SPECS[n].joint and getattr(entry, "context", "") != "own"
    )


def joined(part: DevicePlan, names: tuple[str, ...]) -> DevicePlan:
    """The plan in which these frameworks have one cap together, the sum of their caps."""
    if not names:
        return part
    size = sum(part.caps[name] for name in names)
    return replace(part, caps={**part.caps, **dict.fromkeys(names, size)}, joined=names)


def distinct(part: DevicePlan) -> int:
    """The sum of a device's caps in bytes, with the one that is shared counted once."""
    return sum(cap for name, cap in part.caps.items() if name not in part.joined[1:])


def shared_notes(part: DevicePlan | None) -> dict[str, str]:
    """What the ledger says beside the rows of the pool's frameworks, and of the pool itself."""
    names = () if part is None else part.joined
    if part is None or not names:
        return {}
    size = format_size(part.caps[names[0]])
    notes = {POOL: f"one cache for {' and '.join(names)}, which together may hold {size}"}
    return {**notes, **{name: REMAINDER for name in names if SPECS[name].remainder}}


def as_if_alone(own: Usage | None, cap: int, reserved: int, used: int) -> tuple[int, Usage]:
    """The cap and the usage with which a framework is admitted that draws from a pool: what others have in use there
    is gone, and all of the pool's cache serves it. `reserved` and `used` are the pool's, in bytes."""
    in_use = 0 if own is None or own.in_use is None else own.in_use
    others = max(used - in_use, 0)
    return max(cap - others, 0), Usage(in_use + max(reserved - used, 0), in_use)


def shared_cap(framework: str, part: DevicePlan, left: int) -> str:
    """What a refusal adds where its cap is what others leave of the pool; empty for a framework with its own cap."""
    if framework not in part.joined:
        return ""
    whole = part.caps[framework]
    shared = f"; {' and '.join(part.joined)} share one pool of {format_size(whole)}"
    return f"{shared}, of which others have {format_size(whole - left)} in use"


def left_to(part: DevicePlan, figures: Mapping[str, FrameworkSample]) -> dict[str, FrameworkSample]:
    """The figures with what the others leave of the pool as each one's cap: that is what it can come close to."""
    live = sum(one.in_use or 0 for name, one in figures.items() if name in part.joined or name == POOL)
    found = dict(figures)
    for name in part.joined:
        if (one := figures.get(name)) is not None:
            found[name] = one._replace(cap=max(part.caps[name] - (live - (one.in_use or 0)), 1))
    return found


def counted(used: int, others: Mapping[str, int]) -> int:
    """What is in use in the pool and nobody else counts: a remainder. Read at different moments, so never below 0."""
    return max(used - sum(others.values()), 0)

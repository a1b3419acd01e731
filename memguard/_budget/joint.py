"""Frameworks that share one driver pool: their joint cap in the plan, and their admission. Pure.

Under `strategy: pool` the frameworks that can use one stream-ordered pool share one cap: the sum of their parts, which
is the pool's size. Each may fill it while the others use none, so frameworks that peak in turn need room for one peak
only.
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
"""The ledger's row of the pool's bytes beyond the frameworks' arrays: one cache for all."""
REMAINDER = (
    "≈ a remainder: what is in use in the shared pool and counted by no other framework, as torch's own figures cover "
    "everybody there"
)


def capped(names: Iterable[str]) -> bool:
    """Whether the driver can cap the pool of these frameworks: none of them allocates from the default pool only."""
    return not any(SPECS[name].default_pool for name in names)


def how(part: DevicePlan, name: str) -> str:
    """How the joint cap of a framework is enforced, for `memguard plan`."""
    if capped(part.joined):
        return "enforced, jointly: the size (maxSize) of one driver pool for all of them"
    if SPECS[name].asks:
        return "enforced by memguard's allocator: what all have in use in the default pool"
    return "watched: it draws from the device's default pool, which nothing caps"


def members(budget: Budget) -> tuple[str, ...]:
    """The frameworks of the budget that use the shared pool; empty with `strategy: caps`."""
    if budget.strategy != "pool":
        return ()
    return tuple(
        n for n, entry in budget.frameworks.items() if SPECS[n].joint and getattr(entry, "context", "") != "own"
    )


def joined(part: DevicePlan, names: tuple[str, ...]) -> DevicePlan:
    """The plan with one joint cap for these frameworks, the sum of their caps."""
    if not names:
        return part
    size = sum(part.caps[name] for name in names)
    return replace(part, caps={**part.caps, **dict.fromkeys(names, size)}, joined=names)


def distinct(part: DevicePlan) -> int:
    """The sum of a device's caps in bytes, with the joint cap counted once."""
    return sum(cap for name, cap in part.caps.items() if name not in part.joined[1:])


def shared_notes(part: DevicePlan | None) -> dict[str, str]:
    """The ledger's notes on the rows of the pool's frameworks and of the pool itself."""
    names = () if part is None else part.joined
    if part is None or not names:
        return {}
    size = format_size(part.caps[names[0]])
    notes = {POOL: f"one cache for {' and '.join(names)}, which together may hold {size}"}
    return {**notes, **{name: REMAINDER for name in names if SPECS[name].remainder}}


def as_if_alone(own: Usage | None, cap: int, reserved: int, used: int) -> tuple[int, Usage]:
    """The cap and the usage for the admission of a framework that uses the shared pool: the cap less the others' use,
    and the usage with all of the pool's cache. `reserved` and `used` are the pool's, in bytes."""
    in_use = 0 if own is None or own.in_use is None else own.in_use
    others = max(used - in_use, 0)
    return max(cap - others, 0), Usage(in_use + max(reserved - used, 0), in_use)


def shared_cap(framework: str, part: DevicePlan, left: int) -> str:
    """A refusal's note that other frameworks use part of the joint cap; empty for a framework with its own cap."""
    if framework not in part.joined:
        return ""
    whole = part.caps[framework]
    shared = f"; {' and '.join(part.joined)} share one pool of {format_size(whole)}"
    return f"{shared}, of which others have {format_size(whole - left)} in use"


def left_to(part: DevicePlan, figures: Mapping[str, FrameworkSample]) -> dict[str, FrameworkSample]:
    """The figures with each framework's cap set to its room in the pool: pressure is measured against that."""
    live = sum(one.in_use or 0 for name, one in figures.items() if name in part.joined or name == POOL)
    found = dict(figures)
    for name in part.joined:
        if (one := figures.get(name)) is not None:
            found[name] = one._replace(cap=max(part.caps[name] - (live - (one.in_use or 0)), 1))
    return found


def counted(used: int, others: Mapping[str, int]) -> int:
    """The remainder: bytes in use in the pool that no other framework counts. Clamped at 0: readings differ in time."""
    return max(used - sum(others.values()), 0)

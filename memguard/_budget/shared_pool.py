"""Frameworks that share one CUDA memory pool: their joint cap in the plan, and their usage.

Under `strategy: pool` the frameworks that can use one stream-ordered pool share one cap, the sum of their amounts in
the budget, which is the pool's size. Each framework may fill the pool while the others use none, so frameworks whose
peaks do not coincide need memory for one peak only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from memguard._base.types import POOL, DevicePlan, FrameworkSample, Usage
from memguard._base.units import format_size
from memguard._frameworks.specs import SPECS, pool_capped

if TYPE_CHECKING:
    from memguard._budget import Budget

REMAINDER = (
    "≈ a remainder: what is in use in the shared pool and counted by no other framework, as torch's own figures cover "
    "everybody there"
)


def how(part: DevicePlan, name: str) -> str:
    """How the joint cap of the frameworks in the pool is enforced on framework `name`, for `memguard plan`."""
    if pool_capped(part.joined):
        return "enforced, jointly: the size (maxSize) of one driver pool for all of them"
    if SPECS[name].requests_room:
        return "enforced by memguard's allocator: what all have in use in the default pool"
    return "watched: it draws from the device's default pool, which nothing caps"


def members(budget: Budget) -> tuple[str, ...]:
    """The frameworks of the budget that use the shared pool; empty with `strategy: caps`."""
    if budget.strategy != "pool":
        return ()
    return tuple(
        n for n, entry in budget.frameworks.items() if SPECS[n].pooled and getattr(entry, "context", "") != "own"
    )


def with_pool(part: DevicePlan, names: tuple[str, ...]) -> DevicePlan:
    """The plan with one joint cap for these frameworks, the sum of their caps."""
    if not names:
        return part
    size = sum(part.caps[name] for name in names)
    return replace(part, caps={**part.caps, **dict.fromkeys(names, size)}, joined=names)


def allocator_of(part: DevicePlan | None, framework: str) -> str:
    """The name of the allocator that serves the framework: the framework's name, or `shared pool`."""
    return POOL if part is not None and framework in part.joined else framework


def clients(part: DevicePlan, allocator: str) -> tuple[str, ...]:
    """The frameworks that an allocator serves."""
    return part.joined if allocator == POOL else (allocator,)


def caps_of(part: DevicePlan) -> dict[str, int]:
    """The cap of each allocator, in bytes. The joint cap of the shared pool is listed once."""
    if not part.joined:
        return dict(part.caps)
    return {allocator_of(part, name): cap for name, cap in part.caps.items()}


def usages_by_allocator(part: DevicePlan, rows: Mapping[str, Usage]) -> dict[str, Usage | None]:
    """The usage of each allocator, from the ledger's rows. The usage of the shared pool is the sum of the bytes in use
    of its frameworks and of the ledger's row for its cache."""
    if not part.joined:
        return dict(rows)
    found: dict[str, Usage | None] = {n: u for n, u in rows.items() if n != POOL and n not in part.joined}
    if (cache := rows.get(POOL)) is not None:
        live = [one.in_use or 0 for name, one in rows.items() if name in part.joined]
        found[POOL] = Usage((cache.held or 0) + sum(live), (cache.in_use or 0) + sum(live), cache.reclaimable)
    return found


def shared_notes(part: DevicePlan | None) -> dict[str, str]:
    """Notes for the ledger's rows of the shared pool and of frameworks that use it, by the row's name."""
    names = () if part is None else part.joined
    if part is None or not names:
        return {}
    size = format_size(part.caps[names[0]])
    notes = {POOL: f"one cache for {' and '.join(names)}, which together may hold {size}"}
    return {**notes, **{name: REMAINDER for name in names if SPECS[name].remainder}}


def note_on(part: DevicePlan, framework: str, others: int) -> str:
    """The note for a refusal that other frameworks use `others` bytes of the shared pool; empty if the framework has
    its own allocator."""
    names = clients(part, allocator_of(part, framework))
    if names == (framework,):
        return ""
    whole = format_size(part.caps[framework])
    return f"; {' and '.join(names)} share one pool of {whole}, of which others have {format_size(others)} in use"


def left_to(part: DevicePlan, figures: Mapping[str, FrameworkSample]) -> dict[str, FrameworkSample]:
    """`figures` with the cap of each framework in the pool replaced by the joint cap less the bytes that others use.
    The monitor computes the framework's pressure from this cap."""
    live = sum(one.in_use or 0 for name, one in figures.items() if name in part.joined or name == POOL)
    found = dict(figures)
    for name in part.joined:
        if (one := figures.get(name)) is not None:
            found[name] = one._replace(cap=max(part.caps[name] - (live - (one.in_use or 0)), 1))
    return found

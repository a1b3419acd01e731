"""Reservations: the bytes that each workload reserved per framework and GPU, and the queue of waiting ones. Pure.

A workload allocates its reserved memory bit by bit, and frameworks do not report which array belongs to which workload.
Only the sum over all arrays of a framework is known: its `in_use`. So all reservations of one framework on one GPU are
accounted together:

    open = Σ sizes − growth          growth = in_use − base, between 0 and Σ sizes

`base` is an upper bound of the bytes in use outside the workloads: older arrays, and arrays that ended workloads left
behind. Because it is an upper bound, `open` is never less than the bytes that the workloads may still allocate, as long
as none exceeds its size:

- The first workload begins: base = in_use.
- Another begins: base = in_use − Σ sizes of the earlier ones, if that is larger: then they exceeded their reservations.
- One ends: base = base + its size, but at most in_use. It is unknown whether it freed its arrays or others have
  allocated theirs, so all its bytes are assumed to remain.
- in_use is read below base: base = in_use. Older arrays were freed.

Arrays allocated outside every workload count as growth of the workloads. An unknown figure (None) counts as no growth.

A workload within another of the same framework uses the outer reservation, if that may still have enough bytes left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from memguard._base.advice import Advice
from memguard._base.types import MemoryInfo, Usage, cached
from memguard._base.units import format_size
from memguard._budget import policy

Key = tuple[str, str]
"""Framework and GPU (UUID)."""
_SHOWN = 12
"""Lines of holders and waiting workloads in a message."""


class Reservation(NamedTuple):
    """The reservation of one workload, held or waiting: `size` bytes of `framework` on each of `uuids`.

    `asked`: the bytes that the program requested. `size` is 0 if the outer workload's reservation covers them. `since`:
    when it began to hold or wait, as `time.monotonic()`. `outer`: the enclosing workloads. `who`: the name of the
    thread or task.
    """

    id: int
    name: str
    framework: str
    asked: int
    uuids: tuple[str, ...]
    since: float
    who: str
    outer: frozenset[int] = frozenset()
    size: int = 0


class Reservations(NamedTuple):
    """All reservations of one budget: the `active` ones, and the `waiting` ones in order of service. For `bases` see
    the module's docstring."""

    active: tuple[Reservation, ...] = ()
    waiting: tuple[Reservation, ...] = ()
    bases: Mapping[Key, int | None] = MappingProxyType({})

    @property
    def ids(self) -> frozenset[int]:
        """The ids of all active and waiting reservations."""
        return frozenset(entry.id for entry in (*self.active, *self.waiting))


EMPTY = Reservations()


def begun(book: Reservations, entry: Reservation, in_use: Mapping[str, int | None]) -> Reservations:
    """Add `entry` to the active reservations. `in_use`: the framework's bytes by UUID."""
    bases = dict(book.bases)
    for uuid in entry.uuids if entry.size else ():
        key, now = (entry.framework, uuid), in_use.get(uuid)
        before = _sizes(book.active, *key)
        base = bases.get(key)
        if not before or base is None:
            bases[key] = now
        elif now is not None:
            bases[key] = max(min(base, now), now - before)
    waiting = tuple(one for one in book.waiting if one.id != entry.id)
    return Reservations((*book.active, entry), waiting, bases)


def ended(book: Reservations, number: int, in_use: Mapping[str, int | None] | None = None) -> Reservations:
    """Remove the reservation `number`, active or waiting. `in_use` as for `begun`; None: unknown."""
    entry = next((one for one in book.active if one.id == number), None)
    active = tuple(one for one in book.active if one.id != number)
    waiting = tuple(one for one in book.waiting if one.id != number)
    bases = dict(book.bases)
    for uuid in entry.uuids if entry is not None and entry.size else ():
        assert entry is not None
        key, now = (entry.framework, uuid), (in_use or {}).get(uuid)
        base = bases.get(key)
        if not _sizes(active, *key):
            bases.pop(key, None)
        elif base is None:
            bases[key] = now
        else:
            bases[key] = base + entry.size if now is None else min(base + entry.size, now)
    return Reservations(active, waiting, bases) if active or waiting else EMPTY


def queued(book: Reservations, entry: Reservation) -> Reservations:
    """Append `entry` to the waiting reservations."""
    return book._replace(waiting=(*book.waiting, entry))


def seen(book: Reservations, framework: str, in_use: Mapping[str, int | None]) -> Reservations:
    """Lower the bases above `in_use`. Returns the same object if there are none."""
    lower = {
        (framework, uuid): now
        for uuid, now in in_use.items()
        if now is not None and (base := book.bases.get((framework, uuid))) is not None and now < base
    }
    return book._replace(bases={**book.bases, **lower}) if lower else book


def growth(book: Reservations, framework: str, uuid: str, in_use: int | None) -> int:
    """The bytes that the active workloads of one framework have allocated of their reservations, together."""
    base = book.bases.get((framework, uuid))
    if in_use is None or base is None:
        return 0
    return max(min(in_use - base, _sizes(book.active, framework, uuid)), 0)


def reserved_not_taken(
    book: Reservations, framework: str, uuid: str, in_use: int | None, without: Collection[int] = frozenset()
) -> int:
    """The bytes reserved and not yet allocated. `without`: reservations that do not count.

    Allocated bytes are attributed to `without` first, so that the result is never too small.
    """
    sizes = _sizes(book.active, framework, uuid)
    theirs = _sizes([one for one in book.active if one.id in without], framework, uuid)
    taken = growth(book, framework, uuid, in_use)
    return sizes - theirs - max(taken - theirs, 0)


def may_have_left(book: Reservations, framework: str, uuid: str, in_use: int | None, mine: Collection[int]) -> int:
    """An upper bound of the bytes that the reservations `mine` have not yet allocated."""
    sizes = _sizes(book.active, framework, uuid)
    own = _sizes([one for one in book.active if one.id in mine], framework, uuid)
    taken = growth(book, framework, uuid, in_use)
    beside = sum(  # bytes that inner workloads already use of these reservations
        one.asked
        for one in book.active
        if not one.size and one.id not in mine and one.outer & frozenset(mine) and _is_of(one, framework, uuid)
    )
    return max(own - max(taken - (sizes - own), 0) - beside, 0)


def ahead(book: Reservations, number: int | None, mine: Collection[int]) -> tuple[Reservation, ...]:
    """The waiting reservations that are served before `number`; all of them if it is not queued yet.

    None of them if an active workload encloses it: they may be waiting for the end of that workload.
    """
    if any(one.id in mine for one in book.active):
        return ()
    found: list[Reservation] = []
    for one in book.waiting:
        if one.id == number:
            break
        found.append(one)
    return tuple(found)


class Asked(NamedTuple):
    """A request for bytes of one framework on one GPU. `footprint` as for `Framework.footprint`; `cap` in bytes.

    `mine`: the reservations of the enclosing workloads. `before`: the waiting reservations that are served first.
    `keeps`: a workload requests the bytes to reserve them, in addition to `mine` or covered by `mine`. `shared`: the
    name of the allocator of each framework that shares one.
    """

    framework: str
    uuid: str
    needed: int
    footprint: int
    cap: int
    mine: frozenset[int] = frozenset()
    before: tuple[Reservation, ...] = ()
    keeps: bool = False
    shared: Mapping[str, str] = MappingProxyType({})

    def allocator_of(self, framework: str) -> str:
        """The name of the allocator that serves the framework."""
        return self.shared.get(framework, framework)


def named(book: Reservations, asked: Asked) -> set[str]:
    """The frameworks whose usage `admit` needs to admit the request without a trim, besides their allocators'."""
    return {asked.framework, *(one.framework for one in book.active), *(one.framework for one in asked.before)}


class Verdict(NamedTuple):
    """The result of `admit`. `trim` and `refusal` as in `_budget.policy.Admission`.

    `reserved`: only the reservations of others cause the refusal. `covered`: the reservation of an outer workload
    covers the request. `beside`: the reserved bytes of the same allocator, which must fit under its cap too.
    """

    available: int
    trim: tuple[str, ...] = ()
    refusal: policy.Refusal | None = None
    reserved: bool = False
    covered: bool = False
    beside: int = 0


def admit(book: Reservations, asked: Asked, usages: Mapping[str, Usage | None], memory: MemoryInfo) -> Verdict:
    """Decide whether the bytes are available in addition to all reservations. Read `memory` after `usages`.

    The cap must hold the request and the open reservations of the same allocator. The GPU's free and trimmable memory
    must hold these and the open reservations of all other allocators. `usages` are by framework, and by allocator.
    """
    framework, uuid, allocator = asked.framework, asked.uuid, asked.allocator_of(asked.framework)
    in_use = {name: policy.in_use(usage) for name, usage in usages.items()}
    plain = policy.admit(framework, asked.needed, asked.footprint, asked.cap, usages, memory, allocator)
    own_part = may_have_left(book, framework, uuid, in_use.get(framework), asked.mine)
    if own_part >= asked.needed:
        return Verdict(plain.available, plain.trim, plain.refusal, covered=True)
    reserved: dict[str, int] = {}
    without = frozenset[int]() if asked.keeps else asked.mine
    for name in {one.framework for one in (*book.active, *asked.before)}:
        size = reserved_not_taken(book, name, uuid, in_use.get(name), without) + _sizes(asked.before, name, uuid)
        if size:
            reserved[asked.allocator_of(name)] = reserved.get(asked.allocator_of(name), 0) + size
    if not reserved or plain.refusal is not None:
        return Verdict(plain.available, plain.trim, plain.refusal, beside=reserved.get(allocator, 0))
    own = reserved.pop(allocator, 0)
    beside, free = dict(usages), memory.free
    for name, size in reserved.items():
        usage = usages.get(name) or Usage(0, 0)
        cached = cache(usage)
        free -= max(size - cached, 0)  # the rest comes from its own cache, which others cannot use
        if usage.reclaimable is not None:
            beside[name] = usage._replace(reclaimable=max(cached - size, 0))
        elif cached:
            beside[name] = usage._replace(in_use=(usage.in_use or 0) + min(cached, size))
    needed, footprint = asked.needed + own, asked.footprint + own
    found = policy.admit(framework, needed, footprint, asked.cap, beside, memory._replace(free=free), allocator)
    available = max(found.available - own, 0)
    if found.refusal is None:
        return Verdict(available, found.trim, beside=own)
    refusal = policy.Reserved(framework, asked.needed, available)
    return Verdict(available, refusal=refusal, reserved=True, beside=own)


def never(book: Reservations, asked: Asked, room: int, own_cap: int) -> Advice | None:
    """The reason why waiting is useless: enclosing workloads reserved the memory. None if waiting may help.

    `room`: limit − reserve. `own_cap`: the highest possible cap of the framework.
    """
    around = [one for one in book.active if one.id in asked.mine and asked.uuid in one.uuids and one.size]
    same = [one for one in around if one.framework == asked.framework]
    for held, most, what in ((same, own_cap, f"{asked.framework}'s cap"), (around, room, "what the budget has there")):
        size = sum(one.size for one in held)
        if held and asked.footprint + size > most:
            names = " and ".join(f"{one.name!r}" for one in held)
            return Advice(
                f"{asked.framework} needs {format_size(asked.needed)}, and {names}, within which it is asked, "
                f"reserved {format_size(size)}: both are more than {what}, {format_size(most)}, so that it would wait "
                f"for itself",
                "reserve it all in the outer workload, or begin this one after the outer one ends",
            )
    return None


def who_holds(book: Reservations, uuid: str, in_use: Mapping[str, int | None], now: float) -> list[str]:
    """One line for each reservation on that GPU, active ones first. `now` as `time.monotonic()`."""
    lines = []
    held = [one for one in book.active if uuid in one.uuids and one.size]
    for one in held:
        alone = sum(other.framework == one.framework for other in held) == 1
        taken = min(growth(book, one.framework, uuid, in_use.get(one.framework)), one.size)
        used = (
            ""
            if in_use.get(one.framework) is None
            else f", {'' if alone else 'at most '}{format_size(taken)} of it in use"
        )
        lines.append(
            f"{one.name!r} ({one.framework}, {one.who}) reserved {format_size(one.size)} {_ago(one, now)} ago{used}"
        )
    for one in book.waiting:
        if uuid in one.uuids:
            lines.append(
                f"{one.name!r} ({one.framework}, {one.who}) has waited {_ago(one, now)} for {format_size(one.asked)}"
            )
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more"]


def cache(usage: Usage) -> int:
    """The bytes that a trim of the framework may return, computed by `_budget.policy`."""
    return cached(usage)


def _sizes(entries: Iterable[Reservation], framework: str, uuid: str) -> int:
    return sum(one.size for one in entries if _is_of(one, framework, uuid))


def _is_of(entry: Reservation, framework: str, uuid: str) -> bool:
    return entry.framework == framework and uuid in entry.uuids


def _ago(entry: Reservation, now: float) -> str:
    return f"{max(now - entry.since, 0):.1f} s"

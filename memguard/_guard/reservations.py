"""Reservations: which workload reserved how many bytes of which framework on which GPU, and who waits. Pure.

A workload that reserved memory takes it bit by bit, and frameworks do not say which of their arrays are whose. What is
known is what all arrays of a framework occupy together: its `in_use`. So the reservations of one framework on one GPU
are counted together:

    open = Σ sizes − growth          growth = in_use − base, between 0 and Σ sizes

`base` is the most that may be in use by what belongs to none of them: arrays from before, and what workloads that are
over have left behind. It is never less than what really is, so that `open` is never less than what the workloads may
still take, as long as each keeps to its size:

- the first one begins: base = in_use.
- another begins: base = in_use − Σ sizes of those before, if that is more: somebody took more than was reserved.
- one ends: base = base + its size, but at most in_use. Nobody knows whether it left its arrays or others have taken
  theirs, so it is taken to have left all that it may have.
- in_use is seen below base: base = in_use. What was there before was freed.

Arrays that are allocated outside every workload look like growth of those within. A figure that is not known (None)
counts as no growth.

A workload that begins within another of the same framework takes its bytes from that one, if they may still be there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from memguard._base.advice import Advice
from memguard._base.types import MemoryInfo, Usage
from memguard._base.units import format_size
from memguard._budget import policy

Key = tuple[str, str]
"""Framework and GPU (UUID)."""
_SHOWN = 12
"""Holders that a message names."""


class Reservation(NamedTuple):
    """One workload that has reserved, or waits to: `size` bytes of `framework` on each of `uuids`.

    `asked` is what the program asked for; `size` is 0 if the workload around it has reserved that already. `since` is
    when it began to hold or to wait, as `time.monotonic()`. `outer` are the workloads that it runs within, `who` the
    thread or task in words.
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
    """All of one budget: `active` ones hold, `waiting` ones wait in this order. `bases`: see the module's docstring."""

    active: tuple[Reservation, ...] = ()
    waiting: tuple[Reservation, ...] = ()
    bases: Mapping[Key, int | None] = MappingProxyType({})

    @property
    def ids(self) -> frozenset[int]:
        """Those that hold or wait."""
        return frozenset(entry.id for entry in (*self.active, *self.waiting))


EMPTY = Reservations()


def begun(book: Reservations, entry: Reservation, in_use: Mapping[str, int | None]) -> Reservations:
    """With that entry among those that hold. `in_use` is the framework's, in bytes by UUID."""
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
    """Without the entry of that number, whether it held or waited. `in_use` as for `begun`; None: unknown."""
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
    """With that entry last among those that wait."""
    return book._replace(waiting=(*book.waiting, entry))


def seen(book: Reservations, framework: str, in_use: Mapping[str, int | None]) -> Reservations:
    """After a look at the framework: the same object if nothing is to be learned from that."""
    lower = {
        (framework, uuid): now
        for uuid, now in in_use.items()
        if now is not None and (base := book.bases.get((framework, uuid))) is not None and now < base
    }
    return book._replace(bases={**book.bases, **lower}) if lower else book


def growth(book: Reservations, framework: str, uuid: str, in_use: int | None) -> int:
    """What those that hold have taken of what they reserved, in bytes: all of one framework together."""
    base = book.bases.get((framework, uuid))
    if in_use is None or base is None:
        return 0
    return max(min(in_use - base, _sizes(book.active, framework, uuid)), 0)


def reserved_not_taken(
    book: Reservations, framework: str, uuid: str, in_use: int | None, without: Collection[int] = frozenset()
) -> int:
    """What is reserved and not yet taken, in bytes. `without`: entries that are not to count.

    Of what was taken as much as may be is taken to be theirs, so that the others' part is never less than it is.
    """
    sizes = _sizes(book.active, framework, uuid)
    theirs = _sizes([one for one in book.active if one.id in without], framework, uuid)
    taken = growth(book, framework, uuid, in_use)
    return sizes - theirs - max(taken - theirs, 0)


def may_have_left(book: Reservations, framework: str, uuid: str, in_use: int | None, mine: Collection[int]) -> int:
    """The most that these entries may not have taken yet of what they reserved, in bytes."""
    sizes = _sizes(book.active, framework, uuid)
    own = _sizes([one for one in book.active if one.id in mine], framework, uuid)
    taken = growth(book, framework, uuid, in_use)
    beside = sum(  # what other workloads within these were told that they have it already
        one.asked
        for one in book.active
        if not one.size and one.id not in mine and one.outer & frozenset(mine) and _is_of(one, framework, uuid)
    )
    return max(own - max(taken - (sizes - own), 0) - beside, 0)


def ahead(book: Reservations, number: int | None, mine: Collection[int]) -> tuple[Reservation, ...]:
    """Those that wait and are served before the entry of that number; all that wait, if it has no place yet.

    Nobody, if it begins within a workload that holds: those that wait may wait for that one's end.
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
    """Bytes that one framework asks for on one GPU. `footprint` as for `Framework.footprint`; `cap` in bytes.

    `mine` are the entries of the workloads within which it is asked; `before` those that wait and are served first.
    `keeps`: a workload asks, which gets them beside what is `mine`, or has them of that already.
    """

    framework: str
    uuid: str
    needed: int
    footprint: int
    cap: int
    mine: frozenset[int] = frozenset()
    before: tuple[Reservation, ...] = ()
    keeps: bool = False


def named(book: Reservations, asked: Asked) -> set[str]:
    """The frameworks whose usage `admit` needs, to say that it fits without a trim."""
    return {asked.framework, *(one.framework for one in book.active), *(one.framework for one in asked.before)}


class Verdict(NamedTuple):
    """`trim` and `refusal` as of `_budget.policy.Admission`. `reserved`: it is refused for what others reserved alone.

    `covered`: the workload around has reserved it already. `beside`: what is reserved of its own framework, in bytes,
    and has to fit under its cap too.
    """

    available: int
    trim: tuple[str, ...] = ()
    refusal: policy.Refusal | None = None
    reserved: bool = False
    covered: bool = False
    beside: int = 0


def admit(book: Reservations, asked: Asked, usages: Mapping[str, Usage | None], memory: MemoryInfo) -> Verdict:
    """Whether that many bytes can be had beside all that is reserved. The memory must be read after the usages.

    Within its cap: what it asks for and what its own framework's workloads may still take. On the GPU: the same, and
    what all others may still take, out of what is free and what trims give back.
    """
    framework, uuid = asked.framework, asked.uuid
    in_use = {name: policy.in_use(usage) for name, usage in usages.items()}
    plain = policy.admit(framework, asked.needed, asked.footprint, asked.cap, usages, memory)
    own_part = may_have_left(book, framework, uuid, in_use.get(framework), asked.mine)
    if own_part >= asked.needed:
        return Verdict(plain.available, plain.trim, plain.refusal, covered=True)
    reserved: dict[str, int] = {}
    without = frozenset[int]() if asked.keeps else asked.mine
    for name in {one.framework for one in (*book.active, *asked.before)}:
        size = reserved_not_taken(book, name, uuid, in_use.get(name), without) + _sizes(asked.before, name, uuid)
        if size:
            reserved[name] = size
    if not reserved or plain.refusal is not None:
        return Verdict(plain.available, plain.trim, plain.refusal, beside=reserved.get(framework, 0))
    own = reserved.pop(framework, 0)
    beside, free = dict(usages), memory.free
    for name, size in reserved.items():
        usage = usages.get(name) or Usage(0, 0)
        cached = cache(usage)
        free -= max(size - cached, 0)  # the rest comes out of its own cache, which is then not there for others
        if usage.reclaimable is not None:
            beside[name] = usage._replace(reclaimable=max(cached - size, 0))
        elif cached:
            beside[name] = usage._replace(in_use=(usage.in_use or 0) + min(cached, size))
    needed, footprint = asked.needed + own, asked.footprint + own
    found = policy.admit(framework, needed, footprint, asked.cap, beside, memory._replace(free=free))
    available = max(found.available - own, 0)
    if found.refusal is None:
        return Verdict(available, found.trim, beside=own)
    refusal = policy.Reserved(framework, asked.needed, available)
    return Verdict(available, refusal=refusal, reserved=True, beside=own)


def never(book: Reservations, asked: Asked, room: int, own_cap: int) -> Advice | None:
    """Why waiting is of no use: the workloads around it hold what it waits for. None if it may be of use.

    `room` is what all frameworks may have on the GPU together, `own_cap` the most that this one ever may.
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
    """One line for each that holds or waits on that GPU, in their order. `now` as `time.monotonic()`."""
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
    """What a trim of the framework may give back, as `_budget.policy` counts it."""
    return policy.cached(usage)


def _sizes(entries: Iterable[Reservation], framework: str, uuid: str) -> int:
    return sum(one.size for one in entries if _is_of(one, framework, uuid))


def _is_of(entry: Reservation, framework: str, uuid: str) -> bool:
    return entry.framework == framework and uuid in entry.uuids


def _ago(entry: Reservation, now: float) -> str:
    return f"{max(now - entry.since, 0):.1f} s"

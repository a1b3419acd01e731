"""Reservations: the bytes that each workload reserved per framework and GPU, and the queue of waiting workloads. Pure.

A workload allocates its reserved memory gradually, and frameworks do not report to which workload an array belongs.
They report only the sum over all their arrays, `in_use`. So the reservations of one framework on one GPU are accounted
as one sum:

    open = Σ sizes − growth          growth = in_use − base, between 0 and Σ sizes

`base` is an upper bound of the bytes in use outside the workloads: older arrays, and arrays that ended workloads left
behind. Because it is an upper bound, `open` is never less than the bytes that the workloads may still allocate, as long
as no workload exceeds its size:

- The first workload begins: base = in_use.
- Another workload begins: base = in_use − Σ sizes of the earlier workloads if that is larger than base, because then
  the earlier workloads exceeded their reservations.
- A workload ends: base = base + its size, but at most in_use. It may not have freed its arrays, so all its bytes are
  assumed to remain allocated.
- A reading shows in_use < base: base = in_use, because older arrays were freed.

Arrays allocated outside every workload count as growth of the workloads. If `in_use` is unknown (None), growth is 0.

A nested workload of the same framework uses the outer workload's reservation if enough of that reservation may be
unallocated.
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
"""Maximum number of lines in a message that list active and waiting reservations."""


class Reservation(NamedTuple):
    """The active or waiting reservation of one workload, for `size` bytes of `framework` on each of `uuids`.

    `requested`: the bytes that the program requested. `size` is 0 if an outer workload's reservation covers the
    requested bytes. `since`: the time at which the reservation became active or began to wait, as `time.monotonic()`.
    `outer`: the ids of the enclosing workloads' reservations. `owner`: the name of the workload's thread or asyncio
    task.
    """

    id: int
    name: str
    framework: str
    requested: int
    uuids: tuple[str, ...]
    since: float
    owner: str
    outer: frozenset[int] = frozenset()
    size: int = 0


class Reservations(NamedTuple):
    """All reservations of one budget: active reservations, and waiting reservations in the order in which they are
    served. For `bases` see the module's docstring."""

    active: tuple[Reservation, ...] = ()
    waiting: tuple[Reservation, ...] = ()
    bases: Mapping[Key, int | None] = MappingProxyType({})

    @property
    def ids(self) -> frozenset[int]:
        """The ids of all active and waiting reservations."""
        return frozenset(reservation.id for reservation in (*self.active, *self.waiting))


EMPTY = Reservations()


def begun(reservations: Reservations, reservation: Reservation, in_use: Mapping[str, int | None]) -> Reservations:
    """Add `reservation` to the active reservations. `in_use`: the framework's bytes in use by GPU UUID."""
    bases = dict(reservations.bases)
    for uuid in reservation.uuids if reservation.size else ():
        key, now = (reservation.framework, uuid), in_use.get(uuid)
        before = _sizes(reservations.active, *key)
        base = bases.get(key)
        if not before or base is None:
            bases[key] = now
        elif now is not None:
            bases[key] = max(min(base, now), now - before)
    waiting = tuple(one for one in reservations.waiting if one.id != reservation.id)
    return Reservations((*reservations.active, reservation), waiting, bases)


def ended(reservations: Reservations, number: int, in_use: Mapping[str, int | None] | None = None) -> Reservations:
    """Remove the reservation `number`, active or waiting. `in_use`: the framework's bytes in use by GPU UUID, None if
    unknown."""
    reservation = next((one for one in reservations.active if one.id == number), None)
    active = tuple(one for one in reservations.active if one.id != number)
    waiting = tuple(one for one in reservations.waiting if one.id != number)
    bases = dict(reservations.bases)
    for uuid in reservation.uuids if reservation is not None and reservation.size else ():
        assert reservation is not None
        key, now = (reservation.framework, uuid), (in_use or {}).get(uuid)
        base = bases.get(key)
        if not _sizes(active, *key):
            bases.pop(key, None)
        elif base is None:
            bases[key] = now
        else:
            bases[key] = base + reservation.size if now is None else min(base + reservation.size, now)
    return Reservations(active, waiting, bases) if active or waiting else EMPTY


def queued(reservations: Reservations, reservation: Reservation) -> Reservations:
    """Append `reservation` to the waiting reservations."""
    return reservations._replace(waiting=(*reservations.waiting, reservation))


def with_lower_bases(reservations: Reservations, framework: str, in_use: Mapping[str, int | None]) -> Reservations:
    """Lower each base that is above `in_use`. Returns the same object if no base changes."""
    lower = {
        (framework, uuid): now
        for uuid, now in in_use.items()
        if now is not None and (base := reservations.bases.get((framework, uuid))) is not None and now < base
    }
    return reservations._replace(bases={**reservations.bases, **lower}) if lower else reservations


def growth(reservations: Reservations, framework: str, uuid: str, in_use: int | None) -> int:
    """The bytes that all active workloads of one framework have allocated from their reservations; 0 if `in_use` is
    None."""
    base = reservations.bases.get((framework, uuid))
    if in_use is None or base is None:
        return 0
    return max(min(in_use - base, _sizes(reservations.active, framework, uuid)), 0)


def reserved_not_taken(
    reservations: Reservations, framework: str, uuid: str, in_use: int | None, without: Collection[int] = frozenset()
) -> int:
    """The bytes that workloads of `framework` have reserved on the GPU `uuid` and not yet allocated. `without`: ids of
    reservations to leave out.

    Allocated bytes are attributed to the reservations in `without` first, so that the result is never too small.
    """
    sizes = _sizes(reservations.active, framework, uuid)
    theirs = _sizes([one for one in reservations.active if one.id in without], framework, uuid)
    taken = growth(reservations, framework, uuid, in_use)
    return sizes - theirs - max(taken - theirs, 0)


def most_not_taken(
    reservations: Reservations, framework: str, uuid: str, in_use: int | None, enclosing: Collection[int]
) -> int:
    """An upper bound of the bytes that the reservations in `enclosing` (ids) hold and have not yet allocated."""
    sizes = _sizes(reservations.active, framework, uuid)
    own = _sizes([one for one in reservations.active if one.id in enclosing], framework, uuid)
    taken = growth(reservations, framework, uuid, in_use)
    beside = sum(  # requested by inner workloads from these reservations
        one.requested
        for one in reservations.active
        if not one.size
        and one.id not in enclosing
        and one.outer & frozenset(enclosing)
        and _is_of(one, framework, uuid)
    )
    return max(own - max(taken - (sizes - own), 0) - beside, 0)


def served_before(
    reservations: Reservations, number: int | None, enclosing: Collection[int]
) -> tuple[Reservation, ...]:
    """The waiting reservations that are served before the reservation `number`; all if `number` is not queued yet.

    Empty if the request is nested in an active workload, because the waiting reservations may need that workload to
    end.
    """
    if any(one.id in enclosing for one in reservations.active):
        return ()
    found: list[Reservation] = []
    for one in reservations.waiting:
        if one.id == number:
            break
        found.append(one)
    return tuple(found)


class Request(NamedTuple):
    """A request for bytes of one framework on one GPU. `footprint`: the result of `Framework.footprint`. `cap` is in
    bytes.

    `enclosing`: the ids of the enclosing workloads' reservations. `before`: the waiting reservations that are served
    first. `reserves`: True if a workload reserves the bytes, False for a check. `shared`: for each framework that
    shares an allocator, the allocator's name.
    """

    framework: str
    uuid: str
    needed: int
    footprint: int
    cap: int
    enclosing: frozenset[int] = frozenset()
    before: tuple[Reservation, ...] = ()
    reserves: bool = False
    shared: Mapping[str, str] = MappingProxyType({})

    def allocator_of(self, framework: str) -> str:
        """The name of the allocator from which the framework allocates."""
        return self.shared.get(framework, framework)


def frameworks_to_read(reservations: Reservations, request: Request) -> set[str]:
    """The frameworks whose usages `admit` needs to admit the request without a trim."""
    return {
        request.framework,
        *(one.framework for one in reservations.active),
        *(one.framework for one in request.before),
    }


class AdmissionResult(NamedTuple):
    """The result of `admit`. `trim` and `refusal` are as in `_budget.policy.Admission`.

    `reserved`: True if the request would fit without the reservations of other workloads. `covered`: True if an outer
    workload's reservation covers the request. `reserved_under_cap`: the bytes reserved in the same allocator and not
    yet allocated, which must also fit under its cap.
    """

    available: int
    trim: tuple[str, ...] = ()
    refusal: policy.Refusal | None = None
    reserved: bool = False
    covered: bool = False
    reserved_under_cap: int = 0


def admit(
    reservations: Reservations, request: Request, usages: Mapping[str, Usage | None], memory: MemoryInfo
) -> AdmissionResult:
    """Decide whether the bytes are available in addition to all reservations. `memory` must be read after `usages`.

    The request and the unallocated reservations of the same allocator must fit under the cap. In addition to these, the
    unallocated reservations of all other allocators must fit in the GPU's free and trimmable memory. `usages` has both
    frameworks and allocators as keys.
    """
    framework, uuid, allocator = request.framework, request.uuid, request.allocator_of(request.framework)
    in_use = {name: policy.in_use(usage) for name, usage in usages.items()}
    plain = policy.admit(framework, request.needed, request.footprint, request.cap, usages, memory, allocator)
    left_of_own = most_not_taken(reservations, framework, uuid, in_use.get(framework), request.enclosing)
    if left_of_own >= request.needed:
        return AdmissionResult(plain.available, plain.trim, plain.refusal, covered=True)
    reserved: dict[str, int] = {}
    without = frozenset[int]() if request.reserves else request.enclosing
    for name in {one.framework for one in (*reservations.active, *request.before)}:
        size = reserved_not_taken(reservations, name, uuid, in_use.get(name), without) + _sizes(
            request.before, name, uuid
        )
        if size:
            reserved[request.allocator_of(name)] = reserved.get(request.allocator_of(name), 0) + size
    if not reserved or plain.refusal is not None:
        return AdmissionResult(
            plain.available, plain.trim, plain.refusal, reserved_under_cap=reserved.get(allocator, 0)
        )
    own = reserved.pop(allocator, 0)
    beside, free = dict(usages), memory.free
    for name, size in reserved.items():
        usage = usages.get(name) or Usage(0, 0)
        cached = cache(usage)
        free -= max(size - cached, 0)  # the allocator's own cache serves the other bytes
        if usage.reclaimable is not None:
            beside[name] = usage._replace(reclaimable=max(cached - size, 0))
        elif cached:
            beside[name] = usage._replace(in_use=(usage.in_use or 0) + min(cached, size))
    needed, footprint = request.needed + own, request.footprint + own
    found = policy.admit(framework, needed, footprint, request.cap, beside, memory._replace(free=free), allocator)
    available = max(found.available - own, 0)
    if found.refusal is None:
        return AdmissionResult(available, found.trim, reserved_under_cap=own)
    refusal = policy.Reserved(framework, request.needed, available)
    return AdmissionResult(available, refusal=refusal, reserved=True, reserved_under_cap=own)


def why_waiting_is_useless(reservations: Reservations, request: Request, room: int, own_cap: int) -> Advice | None:
    """The reason why waiting cannot succeed, namely that enclosing workloads reserved the memory; None if waiting may
    help.

    `room`: limit − reserve. `own_cap`: the highest possible cap of the framework.
    """
    around = [
        one for one in reservations.active if one.id in request.enclosing and request.uuid in one.uuids and one.size
    ]
    same = [one for one in around if one.framework == request.framework]
    for held, most, what in (
        (same, own_cap, f"{request.framework}'s cap"),
        (around, room, "what the budget has there"),
    ):
        size = sum(one.size for one in held)
        if held and request.footprint + size > most:
            names = " and ".join(f"{one.name!r}" for one in held)
            return Advice(
                f"{request.framework} needs {format_size(request.needed)}, and {names}, within which it is asked, "
                f"reserved {format_size(size)}: both are more than {what}, {format_size(most)}, so that it would wait "
                f"for itself",
                "reserve it all in the outer workload, or begin this one after the outer one ends",
            )
    return None


def reservation_lines(reservations: Reservations, uuid: str, in_use: Mapping[str, int | None], now: float) -> list[str]:
    """One line for each reservation on the GPU `uuid`, active reservations first. `now` as `time.monotonic()`."""
    lines = []
    held = [one for one in reservations.active if uuid in one.uuids and one.size]
    for one in held:
        alone = sum(other.framework == one.framework for other in held) == 1
        taken = min(growth(reservations, one.framework, uuid, in_use.get(one.framework)), one.size)
        used = (
            ""
            if in_use.get(one.framework) is None
            else f", {'' if alone else 'at most '}{format_size(taken)} of it in use"
        )
        lines.append(
            f"{one.name!r} ({one.framework}, {one.owner}) reserved {format_size(one.size)} {_ago(one, now)} ago{used}"
        )
    for one in reservations.waiting:
        if uuid in one.uuids:
            lines.append(
                f"{one.name!r} ({one.framework}, {one.owner}) has waited {_ago(one, now)} for "
                f"{format_size(one.requested)}"
            )
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more"]


def cache(usage: Usage) -> int:
    """The bytes that a trim of the framework may return."""
    return cached(usage)


def _sizes(reservations: Iterable[Reservation], framework: str, uuid: str) -> int:
    return sum(one.size for one in reservations if _is_of(one, framework, uuid))


def _is_of(reservation: Reservation, framework: str, uuid: str) -> bool:
    return reservation.framework == framework and uuid in reservation.uuids


def _ago(reservation: Reservation, now: float) -> str:
    return f"{max(now - reservation.since, 0):.1f} s"

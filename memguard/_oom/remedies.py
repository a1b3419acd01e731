"""Remedies for an out-of-memory error, best first, each with the figures that show its gain. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from memguard._base.types import DevicePlan, NoHelp, Plan
from memguard._base.units import GRANULE, MIB, format_size, round_down, round_up
from memguard._budget import policy
from memguard._budget.shared_pool import allocator_of, caps_of, clients
from memguard._frameworks.specs import CONTEXT_MAKER, NEVER_GIVE_BACK, SPECS
from memguard._oom.causes import WORKSPACE, Case
from memguard._oom.classify import Classification
from memguard.errors import MemguardError

_WORTH = 16 * MIB
"""Minimum bytes that a trim must gain to be listed as a remedy."""
_OTHER_MEMORY = {
    "pinned": (
        "use fewer or smaller page-locked buffers (pin_memory, prefetching)",
        "raise what the process may lock: ulimit -l, or the container's memlock; free CPU memory",
    ),
    "host": (
        "use less CPU memory: smaller batches, fewer loader workers, less prefetching",
        "look at free -h and at the memory limit of the container or job",
    ),
    "disk": (
        "df -h says which file system is full; /dev/shm is one too",
        "in a container give /dev/shm more: docker run --shm-size=8g; or use fewer loader workers",
    ),
}

_NO_ROOM_WAS_MADE = {
    NoHelp.LOCK_HELD: "run it again: memguard's lock is free once the call that has it (trim, resize, init) ends",
    NoHelp.WITHIN_CALL: "run it again: memguard's lock is free once the call that has it (trim, resize, init) ends",
    NoHelp.CAPTURE: "run the work once before the capture, or call memguard.require there: memguard can make room then",
    NoHelp.COMMUNICATORS: "do it on a thread of the program, not in a callback of memguard's: room can be made there",
}
"""The remedy for each reason why memguard freed no memory for the request."""


@dataclass(frozen=True)
class Remedy:
    """One remedy, and the bytes that it gains; None if unknown."""

    text: str
    bytes: int | None = None


def remedies(classification: Classification, case: Case | None, reason: str = "elsewhere") -> tuple[Remedy, ...]:
    """The remedies, best first. `reason`: the reason of the failure, as in `Report.reason`."""
    if case is None:
        return tuple(Remedy(text) for text in _OTHER_MEMORY.get(classification.memory, ()))
    found: list[Remedy] = []
    if reason == "fragmented":
        found += _defragment(case)
    if reason in ("cap", "cap and card", "fragmented"):
        found += _higher_cap(case)
        if reason != "fragmented" and case.at_refusal and case.fits_unfragmented:
            found += _defragment(case)
    if reason in ("card", "cap and card", "unknown"):
        found += _trims(case)
    if reason in ("card", "cap and card"):
        found += [*_processes(case), *_fixed_pools(case), *_unaccounted(case)]
        if case.fragmented_cache >= max(case.classification.requested or 0, WORKSPACE):
            found += _defragment(case)
    found += _use_less(case, reason)
    return tuple(found)


def if_no_room_was_made(why: NoHelp) -> tuple[Remedy, ...]:
    """The first remedy if memguard freed no memory for the request."""
    return (Remedy(_NO_ROOM_WAS_MADE[why]),) if why in _NO_ROOM_WAS_MADE else ()


def _trims(case: Case) -> Iterator[Remedy]:
    """Trim other frameworks' caches, largest first. Omits the requester, which has already trimmed its own cache."""
    sizes = {}
    for row in case.frameworks:
        size = row.reclaimable if row.reclaimable is not None else row.cached
        if allocator_of(case.device_plan, row.name) == case.allocator:  # the requester already uses this cache
            continue
        if row.name not in NEVER_GIVE_BACK and size is not None and size >= _WORTH:
            sizes[row.name] = row, size
    for name, (row, size) in sorted(sizes.items(), key=lambda item: -item[1][1]):
        # `memguard.trim` accepts only frameworks of the budget.
        own = (SPECS[name].own_trim if name in SPECS else "memguard.trim()") or f"its own call, in {name},"
        call = f"memguard.trim({name!r})" if row.cap is not None else own
        if row.reclaimable is None:
            yield Remedy(f"{name} caches {format_size(size)}: {call} frees the part that is not fragmented", size)
        else:
            enough = ", which is enough" if case.exceeds_free and case.free + size >= case.needed else ""
            yield Remedy(f"{name} holds {format_size(size)} reclaimable: {call} frees it{enough}", size)


def _processes(case: Case) -> Iterator[Remedy]:
    known = sorted(((size, pid) for pid, size in case.other_processes.items() if size), reverse=True)
    where, other = ("the machine's memory", "") if case.unified else ("this GPU", ", or use another GPU")
    for size, pid in known[:2]:
        if size >= WORKSPACE:
            yield Remedy(f"process {pid} holds {format_size(size)} of {where}: end it{other}", size)
    if case.unified:  # NVML lists no programs that use only the CPU; on a Jetson, no processes at all
        yield Remedy(
            "other programs use this memory too, those of the CPU as well: free -h and top show which; end some"
        )
    elif case.gpu.process is None:
        yield Remedy("NVML cannot say which memory is this process's (usual in containers): run nvidia-smi on the host")
    elif not known and (size := case.gpu.row("other processes").bytes or 0) >= WORKSPACE:
        yield Remedy(f"other processes hold {format_size(size)} of this GPU: nvidia-smi names them", size)


def _fixed_pools(case: Case) -> Iterator[Remedy]:
    for row in case.frameworks:
        if row.name in NEVER_GIVE_BACK and row is not case.row and (row.bytes or 0) >= WORKSPACE:
            used = "" if row.in_use is None else f" ({format_size(row.in_use)} in use)"
            yield Remedy(
                f"{row.name}'s pool of {format_size(row.bytes)}{used} never returns memory to the driver: "
                f"lower frameworks.{row.name} and restart"
            )


def _unaccounted(case: Case) -> Iterator[Remedy]:
    size = case.gpu.row("unaccounted").bytes or 0
    if size >= 2 * WORKSPACE and case.gpu.process is not None:
        yield Remedy(
            f"{format_size(size)} of this process belong to no framework: an extension's own cudaMalloc, or a second "
            f"CUDA context ({CONTEXT_MAKER.context_module})",
            size,
        )


def _higher_cap(case: Case) -> Iterator[Remedy]:
    """Raise the cap so that the request fits. If the plan has no room for this on every GPU, also lower another cap or
    raise `device.limit`."""
    row, device_plan, plan = case.row, case.device_plan, case.plan
    if row is None or device_plan is None or plan is None or row.name not in device_plan.caps:
        return
    name, cap = row.name, device_plan.caps[row.name]
    if (allocator := allocator_of(device_plan, name)) != name:
        names, size = " and ".join(clients(device_plan, allocator)), format_size(cap)
        yield Remedy(
            f"{names} share one pool of {size}: raise the part of any of them and restart, as its size is fixed"
        )
        return
    if row.cap is not None and row.cap < cap:
        own, most = format_size(row.cap), format_size(cap)
        yield Remedy(f"{name}'s own limit of {own} is stricter than its cap of {most}: raise or remove that limit")
        return
    # Allocators round sizes up, PyCUDA by up to a sixteenth. If the bytes in use are unknown, assume the whole cap.
    requested, taken = case.classification.requested, cap if case.not_reusable is None else case.not_reusable
    wanted = round_up(taken + case.needed + (requested or 0) // 16)
    if requested is None and case.refused_by_cap:  # the request exceeded the cap by an unknown size
        wanted = max(wanted, round_up(cap + WORKSPACE))
    least, gain = ("at least ", None) if requested is None else ("", wanted - cap)
    # A share may be rounded down by a granule, so one granule is reserved for each other framework.
    spare = {p.device.uuid: _highest_cap(p, name) - GRANULE * (len(p.caps) - 1) for p in plan.devices}
    if wanted <= cap:
        return
    if name in device_plan.elastic and wanted <= min(spare.values()):
        yield from _wider_bounds(device_plan, name, wanted, least, gain)
        return
    if wanted <= min(spare.values()):
        later = " and restart: its pool is fixed"
        if name not in NEVER_GIVE_BACK:
            held = Counter[str]()
            for r in case.frameworks:
                held[allocator_of(device_plan, r.name)] += r.bytes or 0
            # Exclude memory lent to elastic frameworks, and memory that other frameworks hold above their caps.
            now = wanted <= min(policy.highest_cap(p, name, held if p is device_plan else {}) for p in plan.devices)
            later = f", or memguard.resize({name!r}, '{wanted // MIB}MiB')" if now else ""
        setting = _share(plan, device_plan, wanted, spare, least) or f"limit to {least}{wanted // MIB}MiB"
        if case.budget is not None and case.budget.frameworks[name].min is not None:  # the cap is elastic
            setting = f"min to {least}{wanted // MIB}MiB"
        yield Remedy(f"raise frameworks.{name}.{setting}{later}", gain)
        return
    missing = wanted - min(spare.values())
    idle = {
        r.name: (_guaranteed(device_plan, r.name) - r.bytes, r)
        for r in case.frameworks
        if r is not row and r.cap and r.bytes is not None and r.at_least is None and r.name in caps_of(device_plan)
    }
    other = max(idle, key=lambda key: idle[key][0], default=None)
    size = f"{least}{format_size(wanted)}"
    text = f"{name} would need a cap of {size}, {format_size(missing)} more than the budget has left: "
    if other is not None and idle[other][0] >= missing:
        used, most = format_size(idle[other][1].bytes), format_size(_guaranteed(device_plan, other))
        less = round_down(_guaranteed(device_plan, other) - missing)
        settings = {name: wanted, other: less}
        if case.budget is None or _replanned_cap(case, wanted, settings) is not None:
            limits = f"to {less // MIB}MiB and raise {_setting(device_plan, name, 'max')} to {wanted // MIB}MiB"
            yield Remedy(
                f"{text}lower {_setting(device_plan, other, 'min')}, which holds {used} of its {most}, {limits}", gain
            )
            return
    if case.budget is None:
        yield Remedy(f"{text}lower another cap, or raise device.limit if the GPU has that to spare")
        return
    yield from _higher_limit(case, wanted, text)


def _guaranteed(device_plan: DevicePlan, name: str) -> int:
    """An allocator's guaranteed bytes on one GPU (the min of an elastic cap, or the whole fixed cap)."""
    return device_plan.elastic.get(name, (caps_of(device_plan)[name], 0))[0]


def _highest_cap(device_plan: DevicePlan, name: str) -> int:
    """The highest cap of a framework that leaves the other allocators their guaranteed bytes."""
    return (
        device_plan.limit
        - device_plan.reserve
        - sum(_guaranteed(device_plan, other) for other in caps_of(device_plan) if other != name)
    )


def _setting(device_plan: DevicePlan, name: str, bound: str) -> str:
    return f"frameworks.{name}.{bound}" if name in device_plan.elastic else f"frameworks.{name}"


def _wider_bounds(device_plan: DevicePlan, name: str, wanted: int, least: str, gain: int | None) -> Iterator[Remedy]:
    """Raise the bounds of an elastic share: its max, or its min if other frameworks have borrowed the memory below its
    max."""
    size = f"{least}{wanted // MIB}MiB"
    if wanted > device_plan.elastic[name][1]:
        yield Remedy(f"raise frameworks.{name}.max to {size}", gain)
        return
    others = [one for one, (low, _) in device_plan.elastic.items() if one != name and device_plan.caps[one] > low]
    if others:
        borrowers = " and ".join(
            f"{one} has {format_size(device_plan.caps[one] - device_plan.elastic[one][0])}" for one in others
        )
        lower = " or ".join(f"frameworks.{one}.max" for one in others)
        yield Remedy(f"{borrowers} more than its min: raise frameworks.{name}.min to {size}, or lower {lower}", gain)


def _higher_limit(case: Case, wanted: int, text: str) -> Iterator[Remedy]:
    """Raise `device.limit` to the smallest value with which the request fits. Shares grow with the limit, so the budget
    is planned again."""
    budget, device_plan, row = case.budget, case.device_plan, case.row
    assert budget is not None and device_plan is not None and row is not None
    name, cap = row.name, device_plan.caps[row.name]
    others = [one for other, one in budget.frameworks.items() if other != name]
    parts = [one.guaranteed for one in others]
    shares = sum((one for one in parts if isinstance(one, Fraction)), Fraction(0))
    fixed = sum(round_down(one) for one in parts if isinstance(one, int))
    own = budget.frameworks[name].share
    rooms: list[tuple[Fraction, dict[str, int]]] = []
    if own is not None:  # the share grows with the limit; add one granule for rounding down
        rooms.append(((wanted + GRANULE) / Fraction(own), {}))
    if shares < 1:
        rooms.append((Fraction(wanted + fixed) / (1 - shares), {name: wanted}))
    for room, settings in rooms:
        limit = -(-(ceil(room) + device_plan.reserve) // MIB) * MIB
        more = _replanned_cap(case, wanted, settings, limit) if limit > device_plan.limit else None
        if more is not None:
            with_cap = f", and {_setting(device_plan, name, 'max')} to {wanted // MIB}MiB" if settings else ""
            limits = f"from {format_size(device_plan.limit)} to {limit // MIB}MiB{with_cap}"
            yield Remedy(
                f"{text}raise device.limit {limits}", None if case.classification.requested is None else more - cap
            )
            return
    yield Remedy(f"{text}neither the other caps nor the GPU have that to spare: make smaller requests")


def _replanned_cap(case: Case, wanted: int, caps: Mapping[str, int], limit: int | None = None) -> int | None:
    """The requester's cap on this GPU if the budget had the caps `caps` and the limit `limit`; None if such a budget
    cannot be planned, or if the requester's cap is below `wanted`."""
    budget, device_plan, row, plan = case.budget, case.device_plan, case.row, case.plan
    assert budget is not None and device_plan is not None and row is not None and plan is not None
    written = budget.model_dump(exclude_none=True)
    for name, size in caps.items():
        own, moves = written["frameworks"][name], name in device_plan.elastic
        kept = {key: value for key, value in own.items() if key not in ("share", *(() if moves else ("min", "max")))}
        written["frameworks"][name] = {**kept, ("max" if name == row.name else "min") if moves else "limit": size}
    if limit is not None:
        written["device"] = {**written.get("device", {}), "limit": limit}
    try:
        changed = policy.plan(type(budget).from_mapping(written), [one.device for one in plan.devices])
    except MemguardError:
        return None
    here = next(one for one in changed.devices if one.device.uuid == device_plan.device.uuid)
    given = here.caps[row.name]
    if row.name in here.elastic:
        given = min(here.elastic[row.name][1], _highest_cap(here, row.name))
    return given if given >= wanted else None


def _share(plan: Plan, device_plan: DevicePlan, wanted: int, spare: Mapping[str, int], least: str = "") -> str | None:
    """The budget setting with the smallest share, in whole per cent or tenths of a per cent, that gives `wanted` bytes
    on this GPU and fits every GPU; None if no share fits."""
    room = device_plan.limit - device_plan.reserve
    for digits in (1, 10):
        share = Fraction(ceil(Fraction(100 * digits * wanted, room)), 100 * digits)
        if all(share * (p.limit - p.reserve) <= spare[p.device.uuid] for p in plan.devices):
            return f"share to {least}{float(100 * share):g}% ({format_size(int(share * room))})"
    return None


def _defragment(case: Case) -> Iterator[Remedy]:
    """The remedy for a fragmented cache."""
    assert case.row is not None
    name, size = case.row.name, case.fragmented_cache
    advice = SPECS[name].unfragment
    if advice is not None:
        yield Remedy(f"{name} caches {format_size(size)} in partly used segments: {advice}", size)
    elif name in NEVER_GIVE_BACK:
        yield Remedy(f"{name}'s pool has {format_size(size)} unused, in pieces: make the largest arrays first", size)
    else:
        yield Remedy(f"{name} caches {format_size(size)} in pieces between arrays: free those, then trim", size)


def _use_less(case: Case, reason: str) -> Iterator[Remedy]:
    """Use less memory, or check another possible cause."""
    row = case.row
    if reason == "unknown" and not case.classification.certain and not case.classification.refused:
        yield Remedy("page-locked host memory gives the same error: check pin_memory and ulimit -l")
    if row is not None and row.in_use:
        yield Remedy(f"{row.name} has {format_size(row.in_use)} in live arrays: free some, or make the batch smaller")
    elif row is not None and row.in_use is None and row.bytes != 0 and reason in ("cap", "cap and card"):
        yield Remedy(f"free some of {row.name}'s arrays, or make the batch smaller; how much is in use is unknown")
    elif row is None and reason == "card":
        reserve = f" (now {format_size(case.device_plan.reserve)})" if case.device_plan is not None else ""
        yield Remedy(f"leave libraries more room outside the caps: raise device.reserve{reserve}, or lower a cap")

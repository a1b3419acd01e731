"""Resolve a budget against devices into a plan, change its caps, and decide on the admission of requests.

Uses no clock, thread, environment variable or GPU. `plan` returns a Plan or raises PlanError with every problem.
`_divide` divides memory by the largest-remainder method in granules of 2 MiB, so caps never exceed the declared sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from memguard._base.advice import Advice
from memguard._base.framework_spec import CONTEXT, OVERHEADS, SECOND_CONTEXT, SLACK, FrameworkSpec, Outside
from memguard._base.types import Device, DevicePlan, MemoryInfo, Plan, Room, Usage, cached
from memguard._base.units import GRANULE, MIB, format_size, round_down
from memguard._budget.shared_pool import allocator_of, caps_of, clients, members, with_pool
from memguard._frameworks.specs import NEVER_GIVE_BACK, OPTION_OWNERS, SPECS
from memguard.errors import PlanError, Problem

if TYPE_CHECKING:
    from memguard._budget import Budget
    from memguard._budget.ranks import Sharing

T = TypeVar("T")

RESERVE_BY_ARCHITECTURE = {"turing": Fraction(3, 4), "ampere": Fraction(7, 8), "ada": Fraction(7, 8)}
"""Factor of `reserve: auto` on older architectures, whose CUDA contexts are smaller because they have fewer
multiprocessors. Not measured."""


def auto_reserve(
    architecture: str, frameworks: Sequence[str], communicators: int = 0, second_context: bool = False
) -> int:
    """The bytes of `reserve: auto`. Computed from the *declared* frameworks, so that import order changes no cap."""
    libraries = [f"nccl {number}" for number in range(1, communicators + 1)] + [SECOND_CONTEXT] * second_context
    needed = CONTEXT + sum(workspace(name) for name in (*frameworks, *libraries)) + SLACK
    return round_down(int(needed * RESERVE_BY_ARCHITECTURE.get(architecture, Fraction(1))))


def workspace(name: str) -> int:
    """The bytes that `reserve: auto` includes for a framework, or for a library that `Framework.libraries` names."""
    found = _outside(name)
    return found.workspace if found is not None else 128 * MIB


def modules(name: str) -> int:
    """The most memory outside every cap that was measured for a framework or library, in bytes; 0 if not measured."""
    found = _outside(name)
    return found.modules if found is not None else 0


def _outside(name: str) -> FrameworkSpec | Outside | None:
    return SPECS.get(name) or OVERHEADS.get(name) or OVERHEADS.get(name.rpartition(" ")[0])


def needs_ordinals(budget: Budget) -> bool:
    """True if the budget names a GPU by CUDA ordinal, so that memguard must query CUDA for the ordinals."""
    return any(_is_ordinal(key) for key in budget.devices)


class _Rule(Generic[T]):
    """A limit or reserve that the budget sets for one device, and the path of the mapping in the file that sets it."""

    def __init__(self, value: T, at: tuple[str, ...]) -> None:
        self.value, self.at = value, at


def plan(budget: Budget, devices: Sequence[Device], sharing: Sharing | None = None) -> Plan:
    """Resolve the budget against the devices. Raises PlanError if the budget does not fit a device.

    `sharing` gives the number of ranks that share each device. The plan is then for one rank: each limit is the
    budget's limit divided by that number, rounded down to granules. Without `sharing`, the number comes from a budget
    with `ranks: {per_gpu: 2}`.
    """
    whole = _resolved(budget, devices)
    if sharing is None and isinstance(budget.ranks, int):
        from memguard._budget import ranks  # imported only for a budget with ranks

        sharing = ranks.declared(budget.ranks, None)
    if sharing is None:
        return whole
    from memguard._budget.parts import part_of, with_nccl  # imported only for a divided budget

    among = {device.uuid: sharing.on(device.ordinal) for device in devices}
    if sharing.nccl:
        budget = with_nccl(budget)
    parts: dict[str, DevicePlan] = {}
    for sharers in {*among.values()}:
        own = [device for device in devices if among[device.uuid] == sharers]
        resolved = _resolved(part_of(budget, sharers), own, sharers)
        parts.update((part.device.uuid, part) for part in resolved.devices)
    return replace(whole, devices=tuple(parts[device.uuid] for device in devices))


def _resolved(budget: Budget, devices: Sequence[Device], sharers: int = 1) -> Plan:
    """Resolve the budget on these devices. If `sharers` > 1, the budget is already divided for one of these ranks."""
    problems: list[Problem] = []
    plans = []
    matched: set[str] = set()
    if needs_ordinals(budget) and any(device.ordinal is None for device in devices):
        problems.append(
            budget.problem(
                ("devices",),
                "GPUs are named by CUDA ordinal, but CUDA's numbering cannot be read here",
                "name the GPUs by UUID (`nvidia-smi -L`), or run `memguard doctor` to see why CUDA does not start",
            )
        )
    misfits = _Misfits(sharers)
    for device in devices:
        limit: _Rule[Fraction | int] = _Rule(budget.device.limit, ("device",))
        reserve: _Rule[int | str] = _Rule(budget.device.reserve, ("device",))
        keys = [str(key) for key in budget.devices if _matches(str(key), device)]
        matched.update(keys)
        overrides = {str(key): value for key, value in budget.devices.items()}
        for key in sorted(keys, key=_precedence, reverse=True):  # the most specific key is applied last
            override = overrides[key]
            limit = limit if override.limit is None else _Rule(override.limit, ("devices", key))
            reserve = reserve if override.reserve is None else _Rule(override.reserve, ("devices", key))
        resolved = _device_plan(budget, device, limit, reserve, misfits, sharers)
        if resolved is not None:
            plans.append(resolved)
    problems += misfits.problems(budget)
    if problems:
        raise PlanError(problems, budget.source or "plan")
    options = {
        name: {option.name: getattr(framework, option.name) for option in SPECS[name].options if option.applied}
        for name, framework in budget.frameworks.items()
    }
    idle = [str(key) for key in budget.devices if str(key) not in matched]
    notes = [f"devices: {key!r} names none of the GPUs that this process sees" for key in idle]
    return Plan(tuple(plans), options, (*notes, *_fixed(budget)))


def _fixed(budget: Budget) -> Iterator[str]:
    """Notes on elastic frameworks whose caps cannot change."""
    from memguard._budget.values import text

    for name, framework in budget.frameworks.items():
        if framework.min is not None and name in NEVER_GIVE_BACK:
            yield (
                f"{name}: its limit cannot change while it runs, and its pool gives nothing back, so of min "
                f"{text(framework.min)} and max {text(framework.max)} it gets its min; raise that if it needs more"
            )


class _Misfits:
    """Collects the problems on all devices before any fix is written, because a figure in a fix must fit every device.

    `found` has tuples: path, message for one device, and fix (None if the fix depends on all devices). `rooms` has
    limit − reserve of each device that the amounts exceed. `most` maps the path of a limit above a GPU's memory to the
    smallest usable memory of the GPUs with this limit. `least` maps the path of a limit or max that is too low to the
    smallest value that fits all GPUs. With `sharers` > 1, the budget is already divided for one of these ranks.
    """

    def __init__(self, sharers: int = 1) -> None:
        self.sharers = sharers
        self.found: list[tuple[tuple[str, ...], str, str | None]] = []
        self.rooms: list[int] = []
        self.most: dict[tuple[str, ...], int] = {}
        self.least: dict[tuple[str, ...], int] = {}

    def problems(self, budget: Budget) -> list[Problem]:
        if self.sharers > 1:
            return [
                budget.problem(loc, f"{message}: one of {self.sharers} ranks that share it", self._for_all(loc))
                for loc, message, _ in self.found
            ]
        return [budget.problem(loc, message, fix or self._fix(budget, loc)) for loc, message, fix in self.found]

    def _for_all(self, loc: tuple[str, ...]) -> str:
        """The fix for a budget that fits one process but not `sharers` ranks, which share the limit in the file."""
        fewer = "start fewer ranks on a GPU"
        if loc in self.least and loc[-1] != "max":
            needed = -(-self.least[loc] * self.sharers // MIB)
            return f"{fewer}, raise {'.'.join(loc)}.limit to {needed}MiB, or lower its reserve"
        return f"{fewer}, raise device.limit, or write shares instead of bytes"

    def _fix(self, budget: Budget, loc: tuple[str, ...]) -> str:
        from memguard._budget import suggestions, values

        if loc[-1] == "limit" and loc in self.most:
            return f"lower it to at most {self.most[loc] // MIB}MiB or write a percentage"
        if loc[-1] == "max":
            return f"raise its max to at least {-(-self.least[loc] // MIB)}MiB, or lower its min"
        if loc in self.least:
            entry = ".".join(loc)
            return f"raise {entry}.limit to {-(-self.least[loc] // MIB)}MiB, or lower {entry}.reserve"
        shares, limits = _parts(budget)
        elastic = [name for name, part in budget.frameworks.items() if part.min is not None]
        lowered = values.as_text(suggestions.fitting(shares, limits, min(self.rooms)), elastic)
        raised = "" if self.most else ", or raise device.limit"  # with `most`, a limit already exceeds a GPU's memory
        if not lowered:
            return f"not even the smallest caps fit: name fewer frameworks{raised}"
        parts = "shares, limits or minima" if elastic else "shares or limits"
        return f"lower {parts}, for example to {lowered}{raised}"


def _parts(budget: Budget) -> tuple[dict[str, Fraction], dict[str, int]]:
    """The guaranteed amounts of the budget's frameworks: those given as shares, and those given in bytes."""
    parts = {name: framework.guaranteed for name, framework in budget.frameworks.items()}
    shares = {name: part for name, part in parts.items() if isinstance(part, Fraction)}
    return shares, {name: round_down(part) for name, part in parts.items() if isinstance(part, int)}


def _device_plan(
    budget: Budget,
    device: Device,
    limit_rule: _Rule[Fraction | int],
    reserve_rule: _Rule[int | str],
    misfits: _Misfits,
    sharers: int,
) -> DevicePlan | None:
    """The plan of one device; None if the budget does not fit the device. Adds the reasons to `misfits`."""
    label = f"{device.name} ({device.uuid})"
    share = limit_rule.value
    limit = int(share * device.usable) if isinstance(share, Fraction) else share
    limit = round_down(limit) if sharers > 1 else limit
    fits = limit <= device.usable
    if not fits:
        message = f"the limit of {format_size(limit)} is more than {label} has ({format_size(device.usable)})"
        at = (*limit_rule.at, "limit")
        misfits.found.append((at, message, None))
        misfits.most[at] = min(device.usable, misfits.most.get(at, device.usable))
        limit = device.usable // MIB * MIB  # continue with the largest possible limit, to report further misfits
    auto = reserve_rule.value == "auto"
    reserve = (
        auto_reserve(device.architecture, list(budget.frameworks), communicators(budget), own_context(budget))
        if isinstance(reserve_rule.value, str)
        else reserve_rule.value
    )
    room = limit - reserve
    shares, fixed = _parts(budget)
    total = sum(shares.values(), Fraction(0))
    if room < GRANULE:
        message = f"nothing is left on {label}: limit {format_size(limit)}, reserve {format_size(reserve)}"
        at = limit_rule.at if reserve_rule.at == ("device",) else reserve_rule.at
        # Enough for all amounts in bytes, and for the smallest cap (one granule) of each share.
        least = sum(fixed.values()) / (1 - total) if fixed and total < 1 else 0
        least = reserve + int(max(least, *(GRANULE / part for part in shares.values()), GRANULE)) + 1
        fix = None if least <= device.usable and fits else _smaller_reserve(auto, device.usable - (least - reserve))
        misfits.found.append((at, message, fix))
        misfits.least[at] = max(least, misfits.least.get(at, 0))
        return None
    wanted = total * room + sum(fixed.values())
    if wanted > room:
        message = (
            f"the frameworks ask for {format_size(int(wanted))} on {label}, "
            f"but limit − reserve is {format_size(room)} ({format_size(limit)} − {format_size(reserve)})"
        )
        misfits.found.append((("frameworks",), message, None))
        misfits.rooms.append(room)
        return None
    divided = {**fixed, **_divide(room, shares)}
    for name in (name for name, cap in divided.items() if cap < GRANULE):
        message = f"its cap on {label} would be less than {format_size(GRANULE)}, the smallest cap"
        least_share = Fraction(-(-GRANULE * 100_000 // room), 1000)
        key = "share" if budget.frameworks[name].min is None else "min"
        misfits.found.append((("frameworks", name), message, f"raise its {key} to at least {float(least_share):g}%"))
        fits = False
    maxima = _maxima(budget, room, label, misfits)
    if not fits or maxima is None:
        return None
    elastic = {name: (divided[name], max(divided[name], most)) for name, most in maxima.items()}
    caps = starting_caps(room, {name: divided[name] for name in budget.frameworks}, elastic)
    source = "auto" if auto else "declared"
    part = DevicePlan(device, limit, reserve, caps, room - sum(caps.values()), source, elastic)
    return with_pool(part, members(budget))


def _maxima(budget: Budget, room: int, label: str, misfits: _Misfits) -> dict[str, int] | None:
    """The max on one device of each framework whose cap can change. None if a max is below the same framework's min;
    then `misfits` has the reason."""
    found, fits = {}, True
    for name, framework in budget.frameworks.items():
        if framework.min is None or framework.max is None:
            continue
        least, most = (part * room if isinstance(part, Fraction) else part for part in (framework.min, framework.max))
        if most < least:
            at, low, high = ("frameworks", name, "max"), format_size(int(least)), format_size(int(most))
            misfits.found.append((at, f"its max of {high} on {label} is less than its min of {low}", None))
            misfits.least[at] = max(ceil(least), misfits.least.get(at, 0))
            fits = False
        elif name not in NEVER_GIVE_BACK:
            found[name] = round_down(min(int(most), room))
    return found if fits else None


def starting_caps(room: int, caps: Mapping[str, int], elastic: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """The initial caps in bytes. `caps` has each elastic framework's min; the rest of `room` is added to elastic caps.

    Frameworks with an allocator other than memguard's are raised first, because their cap cannot be raised within a
    request that would fail. `rebalance` later lowers caps that are not used. The other elastic frameworks receive the
    rest, in file order. Σ caps ≤ `room`, and each elastic cap is between min and max.
    """
    found, spare = dict(caps), round_down(max(room - sum(caps.values()), 0))
    for name in sorted(elastic, key=lambda name: SPECS[name].requests_room):
        least, most = elastic[name]
        lent = min(max(most - least, 0), spare)
        found[name], spare = least + lent, spare - lent
    return found


def _smaller_reserve(auto: bool, most: int) -> str:
    if auto or most < GRANULE:
        return "this GPU is too small for it: name fewer frameworks, or leave this GPU out with CUDA_VISIBLE_DEVICES"
    return f"lower device.reserve to at most {most // MIB}MiB for it"


def communicators(budget: Budget) -> int:
    """The number of NCCL communicators that the budget declares for each GPU."""
    return int(_setting(budget, "nccl") or 0)


def own_context(budget: Budget) -> bool:
    """True if a framework of the budget uses its own CUDA context."""
    return bool(_setting(budget, "context") == "own")


def _setting(budget: Budget, option: str) -> Any:
    """The option's value for the only framework that has the option; None if the budget omits this framework."""
    owner = budget.frameworks.get(OPTION_OWNERS[option])
    return None if owner is None else getattr(owner, option)


def _divide(room: int, shares: Mapping[str, Fraction]) -> dict[str, int]:
    """Divide `room` by the largest-remainder method, in granules. The caps add up to the sum of the exact shares,
    rounded down to granules; equal remainders are served in file order."""
    exact = {name: share * room / GRANULE for name, share in shares.items()}
    units = {name: int(value) for name, value in exact.items()}
    left = int(sum(exact.values(), Fraction(0))) - sum(units.values())
    for name in sorted(exact, key=lambda n: units[n] - exact[n])[:left]:
        units[name] += 1
    return {name: count * GRANULE for name, count in units.items()}


def _is_ordinal(key: object) -> bool:
    text = str(key)
    return text.isascii() and text.isdecimal()  # isdecimal() alone accepts digits of other alphabets


def _precedence(key: str) -> int:
    return 0 if key.startswith("GPU-") else 1 if _is_ordinal(key) else 2


def _matches(key: str, device: Device) -> bool:
    if key.upper().startswith("GPU-"):
        return key.lower() == device.uuid.lower()
    if _is_ordinal(key):
        return device.ordinal == int(key)
    return fnmatchcase(device.name.lower(), key.lower())


def room_left(room: int, others: Iterable[tuple[int, int]]) -> int:
    """The bytes of `room` that remain for one framework; below 0 if the other frameworks exceed `room`. `others` has
    the cap and the held bytes of each other framework.

    Subtracts the larger of cap and held bytes: lowering a cap does not free live arrays, so bytes held above a cap
    remain unavailable until they are freed.
    """
    for cap, held in others:
        room -= max(cap, held)
    return room


def highest_cap(part: DevicePlan, framework: str, held: Mapping[str, int] = {}) -> int:
    """The highest possible cap of `framework`, given the caps and held bytes of the other allocators. `held` has bytes
    by allocator."""
    own = allocator_of(part, framework)
    others = [(cap, held.get(name, 0)) for name, cap in caps_of(part).items() if name != own]
    return room_left(part.limit - part.reserve, others)


def known_held(usage: Usage | None) -> int:
    """The bytes that a framework holds, or a lower bound if the framework does not report them."""
    if usage is None:
        return 0
    return usage.held if usage.held is not None else max(usage.held_at_least or 0, usage.in_use or 0)


def resized(
    current: Plan,
    framework: str,
    size: int,
    held: Mapping[str, Mapping[str, int]] = {},
    short: Mapping[str, Room] = {},
) -> Plan:
    """The plan with the framework's cap changed to `size` bytes on every device. Raises PlanError if it does not fit.

    `held` has the held bytes by UUID and allocator. The caller has already lowered other elastic caps to their min and
    trimmed caches above the lowered caps; `short` has the result by UUID, with the bytes still missing.
    """
    for part in current.devices:
        if (allocator := allocator_of(part, framework)) != framework:
            names = " and ".join(clients(part, allocator))
            message = f"{framework} draws from the pool of {names}, whose size is fixed"
            raise PlanError([Problem(message, "change the budget file and restart the process")], "resize")
    cap = round_down(size)
    available: dict[str, int] = {}
    over: dict[str, dict[str, int]] = {}
    for part in current.devices:
        uuid = part.device.uuid
        most = cap - short[uuid].missing if uuid in short else highest_cap(part, framework, held.get(uuid, {}))
        available[uuid] = max(most, part.caps.get(framework, 0))  # lowering a cap always fits
        over[uuid] = _above(part, framework, held.get(uuid, {}))
    most = round_down(min(available.values(), default=0))
    live = dict.fromkeys(name for sizes in (*(room.live for room in short.values()), *over.values()) for name in sizes)
    fix = f"free arrays of {' or '.join(live)}" if live else "lower another framework's cap first"
    if any(over.values()):
        fix += " and call memguard.trim() first"
    fix = f"ask for at most {most // MIB}MiB, or {fix}" if GRANULE <= most < cap else fix
    fix = f"ask for at least {GRANULE // MIB}MiB" if cap < GRANULE else fix
    problems = []
    devices = []
    for part in current.devices:
        free, room = available[part.device.uuid], short.get(part.device.uuid)
        if cap > free or cap < GRANULE:
            above = over[part.device.uuid]
            lent = {} if room is None else {name: live for name, live in room.live.items() if name not in above}
            problems.append(
                Problem(
                    f"{format_size(size)} for {framework} does not fit {part.device.name} ({part.device.uuid}): "
                    f"between {format_size(GRANULE)} and {format_size(free)} is possible beside the other caps"
                    + _occupants(lent, above),
                    fix,
                )
            )
        own = part.caps.get(framework, 0)
        devices.append(replace(part, caps={**part.caps, framework: cap}, unallocated=part.unallocated + own - cap))
    if problems:
        raise PlanError(problems, "resize")
    return replace(current, devices=tuple(devices))


def with_cap(current: Plan, uuid: str, framework: str, cap: int) -> Plan:
    """The plan with one cap changed on one GPU."""
    devices = [
        replace(
            part,
            caps={**part.caps, framework: cap},
            unallocated=part.unallocated + part.caps[framework] - cap,
        )
        if part.device.uuid == uuid
        else part
        for part in current.devices
    ]
    return replace(current, devices=tuple(devices))


def guaranteed_cap(part: DevicePlan, framework: str) -> int:
    """The cap in bytes that `framework` can reach whatever other frameworks borrow: limit − reserve − the min of each
    other elastic framework − the cap of each other fixed framework."""
    own = allocator_of(part, framework)
    others = (part.elastic.get(name, (cap, cap))[0] for name, cap in caps_of(part).items() if name != own)
    return part.limit - part.reserve - sum(others)


def elastic_advice(refusal: Refusal, part: DevicePlan, room: Room) -> Advice:
    """The advice for a refusal. If an elastic cap refused the request, the advice adds the framework's min and max, the
    cap that this framework can certainly reach, the frameworks whose live arrays occupy memory that it could borrow,
    and the min or max to change."""
    framework = refusal.framework
    if framework not in part.elastic or not isinstance(refusal, OverCap):
        return refusal.advice()
    (least, most), guaranteed = part.elastic[framework], guaranteed_cap(part, framework)
    first = f"{framework} is elastic: min {format_size(least)}, max {format_size(most)}"
    if guaranteed < most:
        first += f", of which what others have for sure leaves {format_size(guaranteed)}"
    lent = {name: size for name, size in room.live.items() if name in part.elastic}
    first += _occupants(lent, {name: size for name, size in room.live.items() if name not in lent})
    highest = format_size(min(most, guaranteed))
    rises = part.caps[framework] < min(most, guaranteed) and format_size(refusal.cap) == highest
    said = refusal.advice("can rise to" if rises else "is", _bounds(part, framework, refusal.wanted, bool(room.live)))
    return replace(said, reason=f"{said.reason}\n    {first}")


def _bounds(part: DevicePlan, framework: str, mib: int, live: bool) -> str:
    """The change of min or max in the budget that lets the cap of an elastic framework reach `mib` MiB."""
    most, guaranteed, room = part.elastic[framework][1], guaranteed_cap(part, framework), part.limit - part.reserve
    if mib * MIB > room:
        return f"use a larger GPU: the budget has {format_size(room)} of this one for all frameworks"
    # Below max, only a higher min guarantees the cap, because other frameworks may borrow unused memory.
    within = live or guaranteed < most
    keys = ("min and max" if mib * MIB > most else "min") if within else "max"
    text = f"raise frameworks.{framework}.{keys} in the budget to at least {mib}MiB"
    if (short := mib * MIB - guaranteed) <= 0:
        return text
    others = " or ".join(name for name in part.caps if name != framework)
    return f"{text}, and lower what {others} has for sure (min, share or limit) by {-(-short // MIB)}MiB"


def _above(part: DevicePlan, framework: str, held: Mapping[str, int]) -> dict[str, int]:
    """The bytes that each allocator other than `framework`'s holds above its cap."""
    others = {name: cap for name, cap in caps_of(part).items() if name != allocator_of(part, framework)}
    return {name: held[name] - cap for name, cap in others.items() if held.get(name, 0) > cap}


def _occupants(lent: Mapping[str, int], over: Mapping[str, int]) -> str:
    """Text that lists frameworks whose live arrays occupy borrowed memory or memory above the cap, largest first."""
    text = ""
    for what, sizes in (("lent to others, in live arrays", lent), ("held above their caps", over)):
        if sizes:
            most_first = sorted(sizes.items(), key=lambda item: -item[1])
            text += f"; {what}: " + ", ".join(f"{name} {format_size(size)}" for name, size in most_first)
    return text


def busy(part: DevicePlan, memory: MemoryInfo, own: int | None) -> str | None:
    """A warning if this process cannot reach its limit now, because other processes hold memory of the GPU; else None.

    `own` is the bytes that this process holds; None if NVML does not report them separately.
    """
    available = memory.free + (own or 0)
    if part.limit <= available:
        return None
    left = (
        f"{part.device.name} ({part.device.uuid}) has {format_size(available)} left for this process, less than its "
        f"limit of {format_size(part.limit)}"
    )
    if memory.used is None:  # unified memory
        return f"{left}: it uses the machine's memory, of which programs and the system hold the rest"
    who = "this process and others" if own is None else "other processes"
    return f"{left}: {who} hold {format_size(memory.used - (own or 0))}"


def card(memory: MemoryInfo) -> str:
    """The subject of a sentence about a full GPU: the card, or for unified memory the machine."""
    return "the card" if memory.used is not None else "the machine, whose memory this GPU uses,"


def _who_holds(memory: MemoryInfo) -> str:
    if memory.used is not None:
        return "`memguard.ledger()` shows who holds the card; free memory there, or use another GPU"
    return "`free -h` and `top` show which programs hold the machine's memory; end some, or ask for less"


@dataclass(frozen=True)
class OverCap:
    """A refusal because of the cap. Sizes are bytes. `pool` describes the shared pool if the framework uses it."""

    framework: str
    needed: int
    footprint: int
    available: int
    cap: int
    own: Usage
    pool: str = ""

    def for_client(self, others: int, pool: str) -> OverCap:
        """Replace the allocator's figures with the framework's own, if other frameworks use `others` bytes of the
        allocator. `pool` is the note about these bytes."""
        held, in_use = ((None if size is None else size - others) for size in self.own[:2])
        own = self.own._replace(held=held, in_use=in_use)
        return replace(self, cap=max(self.cap - others, 0), own=own, pool=pool)

    @property
    def wanted(self) -> int:
        """The smallest sufficient cap, in MiB."""
        return -(-(self.cap + self.footprint - self.available) // MIB)

    def advice(self, cap_is: str = "is", change: str = "") -> Advice:
        """Reason and fix. `cap_is` is the verb after "its cap"; `change` replaces the advice to raise the framework."""
        own, needed = self.own, format_size(self.needed)
        least = "" if own.held is not None else "at least "
        held = own.held if own.held is not None else own.held_at_least
        takes = format_size(self.footprint)
        change = change or f"raise frameworks.{self.framework} in the budget to at least {self.wanted}MiB"
        return Advice(
            f"{self.framework} needs {needed}{f' (its allocator takes {takes} for it)' if takes != needed else ''} but "
            f"can get {format_size(self.available)}: its cap {cap_is} {format_size(self.cap)} and it holds "
            f"{least}{format_size(held)}, of which {format_size(own.in_use)} in use{self.pool}",
            f"free arrays, make the batch smaller, or {change}",
        )


@dataclass(frozen=True)
class NoneFree:
    """A refusal because the GPU is full, although the cap allows the request. Sizes are bytes. `idle` is the caches of
    other frameworks."""

    framework: str
    needed: int
    memory: MemoryInfo
    idle: int
    pool: str = ""

    def for_client(self, others: int, pool: str) -> NoneFree:
        """Add the note `pool`; the figures need no change, unlike those of `OverCap`."""
        return replace(self, pool=pool)

    def advice(self) -> Advice:
        return Advice(
            f"{self.framework} needs {format_size(self.needed)} and its cap allows it, but {card(self.memory)} has "
            f"only {format_size(self.memory.free)} free; caches of other frameworks in this process add "
            f"{format_size(self.idle)}{self.pool}",
            _who_holds(self.memory),
        )


@dataclass(frozen=True)
class Reserved:
    """A refusal because other workloads have reserved the memory. Sizes are bytes."""

    framework: str
    needed: int
    available: int

    def advice(self) -> Advice:
        return Advice(
            f"{self.framework} needs {format_size(self.needed)}, and beside what is reserved it can get "
            f"{format_size(self.available)}"
        )


Refusal = OverCap | NoneFree | Reserved


class Admission(NamedTuple):
    """The result of `admit`: `refusal` is None if the memory is available, perhaps after the frameworks in `trim` have
    been trimmed.

    `available` is in bytes.
    """

    available: int
    trim: tuple[str, ...] = ()
    refusal: Refusal | None = None


def admit(
    framework: str,
    needed: int,
    footprint: int,
    cap: int,
    usages: Mapping[str, Usage | None],
    memory: MemoryInfo,
    allocator: str = "",
) -> Admission:
    """Decide whether `framework` can allocate `needed` more bytes on one device, within its cap and the free memory.

    `usages` has the usage of each allocator; `allocator` names the allocator that serves the framework, by default one
    with the framework's name. `footprint` is the bytes that this allocator would allocate from the driver. `admit`
    refuses only a request that is certain to fail. So the allocator's own cache counts as available, because the
    allocator returns reclaimable bytes by itself, and the remaining cache may serve the request. If the held bytes are
    unknown (TensorFlow with growth), the bytes of live arrays count in their place.
    """
    allocator = allocator or framework
    own = usages.get(allocator) or Usage(held=0, in_use=0)
    idle = cached(own)
    if own.held is None:
        taken, stuck = own.in_use or 0, max((own.held_at_least or 0) - (own.in_use or 0), 0)
    else:
        taken = own.held - idle
        stuck = max(taken - (own.in_use if own.in_use is not None else taken), 0)
    room = max(cap - taken, 0)
    if (footprint > room or needed <= stuck) and framework in SPECS and SPECS[framework].pads:
        stuck = 0  # the bytes beyond live arrays are rounding, which can serve no request
    if footprint > room and needed > stuck:
        return Admission(max(room, stuck), refusal=OverCap(framework, needed, footprint, max(room, stuck), cap, own))
    short = 0 if needed <= stuck else footprint - idle - memory.free
    if short <= 0:
        return Admission(max(room, stuck))
    trim, found = [], 0
    siblings = {n: u for n, u in usages.items() if n != allocator and u is not None and cached(u)}
    for name, usage in sorted(
        siblings.items(), key=lambda one: trim_order(cached(one[1]), one[1].reclaimable is not None)
    ):
        if found >= short:
            break
        trim.append(name)
        found += cached(usage)
    if found >= short:
        return Admission(room, tuple(trim))
    return Admission(
        max(stuck, min(room, memory.free + found + idle)),
        refusal=NoneFree(framework, needed, memory, found),
    )


def in_use(usage: Usage | None) -> int | None:
    """The bytes of live arrays; 0 if `usage` is None because the framework is not initialised; None if unknown."""
    return 0 if usage is None else usage.in_use


def trim_order(idle: int, sure: bool) -> tuple[bool, int]:
    """The sort key of a cache to trim: caches with known reclaimable bytes (`sure`) first, then larger `idle` bytes."""
    return not sure, -idle

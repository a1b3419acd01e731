"""The decisions: budget and devices in, a plan out. Pure: no clock, thread, environment or GPU.

`plan` is total: it returns a Plan or raises PlanError with every problem. Shares are divided by largest
remainder in whole granules of 2 MiB, so caps never add up to more than was declared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import TYPE_CHECKING, Generic, TypeVar

from memguard._types import Device, DevicePlan, MemoryInfo, Plan, Usage
from memguard._units import GRANULE, MIB, format_size, round_down
from memguard.errors import PlanError, Problem

if TYPE_CHECKING:
    from memguard._config import Budget

T = TypeVar("T")

CONTEXT = 544 * MIB
"""A CUDA context: 518 MiB measured on an H200, and room for its growth. Charged once: contexts are shared."""
SECOND_CONTEXT = "second context"
MODULES = {
    "context": 518 * MIB,
    "torch": 344 * MIB,
    "tensorflow": 92 * MIB,
    "cupy": 262 * MIB,
    "jax": 206 * MIB,
    "pycuda": 8 * MIB,
    "numba": 8 * MIB,
    "nccl 1": 838 * MIB,
    "nccl": 486 * MIB,
    SECOND_CONTEXT: 518 * MIB,
}
"""The most of each that was measured on an H200. `nccl 1` is the first communicator, `nccl` each further one;
`second context` is each beside the primary one, numbered from the second of them on."""
WORKSPACE = {
    "torch": 384 * MIB,
    "tensorflow": 256 * MIB,
    "cupy": 320 * MIB,
    "jax": 320 * MIB,
    "pycuda": 32 * MIB,
    "numba": 32 * MIB,
    "nccl 1": 896 * MIB,
    "nccl": 512 * MIB,
    SECOND_CONTEXT: CONTEXT,
}
"""Modules and library workspaces outside each framework's cap. Measured on an H200 beyond the context: torch 92
after the first tensor, 158 with cuBLAS, 240 after training a small network, 344 with cuSOLVER; TensorFlow 92; CuPy 94
beside others, 60 more with cuBLAS, 24 with cuFFT, 100 with cuSOLVER; JAX 34 at its first operation, 204 with cuSOLVER
and cuFFT; NCCL 838 at the first collective and 486 for each further communicator."""
SLACK = 64 * MIB
"""What is left for the driver's own rounding."""
SMALLER = {"turing": Fraction(3, 4), "ampere": Fraction(7, 8), "ada": Fraction(7, 8)}
"""Contexts grow with the number of multiprocessors; on older architectures less is kept. Not measured by us."""


def auto_reserve(
    architecture: str, frameworks: Sequence[str], communicators: int = 0, second_context: bool = False
) -> int:
    """`reserve: auto`: by architecture and what is *declared*, so that caps never depend on import order."""
    libraries = [f"nccl {number}" for number in range(1, communicators + 1)] + [SECOND_CONTEXT] * second_context
    needed = CONTEXT + sum(workspace(name) for name in (*frameworks, *libraries)) + SLACK
    return round_down(int(needed * SMALLER.get(architecture, Fraction(1))))


def workspace(name: str) -> int:
    """Bytes that a framework, or a library by the name of `Framework.libraries`, may take outside every cap."""
    return WORKSPACE.get(name, WORKSPACE.get(name.rpartition(" ")[0], 128 * MIB))


def modules(name: str) -> int:
    """The most that was measured of a framework or library outside its cap; 0 where nothing was."""
    return MODULES.get(name, MODULES.get(name.rpartition(" ")[0], 0))


def needs_ordinals(budget: Budget) -> bool:
    """Whether the budget names a GPU by CUDA ordinal, so that CUDA's numbering has to be asked for."""
    return any(_is_ordinal(key) for key in budget.devices)


@dataclass(frozen=True)
class _Rule(Generic[T]):
    """What the budget says for one device, and in which of its entries."""

    value: T
    at: tuple[str, ...]


def plan(budget: Budget, devices: Sequence[Device]) -> Plan:
    """Resolve the budget against the devices. Raises PlanError where it does not fit one of them."""
    problems: list[Problem] = []
    plans = []
    matched: set[str] = set()
    if needs_ordinals(budget) and any(device.ordinal is None for device in devices):
        problems.append(
            budget.problem(
                ("devices",),
                "GPUs are named by CUDA ordinal, but CUDA's numbering cannot be asked for here",
                "name the GPUs by UUID (`nvidia-smi -L`), or run `memguard doctor` to see why CUDA does not start",
            )
        )
    for device in devices:
        limit: _Rule[Fraction | int] = _Rule(budget.device.limit, ("device",))
        reserve: _Rule[int | str] = _Rule(budget.device.reserve, ("device",))
        keys = [str(key) for key in budget.devices if _matches(str(key), device)]
        matched.update(keys)
        overrides = {str(key): value for key, value in budget.devices.items()}
        for key in sorted(keys, key=_precedence, reverse=True):  # the strongest is applied last
            override = overrides[key]
            limit = limit if override.limit is None else _Rule(override.limit, ("devices", key))
            reserve = reserve if override.reserve is None else _Rule(override.reserve, ("devices", key))
        resolved = _device_plan(budget, device, limit, reserve)
        if isinstance(resolved, DevicePlan):
            plans.append(resolved)
        else:
            problems.extend(resolved)
    if problems:
        raise PlanError(problems, budget.source or "plan")
    own: dict[str, tuple[str, ...]] = {"tensorflow": ("growth",), "pycuda": ("context",)}
    options = {
        name: {key: getattr(framework, key) for key in own.get(name, ())}
        for name, framework in budget.frameworks.items()
    }
    idle = [str(key) for key in budget.devices if str(key) not in matched]
    notes = tuple(f"devices: {key!r} names none of the GPUs that this process sees" for key in idle)
    return Plan(tuple(plans), options, notes)


def _device_plan(
    budget: Budget, device: Device, limit_rule: _Rule[Fraction | int], reserve_rule: _Rule[int | str]
) -> DevicePlan | list[Problem]:
    label = f"{device.name} ({device.uuid})"
    share = limit_rule.value
    limit = int(share * device.usable) if isinstance(share, Fraction) else share
    if limit > device.usable:
        message = f"the limit of {format_size(limit)} is more than {label} has ({format_size(device.usable)})"
        fix = f"lower it to at most {device.usable // MIB}MiB or write a percentage"
        return [budget.problem((*limit_rule.at, "limit"), message, fix)]
    auto = reserve_rule.value == "auto"
    reserve = (
        auto_reserve(device.architecture, list(budget.frameworks), communicators(budget), own_context(budget))
        if isinstance(reserve_rule.value, str)
        else reserve_rule.value
    )
    room = limit - reserve
    if room < GRANULE:
        message = f"nothing is left on {label}: limit {format_size(limit)}, reserve {format_size(reserve)}"
        at = limit_rule.at if reserve_rule.at == ("device",) else reserve_rule.at
        return [budget.problem(at, message, "raise device.limit or lower device.reserve")]
    fixed = {n: round_down(f.limit) for n, f in budget.frameworks.items() if f.limit is not None}
    shares = {n: f.share for n, f in budget.frameworks.items() if f.share is not None}
    wanted = sum(shares.values(), Fraction(0)) * room + sum(fixed.values())
    if wanted > room:
        message = (
            f"the frameworks ask for {format_size(int(wanted))} on {label}, "
            f"but limit − reserve is {format_size(room)} ({format_size(limit)} − {format_size(reserve)})"
        )
        return [budget.problem(("frameworks",), message, "lower shares or limits, or raise device.limit")]
    divided = {**fixed, **_divide(room, shares)}
    empty = [name for name, cap in divided.items() if cap < GRANULE]
    if empty:
        return [
            budget.problem(
                ("frameworks", name),
                f"its part of {label} is less than {format_size(GRANULE)}, the smallest cap",
                "raise its share",
            )
            for name in empty
        ]
    caps = {name: divided[name] for name in budget.frameworks}
    return DevicePlan(device, limit, reserve, caps, room - sum(caps.values()), "auto" if auto else "declared")


def communicators(budget: Budget) -> int:
    """NCCL's, that the budget says torch will keep on each GPU."""
    torch = budget.frameworks.get("torch")
    return (torch.nccl or 0) if torch is not None else 0


def own_context(budget: Budget) -> bool:
    """Whether PyCUDA works in a context of its own."""
    pycuda = budget.frameworks.get("pycuda")
    return pycuda is not None and pycuda.context == "own"


def _divide(room: int, shares: Mapping[str, Fraction]) -> dict[str, int]:
    """Largest remainder, in granules; the sum is that of the exact shares, rounded down. Ties: file order."""
    exact = {name: share * room / GRANULE for name, share in shares.items()}
    units = {name: int(value) for name, value in exact.items()}
    left = int(sum(exact.values(), Fraction(0))) - sum(units.values())
    for name in sorted(exact, key=lambda n: units[n] - exact[n])[:left]:
        units[name] += 1
    return {name: count * GRANULE for name, count in units.items()}


def _is_ordinal(key: object) -> bool:
    return str(key).isdecimal()


def _precedence(key: str) -> int:
    return 0 if key.startswith("GPU-") else 1 if _is_ordinal(key) else 2


def _matches(key: str, device: Device) -> bool:
    if key.upper().startswith("GPU-"):
        return key.lower() == device.uuid.lower()
    if _is_ordinal(key):
        return device.ordinal == int(key)
    return fnmatchcase(device.name.lower(), key.lower())


def resized(current: Plan, framework: str, size: int) -> Plan:
    """The plan with the framework's cap changed to `size` on every device. Raises PlanError where it does not fit."""
    cap = round_down(size)
    problems = []
    devices = []
    for part in current.devices:
        free = part.unallocated + part.caps.get(framework, 0)
        if cap > free or cap < GRANULE:
            problems.append(
                Problem(
                    f"{format_size(size)} for {framework} does not fit {part.device.name} ({part.device.uuid}): "
                    f"between {format_size(GRANULE)} and {format_size(free)} is possible beside the other caps",
                    "ask for less, or lower another framework's cap first",
                )
            )
        devices.append(replace(part, caps={**part.caps, framework: cap}, unallocated=free - cap))
    if problems:
        raise PlanError(problems, "resize")
    return replace(current, devices=tuple(devices))


def busy(part: DevicePlan, memory: MemoryInfo, own: int | None) -> str | None:
    """A warning where the limit cannot be had now, because others hold part of the card; else None.

    `own` is None where NVML does not say what this process holds: then it cannot be told from others.
    """
    available = memory.free + (own or 0)
    if part.limit <= available:
        return None
    who = "this process and others" if own is None else "other processes"
    return (
        f"{part.device.name} ({part.device.uuid}) has {format_size(available)} left for this process, less than its "
        f"limit of {format_size(part.limit)}: {who} hold {format_size(memory.used - (own or 0))}"
    )


@dataclass(frozen=True)
class Admission:
    """Whether memory can be had: `trim` names the frameworks whose cache must go first; `refusal` why not."""

    available: int
    trim: tuple[str, ...] = ()
    refusal: str | None = None


def admit(
    framework: str, needed: int, footprint: int, cap: int, usages: Mapping[str, Usage | None], memory: MemoryInfo
) -> Admission:
    """Whether `framework` can get `needed` bytes more on one device, within its cap and what the card has free.

    `footprint` is what its allocator would take from the driver for them. Its own cache counts: what can go is
    given back by the allocator itself, and what cannot may serve the request from within, so only what is sure to
    fail is refused. Where held is unknown (TensorFlow with growth) live arrays count instead.
    """
    own = usages.get(framework) or Usage(held=0, in_use=0)
    idle = _cached(own)
    if own.held is None:
        taken, stuck = own.in_use or 0, max((own.held_at_least or 0) - (own.in_use or 0), 0)
    else:
        taken = own.held - idle
        stuck = max(taken - (own.in_use if own.in_use is not None else taken), 0)
    room = max(cap - taken, 0)
    if footprint > room and needed > stuck:
        return Admission(max(room, stuck), refusal=_over_cap(framework, needed, footprint, max(room, stuck), cap, own))
    short = 0 if needed <= stuck else footprint - idle - memory.free
    if short <= 0:
        return Admission(max(room, stuck))
    trim, found = [], 0
    siblings = {n: size for n, u in usages.items() if n != framework and u is not None and (size := _cached(u))}
    # Those first that say what a trim returns.
    for name in sorted(siblings, key=lambda n: (_unsure(usages[n]), -siblings[n])):
        if found >= short:
            break
        trim.append(name)
        found += siblings[name]
    if found >= short:
        return Admission(room, tuple(trim))
    return Admission(
        max(stuck, min(room, memory.free + found + idle)),
        refusal=(
            f"{framework} needs {format_size(needed)} and its cap allows it, but the card has only "
            f"{format_size(memory.free)} free; caches of other frameworks in this process add {format_size(found)}\n"
            "    fix: `memguard.ledger()` shows who holds the card; free memory there, or use another GPU"
        ),
    )


def _cached(usage: Usage) -> int:
    """What trimming the framework may return: all of its cache, where it does not say which part is fragmented."""
    if usage.reclaimable is not None:
        return usage.reclaimable
    known = usage.held is not None and usage.in_use is not None
    return max((usage.held or 0) - (usage.in_use or 0), 0) if known else 0  # the two are read one after the other


def _unsure(usage: Usage | None) -> bool:
    return usage is not None and usage.reclaimable is None


def _over_cap(framework: str, needed: int, footprint: int, available: int, cap: int, own: Usage) -> str:
    least = "" if own.held is not None else "at least "
    held = own.held if own.held is not None else own.held_at_least
    takes = f" (its allocator takes {format_size(footprint)} for it)" if footprint > needed else ""
    return (
        f"{framework} needs {format_size(needed)}{takes} but can get {format_size(available)}: its cap is "
        f"{format_size(cap)} and it holds {least}{format_size(held)}, of which {format_size(own.in_use)} in use\n"
        f"    fix: free arrays, make the batch smaller, or raise frameworks.{framework} in the budget"
    )

"""Builds the BudgetExceeded error of a refused request: the missing memory, the reservations, and the fix. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from memguard._base.advice import Advice
from memguard._base.types import DevicePlan, MemoryInfo, Room
from memguard._base.units import format_size
from memguard._budget import policy
from memguard._budget.shared_pool import clients
from memguard._guard.reservations import AdmissionResult, Reservations, ended, reservation_lines
from memguard.errors import BudgetExceeded


class Snapshot(NamedTuple):
    """One reading of one GPU, and the admission result computed from the reading. `in_use`: bytes in use by
    framework."""

    reservations: Reservations
    device_plan: DevicePlan
    memory: MemoryInfo
    result: AdmissionResult
    in_use: Mapping[str, int | None]

    @property
    def fits(self) -> bool:
        return self.result.refusal is None and not self.result.trim


class Waiting(NamedTuple):
    """A workload that requests memory: its ticket number, and the start and the deadline of its wait as
    `time.monotonic()`."""

    number: int
    began: float
    deadline: float


def refused(
    framework: str, needed: int, snapshot: Snapshot, room: Room, now: float, waiting: Waiting | None = None
) -> BudgetExceeded:
    """The error of a refused request. `room`: the result of the trims. `waiting`: the requesting workload; None for a
    check."""
    result, reservations = snapshot.result, snapshot.reservations
    assert result.refusal is not None
    advice = policy.elastic_advice(result.refusal, snapshot.device_plan, room)
    reason, fix = advice.reason, advice.fix
    if waiting is not None:
        reservations = ended(reservations, waiting.number)
    lines = reservation_lines(reservations, snapshot.device_plan.device.uuid, snapshot.in_use, now)
    can_wait = waiting is not None and waiting.deadline > waiting.began
    if waiting is not None and can_wait and now >= waiting.deadline:
        after = f"{now - waiting.began:.1f} s"
        reason += (
            f", after {after} in which it waited its turn" if result.reserved else f"\n    it waited {after} for this"
        )
    if result.reserved:
        longer = "let it wait longer" if can_wait else 'wait="60s" waits its turn'
        fix = f"{longer if waiting is not None else 'ask again once one of them has ended'}, or reserve less"
    if lines:
        reason += ":" if result.reserved else "\n    reserved or waited for on this GPU:"
    return BudgetExceeded(framework, needed, result.available, Advice("\n      ".join([reason, *lines]), fix))


def trim_failed(framework: str, needed: int, snapshot: Snapshot) -> BudgetExceeded:
    """The error if a trim returned less memory than needed."""
    names, memory = " and ".join(snapshot.result.trim), snapshot.memory
    client_names = " and ".join(
        client for name in snapshot.result.trim for client in clients(snapshot.device_plan, name)
    )
    return BudgetExceeded(
        framework,
        needed,
        memory.free,
        Advice(
            f"{framework} needs {format_size(needed)}, {policy.card(memory)} has {format_size(memory.free)} "
            f"free, and the cache of {names} could not be given back from here (fragmented, another thread's, "
            "or a CUDA graph is being captured)",
            f"call memguard.trim() on the thread that runs {client_names}",
        ),
    )


def highest_cap(device_plan: DevicePlan, framework: str) -> int:
    """The highest possible cap on one GPU, in bytes. This is the framework's max, or less if the guaranteed bytes of
    other frameworks leave less."""
    if framework not in device_plan.elastic:
        return device_plan.caps[framework]
    return min(device_plan.elastic[framework][1], policy.guaranteed_cap(device_plan, framework))


def no_room(framework: str, snapshot: Snapshot) -> Room | None:
    """An empty `Room` if no cache can be trimmed and the cap cannot rise; None if a trim or a raised cap may help."""
    can_rise = snapshot.device_plan.caps[framework] < highest_cap(snapshot.device_plan, framework)
    return None if snapshot.result.trim or can_rise else Room({}, None, 0, {})

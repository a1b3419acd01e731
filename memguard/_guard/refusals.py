"""Builds the BudgetExceeded error of a refused request: the missing memory, who holds it, and the fix. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from memguard._base.advice import Advice
from memguard._base.types import DevicePlan, MemoryInfo, Room
from memguard._base.units import format_size
from memguard._budget import policy
from memguard._budget.shared_pool import clients
from memguard._guard import reservations
from memguard._guard.reservations import Reservations, Verdict
from memguard.errors import BudgetExceeded


class Look(NamedTuple):
    """One reading of one GPU, and the verdict under `book` and `part`. `in_use` is by framework, in bytes."""

    book: Reservations
    part: DevicePlan
    memory: MemoryInfo
    verdict: Verdict
    in_use: Mapping[str, int | None]

    @property
    def fits(self) -> bool:
        return self.verdict.refusal is None and not self.verdict.trim


class Waiting(NamedTuple):
    """A workload that requests memory: its ticket number, and the start and end of its wait as `time.monotonic()`."""

    number: int
    began: float
    deadline: float


def refused(
    framework: str, needed: int, look: Look, room: Room, now: float, waiting: Waiting | None = None
) -> BudgetExceeded:
    """The error of a refused request. `room`: the result of reclaim. `waiting`: the requesting workload, if any."""
    verdict, book = look.verdict, look.book
    assert verdict.refusal is not None
    advice = policy.elastic_advice(verdict.refusal, look.part, room)
    said, fix = advice.reason, advice.fix
    if waiting is not None:
        book = reservations.ended(book, waiting.number)
    lines = reservations.who_holds(book, look.part.device.uuid, look.in_use, now)
    patient = waiting is not None and waiting.deadline > waiting.began
    if waiting is not None and patient and now >= waiting.deadline:
        after = f"{now - waiting.began:.1f} s"
        said += (
            f", after {after} in which it waited its turn" if verdict.reserved else f"\n    it waited {after} for this"
        )
    if verdict.reserved:
        longer = "let it wait longer" if patient else 'wait="60s" waits its turn'
        fix = f"{longer if waiting is not None else 'ask again once one of them has ended'}, or reserve less"
    if lines:
        said += ":" if verdict.reserved else "\n    reserved or waited for on this GPU:"
    return BudgetExceeded(framework, needed, verdict.available, Advice("\n      ".join([said, *lines]), fix))


def stuck(framework: str, needed: int, look: Look) -> BudgetExceeded:
    """The error if a trim returned less memory than needed."""
    names, memory = " and ".join(look.verdict.trim), look.memory
    who = " and ".join(client for name in look.verdict.trim for client in clients(look.part, name))
    return BudgetExceeded(
        framework,
        needed,
        memory.free,
        Advice(
            f"{framework} needs {format_size(needed)}, {policy.card(memory)} has {format_size(memory.free)} "
            f"free, and the cache of {names} could not be given back from here (fragmented, another thread's, "
            "or a CUDA graph is being captured)",
            f"call memguard.trim() on the thread that runs {who}",
        ),
    )


def most(part: DevicePlan, framework: str) -> int:
    """The highest possible cap on one GPU, in bytes: the framework's max, or less if siblings' minima need the room."""
    if framework not in part.elastic:
        return part.caps[framework]
    return min(part.elastic[framework][1], policy.guaranteed_cap(part, framework))


def no_room(framework: str, look: Look) -> Room | None:
    """An empty `Room` if nothing can be trimmed and the cap cannot rise; None if reclaim may help."""
    can_rise = look.part.caps[framework] < most(look.part, framework)
    return None if look.verdict.trim or can_rise else Room({}, None, 0, {})

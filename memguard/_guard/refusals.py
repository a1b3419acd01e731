"""What a refusal says: what cannot be had, and who holds it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from memguard._base.advice import Advice
from memguard._base.types import DevicePlan, MemoryInfo, Room
from memguard._base.units import format_size
from memguard._budget import policy
from memguard._budget.joint import POOL
from memguard._guard import reservations
from memguard._guard.reservations import Reservations, Verdict
from memguard.errors import BudgetExceeded


class Look(NamedTuple):
    """One reading of one GPU and what it means, by that book and that plan. `in_use` is by framework, in bytes."""

    book: Reservations
    part: DevicePlan
    memory: MemoryInfo
    verdict: Verdict
    in_use: Mapping[str, int | None]

    @property
    def fits(self) -> bool:
        return self.verdict.refusal is None and not self.verdict.trim


class Waiting(NamedTuple):
    """A workload that asks: the number of its entry, since when and until when it waits, as `time.monotonic()`."""

    number: int
    began: float
    deadline: float


def refused(
    framework: str, needed: int, look: Look, room: Room, now: float, waiting: Waiting | None = None
) -> BudgetExceeded:
    """The error where it cannot be had. `room` is what was done for it; `waiting` None: no workload asks."""
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
    """The error where what was to be given back was not."""
    names, memory = " and ".join(look.verdict.trim), look.memory
    who = " and ".join(name for name in look.verdict.trim if name != POOL) or " and ".join(look.part.joined)
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
    """The most that its cap there may ever be, in bytes: its max, or what the others' minima leave."""
    if framework not in part.elastic:
        return part.caps[framework]
    return min(part.elastic[framework][1], policy.beside_minima(part, framework))


def no_room(framework: str, look: Look) -> Room | None:
    """The room that can be made where nothing is to be trimmed, and its cap cannot rise; None if some may be made."""
    can_rise = look.part.caps[framework] < most(look.part, framework)
    return None if look.verdict.trim or can_rise else Room({}, None, 0, {})

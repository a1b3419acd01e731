"""The cause of an out-of-memory error, from the figures of its refusal: a table of causes, first match first. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from memguard._base.types import DevicePlan, Enforcement, Plan, RefusedRequest
from memguard._base.units import MIB, format_size
from memguard._budget.shared_pool import allocator_of, clients
from memguard._frameworks.specs import NEVER_GIVE_BACK, SPECS
from memguard._ledger.types import DeviceLedger, Ledger, Row
from memguard._oom.classify import Verdict

if TYPE_CHECKING:
    from memguard._budget import Budget

SEGMENT = 20 * MIB
"""The most that an allocator takes from the driver beyond a small request: a segment of torch (measured)."""
WORKSPACE = 256 * MIB
"""Assumed for a request of unknown size: above cuBLAS's and cuSOLVER's first use (measured: 100 MiB)."""
_PIECES = 10
"""Fragmentation is the cause only if it wastes at least this fraction (1/10) of the cap."""
_WHEN = {"peak": " at its peak", "sample": " in the last sample"}
"""The time of a figure, by its source, if that is not the refusal itself."""
_PRESENT = "is", "has", "have", "holds"

Reason = Literal["cap", "card", "cap and card", "fragmented", "unknown", "elsewhere"]
"""Why the request failed: its own cap, the full card (or the full machine, with unified memory), or both; a fragmented
cache under a large enough cap; unknown; or an exhausted memory other than the GPU's."""


@dataclass(frozen=True)
class Case:
    """An out-of-memory error on one GPU, and the figures behind its cause and its remedies. Sizes are bytes.

    `row` is the requester's, None for a library: its memory lies outside every cap. `need` is the request plus what its
    allocator takes beyond it. `of_then`: the requester's figures are from the moment of the refusal. `seen_free`: the
    GPU's free memory in the last sample before.
    """

    part: DeviceLedger
    verdict: Verdict
    raised: str | None = None
    plan: Plan | None = None
    others: Mapping[int, int | None] = field(default_factory=dict)
    budget: Budget | None = None
    of_then: bool = False
    seen_free: int | None = None

    @cached_property
    def row(self) -> Row | None:
        named = (row for row in self.frameworks if row.name == self.verdict.requester)
        return next(named, None)

    @property
    def unified(self) -> bool:
        return self.part.device.unified

    @cached_property
    def frameworks(self) -> tuple[Row, ...]:
        return tuple(row for row in self.part.rows if row.kind == "framework")

    @cached_property
    def free(self) -> int:
        return self.part.row("free").bytes or 0

    @cached_property
    def need(self) -> int:
        asked = self.verdict.requested
        if asked is None:
            return WORKSPACE
        spec = SPECS.get(self.verdict.requester or "")
        return asked + max(SEGMENT, int(asked * spec.rounds_up) if spec is not None else 0)

    @cached_property
    def taken(self) -> int | None:
        """The part of its cap that the requester cannot reuse: held less reclaimable. None if unknown."""
        if self.row is None:
            return 0
        if self.beside is not None:
            return (self.row.in_use or 0) + self.beside
        if self.row.at_least is not None:  # TensorFlow with growth: its pool is unknown, its live arrays are known
            return self.row.in_use or self.row.bytes or 0
        if self.row.bytes is None:
            return self.row.in_use
        return max(self.row.bytes - (self.row.reclaimable or 0), 0)

    @cached_property
    def allocator(self) -> str | None:
        """The name of the allocator that serves the requester; None for a library."""
        return None if self.row is None else allocator_of(self.planned, self.row.name)

    @cached_property
    def sharers(self) -> tuple[Row, ...]:
        """The rows of the requester's allocator other than its own."""
        if self.planned is None or self.allocator is None:
            return ()
        names = self.allocator, *clients(self.planned, self.allocator)
        return tuple([row for row in self.frameworks if row.name in names and row is not self.row])

    @cached_property
    def beside(self) -> int | None:
        """The bytes that others use of the requester's allocator; None if it is the requester's own."""
        own = self.row is None or self.allocator == self.row.name
        return None if own else sum(row.in_use or 0 for row in self.sharers)

    @cached_property
    def room(self) -> int | None:
        """The requester's headroom; None without a cap, or if unknown."""
        if self.row is None or self.row.cap is None or self.taken is None:
            return None
        return max(self.row.cap - self.taken, 0)

    @cached_property
    def split(self) -> int:
        """The requester's fragmented cache, which neither serves a large request nor can be returned.

        It is the part of the cache that a trim keeps. torch reports it as `inactive_split_bytes`, which `reclaimable`
        excludes.
        """
        spec = SPECS.get(self.row.name) if self.row is not None else None
        if self.row is None or (spec is not None and spec.pads):
            return 0
        if self.silent:
            return self.room or 0
        known = self.row.reclaimable is not None or self.row.name in NEVER_GIVE_BACK
        return max((self.row.cached or 0) - (self.row.reclaimable or 0), 0) if known else 0

    @cached_property
    def over_cap(self) -> bool:
        if self.room is None:  # without a known headroom: the request exceeds the whole cap
            cap = self.row.cap if self.row is not None else None
            return cap is not None and (self.verdict.requested or 0) > cap
        return self.room < self.need

    @cached_property
    def over_card(self) -> bool:
        return self.free + self._own < self.need

    @cached_property
    def shut_out(self) -> bool:
        """Whether the cap is the cause although size or use is unknown: the allocator refused, and the GPU had room.

        An allocator refuses a request that does not fit under its cap or on the GPU. So the cap refused if the GPU had
        more free memory than the headroom, or more than the request.
        """
        cap = self.row.cap if self.row is not None else None
        if not cap or not self.verdict.refused or (self.verdict.requested is not None and self.taken is not None):
            return False
        free = min(self.free, self.free if self.seen_free is None else self.seen_free) + self._own
        if self.verdict.requested is None:
            return free >= (cap if self.room is None else self.room) + self.need
        return free >= self.need

    @property
    def _own(self) -> int:
        """The memory that the requester trims by itself before it fails, or that idles in its pool."""
        if self.beside is not None:
            return sum(row.cached or 0 for row in self.sharers)
        return (self.row.reclaimable or 0) if self.row is not None else 0

    @property
    def fragmented(self) -> bool:
        """Whether fragmentation is the cause. A few per cent of every cache are always fragmented."""
        cap = (self.row.cap if self.row is not None else None) or 0
        return self.of_then and self.in_pieces and self.split * _PIECES >= cap

    @cached_property
    def in_pieces(self) -> bool:
        """Whether the request would fit under its cap if its cache were unfragmented."""
        if self.verdict.requested is None:
            return False
        if self.silent:  # its live arrays leave room under cap and GPU, so its pool lacks a block of that size
            return not self.over_card and self.room is not None and self.room >= self.need
        return self.over_cap and (self.room or 0) + self.split >= self.need

    @property
    def silent(self) -> bool:
        """Whether the requester does not report its pool's size: TensorFlow with growth."""
        return self.row is not None and self.row.at_least is not None

    @cached_property
    def headroom(self) -> int:
        room = self.row.cap if self.room is None and self.row is not None else self.room
        return self.free if room is None else min(self.free, room)

    @cached_property
    def planned(self) -> DevicePlan | None:
        devices = self.plan.devices if self.plan is not None else ()
        return next((part for part in devices if part.device.uuid == self.part.device.uuid), None)


def device_of(
    text: str, verdict: Verdict, ledger: Ledger | None, recorded: RefusedRequest | None
) -> DeviceLedger | None:
    """The GPU of the record, or of the CUDA ordinal in the text; else the requester's GPU with least headroom."""
    if ledger is None or not ledger.devices:
        return None
    if recorded is not None and recorded.uuid is not None:
        return next((part for part in ledger.devices if part.device.uuid == recorded.uuid), None)
    if named := re.search(r"\bGPU[ :_](\d+)\b|\bon device (\d+)\b", text):
        number = int(named[1] or named[2])
        known = all(part.device.ordinal is not None for part in ledger.devices)
        numbers = [part.device.ordinal if known else at for at, part in enumerate(ledger.devices)]
        if number in numbers:
            return ledger.devices[numbers.index(number)]
        return ledger.devices[0] if len(ledger.devices) == 1 and not known else None
    return min(ledger.devices, key=lambda part: Case(caps_in_force(part, verdict), verdict).headroom)


def caps_in_force(part: DeviceLedger, verdict: Verdict) -> DeviceLedger:
    """Drop caps that are only watched: they refuse nothing, so none of them caused the error."""
    watched = Enforcement.WATCHED.value
    rows = (
        replace(row, cap=None) if row.name == verdict.requester and row.enforcement == watched else row
        for row in part.rows
    )
    return replace(part, rows=tuple(rows))


def unknown(ledger: Ledger | None) -> tuple[Reason, str]:
    if ledger is None or not ledger.devices:
        return "unknown", "the GPU could not be read"
    return "unknown", "the error is about a GPU that the budget does not name"


class Cause(NamedTuple):
    """One row of the table: the reason, its condition on the figures, and its sentence."""

    reason: Reason
    shown_by: Callable[[_Figures], bool]
    text: Callable[[_Figures], str]


def reason(case: Case, moment: RefusedRequest | None, since: str) -> tuple[Reason, str]:
    """Whether the cap or the full GPU refused, and the evidence: figures of the refusal, if known.

    `since` describes the changes after the refusal. Current figures alone do not distinguish a fragmented
    cache from memory freed later.
    """
    figures = _Figures(case, moment, since)
    cause = next(one for one in (CAUSES if figures.capped else CAUSES_WITHOUT_A_CAP) if one.shown_by(figures))
    return cause.reason, cause.text(figures)


class _Figures:
    """A case's figures for the table's conditions and sentences, each formatted once, and the tense of the verbs."""

    def __init__(self, case: Case, moment: RefusedRequest | None, since: str) -> None:
        self.case, self.moment, self.since = case, moment, since
        self.asked, row = case.verdict.requested, case.row
        self.is_, self.has, self.have, self.holds = ("was", "had", "had", "held") if since else _PRESENT
        self.end = f" when the request failed{since}" if since else ""
        self.place, self.full = ("the machine", "the machine's memory") if case.unified else ("the card", "the card")
        self.card = f"{format_size(case.free)} free"
        self.exact = moment is not None and moment.source in ("refusal", "observer", "text")
        self.capped = row is not None and row.cap is not None
        if row is None or row.cap is None:
            return
        least = "at least " if row.at_least is not None else ""
        self.name, self.in_use, self.cap_size = row.name, row.in_use, format_size(row.cap)
        self.held = f"{self.holds} {'an unknown part' if row.bytes is None else f'{least}{format_size(row.bytes)}'}"
        self.most = case.planned.elastic[row.name][1] if case.planned and row.name in case.planned.elastic else row.cap

    @property
    def outside(self) -> str:
        """Why no cap applies, as the end of a sentence."""
        row, planned = self.case.row, self.case.planned
        if row is None:
            return ", and this memory lies outside every cap"
        if planned is None or row.name not in planned.caps:
            return ""
        return f"; {row.name}'s cap of {format_size(planned.caps[row.name])} is {row.enforcement}, not enforced"

    @property
    def cap(self) -> str:
        """The cap that was reached, and the bytes that the requester holds under it."""
        moment, beside = self.moment, self.case.beside
        used = "" if self.in_use is None else f" ({format_size(self.in_use)} in use)"
        if moment is not None and moment.source == "peak":
            used = f" ({format_size(self.in_use)} in use at its peak)"
        shared = "" if beside is None else f" of the shared pool, in which others {self.have} {format_size(beside)}"
        rises = self.case.row is not None and self.most > (self.case.row.cap or 0)
        elastic = f" (elastic, at most {format_size(self.most)})" if rises else ""
        kept = rises and moment is not None and moment.why_no_help is not None
        reached = "was not raised" if kept else f"{self.is_} reached"
        return f"its cap of {self.cap_size}{elastic} {reached}: it {self.held}{used}{shared}"

    @property
    def shut_out(self) -> str:
        what = "a request of unknown size" if self.asked is None else f"a request for {format_size(self.asked)}"
        when = _WHEN.get(self.moment.source, "") if self.moment is not None else " now"
        are = "are" if self.moment is None else "were"
        use = f", of which {format_size(self.in_use)} {are} in use{when}"
        if self.in_use is None:
            use = f"; how much of it {self.is_} in use is unknown"
        return f"{what} did not fit under its cap of {self.cap_size}{use}"

    @property
    def pieces(self) -> str:
        size = format_size(self.case.split)
        return f"{size} of its pool {self.is_} free but" if self.case.silent else f"{size} of its cache {self.is_}"

    @property
    def left(self) -> str:
        """The unknown figures of a request that the requester's own allocator refused, and the headroom."""
        what = "the size of the request is unknown" if self.asked is None else "what it has in use is unknown"
        left = "an unknown part" if self.case.room is None else format_size(self.case.room)
        return f"{what}: {left} of its cap {'were' if self.since else 'are'} left"

    @property
    def room(self) -> str:
        return f"({format_size(self.case.room)} under its cap, {self.card})"

    @property
    def known(self) -> bool:
        """Whether the requester's figures are from the moment of the refusal."""
        return self.exact and self.moment is not None and (self.moment.held, self.moment.in_use) != (None, None)


CAUSES_WITHOUT_A_CAP = (  # a library, or a framework that is only watched
    Cause("card", lambda it: it.case.over_card, lambda it: f"{it.full} {it.is_} full: {it.card}{it.end}{it.outside}"),
    Cause(
        "unknown",
        lambda it: it.exact and it.moment is not None and it.moment.free is not None,
        lambda it: f"{it.place} {it.has} {it.card}{it.end}: the error means something else",
    ),
    Cause(
        "unknown",
        lambda it: True,
        lambda it: f"{it.place} has {it.card} now: memory was freed since, as far as is known",
    ),
)
CAUSES = (
    Cause(  # a request above the whole cap
        "cap",
        lambda it: it.asked is not None and it.asked > it.most and it.case.over_cap,
        lambda it: (
            f"{format_size(it.asked)} is more than its whole cap of {format_size(it.most)}; "
            f"{it.place} {it.has} {it.card}{it.end}"
        ),
    ),
    Cause(  # size or use is unknown, and the GPU had room
        "cap",
        lambda it: it.case.shut_out,
        lambda it: f"{it.shut_out}; {it.place} {it.has} {it.card}{it.end}",
    ),
    Cause(  # current figures
        "cap",
        lambda it: it.case.in_pieces and it.moment is None,
        lambda it: f"{it.cap} now; what was in use when the request failed is not known; {it.place} has {it.card}",
    ),
    Cause(
        "fragmented",
        lambda it: it.case.fragmented,
        lambda it: (
            f"its cap of {it.cap_size} is large enough, but {it.pieces} fragmented; "
            f"{it.place} {it.has} {it.card}{it.end}"
        ),
    ),
    Cause(
        "cap and card",
        lambda it: it.case.over_cap and it.case.over_card,
        lambda it: f"{it.cap}, and {it.place} {it.has} only {it.card}{it.end}",
    ),
    Cause(
        "cap",
        lambda it: it.case.over_cap,
        lambda it: f"{it.cap}{it.end}" if it.since else f"{it.cap}; {it.place} has {it.card}",
    ),
    Cause(
        "card",
        lambda it: it.case.over_card,
        lambda it: f"{it.full} {it.is_} full: {it.card}; {it.name} {it.held} of its cap of {it.cap_size}{it.end}",
    ),
    Cause(
        "unknown",
        lambda it: it.case.verdict.refused and (it.asked is None or it.case.room is None),
        lambda it: f"{it.left}, and {it.place} {it.has} {it.card}{it.end}",
    ),
    Cause(
        "unknown",
        lambda it: it.known,
        lambda it: f"there {it.is_} room {it.room}{it.end}: the error means something else",
    ),
    Cause(
        "unknown",
        lambda it: True,
        lambda it: f"there is room now {it.room}: memory was freed since, as far as is known",
    ),
)
"""The first row whose condition holds is the cause. The last row of each table always holds."""

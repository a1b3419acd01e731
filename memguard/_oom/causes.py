"""Finds the cause of an out-of-memory error: the first row of a table whose condition the figures meet. Pure."""

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
from memguard._oom.classify import Classification

if TYPE_CHECKING:
    from memguard._budget import Budget

SEGMENT = 20 * MIB
"""Maximum bytes that an allocator takes from the driver in addition to a small request: one PyTorch segment
(measured)."""
WORKSPACE = 256 * MIB
"""The assumed size of a request of unknown size. It exceeds the memory that the first use of cuBLAS or cuSOLVER takes
(measured: 100 MiB)."""
_PIECES = 10
"""Fragmentation is the cause only if the fragmented cache is at least 1/`_PIECES` of the cap."""
_WHEN = {"peak": " at its peak", "sample": " in the last sample"}
"""The text for the time of a figure that was not read at the refusal, by the source of the figure."""
_PRESENT = "is", "has", "have", "holds"

Reason = Literal["cap", "card", "cap and card", "fragmented", "unknown", "elsewhere"]
"""Why the request failed. "card": the GPU's memory is full (with unified memory, the machine's). "fragmented": the cap
is large enough, but the cache is fragmented. "elsewhere": memory other than the GPU's ran out."""


@dataclass(frozen=True)
class Case:
    """An out-of-memory error on one GPU, and the figures from which its cause and its remedies are computed. Sizes are
    bytes.

    `row` is the ledger row of the framework that requested the memory; None if the requester is a library, whose memory
    no cap limits. `needed`: the requested bytes plus the bytes that the allocator takes in addition. `at_refusal`: True
    if the requester's figures were read at the refusal. `sampled_free`: the GPU's free memory in the last sample before
    the refusal.
    """

    gpu: DeviceLedger
    classification: Classification
    raised: str | None = None
    plan: Plan | None = None
    other_processes: Mapping[int, int | None] = field(default_factory=dict)
    budget: Budget | None = None
    at_refusal: bool = False
    sampled_free: int | None = None

    @cached_property
    def row(self) -> Row | None:
        named = (row for row in self.frameworks if row.name == self.classification.requester)
        return next(named, None)

    @property
    def unified(self) -> bool:
        return self.gpu.device.unified

    @cached_property
    def frameworks(self) -> tuple[Row, ...]:
        return tuple(row for row in self.gpu.rows if row.kind == "framework")

    @cached_property
    def free(self) -> int:
        return self.gpu.row("free").bytes or 0

    @cached_property
    def needed(self) -> int:
        requested = self.classification.requested
        if requested is None:
            return WORKSPACE
        spec = SPECS.get(self.classification.requester or "")
        return requested + max(SEGMENT, int(requested * spec.rounds_up) if spec is not None else 0)

    @cached_property
    def not_reusable(self) -> int | None:
        """The bytes under the cap that the requester cannot reuse: held bytes less reclaimable bytes. None if
        unknown."""
        if self.row is None:
            return 0
        if self.others_in_use is not None:
            return (self.row.in_use or 0) + self.others_in_use
        if self.row.at_least is not None:  # TensorFlow with memory growth reports live arrays, but not its pool
            return self.row.in_use or self.row.bytes or 0
        if self.row.bytes is None:
            return self.row.in_use
        return max(self.row.bytes - (self.row.reclaimable or 0), 0)

    @cached_property
    def allocator(self) -> str | None:
        """The name of the allocator from which the requester allocates; None for a library."""
        return None if self.row is None else allocator_of(self.device_plan, self.row.name)

    @cached_property
    def sharers(self) -> tuple[Row, ...]:
        """The rows of the requester's allocator and of this allocator's other clients, without the requester's row."""
        if self.device_plan is None or self.allocator is None:
            return ()
        names = self.allocator, *clients(self.device_plan, self.allocator)
        return tuple([row for row in self.frameworks if row.name in names and row is not self.row])

    @cached_property
    def others_in_use(self) -> int | None:
        """The bytes that other clients of the requester's allocator have in use; None if the requester has its own
        allocator."""
        own = self.row is None or self.allocator == self.row.name
        return None if own else sum(row.in_use or 0 for row in self.sharers)

    @cached_property
    def cap_headroom(self) -> int | None:
        """The bytes that the requester can still take under its cap; None without a cap or if unknown."""
        if self.row is None or self.row.cap is None or self.not_reusable is None:
            return None
        return max(self.row.cap - self.not_reusable, 0)

    @cached_property
    def fragmented_cache(self) -> int:
        """The bytes of the requester's fragmented cache, which cannot serve a large request.

        A trim does not free these bytes. torch reports them as `inactive_split_bytes`, which `reclaimable` excludes.
        """
        spec = SPECS.get(self.row.name) if self.row is not None else None
        if self.row is None or (spec is not None and spec.pads):
            return 0
        if self.pool_unreported:
            return self.cap_headroom or 0
        known = self.row.reclaimable is not None or self.row.name in NEVER_GIVE_BACK
        return max((self.row.cached or 0) - (self.row.reclaimable or 0), 0) if known else 0

    @cached_property
    def exceeds_cap(self) -> bool:
        if self.cap_headroom is None:  # then only a request above the whole cap certainly exceeds the cap
            cap = self.row.cap if self.row is not None else None
            return cap is not None and (self.classification.requested or 0) > cap
        return self.cap_headroom < self.needed

    @cached_property
    def exceeds_free(self) -> bool:
        return self.free + self._own < self.needed

    @cached_property
    def refused_by_cap(self) -> bool:
        """True if the cap must be the cause, although the size of the request or the bytes in use are unknown. An
        allocator refuses a request only if it does not fit under the cap or on the GPU. So the cap is the cause if the
        GPU had more free memory than the headroom under the cap (size unknown) or than the request needed (bytes in use
        unknown).
        """
        cap = self.row.cap if self.row is not None else None
        if (
            not cap
            or not self.classification.refused
            or (self.classification.requested is not None and self.not_reusable is not None)
        ):
            return False
        free = min(self.free, self.free if self.sampled_free is None else self.sampled_free) + self._own
        if self.classification.requested is None:
            return free >= (cap if self.cap_headroom is None else self.cap_headroom) + self.needed
        return free >= self.needed

    @property
    def _own(self) -> int:
        """The cached bytes that the requester's allocator returns to the driver before refusing a request. For a shared
        pool, the pool's idle bytes."""
        if self.others_in_use is not None:
            return sum(row.cached or 0 for row in self.sharers)
        return (self.row.reclaimable or 0) if self.row is not None else 0

    @property
    def fragmented(self) -> bool:
        """True if fragmentation is the cause. A cache that is fragmented by a few per cent of the cap, as every cache
        is, does not count."""
        cap = (self.row.cap if self.row is not None else None) or 0
        return self.at_refusal and self.fits_unfragmented and self.fragmented_cache * _PIECES >= cap

    @cached_property
    def fits_unfragmented(self) -> bool:
        """True if the request would fit under the cap if the requester's cache were unfragmented."""
        if self.classification.requested is None:
            return False
        if self.pool_unreported:  # if cap and GPU have room, the pool lacks a large enough block
            return not self.exceeds_free and self.cap_headroom is not None and self.cap_headroom >= self.needed
        return self.exceeds_cap and (self.cap_headroom or 0) + self.fragmented_cache >= self.needed

    @property
    def pool_unreported(self) -> bool:
        """True for TensorFlow with memory growth, which does not report the size of its pool."""
        return self.row is not None and self.row.at_least is not None

    @cached_property
    def headroom(self) -> int:
        room = self.row.cap if self.cap_headroom is None and self.row is not None else self.cap_headroom
        return self.free if room is None else min(self.free, room)

    @cached_property
    def device_plan(self) -> DevicePlan | None:
        devices = self.plan.devices if self.plan is not None else ()
        return next((one for one in devices if one.device.uuid == self.gpu.device.uuid), None)


def device_of(
    text: str, classification: Classification, ledger: Ledger | None, recorded: RefusedRequest | None
) -> DeviceLedger | None:
    """The GPU of the recorded request, or of the CUDA ordinal in the error's text; otherwise the GPU where the
    requester has the least headroom."""
    if ledger is None or not ledger.devices:
        return None
    if recorded is not None and recorded.uuid is not None:
        return next((gpu for gpu in ledger.devices if gpu.device.uuid == recorded.uuid), None)
    if named := re.search(r"\bGPU[ :_](\d+)\b|\bon device (\d+)\b", text):
        number = int(named[1] or named[2])
        known = all(gpu.device.ordinal is not None for gpu in ledger.devices)
        numbers = [gpu.device.ordinal if known else at for at, gpu in enumerate(ledger.devices)]
        if number in numbers:
            return ledger.devices[numbers.index(number)]
        return ledger.devices[0] if len(ledger.devices) == 1 and not known else None
    return min(ledger.devices, key=lambda gpu: Case(caps_in_force(gpu, classification), classification).headroom)


def caps_in_force(gpu: DeviceLedger, classification: Classification) -> DeviceLedger:
    """Remove the requester's cap if memguard only watches the cap, because such a cap refuses no request."""
    watched = Enforcement.WATCHED.value
    rows = (
        replace(row, cap=None) if row.name == classification.requester and row.enforcement == watched else row
        for row in gpu.rows
    )
    return replace(gpu, rows=tuple(rows))


def unknown(ledger: Ledger | None) -> tuple[Reason, str]:
    if ledger is None or not ledger.devices:
        return "unknown", "the GPU could not be read"
    return "unknown", "the error is about a GPU that the budget does not name"


class Cause(NamedTuple):
    """One row of the table of causes: the reason, the condition on the figures, and the sentence for the report."""

    reason: Reason
    shown_by: Callable[[_Figures], bool]
    text: Callable[[_Figures], str]


def reason(case: Case, request: RefusedRequest | None, since: str) -> tuple[Reason, str]:
    """The reason of the refusal, and a sentence with the figures that prove this reason.

    `since` is a text with the changes after the refusal, as from `changes_since`. Figures read after the refusal cannot
    distinguish a fragmented cache from memory that was freed after the refusal.
    """
    figures = _Figures(case, request, since)
    cause = next(one for one in (CAUSES if figures.capped else CAUSES_WITHOUT_A_CAP) if one.shown_by(figures))
    return cause.reason, cause.text(figures)


class _Figures:
    """The formatted figures of a case, and verbs in present or past tense, for the conditions and sentences of the
    table."""

    def __init__(self, case: Case, request: RefusedRequest | None, since: str) -> None:
        self.case, self.request, self.since = case, request, since
        self.requested, row = case.classification.requested, case.row
        self.is_, self.has, self.have, self.holds = ("was", "had", "had", "held") if since else _PRESENT
        self.end = f" when the request failed{since}" if since else ""
        self.place, self.full = ("the machine", "the machine's memory") if case.unified else ("the card", "the card")
        self.card = f"{format_size(case.free)} free"
        self.exact = request is not None and request.source in ("refusal", "observer", "text")
        self.capped = row is not None and row.cap is not None
        if row is None or row.cap is None:
            return
        least = "at least " if row.at_least is not None else ""
        self.name, self.in_use, self.cap_size = row.name, row.in_use, format_size(row.cap)
        self.held = f"{self.holds} {'an unknown part' if row.bytes is None else f'{least}{format_size(row.bytes)}'}"
        self.most = (
            case.device_plan.elastic[row.name][1]
            if case.device_plan and row.name in case.device_plan.elastic
            else row.cap
        )

    @property
    def outside(self) -> str:
        """The end of a sentence: the reason why no cap applies."""
        row, planned = self.case.row, self.case.device_plan
        if row is None:
            return ", and this memory lies outside every cap"
        if planned is None or row.name not in planned.caps:
            return ""
        return f"; {row.name}'s cap of {format_size(planned.caps[row.name])} is {row.enforcement}, not enforced"

    @property
    def cap(self) -> str:
        """A clause with the cap that was reached, and the bytes that the requester holds under this cap."""
        request, beside = self.request, self.case.others_in_use
        used = "" if self.in_use is None else f" ({format_size(self.in_use)} in use)"
        if request is not None and request.source == "peak":
            used = f" ({format_size(self.in_use)} in use at its peak)"
        shared = "" if beside is None else f" of the shared pool, in which others {self.have} {format_size(beside)}"
        rises = self.case.row is not None and self.most > (self.case.row.cap or 0)
        elastic = f" (elastic, at most {format_size(self.most)})" if rises else ""
        kept = rises and request is not None and request.why_no_help is not None
        reached = "was not raised" if kept else f"{self.is_} reached"
        return f"its cap of {self.cap_size}{elastic} {reached}: it {self.held}{used}{shared}"

    @property
    def shut_out(self) -> str:
        what = "a request of unknown size" if self.requested is None else f"a request for {format_size(self.requested)}"
        when = _WHEN.get(self.request.source, "") if self.request is not None else " now"
        are = "are" if self.request is None else "were"
        use = f", of which {format_size(self.in_use)} {are} in use{when}"
        if self.in_use is None:
            use = f"; how much of it {self.is_} in use is unknown"
        return f"{what} did not fit under its cap of {self.cap_size}{use}"

    @property
    def pieces(self) -> str:
        size = format_size(self.case.fragmented_cache)
        return (
            f"{size} of its pool {self.is_} free but"
            if self.case.pool_unreported
            else f"{size} of its cache {self.is_}"
        )

    @property
    def left(self) -> str:
        """A clause with the figure that is unknown, and the headroom under the cap."""
        what = "the size of the request is unknown" if self.requested is None else "what it has in use is unknown"
        left = "an unknown part" if self.case.cap_headroom is None else format_size(self.case.cap_headroom)
        return f"{what}: {left} of its cap {'were' if self.since else 'are'} left"

    @property
    def room(self) -> str:
        return f"({format_size(self.case.cap_headroom)} under its cap, {self.card})"

    @property
    def known(self) -> bool:
        """True if the requester's figures were read at the refusal."""
        return self.exact and self.request is not None and (self.request.held, self.request.in_use) != (None, None)


CAUSES_WITHOUT_A_CAP = (  # for a library, or a framework without an enforced cap
    Cause(
        "card", lambda it: it.case.exceeds_free, lambda it: f"{it.full} {it.is_} full: {it.card}{it.end}{it.outside}"
    ),
    Cause(
        "unknown",
        lambda it: it.exact and it.request is not None and it.request.free is not None,
        lambda it: f"{it.place} {it.has} {it.card}{it.end}: the error means something else",
    ),
    Cause(
        "unknown",
        lambda it: True,
        lambda it: f"{it.place} has {it.card} now: memory was freed since, as far as is known",
    ),
)
CAUSES = (
    Cause(  # the request exceeds the whole cap
        "cap",
        lambda it: it.requested is not None and it.requested > it.most and it.case.exceeds_cap,
        lambda it: (
            f"{format_size(it.requested)} is more than its whole cap of {format_size(it.most)}; "
            f"{it.place} {it.has} {it.card}{it.end}"
        ),
    ),
    Cause(  # the request's size or the bytes in use are unknown, and the GPU had enough free memory
        "cap",
        lambda it: it.case.refused_by_cap,
        lambda it: f"{it.shut_out}; {it.place} {it.has} {it.card}{it.end}",
    ),
    Cause(  # the figures at the refusal are unknown
        "cap",
        lambda it: it.case.fits_unfragmented and it.request is None,
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
        lambda it: it.case.exceeds_cap and it.case.exceeds_free,
        lambda it: f"{it.cap}, and {it.place} {it.has} only {it.card}{it.end}",
    ),
    Cause(
        "cap",
        lambda it: it.case.exceeds_cap,
        lambda it: f"{it.cap}{it.end}" if it.since else f"{it.cap}; {it.place} has {it.card}",
    ),
    Cause(
        "card",
        lambda it: it.case.exceeds_free,
        lambda it: f"{it.full} {it.is_} full: {it.card}; {it.name} {it.held} of its cap of {it.cap_size}{it.end}",
    ),
    Cause(
        "unknown",
        lambda it: it.case.classification.refused and (it.requested is None or it.case.cap_headroom is None),
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
"""The first row whose condition is true is the cause. The condition of each table's last row is always true."""

"""The figures of the moment at which a request was refused: which of them a report uses, and what they say. Pure.

When an exception reaches a hook or a block, what the failing code held may be gone, so the figures of then are taken
from the best source there is: the record of the refusal itself (memguard's own allocators, torch's observer), the
error's text, the most that the framework ever had in use, the monitor's last sample.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from memguard._base.specs import NEVER_GIVE_BACK, SPECS
from memguard._base.types import RefusedRequest, Sample
from memguard._base.units import MIB, format_size, parse_size
from memguard._ledger.types import DeviceLedger, Row
from memguard._oom.classify import ErrorFacts, Verdict

RECORD = "memguard_refusal"
"""The attribute of an exception that names the record of its refusal: process and number."""
_DIFFERS = 64 * MIB
"""Figures of then and now that differ by less, or by less than a fiftieth, are the same to a reader."""
_ROUNDED = Fraction(6, 1000)
"""Texts give two decimals: `1.00 GiB` may be a half per cent more or less."""


def record_of(
    records: Mapping[int, RefusedRequest], facts: ErrorFacts, verdict: Verdict, name: str | None, pid: int, thread: int
) -> int | None:
    """The number of the record that the error belongs to; None if there is none. `records` are those of no error yet.

    An allocator of memguard's own marks its error. The observer of another knows only framework and size; of several
    the newest of this thread is taken, or else the newest: `backward` allocates on a thread of its own.
    """
    marked = facts.attributes.get(RECORD)
    if isinstance(marked, str) and marked.startswith(f"{pid}:"):
        number = int(marked.partition(":")[2])
        return number if number in records else None
    if verdict.memory != "gpu":
        return None
    fit = [
        (moment.thread == thread, number)
        for number, moment in records.items()
        if moment.source == "observer" and moment.framework == name and _same(moment.requested, verdict.requested)
    ]
    return max(fit)[1] if fit else None


def _same(exact: int | None, printed: int | None) -> bool:
    return exact is None or printed is None or abs(exact - printed) <= int(exact * _ROUNDED) + 1024


def of_text(facts: ErrorFacts, verdict: Verdict, time: float) -> RefusedRequest | None:
    """The figures in the error's text, as the framework's row finds them; None if there are none."""
    spec = SPECS.get(verdict.requester or "")
    found: dict[str, Any] = {}
    for field, pattern in spec.figures if spec is not None else ():
        if field not in found and (match := re.search(pattern, facts.text)):
            size = _size(match[1])
            if size is not None:
                found[field] = size
    if not found or spec is None:
        return None
    if (cached := found.pop("cached", None)) is not None and "in_use" in found:
        found["held"] = found["in_use"] + cached
    # An allocator that prints what it holds has emptied its cache before it refused. torch's cudaMallocAsync backend
    # prints only what is in use: how much of the driver's pool a trim would return is not known.
    reclaimable = 0 if "held" in found else None
    return RefusedRequest(spec.name, "text", time, requested=verdict.requested)._replace(
        reclaimable=reclaimable, **found
    )


def _size(text: str) -> int | None:
    number, _, unit = text.replace(",", "").partition(" ")
    try:
        return int(number) if unit == "bytes" else parse_size(f"{number}{unit}")
    except ValueError:
        return None


def from_now(
    part: DeviceLedger, verdict: Verdict, need: int, peak: int | None, samples: Sequence[Sample], time: float
) -> RefusedRequest | None:
    """The last resorts, for an error without figures of its own: the last sample, or the peak; None if neither helps.

    need  the bytes that the request needed of the requester's cap
    peak  the most that the requester ever had in use on this GPU
    """
    row = next((row for row in part.rows if row.kind == "framework" and row.name == verdict.requester), None)
    seen = next((d for d in samples[-1].devices if d.uuid == part.device.uuid), None) if samples else None
    free = part.row("free").bytes
    if row is None:
        if seen is None or free is None or free - seen.free < _DIFFERS:
            return None
        return RefusedRequest(verdict.requester or "", "sample", samples[-1].time, part.device.uuid, free=seen.free)
    last = seen.frameworks.get(row.name) if seen is not None else None
    sampled = peaked = None
    if last is not None and seen is not None and _more(last.in_use, row.in_use):
        sampled = RefusedRequest(
            row.name, "sample", samples[-1].time, part.device.uuid, verdict.requested, last.held, last.in_use,
            last.reclaimable, free=seen.free,
        )  # fmt: skip
    if (
        peak is not None and row.name in NEVER_GIVE_BACK and peak >= (row.in_use or 0)
    ):  # else it may have held less then
        held = row.bytes if row.at_least is None else None
        held = max(held, peak) if held is not None else None
        peaked = RefusedRequest(row.name, "peak", time, part.device.uuid, verdict.requested, held, peak, 0)
    # The peak may be from long before, and the sample is from before the last requests. Of those that explain the error
    # the larger is the better bound: no more was in use at the moment than at the peak.
    fills = [one for one in (peaked, sampled) if one is not None and row.cap and (one.in_use or 0) + need > row.cap]
    return max(fills, key=lambda one: one.in_use or 0, default=peaked or sampled)


def _more(then: int | None, now: int | None) -> bool:
    return then is not None and now is not None and then - now >= _DIFFERS


def complete(moment: RefusedRequest, other: RefusedRequest | None) -> RefusedRequest:
    """The moment, with what only `other` knows, and its figure of what was in use if that is larger.

    PyTorch's text counts what idles in the pools of CUDA graphs as in use, and its counters do not.
    """
    if other is None:
        return moment
    known = {"requested", "held", "in_use", "reclaimable", "cap", "free", "pooled"}
    found = moment._replace(**{name: getattr(other, name) for name in known if getattr(moment, name) is None})
    if other.in_use is None or found.in_use is None or other.in_use * (1 - _ROUNDED) <= found.in_use:
        return found
    return found._replace(in_use=other.in_use if found.held is None else min(other.in_use, found.held))


def at(part: DeviceLedger, moment: RefusedRequest) -> DeviceLedger:
    """The rows of one GPU as they were at the moment, as far as it is known; of the others as in `part`.

    What the requester has given back since was not free then.
    """
    rows, returned = [], 0
    for row in part.rows:
        if row.kind == "framework" and row.name == moment.framework:
            then = _row(row, moment)
            returned = max((then.bytes or 0) - (row.bytes or 0), 0)
            rows.append(then)
        else:
            rows.append(row)
    free = moment.free
    if free is None and returned and (now := part.row("free").bytes) is not None:
        free = max(now - returned, 0)
    if free is not None:
        rows = [replace(row, bytes=free) if row.kind == "free" else row for row in rows]
    return replace(part, rows=tuple(rows))


def _row(row: Row, moment: RefusedRequest) -> Row:
    """The requester's row at the moment. What the moment does not know of the row is unknown then, and not as now."""
    if moment.cap is not None and row.cap is not None and moment.cap < row.cap:
        row = replace(row, cap=moment.cap)  # the user's own limit
    if moment.held is None and moment.in_use is None:
        return row
    held, in_use = moment.held, moment.in_use
    if held is None:  # at least what was in use
        held = max(row.bytes or 0, in_use or 0)
    if row.at_least is not None:
        return replace(row, bytes=held, at_least=held, in_use=in_use)
    cached = None if in_use is None else max(held - in_use, 0)
    return replace(row, bytes=held, in_use=in_use, cached=cached, reclaimable=moment.reclaimable)


def since(then: DeviceLedger, now: DeviceLedger | None, name: str | None, pooled: int | None = None) -> str:
    """What is different now, as the end of a sentence; empty if nothing is, or nothing is known of now.

    pooled  what was in use then and is in no figure of now
    """
    if now is None:
        return ""
    before, after = (
        next((row for row in part.rows if row.kind == "framework" and row.name == name), None) for part in (then, now)
    )
    if before is not None and after is not None:
        if before.in_use is not None and _differ(before.in_use - (pooled or 0), after.in_use):
            return f"; now {format_size(after.in_use)} are in use"
        if _differ(before.bytes, after.bytes):
            return f"; now it holds {format_size(after.bytes)}"
    if _differ(then.row("free").bytes, free := now.row("free").bytes):
        return f"; now the {'machine' if then.device.unified else 'card'} has {format_size(free)} free"
    return ""


def _differ(then: int | None, now: int | None) -> bool:
    return then is not None and now is not None and abs(then - now) >= max(_DIFFERS, then // 50)

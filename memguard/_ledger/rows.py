"""One reading of a GPU, and the ledger's rows and the monitor's sample made from it. Pure.

A framework that does not report what it holds (TensorFlow with growth) counts with a lower bound. Its memory above the
bound is in `unaccounted`, whose note names the framework. `unaccounted` is signed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from memguard._base.framework_spec import SECOND_CONTEXT
from memguard._base.types import (
    POOL,
    Device,
    DevicePlan,
    DeviceSample,
    FrameworkSample,
    MemoryInfo,
    Usage,
    device_sample_of,
    framework_sample_of,
)
from memguard._base.units import GRANULE, format_size
from memguard._budget.policy import modules
from memguard._budget.shared_pool import left_to, shared_notes
from memguard._frameworks.specs import CONTEXT_MAKER
from memguard._ledger.overhead import Overhead
from memguard._ledger.types import DeviceLedger, Lent, Row

_UNKNOWN = (None, None)


class Reading(NamedTuple):
    """One GPU at one moment: the figures of NVML and of each framework, each read once. Sizes are bytes.

    own       this process's memory by NVML; None if unknown
    usages    by framework; None for a framework that holds nothing there
    overhead  the charged overhead, this reading included
    moved     the figures changed during every attempt to read them
    contexts  the owner of each non-primary context
    lent      the memory that frameworks lend
    uncounted allocations of live frameworks that may bypass their caps
    """

    device: Device
    memory: MemoryInfo
    own: int | None
    usages: Mapping[str, Usage | None]
    overhead: Overhead = Overhead()
    moved: bool = False
    contexts: Sequence[str] = ()
    lent: Mapping[str, Lent] = MappingProxyType({})
    uncounted: Sequence[str] = ()


reading_of: Callable[[tuple[Any, ...]], Reading] = functools.partial(tuple.__new__, Reading)
"""Builds a Reading from a tuple of all fields, as `usage_of`."""


def sample_of_reading(reading: Reading, part: DevicePlan) -> DeviceSample:
    """The figures of a reading for the monitor, with the caps of `part`."""
    device, memory, own, usages, overhead, _, _, _, _ = reading
    caps, known = part.caps, 0
    frameworks: dict[str, FrameworkSample] = {}
    for name, usage in usages.items():
        if usage is not None:
            held, in_use, reclaimable, at_least, _, _ = usage
            known += held if held is not None else at_least or 0
            frameworks[name] = framework_sample_of((held, in_use, reclaimable, caps.get(name)))
    if part.joined:
        frameworks = left_to(part, frameworks)
    charged = overhead.charged + overhead.slabs
    rest = None if own is None else own - known - charged
    _, _, used, free, _ = memory
    return device_sample_of((device.uuid, device.total, used, free, own, part.limit, charged, rest, frameworks))


def device_ledger(
    reading: Reading,
    part: DevicePlan | None = None,
    enforcements: Mapping[str, str] | None = None,
    refusals: Mapping[str, tuple[int, float | None]] | None = None,
) -> DeviceLedger:
    """The rows of one GPU. `part` gives the caps and the limit, `enforcements` how each framework's cap is enforced.

    `refusals`: the number and last time of each framework's refusals; a framework without refusal reports is missing.
    The rows are made when they are first accessed, so none of the arguments may change afterwards.
    """
    limit = part.limit if part is not None else None
    rows = functools.partial(_rows, reading, part, enforcements, refusals)
    return DeviceLedger.later(reading.device, rows, reading.own, limit, reading.moved)


def _rows(
    reading: Reading,
    part: DevicePlan | None,
    enforcements: Mapping[str, str] | None,
    refusals: Mapping[str, tuple[int, float | None]] | None,
) -> tuple[Row, ...]:
    caps: Mapping[str, int] = part.caps if part is not None else {}
    enforcements, refusals = enforcements or {}, refusals or {}
    usages, memory, overhead = reading.usages, reading.memory, reading.overhead
    notes = shared_notes(part) if POOL in usages else {}
    rows, silent, counted = [], [], 0
    for name in dict.fromkeys([*caps, *usages]):
        usage, refused = usages.get(name), refusals.get(name, _UNKNOWN)
        loan = reading.lent.get(name)
        row = _framework(name, usage, caps.get(name), enforcements.get(name, ""), loan, refused, notes.get(name, ""))
        rows.append(row)
        counted += row.bytes or 0
        if usage is not None and usage.held is None:
            silent.append(name)
    second = overhead.second if reading.contexts else 0
    uncharged = memory.used is None and reading.own is None  # the process's memory beyond its arrays is unknown
    rows.append(Row("overhead", "overhead", None if uncharged else overhead.total - second))
    if reading.contexts:
        note = _of_contexts(reading.contexts, bool(second))
        rows.append(Row("overhead", SECOND_CONTEXT, second or None, note=note))
    if memory.used is None:
        return (*rows, *_unified(reading, counted, silent))
    if reading.own is None:
        rest = memory.used - counted - overhead.total
        note = "this process and others together: NVML does not name this process here"
        rows.append(Row("unaccounted", "unaccounted", rest, note=note))
        rows.append(Row("other processes", "other processes", None, note="unknown: see unaccounted"))
    else:
        rest = reading.own - counted - overhead.total
        rows.append(Row("unaccounted", "unaccounted", rest, note=_may_hold(rest, silent, reading.uncounted)))
        rows.append(Row("other processes", "other processes", memory.used - reading.own))
    reserve_note = "" if memory.reserved is not None else "unknown on this driver: counted under other processes"
    rows.append(Row("driver reserve", "driver reserve", memory.reserved, note=reserve_note))
    rows.append(Row("free", "free", memory.free))
    return tuple(rows)


def _unified(reading: Reading, counted: int, silent: Sequence[str]) -> list[Row]:
    """The last rows of a GPU with unified memory: they add up to this process."""
    memory, own = reading.memory, reading.own
    rest = None if own is None else own - counted - reading.overhead.total
    note = "unknown: NVML does not name this process here"
    note = note if rest is None else _may_hold(rest, silent, reading.uncounted)
    free = "of the machine's memory, which CPU and GPU share"
    if memory.cuda_free is not None:
        free += f"; CUDA says {format_size(memory.cuda_free)}"
    return [
        Row("unaccounted", "unaccounted", rest, note=note),
        Row("other processes", "other processes", None, note="unknown: NVML has no figures of unified memory"),
        Row("driver reserve", "driver reserve", None),
        Row("free", "free", memory.free, note=free),
    ]


def _may_hold(rest: int, silent: Sequence[str], uncounted: Sequence[str]) -> str:
    known = [f"includes what {' and '.join(silent)} may hold beyond what is known"] if silent else []
    return "; ".join([*known, *(f"may be {what}" for what in uncounted if rest >= GRANULE)])


def _framework(
    name: str,
    usage: Usage | None,
    cap: int | None,
    enforcement: str,
    loan: Lent | None,
    refused: tuple[int | None, float | None],
    said: str = "",
) -> Row:
    count, last = refused
    if usage is None:
        return Row("framework", name, 0, cap, enforcement=enforcement, refused=count, last_refused=last)
    held, in_use, reclaimable, at_least, at_most, _ = usage
    notes = [said] if said else []
    cached = held - in_use if held is not None and in_use is not None else None
    if held is None:
        most = "" if at_most is None else f", at most {format_size(at_most)}"
        notes.append(f"held unknown{', at least this' if at_least is not None else most}")
        size = at_least
    else:
        size, at_least, at_most = held, None, None
    if loan is not None:
        notes.append(str(loan))
    note, lent = "; ".join(notes), None if loan is None else loan.bytes
    # Positional arguments, which take half the time: each reading makes one for each row.
    return Row(
        "framework",
        name,
        size,
        cap,
        in_use,
        cached,
        reclaimable,
        enforcement,
        at_least,
        at_most,
        note,
        lent,
        count,
        last,
    )


def _of_contexts(owners: Sequence[str], charged: bool) -> str:
    """The note on non-primary contexts: their owners, their size, and how to avoid them."""
    many = f"{len(owners)} contexts, " if len(owners) > 1 else ""
    names = [name if name != "unknown" else "something unknown" for name in dict.fromkeys(owners)]
    where = "" if charged else "; its cost is in unaccounted"
    return (
        f"{many}made by {' and '.join(names)}, about {format_size(modules(SECOND_CONTEXT))} each (measured on an "
        f"H200){where}; fix: import {CONTEXT_MAKER.context_module} after memguard.init, with `context: primary` for "
        f"{CONTEXT_MAKER.name} in the budget, or use memguard.exchange.pycuda_context"
    )

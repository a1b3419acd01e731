"""Builds the ledger's rows and the monitor's sample from one reading of a GPU; no I/O.

A framework that does not report its held bytes (TensorFlow with growth) is counted with a lower bound. The row
`unaccounted` includes the framework's memory above the bound, and its note names the framework. `unaccounted` may be
negative.
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
    """One reading of a GPU: the figures of NVML and of each framework, each read once. Sizes are bytes.

    own       this process's memory by NVML; None if unknown
    usages    each framework's figures, by name; None for a framework that holds no memory on this GPU
    overhead  the bytes attributed to contexts, modules and libraries, after this reading
    moved     True if NVML's figures changed during every attempt to read them
    contexts  for each non-primary CUDA context, the name of the library that created it
    lent      by framework, its memory that other frameworks have views of
    uncounted descriptions of allocations by which a framework may bypass its cap
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
"""Builds a Reading from a tuple of all fields, in half the time of the constructor."""


def sample_of_reading(reading: Reading, device_plan: DevicePlan) -> DeviceSample:
    """Convert a reading to the monitor's sample, with the caps of `device_plan`."""
    device, memory, own, usages, overhead, _, _, _, _ = reading
    caps, known = device_plan.caps, 0
    frameworks: dict[str, FrameworkSample] = {}
    for name, usage in usages.items():
        if usage is not None:
            held, in_use, reclaimable, at_least, _, _ = usage
            known += held if held is not None else at_least or 0
            frameworks[name] = framework_sample_of((held, in_use, reclaimable, caps.get(name)))
    if device_plan.joined:
        frameworks = left_to(device_plan, frameworks)
    charged = overhead.charged + overhead.slabs
    unaccounted = None if own is None else own - known - charged
    _, _, used, free, _ = memory
    return device_sample_of(
        (device.uuid, device.total, used, free, own, device_plan.limit, charged, unaccounted, frameworks)
    )


def device_ledger(
    reading: Reading,
    device_plan: DevicePlan | None = None,
    enforcements: Mapping[str, str] | None = None,
    refusals: Mapping[str, tuple[int, float | None]] | None = None,
) -> DeviceLedger:
    """The ledger of one GPU. `device_plan` has the GPU's caps and limit; `enforcements` has the text of the column
    `cap is` for each framework.

    `refusals`: for each framework whose allocator reports refused allocations, their number and the time of the last.
    The rows are built on first access, so the caller must not change the arguments afterwards.
    """
    limit = device_plan.limit if device_plan is not None else None
    rows = functools.partial(_rows, reading, device_plan, enforcements, refusals)
    return DeviceLedger.later(reading.device, rows, reading.own, limit, reading.moved)


def _rows(
    reading: Reading,
    device_plan: DevicePlan | None,
    enforcements: Mapping[str, str] | None,
    refusals: Mapping[str, tuple[int, float | None]] | None,
) -> tuple[Row, ...]:
    caps: Mapping[str, int] = device_plan.caps if device_plan is not None else {}
    enforcements, refusals = enforcements or {}, refusals or {}
    usages, memory, overhead = reading.usages, reading.memory, reading.overhead
    notes = shared_notes(device_plan) if POOL in usages else {}
    rows, unreported, counted = [], [], 0
    for name in dict.fromkeys([*caps, *usages]):
        usage, refused = usages.get(name), refusals.get(name, _UNKNOWN)
        loan = reading.lent.get(name)
        row = _framework_row(
            name, usage, caps.get(name), enforcements.get(name, ""), loan, refused, notes.get(name, "")
        )
        rows.append(row)
        counted += row.bytes or 0
        if usage is not None and usage.held is None:
            unreported.append(name)
    second = overhead.second_contexts if reading.contexts else 0
    uncharged = memory.used is None and reading.own is None  # without either figure no overhead was measured
    rows.append(Row("overhead", "overhead", None if uncharged else overhead.total - second))
    if reading.contexts:
        note = _context_note(reading.contexts, bool(second))
        rows.append(Row("overhead", SECOND_CONTEXT, second or None, note=note))
    if memory.used is None:
        return (*rows, *_unified(reading, counted, unreported))
    if reading.own is None:
        unaccounted = memory.used - counted - overhead.total
        note = "this process and others together: NVML does not name this process here"
        rows.append(Row("unaccounted", "unaccounted", unaccounted, note=note))
        rows.append(Row("other processes", "other processes", None, note="unknown: see unaccounted"))
    else:
        unaccounted = reading.own - counted - overhead.total
        rows.append(
            Row(
                "unaccounted",
                "unaccounted",
                unaccounted,
                note=_unaccounted_note(unaccounted, unreported, reading.uncounted),
            )
        )
        rows.append(Row("other processes", "other processes", memory.used - reading.own))
    reserve_note = "" if memory.reserved is not None else "unknown on this driver: counted under other processes"
    rows.append(Row("driver reserve", "driver reserve", memory.reserved, note=reserve_note))
    rows.append(Row("free", "free", memory.free))
    return tuple(rows)


def _unified(reading: Reading, counted: int, unreported: Sequence[str]) -> list[Row]:
    """The rows of a GPU with unified memory that follow frameworks and overhead."""
    memory, own = reading.memory, reading.own
    unaccounted = None if own is None else own - counted - reading.overhead.total
    note = "unknown: NVML does not name this process here"
    note = note if unaccounted is None else _unaccounted_note(unaccounted, unreported, reading.uncounted)
    free = "of the machine's memory, which CPU and GPU share"
    if memory.cuda_free is not None:
        free += f"; CUDA says {format_size(memory.cuda_free)}"
    return [
        Row("unaccounted", "unaccounted", unaccounted, note=note),
        Row("other processes", "other processes", None, note="unknown: NVML has no figures of unified memory"),
        Row("driver reserve", "driver reserve", None),
        Row("free", "free", memory.free, note=free),
    ]


def _unaccounted_note(unaccounted: int, unreported: Sequence[str], uncounted: Sequence[str]) -> str:
    known = [f"includes what {' and '.join(unreported)} may hold beyond what is known"] if unreported else []
    return "; ".join([*known, *(f"may be {what}" for what in uncounted if unaccounted >= GRANULE)])


def _framework_row(
    name: str,
    usage: Usage | None,
    cap: int | None,
    enforcement: str,
    loan: Lent | None,
    refused: tuple[int | None, float | None],
    pool_note: str = "",
) -> Row:
    count, last = refused
    if usage is None:
        return Row("framework", name, 0, cap, enforcement=enforcement, refused=count, last_refused=last)
    held, in_use, reclaimable, at_least, at_most, _ = usage
    notes = [pool_note] if pool_note else []
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
    # Positional arguments take half the time of keyword arguments. Each reading builds a row for each framework.
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


def _context_note(owners: Sequence[str], charged: bool) -> str:
    """The note on non-primary contexts: the libraries that created them, their size, and how to avoid them."""
    many = f"{len(owners)} contexts, " if len(owners) > 1 else ""
    names = [name if name != "unknown" else "something unknown" for name in dict.fromkeys(owners)]
    where = "" if charged else "; its cost is in unaccounted"
    return (
        f"{many}made by {' and '.join(names)}, about {format_size(modules(SECOND_CONTEXT))} each (measured on an "
        f"H200){where}; fix: import {CONTEXT_MAKER.context_module} after memguard.init, with `context: primary` for "
        f"{CONTEXT_MAKER.name} in the budget, or use memguard.exchange.pycuda_context"
    )

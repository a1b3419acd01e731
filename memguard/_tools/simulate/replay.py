"""Replay an allocation trace on simulated GPUs, with or without a budget's caps. Its limits: docs/simulation.md.

Nothing here is real, and every text and table printed from it says so.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from memguard._base.types import Device, DevicePlan, Enforcement, TraceEvent
from memguard._base.undo import Undo
from memguard._base.units import GRANULE, format_size
from memguard._devices.catalog import Model
from memguard._devices.simulated import CONTEXT, SimulatedHost
from memguard._frameworks.simulated.adapter import FrameworkOutOfMemory, SimulatedFramework
from memguard._frameworks.specs import SPECS
from memguard._ledger.overhead import Overhead
from memguard._ledger.rows import Reading, device_ledger
from memguard._ledger.types import Ledger
from memguard._tools.simulate.trace import Trace, TraceHeader
from memguard.errors import TraceError

Caps = Mapping[str, Mapping[str, int]]
"""Bytes by framework name and device UUID."""
_WIDTH = 80


@dataclass(frozen=True)
class Refusal:
    """One allocation that failed. `full`: the GPU was full, not the cap. Sizes are bytes."""

    time: float
    framework: str
    device: int
    bytes: int
    held: int
    cap: int | None
    full: bool
    message: str


@dataclass(frozen=True)
class SimulationFramework:
    """One framework on one device. `refusals` holds the first ones, `refused` counts all.

    A deviation is the largest difference from a `mark` event before the first refusal, relative to the recorded figure
    (at least 2 MiB, so that a few bytes at the start do not count). None without such marks.
    """

    framework: str
    device: int
    cap: int | None
    peak_held: int
    peak_in_use: int
    refused: int
    refusals: tuple[Refusal, ...]
    marks: int
    held_deviation: float | None
    in_use_deviation: float | None
    sampled: bool = False
    """The trace has samples of the bytes in use, not each allocation: how the pool grew is not known."""


@dataclass(frozen=True)
class SimulationDevice:
    """One GPU: the most that the process held on it, with its context, and how often the GPU was full."""

    device: int
    name: str
    usable: int
    peak_process: int
    full: int


@dataclass(frozen=True)
class SimulationOutcome:
    """The result of a replay."""

    events: int
    budget: bool
    devices: tuple[SimulationDevice, ...]
    frameworks: tuple[SimulationFramework, ...]
    notes: tuple[str, ...] = ()
    ledger: Ledger | None = None
    """Who holds what after the last event, computed as for real GPUs."""

    @property
    def refused(self) -> int:
        """How many allocations failed."""
        return sum(row.refused for row in self.frameworks)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = asdict(replace(self, ledger=None))
        return {"simulated": True, "refused": self.refused, **plain, "ledger": self.ledger and self.ledger.as_dict()}

    def render(self) -> str:
        """Plain text of at most 80 columns."""
        budget = "with the budget's caps" if self.budget else "without a budget"
        lines = [f"simulated replay of {self.events} events, {budget}", ""]
        lines.append(f"{'framework':<16} {'GPU':>3} {'cap':>12} {'peak held':>12} {'peak in use':>12} {'refused':>8}")
        for row in self.frameworks:
            cap = "none" if row.cap is None else format_size(row.cap)
            held, in_use = format_size(row.peak_held), format_size(row.peak_in_use)
            lines.append(f"{row.framework[:16]:<16} {row.device:>3} {cap:>12} {held:>12} {in_use:>12} {row.refused:>8}")
        lines.append("")
        for gpu in self.devices:
            full = f", full {_times(gpu.full)}" if gpu.full else ""
            peak = f"process peak {format_size(gpu.peak_process)} of {format_size(gpu.usable)}{full}"
            lines += _wrap(f"GPU {gpu.device} {gpu.name} (simulated): {peak}")
        for row in self.frameworks:
            lines += _wrap(_deviation(row)) if row.marks else []
        for refusal in sorted((one for row in self.frameworks for one in row.refusals), key=lambda one: one.time):
            lines += _wrap(f"{refusal.time:.3f} s: {refusal.message}")
        for row in self.frameworks:
            if row.refused > len(row.refusals):
                lines.append(f"... and {row.refused - len(row.refusals)} more refusals of {row.framework[:16]}")
        for note in self.notes:
            lines += _wrap(f"note: {note}")
        return "\n".join(lines)


def host_of(header: TraceHeader) -> SimulatedHost:
    """Simulated GPUs of the models that the trace was recorded on."""
    gpus = (Model(d.name, d.architecture, d.total, d.reserved or 0, unified=d.unified) for d in header.devices)
    return SimulatedHost(list(gpus))


def simulate(
    trace: Trace,
    host: SimulatedHost | None = None,
    caps: Caps | None = None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    keep: int = 5,
) -> SimulationOutcome:
    """Replay the events in order. Raises TraceError if the trace has more GPUs than `host` or an unknown framework.

    `caps` None means without a budget; a framework that is not in `caps` has no cap. `options` is by framework, as in
    a Plan. `host` is by default made from the header, and cannot be used again. `keep` bounds the kept refusals.
    """
    run = _Run(trace, host or host_of(trace.header), caps, options or {}, keep)
    for event in trace.events:
        run.step(event)
    return run.outcome()


@dataclass
class _Cell:
    """One framework on one device, while replaying."""

    framework: SimulatedFramework
    device: Device
    cap: int | None
    refused: int = 0
    refusals: list[Refusal] = field(default_factory=list)
    marks: int = 0
    held_deviation: float | None = None
    in_use_deviation: float | None = None
    level: int = 0
    sampled: bool = False
    stack: list[tuple[int | None, int]] = field(default_factory=list)  # arrays that make up the level, newest last


class _Run:
    def __init__(
        self, trace: Trace, host: SimulatedHost, caps: Caps | None, options: Mapping[str, Mapping[str, Any]], keep: int
    ) -> None:
        self.trace, self.host, self.caps, self.keep = trace, host, caps, keep
        self.gpus = host.devices()
        self.full = [0] * len(self.gpus)
        self.notes: list[str] = []
        self.frameworks = {name: self._framework(name, options) for name in trace.header.frameworks}
        self.cells: dict[tuple[str, int], _Cell] = {}
        self.arrays: dict[tuple[str, int], int | None] = {}  # None: its allocation was refused
        uncapped = [name for name in trace.header.frameworks if caps is not None and name not in caps]
        if uncapped:
            self.notes.append(f"not in the budget, so replayed without a cap: {', '.join(uncapped)}")
        if trace.header.simulated:
            self.notes.append("the trace itself was recorded on simulated GPUs")
        # A pool grows with its cap: what was held under one says nothing of what is held without.
        self.comparable = caps is not None or "caps" not in trace.header.extra
        if not self.comparable:
            self.notes.append(
                "the trace was recorded under a budget: without its caps more may be held than was recorded, "
                "so what is held is not compared"
            )

    def step(self, event: TraceEvent) -> None:
        cell = self._cell(event)
        if event.op == "alloc":
            assert event.id is not None and event.bytes is not None
            self.arrays[event.framework, event.id] = self._allocate(cell, event, event.bytes)
        elif event.op == "free":
            assert event.id is not None
            array = self.arrays.pop((event.framework, event.id))
            if array is not None:
                cell.framework.free(array)
        elif event.op == "in_use":
            assert event.in_use is not None
            cell.sampled = True
            self._level(cell, event, event.in_use)
        elif event.op == "trim":
            cell.framework.trim(cell.device)
        elif event.op == "mark" and not cell.refused:  # after a refusal a real run would differ
            stats = cell.framework.stats(cell.device)
            cell.marks += 1
            if self.comparable:
                cell.held_deviation = _worse(cell.held_deviation, stats.held, event.held)
            cell.in_use_deviation = _worse(cell.in_use_deviation, stats.in_use, event.in_use)

    def outcome(self) -> SimulationOutcome:
        rows = []
        for (name, index), cell in sorted(self.cells.items()):
            stats = cell.framework.stats(cell.device)
            rows.append(
                SimulationFramework(
                    name,
                    index,
                    cell.cap,
                    stats.peak_held,
                    stats.peak_in_use,
                    cell.refused,
                    tuple(cell.refusals),
                    cell.marks,
                    cell.held_deviation,
                    cell.in_use_deviation,
                    cell.sampled,
                )
            )
        devices = tuple(
            SimulationDevice(index, gpu.name, gpu.usable, self.host.peak(gpu), self.full[index])
            for index, gpu in enumerate(self.gpus)
        )
        notes = tuple(self.notes)
        return SimulationOutcome(
            len(self.trace.events), self.caps is not None, devices, tuple(rows), notes, self.ledger()
        )

    def ledger(self) -> Ledger:
        parts = []
        for gpu in self.gpus:
            usages = {name: framework.usage(gpu) for name, framework in self.frameworks.items()}
            live = {name for name, usage in usages.items() if usage is not None}
            own = self.host.processes(gpu).get(self.host.pid, 0)
            modules = sum(self.frameworks[name].model.first_work for name in live)
            overhead = Overhead(CONTEXT + modules if live else 0)
            caps = {name: caps[gpu.uuid] for name, caps in (self.caps or {}).items() if name in usages}
            part = DevicePlan(gpu, gpu.usable, 0, caps, 0)
            holds = {name: Enforcement.ENFORCED.value if name in caps else "none" for name in usages}
            memory = self.host.memory(gpu)
            ledger = device_ledger(Reading(gpu, memory, own, usages, overhead), part, holds)
            parts.append(replace(ledger, limit=None))
        return Ledger(0.0, tuple(parts), simulated=True)

    def _framework(self, name: str, options: Mapping[str, Mapping[str, Any]]) -> SimulatedFramework:
        if name not in SPECS:
            known = ", ".join(SPECS)
            raise TraceError(f"{name!r} cannot be simulated", fix=f"replay a trace of {known} only")
        framework = SimulatedFramework(self.host, name, imported=True)
        about = self.trace.header.frameworks[name]
        chosen = dict(options.get(name, {}))
        if self.caps is not None and name in self.caps:
            caps, given = self.caps[name], chosen
        else:
            # If the trace was recorded under a budget, the budget chose `growth`: without one use TensorFlow's default.
            recorded_growth = False if "caps" in self.trace.header.extra else about.get("growth", False)
            caps, given = {}, {"growth": chosen.get("growth", recorded_growth)}
        framework.apply(caps, given, Undo())  # its GPUs end with the replay
        recorded, simulated = about.get("allocator"), SPECS[name].simulates
        if simulated and recorded is not None and recorded not in simulated:
            self.notes.append(
                f"{name} was recorded with the {recorded} allocator and is simulated with the {simulated[0]} one"
            )
        return framework

    def _cell(self, event: TraceEvent) -> _Cell:
        key = event.framework, event.device
        if key not in self.cells:
            if event.device >= len(self.gpus):
                raise TraceError(
                    f"the trace uses GPU {event.device}, and {len(self.gpus)} are simulated",
                    fix=f"simulate as many GPUs as the trace has ({len(self.trace.header.devices)})",
                )
            gpu = self.gpus[event.device]
            cap = (self.caps or {}).get(event.framework, {}).get(gpu.uuid)
            self.cells[key] = _Cell(self.frameworks[event.framework], gpu, cap)
        return self.cells[key]

    def _allocate(self, cell: _Cell, event: TraceEvent, nbytes: int, *, exact: bool = False) -> int | None:
        try:
            return cell.framework.allocate(nbytes, event.device, exact=exact)
        except FrameworkOutOfMemory as error:
            full, message = error.driver is not None, str(error)
            if full:
                self.full[event.device] += 1
                message += f"; {self._largest(cell.device)}"
            cell.refused += 1
            if len(cell.refusals) < self.keep:
                refusal = Refusal(
                    event.time, event.framework, event.device, nbytes, error.held, cell.cap, full, message
                )
                cell.refusals.append(refusal)
            return None

    def _level(self, cell: _Cell, event: TraceEvent, level: int) -> None:
        """Bring the bytes in use to `level`: allocate a block for a rise, free the newest (split one) for a fall."""
        if level > cell.level:
            rise = level - cell.level
            cell.stack.append((self._allocate(cell, event, rise, exact=True), rise))
        excess = cell.level - level
        while excess > 0:
            array, size = cell.stack.pop()
            if array is not None:
                cell.framework.free(array)
            if size > excess:
                rest = size - excess
                # A refused block stays refused: the rest of it only counts towards the level.
                cell.stack.append((self._allocate(cell, event, rest, exact=True) if array is not None else None, rest))
            excess -= min(size, excess)
        cell.level = level

    def _largest(self, gpu: Device) -> str:
        held = {name: framework.stats(gpu).held for name, framework in self.frameworks.items()}
        held |= {f"process {p}": used or 0 for p, used in self.host.processes(gpu).items() if p != self.host.pid}
        name = max(held, key=lambda holder: held[holder])
        return f"the largest holder is {name} with {format_size(held[name])}"


def _worse(so_far: float | None, simulated: int, recorded: int | None) -> float | None:
    if recorded is None:
        return so_far
    return max(so_far or 0.0, abs(simulated - recorded) / max(recorded, GRANULE))


def _deviation(row: SimulationFramework) -> str:
    parts = [
        f"{value:.1%} of what it {word}"
        for word, value in (("held", row.held_deviation), ("had in use", row.in_use_deviation))
        if value is not None
    ]
    where = f"{row.framework[:16]} on GPU {row.device}"
    text = f"{where}: compared {_times(row.marks)} with what was recorded, and off by up to {' and '.join(parts)}"
    if row.sampled and (row.held_deviation or 0) > 0.02:
        text += ": the trace has samples of what it used, not each allocation, so its pool may have grown otherwise"
    return text


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="    ")

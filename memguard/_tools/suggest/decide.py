"""From the figures of recorded runs to a budget. Pure: no clock, file, environment or GPU. All sizes are bytes.

Each process that was recorded gets the same budget, so a framework's limit is its largest need in any of them, with the
headroom on top. Processes that were on one GPU at the same time need its memory together; runs one after the other do
not. Whatever cannot fit is said in `problem`, and then there is no budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from memguard._base.types import Device
from memguard._base.units import format_size, round_up
from memguard._budget import policy
from memguard._frameworks.specs import SPECS
from memguard._timeline.replay import with_headroom
from memguard._tools.suggest.evidence import Need, Run

HEADROOM = Fraction(15, 100)
"""What is kept on top of each need if nobody says how much."""


@dataclass(frozen=True)
class Figure:
    """One framework's limit. `need` is the largest of all runs, `run` the one that had it, on the GPU `uuid`."""

    framework: str
    limit: int
    need: Need
    run: Run
    uuid: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Reserve:
    """What lies outside every cap. `source` is `measured`, `scaled` (for another architecture) or `auto`."""

    bytes: int
    source: str
    measured: int | None = None
    on: str = ""


@dataclass(frozen=True)
class Target:
    """A GPU on which the budget is to hold, and how many processes share it."""

    device: Device
    processes: int


@dataclass(frozen=True)
class Suggestion:
    """A budget with its evidence. `limit` is the reserve and all limits. `problem` and `fix`: why it does not fit.

    `named`: the targets are not the GPUs of the recording but those that were asked for.
    """

    figures: tuple[Figure, ...]
    reserve: Reserve
    limit: int
    headroom: Fraction
    runs: tuple[Run, ...]
    targets: tuple[Target, ...]
    named: bool
    problem: str | None
    fix: str | None
    notes: tuple[str, ...]


def suggest(runs: Iterable[Run], headroom: Fraction, devices: Sequence[Device] | None = None) -> Suggestion | None:
    """The budget for these runs on their own GPUs, or on `devices`. None if no framework needed anything."""
    ordered = tuple(sorted(runs, key=lambda run: (run.begin, run.end, run.rank or 0, run.run, run.file)))
    needed = [run for run in ordered if run.needs]
    if not needed:
        return None
    figures = _figures(needed, headroom)
    targets = _targets(needed, devices)
    names = [figure.framework for figure in figures]
    own = any(figure.options.get("context") == "own" for figure in figures)
    reserve = _reserve(needed, [target.device for target in targets], names, own)
    limit = reserve.bytes + sum(figure.limit for figure in figures)
    problem, fix = _misfit(figures, reserve, limit, targets, needed)
    return Suggestion(
        tuple(figures),
        reserve,
        limit,
        headroom,
        ordered,
        tuple(targets),
        devices is not None,
        problem,
        fix,
        tuple(dict.fromkeys(_notes(ordered, figures, targets))),
    )


def at_once(runs: Sequence[Run], uuid: str) -> int:
    """The most processes that were on the GPU at the same time."""
    spans: dict[str, list[float]] = {}
    for run in runs:
        if uuid in run.used:
            begin, end = spans.get(run.run, [run.begin, run.end])
            spans[run.run] = [min(begin, run.begin), max(end, run.end)]
    return max((sum(b <= begin <= e for b, e in spans.values()) for begin, _ in spans.values()), default=0)


def _figures(runs: Sequence[Run], headroom: Fraction) -> list[Figure]:
    found: dict[str, Figure] = {}
    for run in runs:
        for (uuid, name), need in run.needs.items():
            best = found.get(name)
            limit = max(with_headroom(need.bytes, headroom), with_headroom(need.least(name)))
            if best is None or (limit, need.bytes) > (best.limit, best.need.bytes):
                found[name] = Figure(name, limit, need, run, uuid, _options(name, runs))
    return sorted(found.values(), key=lambda figure: (-figure.limit, figure.framework))


def _options(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """What the runs' budgets said of the framework and is not the default, if they agree and it can be written."""
    found: dict[str, Any] = {}
    for option in SPECS[name].options:
        values = [run.options[name][option.name] for run in runs if option.name in run.options.get(name, {})]
        if not values or any(type(value) is not type(values[0]) or value != values[0] for value in values):
            continue
        right = {"flag": bool, "count": int, "word": str}[option.kind]
        value = values[0]
        if type(value) is not right or value == option.default:
            continue
        if (option.kind == "word" and value in option.words) or option.kind == "flag":
            found[option.name] = value
    return found


def _targets(runs: Sequence[Run], devices: Sequence[Device] | None) -> list[Target]:
    here: dict[str, Device] = {}
    for run in runs:
        for uuid in run.used:
            here.setdefault(uuid, run.devices[uuid])
    counts = {uuid: at_once(runs, uuid) for uuid in here}
    if devices is not None:
        most = max(counts.values())
        return [Target(device, most) for device in devices]
    return [Target(here[uuid], counts[uuid]) for uuid in sorted(here, key=lambda uuid: (here[uuid].index, uuid))]


def _reserve(runs: Sequence[Run], devices: Sequence[Device], names: Sequence[str], own: bool) -> Reserve:
    """The most that was measured, larger where the context of the target's architecture is."""
    largest = max(_size_of_context(device) for device in devices)
    found: list[tuple[int, int, str]] = []
    for run in runs:
        for uuid in run.used:
            if size := run.outside.get(uuid):
                architecture = run.devices[uuid].architecture
                ratio = max(largest / _size_of_context(run.devices[uuid]), Fraction(1))
                found.append((round_up(-(-size * ratio // 1)), size, architecture))
    if not found:
        size = max(policy.auto_reserve(device.architecture, names, 0, own) for device in devices)
        return Reserve(size, "auto")
    size, measured, architecture = max(found)
    return Reserve(size, "measured" if size == round_up(measured) else "scaled", measured, architecture)


def _size_of_context(device: Device) -> Fraction:
    return policy.RESERVE_BY_ARCHITECTURE.get(device.architecture, Fraction(1))


def _misfit(
    figures: Sequence[Figure], reserve: Reserve, limit: int, targets: Sequence[Target], runs: Sequence[Run]
) -> tuple[str | None, str | None]:
    """Why the budget does not fit, and what to do; None if it fits all targets."""
    tight = [target for target in targets if limit * target.processes > target.device.usable]
    if not tight:
        return None, None
    worst = min(tight, key=lambda target: (Fraction(target.device.usable, target.processes), target.device.uuid))
    usable, count = worst.device.usable, worst.processes
    together = f", and {count} processes share it: {format_size(limit * count)}" if count > 1 else ""
    parts = ", ".join(f"{figure.framework} {format_size(figure.limit)}" for figure in figures)
    problem = (
        f"the budget does not fit {worst.device.name}: it takes {format_size(limit)} ({parts}, reserve "
        f"{format_size(reserve.bytes)}){together}; {format_size(usable)} can be had there"
    )
    fixes = []
    needs = [(figure.need.bytes, figure.need.least(figure.framework)) for figure in figures]
    most = largest_headroom(needs, usable // count - reserve.bytes)
    if most is not None:
        fixes.append(f"--headroom {most}% is the most that fits")
    if any(figure.need.source == "refused" for figure in figures):
        fixes.append("if the program tries sizes on purpose until one fails, --ignore-refused leaves those out")
    elif len({figure.uuid for figure in figures}) > 1 and count == 1:
        fixes.append(
            "the frameworks peaked on different GPUs, and a budget has one figure for all: use several processes"
        )
    fixes.append("choose a larger GPU with --device, or run the frameworks' peaks one after the other")
    return problem, "; or ".join(fixes)


def largest_headroom(needs: Sequence[tuple[int, int]], room: int) -> int | None:
    """The largest whole percentage with which the needs fit into `room`; None if not even 0 does.

    `needs`: each with the limit that it has at least, whatever the headroom.
    """

    def sum_of(percent: int) -> int:
        headroom = Fraction(percent, 100)
        return sum(max(with_headroom(need, headroom), with_headroom(least)) for need, least in needs)

    if room <= 0 or sum_of(0) > room:
        return None
    percent = min(max(room * 100 // max(sum(need for need, _ in needs), 1) - 100, 0), 100)
    while percent and sum_of(percent) > room:
        percent -= 1
    return percent


def _notes(runs: Sequence[Run], figures: Sequence[Figure], targets: Sequence[Target]) -> Iterable[str]:
    named = {figure.framework for figure in figures}
    if any(run.simulated for run in runs):
        yield "recorded on simulated GPUs: nothing here was measured on a real one"
    for run in runs:
        if not run.needs:
            yield f"{run.file}: no framework held anything in it"
        elif not run.declared:
            yield f"{run.file}: recorded without a budget: what was refused is not in it"
    for name in dict.fromkeys(name for run in runs for name in run.declared):
        if name not in named:
            yield f"{name} was in the recorded budget and held nothing: it is left out, and so has no cap"
    for name in sorted(named):
        needs = [need for run in runs for (_, one), need in run.needs.items() if one == name]
        if SPECS[name].refuses_silently and not any(need.refusals for need in needs):
            yield f"{name} tells nobody what it refused: if the program caught such an error, it is not counted"
    for target in targets:
        if target.processes > 1:
            yield f"{target.processes} processes were on one GPU at the same time: each gets this budget"
    for run in runs:
        for note in run.notes:
            yield f"{run.file}: {note}"

"""Replay: what was recorded comes out again, what does not fit is refused, and everything says that it is simulated."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import memguard
from memguard._base.types import TraceEvent
from memguard._base.units import GIB, MIB
from memguard._devices.catalog import CATALOGUE
from memguard._devices.simulated import SimulatedHost
from memguard._frameworks.simulated.adapter import SimulatedFramework
from memguard._frameworks.specs import SPECS
from memguard._tools.simulate.replay import SimulationOutcome, host_of, simulate
from memguard._tools.simulate.trace import Trace, TraceDevice, TraceHeader, read, write
from memguard.cli.replay import replay as command
from memguard.errors import TimelineError, TraceError

H200 = TraceDevice("NVIDIA H200", CATALOGUE["h200"].total, CATALOGUE["h200"].reserved, "hopper")
UUID = SimulatedHost().devices()[0].uuid


def header(devices: int = 1, **frameworks: dict[str, object]) -> TraceHeader:
    names: dict[str, dict[str, object]] = frameworks or {name: {} for name in SPECS}
    return TraceHeader("2025-01-31", (H200,) * devices, names)


def trace(*events: TraceEvent, devices: int = 1, **frameworks: dict[str, object]) -> Trace:
    return Trace(header(devices, **frameworks), events)


def alloc(number: int, size: int, framework: str = "torch", time: float = 0.0, device: int = 0) -> TraceEvent:
    return TraceEvent(time, framework, "alloc", number, size, device=device)


def free(number: int, framework: str = "torch", time: float = 0.0) -> TraceEvent:
    return TraceEvent(time, framework, "free", number)


def level(size: int, time: float = 0.0, framework: str = "tensorflow") -> TraceEvent:
    return TraceEvent(time, framework, "in_use", in_use=size)


def mark(held: int | None, in_use: int | None, framework: str = "torch") -> TraceEvent:
    return TraceEvent(0, framework, "mark", held=held, in_use=in_use)


def test_peaks() -> None:
    outcome = simulate(
        trace(alloc(1, 5 * MIB), alloc(2, 30 * MIB), free(2), TraceEvent(0, "torch", "trim"), alloc(3, 1))
    )
    (row,), (gpu,) = outcome.frameworks, outcome.devices
    assert (row.framework, row.device, row.cap, row.refused) == ("torch", 0, None, 0)
    assert (row.peak_held, row.peak_in_use) == (50 * MIB, 35 * MIB)
    assert gpu.peak_process == (518 + 94 + 50) * MIB and gpu.full == 0
    assert outcome.refused == 0 and not outcome.budget and outcome.events == 5


def test_a_cap_refuses_and_the_later_free_is_skipped() -> None:
    events = [alloc(n, 300 * MIB, time=n) for n in range(5)]
    outcome = simulate(trace(*events, free(4, time=9), free(0, time=9)), caps={"torch": {UUID: GIB}}, keep=1)
    (row,) = outcome.frameworks
    assert (row.cap, row.refused, len(row.refusals), row.peak_held) == (GIB, 2, 1, 900 * MIB)
    refusal = row.refusals[0]
    assert (refusal.time, refusal.bytes, refusal.held, refusal.cap, refusal.full) == (
        3.0,
        300 * MIB,
        900 * MIB,
        GIB,
        False,
    )
    assert outcome.budget and outcome.refused == 2


def test_a_full_card_names_the_largest_holder() -> None:
    events = (level(MIB), alloc(1, 4 * GIB, time=1))
    outcome = simulate(trace(*events))
    rows = {row.framework: row for row in outcome.frameworks}
    assert abs(outcome.devices[0].peak_process - 141_350 * MIB) < 200 * MIB and outcome.devices[0].full == 1
    (refusal,) = rows["torch"].refusals
    assert refusal.full and "the largest holder is tensorflow with 137.5" in refusal.message
    capped = simulate(trace(*events), caps={"tensorflow": {UUID: GIB}, "torch": {UUID: 5 * GIB}})
    assert capped.refused == 0


def test_another_process_can_be_the_largest_holder() -> None:
    host = SimulatedHost()
    host.occupy(host.devices()[0], 77, 130 * GIB)
    outcome = simulate(trace(alloc(1, 20 * GIB)), host)
    assert "the largest holder is process 77 with 130.00 GiB" in outcome.frameworks[0].refusals[0].message


def test_tensorflow_growth_comes_from_the_options_or_the_recording() -> None:
    events = (level(256 * MIB),)
    assert simulate(trace(*events)).frameworks[0].peak_held > 100 * GIB
    assert simulate(trace(*events, tensorflow={"growth": True})).frameworks[0].peak_held == 256 * MIB
    for growth, held in ((True, 256 * MIB), (False, 4 * GIB)):
        outcome = simulate(
            trace(*events), caps={"tensorflow": {UUID: 4 * GIB}}, options={"tensorflow": {"growth": growth}}
        )
        assert outcome.frameworks[0].peak_held == held


@pytest.mark.parametrize("name", ["tensorflow", "jax", "cupy", "numba"])
@settings(max_examples=60, deadline=None)
@given(levels=st.lists(st.integers(0, 1_500_000).map(lambda n: n * 512), max_size=40))
def test_levels_are_met_exactly(name: str, levels: list[int]) -> None:
    events = [step for size in levels for step in (level(size, framework=name), mark(None, size, name))]
    outcome = simulate(trace(*events, **{name: {"growth": True}}), caps={name: {UUID: 100 * GIB}})
    if levels:
        (row,) = outcome.frameworks
        assert row.in_use_deviation == 0.0 and row.marks == len(levels)
        assert row.peak_in_use == max(levels) and row.held_deviation is None


@pytest.mark.parametrize("named", [(), ("torch",), ("torch", "jax"), ("torch", "jax", "numba")])
def test_frameworks_that_the_budget_does_not_name_are_named(named: tuple[str, ...]) -> None:
    recorded = Trace(TraceHeader("2025-01-31", (H200,), {"torch": {}, "jax": {}, "numba": {}}), ())
    host = host_of(recorded.header)
    outcome = simulate(recorded, host, {name: {host.devices()[0].uuid: GIB} for name in named})
    rest = [name for name in ("torch", "jax", "numba") if name not in named]
    assert [note.endswith(f"replayed without a cap: {', '.join(rest)}") for note in outcome.notes] == [True] * bool(
        rest
    )
    assert simulate(recorded).notes == ()


def test_without_a_budget_jax_takes_three_quarters_of_the_card() -> None:
    """What it does where nobody says otherwise; under a cap it grows."""
    events = (level(256 * MIB, framework="jax"),)
    gpu = SimulatedHost().devices()[0]
    assert simulate(trace(*events)).frameworks[0].peak_held == gpu.usable * 3 // 4
    assert simulate(trace(*events), caps={"jax": {UUID: 4 * GIB}}).frameworks[0].peak_held == 256 * MIB


@pytest.mark.parametrize("name", SPECS)
def test_each_is_refused_at_its_cap(name: str) -> None:
    """By level or by allocation, as it is recorded; the ledger at the end sums to the card."""
    if name in ("torch", "pycuda"):
        events = [alloc(n, 100 * MIB, name, time=n) for n in range(20)]
    else:
        events = [level(100 * MIB * n, framework=name, time=n) for n in range(1, 21)]
    outcome = simulate(trace(*events), caps={name: {UUID: GIB}}, options={name: {"growth": True}})
    (row,) = outcome.frameworks
    assert 9 <= 20 - row.refused <= 10 and 900 * MIB <= row.peak_held <= GIB
    assert not row.refusals[0].full and f"simulated {name}: out of memory" in row.refusals[0].message
    assert outcome.ledger is not None
    (part,) = outcome.ledger.devices
    assert sum(r.bytes or 0 for r in part.rows) == part.device.total
    unaccounted = part.row("unaccounted").bytes
    assert unaccounted is not None and 0 <= unaccounted <= (GIB if name == "tensorflow" else 0)


def test_levels_after_a_refusal() -> None:
    sizes = [800 * MIB, 1200 * MIB, 1100 * MIB, 700 * MIB, 900 * MIB]
    events = [level(size, time=n) for n, size in enumerate(sizes)]
    outcome = simulate(trace(*events), caps={"tensorflow": {UUID: GIB}}, options={"tensorflow": {"growth": True}})
    (row,) = outcome.frameworks
    assert [(r.time, r.bytes) for r in row.refusals] == [(1.0, 400 * MIB)]
    assert row.peak_in_use == 900 * MIB


def test_marks_are_compared_until_the_first_refusal() -> None:
    events = (
        mark(0, 0),
        alloc(1, 100 * MIB),
        mark(101 * MIB, 100 * MIB),
        mark(None, 80 * MIB),
        alloc(2, GIB),
        mark(5, 5),
    )
    (row,) = simulate(trace(*events), caps={"torch": {UUID: GIB}}).frameworks
    assert row.marks == 3
    assert row.held_deviation == pytest.approx(1 / 101) and row.in_use_deviation == pytest.approx(0.25)


def test_a_deviation_says_of_what_it_is() -> None:
    text = " ".join(simulate(trace(alloc(1, 100 * MIB), mark(10 * MIB, 80 * MIB))).render().split())
    assert "torch on GPU 0: compared once with what was recorded, and off by up to" in text
    assert "900.0% of what it held and 25.0% of what it had in use" in text
    assert "under a budget" not in text
    recorded = trace(mark(0, 0))
    recorded = replace(recorded, header=replace(recorded.header, extra={"caps": {"torch": GIB}}))
    note = "without its caps more may be held than was recorded, so what is held is not compared"
    assert note in " ".join(simulate(recorded).render().split())
    assert "under a budget" not in simulate(recorded, caps={"torch": {UUID: GIB}}).render()


def test_a_guard_says_once_that_it_is_simulated() -> None:
    budget = {"version": 1, "frameworks": {"torch": {"share": "20%"}, "cupy": {"share": "20%"}}}
    with memguard.guard(budget, simulate="h200") as guard:
        frameworks: Any = guard.frameworks
        for name in ("torch", "cupy"):
            frameworks[name].start_importing()
        said = "note: the GPUs and frameworks of this budget are simulated: nothing real is limited"
        assert str(guard).count(said) == 1


def test_a_recorded_simulation_replays_to_the_byte() -> None:
    host = SimulatedHost()
    (gpu,) = host.devices()
    for name in ("torch", "pycuda"):
        framework = SimulatedFramework(host, name)
        stop = framework.record()
        assert stop is not None
        arrays = [framework.allocate(size * 100_001) for size in (1, 7, 30, 200, 3, 90)]
        for array in arrays[::2]:
            framework.free(array)
        framework.allocate(5_000_000)
        real = framework.stats(gpu)
        (row,) = simulate(trace(*stop(), mark(real.held, real.in_use, name))).frameworks
        assert (row.peak_held, row.peak_in_use) == (real.peak_held, real.peak_in_use)
        assert row.held_deviation == row.in_use_deviation == 0.0


@pytest.mark.parametrize("name", ["cupy", "jax", "numba"])
def test_a_sampled_level_replays_under_the_caps_of_its_recording(name: str, tmp_path: Path) -> None:
    """Each says its level only; two arrays gone between two samples are one fall, which frees and cuts."""
    path = tmp_path / "run.jsonl"
    budget = {"version": 1, "device": {"limit": "40GiB"}, "frameworks": {name: {"limit": "1GiB"}}}
    guard = memguard.init(budget, simulate="h200")
    try:
        framework = guard.frameworks[name]
        assert isinstance(framework, SimulatedFramework)
        framework.start_importing()
        with memguard.record_trace(path, interval=0.0005):
            arrays = []
            for size in (1000, 300 * MIB, 5 * MIB + 1, 700_000, 200 * MIB, 3 * MIB):
                arrays.append(framework.allocate(size))
                time.sleep(0.003)
            framework.free(arrays[1])
            framework.free(arrays[3])
        real = framework.stats(guard.plan.devices[0].device)
        recorded = read(path)
        (row,) = simulate(recorded, caps={name: guard.plan.caps(name)}).frameworks
    finally:
        memguard.shutdown()
    assert {event.op for event in recorded.events} == {"in_use", "mark"}
    assert row.refused == 0 and row.marks == 1
    assert row.in_use_deviation is not None and row.in_use_deviation < 0.0001
    assert real.in_use <= row.peak_in_use <= real.peak_in_use * 1.0001


def test_several_devices() -> None:
    events = (alloc(1, GIB, device=1), alloc(2, 2 * GIB, device=0))
    recorded = trace(*events, devices=2)
    uuids = [d.uuid for d in host_of(recorded.header).devices()]
    outcome = simulate(recorded, caps={"torch": {uuids[0]: GIB, uuids[1]: GIB}})
    assert [(row.device, row.refused, row.peak_held) for row in outcome.frameworks] == [(0, 1, 0), (1, 0, GIB)]
    with pytest.raises(TraceError, match="uses GPU 1, and 1 are simulated"):
        simulate(recorded, SimulatedHost())


def test_what_cannot_be_simulated() -> None:
    with pytest.raises(
        TraceError, match=r"'mxnet' cannot be simulated\n.* torch, tensorflow, cupy, jax, pycuda, numba"
    ):
        simulate(trace(mxnet={}))
    for name, other, usual in (
        ("torch", "expandable_segments", "native"),
        ("cupy", "rmm", "MemoryPool"),
        ("jax", "platform", "bfc"),
    ):
        (note,) = simulate(trace(**{name: {"allocator": other}})).notes
        assert note == f"{name} was recorded with the {other} allocator and is simulated with the {usual} one"
        assert simulate(trace(**{name: {"allocator": usual}})).notes == ()
    again = Trace(TraceHeader("2025-01-31", (H200,), {}, simulated=True), ())
    assert "recorded on simulated" in simulate(again).notes[0]


def crowded() -> SimulationOutcome:
    events = [level(MIB), mark(None, MIB, "tensorflow"), *(alloc(n, 4 * GIB, time=n) for n in range(9))]
    return simulate(trace(*events, alloc(1, 5, "pycuda", time=10)))


def test_the_text_fits_and_says_that_it_is_simulated() -> None:
    text = crowded().render()
    assert max(map(len, text.splitlines())) <= 80
    first, *_ = text.splitlines()
    assert first == "simulated replay of 12 events, without a budget"
    for part in (
        "tensorflow",
        "none",
        "NVIDIA H200 (simulated)",
        "and 4 more refusals of torch",
        "compared once",
        "full 9 times",
    ):
        assert part in " ".join(text.split()), part
    assert "simulated" in simulate(trace()).render()


def test_the_json() -> None:
    outcome = crowded()
    record = json.loads(json.dumps(outcome.as_dict()))
    assert record["simulated"] is True and record["refused"] == outcome.refused == 9
    assert {row["framework"] for row in record["frameworks"]} == {"torch", "tensorflow", "pycuda"}
    assert record["frameworks"][-1]["refusals"][0]["full"] is True


BUDGET = """\
version: 1
device: {limit: 90%, reserve: 2GiB}
frameworks:
  torch: {limit: 8GiB}
  tensorflow: {limit: 4GiB, growth: true}
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    budget, path = tmp_path / "budget.yaml", tmp_path / "trace.jsonl"
    budget.write_text(BUDGET)
    write(path, header(), [level(GIB), alloc(1, 6 * GIB, time=1), alloc(2, 1, "pycuda", time=1)])
    return str(budget), str(path)


def test_the_command(files: tuple[str, str]) -> None:
    budget, path = files
    run = CliRunner().invoke(command, ["-c", budget, path])
    assert run.exit_code == 0, run.output
    assert "with the budget's caps" in run.output and "8.00 GiB" in run.output
    run = CliRunner().invoke(command, [path, "--without-budget"])
    assert run.exit_code == 1 and "the card is full" in " ".join(run.output.split())
    run = CliRunner().invoke(command, [path, "--without-budget", "--json"])
    assert run.exit_code == 1 and json.loads(run.output)["budget"] is False
    run = CliRunner().invoke(command, ["-c", budget, path, "--device", "h100", "--json"])
    assert run.exit_code == 0 and json.loads(run.output)["devices"][0]["name"] == "NVIDIA H100 80GB HBM3"


def test_the_command_with_wrong_input(files: tuple[str, str], tmp_path: Path) -> None:
    budget, path = files
    assert CliRunner().invoke(command, ["-c", budget]).exit_code == 2
    run = CliRunner().invoke(command, ["-c", budget, str(tmp_path / "absent")])
    assert isinstance(run.exception, TimelineError) and run.exception.exit_code == 2
    lines = Path(path).read_text().splitlines()
    Path(path).write_text("\n".join([*lines, "{}"]))
    run = CliRunner().invoke(command, ["-c", budget, path])
    assert isinstance(run.exception, TraceError)

"""Replays of timelines: who would have hit a cap, when and by how much, and the smallest budget that fits."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from timelines import START, Clock, busy, plan_of, sample_of

from memguard import _budget
from memguard._base.types import Event, FrameworkSample, Plan, Sample
from memguard._base.units import GIB, MIB
from memguard._budget import policy
from memguard._devices.simulated import SimulatedHost
from memguard._timeline import Oom, Writer, load_timeline
from memguard._timeline.replay import Above, TimelineOutcome, replay_timeline
from memguard.cli.check import check
from memguard.cli.replay import replay as command
from memguard.errors import ConfigError, PlanError, TimelineError

PLAN = plan_of(torch="8GiB", cupy="4GiB", jax="4GiB", tensorflow="4GiB")


def usage(held: int | None, in_use: int | None, reclaimable: int | None = None) -> FrameworkSample:
    return FrameworkSample(held, in_use, reclaimable, 40 * GIB)


def of(outcome: TimelineOutcome, framework: str) -> Any:
    (row,) = (row for row in outcome.frameworks if row.framework == framework)
    return row


def test_refused_tight_and_cache_are_told_apart() -> None:
    torch = [
        usage(7 * GIB, 6 * GIB, 0),  # below its cap
        usage(9 * GIB, 6 * GIB, 3 * GIB),  # above it with idle memory only
        usage(10 * GIB, 6 * GIB, 4 * GIB),
        usage(10 * GIB, 7 * GIB, GIB),  # with pieces that live arrays keep from going back
        usage(12 * GIB, 9 * GIB, 3 * GIB),  # with live arrays
        usage(13 * GIB, 10 * GIB, 0),
        usage(8 * GIB, 8 * GIB, 0),  # at its cap
        usage(12 * GIB, 9 * GIB, None),
        usage(12 * GIB, 7 * GIB, None),
    ]
    outcome = replay_timeline([sample_of(PLAN, START + at, torch=row) for at, row in enumerate(torch)], PLAN)
    row = of(outcome, "torch")
    assert row.refused == Above(START + 4, 2, 3, 2 * GIB)
    assert row.fragments == Above(START + 3, 1, 1, GIB)
    assert row.cache == Above(START + 1, 2, 3, 4 * GIB)
    assert (row.cap, row.peak_held, row.peak_in_use, row.needs) == (8 * GIB, 13 * GIB, 10 * GIB, 13 * GIB)
    assert not outcome.fits and (outcome.samples, outcome.begin, outcome.end) == (9, START, START + 8)
    assert replay_timeline([sample_of(PLAN, START, torch=torch[1])], PLAN).fits, "cache that can go is no refusal"
    assert not replay_timeline([sample_of(PLAN, START, torch=torch[3])], PLAN).fits


@pytest.mark.parametrize("order", ["rfrf", "rcrc", "fcfc", "crfcrf"])
def test_each_way_above_a_cap_begins_anew_after_another(order: str) -> None:
    rows = {"r": usage(12 * GIB, 9 * GIB, 0), "f": usage(12 * GIB, GIB, GIB), "c": usage(12 * GIB, GIB, 9 * GIB)}
    row = of(
        replay_timeline([sample_of(PLAN, START + at, torch=rows[kind]) for at, kind in enumerate(order)], PLAN), "torch"
    )
    counts = {"r": row.refused.times, "f": row.fragments.times, "c": row.cache.times}
    assert counts == {kind: order.count(kind) for kind in "rfc"}


def test_pools_that_give_nothing_back_are_judged_by_what_is_in_use() -> None:
    """JAX and TensorFlow hold what they once had: a smaller pool would have served the same arrays."""
    jax, tensorflow = usage(9 * GIB, 3 * GIB, 0), usage(12 * GIB, GIB, 0)
    outcome = replay_timeline([sample_of(PLAN, START, jax=jax, tensorflow=tensorflow)], PLAN)
    assert outcome.fits and of(outcome, "jax").needs == 3 * GIB and of(outcome, "tensorflow").needs == GIB
    assert of(outcome, "jax").cache == Above(START, 1, 1, 5 * GIB)
    outcome = replay_timeline([sample_of(PLAN, START, jax=usage(9 * GIB, 5 * GIB, 0))], PLAN)
    assert of(outcome, "jax").refused == Above(START, 1, 1, GIB)


def test_a_framework_that_does_not_say_what_it_holds() -> None:
    samples = [sample_of(PLAN, START + at, tensorflow=usage(None, size, 0)) for at, size in enumerate([GIB, 5 * GIB])]
    outcome = replay_timeline(samples, PLAN)
    row = of(outcome, "tensorflow")
    assert row.refused == Above(START + 1, 1, 1, GIB) and row.peak_held is None and row.cache == Above()
    assert "tensorflow does not always say what it holds: it is judged by its live arrays" in outcome.notes
    assert "unknown" in outcome.render()
    silent = replay_timeline([sample_of(PLAN, START, torch=usage(None, None))], PLAN)
    assert silent.fits and of(silent, "torch").needs == 0 and silent.smallest is None
    held_only = replay_timeline([sample_of(PLAN, START, torch=usage(9 * GIB, None))], PLAN)
    assert of(held_only, "torch").refused.most == GIB


def test_a_framework_that_tells_nobody_what_it_refused() -> None:
    """Its 0 is only what the samples show. Once an error of it was seen, that is counted."""
    rows = {"torch": usage(GIB, GIB, 0), "jax": usage(GIB, GIB, 0), "tensorflow": usage(GIB, 0, 0)}
    silent = [
        f"{name} tells nobody what it refused: if the program caught the error, it is not counted"
        for name in ("tensorflow", "jax")
    ]
    sample = sample_of(PLAN, START, **rows)
    outcome = replay_timeline([sample], PLAN)
    assert {note for note in outcome.notes if "tells nobody" in note} == set(silent)
    seen = {"memory": "gpu", "requester": "jax", "uuid": PLAN.devices[0].device.uuid}
    outcome = replay_timeline([sample, Oom(START, seen)], PLAN)
    assert [note for note in outcome.notes if "tells nobody" in note] == silent[:1]
    idle = replay_timeline([sample_of(PLAN, START, torch=rows["torch"])], PLAN)
    assert not [note for note in idle.notes if "tells nobody" in note]


def test_what_a_budget_does_not_name_has_no_cap() -> None:
    outcome = replay_timeline([sample_of(PLAN, START, numba=usage(30 * GIB, 30 * GIB, 0))], PLAN)
    assert outcome.fits and of(outcome, "numba").cap is None
    assert "the budget does not name numba, so it would have had no cap" in outcome.notes


def elastic_plan(**bounds: tuple[int, int]) -> Plan:
    """Elastic shares of 10 GiB in all: min and max in GiB."""
    frameworks = {name: {"min": f"{least}GiB", "max": f"{most}GiB"} for name, (least, most) in bounds.items()}
    budget = {"version": 1, "device": {"limit": "12GiB", "reserve": "2GiB"}, "frameworks": frameworks}
    return policy.plan(_budget.from_mapping(budget), SimulatedHost(["h200"]).devices())


def test_an_elastic_share_is_compared_with_the_most_that_it_could_have() -> None:
    plan = elastic_plan(torch=(2, 6), cupy=(3, 10), numba=(1, 2))
    samples = [
        sample_of(plan, START, torch=usage(6 * GIB, 6 * GIB)),
        sample_of(plan, START + 1, cupy=usage(8 * GIB, 7 * GIB, GIB)),
        sample_of(plan, START + 2, cupy=usage(8 * GIB, 8 * GIB), torch=usage(GIB, GIB)),
        sample_of(plan, START + 3, torch=usage(7 * GIB, 7 * GIB)),
    ]
    outcome = replay_timeline(samples[:2], plan)
    assert outcome.fits and [of(outcome, name).cap for name in ("torch", "cupy")] == [6 * GIB, 7 * GIB]
    assert of(outcome, "cupy").cache.times == 1
    outcome = replay_timeline(samples, plan)
    assert (of(outcome, "torch").refused.times, of(outcome, "cupy").refused.times) == (1, 1) and not outcome.fits
    assert "torch and cupy could take what is spare: the cap is the most that it could rise to" in outcome.notes


def test_elastic_shares_that_would_have_needed_the_same_bytes_do_not_fit() -> None:
    plan = elastic_plan(torch=(2, 8), cupy=(2, 8))
    needs = [(8, 2), (8, 1), (7, 4), (6, 6), (2, 8), (5, 6)]
    samples = [
        sample_of(plan, START + at, torch=usage(a * GIB, a * GIB), cupy=usage(b * GIB, b * GIB))
        for at, (a, b) in enumerate(needs)
    ]
    outcome = replay_timeline(samples, plan)
    assert not any(row.refused.times for row in outcome.frameworks)
    together = outcome.devices[0].together
    assert (together.first, together.times, together.samples, together.most) == (START + 2, 2, 3, 2 * GIB)
    assert not outcome.fits
    said = " ".join(outcome.render().split())
    assert "GPU 0: elastic frameworks would together have needed more than there is for them 2 times, first" in said
    assert replay_timeline(samples[:2], plan).fits
    plan = elastic_plan(torch=(2, 8), cupy=(2, 8), numba=(1, 8))
    both = sample_of(plan, START, torch=usage(5 * GIB, 5 * GIB), cupy=usage(5 * GIB, 5 * GIB), numba=usage(0, 0))
    assert not replay_timeline([both], plan).fits, "what one does not use of its min is not the others'"


def test_overhead_is_compared_with_the_reserve() -> None:
    first = sample_of(PLAN, START, torch=usage(GIB, GIB, 0))
    (row,) = first.devices
    samples = [first, *(Sample(START + at, (row._replace(overhead=3 * GIB),)) for at in (1, 2))]
    (gpu,) = replay_timeline(samples, PLAN).devices
    assert gpu.overhead == Above(START + 1, 1, 2, GIB) and gpu.outside == 3 * GIB
    assert "overhead is above the reserve once, first 1.000 s after" in replay_timeline(samples, PLAN).render()


def test_what_nobody_accounts_for_goes_into_the_reserve_unless_a_pool_may_hold_it() -> None:
    def outside(held: int | None) -> int:
        sample = sample_of(PLAN, START, torch=usage(GIB, GIB, 0), tensorflow=usage(held, GIB, 0))
        row = sample.devices[0]._replace(unaccounted=GIB)
        return replay_timeline([sample._replace(devices=(row,))], PLAN).devices[0].outside

    assert outside(2 * GIB) == 2 * GIB and outside(None) == GIB


def test_several_gpus_and_one_that_the_plan_does_not_have() -> None:
    plan = plan_of("h200", "h200", torch="8GiB", jax="20GiB")
    samples = [
        sample_of(plan, START, gpu=0, torch=usage(9 * GIB, 9 * GIB, 0)),
        sample_of(plan, START + 1, gpu=1, torch=usage(2 * GIB, 2 * GIB, 0), jax=usage(30 * GIB, 30 * GIB, 0)),
    ]
    stranger = samples[0].devices[0]._replace(uuid="GPU-other")
    outcome = replay_timeline([*samples, Sample(START + 2, (stranger,))], plan)
    refused = {(row.framework, row.device): row.refused.times for row in outcome.frameworks}
    assert refused == {("torch", 0): 1, ("torch", 1): 0, ("jax", 1): 1}
    assert "GPUs that are not in the budget's plan are left out: GPU-other" in outcome.notes
    assert outcome.smallest is not None and outcome.smallest.limits == {"jax": 30 * GIB, "torch": 9 * GIB}


def test_peaks_on_different_gpus_that_no_budget_can_hold() -> None:
    plan = plan_of("h200", "h200", torch="8GiB", jax="20GiB")
    samples = [
        sample_of(plan, START, gpu=0, torch=usage(100 * GIB, 100 * GIB, 0)),
        sample_of(plan, START, gpu=1, jax=usage(100 * GIB, 100 * GIB, 0)),
    ]
    outcome = replay_timeline(samples, plan)
    assert outcome.smallest is not None and "they peaked on different ones" in (outcome.smallest.problem or "")
    assert "version: 1" not in outcome.render() and "use several processes" in " ".join(outcome.render().split())


def test_errors_and_nothing_at_all() -> None:
    outcome = replay_timeline([Oom(START, {}), Event(START, "oom", "x"), Oom(START, {})], PLAN)
    assert outcome.samples == 0 and outcome.smallest is None and outcome.fits
    assert any(note.startswith("memory was refused 2 times during the recording") for note in outcome.notes)
    assert "0 samples over 0.000 s" in outcome.render()


sizes = st.integers(0, 10 * GIB)


@st.composite
def runs(draw: st.DrawFn) -> list[Sample]:
    samples = []
    for at in range(draw(st.integers(1, 12))):
        frameworks = {}
        for name in draw(st.sets(st.sampled_from(["torch", "jax", "tensorflow", "cupy"]))):
            in_use = draw(sizes)
            held = draw(st.none() | st.integers(in_use, 15 * GIB))
            idle = None if held is None else draw(st.none() | st.integers(0, held - in_use))
            frameworks[name] = usage(held, in_use, idle)
        sample = sample_of(PLAN, START + at, **frameworks)
        row = sample.devices[0]._replace(overhead=draw(sizes), unaccounted=draw(st.none() | sizes))
        samples.append(sample._replace(devices=(row,)))
    return samples


@given(runs())
def test_the_smallest_budget_fits_and_a_page_less_does_not(samples: list[Sample]) -> None:
    smallest = replay_timeline(samples, PLAN).smallest
    if smallest is None:
        assert all(not usage.held and not usage.in_use for s in samples for usage in s.devices[0].frameworks.values())
        return
    gpu = PLAN.devices[0].device
    plan = policy.plan(_budget.parse(smallest.yaml()), [gpu])
    outcome = replay_timeline(samples, plan)
    assert outcome.fits and not any(row.overhead.times for row in outcome.devices)
    assert not any(row.cap is None for row in outcome.frameworks if row.peak_held or row.peak_in_use)
    for name, limit in smallest.limits.items():
        if limit > 2 * MIB:
            entry = f"  {name}: {{limit: {limit // MIB}MiB}}"
            assert entry in smallest.yaml()
            less = smallest.yaml().replace(entry, f"  {name}: {{limit: {limit // MIB - 2}MiB}}")
            assert not replay_timeline(samples, policy.plan(_budget.parse(less), [gpu])).fits


def recorded(folder: Path, samples: list[Sample]) -> Path:
    with Writer(folder / "{rank}.jsonl", PLAN, clock=Clock()) as out:
        for sample in samples:
            out.sample(sample)
    return Path(out.path)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    steps = [usage(12 * GIB, size * GIB, (12 - size) * GIB) for size in (6, 9, 6, 12, 5)]
    samples = [sample_of(PLAN, START + at, torch=step) for at, step in enumerate(steps)]
    budget = tmp_path / "other.yaml"
    budget.write_text("version: 1\nframeworks:\n  torch: {limit: 8GiB}\n  cupy: {limit: 1GiB}\n")
    return str(recorded(tmp_path, samples)), str(budget)


def test_the_command(files: tuple[str, str], tmp_path: Path) -> None:
    timeline, budget = files
    run = CliRunner().invoke(command, [timeline, "-c", budget])
    said = " ".join(run.output.split())
    assert run.exit_code == 1, run.output
    assert max(map(len, run.output.splitlines())) <= 80
    assert "replay of 5 samples over 4.000 s (simulated GPUs), under the budget's caps" in said
    assert (
        "torch on GPU 0 would have been refused 2 times, first 1.000 s after the start (2025-11-21 15:00:01 UTC), "
        "by 4.00 GiB at the most" in said
    )
    assert "torch on GPU 0 would have had to give back idle cache 3 times, first 0.000 s" in said
    assert "after the first refusal the program would have behaved differently" in said
    assert "limit: 13312MiB, reserve: 1024MiB" in said and "torch: {limit: 12288MiB}" in said
    run = CliRunner().invoke(command, [timeline, "-c", budget, "--json"])
    plain = json.loads(run.output)
    assert run.exit_code == 1 and plain["fits"] is False and plain["simulated"] is True
    assert plain["frameworks"][0]["refused"] == {"first": START + 1, "times": 2, "samples": 2, "most": 4 * GIB}
    run = CliRunner().invoke(command, [timeline, "--without-budget"])
    assert "under the caps it was recorded with" in " ".join(run.output.split())


def test_the_smallest_budget_is_one_that_check_accepts(files: tuple[str, str], tmp_path: Path) -> None:
    run = CliRunner().invoke(command, [files[0], "--smallest"])
    assert run.exit_code == 0, run.output
    smallest = tmp_path / "smallest.yaml"
    smallest.write_text(run.output)
    checked = CliRunner().invoke(check, [str(smallest)])
    assert checked.exit_code == 0 and ": ok" in checked.output
    run = CliRunner().invoke(command, [files[0], "-c", str(smallest)])
    assert run.exit_code == 0 and "refused once" not in run.output
    run = CliRunner().invoke(command, [files[0], "--smallest", "--json"])
    assert json.loads(run.output)["version"] == 1
    assert _budget.parse(run.output) == _budget.parse(smallest.read_text())


def test_the_command_with_wrong_input(files: tuple[str, str], tmp_path: Path) -> None:
    timeline, budget = files

    def error(*arguments: str) -> BaseException | None:
        return CliRunner().invoke(command, list(arguments)).exception

    assert isinstance(error(str(tmp_path / "absent"), "-c", budget), TimelineError)
    assert isinstance(error(timeline, "-c", str(tmp_path / "absent")), ConfigError)
    Path(budget).write_text("version: 1\nframeworks: {torch: {limit: 900GiB}}\n")
    assert isinstance(error(timeline, "-c", budget), PlanError)
    (empty := tmp_path / "empty").mkdir()
    assert "no framework held anything" in str(error(str(recorded(empty, [])), "--smallest"))
    with open(timeline, "a") as file:
        file.write("{}\n")
    assert f"{timeline}:8: t: None is not a time" in str(error(timeline))
    run = CliRunner().invoke(command, [timeline, budget])
    assert run.exit_code == 2 and f"memguard replay -c {budget} {timeline}" in run.output.replace("\n", "")


def test_peaks_that_were_thinned_out_still_decide(tmp_path: Path) -> None:
    """The smallest budget of a run whose oldest samples are gone is that of the whole run."""
    rng = random.Random(4)
    six = plan_of()
    samples = [busy(six, START + at, rng) for at in range(4000)]
    samples[100] = sample_of(six, START + 100, torch=usage(20 * GIB, 12 * GIB, 2 * GIB), jax=usage(9 * GIB, 8 * GIB, 0))
    with Writer(tmp_path / "{rank}.jsonl", six, limit_bytes=1 << 19) as out:
        for sample in samples:
            out.sample(sample)
    timeline = load_timeline(out.path)
    assert timeline.dropped.samples > 1500
    thinned, whole = replay_timeline(timeline.records(), six).smallest, replay_timeline(samples, six).smallest
    assert thinned == whole and whole is not None and whole.limits["torch"] == 18 * GIB


REPLAYED = """
import sys
from memguard import cli
try:
    cli.main.main(["replay", *sys.argv[1:]], prog_name="memguard")
except SystemExit as ended:
    assert ended.code in (0, 1), ended.code
# Not ru_maxrss: a child begins with the peak of the process that started it.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM:")), file=sys.stderr)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ten_times_as_many_samples_take_no_more_memory(tmp_path: Path) -> None:
    six, rng, peaks = plan_of(), random.Random(7), []
    budget = tmp_path / "other.yaml"
    frameworks = {name: {"limit": "2GiB"} for name in six.devices[0].caps}
    budget.write_text(json.dumps({"version": 1, "frameworks": frameworks}))
    for count in (2_000, 20_000):
        with Writer(tmp_path / f"{count}.{{rank}}.jsonl", six, limit_bytes=1 << 30) as out:
            for at in range(count):
                out.sample(busy(six, START + at / 2, rng))
        done = subprocess.run(
            [sys.executable, "-c", REPLAYED, str(out.path), "-c", str(budget), "--json"],
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
        told = json.loads(done.stdout)
        assert told["samples"] == count and all(row["refused"]["times"] > 0 for row in told["frameworks"])
        peaks.append(int(done.stderr.split()[-1]))
    assert peaks[1] <= 1.1 * peaks[0], "the most that the process held, in KiB"


def test_the_documented_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document's timeline under its budget prints what the document says."""
    text = (Path(__file__).parents[2] / "docs" / "timeline.md").read_text()

    def block(kind: str) -> str:
        return text.split(f"```{kind}\n")[1].split("```")[0]

    line, _, said = block("console").partition("\n")
    monkeypatch.chdir(tmp_path)
    Path("run-4711-0.jsonl").write_text(block("json"))
    Path("other.yaml").write_text(block("yaml"))
    assert line.startswith("$ memguard replay ")
    run = CliRunner().invoke(command, line.split()[3:])
    assert run.exit_code == 1 and run.output == said
